//! The daemon under a service manager: readiness, watchdog, socket activation, descriptor store, installed files.
#![forbid(unsafe_code)]

use control::Method;
use end_to_end::client::{Client, VERSION_1};
use end_to_end::{Context, Profile, Result, Scratch, ensure};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, VerifiedLoad, status};
use vm::{Process, lunette_program, wait_until, workspace};

/// Time limit, far above the usual time of any step.
const SOON: Duration = Duration::from_secs(60);

/// Returns the next notification to the service manager.
fn heard(manager: &UnixDatagram) -> Result<String> {
    let mut bytes = [0; 512];
    let length = manager
        .recv(&mut bytes)
        .context("the service manager hears nothing")?;
    Ok(String::from_utf8_lossy(&bytes[..length]).into_owned())
}

#[test]
fn service_manager_gets_ready_watchdog_and_stopping() -> Result<()> {
    let scratch = Scratch::new()?;
    let (notify, socket) = (scratch.socket("notify"), scratch.socket("d.sock"));
    let manager = UnixDatagram::bind(&notify)?;
    manager.set_read_timeout(Some(SOON))?;
    let mut command = Command::new(lunette_program(Profile::Dev)?);
    command
        .args(["serve", "--disk", "d=ram:16M", "--vhost-blk"])
        .arg(format!("d:{}", socket.display()))
        .arg("--control")
        .arg(scratch.socket("control.sock"))
        .arg("--state")
        .arg(scratch.file("state"))
        .env("NOTIFY_SOCKET", &notify)
        .env("WATCHDOG_USEC", "200000");
    let mut process = Process::start("serve", &command, &scratch.file("log"))?;

    let first = heard(&manager).with_context(|| process.log_tail())?;
    ensure!(
        first.starts_with("READY=1\nSTATUS=serving 1 disk "),
        "{first}"
    );
    Client::connect(&socket).context("it was not ready")?;
    for _ in 0..3 {
        let next = heard(&manager)?;
        ensure!(next == "WATCHDOG=1", "{next}");
    }
    process.signal(Signal::TERM)?;
    let last = loop {
        match heard(&manager)? {
            alive if alive == "WATCHDOG=1" => {}
            other => break other,
        }
    };
    ensure!(last == "STOPPING=1", "{last}");
    ensure!(process.wait(SOON)?.success(), "{}", process.log_tail());
    Ok(())
}

/// A daemon with passed sockets. Killed on drop, so that a failed test leaves no process.
struct Passed(Child);

impl Passed {
    fn end(mut self) -> Result<bool> {
        let pid = rustix::process::Pid::from_child(&self.0);
        rustix::process::kill_process(pid, Signal::TERM)?;
        Ok(self.0.wait()?.success())
    }
}

impl Drop for Passed {
    fn drop(&mut self) {
        // Usually the process has already ended.
        self.0.kill().ok();
        self.0.wait().ok();
    }
}

/// Starts a daemon with the sockets of the export `d` and of the control socket.
fn passed(scratch: &Scratch, exports: &OwnedFd, controls: &OwnedFd) -> Result<Passed> {
    // A shell moves them to descriptors 3 and 4, like a service manager, and sets LISTEN_PID to its own process ID.
    let mut command = Command::new("sh");
    command
        .arg("-c")
        .arg("exec 3<&0 4>&1 0</dev/null 1>&2; LISTEN_FDS=2 LISTEN_PID=$$ exec \"$@\"")
        .arg("sh")
        .arg(lunette_program(Profile::Dev)?)
        .args(["serve", "--disk", "d=ram:16M", "--vhost-blk"])
        .arg(format!("d:{}", scratch.socket("d.sock").display()))
        .arg("--control")
        .arg(scratch.socket("control.sock"))
        .arg("--state")
        .arg(scratch.file("state"))
        .stdin(Stdio::from(exports.try_clone()?))
        .stdout(Stdio::from(controls.try_clone()?));
    Ok(Passed(command.spawn()?))
}

