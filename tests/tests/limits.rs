//! A disk's limits apply to the sum over all transports, are shared evenly, and do not affect other disks.
#![forbid(unsafe_code)]

use end_to_end::{Context, Profile, Result, Rig, ensure};
use serde_json::Value;
use std::process::{Child, Command, Stdio};
use vm::{lunette_program, wait_until};

/// Starts a driver with unlimited demand: random reads at `depth` for three seconds, after the burst is used up.
fn drive(subject: &str, depth: u32, bs: &str) -> Result<Child> {
    Command::new(lunette_program(Profile::Dev)?)
        .args(["bench", subject, "--rw", "randread", "--bs", bs])
        .args(["--iodepth", &depth.to_string(), "--runtime", "3s"])
        .args([
            "--warm-up-ms",
            "500",
            "--retries",
            "0",
            "--interrupts",
            "--output-format",
            "json",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .context("lunette bench")
}

/// Returns the driver's I/Os and bytes per second.
fn rates(driver: Child) -> Result<(f64, f64)> {
    let output = driver.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let stderr = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {stderr}", output.status);
    let json: Value = serde_json::from_str(&text).with_context(|| format!("{text}\n{stderr}"))?;
    let read = &json["jobs"][0]["read"];
    let number = |key: &str| {
        read[key]
            .as_f64()
            .with_context(|| format!("no {key} in {text}"))
    };
    Ok((number("iops")?, number("bw_bytes")?))
}

#[test]
fn transports_share_the_limits_of_a_disk() -> Result<()> {
    let rig = Rig::new(|daemon| {
        daemon
            .disk("d=null:1G,iops=1000")
            .disk("e=null:1G,bandwidth=20M")
            .disk("free=null:1G")
            .vhost_blk("d")
            .vhost_scsi("c")
            .lun("c/0:0=d")
            .vhost_blk("e")
            .vhost_blk("free")
    })?;
    let subject = |kind: &str, export: &str| format!("{kind}:{}", rig.socket(export).display());

    let blk = drive(&subject("vhost-user-blk", "d"), 32, "4k")?;
    let scsi = drive(&subject("vhost-user-scsi", "c"), 4, "4k")?;
    let free = drive(&subject("vhost-user-blk", "free"), 4, "4k")?;
    let (blk, scsi, free) = (rates(blk)?.0, rates(scsi)?.0, rates(free)?.0);
    // The limit plus 5 %, because the measurement may start in the middle of a second.
    ensure!(
        blk + scsi <= 1050.0,
        "{blk} and {scsi} a second, 1000 allowed"
    );
    ensure!(
        blk + scsi >= 500.0,
        "{blk} and {scsi} a second, 1000 allowed"
    );
    ensure!(
        blk <= 2.0 * scsi,
        "a queue eight times as deep gets {blk} a second, the other one {scsi}"
    );
    ensure!(free > 2000.0, "a disk without limits does {free} a second");

    let (_, bytes) = rates(drive(&subject("vhost-user-blk", "e"), 8, "64k")?)?;
    let allowed = f64::from(20 << 20);
    ensure!(
        (allowed / 2.0..=allowed * 1.05).contains(&bytes),
        "{bytes} bytes a second, {allowed} allowed"
    );

    // The latency report attributes the wait to the limits.
    let table = rig.daemon.latency(&["--json"])?;
    let table: Value = serde_json::from_str(&table).with_context(|| table.clone())?;
    let held = table["limited"].as_object().context("no limits")?;
    ensure!(held.keys().eq(["d", "e"]), "held back: {held:?}");
    for (disk, limited) in held {
        let [requests, wait] = ["requests", "wait_ns"].map(|key| limited[key].as_u64());
        let (requests, wait) = (requests.context("requests")?, wait.context("wait")?);
        ensure!(requests > 100, "{disk}: {requests} waited");
        ensure!(wait > requests * 1000, "{disk}: {wait} ns for {requests}");
    }
    Ok(())
}

#[test]
fn daemon_ends_at_once_with_requests_that_wait_for_limits() -> Result<()> {
    let mut rig = Rig::new(|daemon| daemon.disk("d=null:1G,iops=1,iops_burst=1").vhost_blk("d"))?;
    let subject = format!("vhost-user-blk:{}", rig.socket("d").display());
    let mut driver = drive(&subject, 32, "4k")?;
    // After the first response the driver is connected and its further requests wait.
    let waiting = wait_until(std::time::Duration::from_secs(20), || {
        let table = rig.daemon.latency(&["--json"]).ok()?;
        table.contains("\"operation\":\"read\"").then_some(())
    });
    let status = rig.daemon.stop(std::time::Duration::from_secs(10))?;
    driver.kill()?;
    driver.wait()?;
    ensure!(waiting.is_some(), "no request was answered");
    ensure!(status.success(), "{status}");
    Ok(())
}

/// Counters at one moment: time, requests of the disk, and requests per export.
struct Counted {
    at_ns: f64,
    requests: f64,
    bytes: f64,
    by_export: [f64; 2],
}

fn counted(rig: &Rig, disk: &str, exports: [&str; 2]) -> Result<Counted> {
    let statistics: Value = control::get(&rig.daemon.control(), "/v1/statistics")?;
    let disks = statistics["disks"].as_array().context("no disks")?;
    let found = disks.iter().find(|one| one["name"] == disk);
    let read = &found.context("no such disk")?["operations"]["read"];
    let queues = statistics["queues"].as_array().context("no queues")?;
    let of = |export: &str| -> f64 {
        let ours = queues.iter().filter(|q| q["labels"]["export"] == export);
        let counters =
            ours.filter_map(|q| q["latencies"]["counters"]["operations"][0]["requests"].as_u64());
        counters.sum::<u64>() as f64
    };
    Ok(Counted {
        at_ns: statistics["at_ns"].as_f64().context("no time")?,
        requests: read["requests"].as_f64().context("no requests")?,
        bytes: read["bytes"].as_f64().context("no bytes")?,
        by_export: exports.map(of),
    })
}

/// Returns a disk's rates over five seconds, from the daemon's own clock and counters.
fn window(rig: &Rig, disk: &str, exports: [&str; 2]) -> Result<(f64, f64, [f64; 2])> {
    let before = counted(rig, disk, exports)?;
    std::thread::sleep(std::time::Duration::from_secs(5));
    let after = counted(rig, disk, exports)?;
    let seconds = (after.at_ns - before.at_ns) / 1e9;
    let of = |index: usize| (after.by_export[index] - before.by_export[index]) / seconds;
    Ok((
        (after.requests - before.requests) / seconds,
        (after.bytes - before.bytes) / seconds,
        [of(0), of(1)],
    ))
}

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn limits_change_under_load_and_hold_within_five_percent() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("d=null:1G")
            .vhost_blk("d")
            .vhost_scsi("c")
            .lun("c/0:0=d")
            .arguments(["--workers", "2"])
    })?;
    let exports = ["d", "c"];
    let subject = |kind: &str, export: &str| format!("{kind}:{}", rig.socket(export).display());
    let drive = |subject: &str, depth: &str| -> Result<Child> {
        Command::new(lunette_program(Profile::Dev)?)
            .args(["bench", subject, "--rw", "randread", "--bs", "4k"])
            .args(["--iodepth", depth, "--runtime", "600s", "--interrupts"])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("lunette bench")
    };
    // The drivers end with the daemon.
    let mut drivers = [
        drive(&subject("vhost-user-blk", "d"), "32")?,
        drive(&subject("vhost-user-scsi", "c"), "8")?,
    ];
    let begun = wait_until(std::time::Duration::from_secs(30), || {
        let now = counted(&rig, "d", exports).ok()?;
        now.by_export.iter().all(|n| *n > 1000.0).then_some(())
    });
    ensure!(begun.is_some(), "the drivers do not begin");

    // The burst is a fifth of a second's worth. Longer pauses of the machine would reduce the measured rate.
    let steps = [
        ("iops=1000,iops_burst=200", Some(1000.0), None),
        ("iops=3000,iops_burst=600", Some(3000.0), None),
        (
            "bandwidth=8M,bandwidth_burst=1600K",
            None,
            Some(8_388_608.0),
        ),
        ("iops=500,iops_burst=100,bandwidth=1G", Some(500.0), None),
        ("none", None, None),
    ];
    for (limits, iops, bandwidth) in steps {
        rig.daemon.lunette(&["disk", "limit", "d", limits])?;
        // Skips the previous limit and the burst.
        std::thread::sleep(std::time::Duration::from_secs(1));
        let mut seen = Vec::new();
        let holds = (0..8).find_map(|_| {
            let (requests, bytes, shares) = window(&rig, "d", exports).ok()?;
            let is_near = |rate: f64, limit: Option<f64>| {
                limit.is_none_or(|limit| (limit * 0.95..=limit * 1.05).contains(&rate))
            };
            let is_fair = (shares[0] / (shares[0] + shares[1]) - 0.5).abs() <= 0.05;
            let is_free = requests > 4000.0;
            seen.push((requests, bytes, shares));
            match (iops, bandwidth) {
                (None, None) => is_free.then_some(()),
                _ => {
                    (is_near(requests, iops) && is_near(bytes, bandwidth) && is_fair).then_some(())
                }
            }
        });
        ensure!(holds.is_some(), "{limits}: {seen:.0?}");
        // A busy machine never explains a rate above the limit.
        for (requests, bytes, _) in &seen {
            ensure!(
                iops.is_none_or(|iops| *requests <= iops * 1.05),
                "{limits}: {seen:.0?}"
            );
            ensure!(
                bandwidth.is_none_or(|bandwidth| *bytes <= bandwidth * 1.05),
                "{limits}: {seen:.0?}"
            );
        }
        println!("{limits}: {:.1?}", seen.last());
    }

    // The limits can also be set with a PUT of the whole disk, and they survive a restart.
    let client = control::Client::new(&rig.daemon.control());
    let mut disk: Value = client.get("/v1/disks/d")?;
    disk["iops"] = 700.into();
    client.change(control::Method::PUT, "/v1/disks/d", Some(&disk))?;
    for driver in &mut drivers {
        driver.kill()?;
        driver.wait()?;
    }
    rig.daemon.stop(std::time::Duration::from_secs(20))?;
    rig.daemon.start_again()?;
    let disk: Value = client.get("/v1/disks/d")?;
    ensure!(disk["iops"] == 700, "{disk}");
    for (body, pointer) in [
        (serde_json::json!({"iops": 0}), "/iops"),
        (serde_json::json!({"iops_burst": 7}), "/iops_burst"),
        (serde_json::json!({"bandwith": 7}), "/bandwith"),
    ] {
        let path = "/v1/disks/d/limits";
        match client.change(control::Method::PUT, path, Some(&body)) {
            Err(control::ClientError::Problem { problem }) => {
                ensure!(problem.status == 422, "{problem:?}");
                ensure!(problem.errors[0].pointer == pointer, "{problem:?}");
            }
            other => end_to_end::bail!("{body}: {other:?}"),
        }
    }
    Ok(())
}
