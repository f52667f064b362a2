//! Live migration between two QEMUs. One daemon serves each disk through an export for either side.
#![forbid(unsafe_code)]

use end_to_end::rig::kernel_is_content;
use end_to_end::{GuestBuilder, Result, Rig, Scratch, ensure};
use std::time::Duration;

/// Devices of the guest on side `side`.
fn machine(rig: &Rig, side: usize, properties: &str) -> GuestBuilder {
    GuestBuilder::new("migrating")
        .memory_mib(192)
        .vhost_user_blk_with(&rig.socket(&format!("b{side}")), 1, properties)
        .vhost_user_scsi(&rig.socket(&format!("c{side}")), 1)
}

/// Option of a second export.
fn export(scratch: &Scratch, object: &str, name: &str) -> String {
    let socket = scratch.socket(&format!("{name}.sock"));
    format!("{object}:{},name={name}", socket.display())
}

#[test]
fn guest_migrates_back_and_forth_under_a_verifying_load() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        for file in ["d.raw", "s.raw"] {
            std::fs::write(scratch.file(file), vec![0; 32 << 20])?;
        }
        let mut daemon = daemon.disk("d=file:d.raw").disk("s=file:s.raw");
        for side in 0..2 {
            let (blk, scsi) = (format!("b{side}"), format!("c{side}"));
            daemon = daemon
                .arguments(["--vhost-blk", &export(scratch, "d", &blk)])
                .vhost_scsi(&scsi)
                .lun(&format!("{scsi}/0:0=s"));
        }
        Ok(daemon.arguments(["--workers", "2"]))
    })?;
    for properties in ["packed=off", "packed=on"] {
        let mut guest = machine(&rig, 0, properties).boot()?;
        guest.wait_for_disks(&["vda", "sda"])?;
        let loads = ["vda", "sda"].map(|disk| {
            guest.start(&format!(
                "guest-agent soak --file /dev/{disk} --seed 1 --depth 4 --runtime 6"
            ))
        });
        guest.cancel_migration(&machine(&rig, 1, properties), Duration::from_millis(500))?;
        for side in [1, 0, 1, 0] {
            let migration = guest.migrate(&machine(&rig, side, properties))?;
            println!("{properties}: to side {side}: {migration:?}");
        }
        for load in loads {
            let report = guest.wait_ok(load?, Duration::from_secs(120))?;
            ensure!(report.contains("\"mismatches\":0"), "{report}");
        }
        kernel_is_content(&mut guest)?;
        guest.kill()?;
    }
    let log = rig.daemon.process().log();
    ensure!(!log.contains("session ended"), "{log}");
    rig.daemon.process().check_running()
}