#[test]
fn sockets_that_are_passed_are_served_and_stay() -> Result<()> {
    let scratch = Scratch::new()?;
    let (socket, control) = (scratch.socket("d.sock"), scratch.socket("control.sock"));
    let exports = OwnedFd::from(UnixListener::bind(&socket)?);
    let controls = OwnedFd::from(UnixListener::bind(&control)?);
    for round in 0..2 {
        let child = passed(&scratch, &exports, &controls)?;
        let status = wait_until(SOON, || {
            let mut status = Command::new(lunette_program(Profile::Dev).ok()?);
            status.args(["top", "--once", "--interval", "0.1", "--socket"]);
            let output = status.arg(&control).output().ok()?;
            output.status.success().then_some(output.stdout)
        });
        let status = status.context("the control socket does not answer")?;
        let status = String::from_utf8_lossy(&status).into_owned();
        ensure!(
            status.contains(&format!("pid {} ", child.0.id())),
            "{status}"
        );
        let features = Client::connect(&socket)?.features()?;
        ensure!(features & VERSION_1 != 0);
        ensure!(child.end()?, "round {round}");
        ensure!(socket.exists() && control.exists(), "they are not its own");
    }
    Ok(())
}

/// Returns the daemon's next notification and its descriptor.
fn heard_with_descriptor(manager: &UnixDatagram) -> Result<(String, Option<OwnedFd>)> {
    let mut bytes = [0; 512];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(
        manager,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        RecvFlags::CMSG_CLOEXEC,
    );
    let length = received.context("the service manager hears nothing")?.bytes;
    let descriptor = control.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
        _ => None,
    });
    Ok((
        String::from_utf8_lossy(&bytes[..length]).into_owned(),
        descriptor,
    ))
}

/// Starts a daemon with a persistent RAM disk, and passes the stored memory if there is some.
fn with_retained_memory(scratch: &Scratch, memory: Option<&OwnedFd>) -> Result<Passed> {
    let mut command = Command::new("sh");
    let start = match memory {
        Some(_) => {
            "exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_FDNAMES=ram.d LISTEN_PID=$$ exec \"$@\""
        }
        None => "exec \"$@\"",
    };
    command
        .args(["-c", start, "sh"])
        .arg(lunette_program(Profile::Dev)?)
        .args([
            "serve",
            "--sandbox=enforce",
            "--disk",
            "d=ram:16M,persist=memfd",
        ])
        .arg("--vhost-blk")
        .arg(format!("d:{}", scratch.socket("d.sock").display()))
        .arg("--control")
        .arg(scratch.socket("control.sock"))
        .arg("--state")
        .arg(scratch.file("state"))
        .env("NOTIFY_SOCKET", scratch.socket("notify"));
    if let Some(memory) = memory {
        command.stdin(Stdio::from(memory.try_clone()?));
    }
    Ok(Passed(command.spawn()?))
}

/// Waits until the daemon is ready. Returns a driver of the disk and the disk's description from the API.
fn ready_disk(scratch: &Scratch, manager: &UnixDatagram) -> Result<(FrontEnd, BlkQueue, Value)> {
    loop {
        let (line, _) = heard_with_descriptor(manager)?;
        ensure!(!line.starts_with("FDSTORE"), "{line}");
        if line.starts_with("READY=1") {
            break;
        }
    }
    let mut front_end = FrontEnd::connect(&scratch.socket("d.sock"), &Options::default())?;
    let queue = QueueOptions::default();
    let queue = BlkQueue::start(&mut front_end, 0, &queue, 16, 1 << 20, Layout::Separate)?;
    let disk = control::get(&scratch.socket("control.sock"), "/v1/disks/d")?;
    Ok((front_end, queue, disk))
}

fn block(queue: &mut BlkQueue, offset: u64) -> Result<[u8; 4096]> {
    let mut bytes = [0; 4096];
    ensure!(queue.read(offset, &mut bytes)? == status::OK);
    Ok(bytes)
}

