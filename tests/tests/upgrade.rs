//! A daemon is replaced in use: guests and drivers keep their connections and data, and a program that cannot take over changes nothing.
//! Needs: a guest. Takes: 30 s.
#![forbid(unsafe_code)]

use end_to_end::rig::{attribute, free_portal, kernel_is_content};
use end_to_end::{
    Context, DaemonBuilder, GuestBuilder, IscsiSession, Result, Rig, Scratch, Soak, ensure,
};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixDatagram, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, VerifiedLoad, status};
use vm::wait_until;

const TOKEN: &str = "0123456789abcdef0123456789abcdef";
const SOON: Duration = Duration::from_secs(60);

fn version(rig: &Rig) -> Result<Value> {
    Ok(control::get(&rig.daemon.control(), "/v1/version")?)
}

fn pid(rig: &Rig) -> Result<i32> {
    let pid = version(rig)?["pid"].as_i64().context("no pid")?;
    Ok(i32::try_from(pid)?)
}

/// Environment variable with the program of a former release. Every other upgrade under load goes to it, and the next one back.
const FORMER: &str = "LUNETTE_FORMER";

/// Process ID of the current daemon, which no rig tracks. The daemon ends before its rig's folders are removed.
struct Last(i32);

impl Last {
    /// Upgrades the daemon and stores the new process ID.
    fn upgrade(&mut self, rig: &mut Rig, more: &[&str]) -> Result<()> {
        let before = pid(rig)?;
        rig.daemon.lunette(&[&["upgrade"], more].concat())?;
        self.0 = pid(rig)?;
        ensure!(self.0 != before, "it is the same process");
        // Waits for the rig's former process.
        rig.daemon.process().wait(SOON).ok();
        Ok(())
    }

    /// Upgrades the daemon for the `turn`th time, to the former release and back if the environment names one.
    fn upgrade_or_back(&mut self, rig: &mut Rig, turn: usize) -> Result<()> {
        match std::env::var(FORMER) {
            Ok(former) if turn.is_multiple_of(2) => self.upgrade(rig, &["--to", &former]),
            _ => self.upgrade(rig, &[]),
        }
    }

    fn signal(&self, signal: Signal) -> Result<()> {
        let pid = Pid::from_raw(self.0).context("no daemon")?;
        Ok(kill_process(pid, signal)?)
    }

    fn end(&mut self) -> Result<()> {
        self.signal(Signal::TERM)?;
        let place = format!("/proc/{}", self.0);
        let gone = || (!Path::new(&place).exists()).then_some(());
        wait_until(SOON, gone).context("the last daemon does not end")?;
        self.0 = 0;
        Ok(())
    }
}

impl Drop for Last {
    fn drop(&mut self) {
        if self.0 != 0 {
            self.signal(Signal::KILL).ok();
        }
    }
}

