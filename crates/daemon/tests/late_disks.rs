//! A daemon starts without disks that cannot be opened, serves the others, and adds the late ones when they become available.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use config::{Config, Flags, Surroundings, parse};
use control::objects::Disk;
use control::{Client, Method};
use daemon::{Running, StartOptions, start};

fn config(folder: &Path, require: &str) -> Config {
    let at = |text: &str| text.replace('@', &format!("{}/", folder.display()));
    let flags = Flags {
        disk: vec![
            "here=ram:1M".into(),
            at(&format!("late=file:@late.raw{require}")),
        ],
        vhost_blk: vec![at("here:@here.sock"), at("late:@late.sock")],
        vhost_scsi: vec![at("c0:@c0.sock")],
        lun: vec!["c0/0:0=here".into(), "c0/1:0=late".into()],
        ..Flags::default()
    };
    let flags = flags.with("workers", "1");
    let flags = flags.with("control", &at("@control.sock"));
    let config = parse(None, &flags, &Surroundings::of_this_process());
    config.unwrap_or_else(|mistakes| panic!("{mistakes}"))
}

fn client(running: &Running) -> Client {
    Client::new(running.control().unwrap())
}

fn wait_until(condition: &str, mut is_so: impl FnMut() -> bool) {
    let patience = Instant::now() + Duration::from_secs(60);
    while !is_so() {
        assert!(Instant::now() < patience, "{condition}: never");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn late_disk_is_shown_as_unavailable_and_comes_in_with_its_exports() {
    let folder = tempfile::tempdir().unwrap();
    let running = start(config(folder.path(), ""), StartOptions::default()).unwrap();
    UnixStream::connect(folder.path().join("here.sock")).unwrap();
    assert!(!folder.path().join("late.sock").exists());
    let late = |running: &Running| -> Disk { client(running).get("/v1/disks/late").unwrap() };
    let status = late(&running).status.unwrap();
    assert_eq!(status.state, "unavailable");
    let reason = status.reason.unwrap();
    assert!(reason.contains("late.raw: does not exist"), "{reason}");
    assert!(status.next_try_seconds.unwrap() <= 1);
    assert_eq!(status.used_by, ["late", "c0/1:0"]);
    let all = running.status();
    assert_eq!((all.disks.len(), all.exports.len()), (2, 3));
    let exports = all.exports.iter();
    let sockets = exports.filter(|export| export.socket.is_some());
    assert_eq!(
        sockets.count(),
        2,
        "the socket of export late does not exist yet"
    );

    let file = File::create(folder.path().join("late.raw")).unwrap();
    file.set_len(2 << 20).unwrap();
    wait_until("late.sock", || folder.path().join("late.sock").exists());
    UnixStream::connect(folder.path().join("late.sock")).unwrap();
    let status = late(&running).status.unwrap();
    assert_eq!((&*status.state, status.size), ("ready", 2 << 20));
    assert_eq!(status.reason, None);
}

#[test]
fn waiting_disk_can_be_removed_and_added_differently() {
    let folder = tempfile::tempdir().unwrap();
    let running = start(config(folder.path(), ""), StartOptions::default()).unwrap();
    let client = client(&running);
    let change = |method, path: &str, body: Option<serde_json::Value>| {
        client.change(method, path, body.as_ref()).unwrap();
    };
    change(Method::DELETE, "/v1/disks/late?force=true", None);
    assert!(client.get::<Disk>("/v1/disks/late").is_err());
    change(
        Method::PUT,
        "/v1/disks/late",
        Some(serde_json::json!({ "backend": "ram", "size": "4M" })),
    );
    let status = client
        .get::<Disk>("/v1/disks/late")
        .unwrap()
        .status
        .unwrap();
    assert_eq!((&*status.state, status.size), ("ready", 4 << 20));
    // A file that appears at the old path is not used.
    let file = File::create(folder.path().join("late.raw")).unwrap();
    file.set_len(2 << 20).unwrap();
    std::thread::sleep(Duration::from_millis(1500));
    assert!(!folder.path().join("late.sock").exists());
}

#[test]
fn start_fails_without_a_disk_that_is_required() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("late.raw"), [0; 100]).unwrap();
    let options = StartOptions::default();
    let Err(error) = start(config(folder.path(), ",require"), options) else {
        panic!("started without its disk");
    };
    assert_eq!(error.reasons.len(), 1, "{error}");
    let reason = &error.reasons[0];
    assert!(reason.starts_with("disk late: "), "{reason}");
    assert!(
        control::get::<control::Status>(&folder.path().join("control.sock"), "/v1/status").is_err()
    );
}
