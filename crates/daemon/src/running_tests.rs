//! Daemons from start to end: sockets, inherited connections, waiting listeners.

use std::os::unix::net::UnixStream;
use std::path::Path;

use super::*;
use config::{Flags, Surroundings, parse};

fn config(folder: &Path, disks: &[&str], exports: &[&str]) -> Config {
    let at = |text: &&str| text.replace("@", &format!("{}/", folder.display()));
    let flags = Flags {
        disk: disks.iter().map(at).collect(),
        vhost_blk: exports.iter().map(at).collect(),
        ..Flags::default()
    };
    let flags = flags.with("workers", "1");
    let flags = flags.with("control", &at(&"@control.sock"));
    let config = parse(None, &flags, &Surroundings::of_this_process());
    config.unwrap_or_else(|mistakes| panic!("{mistakes}"))
}

#[test]
fn ready_exports_accept_clients_until_the_daemon_ends() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["d0=ram:1M"], &["d0:@d0.sock"]);
    let running = start(config, StartOptions::default()).unwrap();
    let socket = folder.path().join("d0.sock");
    assert_eq!(
        running.ready()[0].to_string(),
        format!("ready vhost-blk d0 {}", socket.display())
    );
    UnixStream::connect(&socket).unwrap();
    let control = running.control().unwrap().to_owned();
    let status: Status = ::control::get(&control, "/v1/status").unwrap();
    assert_eq!(status.disks[0].size, 1 << 20);
    assert_eq!(status.exports[0].socket.as_ref(), Some(&socket));
    drop(running);
    assert!(!socket.exists() && !control.exists());
}

#[test]
fn failed_start_reports_all_reasons_and_cleans_up() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("file"), "data").unwrap();
    let exports = [
        "d0:@good.sock",
        "d1:@file",
        "d2:@file/2.sock",
        "d3:@missing/3.sock",
    ];
    let disks = ["d0=ram:1M", "d1=ram:1M", "d2=ram:1M", "d3=ram:1M"];
    let config = config(folder.path(), &disks, &exports);
    let Err(error) = start(config, StartOptions::default()) else {
        panic!("started with a file in place of a socket and of a folder");
    };
    assert_eq!(error.reasons.len(), 2, "{error}");
    assert!(error.reasons[0].starts_with("vhost-blk d1: "), "{error}");
    assert!(error.reasons[1].starts_with("vhost-blk d2: "), "{error}");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}

#[test]
fn writes_after_a_failed_start_are_detected() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("d0.raw");
    std::fs::write(&file, vec![0; 1 << 20]).unwrap();
    let start_with = |export: &str| {
        let mut config = config(folder.path(), &["d0=file:@d0.raw"], &[export]);
        config.state = Some(folder.path().join("state"));
        start(config, StartOptions::default())
    };
    let broken = || {
        let running = start_with("d0:@d0.sock").unwrap();
        let bitmaps = running.overview.bitmaps.of("d0");
        bitmaps[0].broken.clone()
    };
    let fail = || drop(start_with("d0:@d0.raw").map(drop).unwrap_err());
    let running = start_with("d0:@d0.sock").unwrap();
    let disk = Arc::clone(&running.overview.live().disks["d0"]);
    let bitmaps = &running.overview.bitmaps;
    let begun = bitmaps.begin(&disk).unwrap();
    bitmaps.record_in("d0", &begun);
    let last = crate::bitmaps::Last {
        target: serde_json::Value::Null,
        shown: String::new(),
        at: 1,
        identity: None,
    };
    bitmaps.complete("d0", "daily", &begun, last).unwrap();
    drop((disk, running));
    // The socket's path is a file.
    fail();
    assert_eq!(broken(), None);
    fail();
    std::fs::write(&file, vec![1; 1 << 20]).unwrap();
    assert!(broken().unwrap().contains("not served"));
}