fn descriptors(pid: i32) -> Result<usize> {
    Ok(std::fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

/// Starts a daemon with a raw file and an image, exported by `exported`.
fn two_disks(exported: impl FnOnce(DaemonBuilder) -> DaemonBuilder) -> Result<Rig> {
    Rig::prepared(|scratch, daemon| {
        let file = scratch.file("d0.raw").display().to_string();
        let image = scratch.file("d1.qcow2").display().to_string();
        let create = ["create", "-q", "-f", "qcow2", &image, "64M"];
        let made = std::process::Command::new("qemu-img")
            .args(create)
            .status()
            .context("cannot run qemu-img; hint: apt-get install qemu-utils")?;
        ensure!(made.success());
        let daemon = daemon
            .disk(&format!("d0=file:{file},size=64M,cache=writeback"))
            .disk(&format!("d1=image:{image},cache=writeback"));
        Ok(exported(daemon).arguments(["--workers", "2"]))
    })
}

fn blk_and_scsi(daemon: DaemonBuilder) -> DaemonBuilder {
    daemon.vhost_blk("d0").vhost_scsi("c").lun("c/0:0=d1")
}

#[test]
fn guests_continue_through_upgrades() -> Result<()> {
    let mut rig = two_disks(blk_and_scsi)?;
    let mut last = Last(0);
    let mut guest = GuestBuilder::new("upgrade")
        .cpus(2)
        .vhost_user_blk(&rig.socket("d0"), 2)
        .vhost_user_scsi(&rig.socket("c"), 2)
        .boot()?;
    guest.wait_for_disks(&["vda", "sda"])?;
    let soak = |disk| format!("--file /dev/{disk} --seed 39 --depth 8");
    let soaks = [
        Soak::start(&mut guest, &soak("vda"))?,
        Soak::start(&mut guest, &soak("sda"))?,
    ];
    for turn in 0..12 {
        for disk in ["d0", "d1"] {
            rig.daemon.wait_for_requests(disk, 20)?;
        }
        last.upgrade_or_back(&mut rig, turn)?;
    }
    for soak in soaks {
        soak.finish(&mut guest)
            .with_context(|| rig.daemon.process().log_tail())?;
    }
    // No front end has reconnected.
    let log = rig.daemon.process().log();
    let count = |phrase: &str| log.matches(phrase).count();
    ensure!(count("front end session taken over") == 24, "{log}");
    ensure!(count("front end connected") == 2, "{log}");
    // The new daemon notifies the guest of a new size, through the channel of the first daemon.
    rig.daemon.lunette(&["disk", "resize", "d0", "96M"])?;
    let grown = wait_until(SOON, || {
        (attribute(&mut guest, "vda", "size").ok()? == "196608").then_some(())
    });
    grown.context("the guest does not hear of the new size")?;
    kernel_is_content(&mut guest)?;
    drop(guest);
    last.end()?;
    let image = rig.scratch.file("d1.qcow2");
    let checked = std::process::Command::new("qemu-img")
        .arg("check")
        .arg(&image)
        .output()?;
    ensure!(checked.status.success(), "{checked:?}");
    Ok(())
}

/// Starts a daemon with a front end for each of two disks, and another daemon whose disk `r` is a logical unit of the first one.
fn front_ends_and_an_initiator() -> Result<(Rig, Rig)> {
    const TARGET: &str = "iqn.2026-11.org.example:t";
    let portal = free_portal()?.to_string();
    let rig = two_disks(|daemon| {
        let exported = format!("{TARGET}=d2");
        let target = ["--iscsi", &exported, "--portal", &portal];
        let demo = ["--demo-mode", "rw"];
        let daemon = daemon.vhost_blk("d0").vhost_blk("d1");
        let daemon = daemon.disk("d2=file:d2.raw,size=64M,cache=writeback");
        daemon.arguments(target).arguments(demo)
    })?;
    let unit = format!("r=iscsi://{portal}/{TARGET}/0");
    let near = rig.beside(|daemon| {
        let daemon = daemon.disk(&unit).vhost_blk("r");
        daemon.arguments(["--log", "debug"])
    })?;
    Ok((rig, near))
}

/// Environment variable for the number of consecutive upgrades. Manual runs use more.
const UPGRADES: &str = "LUNETTE_UPGRADES";

/// Clients that connect continuously, also while no daemon runs.
struct Callers {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Result<u64>>,
}

impl Callers {
    fn start(call: impl Fn() -> Result<()> + Send + 'static) -> Callers {
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || {
            let mut calls = 0;
            while !stopped.load(Ordering::Relaxed) {
                call().with_context(|| format!("after {calls} calls"))?;
                calls += 1;
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(calls)
        });
        Callers { stop, thread }
    }

    /// Stops and returns the number of calls. Fails if one was refused.
    fn finish(self) -> Result<u64> {
        self.stop.store(true, Ordering::Relaxed);
        let calls = self.thread.join().ok().context("the thread has panicked")?;
        calls.context("a client was refused")
    }
}

/// Returns the response for a path of a TCP service.
fn answer(address: SocketAddr, path: &str) -> Result<String> {
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(SOON))?;
    write!(
        stream,
        "GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
    )?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer)?;
    ensure!(answer.starts_with("HTTP/1.1 200"), "{path}: {answer:?}");
    Ok(answer)
}

#[test]
fn no_client_is_refused_during_an_upgrade() -> Result<()> {
    let (api, metrics) = (free_portal()?, free_portal()?);
    let secrets = Scratch::new()?;
    let token = secrets.file("token");
    std::fs::write(&token, TOKEN)?;
    std::fs::set_permissions(&token, std::fs::Permissions::from_mode(0o600))?;
    let mut rig = two_disks(|daemon| {
        let daemon = daemon.vhost_blk("d0").vhost_scsi("c").lun("c/0:0=d1");
        let daemon = daemon.arguments(["--metrics-listen", &metrics.to_string()]);
        daemon
            .arguments(["--api-listen", &api.to_string()])
            .arguments(["--token-file", &token.display().to_string()])
    })?;
    let mut last = Last(0);
    let front_end = |export| {
        let socket = rig.socket(export);
        Callers::start(move || Ok(UnixStream::connect(&socket).map(drop)?))
    };
    let control = rig.daemon.control();
    let callers = [
        front_end("d0"),
        front_end("c"),
        Callers::start(move || Ok(control::get::<Value>(&control, "/v1/version").map(drop)?)),
        Callers::start(move || answer(api, "/v1/version").map(drop)),
        Callers::start(move || answer(metrics, "/metrics").map(drop)),
    ];
    for turn in 0..10 {
        std::thread::sleep(Duration::from_millis(100));
        last.upgrade_or_back(&mut rig, turn)?;
    }
    for callers in callers {
        ensure!(callers.finish()? > 0);
    }
    // A removed export leaves no socket, even if another daemon created it.
    rig.daemon.lunette(&["export", "remove", "d0", "--force"])?;
    ensure!(!rig.socket("d0").exists());
    last.end()?;
    ensure!(!rig.socket("c").exists() && !rig.daemon.control().exists());
    Ok(())
}

