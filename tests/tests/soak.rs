//! Verifying clients while the daemon is killed, upgraded and out of memory, and while a file system is full or fails. Prints counts and the
//! longest pauses. `SOAK_MINUTES` sets the time, which is one minute by default; `make soak MINUTES=n` sets it too. A second test resizes and
//! snapshots the disks of clients of each transport; `SOAK_CHANGES` sets the number of changes. Needs: qemu-img, util-linux; root for EIO
//! (FUSE) and the OOM killer (cgroups).
#![forbid(unsafe_code)]

use end_to_end::hung_mount::{HungMount, kind};
use end_to_end::memory_group::MemoryGroup;
use end_to_end::rig::free_portal;
use end_to_end::{Context, IscsiSession, Result, Rig, Scratch, SmallFileSystem, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};
use vhost_frontend::{
    BlkDone, BlkQueue, Error, FrontEnd, InflightMemory, Layout, Options, QueueOptions, ScsiQueue,
    ScsiRequest, Verifier,
};
use vm::wait_until;

const TARGET: &str = "iqn.2026-11.org.example:soak";
const BLOCK: usize = 4096;
const BLOCKS: usize = 512;
const DEPTH: u16 = 8;
/// Time limit for a response, after which a request counts as lost.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Default)]
struct Progress {
    stop: AtomicBool,
    verified: AtomicU64,
    connections: AtomicU64,
    /// Longest time without a response, in microseconds.
    longest_pause: AtomicU64,
}

impl Progress {
    fn answered(&self, since: Instant) {
        let pause = since.elapsed().as_micros() as u64;
        self.longest_pause.fetch_max(pause, Ordering::Relaxed);
    }
}

/// A client on its own thread.
struct Client {
    name: &'static str,
    progress: Arc<Progress>,
    thread: JoinHandle<Result<()>>,
}

impl Client {
    fn start(
        name: &'static str,
        work: impl FnOnce(&Progress) -> Result<()> + Send + 'static,
    ) -> Client {
        let progress = Arc::<Progress>::default();
        let seen = Arc::clone(&progress);
        Client {
            name,
            progress,
            thread: std::thread::spawn(move || work(&seen)),
        }
    }

    fn wait_for_progress(&self) -> Result<()> {
        let before = self.progress.verified.load(Ordering::Relaxed);
        let goes_on = wait_until(PATIENCE, || {
            let now = self.progress.verified.load(Ordering::Relaxed);
            (now > before + u64::from(DEPTH) || self.thread.is_finished()).then_some(())
        });
        goes_on.with_context(|| format!("{}: no answer", self.name))
    }

    fn finish(self) -> Result<String> {
        self.progress.stop.store(true, Ordering::Relaxed);
        let Ok(ended) = self.thread.join() else {
            bail!("{}: the client panicked", self.name);
        };
        ended.with_context(|| self.name)?;
        let count = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let progress = &self.progress;
        ensure!(count(&progress.verified) > 0, "{}: no request", self.name);
        Ok(format!(
            "{:<12} {:>9} requests verified, {:>4} connections, longest pause {:>7.1} ms",
            self.name,
            count(&progress.verified),
            count(&progress.connections),
            count(&progress.longest_pause) as f64 / 1000.0
        ))
    }
}

/// A virtual machine whose front end reconnects with its in-flight region.
struct Machine<'a> {
    socket: PathBuf,
    front_end: FrontEnd,
    region: InflightMemory,
    /// Number of completed requests, which is the split ring's position.
    done: u16,
    progress: &'a Progress,
}

