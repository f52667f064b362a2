//! The program as other software starts it: conventions of vhost-user back ends, sockets, signals, installed files.
#![forbid(unsafe_code)]

use end_to_end::client::{Client, VERSION_1};
use end_to_end::{Context, DaemonBuilder, Profile, Result, Rig, Scratch, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;
use vm::{Process, lunette_program, wait_until, workspace};

/// Time limit for a stop, far above the usual time.
const SOON: Duration = Duration::from_secs(20);

fn lunette(words: &[&str]) -> Result<Command> {
    let mut command = Command::new(lunette_program(Profile::Dev)?);
    command.args(words);
    Ok(command)
}

/// Starts a back end program on `socket` and waits until it answers.
fn back_end(kind: &str, scratch: &Scratch, socket: &Path) -> Result<(Process, Client)> {
    let file = scratch.file("disk.raw");
    std::fs::write(&file, vec![0; 1 << 20])?;
    let mut command = lunette(&[kind, "--socket-path"])?;
    command.arg(socket).arg("--blk-file").arg(&file);
    let mut process = Process::start(kind, &command, &scratch.file("back-end.log"))?;
    let client = wait_until(SOON * 3, || Client::connect(socket).ok());
    process.check_running()?;
    let mut client = client.with_context(|| process.log_tail())?;
    ensure!(client.features()? & VERSION_1 != 0);
    Ok((process, client))
}

#[test]
fn capabilities_follow_the_back_end_conventions() -> Result<()> {
    for (kind, device) in [("vhost-user-blk", "block"), ("vhost-user-scsi", "scsi")] {
        let output = lunette(&[kind, "--print-capabilities"])?.output()?;
        ensure!(output.status.success(), "{kind}: {}", output.status);
        let printed: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(printed["type"] == device, "{kind} prints {printed}");
        if device == "block" {
            let features = printed["features"].as_array().context("no features")?;
            for feature in ["blk-file", "read-only"] {
                ensure!(
                    features.iter().any(|found| found == feature),
                    "{feature} is not in {printed}"
                );
            }
        }
    }
    Ok(())
}

#[test]
fn a_configuration_with_mistakes_has_an_exit_code_of_its_own() -> Result<()> {
    let scratch = Scratch::new()?;
    let control = scratch.file("control.sock");
    let control = control.to_string_lossy();
    let serve = ["serve", "--control", &control, "--disk"];
    let mistaken = lunette(&serve)?.arg("d0=ram:many").output()?;
    ensure!(mistaken.status.code() == Some(2), "{}", mistaken.status);
    let checked = lunette(&["check", "--disk", "d0=ram:many"])?.output()?;
    ensure!(checked.status.code() == Some(2), "{}", checked.status);
    // A start that may succeed later has another exit code, for which a service manager retries.
    let file = scratch.file("file");
    std::fs::write(&file, [])?;
    let socket = file.join("d0.sock");
    let export = format!("d0:{}", socket.display());
    let failed = lunette(&serve)?
        .args(["d0=ram:1M", "--vhost-blk", &export])
        .output()?;
    ensure!(failed.status.code() == Some(1), "{}", failed.status);
    Ok(())
}

/// Scripts can distinguish invalid arguments from a refused request.
#[test]
fn invalid_command_line_has_its_own_exit_code() -> Result<()> {
    let rig = Rig::new(|daemon| daemon.disk("d=ram:1M").vhost_scsi("c"))?;
    for (words, code, expected) in [
        (&["lun", "add", "c", "300:0", "d"][..], 2, "300:0"),
        (&["lun", "remove", "c", "4"], 2, "TARGET:LUN"),
        (&["lun", "remove", "c", "4:0"], 1, "c/4:0"),
        (&["disk", "resize", "d", "many"], 2, "many"),
        (&["disk", "resize", "none", "1G"], 1, "none"),
        (&["disk", "limit", "d", "speed=1"], 2, "speed=1"),
        (&["disk", "limit", "d", "iops=0"], 2, "iops"),
        (&["log", "dbug"], 2, "dbug"),
        (&["latency", "--watch=0"], 2, "--watch=0"),
        (&["top", "--once", "disk"], 2, "disk"),
        (&["top", "--once", "--interval=0"], 2, "--interval 0"),
    ] {
        let output = rig.daemon.ask(words)?;
        let error_text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(
            output.status.code() == Some(code),
            "{words:?}: {error_text}"
        );
        ensure!(error_text.contains(expected), "{words:?}: {error_text}");
    }
    for (words, expected) in [
        (&["--log", "dbug", "completion", "bash"][..], "dbug"),
        (&["status", "--api", "https://127.0.0.1:1"], "--token-file"),
        (
            &[
                "vhost-user-scsi",
                "--blk-file=x",
                "--socket-path=y",
                "--num-queues=255",
            ],
            "255",
        ),
        (
            &[
                "vhost-user-blk",
                "--blk-file=x",
                "--socket-path=y",
                "--cache=some",
            ],
            "some",
        ),
    ] {
        let output = lunette(words)?.output()?;
        let error_text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(2), "{words:?}: {error_text}");
        ensure!(error_text.contains(expected), "{words:?}: {error_text}");
    }
    Ok(())
}

