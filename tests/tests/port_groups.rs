//! Access states (ALUA) of a target with two portal groups: set by the configuration, at run time, by a reload and by initiators.
#![forbid(unsafe_code)]

use end_to_end::rig::free_portal;
use end_to_end::{Daemon, DaemonBuilder, IscsiSession, Result, Scratch, ensure};
use serde_json::{Value, json};

const TARGET: &str = "iqn.2026-11.org.example:t0";

/// READ (10) of one block.
const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
/// REPORT TARGET PORT GROUPS, 256 bytes.
const REPORT: [u8; 12] = [0xa3, 0x0a, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0];
/// SET TARGET PORT GROUPS with one descriptor.
const SET: [u8; 12] = [0xa4, 0x0a, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0];
/// Standard INQUIRY data, 36 bytes.
const INQUIRY: [u8; 6] = [0x12, 0, 0, 0, 36, 0];
/// NOT READY, LOGICAL UNIT NOT ACCESSIBLE, TARGET PORT IN STANDBY STATE.
const STANDBY: Option<[u8; 3]> = Some([0x02, 0x04, 0x0b]);
/// NOT READY, LOGICAL UNIT NOT ACCESSIBLE, TARGET PORT IN UNAVAILABLE STATE.
const UNAVAILABLE: Option<[u8; 3]> = Some([0x02, 0x04, 0x0c]);
/// UNIT ATTENTION, ASYMMETRIC ACCESS STATE CHANGED.
const CHANGED: Option<[u8; 3]> = Some([0x06, 0x2a, 0x06]);

/// Returns sense key, ASC and ASCQ of a READ. `None`: it succeeded.
fn read(session: &mut IscsiSession) -> Result<Option<[u8; 3]>> {
    let done = session.command(&READ, None, 512)?;
    Ok(match done.status {
        0 => None,
        _ => Some([done.sense[2] & 0x0f, done.sense[12], done.sense[13]]),
    })
}

/// Returns access state and status code of the second port group.
fn second_group(session: &mut IscsiSession) -> Result<[u8; 2]> {
    let data = session.command(&REPORT, None, 256)?.data;
    ensure!(data.len() == 28, "{data:02x?}");
    Ok([data[16], data[21]])
}

/// A target with portal groups 1 and 2.
struct Target {
    scratch: Scratch,
    daemon: Daemon,
    portals: [String; 2],
}

impl Target {
    fn start(keys: &str) -> Result<Target> {
        let scratch = Scratch::new()?;
        let portals = [free_portal()?.to_string(), free_portal()?.to_string()];
        configure(&scratch, &portals, keys)?;
        let config = scratch.file("lunette.toml");
        let daemon = DaemonBuilder::new(&scratch)
            .arguments(["--config", &config.to_string_lossy()])
            .start()?;
        Ok(Target {
            scratch,
            daemon,
            portals,
        })
    }

    /// Opens a session through each portal group and consumes the first unit attentions.
    fn sessions(&self) -> Result<[IscsiSession; 2]> {
        let mut sessions = [
            IscsiSession::login_only(&self.portals[0], TARGET, 1)?,
            IscsiSession::login_only(&self.portals[1], TARGET, 2)?,
        ];
        for session in &mut sessions {
            while read(session)?.is_some_and(|[key, ..]| key == 0x06) {}
        }
        Ok(sessions)
    }

    fn set(&self, group: &str, state: &str) -> Result<String> {
        let words = ["export", "access-state", TARGET, group, state];
        self.daemon.lunette(&words)
    }

    fn port_groups(&self) -> Result<Value> {
        let export: Value =
            serde_json::from_str(&self.daemon.lunette(&["export", "show", TARGET, "--json"])?)?;
        Ok(export[0]["status"]["port_groups"].clone())
    }
}

fn configure(scratch: &Scratch, portals: &[String; 2], keys: &str) -> Result<()> {
    let [first, second] = portals;
    let text = format!(
        "[[disk]]\nname = \"d\"\nbackend = \"ram\"\nsize = \"1M\"\n\
         [[iscsi]]\nname = \"{TARGET}\"\ndisks = [\"d\"]\ndemo_mode = \"rw\"\n\
         portals = [\"{first},1\", \"{second},2\"]\n{keys}\n"
    );
    Ok(std::fs::write(scratch.file("lunette.toml"), text)?)
}