impl Machine<'_> {
    /// Writes and reads blocks from byte `offset` on until stopped, and then reads all of them.
    fn run(socket: PathBuf, offset: u64, progress: &Progress) -> Result<()> {
        let mut front_end = FrontEnd::connect(&socket, &Options::default())?;
        let options = QueueOptions::default();
        let region = front_end.new_inflight(1, options.size)?;
        front_end.give_inflight(&region)?;
        let mut queue =
            BlkQueue::start(&mut front_end, 0, &options, DEPTH, BLOCK, Layout::Separate)?;
        progress.connections.fetch_add(1, Ordering::Relaxed);
        let mut machine = Machine {
            socket,
            front_end,
            region,
            done: 0,
            progress,
        };
        let mut verifier = Verifier::new(offset, BLOCKS, offset + 1);
        while !progress.stop.load(Ordering::Relaxed) {
            verifier.round_with(&mut queue, DEPTH, |queue| machine.wait(queue))?;
            let verified = verifier.requests();
            progress.verified.store(verified, Ordering::Relaxed);
            std::thread::sleep(Duration::from_micros(500));
        }
        Ok(verifier.check_all(&mut queue)?)
    }

    /// Waits for a completion and reconnects to each new daemon.
    fn wait(&mut self, queue: &mut BlkQueue) -> vhost_frontend::Result<BlkDone> {
        let since = Instant::now();
        loop {
            match queue.wait_for(Duration::from_millis(20)) {
                Err(Error::Timeout(_)) if since.elapsed() < PATIENCE => {}
                Ok(done) => {
                    self.done = self.done.wrapping_add(1);
                    self.progress.answered(since);
                    return Ok(done);
                }
                Err(error) => return Err(error),
            }
            // After the daemon has ended the ring does not change, and all completions were taken above.
            if self.front_end.channel().is_closed() && self.connect(queue).is_err() {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }

    fn connect(&mut self, queue: &mut BlkQueue) -> vhost_frontend::Result<()> {
        let mut again = FrontEnd::connect(&self.socket, &Options::default())?;
        std::mem::swap(again.memory_mut(), self.front_end.memory_mut());
        self.front_end = again;
        self.front_end.send_memory()?;
        self.front_end.give_inflight(&self.region)?;
        let base = u32::from(self.done);
        self.front_end.begin_queue(queue.queue(), base)?;
        self.progress.connections.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }
}

/// An initiator that logs in again and repeats a write with unknown outcome.
struct Host<'a> {
    portal: String,
    session: Option<IscsiSession>,
    progress: &'a Progress,
}

impl Host<'_> {
    fn run(portal: String, progress: &Progress) -> Result<()> {
        let mut host = Host {
            portal,
            session: None,
            progress,
        };
        verify(progress, |code, block, out| host.command(code, block, out))
    }

    /// READ (10) or WRITE (10) of a block of 4096 bytes.
    fn command(&mut self, code: u8, block: usize, out: Option<&[u8]>) -> Result<Vec<u8>> {
        let (cdb, into) = block_command(code, block)?;
        let since = Instant::now();
        loop {
            ensure!(since.elapsed() < PATIENCE, "no answer");
            let Some(session) = &mut self.session else {
                match IscsiSession::login(&self.portal, TARGET, 1) {
                    Ok(session) => {
                        self.session = Some(session);
                        self.progress.connections.fetch_add(1, Ordering::Relaxed);
                    }
                    Err(_) => std::thread::sleep(Duration::from_millis(5)),
                }
                continue;
            };
            match session.command(&cdb, out, into) {
                Ok(done) => {
                    ensure!(done.status == 0, "{cdb:x?}: {done:?}");
                    self.progress.answered(since);
                    return Ok(done.data);
                }
                Err(_) => self.session = None,
            }
        }
    }
}

/// Writes and reads blocks with `command` until stopped. Its arguments are the operation code, a block of 4096 bytes, and the data to write.
fn verify(
    progress: &Progress,
    mut command: impl FnMut(u8, usize, Option<&[u8]>) -> Result<Vec<u8>>,
) -> Result<()> {
    let pattern = |block: usize, generation: u64| {
        let word = (generation << 16 | block as u64).to_le_bytes();
        word.repeat(BLOCK / word.len())
    };
    let mut generations = vec![0u64; BLOCKS];
    for turn in 0u64.. {
        if progress.stop.load(Ordering::Relaxed) {
            break;
        }
        // 97 and the number of blocks are coprime.
        let block = (turn as usize * 97) % BLOCKS;
        if generations[block] > 0 {
            let read = command(0x28, block, None)?;
            ensure!(
                read == pattern(block, generations[block]),
                "block {block} is not as it was written"
            );
        }
        generations[block] = turn + 1;
        command(0x2a, block, Some(&pattern(block, turn + 1)))?;
        progress.verified.fetch_add(2, Ordering::Relaxed);
        std::thread::sleep(Duration::from_micros(500));
    }
    Ok(())
}

