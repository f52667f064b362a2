//! Changes at run time are atomic: a refused or interrupted change leaves the configuration and the disks as they were.
#![forbid(unsafe_code)]

use control::{Client, ClientError, Method};
use end_to_end::rig::free_portal;
use end_to_end::{Daemon, DaemonBuilder, IscsiSession, Result, Rig, Scratch, bail, ensure};
use serde_json::{Value, json};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::{Duration, Instant};
use vm::wait_until;

const MIB: u64 = 1 << 20;
const TARGET: &str = "iqn.2026-11.org.example:t0";

fn client(daemon: &Daemon) -> Client {
    Client::new(&daemon.control()).patient(Duration::from_secs(60))
}

/// Returns the configuration in the form that PUT accepts.
fn configuration(client: &Client) -> Result<Value> {
    let mut all: Value = client.get("/v1/config")?;
    for kind in ["disks", "exports"] {
        for one in all[kind].as_array_mut().into_iter().flatten() {
            if let Some(one) = one.as_object_mut() {
                one.remove("status");
            }
        }
    }
    Ok(all)
}

fn disk<'a>(configuration: &'a mut Value, name: &str) -> &'a mut Value {
    let all = configuration["disks"].as_array_mut().into_iter().flatten();
    let mut named = all.filter(|disk| disk["name"] == name);
    named.next().expect("it is configured")
}

fn is_refused(client: &Client, configuration: &Value) -> Result<()> {
    let path = "/v1/config?force=true";
    match client.change(Method::PUT, path, Some(configuration)) {
        Err(ClientError::Problem { .. }) => Ok(()),
        other => bail!("not refused: {other:?}"),
    }
}

/// Shrinking a disk discards data, so it is the last step of a change.
#[test]
fn refused_change_has_made_no_disk_smaller() -> Result<()> {
    let scratch = Scratch::new()?;
    let file = scratch.file("a.raw");
    std::fs::write(&file, vec![7; 2 * MIB as usize])?;
    std::fs::write(scratch.file("b.raw"), vec![0; MIB as usize])?;
    let read_only = std::fs::Permissions::from_mode(0o444);
    std::fs::set_permissions(scratch.file("b.raw"), read_only)?;
    let daemon = DaemonBuilder::new(&scratch)
        .disk("a=file:a.raw,size=2M")
        .disk("b=file:b.raw,size=1M,ro=on")
        .vhost_blk("a")
        .start()?;
    let client = client(&daemon);
    let before = configuration(&client)?;
    let mut wanted = before.clone();
    disk(&mut wanted, "a")["size"] = json!(MIB);
    // The file of `b` is read-only and cannot grow.
    disk(&mut wanted, "b")["size"] = json!(2 * MIB);
    is_refused(&client, &wanted)?;
    ensure!(configuration(&client)? == before);
    ensure!(
        std::fs::read(&file)? == vec![7; 2 * MIB as usize],
        "data are lost"
    );
    // Without the change of disk `b` the same change succeeds.
    disk(&mut wanted, "b")["size"] = json!(MIB);
    client.change(Method::PUT, "/v1/config?force=true", Some(&wanted))?;
    ensure!(std::fs::read(&file)? == vec![7; MIB as usize]);
    Ok(())
}

#[test]
fn refused_change_has_made_no_disk_larger() -> Result<()> {
    let scratch = Scratch::new()?;
    let daemon = DaemonBuilder::new(&scratch)
        .disk("a=file:a.raw,size=1M")
        .disk("b=ram:1M")
        .disk("c=ram:1M,ro=on")
        .vhost_blk("a")
        .start()?;
    let client = client(&daemon);
    let before = configuration(&client)?;
    for name in ["a", "b", "c"] {
        let mut wanted = before.clone();
        disk(&mut wanted, name)["size"] = json!(2 * MIB);
        std::fs::create_dir(scratch.socket("state/changes.new"))?;
        is_refused(&client, &wanted)?;
        std::fs::remove_dir(scratch.socket("state/changes.new"))?;
        ensure!(configuration(&client)? == before);
        let shown: Value = client.get(&format!("/v1/disks/{name}"))?;
        ensure!(shown["status"]["size"] == MIB, "{shown}");
    }
    Ok(())
}

