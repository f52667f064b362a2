//! Disks that are resized outside of the daemon: the daemon adopts the size and notifies clients. Ignored tests need root and
//! losetup(8); `make unit` runs them.
#![forbid(unsafe_code)]

use control::{Client, ClientError, Method};
use end_to_end::http::Events;
use end_to_end::loop_device::Loop;
use end_to_end::{Daemon, DaemonBuilder, IscsiSession, Result, Rig, Scratch, bail, ensure};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;

const MIB: u64 = 1 << 20;
const TARGET: &str = "iqn.2026-11.org.example:t0";
const TEST_UNIT_READY: [u8; 6] = [0; 6];
const READ_CAPACITY: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// CHECK CONDITION with UNIT ATTENTION, CAPACITY DATA HAS CHANGED.
const CAPACITY_CHANGED: (u8, u8, u8, u8) = (2, 0x06, 0x2a, 0x09);

fn api(daemon: &Daemon) -> Client {
    Client::new(&daemon.control()).patient(Duration::from_secs(60))
}

fn set_len(path: &Path, bytes: u64) -> Result<()> {
    let file = std::fs::File::options()
        .write(true)
        .create(true)
        .truncate(false)
        .open(path)?;
    Ok(file.set_len(bytes)?)
}

/// Returns a disk's size in bytes from GET /v1/disks, which does not check the file's size.
fn known_size(client: &Client, disk: &str) -> Result<Value> {
    let disk: Value = client.get(&format!("/v1/disks/{disk}"))?;
    Ok(disk["status"]["size"].clone())
}

fn hears_size(events: &mut Events, disk: &str, size: u64) -> Result<()> {
    loop {
        let (event, data) = events.hear()?;
        if event == "disk.resized" {
            let data: Value = serde_json::from_str(&data)?;
            ensure!(data["name"] == disk && data["size"] == size, "{data}");
            return Ok(());
        }
    }
}

/// Checks that the next TEST UNIT READY reports a capacity change and that READ CAPACITY returns the new size.
fn sees_size(session: &mut IscsiSession, bytes: u64) -> Result<()> {
    let done = session.command(&TEST_UNIT_READY, None, 0)?;
    let sense = done.sense.get(..14).unwrap_or(&[0; 14]);
    let sense = (done.status, sense[2] & 0xf, sense[12], sense[13]);
    ensure!(sense == CAPACITY_CHANGED, "{sense:02x?}");
    let ready = session.command(&TEST_UNIT_READY, None, 0)?;
    ensure!(ready.status == 0, "reported twice: {:02x?}", ready.sense);
    let capacity = session.command(&READ_CAPACITY, None, 8)?;
    let last = u32::try_from(bytes / 512 - 1)?.to_be_bytes();
    ensure!(capacity.data.starts_with(&last), "{:02x?}", capacity.data);
    Ok(())
}

#[test]
fn file_that_grew_or_shrank_outside_is_followed_by_status_and_reload() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        for name in ["a.raw", "b.raw"] {
            set_len(&scratch.file(name), 4 * MIB)?;
        }
        let shown = scratch.file("b.raw").display().to_string();
        let config = scratch.file("lunette.toml");
        let text = format!(
            "[[disk]]\nname = \"b\"\nbackend = \"file\"\npath = \"{shown}\"\nsize = \"4M\"\n"
        );
        std::fs::write(&config, text)?;
        Ok(daemon
            .disk("a=file:a.raw")
            .arguments(["--config", &config.display().to_string()])
            .arguments(["--iscsi", &format!("{TARGET}=a")])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"]))
    })?;
    let (file, second_file) = (rig.scratch.file("a.raw"), rig.scratch.file("b.raw"));
    let portal = rig.iscsi_portal(TARGET)?;
    let client = api(&rig.daemon);
    let mut events = Events::listen(&rig.daemon.control())?;
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    for (size, words) in [
        (8 * MIB, "status"),
        (2 * MIB, "status"),
        (6 * MIB, "reload"),
        (3 * MIB, "reload"),
    ] {
        set_len(&file, size)?;
        set_len(&second_file, size)?;
        let before = known_size(&client, "a")?;
        ensure!(before != size, "the daemon has not checked the size yet");
        let answer = rig.daemon.lunette(&[words])?;
        ensure!(known_size(&client, "a")? == size, "{words}: {answer}");
        hears_size(&mut events, "a", size)?;
        sees_size(&mut session, size)?;
        // A configured size has priority.
        ensure!(known_size(&client, "b")? == 4 * MIB, "{words}: {answer}");
    }
    // A file that is being replaced is empty for a moment.
    set_len(&file, 0)?;
    rig.daemon.lunette(&["status"])?;
    ensure!(known_size(&client, "a")? == 3 * MIB);
    set_len(&file, 5 * MIB)?;
    let status: Value = client.get("/v1/status")?;
    let shown = status["disks"].as_array().into_iter().flatten();
    let sizes: Vec<_> = shown.map(|disk| (&disk["name"], &disk["size"])).collect();
    ensure!(sizes.contains(&(&json!("a"), &json!(5 * MIB))), "{status}");
    rig.daemon.process().check_running()
}