/// Returns READ (10) or WRITE (10) of a block of 4096 bytes, and the number of bytes to read.
fn block_command(code: u8, block: usize) -> Result<([u8; 10], u32)> {
    let [high, low] = u16::try_from(block * (BLOCK / 512))?.to_be_bytes();
    let cdb = [code, 0, 0, 0, high, low, 0, 0, (BLOCK / 512) as u8, 0];
    Ok((cdb, if code == 0x28 { BLOCK as u32 } else { 0 }))
}

/// The daemon under test. After an upgrade it is a process that the rig does not track.
struct Daemons {
    rig: Rig,
    upgraded: Option<Pid>,
}

impl Daemons {
    fn start(portal: &str) -> Result<Daemons> {
        let portal = portal.to_owned();
        let rig = Rig::prepared(|scratch, daemon| {
            let image = scratch.file("image.qcow2").display().to_string();
            qemu_img(&["create", "-q", "-f", "qcow2", &image, "64M"])?;
            let file = |name: &str| scratch.file(name).display().to_string();
            let (raw, unit) = (file("file.raw"), file("unit.raw"));
            Ok(daemon
                .disk(&format!("file=file:{raw},size=64M,cache=writeback"))
                .disk(&format!("image=image:{image},cache=writeback"))
                .disk(&format!("unit=file:{unit},size=64M,cache=writeback"))
                .vhost_blk("file")
                .vhost_blk("image")
                .arguments(["--workers", "2"])
                .arguments(["--iscsi", &format!("{TARGET}=unit"), "--portal", &portal])
                .arguments(["--demo-mode", "rw"]))
        })?;
        Ok(Daemons {
            rig,
            upgraded: None,
        })
    }

    fn kill(&mut self) -> Result<()> {
        match self.upgraded.take() {
            None => self.rig.daemon.kill()?,
            Some(pid) => {
                kill_process(pid, Signal::KILL)?;
                wait_for_end(pid)?;
            }
        }
        self.rig.daemon.start_again()
    }

    fn upgrade(&mut self) -> Result<()> {
        self.rig.daemon.lunette(&["upgrade"])?;
        let version: serde_json::Value = control::get(&self.rig.daemon.control(), "/v1/version")?;
        let pid = version["pid"].as_i64().context("no pid")?;
        self.upgraded = Pid::from_raw(i32::try_from(pid)?);
        self.rig.daemon.process().wait(PATIENCE).ok();
        Ok(())
    }

    /// Lets the OOM killer end the daemon: a client fills a RAM disk beyond a limit of memory.
    fn run_out_of_memory(&mut self, group: &MemoryGroup) -> Result<()> {
        let process = match self.upgraded {
            None => self.rig.daemon.process().id(),
            Some(pid) => u32::try_from(pid.as_raw_nonzero().get())?,
        };
        let socket = self.rig.socket("memory");
        let export = format!("memory:{}", socket.display());
        let daemon = &self.rig.daemon;
        daemon.lunette(&["disk", "add", "memory=ram:128M"])?;
        daemon.lunette(&["export", "add", "vhost-blk", &export])?;
        group.limit(process, 16 << 20)?;
        // The client waits for a response that never comes.
        std::thread::spawn(move || fill(&socket).ok());
        match self.upgraded.take() {
            None => {
                let status = self.rig.daemon.process().wait(PATIENCE)?;
                ensure!(status.signal() == Some(9), "not killed: {status}");
            }
            Some(pid) => wait_for_end(pid)?,
        }
        group.lift()?;
        self.rig.daemon.start_again()?;
        // The export and disk still exist. They are removed, because an upgrade is refused while there is a RAM disk.
        let daemon = &self.rig.daemon;
        let answers = || daemon.lunette(&["status"]).ok();
        wait_until(PATIENCE, answers).context("the daemon does not start")?;
        daemon.lunette(&["export", "remove", "memory", "--force"])?;
        daemon.lunette(&["disk", "remove", "memory"])?;
        Ok(())
    }

