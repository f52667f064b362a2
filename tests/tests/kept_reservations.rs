//! A reservation with APTPL survives kills of the daemon at every transport until its holder releases it, and belongs to the disk's
//! file.
#![forbid(unsafe_code)]

use end_to_end::rig::free_portal;
use end_to_end::{Context, Guest, GuestBuilder, IscsiSession, Result, Rig, bail, ensure};
use serde_json::Value;
use std::path::Path;

const TARGET: &str = "iqn.2026-11.org.example:t0";
const GOOD: u8 = 0;
const CHECK_CONDITION: u8 = 2;
const CONFLICT: u8 = 0x18;
/// Errno that Linux reports for RESERVATION CONFLICT.
const EBADE: i64 = 52;
/// WRITE(10) of 8 blocks at LBA 0. READ(10) reads the same blocks.
const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0];
const READ_CAPACITY: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];

/// Sends PERSISTENT RESERVE OUT, type 1 (write exclusive), with a service action and both keys. A registration sets APTPL.
fn reserve(session: &mut IscsiSession, action: u8, own: u64, new: u64) -> Result<()> {
    let mut data = [0; 24];
    data[..8].copy_from_slice(&own.to_be_bytes());
    data[8..16].copy_from_slice(&new.to_be_bytes());
    data[20] = u8::from(action == 0);
    let cdb = [0x5f, action, 1, 0, 0, 0, 0, 0, 24, 0];
    let status = session.command(&cdb, Some(&data), 0)?.status;
    ensure!(
        status == GOOD,
        "PERSISTENT RESERVE OUT {action}: status {status}"
    );
    Ok(())
}

/// Writes 4096 bytes at offset 0 in the guest. Returns the errno of a failure.
fn written(guest: &mut Guest, disk: &str) -> Result<Option<i64>> {
    let outcome = guest.io(&format!(
        "probe --file /dev/{disk} --op write --length 4096"
    ))?;
    Ok(outcome.get("errno").and_then(Value::as_i64))
}

#[test]
fn aptpl_reservation_survives_kills_across_transports() -> Result<()> {
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("d=file:d.raw,size=64M,cache=none")
            .vhost_scsi("c")
            .lun("c/0:0=d")
            .arguments(["--iscsi", &format!("{TARGET}=d")])
            .arguments([
                "--portal",
                "127.0.0.1:0",
                "--demo-mode",
                "rw",
                "--workers",
                "2",
            ])
    })?;
    let killed = |rig: &mut Rig| -> Result<IscsiSession> {
        rig.daemon.kill()?;
        rig.daemon.start_again()?;
        IscsiSession::login(&rig.iscsi_portal(TARGET)?, TARGET, 1)
    };
    let subject = GuestBuilder::new("reservations").vhost_user_scsi(&rig.socket("c"), 1);

    // Reserved over iSCSI. The holder has not logged in again when the guest writes.
    let mut session = IscsiSession::login(&rig.iscsi_portal(TARGET)?, TARGET, 1)?;
    reserve(&mut session, 0, 0, 7)?;
    reserve(&mut session, 1, 7, 0)?;
    ensure!(session.command(&WRITE, Some(&[1; 4096]), 0)?.status == GOOD);
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    let mut guest = subject.boot()?;
    let disk = guest.scsi_disk(0, 0, 0)?;
    ensure!(
        written(&mut guest, &disk)? == Some(EBADE),
        "the guest wrote"
    );
    let report = guest.ok(&format!("sg_persist -n -r /dev/{disk}"))?;
    ensure!(
        report.contains("Key=0x7") && report.contains("type: Write Exclusive"),
        "{report}"
    );
    let mut session = IscsiSession::login(&rig.iscsi_portal(TARGET)?, TARGET, 1)?;
    ensure!(session.command(&READ, None, 4096)?.data == [1; 4096]);
    ensure!(
        session.command(&WRITE, Some(&[2; 4096]), 0)?.status == GOOD,
        "its holder's write"
    );
    // A release is permanent, even if the daemon is killed.
    reserve(&mut session, 3, 7, 0)?;
    guest.power_off()?;
    killed(&mut rig)?;

    // Reserved by a guest. A stale state file would refuse its write.
    let mut guest = subject.boot()?;
    let disk = guest.scsi_disk(0, 0, 0)?;
    ensure!(
        written(&mut guest, &disk)?.is_none(),
        "nothing holds it any more"
    );
    guest.ok(&format!(
        "sg_persist -n -o -G -Z -S 0x9 /dev/{disk} && sg_persist -n -o -R -K 0x9 -T 1 /dev/{disk}"
    ))?;
    guest.kill()?;
    let mut session = killed(&mut rig)?;
    let status = session.command(&WRITE, Some(&[3; 4096]), 0)?.status;
    ensure!(status == CONFLICT, "the initiator's write: status {status}");
    let mut guest = subject.boot()?;
    let disk = guest.scsi_disk(0, 0, 0)?;
    ensure!(written(&mut guest, &disk)?.is_none(), "its holder's write");
    guest.ok(&format!("sg_persist -n -o -C -K 0x9 /dev/{disk}"))?;
    let mut status = session.command(&WRITE, Some(&[4; 4096]), 0)?.status;
    if status == 2 {
        // CHECK CONDITION: unit attention of the cleared reservation.
        status = session.command(&WRITE, Some(&[4; 4096]), 0)?.status;
    }
    ensure!(
        status == GOOD,
        "the initiator's write after all: status {status}"
    );
    Ok(())
}

