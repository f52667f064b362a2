//! Unit attentions at run time: each I_T nexus reports a change exactly once.
#![forbid(unsafe_code)]

use end_to_end::{IscsiSession, Result, Rig, ensure};

const FIRST: &str = "iqn.2026-11.org.example:t0";
const SECOND: &str = "iqn.2026-11.org.example:t1";

const TEST_UNIT_READY: [u8; 6] = [0; 6];
/// READ CAPACITY(10).
const READ_CAPACITY: [u8; 10] = [0x25, 0, 0, 0, 0, 0, 0, 0, 0, 0];
/// REPORT LUNS, 256 bytes.
const REPORT_LUNS: [u8; 12] = [0xa0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
/// CAPACITY DATA HAS CHANGED.
const CAPACITY_CHANGED: (u8, u8, u8) = (6, 0x2a, 0x09);
/// REPORTED LUNS DATA HAS CHANGED.
const LUNS_CHANGED: (u8, u8, u8) = (6, 0x3f, 0x0e);
/// LOGICAL UNIT NOT SUPPORTED.
const NOT_SUPPORTED: (u8, u8, u8) = (5, 0x25, 0x00);

/// Returns sense key, ASC and ASCQ of TEST UNIT READY. `None`: ready.
fn sense_of(session: &mut IscsiSession, lun: u8) -> Result<Option<(u8, u8, u8)>> {
    let done = session.command_on(lun, &TEST_UNIT_READY, None, 0)?;
    if done.status == 0 {
        return Ok(None);
    }
    ensure!(done.status == 2, "status {}", done.status);
    let sense = &done.sense;
    ensure!(sense.len() >= 14 && sense[0] & 0x7f == 0x70, "{sense:?}");
    Ok(Some((sense[2] & 0xf, sense[12], sense[13])))
}

fn luns(session: &mut IscsiSession) -> Result<Vec<u8>> {
    let done = session.command(&REPORT_LUNS, None, 256)?;
    ensure!(done.status == 0, "REPORT LUNS: status {}", done.status);
    let length = done.data.get(3).map_or(0, |length| usize::from(*length));
    let entries = done.data.get(8..8 + length).unwrap_or_default();
    Ok(entries.chunks(8).map(|entry| entry[1]).collect())
}

fn rig() -> Result<(Rig, String)> {
    let mut rig = Rig::new(|daemon| {
        daemon
            .disk("d=ram:4M")
            .disk("e=ram:1M")
            .arguments(["--iscsi", &format!("{FIRST}=d")])
            .arguments(["--iscsi", &format!("{SECOND}=d")])
            .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"])
            .arguments(["--workers", "2"])
    })?;
    let portal = rig.iscsi_portal(FIRST)?;
    Ok((rig, portal))
}

fn last_block(session: &mut IscsiSession) -> Result<u32> {
    let done = session.command(&READ_CAPACITY, None, 8)?;
    ensure!(done.status == 0, "READ CAPACITY: status {}", done.status);
    let bytes = done.data.get(..4).unwrap_or(&[0; 4]);
    Ok(u32::from_be_bytes(bytes.try_into()?))
}

#[test]
fn new_size_is_reported_to_every_nexus_once() -> Result<()> {
    let (mut rig, portal) = rig()?;
    let second = rig.iscsi_portal(SECOND)?;
    let mut sessions = [
        IscsiSession::login(&portal, FIRST, 1)?,
        IscsiSession::login(&portal, FIRST, 2)?,
        // The same disk through another target.
        IscsiSession::login(&second, SECOND, 1)?,
    ];
    for (words, last) in [
        (&["disk", "resize", "d", "8M"][..], (8 << 20) / 512 - 1),
        (
            &["disk", "resize", "d", "2M", "--force"],
            (2 << 20) / 512 - 1,
        ),
    ] {
        for session in &mut sessions {
            ensure!(sense_of(session, 0)?.is_none(), "before {words:?}");
        }
        rig.daemon.lunette(words)?;
        for (number, session) in sessions.iter_mut().enumerate() {
            let first = sense_of(session, 0)?;
            ensure!(first == Some(CAPACITY_CHANGED), "{number}: {first:02x?}");
            let next = sense_of(session, 0)?;
            ensure!(next.is_none(), "{number}, again: {next:02x?}");
            ensure!(last_block(session)? == last, "{number} sees another size");
        }
    }
    // A later login reports the unit attentions of a new nexus and no earlier change.
    let mut late = IscsiSession::login(&portal, FIRST, 3)?;
    ensure!(sense_of(&mut late, 0)?.is_none());
    Ok(())
}

#[test]
fn lun_changes_are_reported_to_every_nexus_once() -> Result<()> {
    let (mut rig, portal) = rig()?;
    let second = rig.iscsi_portal(SECOND)?;
    let mut sessions = [
        IscsiSession::login(&portal, FIRST, 1)?,
        IscsiSession::login(&portal, FIRST, 2)?,
    ];
    let mut other = IscsiSession::login(&second, SECOND, 1)?;
    for _ in 0..3 {
        rig.daemon.lunette(&["lun", "add", FIRST, "0:5", "e"])?;
        for (number, session) in sessions.iter_mut().enumerate() {
            let first = sense_of(session, 0)?;
            ensure!(first == Some(LUNS_CHANGED), "{number}: {first:02x?}");
            let next = sense_of(session, 0)?;
            ensure!(next.is_none(), "{number}, again: {next:02x?}");
            let listed = luns(session)?;
            ensure!(listed == [0, 5], "{number} reports {listed:?}");
            // The unit is new to the nexus and may report unit attentions first.
            let mut ready = false;
            for _ in 0..4 {
                ready |= sense_of(session, 5)?.is_none();
            }
            ensure!(ready, "{number}: the new unit does not become ready");
        }
        rig.daemon.lunette(&["lun", "remove", FIRST, "0:5"])?;
        for (number, session) in sessions.iter_mut().enumerate() {
            let first = sense_of(session, 0)?;
            ensure!(first == Some(LUNS_CHANGED), "{number}: {first:02x?}");
            let next = sense_of(session, 0)?;
            ensure!(next.is_none(), "{number}, again: {next:02x?}");
            let gone = sense_of(session, 5)?;
            ensure!(gone == Some(NOT_SUPPORTED), "{number}: {gone:02x?}");
            let listed = luns(session)?;
            ensure!(listed == [0], "{number} reports {listed:?}");
        }
    }
    ensure!(
        sense_of(&mut other, 0)?.is_none(),
        "another target reports it"
    );
    Ok(())
}

#[test]
fn report_luns_clears_attentions_of_its_nexus() -> Result<()> {
    let (rig, portal) = rig()?;
    let mut session = IscsiSession::login(&portal, FIRST, 1)?;
    let mut other = IscsiSession::login(&portal, FIRST, 2)?;
    rig.daemon.lunette(&["lun", "add", FIRST, "0:5", "e"])?;
    ensure!(luns(&mut session)? == [0, 5]);
    // SPC-5, 6.35: REPORT LUNS clears the unit attention on every unit, for its own nexus only.
    let next = sense_of(&mut session, 0)?;
    ensure!(next.is_none(), "{next:02x?}");
    ensure!(sense_of(&mut other, 0)? == Some(LUNS_CHANGED));
    Ok(())
}
