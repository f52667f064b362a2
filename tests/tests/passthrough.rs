//! Pass-through disks: commands reach the device unchanged, and its responses return unchanged. Units of another daemon's target, and
//! SCSI devices of a guest in which Lunette runs.
//!
//! Needs: guests. Takes: 40 s.
#![forbid(unsafe_code)]

use end_to_end::initiator::IscsiSession;
use end_to_end::rig::{free_portal, kernel_is_content};
use end_to_end::{Context, Guest, GuestBuilder, Result, Rig, Scratch, bail, ensure};
use std::time::Duration;
use vhost_frontend::VerifiedLoad;
use vm::wait_until;

const FAR: &str = "iqn.2026-11.org.example:far";
const NEAR: &str = "iqn.2026-11.org.example:near";
const SOON: Duration = Duration::from_secs(60);

/// A far daemon with a RAM disk, and a near daemon that passes the far unit through: as an iSCSI target, as virtio-scsi controller `c`
/// and as virtio-blk `r`.
struct Pair {
    near: Rig,
    far: Rig,
    portals: [String; 2],
}

impl Pair {
    fn start(keys: &str) -> Result<Pair> {
        let portals = [free_portal()?.to_string(), free_portal()?.to_string()];
        let [far_portal, near_portal] = &portals;
        let serves = |target: &str, portal: &str| {
            ["--iscsi", target, "--portal", portal, "--demo-mode", "rw"].map(str::to_owned)
        };
        let far = serves(&format!("{FAR}=d"), far_portal);
        let far = Rig::new(|daemon| {
            daemon
                .disk("d=ram:32M,serial=FAR-AWAY")
                .arguments(far.iter().map(String::as_str))
        })?;
        let disk = format!("r=iscsi://{far_portal}/{FAR}/0,passthrough=true{keys}");
        let target = serves(&format!("{NEAR}=r"), near_portal);
        let near = far.beside(|daemon| {
            daemon
                .disk(&disk)
                .vhost_blk("r")
                .vhost_scsi("c")
                .lun("c/0:0=r")
                .arguments(target.iter().map(String::as_str))
        })?;
        Ok(Pair { near, far, portals })
    }

    fn far(&self, number: u16) -> Result<IscsiSession> {
        IscsiSession::login(&self.portals[0], FAR, number)
    }

    fn near(&self, number: u16) -> Result<IscsiSession> {
        IscsiSession::login(&self.portals[1], NEAR, number)
    }
}

/// Commands whose responses identify a unit, each with its data length.
const LOOKS: [(&[u8], u32); 12] = [
    (&[0x12, 0, 0, 0, 96, 0], 96),
    (&[0x12, 1, 0x00, 0, 255, 0], 255),
    (&[0x12, 1, 0x80, 0, 255, 0], 255),
    (&[0x12, 1, 0x83, 1, 0, 0], 256),
    (&[0x12, 1, 0xb0, 0, 64, 0], 64),
    (&[0x12, 1, 0xb2, 0, 64, 0], 64),
    (&[0x1a, 0, 0x3f, 0, 255, 0], 255),
    (&[0x5a, 0x10, 0x0a, 0, 0, 0, 0, 0, 255, 0], 255),
    (&[0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0], 32),
    (&[0xa3, 0x0c, 0, 0, 0, 0, 0, 0, 0x20, 0, 0, 0], 8192),
    (&[0x4d, 0, 0x40, 0, 0, 0, 0, 0, 64, 0], 64),
    // No unit has this VPD page, so the response is sense data.
    (&[0x12, 1, 0xee, 0, 64, 0], 64),
];