/// The daemon may see other files than its client: as another user, in another container, or on another machine.
#[test]
fn the_daemon_looks_for_the_file_of_a_disk_that_is_added() -> Result<()> {
    let rig = Rig::new(|daemon| daemon.disk("d=ram:1M"))?;
    let output = rig
        .daemon
        .ask(&["disk", "add", "e=file:/no/such/disk.raw"])?;
    let error_text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1), "{error_text}");
    ensure!(
        error_text.contains("disk e: /no/such/disk.raw: does not exist"),
        "{error_text}"
    );
    Ok(())
}

/// The log and `lunette status` name conditions that the configuration permits, and that leave clients without a disk.
#[test]
fn conditions_without_clients_are_reported_by_check_log_and_status() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        let daemon = daemon.disk("gone=file:gone.raw").disk("large=ram:1T");
        daemon.arguments(["--vhost-blk", "gone:gone.sock"])
    })?;
    rig.daemon
        .logs("the export waits for its disk; hint: lunette status")?;
    rig.daemon.logs("RAM disks have 1024 GiB, and this host ")?;
    rig.daemon.lunette(&["disk", "add", "more=ram:1T"])?;
    rig.daemon.logs("RAM disks have 2048 GiB, and this host ")?;
    ensure!(!rig.daemon.process().log().contains("no exports"));

    let closed = "iqn.2026-11.org.example:closed=large";
    let warning = "no initiator may log in; hint: add initiators with `acl`";
    let add = ["export", "add", "iscsi", closed, "--portal", "127.0.0.1:0"];
    rig.daemon.lunette(&add)?;
    rig.daemon.logs(warning)?;
    let status = rig.daemon.ask(&["status"])?;
    let status = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(status.contains(warning), "{status}");
    let check = ["check", "--disk", "large=ram:1M", "--iscsi", closed];
    let check = lunette(&check)?
        .args(["--portal", "127.0.0.1:0"])
        .output()?;
    let checked = String::from_utf8_lossy(&check.stdout).into_owned();
    ensure!(
        check.status.success() && checked.contains(warning),
        "{checked}"
    );
    Ok(())
}

#[test]
fn a_back_end_program_serves_its_socket_and_ends_at_once_on_sigterm() -> Result<()> {
    for kind in ["vhost-user-blk", "vhost-user-scsi"] {
        let scratch = Scratch::new()?;
        let (mut process, mut client) = back_end(kind, &scratch, &scratch.socket("s"))?;
        ensure!(client.features()? & VERSION_1 != 0);
        process.signal(Signal::TERM)?;
        let status = process.wait(SOON)?;
        ensure!(
            status.success(),
            "{kind} ended with {status}\n{}",
            process.log_tail()
        );
    }
    Ok(())
}

/// Starts a back end program with `socket` as its descriptor 7.
fn with_descriptor(scratch: &Scratch, socket: OwnedFd) -> Result<Child> {
    let file = scratch.file("disk.raw");
    std::fs::write(&file, vec![0; 1 << 20])?;
    // A shell moves it from standard input, the only place where std can pass a descriptor.
    Ok(Command::new("setpriv")
        .args(["--pdeathsig", "KILL", "sh", "-c"])
        .arg("exec \"$0\" vhost-user-blk --fd 7 --blk-file \"$1\" 7<&0 </dev/null")
        .arg(lunette_program(Profile::Dev)?)
        .arg(&file)
        .stdin(Stdio::from(socket))
        .spawn()?)
}

/// Waits for the end of a child and kills it after the time limit.
fn ends(mut child: Child) -> Result<bool> {
    let ended = wait_until(SOON, || child.try_wait().transpose());
    if ended.is_none() {
        child.kill()?;
        child.wait()?;
    }
    Ok(ended.is_some())
}

