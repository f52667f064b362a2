//! Other initiators, end to end: Linux's own in a guest, and QEMU, which boots a guest from a target.
#![forbid(unsafe_code)]

use end_to_end::files::{file_system_check, file_system_round_trip};
use end_to_end::open_iscsi;
use end_to_end::rig::{free_portal, kernel_is_content};
use end_to_end::{Context, Guest, GuestBuilder, Result, Rig, Soak, ensure};
use std::os::unix::fs::PermissionsExt;
use std::process::Command;
use std::time::{Duration, Instant};

const TARGET: &str = "iqn.2026-11.org.example:t0";
/// Time limit for a stop, far above the usual time.
const SOON: Duration = Duration::from_secs(60);

#[test]
#[allow(
    clippy::too_many_lines,
    reason = "one test, from its beginning to its end"
)]
fn linux_initiator_keeps_its_data_through_restarts_and_kills() -> Result<()> {
    let portal = free_portal()?;
    let mut rig = Rig::prepared(|scratch, daemon| {
        let users = scratch.file("users");
        std::fs::write(&users, "ann secretsecret bob secretsecret2\n")?;
        std::fs::set_permissions(&users, std::fs::Permissions::from_mode(0o600))?;
        let finders = scratch.file("finders");
        std::fs::write(&finders, "cat secretsecret3 dog secretsecret4\n")?;
        std::fs::set_permissions(&finders, std::fs::Permissions::from_mode(0o600))?;
        Ok(daemon
            .arguments(["--discovery-auth", &finders.to_string_lossy()])
            .disk("d=file:d.raw,size=256M,cache=none")
            .disk("e=file:e.raw,size=64M,cache=writeback,block_size=4096")
            .arguments(["--iscsi", &format!("{TARGET}=d,e")])
            .arguments(["--portal", &portal.to_string(), "--chap-user"])
            .arguments([&*users.to_string_lossy(), "--workers", "2"]))
    })?;
    rig.iscsi_portal(TARGET)?;
    let mut guest = GuestBuilder::new("initiator").cpus(2).initiator().boot()?;
    open_iscsi::start(&mut guest)?;
    for (key, value) in [
        ("authmethod", "CHAP"),
        ("username", "cat"),
        ("password", "secretsecret3"),
        ("username_in", "dog"),
        ("password_in", "secretsecret4"),
    ] {
        let line = format!("discovery.sendtargets.auth.{key} = {value}");
        guest.ok(&format!("echo '{line}' >> /etc/iscsi/iscsid.conf"))?;
    }
    let found = open_iscsi::discover(&mut guest, portal)?;
    ensure!(found.contains(TARGET), "discovery shows: {found}");
    let remote = open_iscsi::login(
        &mut guest,
        portal,
        TARGET,
        &[
            ("node.session.auth.authmethod", "CHAP"),
            ("node.session.auth.username", "ann"),
            ("node.session.auth.password", "secretsecret"),
            ("node.session.auth.username_in", "bob"),
            ("node.session.auth.password_in", "secretsecret2"),
            ("node.conn[0].iscsi.HeaderDigest", "CRC32C"),
            ("node.conn[0].iscsi.DataDigest", "CRC32C"),
        ],
    )?;
    let session = open_iscsi::sessions(&mut guest)?;
    for line in ["HeaderDigest: CRC32C", "DataDigest: CRC32C", "LOGGED IN"] {
        ensure!(session.contains(line), "no {line:?} in {session}");
    }
    let (d, e) = (guest.scsi_disk(0, 0, 0)?, guest.scsi_disk(0, 0, 1)?);
    file_system_round_trip(&mut guest, &d)?;
    guest.io_ok(&format!(
        "fill --file /dev/{e} --seed 61 --writes 1000 --size 16M"
    ))?;

    // Two kills and two orderly stops during verified I/O. The file system stays mounted.
    guest.ok("truncate -s 32M /mnt/soak")?;
    let soak = Soak::start(&mut guest, "--file /mnt/soak --seed 62")?;
    for round in 0..4 {
        rig.daemon.wait_for_requests("d", 200)?;
        if round % 2 == 0 {
            rig.daemon.kill()?;
        } else {
            let status = rig.daemon.stop(SOON)?;
            ensure!(
                status.success(),
                "{status}\n{}",
                rig.daemon.process().log_tail()
            );
        }
        rig.daemon.start_again()?;
        // The guest has logged in again and continues.
        guest
            .ok(&format!(
                "cat /mnt/tree/file{} && dd if=/dev/{e} of=/dev/null bs=4k count=1 iflag=direct",
                round + 1
            ))
            .with_context(|| rig.daemon.process().log_tail())?;
    }
    rig.daemon.wait_for_requests("d", 200)?;
    soak.finish(&mut guest)
        .with_context(|| rig.daemon.process().log_tail())?;
    guest.io_ok(&format!(
        "check --file /dev/{e} --seed 61 --writes 1000 --size 16M"
    ))?;
    guest.ok(&format!(
        "umount /mnt && /tools/e2fsck -fn /dev/{d} && mount -t ext4 /dev/{d} /mnt"
    ))?;
    file_system_check(&mut guest)?;
    guest.ok(&format!("umount /mnt && /tools/e2fsck -fn /dev/{d}"))?;
    kernel_is_content(&mut guest)?;
    open_iscsi::logout(&mut guest, &remote)?;
    let left = guest.disks()?;
    ensure!(left.is_empty(), "after the logout there are {left:?}");
    ensure!(rig.daemon.stop(SOON)?.success());
    Ok(())
}