#[test]
fn registrations_stay_with_their_ports_after_a_restart() -> Result<()> {
    const OTHER: &str = "iqn.2026-11.org.example:t1";
    // Returns each registration with its port, from the API. READ KEYS and READ FULL STATUS have the same data.
    let held = |daemon: &end_to_end::Daemon| -> Result<Vec<Value>> {
        let held: Vec<Value> = control::get(&daemon.control(), "/v1/reservations")?;
        let registrations = held.first().and_then(|one| one["registrations"].as_array());
        Ok(registrations.cloned().unwrap_or_default())
    };
    let builder = |targets: [&str; 2], scratch: &end_to_end::Scratch| {
        let mut daemon = end_to_end::DaemonBuilder::new(scratch)
            .disk("d=file:d.raw,size=1M")
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"]);
        for target in targets {
            daemon = daemon.arguments(["--iscsi", &format!("{target}=d")]);
        }
        daemon
    };
    let portal = |daemon: &mut end_to_end::Daemon, target: &str| -> Result<String> {
        let log = daemon.process().log();
        let announced = format!("ready iscsi {target} ");
        let mut lines = log.lines().rev();
        let line = lines.find_map(|line| line.strip_prefix(&announced));
        Ok(line.unwrap_or_default().trim().to_owned())
    };
    let scratch = end_to_end::Scratch::new()?;
    let mut daemon = builder([TARGET, OTHER], &scratch).start()?;
    let at = portal(&mut daemon, OTHER)?;
    let mut session = IscsiSession::login(&at, OTHER, 1)?;
    reserve(&mut session, 0, 0, 0xabc)?;
    reserve(&mut session, 1, 0xabc, 0)?;
    let before = held(&daemon)?;
    ensure!(before.len() == 1, "{before:?}");
    daemon.kill()?;
    drop(daemon);

    // The order of the targets is reversed. Without the persisted numbers, the first target would get the other's port number.
    let mut daemon = builder([OTHER, TARGET], &scratch).start()?;
    // Polls the API until the daemon answers. The log still has the lines of the previous daemon.
    let after = vm::wait_until(std::time::Duration::from_secs(30), || held(&daemon).ok());
    ensure!(after.as_ref() == Some(&before), "{after:?}, not {before:?}");
    let at = portal(&mut daemon, OTHER)?;
    let mut same = IscsiSession::login(&at, OTHER, 1)?;
    let done = same.command(&WRITE, Some(&[7; 4096]), 0)?;
    ensure!(done.status == GOOD, "its holder: status {}", done.status);
    let at = portal(&mut daemon, TARGET)?;
    let mut stranger = IscsiSession::login(&at, TARGET, 1)?;
    let done = stranger.command(&WRITE, Some(&[7; 4096]), 0)?;
    ensure!(
        done.status == CONFLICT,
        "the same initiator by another port: status {}",
        done.status
    );
    Ok(())
}

/// Returns the status of a write of 4096 bytes to a LUN. Consumes unit attentions first, and reads the capacity of a new unit.
fn write_status(session: &mut IscsiSession, lun: u8) -> Result<u8> {
    for _ in 0..8 {
        session.command_on(lun, &READ_CAPACITY, None, 8)?;
        let done = session.command_on(lun, &WRITE, Some(&[5; 4096]), 0)?;
        if done.status != CHECK_CONDITION {
            return Ok(done.status);
        }
    }
    bail!("LUN {lun} reports unit attentions without an end")
}

