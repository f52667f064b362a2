//! A reservation with APTPL holds at every door after the daemon was killed, until its holder lets it go.
#![forbid(unsafe_code)]

use end_to_end::{Guest, GuestBuilder, IscsiSession, Result, Rig, ensure};
use serde_json::Value;

const TARGET: &str = "iqn.2026-11.org.example:t0";
const GOOD: u8 = 0;
const CONFLICT: u8 = 0x18;
/// What Linux makes of RESERVATION CONFLICT.
const EBADE: i64 = 52;
/// WRITE(10) of 8 blocks at 0; READ(10) of the same.
const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 8, 0];
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 8, 0];

/// PERSISTENT RESERVE OUT, type 1 (write exclusive): service action, both keys, APTPL where it registers.
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

/// What a write of 4096 bytes at 0 gives in the guest: `None` when it was done.
fn written(guest: &mut Guest, disk: &str) -> Result<Option<i64>> {
    let outcome = guest.io(&format!(
        "probe --file /dev/{disk} --op write --length 4096"
    ))?;
    Ok(outcome.get("errno").and_then(Value::as_i64))
}

#[test]
fn aptpl_reservation_of_either_door_survives_kills_and_stops_writes_through_the_other() -> Result<()>
{
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

    // Taken over iSCSI. The holder has not come back when the guest tries.
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
    // It lets go: for good, whatever happens to the daemon.
    reserve(&mut session, 3, 7, 0)?;
    guest.power_off()?;
    killed(&mut rig)?;

    // Taken by a guest; a file of the state of before would stop it.
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
        // CHECK CONDITION: the unit attention of what was cleared
        status = session.command(&WRITE, Some(&[4; 4096]), 0)?.status;
    }
    ensure!(
        status == GOOD,
        "the initiator's write after all: status {status}"
    );
    Ok(())
}

#[test]
fn registrations_stay_with_their_ports_whatever_comes_first_after_a_restart() -> Result<()> {
    const OTHER: &str = "iqn.2026-11.org.example:t1";
    // READ KEYS and READ FULL STATUS are told by the daemon: each registration with its port.
    let held = |daemon: &end_to_end::Daemon| -> Result<Vec<Value>> {
        let held: Vec<Value> = daemon::control::get(&daemon.control(), "/v1/reservations")?;
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

    // The other way round: without what was kept, the first to come had the other's number.
    let mut daemon = builder([OTHER, TARGET], &scratch).start()?;
    // Its log has the lines of the daemon before it too, which say nothing of this one: asks until it answers.
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