#[test]
fn many_upgrades_lose_nothing_and_leak_nothing() -> Result<()> {
    let upgrades = match std::env::var(UPGRADES) {
        Ok(number) => number.parse().context(UPGRADES)?,
        Err(_) => 30,
    };
    let (mut rig, mut near) = front_ends_and_an_initiator()?;
    let mut last = Last(0);
    let packed = Options {
        packed: true,
        ..Options::default()
    };
    let loads = [
        VerifiedLoad::start(&rig.socket("d0"))?,
        VerifiedLoad::start_with(&rig.socket("d1"), &packed)?,
        VerifiedLoad::start(&near.socket("r"))?,
    ];
    last.upgrade(&mut rig, &[])?;
    loads
        .iter()
        .try_for_each(|load| load.expect_progress(SOON))?;
    let first = descriptors(last.0)?;
    let mut pauses = [Vec::new(), Vec::new(), Vec::new()];
    for turn in 0..upgrades {
        for load in &loads {
            load.slowest_batch();
        }
        last.upgrade_or_back(&mut rig, turn)?;
        for (load, pauses) in loads.iter().zip(&mut pauses) {
            load.expect_progress(SOON)?;
            pauses.push(load.slowest_batch());
        }
    }
    let whose = ["raw, split", "image, packed", "iSCSI, logged in again"];
    for (phrase, pauses) in whose.iter().zip(&mut pauses) {
        pauses.sort_unstable();
        let part = |percent: usize| pauses[(pauses.len() - 1) * percent / 100];
        println!(
            "{upgrades} upgrades, {phrase}: median {:?}, p99 {:?}, longest {:?}",
            part(50),
            part(99),
            part(100)
        );
    }
    let log = near.daemon.process().log();
    ensure!(log.contains("session recovered"), "{log}");
    ensure!(!log.contains("Connection refused"), "{log}");
    let now = descriptors(last.0)?;
    ensure!(now <= first + 2, "{first} descriptors have become {now}");
    for load in loads {
        ensure!(load.finish()? > 0);
    }
    // After a front end disconnects, another one may connect.
    let load = VerifiedLoad::start(&rig.socket("d0"))?;
    load.expect_progress(SOON)?;
    ensure!(load.finish()? > 0);
    last.end()
}