/// A minimal version of systemd's descriptor store: passes stored descriptors to the next daemon.
#[test]
fn ram_disk_stored_by_the_manager_survives_kills() -> Result<()> {
    let scratch = Scratch::new()?;
    let manager = UnixDatagram::bind(scratch.socket("notify"))?;
    manager.set_read_timeout(Some(SOON))?;
    let mut daemon = with_retained_memory(&scratch, None)?;
    let (line, memory) = heard_with_descriptor(&manager)?;
    ensure!(line == "FDSTORE=1\nFDNAME=ram.d\nFDPOLL=0", "{line}");
    let memory = memory.context("no descriptor came")?;
    let (front_end, mut queue, first) = ready_disk(&scratch, &manager)?;
    ensure!(queue.write(1 << 20, &[7; 4096])? == status::OK);
    drop((queue, front_end));
    daemon.0.kill()?;
    daemon.0.wait()?;

    daemon = with_retained_memory(&scratch, Some(&memory))?;
    let (front_end, mut queue, again) = ready_disk(&scratch, &manager)?;
    for key in ["serial", "size", "naa"] {
        ensure!(
            first["status"][key] == again["status"][key],
            "{key}: {first} {again}"
        );
    }
    ensure!(block(&mut queue, 1 << 20)? == [7; 4096]);
    let client = control::Client::new(&scratch.socket("control.sock")).patient(SOON);
    let larger = json!({"size": 32 << 20});
    client.change(Method::PUT, "/v1/disks/d/size", Some(&larger))?;
    ensure!(queue.write(31 << 20, &[9; 4096])? == status::OK);
    drop((queue, front_end));
    daemon.0.kill()?;
    daemon.0.wait()?;

    daemon = with_retained_memory(&scratch, Some(&memory))?;
    let (front_end, mut queue, _) = ready_disk(&scratch, &manager)?;
    ensure!(block(&mut queue, 1 << 20)? == [7; 4096]);
    ensure!(block(&mut queue, 31 << 20)? == [9; 4096]);
    drop((queue, front_end));
    // The removal of the disk also removes its stored memory.
    let client = control::Client::new(&scratch.socket("control.sock")).patient(SOON);
    let removed = || client.change(Method::DELETE, "/v1/exports/d", None).ok();
    wait_until(SOON, removed).context("its client stays")?;
    client.change(Method::DELETE, "/v1/disks/d", None)?;
    let line = heard(&manager)?;
    ensure!(line == "FDSTOREREMOVE=1\nFDNAME=ram.d", "{line}");
    ensure!(daemon.end()?);
    Ok(())
}

/// A restart by the service manager: the connected front end continues with the next daemon.
#[test]
fn sessions_stored_by_the_manager_continue_after_a_restart() -> Result<()> {
    let scratch = Scratch::new()?;
    let manager = UnixDatagram::bind(scratch.socket("notify"))?;
    manager.set_read_timeout(Some(Duration::from_secs(2)))?;
    let mut daemon = with_kept(&scratch, &[])?;
    hear_ready(&manager)?;
    let load = VerifiedLoad::start(&scratch.socket("d.sock"))?;
    for _ in 0..3 {
        load.expect_progress(SOON)?;
        let pid = rustix::process::Pid::from_child(&daemon.0);
        rustix::process::kill_process(pid, Signal::TERM)?;
        let mut kept = Vec::new();
        while let Ok((line, descriptor)) = heard_with_descriptor(&manager) {
            let name = line.lines().find_map(|line| line.strip_prefix("FDNAME="));
            kept.extend(name.map(str::to_owned).zip(descriptor));
        }
        ensure!(daemon.0.wait()?.success());
        ensure!(kept.iter().any(|(name, _)| name == "handover"), "{kept:?}");
        daemon = with_kept(&scratch, &kept)?;
        hear_ready(&manager)?;
        // The daemon removes the connections from the store, so that closing them takes effect.
        for _ in &kept {
            let line = heard(&manager)?;
            ensure!(
                line.starts_with("FDSTOREREMOVE=1\nFDNAME=handover"),
                "{line}"
            );
        }
    }
    load.expect_progress(SOON)?;
    ensure!(load.finish()? > 0);
    ensure!(daemon.end()?);
    Ok(())
}

fn hear_ready(manager: &UnixDatagram) -> Result<()> {
    let first = heard(manager)?;
    ensure!(first.starts_with("READY=1"), "{first}");
    Ok(())
}

/// Starts a daemon with a disk in a file and the descriptors in a service manager's store.
fn with_kept(scratch: &Scratch, kept: &[(String, OwnedFd)]) -> Result<Passed> {
    let (mut moves, mut inherited) = (String::new(), Vec::new());
    for (place, (_, fd)) in (3..).zip(kept) {
        // The descriptor is inherited with a number above the final ones.
        let above = rustix::io::fcntl_dupfd_cloexec(fd, 200)?;
        rustix::io::fcntl_setfd(&above, rustix::io::FdFlags::empty())?;
        moves.push_str(&format!("exec {place}<&{0} {0}<&-; ", above.as_raw_fd()));
        inherited.push(above);
    }
    let names: Vec<&str> = kept.iter().map(|(name, _)| name.as_str()).collect();
    let script = format!(
        "{moves} LISTEN_FDS={} LISTEN_FDNAMES={} LISTEN_PID=$$ exec \"$@\"",
        kept.len(),
        names.join(":")
    );
    let mut command = Command::new("bash");
    command
        .args(["-c", &script, "bash"])
        .arg(lunette_program(Profile::Dev)?)
        .args(["serve", "--disk"])
        .arg(format!(
            "d=file:{},size=16M,cache=writeback",
            scratch.file("d.raw").display()
        ))
        .arg("--vhost-blk")
        .arg(format!("d:{}", scratch.socket("d.sock").display()))
        .arg("--control")
        .arg(scratch.socket("control.sock"))
        .arg("--state")
        .arg(scratch.file("state"))
        .env("NOTIFY_SOCKET", scratch.socket("notify"));
    let daemon = Passed(command.spawn()?);
    drop(inherited);
    Ok(daemon)
}

