//! Exports and sockets of a second QEMU, and migrations with a monitor simulated by the test.

use super::*;

#[test]
fn exports_of_a_second_qemu_have_a_suffix() {
    let first = json!({ "kind": "vhost-blk", "name": "b0", "disk": "d0", "socket": "/run/b0.sock", "queues": 2, "status": {} });
    let moved = MovedExport::new(first.clone()).unwrap();
    let second = json!({ "kind": "vhost-blk", "name": "b0.2", "disk": "d0", "socket": "/run/b0.sock.2", "queues": 2 });
    assert_eq!(moved.to, second);
    let back = MovedExport::new(second).unwrap();
    assert_eq!(
        (&back.to["name"], &back.to["socket"]),
        (&first["name"], &first["socket"])
    );
}

#[test]
fn nexus_of_a_controller_moves_with_the_guest() {
    let first = json!({ "kind": "vhost-scsi", "name": "c0", "socket": "/run/c0.sock" });
    let moved = MovedExport::new(first).unwrap();
    assert_eq!(
        (&moved.to["name"], &moved.to["nexus"]),
        (&json!("c0.2"), &json!("c0"))
    );
    let back = MovedExport::new(moved.to).unwrap();
    assert_eq!(
        (&back.to["name"], &back.to["nexus"]),
        (&json!("c0"), &json!("c0"))
    );
}

#[test]
fn only_whole_paths_of_sockets_are_replaced() {
    let words = [
        "-chardev",
        "socket,id=b0-socket,path=/run/b0,reconnect=1",
        "socket,id=b1-socket,path=/run/b0.sock",
        "-qmp",
        "unix:/run/qmp.sock,server=on,wait=off",
    ];
    let words = words.map(str::to_owned);
    let pairs = [("/run/b0", "/run/b0.2"), ("/run/qmp.sock", "/run/next")];
    let pairs = pairs.map(|(from, to)| (from.to_owned(), to.to_owned()));
    assert_eq!(
        with_sockets(&words, &pairs),
        [
            "-chardev",
            "socket,id=b0-socket,path=/run/b0.2,reconnect=1",
            "socket,id=b1-socket,path=/run/b0.sock",
            "-qmp",
            "unix:/run/next,server=on,wait=off",
        ]
    );
}

/// Acts as the monitor of a QEMU. The migration has this state until a command ends it, in the state `device` always successfully. While
/// memory is copied, the guest is paused. Returns the commands.
fn unfinished_migration(listener: &UnixListener, state: &str) -> Vec<Value> {
    let mut commands = Vec::new();
    let (mut stream, _) = listener.accept().unwrap();
    let reader = BufReader::new(stream.try_clone().unwrap());
    writeln!(stream, "{}", json!({ "QMP": {} })).unwrap();
    let mut status = state;
    for line in reader.lines() {
        let command: Value = serde_json::from_str(&line.unwrap()).unwrap();
        let answer = match command["execute"].as_str() {
            Some("query-migrate") => json!({ "status": status }),
            Some("query-status") if status == "active" => {
                json!({ "status": "paused", "running": false })
            }
            Some("query-status") => json!({ "status": "finish-migrate", "running": false }),
            _ => json!({}),
        };
        let next = match command["execute"].as_str() {
            Some("migrate_cancel") if status != "device" => "cancelled",
            Some("migrate_cancel" | "migrate-continue") => "completed",
            _ => status,
        };
        if next != std::mem::replace(&mut status, next) {
            writeln!(stream, "{}", json!({ "event": "MIGRATION" })).unwrap();
        }
        writeln!(stream, "{}", json!({ "return": answer })).unwrap();
        commands.push(command);
    }
    commands
}

/// Runs `work` with the monitor of a QEMU with a migration in this state. Returns its result and the commands.
fn with_monitor<T>(state: &str, work: impl FnOnce(&mut Qmp) -> T) -> (T, Vec<Value>) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("qmp.sock");
    let listener = UnixListener::bind(&path).unwrap();
    std::thread::scope(|scope| {
        let monitor = scope.spawn(|| unfinished_migration(&listener, state));
        let mut qmp = Qmp::connect(&path).unwrap();
        let result = work(&mut qmp);
        drop(qmp);
        (result, monitor.join().unwrap())
    })
}

/// Waits for the end of a migration with this state. Returns the error, or an empty text, and whether the guest continues.
fn end_of(state: &str, has_client: bool, seconds: u64, checks: &Checks<'_>) -> (String, bool) {
    let (ours, client) = UnixStream::pair().unwrap();
    let _client = has_client.then_some(client);
    let until = Instant::now() + Duration::from_secs(seconds);
    let mut continues = true;
    let wait = |source: &mut Qmp| wait_for_switch(source, until, &ours, checks, &mut continues);
    let (ended, _) = with_monitor(state, wait);
    let error = ended.err().map(|error| format!("{error:#}"));
    (error.unwrap_or_default(), continues)
}