#[test]
fn ram_disks_survive_or_block_the_upgrade() -> Result<()> {
    let portal = free_portal()?.to_string();
    let mut rig = Rig::new(|daemon| {
        let target = [
            "--iscsi",
            "iqn.2026-11.org.example:t=d",
            "--portal",
            &portal,
        ];
        let demo = ["--demo-mode", "rw"];
        daemon
            .disk("d=ram:16M,persist=memfd")
            .vhost_blk("d")
            .arguments(target)
            .arguments(demo)
    })?;
    let mut last = Last(0);
    let mut front_end = FrontEnd::connect(&rig.socket("d"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 16, 1 << 20, Layout::Separate)?;
    ensure!(queue.write(1 << 20, &[7; 4096])? == status::OK);
    for _ in 0..3 {
        last.upgrade(&mut rig, &[])?;
        let mut bytes = [0; 4096];
        ensure!(queue.read(1 << 20, &mut bytes)? == status::OK && bytes == [7; 4096]);
    }
    // Initiators log in again at the same portal and read the same data.
    let mut session = IscsiSession::login(&portal, "iqn.2026-11.org.example:t", 1)?;
    let mut read_10 = [0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0];
    read_10[2..6].copy_from_slice(&(2048_u32).to_be_bytes());
    ensure!(session.command(&read_10, None, 4096)?.data == [7; 4096]);
    drop(session);
    rig.daemon.lunette(&["disk", "add", "e=ram:1M"])?;
    let refused = rig.daemon.ask(&["upgrade"])?;
    let error_text = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(
        !refused.status.success() && error_text.contains("lose their content: e"),
        "{error_text}"
    );
    ensure!(pid(&rig)? == last.0);
    last.upgrade(&mut rig, &["--lose-ram-disks"])?;
    let mut bytes = [0; 4096];
    ensure!(queue.read(1 << 20, &mut bytes)? == status::OK && bytes == [7; 4096]);
    last.end()
}

#[test]
fn running_jobs_block_the_upgrade() -> Result<()> {
    let mut rig = two_disks(blk_and_scsi)?;
    let load = VerifiedLoad::start(&rig.socket("d0"))?;
    load.expect_progress(SOON)?;
    let target = rig.scratch.file("moved.raw");
    let target = format!("file:{},cache=writeback", target.display());
    rig.daemon
        .lunette(&["disk", "mirror", "d0", &target, "--speed", "1M"])?;
    let refused = rig.daemon.lunette(&["upgrade"]).err();
    let refused = refused.context("it ends its mirror")?.to_string();
    let is_clear = refused.contains("mirror of d0") && refused.contains("--end-jobs");
    ensure!(is_clear, "{refused}");
    let mut last = Last(0);
    last.upgrade(&mut rig, &["--end-jobs"])?;
    load.expect_progress(SOON)?;
    let jobs: Value = control::get(&rig.daemon.control(), "/v1/jobs")?;
    ensure!(jobs == serde_json::json!([]), "{jobs}");
    ensure!(load.finish()? > 0);
    last.end()
}

/// Writes a configuration file with one raw disk behind vhost-user. `keys` are keys of the daemon and `disk` those of the disk.
fn write_configuration(scratch: &Scratch, keys: &str, disk: &str) -> Result<()> {
    let (file, socket) = (scratch.file("d0.raw"), scratch.socket("d0.sock"));
    let text = format!(
        "{keys}\n[[disk]]\nname = \"d0\"\nbackend = \"file\"\npath = {file:?}\nsize = \"64M\"\ncache = \"writeback\"\n{disk}\n\
         [[vhost_blk]]\ndisk = \"d0\"\nsocket = {socket:?}\n"
    );
    Ok(std::fs::write(scratch.file("lunette.toml"), text)?)
}

#[test]
fn upgrade_refuses_the_changes_that_a_reload_refuses() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        write_configuration(scratch, "workers = 1", "")?;
        let file = scratch.file("lunette.toml").display().to_string();
        Ok(daemon.arguments(["--config", &file]))
    })?;
    let load = VerifiedLoad::start(&rig.socket("d0"))?;
    load.expect_progress(SOON)?;
    let before = pid(&rig)?;
    for disk in ["read_only = true", "block_size = 4096"] {
        write_configuration(&rig.scratch, "workers = 1", disk)?;
        for command in ["reload", "upgrade"] {
            let refused = rig.daemon.lunette(&[command]).err();
            let refused = refused.with_context(|| format!("{command}: {disk}"))?;
            ensure!(refused.to_string().contains("disk d0"), "{refused}");
        }
        ensure!(pid(&rig)? == before);
        load.expect_progress(SOON)?;
    }
    // An export with a client cannot be removed.
    std::fs::write(rig.scratch.file("lunette.toml"), "workers = 1\n")?;
    let refused = rig.daemon.lunette(&["upgrade"]).err();
    let refused = refused.context("its client loses the export")?.to_string();
    ensure!(refused.contains("has a client"), "{refused}");
    load.expect_progress(SOON)?;
    // A key of the daemon itself: a reload refuses it, and the next daemon uses it.
    write_configuration(&rig.scratch, "workers = 2", "")?;
    ensure!(rig.daemon.lunette(&["reload"]).is_err());
    let mut last = Last(0);
    last.upgrade(&mut rig, &[])?;
    load.expect_progress(SOON)?;
    let status: Value = control::get(&rig.daemon.control(), "/v1/status")?;
    ensure!(status["workers"] == 2, "{status}");
    ensure!(load.finish()? > 0);
    last.end()
}