#[test]
fn a_back_end_program_serves_a_connection_that_it_inherits() -> Result<()> {
    let scratch = Scratch::new()?;
    let (ours, theirs) = UnixStream::pair()?;
    let child = with_descriptor(&scratch, theirs.into())?;
    let mut client = Client::over(ours)?;
    let features = client.features();
    drop(client);
    let ended = ends(child)?;
    ensure!(features? & VERSION_1 != 0);
    ensure!(ended, "it still ran after its only connection was closed");
    Ok(())
}

#[test]
fn a_back_end_program_serves_a_listening_socket_that_it_inherits() -> Result<()> {
    let scratch = Scratch::new()?;
    let socket = scratch.socket("inherited");
    let child = with_descriptor(&scratch, UnixListener::bind(&socket)?.into())?;
    let features = (0..2)
        .map(|_| Client::connect(&socket)?.features())
        .collect::<Result<Vec<_>>>();
    kill_process(Pid::from_child(&child), Signal::TERM)?;
    let ended = ends(child)?;
    ensure!(features?.iter().all(|features| features & VERSION_1 != 0));
    ensure!(ended, "it did not end on SIGTERM");
    Ok(())
}

#[test]
fn closed_stderr_causes_no_panic() -> Result<()> {
    let (reader, writer) = std::io::pipe()?;
    drop(reader);
    let mut command = Command::new(lunette_program(Profile::Dev)?);
    command.args(["status", "--socket", "/nowhere/at/all"]);
    let status = command.stderr(writer).status()?;
    ensure!(status.code() == Some(1), "{status}");
    Ok(())
}

#[test]
fn a_second_client_is_refused_and_the_first_one_stays() -> Result<()> {
    let mut rig = Rig::new(|daemon| daemon.disk("a=ram:16M").vhost_blk("a"))?;
    let socket = rig.socket("a");
    let mut first = Client::connect(&socket)?;
    // The second response shows that the first message was processed completely.
    first.features()?;
    first.features()?;
    let second = Client::connect(&socket).and_then(|mut second| second.features());
    ensure!(second.is_err(), "a second client was served");
    ensure!(first.features()? & VERSION_1 != 0);

    // Any number of clients may follow each other.
    drop(first);
    for _ in 0..50 {
        let served = wait_until(SOON, || {
            Client::connect(&socket)
                .and_then(|mut next| next.features())
                .ok()
        });
        ensure!(
            served.is_some(),
            "no client is served any more\n{}",
            rig.daemon.process().log_tail()
        );
    }
    Ok(())
}

#[test]
fn a_stale_socket_is_replaced_a_live_one_and_other_files_are_not() -> Result<()> {
    let scratch = Scratch::new()?;
    let socket = scratch.socket("a.sock");
    drop(UnixListener::bind(&socket)?);
    ensure!(socket.exists(), "a closed listener leaves its file");
    let describe = || {
        DaemonBuilder::new(&scratch)
            .disk("a=ram:16M")
            .vhost_blk("a")
            .arguments(["--workers", "1"])
    };
    let mut daemon = describe().start()?;
    Client::connect(&socket)?.features()?;

    let inode = std::fs::metadata(&socket)?.ino();
    let thief = Scratch::new()?;
    let mut second = DaemonBuilder::new(&thief)
        .disk("a=ram:16M")
        .arguments(["--vhost-blk", &format!("a:{}", socket.display())])
        .start()?;
    let status = second.ask(&["status"])?;
    let text = String::from_utf8_lossy(&status.stdout).into_owned();
    ensure!(
        !status.status.success() && text.contains("another process serves socket"),
        "{text}"
    );
    ensure!(second.stop(SOON)?.success());
    ensure!(
        std::fs::metadata(&socket)?.ino() == inode,
        "the live socket was replaced"
    );
    let served = wait_until(SOON, || {
        Client::connect(&socket)
            .and_then(|mut next| next.features())
            .ok()
    });
    ensure!(served.is_some(), "the first daemon is not reached any more");
    ensure!(daemon.stop(SOON)?.success());

    let precious = thief.socket("precious");
    std::fs::write(&precious, "not a socket")?;
    let (status, log) = DaemonBuilder::new(&thief)
        .disk("a=ram:16M")
        .arguments(["--vhost-blk", &format!("a:{}", precious.display())])
        .start_refused()?;
    ensure!(
        !status.success() && log.contains("precious"),
        "{status}: {log}"
    );
    ensure!(std::fs::read_to_string(&precious)? == "not a socket");
    Ok(())
}