/// Logs in the holder (initiator 1) and another initiator.
fn log_in_both(portal: &str) -> Result<[IscsiSession; 2]> {
    let login = |number| {
        let session = || IscsiSession::login(portal, TARGET, number).ok();
        let session = vm::wait_until(std::time::Duration::from_secs(30), session);
        session.with_context(|| format!("initiator {number} cannot log in"))
    };
    Ok([login(1)?, login(2)?])
}

/// Returns, for each LUN, whether the first session holds a reservation.
fn reserved(sessions: &mut [IscsiSession; 2], luns: u8) -> Result<Vec<bool>> {
    let [holder, other] = sessions;
    let one = |lun| {
        ensure!(write_status(holder, lun)? == GOOD, "LUN {lun}: its holder");
        match write_status(other, lun)? {
            GOOD => Ok(false),
            CONFLICT => Ok(true),
            status => bail!("LUN {lun}: status {status}"),
        }
    };
    (0..luns).map(one).collect()
}

/// Writes a configuration with disks by name and file, as LUNs from 0 on.
fn configure(config: &Path, portal: &str, disks: &[(&str, &Path)]) -> Result<()> {
    let mut text = String::new();
    let mut names = Vec::new();
    for (name, path) in disks {
        let path = path.display();
        text += &format!("[[disk]]\nname = {name:?}\nbackend = \"file\"\npath = \"{path}\"\n");
        text += "size = \"1M\"\n";
        names.push(*name);
    }
    text += &format!("[[iscsi]]\nname = \"{TARGET}\"\ndisks = {names:?}\n");
    text += &format!("portals = [\"{portal}\"]\ndemo_mode = \"rw\"\n");
    Ok(std::fs::write(config, text)?)
}

#[test]
fn reservation_follows_its_file_and_no_name() -> Result<()> {
    let portal = free_portal()?.to_string();
    let mut rig = Rig::prepared(|scratch, daemon| {
        let config = scratch.file("lunette.toml");
        configure(&config, &portal, &[("d", &scratch.file("a.raw"))])?;
        Ok(daemon.arguments(["--config", &config.display().to_string()]))
    })?;
    let config = rig.scratch.file("lunette.toml");
    let (a, b, c) = (
        rig.scratch.file("a.raw"),
        rig.scratch.file("b.raw"),
        rig.scratch.file("c.raw"),
    );
    let mut sessions = log_in_both(&portal)?;
    reserve(&mut sessions[0], 0, 0, 7)?;
    reserve(&mut sessions[0], 1, 7, 0)?;
    ensure!(reserved(&mut sessions, 1)? == [true]);

    // The file is renamed in use. Then no disk uses the file, and at last a disk with another name does. The former disk name now
    // has another file.
    std::fs::rename(&a, &b)?;
    ensure!(reserved(&mut sessions, 1)? == [true]);
    configure(&config, &portal, &[("other", &rig.scratch.file("x.raw"))])?;
    rig.daemon.lunette(&["reload", "--force"])?;
    ensure!(reserved(&mut sessions, 1)? == [false], "another disk");
    configure(&config, &portal, &[("d", &c), ("e", &b)])?;
    rig.daemon.lunette(&["reload", "--force"])?;
    ensure!(
        reserved(&mut sessions, 2)? == [false, true],
        "after a reload"
    );
    rig.daemon.kill()?;
    rig.daemon.start_again()?;
    sessions = log_in_both(&portal)?;
    ensure!(
        reserved(&mut sessions, 2)? == [false, true],
        "after a restart"
    );

    // Two files exchange their names while the daemon is down. The configuration is unchanged.
    rig.daemon.kill()?;
    std::fs::rename(&b, &a)?;
    std::fs::rename(&c, &b)?;
    std::fs::rename(&a, &c)?;
    rig.daemon.start_again()?;
    sessions = log_in_both(&portal)?;
    ensure!(
        reserved(&mut sessions, 2)? == [true, false],
        "names changed"
    );

    // A new file replaces the removed reserved file.
    rig.daemon.kill()?;
    std::fs::remove_file(&c)?;
    rig.daemon.start_again()?;
    sessions = log_in_both(&portal)?;
    ensure!(reserved(&mut sessions, 2)? == [false, false], "a new file");
    Ok(())
}