    /// Stops the last daemon in an orderly way.
    fn end(mut self) -> Result<Scratch> {
        match self.upgraded.take() {
            None => drop(self.rig.daemon.stop(PATIENCE)?),
            Some(pid) => {
                kill_process(pid, Signal::TERM)?;
                wait_for_end(pid)?;
            }
        }
        let Rig { scratch, .. } = self.rig;
        Ok(scratch)
    }
}

/// Writes to a disk of 128 MiB.
fn fill(socket: &Path) -> Result<()> {
    let mut front_end = FrontEnd::connect(socket, &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 1, 1 << 20, Layout::Separate)?;
    for megabyte in 0..128 {
        queue.write(megabyte << 20, &[0xa5; 1 << 20])?;
    }
    Ok(())
}

fn wait_for_end(pid: Pid) -> Result<()> {
    let place = format!("/proc/{}", pid.as_raw_nonzero());
    let is_gone = || (!Path::new(&place).exists()).then_some(());
    wait_until(PATIENCE, is_gone).context("the daemon does not end")
}

fn qemu_img(words: &[&str]) -> Result<()> {
    let output = Command::new("qemu-img")
        .args(words)
        .output()
        .context("cannot run qemu-img; hint: apt-get install qemu-utils")?;
    ensure!(output.status.success(), "qemu-img {words:?}: {output:?}");
    Ok(())
}

/// Checks that the image has leaked clusters at most. A killed daemon may leave them.
fn check_image(image: &Path) -> Result<()> {
    let checked = Command::new("qemu-img").arg("check").arg(image).output()?;
    const ONLY_LEAKS: i32 = 3;
    ensure!(
        matches!(checked.status.code(), Some(0 | ONLY_LEAKS)),
        "{checked:?}"
    );
    Ok(())
}

/// Storage that fails and recovers.
enum Storage {
    /// A full file system.
    Full {
        folder: PathBuf,
        _small: SmallFileSystem,
    },
    /// A file system that answers reads and writes with EIO.
    Erroring(HungMount),
}

impl Storage {
    fn disk(&self) -> PathBuf {
        match self {
            Storage::Full { folder, .. } => folder.join("disk"),
            Storage::Erroring(mount) => mount.path("disk"),
        }
    }

    fn fail(&self) {
        match self {
            // The write fails when the file system is full.
            Storage::Full { folder, .. } => {
                std::fs::write(folder.join("pad"), vec![0x5a; 64 << 20]).ok();
            }
            Storage::Erroring(mount) => mount.fail(&[kind::READ, kind::WRITE]),
        }
    }

    fn recover(&self) -> Result<()> {
        match self {
            Storage::Full { folder, .. } => std::fs::remove_file(folder.join("pad"))?,
            Storage::Erroring(mount) => mount.fail(&[]),
        }
        Ok(())
    }
}

/// A disk whose I/O waits while its storage fails, in a daemon of its own.
struct FailingDisk {
    // Fields are dropped in this order.
    rig: Rig,
    storage: Storage,
    _scratch: Scratch,
    name: &'static str,
    turns: u64,
    verified: u64,
}

impl FailingDisk {
    fn full(beside: &Rig) -> Result<FailingDisk> {
        let scratch = Scratch::new()?;
        let small = SmallFileSystem::mount(&scratch)?;
        let wrapper = small.wrapper(&scratch);
        let wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
        let file = SmallFileSystem::folder(&scratch).join("disk");
        let disk = format!(
            "d=file:{},size=4M,cache=writeback,on_error=stop",
            file.display()
        );
        let rig = beside.beside(|daemon| daemon.under(&wrapper).disk(&disk).vhost_blk("d"))?;
        let storage = Storage::Full {
            folder: small.folder_from_outside(&scratch),
            _small: small,
        };
        Ok(FailingDisk::new("full file system", rig, storage, scratch))
    }