#[test]
fn files_of_a_refused_change_are_removed() -> Result<()> {
    let scratch = Scratch::new()?;
    let daemon = DaemonBuilder::new(&scratch)
        .disk("a=ram:1M")
        .vhost_blk("a")
        .start()?;
    let client = client(&daemon);
    let before = configuration(&client)?;
    let made = scratch.file("made.raw");
    let with = |disk: Option<Value>, export: Option<Value>| {
        let mut wanted = before.clone();
        let new = json!({"name": "new", "backend": "file", "path": made, "size": MIB});
        for (kind, more) in [("disks", Some(new)), ("disks", disk), ("exports", export)] {
            if let (Some(all), Some(more)) = (wanted[kind].as_array_mut(), more) {
                all.push(more);
            }
        }
        wanted
    };
    let (file, socket) = (
        scratch.file("nowhere/x.raw"),
        scratch.file("nowhere/x.sock"),
    );
    let another = json!({"name": "x", "backend": "file", "path": file, "size": MIB});
    let export = json!({"kind": "vhost-blk", "name": "x", "disk": "new", "socket": socket});
    for wanted in [with(Some(another), None), with(None, Some(export))] {
        is_refused(&client, &wanted)?;
        ensure!(!made.exists(), "{wanted}");
    }
    client.change(Method::PUT, "/v1/config", Some(&with(None, None)))?;
    ensure!(std::fs::metadata(&made)?.len() == MIB);
    Ok(())
}

/// An administrator corrects the mistake and requests the same disk again.
#[test]
fn disk_of_a_refused_change_is_closed() -> Result<()> {
    let scratch = Scratch::new()?;
    let daemon = DaemonBuilder::new(&scratch)
        .disk("a=ram:1M")
        .vhost_blk("a")
        .start()?;
    let client = client(&daemon);
    let file = scratch.file("there.raw");
    std::fs::write(&file, vec![7; MIB as usize])?;
    let before = configuration(&client)?;
    let with = |export: &Value| {
        let mut wanted = before.clone();
        let disk = json!({"name": "new", "backend": "file", "path": file});
        for (kind, more) in [("disks", &disk), ("exports", export)] {
            if let Some(all) = wanted[kind].as_array_mut() {
                all.push(more.clone());
            }
        }
        wanted
    };
    for kind in ["vhost-blk", "vhost-scsi"] {
        let of = |socket: std::path::PathBuf| match kind {
            "vhost-blk" => json!({"kind": kind, "name": "x", "disk": "new", "socket": socket}),
            _ => json!({"kind": kind, "name": "x", "socket": socket,
                "lun": [{"target": 0, "lun": 0, "disk": "new"}]}),
        };
        is_refused(&client, &with(&of(scratch.file("nowhere/x.sock"))))?;
        let mended = with(&of(scratch.socket("x.sock")));
        client.change(Method::PUT, "/v1/config", Some(&mended))?;
        client.change(Method::PUT, "/v1/config", Some(&before))?;
    }
    Ok(())
}

