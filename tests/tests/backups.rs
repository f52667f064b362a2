//! Backups of several disks contain one moment at their start, while clients write: copies, exports over NBD, checkpoints. A model replays
//! the writes. Needs: qemu-img, nbdcopy, nbdinfo. Takes: 20 s.
#![forbid(unsafe_code)]

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use control::objects::{Backup, Bitmap, JobState};
use end_to_end::{Context, Result, Rig, bail, ensure};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, Range, status};

#[path = "backups/sequences.rs"]
mod sequences;

const SIZE: u64 = 8 << 20;
const BLOCK: u64 = 4096;
const BLOCKS: u64 = SIZE / BLOCK;
const DISKS: [&str; 2] = ["d0", "d1"];

fn run(folder: &Path, words: &[&str]) -> Result<String> {
    let mut command = Command::new(words[0]);
    let ran = command.args(&words[1..]).current_dir(folder).output();
    let ran = ran.context("a tool is missing; hint: apt-get install qemu-utils libnbd-bin")?;
    let text = [ran.stdout, ran.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    ensure!(ran.status.success(), "{words:?}: {text}");
    Ok(text)
}

/// A raw file and an image.
fn two_disks() -> Result<Rig> {
    Rig::prepared(|scratch, daemon| {
        let (file, image) = (scratch.file("d0.raw"), scratch.file("d1.qcow2"));
        let size = SIZE.to_string();
        let path = image.display().to_string();
        let create = ["qemu-img", "create", "-q", "-f", "qcow2", &path, &size];
        run(scratch.files(), &create)?;
        let d0 = format!("d0=file:{},size={SIZE},cache=writeback", file.display());
        let d1 = format!("d1=image:{path},cache=writeback");
        let daemon = daemon.disk(&d0).disk(&d1);
        let daemon = daemon.vhost_blk("d0").vhost_blk("d1");
        Ok(daemon.arguments(["--workers", "2"]))
    })
}

/// A change of one disk: blocks, and their new byte.
#[derive(Clone, Copy)]
struct Change {
    disk: usize,
    first: u64,
    blocks: u64,
    byte: u8,
}

impl Change {
    /// Returns change `number` of the sequence. Zeroes are written without data.
    fn of(number: usize) -> Change {
        let mut random = fastrand::Rng::with_seed(number as u64);
        let first = random.u64(0..BLOCKS);
        let (is_zero, most) = match random.u8(0..8) {
            0 => (true, 300),
            _ => (false, 6),
        };
        let byte = if is_zero { 0 } else { random.u8(1..) };
        let blocks = random.u64(1..=most).min(BLOCKS - first);
        let disk = number % DISKS.len();
        Change {
            disk,
            first,
            blocks,
            byte,
        }
    }

    fn apply(&self, contents: &mut [Vec<u8>; 2]) {
        let bytes = (self.first * BLOCK) as usize..((self.first + self.blocks) * BLOCK) as usize;
        contents[self.disk][bytes].fill(self.byte);
    }
}

/// A client that makes the changes one after the other, alternately on both disks.
struct Writer<'a> {
    rig: &'a Rig,
    /// Number of changes that were started, and that were acknowledged.
    started: AtomicUsize,
    acknowledged: AtomicUsize,
    is_over: AtomicBool,
}