    fn erroring(beside: &Rig) -> Result<FailingDisk> {
        let scratch = Scratch::new()?;
        let mount = HungMount::new(&scratch.file("mount"), &[("disk", 4 << 20)])?;
        let disk = format!(
            "d=file:{},cache=writeback,on_error=stop",
            mount.path("disk").display()
        );
        let rig = beside.beside(|daemon| daemon.disk(&disk).vhost_blk("d"))?;
        let storage = Storage::Erroring(mount);
        Ok(FailingDisk::new("EIO", rig, storage, scratch))
    }

    fn new(name: &'static str, rig: Rig, storage: Storage, scratch: Scratch) -> FailingDisk {
        FailingDisk {
            rig,
            storage,
            _scratch: scratch,
            name,
            turns: 0,
            verified: 0,
        }
    }

    /// Lets the storage fail, lets a client write until it waits, and lets the storage recover. Every other time the daemon is killed before
    /// the recovery.
    fn turn(&mut self) -> Result<()> {
        self.run().with_context(|| self.name)
    }

    fn run(&mut self) -> Result<()> {
        // The previous disk needs no space any more.
        let disk = std::fs::File::options()
            .write(true)
            .open(self.storage.disk())?;
        disk.set_len(0)?;
        disk.set_len(4 << 20)?;
        self.storage.fail();
        let socket = self.rig.socket("d");
        let client = Client::start(self.name, move |progress| {
            Machine::run(socket, 1 << 20, progress)
        });
        let control = self.rig.daemon.control();
        let waits = || {
            let disk: serde_json::Value = control::get(&control, "/v1/disks/d").ok()?;
            (disk["status"]["waiting"].as_u64()? > 0).then_some(())
        };
        wait_until(PATIENCE, waits).context("no I/O waits")?;
        if self.turns % 2 == 1 {
            self.rig.daemon.kill()?;
            self.rig.daemon.start_again()?;
        }
        self.storage.recover()?;
        // An error from before the recovery may stop the disk again after the first call.
        let progress = &client.progress.verified;
        let before = progress.load(Ordering::Relaxed);
        let resumed = wait_until(PATIENCE, || {
            self.rig.daemon.ask(&["disk", "resume", "d"]).ok();
            std::thread::sleep(Duration::from_millis(200));
            (progress.load(Ordering::Relaxed) > before).then_some(())
        });
        resumed.context("no progress after the recovery")?;
        self.verified += client.progress.verified.load(Ordering::Relaxed);
        client.finish()?;
        self.turns += 1;
        Ok(())
    }

    fn summary(&self) -> String {
        let (turns, verified) = (self.turns, self.verified);
        format!(
            "{turns} times {} ({verified} requests verified there)",
            self.name
        )
    }
}

/// Number of turns after which each kind of fault has occurred.
const KINDS: u32 = 6;

/// Faults of the main daemon, with their numbers.
#[derive(Default)]
struct Counts {
    kills: u64,
    upgrades: u64,
    out_of_memory: u64,
}

