//! The examples in README.md and docs/getting-started.md work as printed. Only paths are changed: sockets and files are in the
//! test's own folders, and the guest is emulated without KVM. Needs the built program and QEMU. Takes: 30 s.
#![forbid(unsafe_code)]

use end_to_end::client::{Client, VERSION_1};
use end_to_end::{Context, GuestBuilder, Profile, Result, Scratch, ensure};
use std::io::Write;
use std::os::unix::fs::symlink;
use std::process::{Command, Stdio};
use std::time::Duration;
use vm::{Accelerator, Process, guest_directory, lunette_program, wait_until, workspace};

const README: &str = "README.md";
const GETTING_STARTED: &str = "docs/getting-started.md";

/// Returns a document's code blocks in a language that contain `word`.
fn blocks(document: &str, language: &str, word: &str) -> Result<Vec<String>> {
    let text = std::fs::read_to_string(workspace().join(document))?;
    let opening = format!("```{language}\n");
    Ok(text
        .split(&opening)
        .skip(1)
        .filter_map(|rest| rest.split_once("```"))
        .map(|(block, _)| block.to_owned())
        .filter(|block| block.contains(word))
        .collect())
}

fn only(document: &str, language: &str, word: &str) -> Result<String> {
    let mut found = blocks(document, language, word)?;
    ensure!(
        found.len() == 1,
        "{document} has {} {language} blocks with {word}",
        found.len()
    );
    found.pop().context("none")
}

#[test]
fn the_qemu_example_boots_a_guest_that_sees_both_disks() -> Result<()> {
    // The lab's own guest creates the boot files of the example.
    GuestBuilder::new("readme").boot()?.power_off()?;

    let scratch = Scratch::new()?;
    std::fs::create_dir_all(scratch.file("target/release"))?;
    symlink(
        lunette_program(Profile::Dev)?,
        scratch.file("target/release/lunette"),
    )?;
    std::fs::create_dir(scratch.file("build"))?;
    symlink(guest_directory(), scratch.file("build/guest"))?;
    let place = |text: String| text.replace("/tmp/", &format!("{}/", scratch.sockets().display()));

    let mut serve = Command::new("sh");
    serve.arg("-c").arg(format!(
        "exec {}",
        place(only(README, "sh", "--vhost-blk")?)
    ));
    serve.current_dir(scratch.files());
    let mut daemon = Process::start("lunette serve", &serve, &scratch.file("serve.log"))?;
    let ready = wait_until(Duration::from_secs(60), || {
        ["d0.sock", "c0.sock"]
            .iter()
            .all(|name| scratch.socket(name).exists())
            .then_some(())
    });
    daemon.check_running()?;
    ensure!(
        ready.is_some(),
        "the daemon made no sockets\n{}",
        daemon.log_tail()
    );

    let mut line = place(only(README, "sh", "qemu-system-x86_64")?);
    if Accelerator::detect()? == Accelerator::Tcg {
        line = line.replace("-accel kvm -cpu host", "-accel tcg -cpu max");
    }
    let log = scratch.file("qemu.log");
    let output = std::fs::File::create(&log)?;
    let mut qemu = Command::new("sh")
        .args(["-c", &format!("exec setpriv --pdeathsig KILL {line}")])
        .current_dir(scratch.files())
        .stdin(Stdio::piped())
        .stdout(output.try_clone()?)
        .stderr(output)
        .spawn()?;
    let mut typed = qemu.stdin.take().context("no stdin")?;
    let printed = || String::from_utf8_lossy(&std::fs::read(&log).unwrap_or_default()).into_owned();
    let seen = wait_until(Duration::from_secs(240), || {
        // The console drops input until the shell reads it, so the command is repeated.
        typed
            .write_all(b"cat /sys/block/vda/size /sys/block/sda/size\n")
            .ok()?;
        std::thread::sleep(Duration::from_millis(500));
        // 512 MiB and 10 GiB in sectors.
        let text = printed();
        (text.contains("1048576") && text.contains("20971520")).then_some(())
    });
    qemu.kill()?;
    qemu.wait()?;
    ensure!(
        seen.is_some(),
        "the guest shows no such disks:\n{}",
        printed()
    );
    Ok(())
}

#[test]
fn the_configuration_example_is_valid_and_serves() -> Result<()> {
    let scratch = Scratch::new()?;
    let file = scratch.file("lunette.toml");
    let text = only(GETTING_STARTED, "toml", "[[disk]]")?
        .replace("/tmp/", &format!("{}/", scratch.sockets().display()));
    std::fs::write(&file, text)?;
    let check = Command::new(lunette_program(Profile::Dev)?)
        .args(["check", "--config"])
        .arg(&file)
        .output()?;
    ensure!(
        check.status.success(),
        "{}",
        String::from_utf8_lossy(&check.stderr)
    );

    let mut serve = Command::new(lunette_program(Profile::Dev)?);
    serve.args(["serve", "--config"]).arg(&file);
    let daemon = Process::start("lunette serve", &serve, &scratch.file("serve.log"))?;
    let features = wait_until(Duration::from_secs(60), || {
        Client::connect(&scratch.socket("d0.sock"))
            .and_then(|mut client| client.features())
            .ok()
    });
    ensure!(
        features.is_some_and(|features| features & VERSION_1 != 0),
        "{}",
        daemon.log_tail()
    );
    Ok(())
}

#[test]
fn the_iscsi_example_serves() -> Result<()> {
    let scratch = Scratch::new()?;
    std::fs::create_dir_all(scratch.file("target/release"))?;
    symlink(
        lunette_program(Profile::Dev)?,
        scratch.file("target/release/lunette"),
    )?;
    // Another port, because 3260 may be in use.
    let example = only(README, "sh", "--iscsi")?.replace("127.0.0.1:3260", "127.0.0.1:0");
    let mut serve = Command::new("sh");
    serve.arg("-c").arg(format!("exec {example}"));
    serve.current_dir(scratch.files());
    let log = scratch.file("serve.log");
    let mut daemon = Process::start("lunette serve", &serve, &log)?;
    let ready = wait_until(Duration::from_secs(60), || {
        let log_text = std::fs::read_to_string(&log).ok()?;
        log_text
            .contains("ready iscsi iqn.2026-11.org.example:t0 127.0.0.1:")
            .then_some(())
    });
    daemon.check_running()?;
    ensure!(ready.is_some(), "{}", daemon.log_tail());
    Ok(())
}
