//! Sockets, disks and job targets that the sandbox or file permissions forbid: the error names the reason and the configuration key.
//! Needs: Landlock; root for the part about permissions. Takes: 2 s.
#![forbid(unsafe_code)]

use end_to_end::{Context, DaemonBuilder, Result, Rig, Scratch, ensure};
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::process::{Command, Stdio};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use vm::wait_until;

#[test]
fn sandbox_names_itself_and_its_key() -> Result<()> {
    let (scratch, other) = (Scratch::new()?, Scratch::new()?);
    let outside = other.sockets();
    std::fs::write(outside.join("there.raw"), [0; 1 << 16])?;
    for file in ["ceph.conf", "keyring", "chap"] {
        std::fs::write(outside.join(file), "")?;
    }
    let outside = outside.display();
    let inside = scratch.file("inside");
    std::fs::create_dir(&inside)?;
    let disk = format!("d=file:{}/d.raw,size=1M", inside.display());
    let start = |paths: &[&str]| {
        let daemon = DaemonBuilder::new(&scratch).disk(&disk);
        let daemon = daemon.arguments(["--sandbox", "enforce"]);
        daemon.arguments(paths.iter().copied()).start()
    };
    let socket = format!("d:{outside}/d.sock");
    let created = format!("e=file:{outside}/e.raw,size=1M");
    let there = format!("e=file:{outside}/there.raw");
    let target = format!("file:{outside}/backup.raw");
    let conf = format!("e=rbd:rbd/e,conf={outside}/ceph.conf");
    let keyring = format!("e=rbd:rbd/e,mon_host=::1,keyring={outside}/keyring");
    let chap = format!("e=iscsi://u@[::1]:9/iqn.2026-11.org.example:e/0,chap_file={outside}/chap");
    let commands: [&[&str]; 7] = [
        &["export", "add", "vhost-blk", &socket],
        &["disk", "add", &created],
        &["disk", "add", &there],
        &["disk", "backup", "d", &target],
        &["disk", "add", &conf],
        &["disk", "add", &keyring],
        &["disk", "add", &chap],
    ];
    let mut daemon = start(&[])?;
    let status = daemon.lunette(&["status"])?;
    ensure!(!status.contains("files are not confined"), "{status}");
    for words in commands {
        let output = daemon.ask(words)?;
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1), "{words:?}: {errors}");
        for part in [
            "the sandbox does not allow",
            &format!("add {outside} to sandbox_paths"),
        ] {
            ensure!(errors.contains(part), "{words:?}: no {part:?} in {errors}");
        }
    }
    ensure!(daemon.stop(Duration::from_secs(30))?.success());
    // With the configuration key the same commands succeed.
    let daemon = start(&["--sandbox-path", &outside.to_string()])?;
    // `start` finds its line in the log of the previous daemon, so the test waits for the socket.
    let control = daemon.control();
    wait_until(Duration::from_secs(30), || control.exists().then_some(())).context("no socket")?;
    for at in [0, 1, 3] {
        daemon.lunette(commands[at])?;
    }
    Ok(())
}

/// An example that is copied to /etc/lunette overrides the unit, so it has the same mode.
#[test]
fn packages_and_tests_run_the_daemon_with_enforce() -> Result<()> {
    for (file, line) in [
        (
            "contrib/systemd/lunette.service.in",
            "\nEnvironment=LUNETTE_SANDBOX=enforce\n",
        ),
        ("contrib/lunette.toml", "\nsandbox = \"enforce\"\n"),
        (
            "contrib/kubernetes/lunette.yaml",
            " sandbox = \"enforce\"\n",
        ),
        ("scripts/oci", ",\"LUNETTE_SANDBOX=enforce\"]"),
    ] {
        let text = std::fs::read_to_string(vm::workspace().join(file))?;
        ensure!(text.contains(line), "{file} lacks {line:?}");
    }
    let scratch = Scratch::new()?;
    let daemon = DaemonBuilder::new(&scratch).disk("r=ram:1M").start()?;
    let status: control::Status = serde_json::from_str(&daemon.lunette(&["status", "--json"])?)?;
    ensure!(status.sandbox == "enforce", "{}", status.sandbox);
    Ok(())
}