#[test]
fn crash_during_a_resize_of_several_leaves_old_or_new_sizes() -> Result<()> {
    for step in ["before-keep", "after-keep"] {
        for to in [MIB, 3 * MIB] {
            let scratch = Scratch::new()?;
            let plain = DaemonBuilder::new(&scratch)
                .disk("a=file:a.raw,size=2M")
                .disk("b=file:b.raw,size=2M")
                .vhost_blk("a");
            let fault = format!("LUNETTE_FAULT={step}");
            let mut daemon = plain.clone().under(&["env", &fault]).start()?;
            let mut wanted = configuration(&client(&daemon))?;
            for name in ["a", "b"] {
                disk(&mut wanted, name)["size"] = json!(to);
            }
            let path = "/v1/config?force=true";
            let answer = client(&daemon).change(Method::PUT, path, Some(&wanted));
            ensure!(answer.is_err(), "it was to be killed");
            daemon.process().wait(Duration::from_secs(20))?;
            let again = plain.start()?;
            // The log still has the lines of the previous daemon and cannot show readiness.
            let begun = Instant::now();
            while let Err(error) = configuration(&client(&again)) {
                ensure!(begun.elapsed() < Duration::from_secs(20), "{error:#}");
                std::thread::sleep(Duration::from_millis(20));
            }
            let kept = if step == "before-keep" { 2 * MIB } else { to };
            for name in ["a.raw", "b.raw"] {
                let size = std::fs::metadata(scratch.file(name))?.len();
                ensure!(size == kept, "{step}, {name}: {size} bytes, not {kept}");
            }
        }
    }
    Ok(())
}

/// An administrator renames an existing export in the configuration.
#[test]
fn export_is_renamed_on_its_socket_and_a_disk_is_not() -> Result<()> {
    let scratch = Scratch::new()?;
    let daemon = DaemonBuilder::new(&scratch)
        .disk("a=file:a.raw,size=1M")
        .vhost_blk("a")
        .start()?;
    let client = client(&daemon);
    let before = configuration(&client)?;
    let features = |at: &str| end_to_end::client::Client::connect(&scratch.socket(at))?.features();

    let mut wanted = before.clone();
    wanted["exports"][0]["name"] = json!("b");
    client.change(Method::PUT, "/v1/config", Some(&wanted))?;
    ensure!(configuration(&client)?["exports"] == wanted["exports"]);
    ensure!(features("a.sock")? != 0);
    // The change fails in its last step, so the removed export is restored.
    let mut refused = wanted.clone();
    refused["exports"][0]["name"] = json!("c");
    let nowhere = scratch.file("nowhere/x.sock");
    let another = json!({"kind": "vhost-blk", "name": "x", "disk": "a", "socket": nowhere});
    refused["exports"] = json!([refused["exports"][0], another]);
    is_refused(&client, &refused)?;
    ensure!(features("a.sock")? != 0);
    ensure!(configuration(&client)?["exports"] == wanted["exports"]);

    let mut renamed = wanted.clone();
    renamed["disks"][0]["name"] = json!("other");
    renamed["exports"][0]["disk"] = json!("other");
    let message = match client.change(Method::PUT, "/v1/config?force=true", Some(&renamed)) {
        Err(error @ ClientError::Problem { .. }) => error.to_string(),
        other => bail!("not refused: {other:?}"),
    };
    ensure!(
        message.contains("the file of disk a, which is still open") && !message.contains("process"),
        "{message}"
    );
    Ok(())
}

/// A removed target makes room for a new one in the same change, even if their names or portals differ only in spelling.
#[test]
fn target_comes_where_another_one_goes() -> Result<()> {
    let scratch = Scratch::new()?;
    let port = free_portal()?.port();
    let portals = |address: &str| format!("{address}:{port}");
    let daemon = DaemonBuilder::new(&scratch)
        .disk("a=ram:1M")
        .arguments(["--iscsi", &format!("{TARGET}=a"), "--demo-mode", "rw"])
        .arguments(["--portal", &portals("0.0.0.0")])
        .start()?;
    let client = client(&daemon);
    let before = configuration(&client)?;
    let with = |name: &str, address: &str| {
        let mut wanted = before.clone();
        wanted["exports"][0]["name"] = json!(name);
        wanted["exports"][0]["portals"] = json!([portals(address)]);
        wanted
    };
    let other = TARGET.replace("t0", "t1");
    let upper = TARGET.replace("t0", "T0");
    for (name, address) in [
        (&*other, "127.0.0.1"),
        (TARGET, "0.0.0.0"),
        (&*upper, "0.0.0.0"),
    ] {
        client.change(Method::PUT, "/v1/config", Some(&with(name, address)))?;
        drop(IscsiSession::login(&portals("127.0.0.1"), name, 1)?);
        // The daemon may notice the end of the session a little later.
        let gone = wait_until(Duration::from_secs(20), || {
            let sessions: Value = client.get("/v1/sessions").ok()?;
            sessions.as_array()?.is_empty().then_some(())
        });
        ensure!(gone.is_some(), "the session of {name} stays");
    }
    Ok(())
}

