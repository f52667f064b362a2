//! Live migration of a guest to another QEMU on the same machine.

use crate::guest::{Guest, GuestBuilder};
use crate::process::wait_until;
use crate::qmp::Qmp;
use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::{Value, json};
use std::time::Duration;

/// Time limit of a migration.
const LIMIT: Duration = Duration::from_secs(180);
/// Bandwidth limits in bytes per second: none in practice, and one that leaves time to cancel.
const FAST: u64 = 4 << 30;
const SLOW: u64 = 1 << 20;
/// Downtime limit for QEMU in milliseconds. It is short, so that QEMU copies changed pages in several rounds while the guest runs. A page
/// that a device does not log stays old in the destination.
const DOWNTIME_LIMIT: u64 = 10;

/// Result of a completed migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Downtime of the guest, as measured by QEMU.
    pub downtime: Duration,
    /// Time from the start to the switch.
    pub total: Duration,
}

/// Death of the destination of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DestinationDies {
    /// Before the source has connected to it.
    BeforeConnect,
    /// While memory is copied and the guest runs.
    DuringCopy,
    /// After the source has stopped the guest and its disks.
    AtSwitch,
}

/// Moment of a migration before the guest moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Memory is copied and the guest runs.
    Copy,
    /// The source has stopped the guest and its disks.
    Switch,
}

/// A migration in progress.
struct Moving {
    /// Destination.
    to: Guest,
    /// Monitor of the source.
    qmp: Qmp,
}

impl Guest {
    /// Moves the guest to a new QEMU with the devices of `builder`. The sockets of the devices may differ. Scripts continue. If the
    /// migration fails, the guest continues in its old QEMU.
    pub fn migrate(&mut self, builder: &GuestBuilder) -> Result<Migration> {
        self.migrate_with(builder, &[])
    }

    /// Like [`Guest::migrate`], with capabilities such as `multifd` on both sides.
    pub fn migrate_with(
        &mut self,
        builder: &GuestBuilder,
        capabilities: &[&str],
    ) -> Result<Migration> {
        let mut moving = self.prepare_migration(builder, capabilities)?;
        moving.begin(FAST)?;
        self.move_to(moving)
    }

    /// Like [`Guest::migrate`], and calls `during_copy` while memory is copied.
    pub fn migrate_while(
        &mut self,
        builder: &GuestBuilder,
        during_copy: impl FnOnce() -> Result<()>,
    ) -> Result<Migration> {
        let mut moving = self.prepare_migration(builder, &[])?;
        moving.begin_until(Moment::Copy)?;
        during_copy()?;
        moving.set_bandwidth(FAST)?;
        moving.wait_for(Moment::Switch.status())?;
        moving.leave_pause()?;
        self.move_to(moving)
    }

    /// Waits for the end of a migration and continues in the destination.
    fn move_to(&mut self, mut moving: Moving) -> Result<Migration> {
        let ended = moving.end()?;
        let Moving { mut to, .. } = moving;
        if ended["status"] != "completed" {
            let log = to.process().log_tail();
            bail!("the migration ended as {ended}; destination:\n{log}");
        }
        let time = |key: &str| Duration::from_millis(ended[key].as_u64().unwrap_or_default());
        let migration = Migration {
            downtime: time("downtime"),
            total: time("total-time"),
        };
        // The agent's last messages to the source are complete when its port has closed.
        self.process().kill()?;
        to.take_agent(self)?;
        std::mem::swap(self, &mut to);
        Ok(migration)
    }

    /// Begins a migration, calls `during` in this moment, and cancels the migration. The guest continues in its QEMU.
    pub fn cancel_migration(
        &mut self,
        builder: &GuestBuilder,
        moment: Moment,
        during: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut moving = self.prepare_migration(builder, &[])?;
        moving.begin_until(moment)?;
        during()?;
        moving.qmp.command("migrate_cancel", json!({}))?;
        moving.end_as(&["cancelled", "failed"])?;
        set_capabilities(&mut moving.qmp, &[PAUSE], false)
    }

    /// Begins a migration, and kills its destination. The guest continues in its QEMU.
    pub fn fail_migration(&mut self, builder: &GuestBuilder, dies: DestinationDies) -> Result<()> {
        let mut moving = self.prepare_migration(builder, &[])?;
        match dies {
            DestinationDies::BeforeConnect => {
                moving.to.process().kill()?;
                // An error of the command is a failed migration, too.
                moving.begin(FAST).ok();
                if moving.status()?["status"].is_null() {
                    return Ok(());
                }
            }
            DestinationDies::DuringCopy => {
                moving.begin_until(Moment::Copy)?;
                moving.to.process().kill()?;
            }
            DestinationDies::AtSwitch => {
                moving.begin_until(Moment::Switch)?;
                moving.to.process().kill()?;
                moving.leave_pause()?;
            }
        }
        moving.end_as(&["failed"])?;
        set_capabilities(&mut moving.qmp, &[PAUSE], false)
    }

