//! A machine without a disk boots from a target: iPXE in the network card's ROM logs in with mutual CHAP and provides the disk
//! through a PC BIOS' INT 13h.
#![forbid(unsafe_code)]

use end_to_end::rig::free_portal;
use end_to_end::{Context, GuestBuilder, Result, Rig, ensure};
use std::os::unix::fs::PermissionsExt;

const TARGET: &str = "iqn.2026-11.org.example:t0";
/// Address of this machine in QEMU's user network.
const HOST: &str = "10.0.2.2";

#[test]
fn ipxe_boots_a_machine_from_a_target_with_chap() -> Result<()> {
    let portal = free_portal()?;
    let mut rig = Rig::prepared(|scratch, daemon| {
        let users = scratch.file("users");
        std::fs::write(&users, "ann secretsecret bob secretsecret2\n")?;
        std::fs::set_permissions(&users, std::fs::Permissions::from_mode(0o600))?;
        end_to_end::firmware::bios_image(&scratch.file("d.raw"))?;
        Ok(daemon
            .disk("d=file:d.raw,ro")
            .arguments(["--iscsi", &format!("{TARGET}=d")])
            .arguments(["--portal", &portal.to_string(), "--chap-user"])
            .arguments([&*users.to_string_lossy()]))
    })?;
    rig.iscsi_portal(TARGET)?;
    // The target name is in upper case here. Names are compared without regard to case.
    let script = format!(
        "#!ipxe\nset initiator-iqn iqn.2026-11.org.example:pxe\nset username ann\nset password secretsecret\n\
         set reverse-username bob\nset reverse-password secretsecret2\n\
         sanboot iscsi:{HOST}::{}:0:{}\n",
        portal.port(),
        TARGET.to_uppercase()
    );
    let folder = rig.scratch.file("tftp");
    std::fs::create_dir_all(&folder)?;
    std::fs::write(folder.join("boot.ipxe"), script)?;
    let network = format!("user,id=net,tftp={},bootfile=boot.ipxe", folder.display());
    let mut guest = GuestBuilder::new("pxe")
        .memory_mib(256)
        .boots_from_disk()
        .arguments(["-netdev", &network])
        .arguments(["-device", "virtio-net-pci,netdev=net,bootindex=1"])
        .power_on()?;
    let booted = guest.wait_for_line(end_to_end::firmware::READ_WHOLE);
    booted.with_context(|| rig.daemon.process().log())?;
    guest.kill()?;
    let log = rig.daemon.process().log();
    let came_in = log.lines().find(|line| line.contains("logged in"));
    let came_in = came_in.with_context(|| format!("no initiator logged in:\n{log}"))?;
    ensure!(came_in.contains("iqn.2026-11.org.example:pxe"), "{came_in}");
    Ok(())
}