/// A users file may be moved together with the change that names its new path.
#[test]
fn target_is_rolled_back_without_its_chap_file() -> Result<()> {
    let scratch = Scratch::new()?;
    let users = scratch.file("users");
    std::fs::write(&users, "user a-secret-of-theirs\n")?;
    std::fs::set_permissions(&users, std::fs::Permissions::from_mode(0o600))?;
    let portal = free_portal()?.to_string();
    let daemon = DaemonBuilder::new(&scratch)
        .disk("a=ram:1M")
        .arguments(["--iscsi", &format!("{TARGET}=a"), "--chap-user"])
        .arguments([users.to_str().unwrap_or_default(), "--portal", &portal])
        .start()?;
    let client = client(&daemon);
    let before = configuration(&client)?;
    let moved = scratch.file("moved");
    std::fs::rename(&users, &moved)?;
    let mut wanted = before.clone();
    wanted["exports"][0]["chap_users"] = json!(moved);
    let nowhere = scratch.file("nowhere/x.sock");
    let mut refused = wanted.clone();
    let another = json!({"kind": "vhost-blk", "name": "x", "disk": "a", "socket": nowhere});
    refused["exports"] = json!([wanted["exports"][0], another]);
    is_refused(&client, &refused)?;
    ensure!(configuration(&client)? == before);
    std::net::TcpStream::connect(&portal)?;
    let login = IscsiSession::login(&portal, TARGET, 1);
    ensure!(login.is_err(), "it has its users, too");
    client.change(Method::PUT, "/v1/config", Some(&wanted))?;
    Ok(())
}

#[test]
fn start_names_the_saved_change_that_forbids_it() -> Result<()> {
    let scratch = Scratch::new()?;
    let with = |disks: &[&str]| {
        let daemon = DaemonBuilder::new(&scratch).vhost_scsi("c").lun("c/0:0=b");
        disks.iter().fold(daemon, |daemon, disk| daemon.disk(disk))
    };
    let daemon = with(&["a=ram:1M", "b=ram:1M"]).start()?;
    let lun = json!({"disk": "a"});
    client(&daemon).change(Method::PUT, "/v1/exports/c/luns/4:0", Some(&lun))?;
    drop(daemon);
    let (status, log) = with(&["b=ram:1M"]).start_refused()?;
    ensure!(!status.success());
    ensure!(
        log.contains("LUN 4:0 of c") && log.contains("changes.json") && log.contains("`a`"),
        "{log}"
    );
    Ok(())
}

#[test]
fn start_names_the_saved_change_that_lacks_an_object() -> Result<()> {
    let scratch = Scratch::new()?;
    let daemon = DaemonBuilder::new(&scratch).disk("a=ram:1M");
    let running = daemon.start()?;
    let file = scratch.file("b.raw");
    std::fs::File::create(&file)?.set_len(1 << 20)?;
    // The daemon would wait for a missing disk that is not required.
    let disk = json!({"backend": "file", "path": file, "require": true});
    client(&running).change(Method::PUT, "/v1/disks/b", Some(&disk))?;
    drop(running);
    std::fs::remove_file(&file)?;
    let (status, log) = daemon.start_refused()?;
    ensure!(!status.success());
    for part in ["disk b: ", "b.raw", "does not exist", "changes.json"] {
        ensure!(log.contains(part), "{part}: {log}");
    }
    Ok(())
}