#[test]
fn serve_ends_on_sigterm_and_prints_stages_on_sigusr1() -> Result<()> {
    for signal in [Signal::TERM, Signal::INT] {
        let mut rig = Rig::new(|daemon| {
            daemon
                .disk("a=ram:16M")
                .disk("b=file:b.raw,size=16M")
                .vhost_blk("a")
                .vhost_scsi("c")
                .lun("c/0:0=b")
        })?;
        let mut client = Client::connect(&rig.socket("a"))?;
        client.features()?;
        let process = rig.daemon.process();
        process.signal(Signal::USR1)?;
        let printed = wait_until(SOON, || process.log().contains("notified").then_some(()));
        ensure!(
            printed.is_some(),
            "no stages after SIGUSR1\n{}",
            process.log_tail()
        );
        process.check_running()?;
        process.signal(signal)?;
        let status = process.wait(SOON)?;
        ensure!(
            status.success(),
            "{signal:?}: {status}\n{}",
            process.log_tail()
        );
    }
    Ok(())
}

#[test]
fn file_equals_flags_and_all_mistakes_are_reported() -> Result<()> {
    let scratch = Scratch::new()?;
    let (socket, file) = (scratch.socket("d.sock"), scratch.file("lunette.toml"));
    let good = format!(
        "[[disk]]\nname = \"d\"\nbackend = \"ram\"\nsize = \"16M\"\n\n[[vhost_blk]]\ndisk = \"d\"\nsocket = \"{}\"\n",
        socket.display()
    );
    std::fs::write(&file, &good)?;
    let path = file.to_str().context("a path of text")?;
    let output = lunette(&["check", "--config", path])?.output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );

    let mut process = Process::start(
        "serve",
        &lunette(&["serve", "--config", path])?,
        &scratch.file("log"),
    )?;
    let served = wait_until(SOON * 3, || {
        Client::connect(&socket)
            .and_then(|mut client| client.features())
            .ok()
    });
    ensure!(served.is_some(), "{}", process.log_tail());
    process.signal(Signal::TERM)?;
    process.wait(SOON)?;

    let bad = good
        .replace("\"ram\"", "\"rma\"")
        .replace("disk = \"d\"", "disk = \"e\"");
    std::fs::write(&file, bad)?;
    let output = lunette(&["check", "--config", path])?.output()?;
    let errors = String::from_utf8_lossy(&output.stderr).into_owned()
        + &String::from_utf8_lossy(&output.stdout);
    ensure!(!output.status.success());
    for part in ["lunette.toml", "rma", "ram", "3", "7"] {
        ensure!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    Ok(())
}

#[test]
fn installed_program_starts_as_qemu_and_libvirt_start_it() -> Result<()> {
    let scratch = Scratch::new()?;
    let built = scratch.file("target/release");
    std::fs::create_dir_all(&built)?;
    let program = lunette_program(Profile::Dev)?;
    std::fs::copy(&program, built.join("lunette"))?;
    std::fs::copy(
        program.with_file_name("lunette-lab"),
        built.join("lunette-lab"),
    )?;
    let prefix = scratch.file("usr");
    let output = Command::new("make")
        .current_dir(workspace())
        .env_remove("MAKEFLAGS")
        .arg("install")
        .arg(format!("PREFIX={}", prefix.display()))
        .arg(format!(
            "target_directory={}",
            scratch.file("target").display()
        ))
        .output()?;
    ensure!(
        output.status.success(),
        "make install: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    ensure!(prefix.join("bin/lunette").exists());

    for (kind, device) in [("blk", "block"), ("scsi", "scsi")] {
        let descriptor = prefix.join(format!("share/qemu/vhost-user/50-lunette-{kind}.json"));
        let descriptor: Value = serde_json::from_slice(&std::fs::read(&descriptor)?)?;
        ensure!(
            descriptor["type"] == device && descriptor["description"].is_string(),
            "{descriptor}"
        );
        let program = descriptor["binary"].as_str().context("no binary")?;
        let output = Command::new(program).arg("--print-capabilities").output()?;
        let printed: Value = serde_json::from_slice(&output.stdout)?;
        ensure!(printed["type"] == device, "{program} prints {printed}");
    }
    Ok(())
}