    /// Begins a migration and kills the source in this moment. The destination, which has a part of the guest, ends with an error.
    pub fn die_in_migration(mut self, builder: &GuestBuilder, moment: Moment) -> Result<()> {
        let mut moving = self.prepare_migration(builder, &[])?;
        moving.begin_until(moment)?;
        self.process().kill()?;
        let ended = moving.to.process().wait(LIMIT)?;
        ensure!(!ended.success(), "the destination has no error: {ended}");
        Ok(())
    }

    /// Starts a destination. Returns it with the monitor of the source.
    fn prepare_migration(
        &mut self,
        builder: &GuestBuilder,
        capabilities: &[&str],
    ) -> Result<Moving> {
        ensure!(builder.migrates, "a guest that migrates needs `migrates()`");
        let to = builder.clone().arguments(["-incoming", "defer"]);
        let mut to = to.power_on()?;
        // The new QEMU opens the socket of its monitor some time after its start.
        let Some(mut monitor) = wait_until(LIMIT, || to.qmp().ok()) else {
            let log = to.process().log_tail();
            bail!("the destination has no monitor:\n{log}");
        };
        let mut qmp = self.qmp()?;
        // Capabilities of the source persist.
        set_capabilities(&mut qmp, &OPTIONAL, false)?;
        set_capabilities(&mut qmp, capabilities, true)?;
        set_capabilities(&mut monitor, capabilities, true)?;
        let moving = Moving { to, qmp };
        monitor.command("migrate-incoming", moving.uri())?;
        Ok(moving)
    }
}

/// Capabilities that only some migrations have.
const OPTIONAL: [&str; 2] = ["multifd", "auto-converge"];

/// Capability of the source: it stops the guest and its disks, and waits before the switch.
const PAUSE: &str = "pause-before-switchover";

impl Moment {
    /// Returns QEMU's name of the state.
    fn status(self) -> &'static str {
        match self {
            Moment::Copy => "active",
            Moment::Switch => "pre-switchover",
        }
    }
}

fn set_capabilities(qmp: &mut Qmp, names: &[&str], state: bool) -> Result<()> {
    let one = |name: &&str| json!({ "capability": name, "state": state });
    let all: Vec<Value> = names.iter().map(one).collect();
    qmp.command("migrate-set-capabilities", json!({ "capabilities": all }))?;
    Ok(())
}

impl Moving {
    fn uri(&self) -> Value {
        let uri = format!("unix:{}", self.to.file("migration.sock").display());
        json!({ "uri": uri })
    }

    fn begin(&mut self, bandwidth: u64) -> Result<()> {
        self.set_bandwidth(bandwidth)?;
        let uri = self.uri();
        self.qmp.command("migrate", uri)?;
        Ok(())
    }

    /// Begins a migration that waits before the switch. Returns in this moment.
    fn begin_until(&mut self, moment: Moment) -> Result<()> {
        set_capabilities(&mut self.qmp, &[PAUSE], true)?;
        self.begin(match moment {
            Moment::Copy => SLOW,
            Moment::Switch => FAST,
        })?;
        self.wait_for(moment.status())
    }

    fn set_bandwidth(&mut self, bandwidth: u64) -> Result<()> {
        let parameters = json!({ "max-bandwidth": bandwidth, "downtime-limit": DOWNTIME_LIMIT });
        self.qmp.command("migrate-set-parameters", parameters)?;
        Ok(())
    }

    /// Continues after [`Moment::Switch`].
    fn leave_pause(&mut self) -> Result<()> {
        let state = json!({ "state": Moment::Switch.status() });
        self.qmp.command("migrate-continue", state)?;
        Ok(())
    }

    fn status(&mut self) -> Result<Value> {
        self.qmp.command("query-migrate", json!({}))
    }

    fn wait_for(&mut self, wanted: &str) -> Result<()> {
        let reached = wait_until(LIMIT, || match self.status() {
            Ok(status) if status["status"] == wanted => Some(Ok(())),
            Ok(status) if is_over(&status) => Some(Err(anyhow!("ended before {wanted}: {status}"))),
            Ok(_) => None,
            Err(error) => Some(Err(error)),
        });
        reached.with_context(|| format!("the migration did not become {wanted}"))?
    }

    /// Waits for the end of the migration. Returns its status.
    fn end(&mut self) -> Result<Value> {
        let ended = wait_until(LIMIT, || match self.status() {
            Ok(status) => is_over(&status).then_some(Ok(status)),
            Err(error) => Some(Err(error)),
        });
        ended.context("the migration did not end")?
    }

    /// Waits for the end of a migration that fails, and until the guest runs again in the source.
    fn end_as(&mut self, expected: &[&str]) -> Result<()> {
        let ended = self.end()?;
        let status = ended["status"].as_str().unwrap_or_default();
        ensure!(expected.contains(&status), "unexpected end: {ended}");
        let runs = wait_until(LIMIT, || {
            let state = self.qmp.command("query-status", json!({}));
            state
                .is_ok_and(|state| state["running"] == true)
                .then_some(())
        });
        runs.context("the guest does not run in the source")
    }
}

fn is_over(status: &Value) -> bool {
    let status = status["status"].as_str();
    matches!(status, Some("completed" | "failed" | "cancelled"))
}
