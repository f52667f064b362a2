//! A removal waits for client requests in flight. It is visible as a state and delays no other change. Needs: nothing but the
//! daemon. Takes: 20 s.
#![forbid(unsafe_code)]

use control::{Client, Method};
use end_to_end::rig::free_portal;
use end_to_end::{IscsiSession, Result, Rig, Scratch, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const TARGET: &str = "iqn.2026-11.org.example:t0";

/// READ (10) of one block (SBC-4, 5.13).
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// Returns a configuration with a disk whose I/Os take three seconds, and a target with or without that disk.
fn configuration(portal: &str, has_lun: bool) -> String {
    let disk = "[[disk]]\nname = \"slow\"\nbackend = \"delay\"\ntime = \"3s\"\nsize = \"1M\"\nstorage = \"ram\"\n";
    let target =
        format!("[[iscsi]]\nname = \"{TARGET}\"\nportals = [\"{portal}\"]\ndemo_mode = \"rw\"\n");
    let lun = match has_lun {
        true => "[[iscsi.lun]]\nlun = 0\ndisk = \"slow\"\n",
        false => "",
    };
    format!("{disk}{target}{lun}")
}

/// That configuration with an active reader.
struct Busy {
    rig: Rig,
    portal: String,
    folder: Scratch,
    client: Client,
    reader: std::thread::JoinHandle<Result<u8>>,
}

fn busy() -> Result<Busy> {
    let portal = free_portal()?.to_string();
    let folder = Scratch::new()?;
    let file = folder.file("lunette.toml");
    std::fs::write(&file, configuration(&portal, true))?;
    let config = file.display().to_string();
    let rig = Rig::new(|daemon| daemon.arguments(["--config", &config]))?;
    let client = Client::new(&rig.daemon.control()).patient(Duration::from_secs(60));
    let mut session = IscsiSession::login(&portal, TARGET, 1)?;
    let reader = std::thread::spawn(move || Ok(session.command(&READ, None, 512)?.status));
    let in_flight = || -> Result<bool> {
        let export: Value = client.get(&format!("/v1/exports/{TARGET}"))?;
        Ok(export["status"]["requests"] == 1)
    };
    let begun = Instant::now();
    while !in_flight()? {
        ensure!(
            begun.elapsed() < Duration::from_secs(20),
            "no request comes"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(Busy {
        rig,
        portal,
        folder,
        client,
        reader,
    })
}

/// Checks that another change succeeds while the removal waits.
fn another_change_is_made(client: &Client) -> Result<()> {
    let ram = json!({"backend": "ram", "size": 1 << 20});
    client.change(Method::PUT, "/v1/disks/other", Some(&ram))?;
    Ok(())
}

#[test]
fn removed_lun_is_seen_as_removing_until_its_requests_end() -> Result<()> {
    let Busy {
        rig,
        client,
        reader,
        ..
    } = busy()?;
    let lun = format!("/v1/exports/{TARGET}/luns/0:0");
    let (status, _) = client.change(Method::DELETE, &format!("{lun}?wait=0"), None)?;
    ensure!(status == 202, "answered with {status}");
    let export: Value = client.get(&format!("/v1/exports/{TARGET}"))?;
    ensure!(
        export["status"]["removing_seconds"].is_u64() && export["status"]["requests"] == 1,
        "{export}"
    );
    another_change_is_made(&client)?;
    ensure!(!reader.is_finished(), "the other change has waited");
    // An object in removal cannot be changed.
    let shown = json!({"disk": "other"});
    let refused = client.change(Method::PUT, &format!("{lun}?force=true"), Some(&shown));
    ensure!(
        refused
            .as_ref()
            .is_err_and(|e| e.to_string().contains("being removed")),
        "{refused:?}"
    );
    let status = reader.join().expect("it does not panic")?;
    ensure!(
        status == 0,
        "the request in flight ended with status {status}"
    );
    // Repeating the removal waits until the object is gone.
    let gone = |client: &Client| client.get::<Value>(&lun).is_err();
    let begun = Instant::now();
    while !gone(&client) {
        ensure!(begun.elapsed() < Duration::from_secs(20), "it stays");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(rig);
    Ok(())
}

#[test]
fn a_reload_that_removes_a_lun_in_use_waits_no_longer_than_its_caller() -> Result<()> {
    let Busy {
        rig,
        portal,
        folder,
        client,
        reader,
    } = busy()?;
    let reload = "/v1/config/reload?wait";
    let refused = client.change(Method::POST, &format!("{reload}=3601"), None);
    ensure!(
        refused
            .as_ref()
            .is_err_and(|e| e.to_string().contains("the maximum is 3600 seconds")),
        "{refused:?}"
    );
    let file = folder.file("lunette.toml");
    std::fs::write(&file, configuration(&portal, false))?;
    let (status, answer) = client.change(Method::POST, &format!("{reload}=0"), None)?;
    let waits = answer["waits"][0].as_str().unwrap_or_default().to_owned();
    ensure!(
        status == 202 && waits.contains("1 request of the export in flight"),
        "{status}: {answer}"
    );
    another_change_is_made(&client)?;
    // Of two concurrent whole configurations, the last would undo the other.
    let second = client.change(Method::POST, &format!("{reload}=0"), None);
    let result = second.as_ref().map_err(ToString::to_string);
    ensure!(
        result.as_ref().is_err_and(
            |error| error.contains("another replacement of the configuration has been waiting")
        ),
        "{result:?}"
    );
    ensure!(!reader.is_finished(), "the other change has waited");
    let status = reader.join().expect("it does not panic")?;
    ensure!(
        status == 0,
        "the request in flight ended with status {status}"
    );
    let lun = format!("/v1/exports/{TARGET}/luns/0:0");
    let begun = Instant::now();
    while client.get::<Value>(&lun).is_ok() {
        ensure!(begun.elapsed() < Duration::from_secs(20), "it stays");
        std::thread::sleep(Duration::from_millis(5));
    }
    drop(rig);
    Ok(())
}

#[test]
fn a_disk_that_comes_while_a_whole_configuration_waits_stays() -> Result<()> {
    let Busy {
        rig,
        client,
        reader,
        ..
    } = busy()?;
    let mut whole: Value = client.get("/v1/config")?;
    whole["exports"][0]["lun"] = json!([]);
    let (status, answer) = client.change(Method::PUT, "/v1/config?wait=0", Some(&whole))?;
    ensure!(status == 202, "{status}: {answer}");
    another_change_is_made(&client)?;
    ensure!(!reader.is_finished(), "the other change has waited");
    reader.join().expect("it does not panic")?;
    let lun = format!("/v1/exports/{TARGET}/luns/0:0");
    let begun = Instant::now();
    while client.get::<Value>(&lun).is_ok() {
        ensure!(begun.elapsed() < Duration::from_secs(20), "it stays");
        std::thread::sleep(Duration::from_millis(5));
    }
    client.get::<Value>("/v1/disks/other")?;
    drop(rig);
    Ok(())
}

#[test]
fn waiting_reload_does_not_block_other_signals() -> Result<()> {
    let Busy {
        mut rig,
        portal,
        folder,
        client,
        reader,
    } = busy()?;
    std::fs::write(folder.file("lunette.toml"), configuration(&portal, false))?;
    rig.daemon.process().signal(Signal::HUP)?;
    let is_removing = || -> Result<bool> {
        let export: Value = client.get(&format!("/v1/exports/{TARGET}"))?;
        Ok(export["status"]["removing_seconds"].is_u64())
    };
    let begun = Instant::now();
    while !is_removing()? {
        ensure!(begun.elapsed() < Duration::from_secs(20), "no reload");
        std::thread::sleep(Duration::from_millis(5));
    }
    rig.daemon.process().signal(Signal::USR1)?;
    while !rig.daemon.process().log().contains("noticed") {
        ensure!(
            !reader.is_finished(),
            "no table was printed while the reload waited"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = reader.join().expect("it does not panic")?;
    ensure!(status == 0, "the request ended with status {status}");
    while !rig.daemon.process().log().contains("reloaded: ") {
        ensure!(begun.elapsed() < Duration::from_secs(20), "it never ends");
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

#[test]
fn export_removed_by_force_delays_no_client() -> Result<()> {
    let Busy {
        rig,
        client,
        reader,
        ..
    } = busy()?;
    let export = format!("/v1/exports/{TARGET}");
    let (status, _) =
        client.change(Method::DELETE, &format!("{export}?force=true&wait=0"), None)?;
    ensure!(status == 202, "answered with {status}");
    another_change_is_made(&client)?;
    let status: Value = client.get(&export)?;
    ensure!(status["status"]["removing_seconds"].is_u64(), "{status}");
    let begun = Instant::now();
    while client.get::<Value>(&export).is_ok() {
        ensure!(begun.elapsed() < Duration::from_secs(20), "it stays");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The session was closed, so the reader may end with any result but must not hang.
    reader.join().expect("it does not panic").ok();
    drop(rig);
    Ok(())
}

#[test]
fn a_disk_that_shrinks_waits_for_its_end_and_other_changes_do_not() -> Result<()> {
    let Busy {
        rig,
        client,
        reader,
        ..
    } = busy()?;
    let size = json!({"size": 512});
    let shrink = "/v1/disks/slow/size?force=true&wait=0";
    let (status, _) = client.change(Method::PUT, shrink, Some(&size))?;
    // The block in flight is in the remaining part, so the change may complete at once or wait for the read.
    ensure!(status == 200 || status == 202, "answered with {status}");
    another_change_is_made(&client)?;
    let begun = Instant::now();
    loop {
        let disk: Value = client.get("/v1/disks/slow")?;
        if disk["status"]["size"] == 512 && disk["size"] == 512 {
            break;
        }
        ensure!(begun.elapsed() < Duration::from_secs(20), "{disk}");
        std::thread::sleep(Duration::from_millis(5));
    }
    let status = reader.join().expect("it does not panic")?;
    ensure!(
        status == 0,
        "the request in flight ended with status {status}"
    );
    drop(rig);
    Ok(())
}
