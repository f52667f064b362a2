//! The guest boots although the daemon is killed and restarted while firmware sets up its disk.
//!
//! QEMU may start the device on the new connection before it has negotiated features there.
#![forbid(unsafe_code)]

use end_to_end::{GuestBuilder, Result, Rig, ensure};
use std::path::Path;
use std::time::{Duration, Instant};

/// Log line of QEMU if the firmware started the device while no daemon was connected. QEMU 7.2 does not retry, QEMU 10 does.
const GIVEN_UP: &str = "vhost start failed: Error setting inflight format";

#[test]
fn uefi_boots_though_the_daemon_was_killed_while_it_set_the_disk_up() -> Result<()> {
    boots_at(&[800, 1500, 2200, 3000], GuestBuilder::uefi, |image| {
        end_to_end::firmware::efi_image(image, 40, 1)
    })
}

#[test]
fn bios_boots_though_the_daemon_was_killed_while_it_set_the_disk_up() -> Result<()> {
    boots_at(
        &[50, 150, 300],
        GuestBuilder::boots_from_disk,
        end_to_end::firmware::bios_image,
    )
}

/// Kills the daemon after each delay in milliseconds since the start of QEMU, and restarts it 0.2 s later.
fn boots_at(
    kills: &[u64],
    firmware: impl Fn(GuestBuilder) -> GuestBuilder,
    image: impl Fn(&Path) -> Result<()>,
) -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        image(&scratch.file("d.raw"))?;
        Ok(daemon.disk("d=file:d.raw").vhost_blk("d"))
    })?;
    let mut booted = 0;
    for kill in kills {
        let guest = GuestBuilder::new(&format!("killed-at-{kill}")).memory_mib(512);
        let mut guest = firmware(guest.vhost_user_blk(&rig.socket("d"), 1)).power_on()?;
        std::thread::sleep(Duration::from_millis(*kill));
        rig.daemon.kill()?;
        std::thread::sleep(Duration::from_millis(200));
        rig.daemon.start_again()?;
        let until = Instant::now() + Duration::from_secs(60);
        loop {
            let console = std::fs::read(guest.console()).unwrap_or_default();
            let qemu = guest.process().log();
            if String::from_utf8_lossy(&console).contains(end_to_end::firmware::READ_WHOLE) {
                booted += 1;
                break;
            }
            if qemu.contains(GIVEN_UP) {
                break;
            }
            ensure!(Instant::now() < until, "killed at {kill} ms: {qemu}");
            std::thread::sleep(Duration::from_millis(50));
        }
        guest.kill()?;
        let log = rig.daemon.process().log();
        ensure!(
            !log.contains("refused") && !log.contains("rejected"),
            "killed at {kill} ms: {log}"
        );
    }
    ensure!(booted > 0, "no guest has booted");
    Ok(())
}