/// Uses a disk through the kernel's NBD driver and kills the daemon. By default, the driver drops one of several connections when a
/// request, such as a flush to a busy disk of this machine, takes 30 s.
fn kernel_nbd_reconnects(rig: &mut Rig, guest: &mut Guest, port: u16) -> Result<()> {
    // The client returns before the device is ready.
    let connect = format!(
        "/tools/nbd-client -N n 10.0.2.2 {port} /dev/nbd0 -C 4 -t 600 -nonetlink && \
         until [ -e /sys/block/nbd0/pid ] && [ $(cat /sys/block/nbd0/size) != 0 ]; do sleep 0.1; done"
    );
    guest.ok(&format!(
        "insmod /tools/nbd.ko nbds_max=1 && {connect} && /tools/mke2fs -q -t ext4 /dev/nbd0 && \
         mount -t ext4 /dev/nbd0 /mnt && truncate -s 4M /mnt/file"
    ))?;
    guest.io_ok("fill --file /mnt/file --seed 91 --writes 200")?;
    let sessions = rig.daemon.lunette(&["session", "list"])?;
    let log = rig.daemon.process().log_tail();
    ensure!(sessions.matches("nbd-").count() == 4, "{sessions}\n{log}");
    guest.ok("umount /mnt")?;
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    // The client ends with its connections: its option -persist has no effect on this kernel.
    guest.ok(&format!(
        "while [ -e /sys/block/nbd0/pid ]; do sleep 0.2; done; \
         {connect} && /tools/e2fsck -fn /dev/nbd0 && mount -t ext4 /dev/nbd0 /mnt"
    ))?;
    guest.io_ok("check --file /mnt/file --seed 91 --writes 200")?;
    guest.ok("umount /mnt && /tools/nbd-client -d /dev/nbd0 -nonetlink")?;
    Ok(())
}

