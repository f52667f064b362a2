//! What is removed while clients use it waits for their requests, as a state that everybody can see, and nobody else waits for it.
//! Needs: nothing but the daemon. Takes: 20 s.
#![forbid(unsafe_code)]

use control::{Client, Method};
use end_to_end::rig::free_portal;
use end_to_end::{IscsiSession, Result, Rig, ensure};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const TARGET: &str = "iqn.2026-11.org.example:t0";

/// READ (10) of one block (SBC-4, 5.13).
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// A disk whose I/Os take three seconds, behind a target with a reading initiator.
struct Busy {
    rig: Rig,
    client: Client,
    reader: std::thread::JoinHandle<Result<u8>>,
}

fn busy() -> Result<Busy> {
    let portal = free_portal()?.to_string();
    let rig = Rig::new(|daemon| {
        daemon
            .disk("slow=delay:3s,size=1M,around=ram")
            .arguments(["--iscsi", &format!("{TARGET}=slow")])
            .arguments(["--portal", &portal, "--demo-mode", "rw"])
    })?;
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
        client,
        reader,
    })
}

/// Another change is made while what is removed waits.
fn another_change_is_made(client: &Client) -> Result<()> {
    let ram = json!({"backend": "ram", "size": 1 << 20});
    client.change(Method::PUT, "/v1/disks/other", Some(&ram))?;
    Ok(())
}

#[test]
fn a_lun_that_is_removed_is_seen_as_removing_until_its_requests_have_ended() -> Result<()> {
    let Busy {
        rig,
        client,
        reader,
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
    // What is being removed cannot be changed.
    let shown = json!({"disk": "other"});
    let refused = client.change(Method::PUT, &format!("{lun}?force=true"), Some(&shown));
    ensure!(
        refused
            .as_ref()
            .is_err_and(|e| e.to_string().contains("is being removed")),
        "{refused:?}"
    );
    let status = reader.join().expect("it does not panic")?;
    ensure!(
        status == 0,
        "the request in flight ended with status {status}"
    );
    // The same again waits until it is gone.
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
fn an_export_that_is_removed_by_force_is_seen_as_removing_and_holds_up_nobody() -> Result<()> {
    let Busy {
        rig,
        client,
        reader,
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
    // Its session was ended, so the reader may have got anything but a hang.
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
    } = busy()?;
    let size = json!({"size": 512});
    let shrink = "/v1/disks/slow/size?force=true&wait=0";
    let (status, _) = client.change(Method::PUT, shrink, Some(&size))?;
    // The block that is read stays: nothing has to be waited for, or the read is waited for.
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
