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

    /// Begins a migration, calls `during` while memory is copied, and cancels the migration. The guest continues in its QEMU.
    pub fn cancel_migration(
        &mut self,
        builder: &GuestBuilder,
        during: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let mut moving = self.prepare_migration(builder, &[])?;
        moving.begin(SLOW)?;
        moving.wait_for("active")?;
        during()?;
        moving.qmp.command("migrate_cancel", json!({}))?;
        moving.end_as(&["cancelled", "failed"])
    }

    /// Begins a migration, and kills its destination. The guest continues in its QEMU.
    pub fn fail_migration(&mut self, builder: &GuestBuilder, dies: DestinationDies) -> Result<()> {
        const PAUSE: &str = "pause-before-switchover";
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
                moving.begin(SLOW)?;
                moving.wait_for("active")?;
                moving.to.process().kill()?;
            }
            DestinationDies::AtSwitch => {
                set_capabilities(&mut moving.qmp, &[PAUSE], true)?;
                moving.begin(FAST)?;
                moving.wait_for("pre-switchover")?;
                moving.to.process().kill()?;
                let state = json!({ "state": "pre-switchover" });
                moving.qmp.command("migrate-continue", state)?;
            }
        }
        moving.end_as(&["failed"])?;
        set_capabilities(&mut moving.qmp, &[PAUSE], false)
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
        let parameters = json!({ "max-bandwidth": bandwidth, "downtime-limit": DOWNTIME_LIMIT });
        self.qmp.command("migrate-set-parameters", parameters)?;
        let uri = self.uri();
        self.qmp.command("migrate", uri)?;
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