#[test]
fn linux_initiator_and_nbd_client_connect_again() -> Result<()> {
    let portal = free_portal()?;
    let nbd = free_portal()?;
    let mut rig = Rig::prepared(|_, daemon| {
        Ok(daemon
            .disk("d=ram:64M")
            .disk("n=file:n.raw,size=64M")
            .arguments(["--nbd", &format!("n:{nbd}")])
            .arguments(["--iscsi", &format!("{TARGET}=d")])
            .arguments(["--portal", &portal.to_string(), "--demo-mode", "rw"]))
    })?;
    rig.iscsi_portal(TARGET)?;
    let mut guest = GuestBuilder::new("asked").cpus(2).initiator().boot()?;
    open_iscsi::start(&mut guest)?;
    let remote = open_iscsi::login(&mut guest, portal, TARGET, &[])?;
    let disk = guest.scsi_disk(0, 0, 0)?;
    let soak = Soak::start(&mut guest, &format!("--file /dev/{disk} --seed 81"))?;
    for logins in 1..=3 {
        let deadline = Instant::now() + SOON;
        let log = loop {
            let log = rig.daemon.process().log();
            if log.matches("logged in").count() >= logins {
                break log;
            }
            ensure!(Instant::now() < deadline, "{logins} logins: {log}");
            std::thread::sleep(Duration::from_millis(100));
        };
        ensure!(!log.contains("did not log out as requested"), "{log}");
        rig.daemon.wait_for_requests("d", 200)?;
        if logins < 3 {
            let listed = rig.daemon.lunette(&["session", "list", "--json"])?;
            let listed: Vec<serde_json::Value> = serde_json::from_str(&listed)?;
            let id = listed[0]["id"].as_str().unwrap_or_default();
            rig.daemon.lunette(&["session", "remove", id])?;
        }
    }
    soak.finish(&mut guest)
        .with_context(|| rig.daemon.process().log_tail())?;
    kernel_is_content(&mut guest)?;
    open_iscsi::logout(&mut guest, &remote)?;
    kernel_nbd_reconnects(&mut rig, &mut guest, nbd.port())?;
    ensure!(rig.daemon.stop(SOON)?.success());
    Ok(())
}

#[test]
fn qemu_boots_a_guest_from_a_target() -> Result<()> {
    let portal = free_portal()?;
    let mut rig = Rig::prepared(|scratch, daemon| {
        end_to_end::bootable::bootable_image(
            &scratch.file("boot.raw"),
            160,
            end_to_end::bootable::BootableSystem::Agent,
        )?;
        Ok(daemon
            .disk("d=file:d.raw,size=160M,cache=none")
            .arguments(["--iscsi", &format!("{TARGET}=d")])
            .arguments(["--portal", &portal.to_string(), "--demo-mode", "rw"]))
    })?;
    rig.iscsi_portal(TARGET)?;
    let url = format!("iscsi://{portal}/{TARGET}/0");
    let output = Command::new(vm::tool("qemu-img")?)
        .args(["convert", "-n", "-f", "raw", "-O", "raw"])
        .arg(rig.scratch.file("boot.raw"))
        .arg(&url)
        .output()?;
    ensure!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );

    let mut guest = GuestBuilder::new("from-iscsi")
        .boots_from_disk()
        .arguments([
            "-drive",
            &format!("file={url},format=raw,if=none,id=disk,cache=none"),
        ])
        .arguments(["-device", "virtio-blk-pci,drive=disk,bootindex=1"])
        .boot()?;
    let root = guest.ok("grep ' / ' /proc/mounts")?;
    ensure!(
        root.contains("/dev/vda2 / ext4 rw"),
        "the root file system is {root}"
    );
    guest.ok("truncate -s 16M /kept")?;
    guest.io_ok("fill --file /kept --seed 71 --writes 500")?;
    guest.reboot()?;
    guest.io_ok("check --file /kept --seed 71 --writes 500")?;
    // The daemon restarts while the guest writes to its root disk. QEMU logs in again.
    guest.ok("truncate -s 16M /more")?;
    let soak = Soak::start(&mut guest, "--file /more --seed 72")?;
    rig.daemon.wait_for_requests("d", 100)?;
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    rig.daemon.wait_for_requests("d", 100)?;
    soak.finish(&mut guest)?;
    guest.io_ok("check --file /kept --seed 71 --writes 500")?;
    kernel_is_content(&mut guest)?;
    guest.power_off()
}