#[test]
fn clients_lose_nothing_through_kills_upgrades_and_failing_storage() -> Result<()> {
    let minutes = match std::env::var("SOAK_MINUTES") {
        Ok(text) => text.parse::<f64>().context("SOAK_MINUTES")?,
        Err(_) => 1.0,
    };
    let until = Instant::now() + Duration::from_secs_f64(minutes * 60.0);
    let portal = free_portal()?.to_string();
    let mut daemons = Daemons::start(&portal)?;
    let socket = |name: &str| daemons.rig.socket(name);
    let (file, image) = (socket("file"), socket("image"));
    let clients = [
        Client::start("raw file", move |progress| Machine::run(file, 0, progress)),
        Client::start("image", move |progress| Machine::run(image, 0, progress)),
        Client::start("iSCSI", move |progress| Host::run(portal, progress)),
    ];
    let is_root = rustix::process::geteuid().is_root();
    let mut failing = vec![FailingDisk::full(&daemons.rig)?];
    if is_root {
        failing.push(FailingDisk::erroring(&daemons.rig)?);
    }
    let group = MemoryGroup::new().filter(|_| is_root);
    let mut counts = Counts::default();
    for turn in 0.. {
        if Instant::now() > until && turn >= KINDS {
            break;
        }
        for client in &clients {
            client.wait_for_progress()?;
        }
        match (turn % KINDS, &group) {
            (1, _) => {
                daemons.upgrade()?;
                counts.upgrades += 1;
            }
            (2, _) => failing[0].turn()?,
            (4, _) if is_root => failing[1].turn()?,
            (5, Some(group)) => {
                daemons.run_out_of_memory(group)?;
                counts.out_of_memory += 1;
            }
            _ => {
                daemons.kill()?;
                counts.kills += 1;
            }
        }
    }
    let mut lines = Vec::new();
    for client in clients {
        lines.push(client.finish()?);
    }
    let summaries: Vec<String> = failing.iter().map(FailingDisk::summary).collect();
    let has_all = failing.iter().all(|disk| disk.turns > 0);
    drop(failing);
    let scratch = daemons.end()?;
    check_image(&scratch.file("image.qcow2"))?;
    let Counts {
        kills,
        upgrades,
        out_of_memory,
    } = counts;
    println!(
        "soak: {minutes} minutes: {kills} kills, {upgrades} upgrades, {out_of_memory} times out of memory, {}",
        summaries.join(", ")
    );
    if !is_root {
        println!("soak: without EIO, which needs root");
    }
    if group.is_none() {
        println!(
            "soak: without the OOM killer, which needs root and the memory controller of cgroups"
        );
    }
    for line in &lines {
        println!("soak: {line}");
    }
    ensure!(
        kills > 0 && upgrades > 0 && has_all && (out_of_memory > 0 || group.is_none()),
        "too short a time for every kind of fault"
    );
    Ok(())
}

/// Returns true for a unit attention after which an initiator repeats its command: parameters or capacity of the unit have changed.
fn is_repeated(status: u8, sense: &[u8]) -> bool {
    const CHECK_CONDITION: u8 = 2;
    const UNIT_ATTENTION: u8 = 6;
    const PARAMETERS_CHANGED: u8 = 0x2a;
    const TARGET_CHANGED: u8 = 0x3f;
    status == CHECK_CONDITION
        && sense.get(2).is_some_and(|key| key & 0xf == UNIT_ATTENTION)
        && matches!(sense.get(12), Some(&PARAMETERS_CHANGED | &TARGET_CHANGED))
}

/// Verifies blocks in one iSCSI session. An error or a lost session fails.
fn one_session(portal: &str, progress: &Progress) -> Result<()> {
    let mut session = IscsiSession::login(portal, TARGET, 1)?;
    progress.connections.fetch_add(1, Ordering::Relaxed);
    verify(progress, |code, block, out| {
        let (cdb, into) = block_command(code, block)?;
        let since = Instant::now();
        loop {
            let done = session.command(&cdb, out, into)?;
            if !is_repeated(done.status, &done.sense) {
                ensure!(done.status == 0, "{cdb:x?}: {done:?}");
                progress.answered(since);
                return Ok(done.data);
            }
        }
    })
}

/// Verifies blocks through a virtio-scsi controller. An error fails.
fn controller(socket: &Path, progress: &Progress) -> Result<()> {
    fn request_of(cdb: &[u8]) -> ScsiRequest<'_> {
        ScsiRequest {
            target: 0,
            lun: 0,
            tag: 1,
            cdb,
        }
    }

    let mut front_end = FrontEnd::connect(socket, &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = ScsiQueue::start(&mut front_end, 2, &options, 1, BLOCK, Layout::Separate)?;
    progress.connections.fetch_add(1, Ordering::Relaxed);
    // TEST UNIT READY takes the unit attention of a new I_T nexus.
    queue.run(&request_of(&[0; 6]), &[], &mut [])?;
    verify(progress, |code, block, out| {
        let (cdb, into) = block_command(code, block)?;
        let request = request_of(&cdb);
        let mut data = vec![0; into as usize];
        let since = Instant::now();
        loop {
            let done = queue.run(&request, out.unwrap_or_default(), &mut data)?;
            ensure!(done.response == 0, "{cdb:x?}: {done:?}");
            if !is_repeated(done.status, &done.sense) {
                ensure!(done.status == 0, "{cdb:x?}: {done:?}");
                progress.answered(since);
                return Ok(data);
            }
        }
    })
}

