//! Placement of exports on shared, chosen or dedicated workers, and changes of the placement while clients run.
#![forbid(unsafe_code)]

use control::Client;
use end_to_end::{IscsiSession, Result, Rig, ensure};
use serde_json::{Value, json};
use std::time::Duration;
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, status};
use vm::wait_until;

const OWN: &str = "iqn.2026-11.org.example:own";
const SHARED: &str = "iqn.2026-11.org.example:shared";
const LIMIT: Duration = Duration::from_secs(60);

fn client(rig: &Rig) -> Client {
    Client::new(&rig.daemon.control()).patient(LIMIT)
}

fn export(client: &Client, name: &str) -> Result<Value> {
    Ok(client.get(&format!("/v1/exports/{name}"))?)
}

fn serving(client: &Client, name: &str) -> Result<Vec<u64>> {
    let export = export(client, name)?;
    let served = export["status"]["served"].as_array().into_iter().flatten();
    let mut workers: Vec<u64> = served.filter_map(|one| one["worker"].as_u64()).collect();
    workers.sort_unstable();
    workers.dedup();
    Ok(workers)
}

fn threads(client: &Client) -> Result<Vec<String>> {
    let status: Value = client.get("/v1/status")?;
    let mut names = Vec::new();
    for task in std::fs::read_dir(format!("/proc/{}/task", status["pid"]))? {
        // A thread may end during the listing.
        let name = std::fs::read_to_string(task?.path().join("comm")).unwrap_or_default();
        if name.starts_with("worker-") {
            names.push(name.trim().to_owned());
        }
    }
    names.sort_unstable();
    Ok(names)
}

fn wait_for_threads(client: &Client, expected: &[&str]) -> Result<()> {
    let seen = wait_until(LIMIT, || {
        threads(client)
            .is_ok_and(|names| names == expected)
            .then_some(())
    });
    ensure!(
        seen.is_some(),
        "{:?} instead of {expected:?}",
        threads(client)?
    );
    Ok(())
}

#[test]
fn vhost_user_queues_run_on_the_workers_of_their_export() -> Result<()> {
    let rig = Rig::new(|daemon| {
        daemon
            .disk("d0=ram:1M")
            .disk("d1=ram:1M")
            .vhost_blk("d0")
            .vhost_blk("d1")
            .vhost_scsi("c0")
            .lun("c0/0:0=d1")
            .arguments(["--workers", "2"])
    })?;
    let client = client(&rig);
    wait_for_threads(&client, &["worker-0", "worker-1"])?;
    rig.daemon.lunette(&["export", "place", "d0", "1"])?;
    rig.daemon
        .lunette(&["export", "place", "c0", "dedicated"])?;
    wait_for_threads(&client, &["worker-0", "worker-1", "worker-2"])?;
    let workers: Value = client.get("/v1/workers")?;
    ensure!(workers[2]["export"] == "c0", "{workers}");

    let options = QueueOptions::default();
    let mut front_end = FrontEnd::connect(&rig.socket("d0"), &Options::default())?;
    let mut first = BlkQueue::start(&mut front_end, 0, &options, 4, 4096, Layout::Separate)?;
    let mut second = BlkQueue::start(&mut front_end, 1, &options, 4, 4096, Layout::Separate)?;
    ensure!(first.write(0, &[7; 4096])? == status::OK);
    ensure!(serving(&client, "d0")? == [1]);
    let shown = rig.daemon.lunette(&["status"])?;
    ensure!(shown.contains("served by worker 1"), "{shown}");

    // Running queues stay on their worker. New queues use the new placement.
    rig.daemon
        .lunette(&["export", "place", "d0", "dedicated"])?;
    let mut bytes = [0; 4096];
    ensure!(second.read(0, &mut bytes)? == status::OK && bytes == [7; 4096]);
    ensure!(serving(&client, "d0")? == [1]);
    drop((first, second, front_end));
    let gone = wait_until(LIMIT, || {
        serving(&client, "d0")
            .is_ok_and(|w| w.is_empty())
            .then_some(())
    });
    ensure!(gone.is_some());
    let mut front_end = FrontEnd::connect(&rig.socket("d0"), &Options::default())?;
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 4, 4096, Layout::Separate)?;
    ensure!(queue.read(0, &mut bytes)? == status::OK && bytes == [7; 4096]);
    ensure!(serving(&client, "d0")? == [3]);
    let metrics = client.text("/metrics")?;
    ensure!(metrics.contains("worker=\"3\""), "{metrics}");
    let latency = rig.daemon.latency(&["d0"])?;
    ensure!(!latency.is_empty());

    // A dedicated worker serves its queues until they end, and then ends itself.
    rig.daemon.lunette(&["export", "place", "d0", "shared"])?;
    ensure!(queue.write(0, &[8; 4096])? == status::OK);
    rig.daemon.lunette(&["export", "remove", "c0"])?;
    wait_for_threads(&client, &["worker-0", "worker-1", "worker-3"])?;
    drop((queue, front_end));
    wait_for_threads(&client, &["worker-0", "worker-1"])?;
    Ok(())
}

#[test]
fn iscsi_connections_of_a_dedicated_target_are_its_workers_alone() -> Result<()> {
    let own = format!("{OWN}=d0,dedicated=on");
    let shared = format!("{SHARED}=d1");
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("d0=ram:1M")
            .disk("d1=ram:1M")
            .arguments(["--iscsi", &own, "--iscsi", &shared])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"])
            .arguments(["--workers", "1"])
    })?;
    let portal = rig.iscsi_portal(OWN)?;
    let client = client(&rig);
    let first = IscsiSession::login(&portal, OWN, 1)?;
    // iSCSI names are compared without regard to case.
    let second = IscsiSession::login(&portal, &OWN.to_uppercase().replace("IQN", "iqn"), 2)?;
    let other = IscsiSession::login(&rig.iscsi_portal(SHARED)?, SHARED, 3)?;
    ensure!(serving(&client, OWN)? == [1]);
    ensure!(serving(&client, SHARED)? == [0]);
    let shown = export(&client, OWN)?;
    ensure!(shown["dedicated"] == true, "{shown}");
    let served = shown["status"]["served"].as_array().map_or(0, Vec::len);
    ensure!(served == 2, "{shown}");

    rig.daemon.lunette(&["export", "place", OWN, "shared"])?;
    let third = IscsiSession::login(&portal, OWN, 4)?;
    ensure!(serving(&client, OWN)? == [0, 1]);
    drop((first, second));
    wait_for_threads(&client, &["worker-0"])?;
    drop((third, other));
    Ok(())
}

#[test]
fn placement_survives_a_restart_and_a_missing_worker_is_named() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("d0=ram:1M")
            .vhost_blk("d0")
            .arguments(["--workers", "2"])
    })?;
    let refused = rig.daemon.ask(&["export", "place", "d0", "0,2"])?;
    let error_text = String::from_utf8_lossy(&refused.stderr).into_owned();
    for part in ["there is no worker 2", "workers 0 to 1", "dedicated"] {
        ensure!(error_text.contains(part), "{part}: {error_text}");
    }
    ensure!(refused.status.code() == Some(1));
    rig.daemon.lunette(&["export", "place", "d0", "1"])?;
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    let shown = export(&client(&rig), "d0")?;
    ensure!(shown["workers"] == json!([1]), "{shown}");
    Ok(())
}