#[test]
fn answers_of_an_iscsi_unit_pass_unchanged() -> Result<()> {
    let pair = Pair::start(",pr=forward")?;
    let (mut far, mut near) = (pair.far(1)?, pair.near(2)?);
    for (cdb, room) in LOOKS {
        let (there, here) = (
            far.command(cdb, None, room)?,
            near.command(cdb, None, room)?,
        );
        ensure!(
            (there.status, &there.sense, &there.data, there.residual)
                == (here.status, &here.sense, &here.data, here.residual),
            "{cdb:02x?}: {there:?} and {here:?}"
        );
    }
    // Data written through one daemon is read through the other.
    let write = [0x2a, 0, 0, 0, 0, 9, 0, 0, 1, 0];
    ensure!(near.command(&write, Some(&[0x5a; 512]), 0)?.status == 0);
    let read = [0x28, 0, 0, 0, 0, 9, 0, 0, 1, 0];
    ensure!(far.command(&read, None, 512)?.data == [0x5a; 512]);
    // COMPARE AND WRITE of the device. The near daemon does not emulate it.
    let compare = [0x89, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 1, 0, 0];
    let mut both = [0x5a; 1024];
    both[512..].fill(0x77);
    ensure!(near.command(&compare, Some(&both), 0)?.status == 0);
    let again = near.command(&compare, Some(&both), 0)?;
    ensure!(
        again.status == 2 && again.sense[2] & 0x0f == 0x0e,
        "{again:?}"
    );
    ensure!(near.command(&read, None, 512)?.data == [0x77; 512]);
    // Larger than a scratch buffer of other commands.
    let long = vec![3; 2 << 20];
    let write = [0xaa, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
    ensure!(near.command(&write, Some(&long), 0)?.status == 0);
    let read = [0xa8, 0, 0, 0, 0, 0, 0, 0, 0x10, 0, 0, 0];
    ensure!(far.command(&read, None, 2 << 20)?.data == long);
    Ok(())
}

fn register(key: u8) -> [u8; 24] {
    let mut list = [0; 24];
    list[15] = key;
    list
}

#[test]
fn forwarded_reservations_hold_at_the_remote_target() -> Result<()> {
    let pair = Pair::start(",pr=forward")?;
    let (mut far, mut near) = (pair.far(1)?, pair.near(2)?);
    let register_ignoring = [0x5f, 6, 0, 0, 0, 0, 0, 0, 24, 0];
    ensure!(
        near.command(&register_ignoring, Some(&register(7)), 0)?
            .status
            == 0
    );
    let mut reserve = register(0);
    reserve[7] = 7;
    // RESERVE, write exclusive.
    let reserve_command = [0x5f, 1, 1, 0, 0, 0, 0, 0, 24, 0];
    ensure!(near.command(&reserve_command, Some(&reserve), 0)?.status == 0);
    let write = [0x2a, 0, 0, 0, 0, 9, 0, 0, 1, 0];
    ensure!(
        far.command(&write, Some(&[1; 512]), 0)?.status == 0x18,
        "another host writes"
    );
    ensure!(near.command(&write, Some(&[1; 512]), 0)?.status == 0);
    // All clients of the near daemon are one registrant.
    let mut other = pair.near(3)?;
    ensure!(other.command(&write, Some(&[1; 512]), 0)?.status == 0);
    let read_keys = [0x5e, 0, 0, 0, 0, 0, 0, 0, 64, 0];
    let keys = far.command(&read_keys, None, 64)?.data;
    ensure!(
        keys.get(4..16) == Some(&[0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 7]),
        "{keys:02x?}"
    );
    Ok(())
}

#[test]
fn emulated_reservations_hold_between_clients_of_a_daemon() -> Result<()> {
    let pair = Pair::start(",pr=emulate")?;
    let (mut one, mut other) = (pair.near(1)?, pair.near(2)?);
    let register_command = [0x5f, 0, 0, 0, 0, 0, 0, 0, 24, 0];
    ensure!(
        one.command(&register_command, Some(&register(7)), 0)?
            .status
            == 0
    );
    let mut reserve = register(0);
    reserve[7] = 7;
    let reserve_command = [0x5f, 1, 1, 0, 0, 0, 0, 0, 24, 0];
    ensure!(one.command(&reserve_command, Some(&reserve), 0)?.status == 0);
    let write = [0x2a, 0, 0, 0, 0, 9, 0, 0, 1, 0];
    ensure!(other.command(&write, Some(&[1; 512]), 0)?.status == 0x18);
    // This command is passed through unchanged.
    let mode_select = [0x15, 0x10, 0, 0, 4, 0];
    ensure!(other.command(&mode_select, Some(&[0; 4]), 0)?.status == 0x18);
    ensure!(
        pair.far(3)?.command(&write, Some(&[1; 512]), 0)?.status == 0,
        "the far target has no reservation"
    );
    Ok(())
}

#[test]
fn passthrough_survives_a_restart_of_the_remote_target() -> Result<()> {
    let mut pair = Pair::start("")?;
    let load = VerifiedLoad::start(&pair.near.socket("r"))?;
    load.expect_progress(SOON)?;
    drop(pair.near(2)?);
    let mut near = pair.near(2)?;
    pair.far.daemon.kill()?;
    let inquiry = std::thread::spawn(move || near.command(&[0x12, 1, 0x80, 0, 255, 0], None, 255));
    std::thread::sleep(Duration::from_secs(1));
    ensure!(!inquiry.is_finished(), "answered without its device");
    pair.far.daemon.start_again()?;
    let Ok(done) = inquiry.join() else {
        bail!("INQUIRY panicked");
    };
    let done = done?;
    ensure!(done.data.ends_with(b"FAR-AWAY"), "{done:?}");
    // The far RAM disk is empty after its restart, so the load cannot continue.
    drop(load);
    Ok(())
}

#[test]
fn guest_sees_the_device_behind_virtio_scsi() -> Result<()> {
    let pair = Pair::start("")?;
    let mut guest = GuestBuilder::new("through")
        .vhost_user_scsi(&pair.near.socket("c"), 1)
        .boot()?;
    let disk = guest.scsi_disk(0, 0, 0)?;
    let serial = guest.ok(&format!("sg_vpd -p sn /dev/{disk}"))?;
    ensure!(serial.contains("FAR-AWAY"), "{serial}");
    let script = format!(
        "set -e
        /tools/mke2fs -q -t ext4 /dev/{disk} && mount -t ext4 /dev/{disk} /mnt
        dd if=/dev/urandom of=/mnt/file bs=64k count=64 2>/dev/null
        sha256sum /mnt/file >/tmp/sum && umount /mnt && mount -t ext4 /dev/{disk} /mnt
        sha256sum -c /tmp/sum && umount /mnt"
    );
    guest.ok(&script)?;
    kernel_is_content(&mut guest)?;
    guest.kill()
}

/// A read-only initiator can send only commands that are known to leave the device unchanged. This excludes firmware updates.
#[test]
fn read_only_initiators_reach_no_command_that_may_change_the_device() -> Result<()> {
    let pair = Pair::start("")?;
    let (near, portal) = (&pair.portals[1], free_portal()?.to_string());
    let reader = pair.far.beside(|daemon| {
        daemon
            .disk(&format!(
                "r=iscsi://{}/{FAR}/0,passthrough=true",
                pair.portals[0]
            ))
            .arguments([
                "--iscsi",
                &format!("{NEAR}=r"),
                "--portal",
                &portal,
                "--demo-mode",
                "ro",
            ])
    })?;
    let mut session = IscsiSession::login(&portal, NEAR, 4)?;
    for opcode in [0x2a, 0x3b, 0x85, 0x9f, 0xc1] {
        let mut cdb = [0; 16];
        cdb[0] = opcode;
        let done = session.command(&cdb, Some(&[0; 512]), 0)?;
        ensure!(
            done.status == 2 && done.sense[2] & 0x0f == 7,
            "{opcode:x}h: {done:?}"
        );
    }
    ensure!(session.command(&[0x12, 0, 0, 0, 96, 0], None, 96)?.status == 0);
    // For another initiator the device itself rejects the command as unknown.
    let done = IscsiSession::login(near, NEAR, 5)?.command(&[0x3b; 10], Some(&[0; 512]), 0)?;
    ensure!(done.status == 2 && done.sense[2] & 0x0f == 5, "{done:?}");
    drop(reader);
    Ok(())
}

/// Clients of Lunette in the guest see the same data from QEMU's disk and CD-ROM as the guest.
#[test]
fn scsi_devices_of_a_guest_are_served_by_lunette_in_it() -> Result<()> {
    let (scratch, portal) = (Scratch::new()?, free_portal()?);
    compile_profile(&scratch.file("policy"))?;
    let mut guest = with_devices(&scratch, portal)?;
    let config = format!(
        "[[disk]]\nname = \"d0\"\nbackend = \"scsi_generic\"\npath = \"/dev/sg0\"\n\
         [[disk]]\nname = \"cd0\"\nbackend = \"scsi_generic\"\npath = \"/dev/sg1\"\nread_only = true\n\
         [[iscsi]]\nname = \"{NEAR}\"\nportals = [\"0.0.0.0:3260\"]\nacl = [{{}}]\n\
         lun = [{{ lun = 0, disk = \"d0\" }}, {{ lun = 1, disk = \"cd0\" }}]\n"
    );
    guest.start_lunette(&config, "--sandbox enforce")?;
    let portal = portal.to_string();
    let login = wait_until(SOON, || IscsiSession::login(&portal, NEAR, 1).ok());
    let mut session = login.context("no login")?;
    // Consumes the unit attentions of the second unit.
    for _ in 0..3 {
        session.command_on(1, &[0; 6], None, 0)?;
    }
    let inquiry = session.command(&[0x12, 0, 0, 0, 96, 0], None, 96)?;
    ensure!(
        inquiry.data.get(8..32) == Some(b"MAKER   Spindle         "),
        "{inquiry:?}"
    );
    // The guest's own tool reads the same bytes.
    for (lun, cdb) in [
        (0, "12 00 00 00 60 00"),
        (0, "12 01 83 00 ff 00"),
        (0, "1a 00 3f 00 ff 00"),
        (1, "12 00 00 00 60 00"),
        (1, "43 00 00 00 00 00 00 00 40 00"),
    ] {
        let bytes: Vec<u8> = cdb
            .split(' ')
            .map(|byte| u8::from_str_radix(byte, 16))
            .collect::<Result<_, _>>()?;
        let through = session.command_on(lun, &bytes, None, 255)?;
        let script = format!(
            "sg_raw -b -r 255 /dev/sg{lun} {cdb} 2>/dev/null | hexdump -v -e '1/1 \"%02x\"'"
        );
        let own = guest.ok(&script)?;
        let seen: String = through
            .data
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        ensure!(
            own.trim() == seen && !seen.is_empty(),
            "{lun}: {cdb}: {own} and {through:?}"
        );
    }
    // Transfers data to and from the disk, and from the CD-ROM by READ (10) with blocks of 2,048 bytes.
    let write = [0x8a, 0, 0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 2, 0, 0];
    ensure!(session.command(&write, Some(&[0x5a; 1024]), 0)?.status == 0);
    ensure!(
        session
            .command(&[0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0], None, 0)?
            .status
            == 0
    );
    let kept = std::fs::read(scratch.file("disk.raw"))?;
    ensure!(kept[9 * 512..11 * 512] == [0x5a; 1024] && kept[11 * 512] == 0);
    let read = session.command_on(1, &[0x28, 0, 0, 0, 0, 3, 0, 0, 2, 0], None, 4096)?;
    ensure!(read.data == [0xcd; 4096], "{read:?}");
    // An error of the device is returned unchanged: LBA out of range.
    let beyond = session.command(&[0x28, 0, 0x7f, 0, 0, 0, 0, 0, 1, 0], None, 512)?;
    ensure!(
        beyond.status == 2 && beyond.sense[2] & 0x0f == 5,
        "{beyond:?}"
    );
    let stop = session.command_on(1, &[0x1b, 0, 0, 0, 2, 0], None, 0)?;
    ensure!(
        stop.status == 2 && stop.sense[2] & 0x0f == 7,
        "eject of a read-only disk: {stop:?}"
    );
    drop(session);
    run_under_apparmor(&mut guest, &scratch)?;
    write_under_apparmor(&portal, &write)?;
    profile_denies_other_folders(&mut guest)
}

/// Compiles the packaged AppArmor profile.
fn compile_profile(policy: &std::path::Path) -> Result<()> {
    let mut parser = std::process::Command::new("/sbin/apparmor_parser");
    parser.args(["--skip-kernel-load", "--skip-cache", "--ofile"]);
    let profile = vm::workspace().join("contrib/apparmor/lunette");
    let status = parser.arg(policy).arg(profile).status();
    let status = status.context("cannot run apparmor_parser; hint: apt-get install apparmor")?;
    ensure!(status.success(), "the profile does not compile");
    Ok(())
}

/// Starts the daemon of the guest again, confined by the packaged profile, with a disk of each kind that a profile of a machine covers.
fn run_under_apparmor(guest: &mut Guest, scratch: &Scratch) -> Result<()> {
    let length = std::fs::metadata(scratch.file("policy"))?.len();
    let config = format!(
        "state = \"/var/lib/lunette\"\nsandbox = \"enforce\"\nsandbox_paths = [\"/data\"]\nmetrics_listen = \"127.0.0.1:9753\"\n\
         [[disk]]\nname = \"d0\"\nbackend = \"scsi_generic\"\npath = \"/dev/sg0\"\n\
         [[disk]]\nname = \"f\"\nbackend = \"file\"\npath = \"/srv/f.raw\"\ncache = \"writeback\"\n\
         [[disk]]\nname = \"q\"\nbackend = \"image\"\npath = \"/srv/q.qcow2\"\ncache = \"writeback\"\n\
         [[vhost_blk]]\ndisk = \"f\"\nsocket = \"/run/lunette/f.sock\"\n\
         [[nbd]]\nname = \"n\"\ndisk = \"f\"\nsocket = \"/run/lunette/n.sock\"\n\
         [[iscsi]]\nname = \"{NEAR}\"\nportals = [\"0.0.0.0:3260\"]\nacl = [{{}}]\n\
         lun = [{{ lun = 0, disk = \"d0\" }}, {{ lun = 1, disk = \"f\" }}, {{ lun = 2, disk = \"q\" }}]\n"
    );
    guest.ok(&format!(
        "set -e
        killall lunette
        while ls -l /proc/[0-9]*/exe 2>/dev/null | grep -q lunette; do sleep 0.1; done
        mount -t securityfs securityfs /sys/kernel/security
        head -c {length} /dev/vda >/tmp/policy
        dd if=/tmp/policy of=/sys/kernel/security/apparmor/.load bs=1M 2>/dev/null
        mkdir -p /usr/bin /etc/lunette /run/lunette /var/lib/lunette /srv /data
        ln $(command -v lunette) /usr/bin/lunette
        lunette image create /srv/q.qcow2 4M
        truncate -s 4M /srv/f.raw /data/f.raw
        cat >/etc/lunette/lunette.toml <<'END'\n{config}\nEND
        (
            printf 'exec lunette' >/proc/self/attr/exec
            exec /usr/bin/lunette serve --config /etc/lunette/lunette.toml
        ) >/run/lunette/log 2>&1 &
        echo $! >/run/lunette/pid
        for _ in $(seq 300); do
            lunette status >/dev/null 2>&1 && exit 0
            sleep 0.1
        done
        cat /run/lunette/log
        exit 1"
    ))?;
    Ok(())
}

/// Writes to each disk of the confined daemon.
fn write_under_apparmor(portal: &str, write: &[u8]) -> Result<()> {
    let login = wait_until(SOON, || IscsiSession::login(portal, NEAR, 2).ok());
    let mut session = login.context("no login under the profile")?;
    for lun in 0..3 {
        let ready = wait_until(SOON, || {
            let done = session.command_on(lun, &[0; 6], None, 0).ok()?;
            (done.status == 0).then_some(())
        });
        ready.with_context(|| format!("LUN {lun} is not ready"))?;
        let done = session.command_on(lun, write, Some(&[0x5a; 1024]), 0)?;
        ensure!(done.status == 0, "{lun}: {done:?}");
    }
    Ok(())
}

/// The kernel has denied nothing so far. A disk in another folder, which the sandbox permits, is refused with the reason.
fn profile_denies_other_folders(guest: &mut Guest) -> Result<()> {
    let confined = guest.ok("cat /proc/$(cat /run/lunette/pid)/attr/current")?;
    ensure!(confined.trim() == "lunette (enforce)", "{confined}");
    guest.ok(
        "lunette disk snapshot q --to /srv/q2.qcow2 && lunette disk add m=file:/srv/m.raw,size=1M,cache=writeback &&
        wget -q -O- http://127.0.0.1:9753/metrics",
    )?;
    let denied = "dmesg | grep 'apparmor=\"DENIED\"' || true";
    let before = guest.ok(denied)?;
    ensure!(before.trim().is_empty(), "{before}");
    let refused = guest.ok("! lunette disk add o=file:/data/f.raw,cache=writeback 2>&1")?;
    let hint = "the AppArmor profile lunette may deny it: add the line `/data/f.raw rwk,` to /etc/apparmor.d/local/lunette";
    ensure!(refused.contains(hint), "{refused}");
    let after = guest.ok(denied)?;
    ensure!(after.contains("name=\"/data/f.raw\""), "{after}");
    Ok(())
}

/// Boots a guest with three disks: `disk.raw` as a SCSI disk, `cd.raw` as a CD-ROM, `policy` as a virtio disk.
fn with_devices(scratch: &Scratch, portal: std::net::SocketAddr) -> Result<Guest> {
    let (disk, cd) = (scratch.file("disk.raw"), scratch.file("cd.raw"));
    std::fs::File::create(&disk)?.set_len(16 << 20)?;
    std::fs::write(&cd, vec![0xcd; 2 << 20])?;
    let drive = |path: &std::path::Path, id: &str, more: &str| {
        format!("if=none,id={id},format=raw,file={}{more}", path.display())
    };
    GuestBuilder::new("inner")
        .cpus(2)
        .memory_mib(768)
        .lunette(portal)
        .arguments(["-device", "virtio-scsi-pci,id=hba"])
        .arguments(["-drive", &drive(&disk, "d0", "")])
        .arguments([
            "-device",
            "scsi-hd,bus=hba.0,scsi-id=0,drive=d0,serial=INNERMOST,vendor=MAKER,product=Spindle",
        ])
        .arguments(["-drive", &drive(&cd, "cd0", ",readonly=on")])
        .arguments(["-device", "scsi-cd,bus=hba.0,scsi-id=1,drive=cd0"])
        .arguments(["-drive", &drive(&scratch.file("policy"), "policy", "")])
        .arguments(["-device", "virtio-blk-pci,drive=policy"])
        .boot()
}
