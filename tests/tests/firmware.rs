//! Firmware boots from our disks: UEFI (OVMF), whose drivers negotiate no limits and read a file of any length at once, and a PC
//! BIOS (SeaBIOS), whose drivers poll.
#![forbid(unsafe_code)]

use end_to_end::{GuestBuilder, Result, Rig, ensure};

/// Size of a unified kernel image in MiB, above a former limit of one request.
const PROGRAM_MIB: usize = 64;

#[test]
fn uefi_boots_a_program_of_64_mib_from_both_kinds_of_disk() -> Result<()> {
    boots(
        "uefi",
        |scratch| {
            end_to_end::firmware::efi_image(scratch, 80, PROGRAM_MIB)?;
            Ok(80)
        },
        GuestBuilder::uefi,
    )
}

#[test]
fn bios_boots_from_both_kinds_of_disk() -> Result<()> {
    boots(
        "bios",
        |scratch| {
            end_to_end::firmware::bios_image(scratch)?;
            Ok(1)
        },
        GuestBuilder::boots_from_disk,
    )
}

/// `image` creates the disk and returns its size in MiB.
fn boots(
    name: &str,
    image: impl Fn(&std::path::Path) -> Result<u64>,
    firmware: impl Fn(GuestBuilder) -> GuestBuilder,
) -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        image(&scratch.file("d.raw"))?;
        std::fs::copy(scratch.file("d.raw"), scratch.file("s.raw"))?;
        Ok(daemon
            .disk("d=file:d.raw")
            .disk("s=file:s.raw")
            .vhost_blk("d")
            .vhost_scsi("c")
            .lun("c/0:0=s"))
    })?;
    for kind in ["blk", "scsi"] {
        let guest = GuestBuilder::new(&format!("{name}-{kind}")).memory_mib(512);
        let guest = match kind {
            "blk" => guest.vhost_user_blk(&rig.socket("d"), 1),
            _ => guest.vhost_user_scsi(&rig.socket("c"), 1),
        };
        let mut guest = firmware(guest).power_on()?;
        guest.wait_for_line(end_to_end::firmware::READ_WHOLE)?;
        guest.kill()?;
    }
    let log = rig.daemon.process().log();
    ensure!(!log.contains("WARN"), "{log}");
    Ok(())
}