#[test]
fn job_of_a_disk_that_was_resized_or_removed_does_not_begin() {
    use crate::jobs::{Job, JobKind};
    use crate::objects::{Change, EventBus};

    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["d0=ram:1M"], &[]);
    let running = start(config, StartOptions::default()).unwrap();
    let manager = running.manager.as_ref().unwrap().manager();
    let context = running.overview.context(manager, EventBus::default());
    let disk = Arc::clone(&running.overview.live().disks["d0"]);
    let job = Job::new(&disk, JobKind::Backup, None);
    context.check_unchanged(&disk, &job).unwrap();
    disk.resize(2 << 20).unwrap();
    let refused = context.check_unchanged(&disk, &job).unwrap_err();
    assert!(refused.to_string().contains("was resized"), "{refused}");
    let job = Job::new(&disk, JobKind::Backup, None);
    let remove = Work::Change(Box::new(Change::RemoveDisk("d0".to_owned())));
    let manager = running.manager.as_ref().unwrap().manager();
    manager
        .change_blocking(remove, ChangeOptions::default())
        .unwrap();
    let refused = context.check_unchanged(&disk, &job).unwrap_err();
    assert!(
        refused.to_string().contains("no longer exists"),
        "{refused}"
    );
}

#[test]
fn a_socket_in_a_folder_that_is_made_later_waits_and_opens() {
    let folder = tempfile::tempdir().unwrap();
    let exports = ["d0:@good.sock", "d1:@later/1.sock"];
    let config = config(folder.path(), &["d0=ram:1M", "d1=ram:1M"], &exports);
    let running = start(config, StartOptions::default()).unwrap();
    let (changed, changes) = std::sync::mpsc::channel();
    running.watch_listeners(move || {
        changed.send(()).ok();
    });
    UnixStream::connect(folder.path().join("good.sock")).unwrap();
    let waiting = running.status().waiting_listeners;
    assert_eq!(waiting.len(), 1, "{waiting:?}");
    let socket = folder.path().join("later/1.sock");
    assert_eq!(waiting[0].kind, "vhost-user");
    assert_eq!(waiting[0].export.as_deref(), Some("d1"));
    assert_eq!(waiting[0].address, socket.display().to_string());
    assert!(waiting[0].reason.contains("No such file"), "{waiting:?}");
    assert_eq!(running.ready()[1].endpoint, Endpoint::Waiting);
    let open = || {
        let open = running.status().open_listeners.into_iter();
        open.map(|one| one.address).collect::<Vec<_>>()
    };
    let good = folder.path().join("good.sock").display().to_string();
    assert_eq!(open(), [&*good]);
    std::fs::create_dir(folder.path().join("later")).unwrap();
    changes.recv_timeout(Duration::from_secs(60)).unwrap();
    assert!(running.status().waiting_listeners.is_empty());
    assert_eq!(open(), [&*good, &*socket.display().to_string()]);
    UnixStream::connect(&socket).unwrap();
    drop(running);
    assert!(!socket.exists());
}

#[test]
fn daemon_without_a_reachable_socket_does_not_start() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = config(folder.path(), &["d0=ram:1M"], &["d0:@missing/0.sock"]);
    config.control = None;
    let Err(error) = start(config, StartOptions::default()) else {
        panic!("started without a way in");
    };
    let message = error.to_string();
    assert!(
        message.contains("missing/0.sock") && message.contains("--control"),
        "{message}"
    );
}

#[test]
fn an_inherited_connection_is_served_until_its_client_leaves() {
    let folder = tempfile::tempdir().unwrap();
    let config = config(folder.path(), &["d0=ram:1M"], &["d0:@d0.sock"]);
    let (client, ours) = UnixStream::pair().unwrap();
    let options = StartOptions {
        control: None,
        inherited: vec![Inherited {
            export: "d0".to_owned(),
            socket: ours.into(),
        }],
        ..StartOptions::default()
    };
    let running = start(config, options).unwrap();
    assert_eq!(running.ready()[0].endpoint, Endpoint::Connection);
    assert!(running.has_one_client() && !running.is_left());
    assert!(!folder.path().join("d0.sock").exists());
    drop(client);
    while !running.is_left() {
        std::thread::yield_now();
    }
}

#[test]
fn default_control_socket_in_use_is_no_failure_a_chosen_is() {
    let folder = tempfile::tempdir().unwrap();
    let usual = folder.path().join("control.sock");
    let _other = control::bind(&usual, Audience::Owner, None).unwrap();
    let chosen = config(folder.path(), &[], &[]);
    let mut unchosen = chosen.clone();
    unchosen.control = None;
    let options = StartOptions {
        control: Some(usual.clone()),
        ..StartOptions::default()
    };
    assert!(start(unchosen, options).unwrap().control().is_none());
    assert!(start(chosen, StartOptions::default()).is_err());
    assert!(usual.exists());
}