#[test]
fn administrator_sets_the_states_of_portal_groups() -> Result<()> {
    let mut target = Target::start("access_states = [\"2=standby\"]")?;
    let [mut first, mut second] = target.sessions()?;
    ensure!(read(&mut first)?.is_none());
    ensure!(read(&mut second)? == STANDBY);
    let status = target.daemon.lunette(&["status"])?;
    ensure!(status.contains("portal group 2: standby"), "{status}");

    // A change at run time. Repeating it has no effect.
    target.set("2", "active/non-optimized")?;
    ensure!(read(&mut first)? == CHANGED && read(&mut first)?.is_none());
    ensure!(read(&mut second)? == CHANGED && read(&mut second)?.is_none());
    ensure!(second_group(&mut first)? == [0x01, 0x02], "implicit");
    target.set("2", "active/non-optimized")?;
    ensure!(read(&mut first)?.is_none());

    // An initiator changes the state, and the administrator reverts it.
    let group = target.port_groups()?[1]["target_port_group"].clone();
    let group = u8::try_from(group.as_u64().unwrap_or(0))?;
    let list = [0, 0, 0, 0, 0x03, 0, 0, group];
    ensure!(second.command(&SET, Some(&list), 0)?.status == 0);
    ensure!(read(&mut second)? == UNAVAILABLE);
    ensure!(read(&mut first)? == CHANGED);
    ensure!(second_group(&mut first)? == [0x03, 0x01], "explicit");
    let groups = target.port_groups()?;
    ensure!(
        groups[1]["state"] == "active/non-optimized"
            && groups[1]["changed_by_initiators"] == json!([{"lun": 0, "state": "unavailable"}]),
        "{groups}"
    );
    let table = target.daemon.lunette(&["export", "access-state", TARGET])?;
    ensure!(table.contains("LUN 0 unavailable"), "{table}");
    let second_alone = ["export", "access-state", TARGET, "2"];
    let row = target.daemon.lunette(&second_alone)?;
    ensure!(
        row.lines().count() == 2 && row.contains("LUN 0 unavailable"),
        "{row}"
    );
    target.set("2", "active/non-optimized")?;
    ensure!(read(&mut second)? == CHANGED && read(&mut second)?.is_none());
    ensure!(read(&mut first)? == CHANGED);

    // The state survives a restart.
    target.set("2", "unavailable")?;
    let changes = target.daemon.lunette(&["config", "diff"])?;
    ensure!(
        changes.contains("portal group 2 = unavailable"),
        "{changes}"
    );
    target.daemon.kill()?;
    target.daemon.start_again()?;
    let [mut first, mut second] = target.sessions()?;
    ensure!(read(&mut first)?.is_none());
    ensure!(read(&mut second)? == UNAVAILABLE);

    // After the state equals the file's again, a reload may change it.
    target.set("2", "standby")?;
    ensure!(read(&mut second)? == CHANGED && read(&mut second)? == STANDBY);
    configure(&target.scratch, &target.portals, "")?;
    let report = target.daemon.lunette(&["reload"])?;
    ensure!(report.trim() == "1 change of access states", "{report}");
    ensure!(read(&mut second)? == CHANGED && read(&mut second)?.is_none());
    let table = target.daemon.lunette(&["export", "access-state", TARGET])?;
    ensure!(!table.contains("standby"), "{table}");
    Ok(())
}

#[test]
fn mistakes_in_access_states_are_named() -> Result<()> {
    let target = Target::start("")?;
    for (group, state, expected) in [
        ("3", "standby", "there is no portal group"),
        ("2", "asleep", "standby"),
        ("2", "offline", "standby"),
    ] {
        let words = ["export", "access-state", TARGET, group, state];
        let output = target.daemon.ask(&words)?;
        let error_text = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.code() == Some(1), "{error_text}");
        ensure!(error_text.contains(expected), "{error_text}");
    }
    Ok(())
}

#[test]
fn initiators_set_no_state_if_the_administrator_reserves_it() -> Result<()> {
    let target = Target::start("explicit_alua = false")?;
    let [mut first, mut second] = target.sessions()?;
    // TPGS: implicit only (01b).
    let inquiry = first.command(&INQUIRY, None, 36)?;
    ensure!(inquiry.data[5] & 0x30 == 0x10, "{:02x?}", inquiry.data);
    let done = first.command(&SET, Some(&[0, 0, 0, 0, 2, 0, 0, 2]), 0)?;
    ensure!(done.status == 2, "status {}", done.status);
    ensure!([done.sense[2] & 0x0f, done.sense[12]] == [0x05, 0x20]);
    target.set("2", "standby")?;
    ensure!(read(&mut second)? == CHANGED && read(&mut second)? == STANDBY);
    Ok(())
}