/// Only the service manager's socket can listen at this path, so the export must survive every change.
#[test]
fn export_on_a_passed_socket_can_be_changed_and_restored() -> Result<()> {
    let scratch = Scratch::new()?;
    let (socket, control) = (scratch.socket("d.sock"), scratch.socket("control.sock"));
    let exports = OwnedFd::from(UnixListener::bind(&socket)?);
    let controls = OwnedFd::from(UnixListener::bind(&control)?);
    let child = passed(&scratch, &exports, &controls)?;
    let asks = control::Client::new(&control).patient(SOON);
    let features = || Client::connect(&socket)?.features();

    let put = |name: &str, disk: &str, queues: u16| {
        let body = json!({"kind": "vhost-blk", "disk": disk, "socket": socket, "queues": queues});
        let path = format!("/v1/exports/{name}?force=true");
        asks.change(Method::PUT, &path, Some(&body))
    };
    put("d", "d", 2)?;
    ensure!(features()? & VERSION_1 != 0);
    // The change fails after the export was removed to make room, because the other socket's folder is missing.
    let mut wanted: Value = asks.get("/v1/config")?;
    let nowhere = scratch.file("nowhere/x.sock");
    let exports_wanted = wanted["exports"].as_array_mut().context("a list")?;
    exports_wanted[0]["queues"] = json!(4);
    exports_wanted.push(json!({"kind": "vhost-blk", "name": "x", "disk": "d", "socket": nowhere}));
    for kind in ["disks", "exports"] {
        for one in wanted[kind].as_array_mut().into_iter().flatten() {
            one.as_object_mut().map(|one| one.remove("status"));
        }
    }
    let refused = asks.change(Method::PUT, "/v1/config?force=true", Some(&wanted));
    ensure!(refused.is_err(), "{refused:?}");
    ensure!(features()? & VERSION_1 != 0);
    let shown: Value = asks.get("/v1/exports/d")?;
    ensure!(shown["queues"] == 2, "{shown}");
    // Another export replaces a removed one on the socket.
    asks.change(Method::DELETE, "/v1/exports/d?force=true", None)?;
    put("e", "d", 1)?;
    ensure!(features()? & VERSION_1 != 0);
    ensure!(child.end()? && socket.exists());
    Ok(())
}

/// Sockets are matched to exports by the configuration file and the flags, which do not contain later changes.
#[test]
fn passed_socket_serves_runtime_changes_after_a_restart() -> Result<()> {
    let scratch = Scratch::new()?;
    let (socket, control) = (scratch.socket("d.sock"), scratch.socket("control.sock"));
    let exports = OwnedFd::from(UnixListener::bind(&socket)?);
    let controls = OwnedFd::from(UnixListener::bind(&control)?);
    let asks = control::Client::new(&control).patient(SOON);
    let change = |method, name: &str, socket: &Path| {
        let export = json!({"kind": "vhost-blk", "disk": "d", "socket": socket});
        asks.change(method, &format!("/v1/exports/{name}"), Some(&export))
    };
    let names = || -> Result<Vec<Value>> {
        let all: Value = asks.get("/v1/config")?;
        let all = all["exports"].as_array().context("a list")?;
        Ok(all.iter().map(|export| export["name"].clone()).collect())
    };
    let restarted = |child: Passed| -> Result<Passed> {
        ensure!(child.end()?);
        passed(&scratch, &exports, &controls)
    };

    // An export with another name on the socket.
    let child = passed(&scratch, &exports, &controls)?;
    change(Method::DELETE, "d", &socket)?;
    change(Method::PUT, "e", &socket)?;
    let child = restarted(child)?;
    ensure!(names()? == ["e"]);
    ensure!(Client::connect(&socket)?.features()? & VERSION_1 != 0);
    // No export on the socket, and later one again. The daemon may not yet have noticed that the client left.
    change(Method::DELETE, "e?force=true", &socket)?;
    let child = restarted(child)?;
    ensure!(names()?.is_empty());
    change(Method::PUT, "e", &socket)?;
    ensure!(Client::connect(&socket)?.features()? & VERSION_1 != 0);
    // The configured export name with another socket.
    let elsewhere = scratch.socket("elsewhere.sock");
    change(Method::DELETE, "e?force=true", &socket)?;
    change(Method::PUT, "d", &elsewhere)?;
    let child = restarted(child)?;
    ensure!(names()? == ["d"]);
    ensure!(Client::connect(&elsewhere)?.features()? & VERSION_1 != 0);
    ensure!(child.end()? && socket.exists());
    Ok(())
}