/// No test selects another mode, by a flag, a key or the environment.
#[test]
fn tests_leave_the_sandbox_on() -> Result<()> {
    let mut found = Vec::new();
    for folder in ["tests/tests", "tests/src"] {
        for entry in std::fs::read_dir(vm::workspace().join(folder))? {
            let path = entry?.path();
            if path.extension().is_none_or(|extension| extension != "rs") {
                continue;
            }
            let text = std::fs::read_to_string(&path)?.to_lowercase();
            let mut settings = text.split("sandbox").skip(1);
            let is_other = settings.any(|rest| {
                let value = rest.trim_start_matches(|c: char| " =,\\\"".contains(c));
                let word = value.split(|c: char| !c.is_ascii_alphabetic()).next();
                matches!(word, Some("off" | "log" | "threads"))
            });
            if is_other {
                found.push(path);
            }
        }
    }
    ensure!(found.is_empty(), "modes other than enforce in {found:?}");
    Ok(())
}

/// Runs `lunette serve` on a read-only file system, and on a file of another user, without the capability to read all files.
#[test]
fn files_that_cannot_be_written_name_the_reason_and_the_remedy() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return Ok(());
    }
    let script = "mkdir fixed && mount -t tmpfs none fixed && truncate -s 1M fixed/d.raw foreign.raw && chown 65534 foreign.raw &&
        chmod 600 foreign.raw && mount -o remount,ro fixed &&
        exec setpriv --bounding-set=-dac_override,-dac_read_search \"$@\"";
    let mut rig = Rig::new(|daemon| {
        let daemon = daemon.under(&["unshare", "--mount", "sh", "-c", script, "sh"]);
        let daemon = daemon.disk("a=file:fixed/d.raw").disk("b=file:foreign.raw");
        daemon.disk("c=file:fixed/new.raw,size=1M")
    })?;
    for (file, reason) in [
        (
            "fixed/d.raw",
            "cannot open it for writing: its file system is read-only; hint: set read_only, or remount it writable",
        ),
        (
            "foreign.raw",
            "no permission to open it for reading and writing as user root; hint: give that user access",
        ),
        (
            "fixed/new.raw",
            "cannot create it: its file system is read-only; hint: remount it writable",
        ),
    ] {
        rig.daemon.logs(&format!("{file}: {reason}"))?;
    }
    Ok(())
}

/// Runs `lunette serve` as a user without permission for a folder.
#[test]
fn permissions_name_the_user_and_the_key() -> Result<()> {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped: needs root");
        return Ok(());
    }
    let scratch = Scratch::new()?;
    let place = scratch.sockets();
    std::fs::set_permissions(place, std::fs::Permissions::from_mode(0o755))?;
    let folder = place.join("closed");
    std::fs::create_dir(&folder)?;
    std::fs::set_permissions(&folder, std::fs::Permissions::from_mode(0o755))?;
    let own = place.join("own");
    std::fs::create_dir(&own)?;
    std::fs::set_permissions(&own, std::fs::Permissions::from_mode(0o777))?;
    let (folder, own) = (folder.display(), own.display());
    let closed = format!("{folder}/x.sock");
    for (control, socket, key) in [
        (format!("{own}/c.sock"), closed.clone(), "`socket`"),
        (closed, format!("{own}/d.sock"), "`control`"),
    ] {
        let mut daemon = Command::new("setpriv")
            .args(["--reuid=65534", "--regid=65534", "--clear-groups"])
            .arg(vm::lunette_program(vm::Profile::Dev)?)
            .args(["serve", "--disk", "d=ram:1M", "--control", &control])
            .args(["--vhost-blk", &format!("d:{socket}"), "--state"])
            .arg(format!("{own}/state"))
            .stderr(Stdio::piped())
            .spawn()?;
        let stderr = BufReader::new(daemon.stderr.take().context("no pipe")?);
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            let mut lines = stderr.lines().map_while(std::result::Result::ok);
            lines.try_for_each(|line| sender.send(line))
        });
        let mut errors = String::new();
        let is_complete = |errors: &str| {
            let mut parts = ["x.sock", "user nobody", key].into_iter();
            parts.all(|part| errors.contains(part))
        };
        // The daemon has ended if there are no more lines.
        let end = Instant::now() + Duration::from_secs(30);
        let left = || end.saturating_duration_since(Instant::now());
        while !is_complete(&errors)
            && let Ok(line) = lines.recv_timeout(left())
        {
            errors += &line;
        }
        daemon.kill()?;
        daemon.wait()?;
        ensure!(is_complete(&errors), "{key}: {errors}");
        ensure!(!errors.contains("sandbox_paths"), "{errors}");
    }
    Ok(())
}