#[test]
fn reload_reports_changed_limits() -> Result<()> {
    let scratch = Scratch::new()?;
    let file = scratch.file("lunette.toml");
    let write = |iops: u32| {
        let text = "[[disk]]\nname = \"a\"\nbackend = \"ram\"\nsize = \"1M\"\n";
        std::fs::write(&file, format!("{text}iops = {iops}\n"))
    };
    write(100)?;
    let config = file.to_string_lossy();
    let daemon = DaemonBuilder::new(&scratch)
        .arguments(["--config", &config])
        .start()?;
    ensure!(daemon.lunette(&["reload"])?.contains("no changes"));
    write(200)?;
    let report = daemon.lunette(&["reload"])?;
    ensure!(report.trim() == "1 disk limited", "{report}");
    // A value that was changed at run time stays, and the reload names it.
    daemon.lunette(&["disk", "limit", "a", "iops=300"])?;
    daemon.lunette(&["disk", "add", "b=ram:1M"])?;
    write(400)?;
    let report = daemon.lunette(&["reload"])?;
    let lines: Vec<&str> = report.lines().map(str::trim).collect();
    ensure!(
        lines.len() == 4
            && lines[0] == "no changes"
            && lines[2] == "~ disk a: iops is 300 (run time), 400 (file)",
        "{report}"
    );
    let disk: Value = client(&daemon).get("/v1/disks/a")?;
    ensure!(disk["iops"] == 300, "{disk}");
    let answer = daemon.lunette(&["reload", "--json"])?;
    let answer: Value = serde_json::from_str(&answer)?;
    ensure!(
        answer["shadowed"] == json!(["~ disk a: iops is 300 (run time), 400 (file)"]),
        "{answer}"
    );
    Ok(())
}

#[test]
fn reload_names_the_change_that_forbids_it() -> Result<()> {
    let scratch = Scratch::new()?;
    let file = scratch.file("lunette.toml");
    let socket = scratch.sockets().join("c.sock");
    let write = |disk: &str| {
        let disk = format!("[[disk]]\nname = \"{disk}\"\nbackend = \"ram\"\nsize = \"1M\"\n");
        let socket = socket.display();
        let controller = format!("[[vhost_scsi]]\nname = \"c\"\nsocket = \"{socket}\"\n");
        std::fs::write(&file, disk + &controller)
    };
    write("a")?;
    let config = file.to_string_lossy();
    let daemon = DaemonBuilder::new(&scratch)
        .arguments(["--config", &config])
        .start()?;
    daemon.lunette(&["lun", "add", "c", "4:0", "a"])?;
    write("b")?;
    let output = daemon.ask(&["reload"])?;
    let error_text = String::from_utf8_lossy(&output.stderr).into_owned();
    ensure!(output.status.code() == Some(1), "{error_text}");
    for part in ["`a`", "LUN 4:0 of c", "config diff"] {
        ensure!(error_text.contains(part), "{part}: {error_text}");
    }
    Ok(())
}

fn write_users(path: &Path, line: &str, mode: u32) -> Result<()> {
    std::fs::write(path, line)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode))?;
    Ok(())
}

#[test]
fn target_stays_if_its_new_chap_file_is_unreadable() -> Result<()> {
    let users = Scratch::new()?;
    let users = users.file("users");
    write_users(&users, "ann secretsecret", 0o600)?;
    let path = users.display().to_string();
    let portal = free_portal()?.to_string();
    let target = format!("{TARGET}=a");
    let rig = Rig::new(|daemon| {
        let words = [
            "--iscsi",
            &target,
            "--portal",
            &portal,
            "--chap-user",
            &path,
        ];
        daemon.disk("a=ram:1M").arguments(words)
    })?;
    std::net::TcpStream::connect(&portal)?;
    write_users(&users, "ann secretsecret", 0o644)?;
    let mut wanted = configuration(&client(&rig.daemon))?;
    wanted["exports"][0]["alias"] = json!("another");
    is_refused(&client(&rig.daemon), &wanted)?;
    std::net::TcpStream::connect(&portal)?;
    Ok(())
}