#[test]
#[ignore = "as root: see the head of this file"]
fn block_device_that_grew_or_shrank_is_followed_without_a_command() -> Result<()> {
    // Detached after the daemon has ended.
    let mut devices = Vec::new();
    let mut rig = Rig::prepared(|scratch, daemon| {
        for name in ["a.img", "b.img"] {
            set_len(&scratch.file(name), 4 * MIB)?;
            devices.push(Loop::over(&scratch.file(name))?);
        }
        Ok(daemon
            .disk(&format!("a=file:{}", devices[0].0))
            .disk(&format!("b=file:{},size=4M", devices[1].0))
            .arguments(["--iscsi", &format!("{TARGET}=a")])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"]))
    })?;
    let (file, other) = (rig.scratch.file("a.img"), rig.scratch.file("b.img"));
    let portal = rig.iscsi_portal(TARGET)?;
    let client = api(&rig.daemon);
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    let mut events = Events::listen(&rig.daemon.control())?;
    for size in [8 * MIB, 16 * MIB, 2 * MIB] {
        // A configured size has priority: the second device causes no event.
        set_len(&other, size.max(4 * MIB))?;
        devices[1].take_size()?;
        set_len(&file, size)?;
        devices[0].take_size()?;
        hears_size(&mut events, "a", size)?;
        sees_size(&mut session, size)?;
        ensure!(known_size(&client, "a")? == size);
        ensure!(known_size(&client, "b")? == 4 * MIB);
    }
    drop(session);
    rig.daemon.process().check_running()
}

#[test]
fn resize_without_a_size_takes_over_that_of_the_file() -> Result<()> {
    let scratch = Scratch::new()?;
    let (file, second_file) = (scratch.file("a.raw"), scratch.file("b.raw"));
    set_len(&file, 4 * MIB)?;
    set_len(&second_file, 4 * MIB)?;
    let builder = DaemonBuilder::new(&scratch)
        .disk("a=file:a.raw")
        .disk("b=file:b.raw,size=4M")
        .disk("r=ram:1M")
        .vhost_blk("b");
    let mut daemon = builder.start()?;
    let client = api(&daemon);
    for (size, by_command) in [(8 * MIB, true), (2 * MIB, true), (6 * MIB, false)] {
        for (disk, path) in [("a", &file), ("b", &second_file)] {
            set_len(path, size)?;
            if by_command {
                daemon.lunette(&["disk", "resize", disk])?;
            } else {
                let path = format!("/v1/disks/{disk}/size");
                client.change(Method::PUT, &path, Some(&json!({})))?;
            }
            ensure!(known_size(&client, disk)? == size, "{disk}: {size}");
            ensure!(std::fs::metadata(path)?.len() == size, "it was left alone");
        }
    }
    // A later change must not resize the disks again.
    let mut events = Events::listen(&daemon.control())?;
    daemon.lunette(&["disk", "limit", "r", "iops=1000"])?;
    let (event, data) = events.hear()?;
    ensure!(event == "disk.limited", "{event}: {data}");
    // The size survives a restart, although another size was configured for b. No size is configured for a, which follows its file.
    daemon.kill()?;
    daemon.start_again()?;
    for disk in ["a", "b"] {
        ensure!(known_size(&client, disk)? == 6 * MIB, "{disk}");
    }
    let configured: Value = client.get("/v1/disks/a")?;
    ensure!(configured["size"].is_null(), "{configured}");
    // Refused: a file size that is no multiple of the block size, and disks without a file size.
    set_len(&second_file, 6 * MIB + 100)?;
    for (disk, status, word) in [
        ("r", 422, "ram"),
        ("none", 404, "none"),
        ("b", 422, "6291556"),
    ] {
        let path = format!("/v1/disks/{disk}/size");
        match client.change(Method::PUT, &path, Some(&json!({}))) {
            Err(ClientError::Problem { problem }) => {
                let text = format!("{problem:?}");
                ensure!(problem.status == status && text.contains(word), "{text}");
            }
            other => bail!("{disk}: not refused: {other:?}"),
        }
    }
    ensure!(known_size(&client, "b")? == 6 * MIB);
    Ok(())
}