#[test]
fn program_that_cannot_take_over_leaves_the_daemon_alone() -> Result<()> {
    let mut rig = two_disks(blk_and_scsi)?;
    let load = VerifiedLoad::start(&rig.socket("d0"))?;
    load.expect_progress(SOON)?;
    let before = pid(&rig)?;
    let script = rig.scratch.file("program");
    for (text, expected) in [
        ("#!/bin/sh\necho 99\n", "version 99"),
        ("#!/bin/sh\necho 1\nexit 1\n", "exit status: 1"),
        ("#!/bin/sh\nexec yes\n", "exceeds 64 KiB"),
        (
            "#!/bin/sh\ntest \"$1\" = upgrade && { echo 1; exit; }\nexit 3\n",
            "the new daemon ended",
        ),
    ] {
        std::fs::write(&script, text)?;
        std::fs::set_permissions(&script, std::fs::Permissions::from_mode(0o755))?;
        let to = script.display().to_string();
        let refused = rig.daemon.ask(&["upgrade", "--to", &to])?;
        let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
        ensure!(
            !refused.status.success() && stderr.contains(expected),
            "{stderr}"
        );
        ensure!(pid(&rig)? == before);
        load.expect_progress(SOON)?;
    }
    let program = vm::lunette_program(vm::Profile::Dev)?.display().to_string();
    // The system reaps the children of a process that ignores SIGCHLD, so that a wait for one fails.
    let mut ignoring = Command::new("env");
    ignoring.args(["--ignore-signal=CHLD", &program, "upgrade", "--to"]);
    let refused = ignoring.arg(&script).arg("--socket");
    let refused = refused.arg(rig.daemon.control()).output()?;
    let stderr = String::from_utf8_lossy(&refused.stderr).into_owned();
    ensure!(stderr.contains("cannot wait for the report"), "{stderr}");
    // Upgrades to the named program.
    let mut last = Last(0);
    last.upgrade(&mut rig, &["--to", &program])?;
    load.expect_progress(SOON)?;
    ensure!(load.finish()? > 0);
    last.end()
}

/// A handover to a socket of another user, of another type or without a listener is refused.
#[test]
fn front_ends_are_handed_to_the_daemons_user_alone() -> Result<()> {
    let rig = two_disks(blk_and_scsi)?;
    let client = control::Client::new(&rig.daemon.control()).patient(SOON);
    let ask = |handover: u32, socket: &Path| {
        let body = serde_json::json!({"handover": handover, "socket": socket});
        client.change(control::Method::POST, "/v1/upgrade", Some(&body))
    };
    let file = rig.scratch.file("d0.raw");
    // A socket whose listener has ended.
    let deserted = rig.scratch.socket("deserted");
    drop(UnixDatagram::bind(&deserted)?);
    for (handover, socket, expected) in [
        (1, file.as_path(), "not a socket of root"),
        (1, deserted.as_path(), "cannot connect"),
        (1, Path::new("/nonexistent/socket"), "cannot stat"),
        (7, file.as_path(), "handover version 1"),
    ] {
        let refused = ask(handover, socket).err().context("it ends")?.to_string();
        ensure!(refused.contains(expected), "{refused}");
    }
    let load = VerifiedLoad::start(&rig.socket("d0"))?;
    load.expect_progress(SOON)?;
    ensure!(load.finish()? > 0);
    Ok(())
}

/// The successor reads slowly. The daemon waits for it, and signals meanwhile do not end the handover.
#[test]
fn signals_during_a_handover_do_not_end_it() -> Result<()> {
    let mut rig = two_disks(blk_and_scsi)?;
    // More sockets than a datagram queue can hold.
    for number in 0..20 {
        let name = format!("e{number}");
        let export = format!("{name}:{}", rig.socket(&name).display());
        rig.daemon
            .lunette(&["export", "add", "vhost-scsi", &export])?;
    }
    let load = VerifiedLoad::start(&rig.socket("d0"))?;
    load.expect_progress(SOON)?;
    let place = rig.scratch.socket("heir");
    let heir = UnixDatagram::bind(&place)?;
    heir.set_read_timeout(Some(Duration::from_secs(10)))?;
    let client = control::Client::new(&rig.daemon.control()).patient(SOON);
    let body = serde_json::json!({"handover": 1, "socket": place});
    client.change(control::Method::POST, "/v1/upgrade", Some(&body))?;
    for _ in 0..50 {
        std::thread::sleep(Duration::from_millis(10));
        rig.daemon.process().signal(Signal::XFSZ)?;
    }
    let mut bytes = [0; 256];
    let mut names = Vec::new();
    // The listening sockets come last.
    while names
        .iter()
        .filter(|name| *name == "handover.export")
        .count()
        < 22
    {
        let length = heir.recv(&mut bytes)?;
        let text = String::from_utf8_lossy(&bytes[..length]);
        let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
        names.extend(name.map(str::to_owned));
    }
    ensure!(names.iter().any(|name| name == "handover"), "{names:?}");
    rig.daemon.process().wait(SOON)?;
    let log = rig.daemon.process().log();
    ensure!(log.contains("sessions handed over sessions=1"), "{log}");
    drop(load);
    Ok(())
}
