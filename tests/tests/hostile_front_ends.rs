//! Front ends that violate the protocol, against the real program. Each ends only its own session, while a guest and another front
//! end continue verified I/O. Also runs `lunette conformance`.
#![forbid(unsafe_code)]

use conformance::{Device, Target, hostile};
use end_to_end::rig::kernel_is_content;
use end_to_end::{GuestBuilder, Profile, Result, Rig, Soak, bail, ensure};
use serde_json::Value;
use std::process::Command;
use std::time::{Duration, Instant};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, VerifiedLoad, status};
use vm::lunette_program;

/// Time limit, far above the usual time of a batch of requests.
const SOON: Duration = Duration::from_secs(30);

#[test]
fn hostile_front_ends_end_only_their_own_sessions() -> Result<()> {
    // One worker serves all front ends, so a blocked worker is detected.
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("bad=ram:64M")
            .disk("good=ram:64M")
            .disk("guest=file:guest.raw,size=64M")
            .vhost_blk("bad")
            .vhost_blk("good")
            .vhost_blk("guest")
            .arguments(["--workers", "1"])
    })?;
    let mut guest = GuestBuilder::new("bystander")
        .vhost_user_blk(&rig.socket("guest"), 1)
        .boot()?;
    guest.wait_for_disks(&["vda"])?;
    let soak = Soak::start(&mut guest, "--file /dev/vda --seed 3 --depth 2 --pause 5")?;
    let load = VerifiedLoad::start(&rig.socket("good"))?;
    let bad = rig.socket("bad");
    let target = Target::strict(&bad, Device::Blk);
    let begun = Instant::now();
    let mut failures = Vec::new();
    for case in hostile::cases() {
        if let Err(flaw) = case.run(&target) {
            failures.push(format!("{}: {flaw:?}", case.title));
        }
        if let Err(error) = load.expect_progress(SOON) {
            bail!(
                "after {}: {error}\n{}",
                case.title,
                rig.daemon.process().log_tail()
            );
        }
        rig.daemon.process().check_running()?;
    }
    let took = begun.elapsed();
    ensure!(failures.is_empty(), "{}", failures.join("\n"));
    // The next front end is served normally.
    let mut front_end = FrontEnd::connect(&bad, &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 1, 4096, Layout::Separate)?;
    ensure!(queue.write(0, &[7; 4096])? == status::OK);
    ensure!(load.finish()? > 0);
    soak.finish(&mut guest)?;
    kernel_is_content(&mut guest)?;
    guest.power_off()?;
    log_is_limited(&rig.daemon.process().log(), took)?;
    ensure!(rig.daemon.stop(SOON)?.success());
    Ok(())
}

/// Runs all tests of `lunette conformance` against both device types, with files and with writes.
#[test]
fn both_device_types_pass_every_conformance_test() -> Result<()> {
    let rig = Rig::new(|daemon| {
        daemon
            .disk("d=file:d.raw,size=64M")
            .vhost_blk("d")
            .vhost_scsi("c")
            .lun("c/3:40=d")
    })?;
    for (device, tests) in [
        (format!("vhost-user-blk:{}", rig.socket("d").display()), 180),
        (
            format!("vhost-user-scsi:{}:3:40", rig.socket("c").display()),
            150,
        ),
    ] {
        let junit = rig.scratch.file("results.xml");
        let output = Command::new(lunette_program(Profile::Dev)?)
            .args(["conformance", &device, "--destructive", "--json", "--junit"])
            .arg(&junit)
            .output()?;
        let report: Value = serde_json::from_slice(&output.stdout)?;
        let broken: Vec<_> = report["tests"]
            .as_array()
            .into_iter()
            .flatten()
            .filter(|test| test["result"] == "failed" || test["result"] == "died")
            .collect();
        ensure!(broken.is_empty(), "{device}: {broken:#?}");
        ensure!(output.status.success());
        ensure!(
            report["passed"].as_u64() >= Some(tests),
            "{device}: {report:#}"
        );
        let xml = std::fs::read_to_string(&junit)?;
        ensure!(xml.matches("<testcase ").count() >= tests as usize);
        ensure!(!xml.contains("<failure"), "{xml}");
    }
    Ok(())
}

/// Refusals are logged at a limited rate, so that a front end cannot fill the disk: two kinds of lines, each once per second.
fn log_is_limited(log: &str, took: Duration) -> Result<()> {
    let complaints = log.lines().filter(|line| line.contains("WARN")).count() as u64;
    ensure!(complaints > 0, "nothing was logged:\n{log}");
    let most = 3 * (took.as_secs() + 2);
    ensure!(complaints <= most, "{complaints} lines in {took:?}:\n{log}");
    Ok(())
}