/// Disks that are changed, one for each transport.
const CHANGED: [&str; 4] = ["blk", "scsi", "unit", "nbd"];
/// Number of changes unless `SOAK_CHANGES` is set.
const CHANGES: usize = 16;
/// Snapshots of a disk after which the chain of its images is streamed into one.
const CHAIN: usize = 20;

/// `SOAK_CHANGES=1000` takes ten minutes. Resizes and snapshots alternate. The commands send the same requests
/// as the page: `PUT /v1/disks/DISK/size` with `size`, `POST /v1/snapshot` with `disks`, and `POST /v1/disks/DISK/job` with `kind`.
#[test]
fn resizes_and_snapshots_disturb_no_client() -> Result<()> {
    let changes = match std::env::var("SOAK_CHANGES") {
        Ok(text) => text.parse().context("SOAK_CHANGES")?,
        Err(_) => CHANGES,
    };
    let portal = free_portal()?.to_string();
    let rig = Rig::prepared(|scratch, daemon| {
        let file = |name: &str| scratch.file(name).display().to_string();
        let daemon = CHANGED.iter().fold(daemon, |daemon, name| {
            let file = file(&format!("{name}.raw"));
            daemon.disk(&format!("{name}=file:{file},size=64M,cache=writeback"))
        });
        let nbd = format!(
            "nbd:{},export_name=nbd",
            scratch.socket("nbd.sock").display()
        );
        Ok(daemon
            .vhost_blk("blk")
            .vhost_scsi("c")
            .lun("c/0:0=scsi")
            .arguments(["--workers", "2", "--nbd", &nbd])
            .arguments(["--iscsi", &format!("{TARGET}=unit"), "--portal", &portal])
            .arguments(["--demo-mode", "rw"]))
    })?;
    let socket = rig.scratch.socket("nbd.sock").display().to_string();
    let remote = format!("remote=nbd+unix:///nbd?socket={socket}");
    let client_rig = rig.beside(|daemon| daemon.disk(&remote).vhost_blk("remote"))?;
    let (blk, scsi, remote) = (
        rig.socket("blk"),
        rig.socket("c"),
        client_rig.socket("remote"),
    );
    let clients = [
        Client::start("vhost-blk", move |progress| Machine::run(blk, 0, progress)),
        Client::start("vhost-scsi", move |progress| controller(&scsi, progress)),
        Client::start("iSCSI", move |progress| one_session(&portal, progress)),
        Client::start("NBD", move |progress| Machine::run(remote, 0, progress)),
    ];
    let mut megabytes = 64;
    for turn in 0..changes {
        let disk = CHANGED[turn / 2 % CHANGED.len()];
        let number = turn / (2 * CHANGED.len());
        if turn % 2 == 0 {
            megabytes += 1;
            let size = format!("{megabytes}M");
            rig.daemon.lunette(&["disk", "resize", disk, &size])?;
            continue;
        }
        let image = rig.scratch.file(&format!("{disk}-{number}.qcow2"));
        let image = image.display().to_string();
        rig.daemon
            .lunette(&["disk", "snapshot", disk, "--to", &image])?;
        if number % CHAIN == CHAIN - 1 {
            rig.daemon.lunette(&["disk", "stream", disk, "--wait"])?;
        }
        for client in &clients {
            client.wait_for_progress()?;
        }
    }
    for client in clients {
        let connections = client.progress.connections.load(Ordering::Relaxed);
        ensure!(
            connections == 1,
            "{}: {connections} connections",
            client.name
        );
        println!("soak: {changes} changes: {}", client.finish()?);
    }
    Ok(())
}