fn make(goal: &str, prefix: &Path, target: &Path) -> Result<()> {
    let output = Command::new("make")
        .current_dir(workspace())
        .env_remove("MAKEFLAGS")
        .arg(goal)
        .arg(format!("PREFIX={}", prefix.display()))
        .arg(format!("target_directory={}", target.display()))
        .output()?;
    let error_text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.success(), "make {goal}: {error_text}");
    Ok(())
}

fn files_below(folder: &Path) -> Result<Vec<std::path::PathBuf>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        match path.is_dir() {
            true => found.extend(files_below(&path)?),
            false => found.push(path),
        }
    }
    Ok(found)
}

#[test]
fn units_pages_and_completions_are_installed_and_removed_again() -> Result<()> {
    let scratch = Scratch::new()?;
    let (target, prefix) = (scratch.file("target"), scratch.file("usr"));
    std::fs::create_dir_all(target.join("release"))?;
    let program = lunette_program(Profile::Dev)?;
    for name in ["lunette", "lunette-lab"] {
        let built = program.with_file_name(name);
        std::fs::copy(built, target.join("release").join(name))?;
    }
    let agent = target.join("guest-agent/x86_64-unknown-linux-gnu/release");
    std::fs::create_dir_all(&agent)?;
    std::fs::copy(
        vm::guest_program(vm::GuestProgram::Agent)?,
        agent.join("guest-agent"),
    )?;
    make("install", &prefix, &target)?;
    for file in [
        "libexec/lunette/guest-agent",
        "lib/sysusers.d/lunette.conf",
        "lib/tmpfiles.d/lunette.conf",
        "share/man/man1/lunette.1",
        "share/man/man1/lunette-serve.1",
        "share/man/man1/lunette-lab.1",
        "share/man/man5/lunette.toml.5",
        "bin/lunette-lab",
        "share/bash-completion/completions/lunette",
        "share/zsh/site-functions/_lunette",
        "share/fish/vendor_completions.d/lunette.fish",
    ] {
        let size = std::fs::metadata(prefix.join(file)).map(|file| file.len());
        ensure!(size.is_ok_and(|size| size > 0), "{file} is not installed");
    }
    let completion =
        std::fs::read_to_string(prefix.join("share/bash-completion/completions/lunette"))?;
    ensure!(completion.contains("vhost-user-blk"));

    let units = prefix.join("lib/systemd/system");
    let service = std::fs::read_to_string(units.join("lunette.service"))?;
    let program = prefix.join("bin/lunette");
    ensure!(service.contains(&format!("ExecStart={} serve", program.display())));
    ensure!(!service.contains("@BINDIR@"));
    let verified = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .args([units.join("lunette.service"), units.join("lunette.socket")])
        .output();
    let output = verified.context("cannot run systemd-analyze; hint: apt-get install systemd")?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    let ours: Vec<&str> = errors
        .lines()
        .filter(|line| line.contains("lunette"))
        .collect();
    ensure!(output.status.success() && ours.is_empty(), "{errors}");
    // The threshold is 1.6 of 10.0 (unconfined).
    let output = Command::new("systemd-analyze")
        .args(["security", "--offline=yes", "--threshold=16", "--no-pager"])
        .arg(units.join("lunette.service"))
        .output()?;
    let listing = String::from_utf8_lossy(&output.stdout).into_owned();
    ensure!(output.status.success(), "{listing}");

    make("uninstall", &prefix, &target)?;
    let left = files_below(&prefix)?;
    ensure!(left.is_empty(), "uninstall leaves {left:?}");
    Ok(())
}