/// A destination that fails to load the guest must not lose it.
#[test]
fn source_waits_until_the_destination_has_loaded_the_guest() {
    let options = MigrationOptions {
        downtime_ms: 300,
        bandwidth_mib: None,
        seconds: 300,
        to_daemon: None,
    };
    let capabilities = |commands: Vec<Value>| -> Vec<Value> {
        let set = commands.into_iter();
        let set = set.filter(|command| command["execute"] == "migrate-set-capabilities");
        set.map(|command| command["arguments"]["capabilities"].clone())
            .collect()
    };
    let return_path = json!({ "capability": "return-path", "state": true });
    let (set, commands) = with_monitor("none", |source| options.set(source));
    set.unwrap();
    let pause = json!({ "capability": "pause-before-switchover", "state": true });
    let events = json!({ "capability": "events", "state": true });
    assert_eq!(
        capabilities(commands),
        [json!([pause, return_path, events])]
    );
    let uri = json!({ "uri": "unix:/stream.sock" });
    let (waits, commands) = with_monitor("none", |to| wait_for_guest(to, &uri));
    waits.unwrap();
    let last = commands.last().unwrap();
    assert_eq!(
        (&last["execute"], &last["arguments"]),
        (&json!("migrate-incoming"), &uri)
    );
    assert_eq!(capabilities(commands), [json!([return_path])]);
}

/// A source that is cancelled continues the guest. It must be the only one.
#[test]
fn destination_runs_the_guest_only_after_the_source_has_ended() {
    let arguments = incoming_arguments(&["-S".to_owned()], &[]);
    assert_eq!(arguments, ["-S", "-incoming", "defer", "-S"]);
    for (continues, is_sent) in [(true, true), (false, false)] {
        let (sent, commands) = with_monitor("completed", |to| continue_guest(to, continues));
        sent.unwrap();
        let has_cont = commands.iter().any(|command| command["execute"] == "cont");
        assert_eq!(has_cont, is_sent);
    }
    assert!(incomplete("g", true).contains("guest g runs"));
    assert!(incomplete("g", false).ends_with("hint: lunette vm monitor g cont"));
    let checks = Checks {
        connected: &|_| Ok(()),
        disks: &|| Ok(()),
    };
    // The source completes the migration in spite of the cancellation.
    let (error, continues) = end_of("device", true, 0, &checks);
    assert_eq!((error.as_str(), continues), ("", true));
}

#[test]
fn guest_that_is_paused_during_the_copy_stays_paused() {
    let checks = Checks {
        connected: &|_| Ok(()),
        disks: &|| Ok(()),
    };
    assert!(!end_of("active", true, 0, &checks).1);
}

#[test]
fn change_of_a_migration_ends_the_wait() {
    let limit = Duration::from_secs(60);
    let begin = Instant::now();
    let wait = |source: &mut Qmp| -> Result<()> {
        source.command("migrate_cancel", json!({}))?;
        source.wait_for_change(limit)?;
        // The event is used up.
        source.wait_for_change(Duration::from_millis(1))
    };
    with_monitor("active", wait).0.unwrap();
    assert!(begin.elapsed() < limit);
}

#[test]
fn migration_without_client_or_daemon_is_cancelled() {
    let checks = |connected| Checks {
        connected,
        disks: &|| Ok(()),
    };
    let (reason, _) = end_of("active", false, 100, &checks(&|_| Ok(())));
    assert!(reason.contains("has ended"), "{reason}");
    let (reason, _) = end_of("active", true, 0, &checks(&|_| Ok(())));
    assert!(reason.contains("time limit"), "{reason}");
    let lost = |_| bail!("the daemon is lost");
    let (reason, _) = end_of("active", true, 100, &checks(&lost));
    assert_eq!(reason, "the daemon is lost");
}

#[test]
fn disks_are_checked_again_while_the_guest_is_stopped() {
    let refused: &dyn Fn() -> Result<()> = &|| bail!("disk d has persistent reservations");
    let checks = |disks| Checks {
        connected: &|_| Ok(()),
        disks,
    };
    let (refused, _) = end_of("pre-switchover", true, 100, &checks(refused));
    assert_eq!(refused, "disk d has persistent reservations");
    let (moved, _) = end_of("pre-switchover", true, 100, &checks(&|| Ok(())));
    assert_eq!(moved, "");
}

#[test]
fn stops_are_those_since_the_start() {
    let before = vec![(100, 2), (500, 1)];
    let after = vec![(100, 3), (200, 2), (500, 1)];
    assert_eq!(new_values(Some(&before), Some(&after)), [100, 200, 200]);
    assert!(new_values(None, None).is_empty());
}