impl Writer<'_> {
    fn work(&self) -> Result<()> {
        let mut ends = Vec::new();
        for disk in DISKS {
            let mut front_end = FrontEnd::connect(&self.rig.socket(disk), &Options::default())?;
            let options = QueueOptions::default();
            let layout = Layout::Separate;
            let queue = BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, layout)?;
            ends.push((queue, front_end));
        }
        while !self.is_over.load(Ordering::SeqCst) {
            let number = self.started.fetch_add(1, Ordering::SeqCst);
            let Change {
                disk,
                first,
                blocks,
                byte,
            } = Change::of(number);
            let (queue, _) = &mut ends[disk];
            let status = match byte {
                0 => queue.write_zeroes(&[Range {
                    sector: first * BLOCK / 512,
                    sectors: (blocks * BLOCK / 512) as u32,
                    flags: 1,
                }])?,
                _ => queue.write(first * BLOCK, &vec![byte; (blocks * BLOCK) as usize])?,
            };
            ensure!(status == status::OK, "change {number}: status {status}");
            self.acknowledged.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_micros(200));
        }
        Ok(())
    }

    fn now(&self) -> (usize, usize) {
        let acknowledged = self.acknowledged.load(Ordering::SeqCst);
        (acknowledged, self.started.load(Ordering::SeqCst))
    }

    /// Waits until clients have made more changes.
    fn wait(&self, changes: usize) {
        let until = self.now().0 + changes;
        while self.now().0 < until && !self.is_over.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Checks that both contents are those after the same number of changes, which is in a range.
fn check_moment(found: &[Vec<u8>; 2], earliest: usize, latest: usize) -> Result<()> {
    let mut model = [vec![0; SIZE as usize], vec![0; SIZE as usize]];
    for number in 0..=latest {
        if number >= earliest && model == *found {
            return Ok(());
        }
        Change::of(number).apply(&mut model);
    }
    bail!("no moment between changes {earliest} and {latest} has this content")
}

fn raw(rig: &Rig, source: &str, format: &str) -> Result<Vec<u8>> {
    let folder = rig.scratch.files();
    run(
        folder,
        &[
            "qemu-img",
            "convert",
            "-f",
            format,
            "-O",
            "raw",
            source,
            "restored.raw",
        ],
    )?;
    Ok(std::fs::read(folder.join("restored.raw"))?)
}

fn restored(rig: &Rig, name: &str) -> Result<[Vec<u8>; 2]> {
    let of = |disk: &str| raw(rig, &format!("backup/{disk}-{name}.qcow2"), "qcow2");
    Ok([of("d0")?, of("d1")?])
}

fn begin(rig: &Rig, words: &[&str]) -> Result<()> {
    let words = [&["backup", "begin", "d0", "d1"], words].concat();
    rig.daemon.lunette(&words).map(drop)
}

fn folder(rig: &Rig) -> Result<PathBuf> {
    let folder = rig.scratch.file("backup");
    std::fs::create_dir_all(&folder)?;
    Ok(folder)
}

/// Copies both disks: everything, the changes, and the changes since an older checkpoint. Clients overwrite most of the disks meanwhile.
fn check_copies(rig: &Rig, writer: &Writer<'_>) -> Result<()> {
    let target = folder(rig)?.display().to_string();
    for (name, since) in [("mon", None), ("tue", Some("mon")), ("wed", Some("mon"))] {
        let mut words = vec!["--to", &target, "--checkpoint", name, "--speed", "16M"];
        words.extend(since.into_iter().flat_map(|since| ["--since", since]));
        let (earliest, _) = writer.now();
        begin(rig, &words)?;
        let (_, latest) = writer.now();
        for disk in DISKS {
            rig.daemon.lunette(&["job", "wait", disk])?;
        }
        ensure!(writer.now().0 > latest, "no client wrote during the copy");
        let found = restored(rig, name)?;
        check_moment(&found, earliest, latest).with_context(|| format!("copy {name}"))?;
    }
    Ok(())
}

/// Reads both disks over NBD, and compares the dirty extents with the copy of their checkpoint.
fn check_pull(rig: &Rig, writer: &Writer<'_>) -> Result<()> {
    let socket = rig.scratch.socket("backup.sock");
    let pull = format!("unix:{}", socket.display());
    let folder = rig.scratch.files();
    let (earliest, _) = writer.now();
    let words = "--since wed --checkpoint thu --name pull".split(' ');
    let words: Vec<&str> = words.chain(["--pull", &pull]).collect();
    begin(rig, &words)?;
    let (_, latest) = writer.now();
    writer.wait(200);
    let url = |disk: &str| format!("nbd+unix:///{disk}?socket={}", socket.display());
    let read = |disk: &str| -> Result<Vec<u8>> {
        run(folder, &["nbdcopy", &url(disk), "pulled.raw"])?;
        Ok(std::fs::read(folder.join("pulled.raw"))?)
    };
    let pulled = [read("d0")?, read("d1")?];
    check_moment(&pulled, earliest, latest).context("pull")?;
    let mut patched = restored(rig, "wed")?;
    for (index, disk) in DISKS.into_iter().enumerate() {
        let words = ["nbdinfo", "--map=qemu:dirty-bitmap:wed", &url(disk)];
        for line in run(folder, &words)?.lines() {
            let mut words = line.split_whitespace();
            let mut number = || words.next().and_then(|word| word.parse::<usize>().ok());
            let (start, length) = (number().context("start")?, number().context("length")?);
            if number() == Some(1) {
                let bytes = start..start + length;
                patched[index][bytes.clone()].copy_from_slice(&pulled[index][bytes]);
            }
        }
    }
    ensure!(patched == pulled, "the dirty bitmap lacks changes");
    rig.daemon.lunette(&["backup", "end", "pull"])?;
    ensure!(!socket.exists(), "the socket was not removed");
    let words = "backup begin d0 d1 --checkpoint thu --pull".split(' ');
    let words: Vec<&str> = words.chain([pull.as_str()]).collect();
    refused(rig, &words, "checkpoint thu exists")
}

/// A chain of copies and an export, under a load that overwrites the disks several times.
#[test]
fn backups_contain_one_moment_at_their_start() -> Result<()> {
    let rig = two_disks()?;
    let writer = Writer {
        rig: &rig,
        started: AtomicUsize::new(0),
        acknowledged: AtomicUsize::new(0),
        is_over: AtomicBool::new(false),
    };
    std::thread::scope(|scope| -> Result<()> {
        let thread = scope.spawn(|| {
            let worked = writer.work();
            writer.is_over.store(true, Ordering::SeqCst);
            worked
        });
        writer.wait(100);
        let checked = check_copies(&rig, &writer).and_then(|()| check_pull(&rig, &writer));
        writer.is_over.store(true, Ordering::SeqCst);
        thread.join().expect("the writer does not panic")?;
        checked
    })?;
    let report = rig.daemon.lunette(&["disk", "bitmap", "list", "--json"])?;
    let all: Vec<Bitmap> = serde_json::from_str(&report)?;
    let names: Vec<&str> = all.iter().map(|one| one.name.as_str()).collect();
    ensure!(
        names == ["mon", "thu", "tue", "wed", "mon", "thu", "tue", "wed"],
        "{names:?}"
    );
    Ok(())
}

fn backups(rig: &Rig) -> Result<Vec<Backup>> {
    let report = rig.daemon.lunette(&["backup", "list", "--json"])?;
    Ok(serde_json::from_str(&report)?)
}

fn refused(rig: &Rig, words: &[&str], expected: &str) -> Result<()> {
    let output = rig.daemon.ask(words)?;
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(
        !output.status.success() && stderr.contains(expected),
        "{words:?}: {stderr}"
    );
    Ok(())
}

fn write(rig: &Rig, block: u64, blocks: u64, byte: u8) -> Result<()> {
    let mut front_end = FrontEnd::connect(&rig.socket("d0"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, Layout::Separate)?;
    for at in (block..block + blocks).step_by(64) {
        let blocks = (block + blocks - at).min(64);
        let written = queue.write(at * BLOCK, &vec![byte; (blocks * BLOCK) as usize])?;
        ensure!(written == status::OK, "block {at}: status {written}");
    }
    Ok(())
}

/// Names of scratch files in a folder, and of the daemon's open scratch files.
fn scratch_files(rig: &mut Rig) -> Result<(usize, usize)> {
    let mut named = 0;
    for entry in std::fs::read_dir(rig.scratch.files())? {
        named += usize::from(entry?.file_name().to_string_lossy().ends_with(".scratch"));
    }
    Ok((named, open_scratch_files(rig, "")?))
}

/// Returns the number of the daemon's open scratch files below a folder.
fn open_scratch_files(rig: &mut Rig, folder: &str) -> Result<usize> {
    let mut open = 0;
    let pid = rig.daemon.process().id();
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        let link = std::fs::read_link(entry?.path()).unwrap_or_default();
        let link = link.to_string_lossy();
        // A file that never had a name is shown with the number of its inode.
        let is_unnamed = link.contains("/#") || link.contains("/.lunette-");
        open += usize::from(link.starts_with(folder) && is_unnamed && link.ends_with(" (deleted)"));
    }
    Ok(open)
}

/// Checks that no backup has left a scratch file or a checkpoint.
fn nothing_is_left(rig: &mut Rig) -> Result<()> {
    ensure!(scratch_files(rig)? == (0, 0), "a scratch file is left");
    let bitmaps = rig.daemon.lunette(&["disk", "bitmap", "list", "--json"])?;
    ensure!(bitmaps.trim() == "[]", "{bitmaps}");
    Ok(())
}

fn refuses_addresses_without_a_free_port(rig: &Rig) -> Result<()> {
    refused(
        rig,
        &["backup", "begin", "d0", "--pull", "tcp:127.0.0.1:0"],
        "has port 0",
    )?;
    let listener = std::net::TcpListener::bind("127.0.0.1:0")?;
    let address = listener.local_addr()?;
    let taken = format!("tcp:{address}");
    refused(
        rig,
        &["backup", "begin", "d0", "--pull", &taken],
        &format!("cannot listen on {address}: Address already in use"),
    )
}

/// Clients find the disk under its name, and its point in time under another one.
fn pull_at_the_address_of_the_disk_itself(rig: &Rig, socket: &Path, pull: &str) -> Result<()> {
    let export = format!("d0:{},name=live,export_name=d0", socket.display());
    rig.daemon.lunette(&["export", "add", "nbd", &export])?;
    begin(rig, &["--pull", pull, "--name", "b"])?;
    for (name, is_read_only) in [("d0", "false"), ("d0@b", "true"), ("d1", "true")] {
        let url = format!("nbd+unix:///{name}?socket={}", socket.display());
        let found = run(rig.scratch.files(), &["nbdinfo", &url])?;
        let expected = format!("is_read_only: {is_read_only}");
        ensure!(found.contains(&expected), "{name}: {found}");
    }
    let jobs = backups(rig)?.pop().context("no backup")?.jobs;
    let url = jobs[0].target.as_deref().unwrap_or_default();
    ensure!(url.contains("///d0@b?"), "{url}");
    rig.daemon.lunette(&["backup", "cancel", "b"])?;
    rig.daemon.lunette(&["export", "remove", "live"]).map(drop)
}

/// Begins backup `p` with scratch files in a folder that has a link with a name of version 0.9, which followed it.
fn begin_beside_a_link(rig: &mut Rig, pull: &str, folder: &str) -> Result<()> {
    let victim = rig.scratch.file("victim");
    std::fs::write(&victim, "")?;
    let guessed = format!(".lunette-d0-{}-0.scratch", rig.daemon.process().id());
    std::os::unix::fs::symlink(&victim, Path::new(folder).join(guessed))?;
    let pulled = ["--pull", pull, "--checkpoint", "mon", "--name", "p"];
    begin(rig, &[&pulled[..], &["--scratch", folder]].concat())?;
    let named = std::fs::read_dir(folder)?.count();
    ensure!(named == 1, "a scratch file has a name");
    ensure!(std::fs::metadata(&victim)?.len() == 0, "a link is followed");
    Ok(())
}

#[test]
fn impossible_backups_and_conflicting_jobs_are_refused() -> Result<()> {
    let mut rig = two_disks()?;
    let socket = rig.scratch.socket("backup.sock");
    let pull = format!("unix:{}", socket.display());
    pull_at_the_address_of_the_disk_itself(&rig, &socket, &pull)?;
    refused(
        &rig,
        &["backup", "begin", "d0", "--pull", &pull, "--since", "mon"],
        "no checkpoint `mon`",
    )?;
    refused(
        &rig,
        &["backup", "begin", "d0", "d0", "--pull", &pull],
        "d0 is named twice",
    )?;
    refused(
        &rig,
        &["backup", "begin", "d0", "--pull", "nonsense"],
        "unix:PATH, or tcp:IP:PORT",
    )?;
    refuses_addresses_without_a_free_port(&rig)?;
    refused(
        &rig,
        &["backup", "begin", "d0", "nodisk", "--pull", &pull],
        "nodisk",
    )?;
    let shared = rig.scratch.file("shared.raw").display().to_string();
    let shared = format!("d2=file:{shared},size=1M,lock=while-active");
    rig.daemon.lunette(&["disk", "add", &shared])?;
    refused(
        &rig,
        &["backup", "begin", "d2", "--pull", &pull],
        "because lock=while-active",
    )?;
    let pulled = ["backup", "begin", "d0", "--pull", &pull];
    for (option, expected) in [
        ("--name=-rf", "not a valid backup name"),
        ("--checkpoint=..", "not a valid bitmap name"),
    ] {
        refused(&rig, &[&pulled[..], &[option]].concat(), expected)?;
    }
    let client = control::Client::new(&rig.daemon.control());
    let body = serde_json::json!({ "disks": [{ "disk": "d0" }], "pull": pull, "scratch": "" });
    let answer = client.change(control::Method::POST, "/v1/backups", Some(&body));
    let error = answer.err().context("a scratch folder without a name")?;
    ensure!(error.to_string().contains("scratch is empty"), "{error}");
    let missing = ["backup", "begin", "d0", "--to", "/missing/folder"];
    refused(&rig, &missing, "the folder does not exist")?;
    let elsewhere = rig.scratch.file("elsewhere").display().to_string();
    std::fs::create_dir(&elsewhere)?;
    begin_beside_a_link(&mut rig, &pull, &elsewhere)?;
    let (named, open) = scratch_files(&mut rig)?;
    ensure!(named == 0, "a scratch file has a name");
    ensure!(open >= 2 && open_scratch_files(&mut rig, &elsewhere)? == open);
    let status = rig.daemon.ask(&["status"])?;
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    let line = "backup p of disk d0, disk d1: waits for lunette backup end p";
    ensure!(status.contains(line), "{status}");
    for words in [["job", "pause", "d0"], ["job", "cancel", "d0"]] {
        refused(&rig, &words, "lunette backup cancel p")?;
    }
    refused(&rig, &["job", "speed", "d0", "1M"], "lunette backup end p")?;
    let overlay = rig.scratch.file("o.qcow2").display().to_string();
    let moved = format!("file:{}", rig.scratch.file("moved.raw").display());
    let conflicts: [&[&str]; 6] = [
        &["disk", "resize", "d0", "16M"],
        &["disk", "snapshot", "d0", "--to", &overlay],
        &["disk", "mirror", "d0", &moved],
        &["disk", "backup", "d0", &moved],
        &["disk", "remove", "d0", "--force"],
        &["backup", "begin", "d1", "--pull", &pull, "--name", "other"],
    ];
    for words in conflicts {
        refused(&rig, words, "has a running backup")?;
        refused(&rig, words, "lunette backup end p")?;
    }
    refused(&rig, &["upgrade"], "jobs would end")
}

/// A backup of many disks is cancelled or ended at different moments of its beginning: each affects all disks or none.
#[test]
fn cancel_and_end_of_a_beginning_backup_concern_all_its_disks() -> Result<()> {
    const MANY: usize = 24;
    let rig = Rig::prepared(|_, daemon| {
        let disks = (0..MANY).map(|disk| format!("r{disk}=ram:64K"));
        let daemon = disks.fold(daemon, |daemon, disk| daemon.disk(&disk));
        Ok(daemon.vhost_blk("r0"))
    })?;
    let socket = rig.scratch.file("pull.sock").display().to_string();
    let names: Vec<String> = (0..MANY).map(|disk| format!("r{disk}")).collect();
    let mut words = vec!["backup", "begin"];
    words.extend(names.iter().map(String::as_str));
    let pull = format!("unix:{socket}");
    words.extend(["--pull", &pull, "--name", "b", "--checkpoint"]);
    for round in 0..6 {
        let checkpoint = format!("c{round}");
        let words = [&words[..], &[&checkpoint]].concat();
        let word = ["cancel", "end"][round % 2];
        let begun = std::thread::scope(|scope| -> Result<bool> {
            let begin = scope.spawn(|| rig.daemon.lunette(&words).is_ok());
            // Ended jobs of the round before are listed, too.
            let prepared = || -> Result<usize> {
                let all = backups(&rig)?;
                let jobs = all.iter().flat_map(|one| &one.jobs);
                Ok(jobs.filter(|job| job.state == JobState::Running).count())
            };
            while prepared()? < round * MANY / 8 && !begin.is_finished() {}
            rig.daemon.lunette(&["backup", word, "b"]).ok();
            Ok(begin.join().expect("no panic"))
        })?;
        let states = || -> Result<Vec<JobState>> {
            let all = backups(&rig)?;
            Ok(all
                .iter()
                .flat_map(|one| &one.jobs)
                .map(|job| job.state)
                .collect())
        };
        let mut found = states()?;
        while begun && found.contains(&JobState::Running) {
            found = states()?;
        }
        let is_over = |state: &JobState| matches!(state, JobState::Cancelled | JobState::Done);
        let all = |state| found.len() == MANY && found.iter().all(|one| *one == state);
        // A backup that has not begun leaves the records of the one before.
        let has_ended = all(JobState::Cancelled) || all(JobState::Done);
        let is_whole = match begun {
            false => found.iter().all(is_over),
            true => has_ended || all(JobState::Ready),
        };
        ensure!(is_whole, "round {round}, begun {begun}: {found:?}");
        if begun && all(JobState::Ready) {
            rig.daemon.lunette(&["backup", "cancel", "b"])?;
        }
        ensure!(!Path::new(&socket).exists());
    }
    // Two backups begin with the same name at the same time.
    let (first, second) = names.split_at(MANY / 2);
    for _ in 0..3 {
        let begin = |disks: &[String]| {
            let disks = disks.iter().map(String::as_str);
            let words = ["backup", "begin"].into_iter().chain(disks);
            let words: Vec<&str> = words.chain(["--pull", &pull, "--name", "b"]).collect();
            rig.daemon.lunette(&words).is_ok()
        };
        let begun = std::thread::scope(|scope| {
            let first = scope.spawn(|| begin(first));
            (begin(second), first.join().expect("no panic"))
        });
        ensure!(begun.0 != begun.1, "{begun:?}");
        rig.daemon.lunette(&["backup", "cancel", "b"])?;
    }
    Ok(())
}

/// A full scratch file, a cancelled and a killed backup: the disks are unharmed, and no checkpoint is created.
#[test]
fn failed_backup_leaves_disks_and_checkpoints() -> Result<()> {
    let mut rig = two_disks()?;
    let socket = rig.scratch.socket("backup.sock");
    let pull = format!("unix:{}", socket.display());
    write(&rig, 0, 512, 1)?;
    let words = "--checkpoint mon --scratch-limit 1M --name small".split(' ');
    let words: Vec<&str> = words.chain(["--pull", &pull]).collect();
    begin(&rig, &words)?;
    write(&rig, 0, 512, 2)?;
    let url = format!("nbd+unix:///d0?socket={}", socket.display());
    let is_lost = vm::wait_until(Duration::from_secs(30), || {
        let all = backups(&rig).ok()?;
        let jobs = all.last()?.jobs.iter();
        let mut failed = jobs.filter(|job| job.state == JobState::Failed);
        failed.next().and_then(|job| job.reason.clone())
    });
    let reason = is_lost.context("the backup has not failed")?;
    ensure!(reason.contains("limit of 1048576 bytes"), "{reason}");
    ensure!(run(rig.scratch.files(), &["nbdinfo", &url]).is_err());
    refused(&rig, &["backup", "end", "small"], "has failed on disk d0")?;
    // The other disk is still served.
    let other = format!("nbd+unix:///d1?socket={}", socket.display());
    run(rig.scratch.files(), &["nbdinfo", &other])?;
    rig.daemon.lunette(&["backup", "cancel", "small"])?;
    nothing_is_left(&mut rig)?;
    // A cancelled copy leaves no partial image, and an image of another backup is not overwritten.
    let target = folder(&rig)?.display().to_string();
    begin(&rig, &["--to", &target, "--speed", "1K", "--name", "small"])?;
    rig.daemon.lunette(&["backup", "cancel", "small"])?;
    ensure!(
        !rig.scratch.file("backup/d0.qcow2").exists(),
        "an image is left"
    );
    std::fs::write(rig.scratch.file("backup/d0.qcow2"), "")?;
    refused(
        &rig,
        &["backup", "begin", "d0", "--to", &target],
        "exists already",
    )?;
    // A killed daemon.
    begin(&rig, &["--pull", &pull, "--checkpoint", "mon"])?;
    write(&rig, 100, 512, 3)?;
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    nothing_is_left(&mut rig)?;
    killed_copy_is_repeated(&mut rig)?;
    killed_copies_of_several_disks_are_repeated(&mut rig)?;
    let content = std::fs::read(rig.scratch.file("d0.raw"))?;
    let byte = |block: u64| content[(block * BLOCK) as usize];
    ensure!((byte(0), byte(99), byte(100), byte(611), byte(612)) == (2, 2, 3, 3, 0));
    Ok(())
}

/// A killed copy leaves no image under its name, and the same command succeeds. A replaced image is no base of the next copy.
fn killed_copy_is_repeated(rig: &mut Rig) -> Result<()> {
    let target = folder(rig)?.display().to_string();
    let begin = ["backup", "begin", "d0", "--to", &target];
    let words = [&begin[..], &["--checkpoint", "mon"]].concat();
    let slow = [&words[..], &["--speed", "1K"]].concat();
    rig.daemon.lunette(&slow)?;
    rig.daemon.kill()?;
    let image = rig.scratch.file("backup/d0-mon.qcow2");
    ensure!(!image.exists(), "an incomplete image has its final name");
    rig.daemon.start_again()?;
    nothing_is_left(rig)?;
    rig.daemon.lunette(&[&words[..], &["--wait"]].concat())?;
    for entry in std::fs::read_dir(&target)? {
        let name = entry?.file_name();
        ensure!(
            !name.to_string_lossy().ends_with("partial"),
            "{name:?} is left"
        );
    }
    let path = image.display().to_string();
    let size = SIZE.to_string();
    std::fs::rename(&image, rig.scratch.file("backup/moved.qcow2"))?;
    let create = ["qemu-img", "create", "-q", "-f", "qcow2", &path, &size];
    run(rig.scratch.files(), &create)?;
    let since = ["--since", "mon", "--checkpoint", "tue", "--wait"];
    let words = [&begin[..], &since].concat();
    refused(rig, &words, "another file has replaced it")?;
    // A copy of the backup is the backup.
    std::fs::copy(rig.scratch.file("backup/moved.qcow2"), &image)?;
    rig.daemon.lunette(&words).map(drop)
}

/// A kill between the ends of two copies leaves a checkpoint on one disk, which no backup of both disks can continue.
fn killed_copies_of_several_disks_are_repeated(rig: &mut Rig) -> Result<()> {
    let target = folder(rig)?.display().to_string();
    let words = ["--to", &target, "--checkpoint", "both"];
    begin(rig, &[&words[..], &["--speed", "1K"]].concat())?;
    // This disk is empty.
    rig.daemon.lunette(&["job", "wait", "d1"])?;
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    let images = DISKS.map(|disk| rig.scratch.file(&format!("backup/{disk}-both.qcow2")));
    let exist = images.each_ref().map(|image| image.exists());
    ensure!(exist == [false, true], "{exist:?}");
    let since = ["--to", &target, "--since", "both", "--checkpoint", "next"];
    let since = [&["backup", "begin", "d0", "d1"], &since[..]].concat();
    refused(rig, &since, "checkpoint both exists on d1, but not on d0")?;
    refused(
        rig,
        &[&["backup", "begin", "d0", "d1"], &words[..]].concat(),
        "exists already",
    )?;
    rig.daemon
        .lunette(&["disk", "bitmap", "remove", "d1", "both"])?;
    std::fs::remove_file(&images[1])?;
    begin(rig, &[&words[..], &["--wait"]].concat())?;
    rig.daemon.lunette(&[&since[..], &["--wait"]].concat())?;
    Ok(())
}
