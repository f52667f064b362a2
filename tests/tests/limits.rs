//! Limits hold over all doors of a disk together, are shared evenly, and do not touch other disks.
#![forbid(unsafe_code)]

use end_to_end::{Context, Profile, Result, Rig, ensure};
use lab::{lunette_program, wait_until};
use serde_json::Value;
use std::process::{Child, Command, Stdio};

/// Starts a driver that wants all it can get: random reads at `depth` for three seconds, after the burst is used up.
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

/// What it got: I/Os and bytes a second.
fn rates(driver: Child) -> Result<(f64, f64)> {
    let output = driver.wait_with_output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{}: {said}", output.status);
    let json: Value = serde_json::from_str(&text).with_context(|| format!("{text}\n{said}"))?;
    let read = &json["jobs"][0]["read"];
    let number = |key: &str| {
        read[key]
            .as_f64()
            .with_context(|| format!("no {key} in {text}"))
    };
    Ok((number("iops")?, number("bw_bytes")?))
}

#[test]
fn two_doors_of_a_disk_share_its_limits_and_another_disk_has_none() -> Result<()> {
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
    // No more than was allowed, with the five parts in a hundred that a start in the middle of a second may give.
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
    Ok(())
}

#[test]
fn daemon_ends_at_once_with_requests_that_wait_for_limits() -> Result<()> {
    let mut rig = Rig::new(|daemon| daemon.disk("d=null:1G,iops=1,iops_burst=1").vhost_blk("d"))?;
    let subject = format!("vhost-user-blk:{}", rig.socket("d").display());
    let mut driver = drive(&subject, 32, "4k")?;
    // It is connected and its requests wait once the daemon has answered the first one.
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
