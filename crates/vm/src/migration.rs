//! Live migration of a guest to another QEMU on the same machine.

use crate::guest::{Guest, GuestBuilder};
use crate::process::wait_until;
use crate::qmp::Qmp;
use anyhow::{Context, Result, bail, ensure};
use serde_json::{Value, json};
use std::time::Duration;

/// Time limit of a migration.
const LIMIT: Duration = Duration::from_secs(180);
/// Bandwidth limits in bytes per second: none in practice, and one that leaves time to cancel.
const FAST: u64 = 4 << 30;
const SLOW: u64 = 1 << 20;

/// Result of a completed migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Migration {
    /// Downtime of the guest, as measured by QEMU.
    pub downtime: Duration,
    /// Time from the start to the switch.
    pub total: Duration,
}

impl Guest {
    /// Moves the guest to a new QEMU with the devices of `builder`. The sockets of the devices may differ. Scripts continue. If the
    /// migration fails, the guest continues in its old QEMU.
    pub fn migrate(&mut self, builder: &GuestBuilder) -> Result<Migration> {
        let (mut to, mut qmp) = self.begin_migration(builder, FAST)?;
        let ended = end_of_migration(&mut qmp)?;
        if ended["status"] != "completed" {
            let log = to.process().log_tail();
            bail!("the migration ended as {ended}; destination:\n{log}");
        }
        let time = |key: &str| Duration::from_millis(ended[key].as_u64().unwrap_or_default());
        let migration = Migration {
            downtime: time("downtime"),
            total: time("total-time"),
        };
        to.take_agent(self)?;
        std::mem::swap(self, &mut to);
        to.kill()?;
        Ok(migration)
    }

    /// Begins a migration and cancels it after `moment`. The guest continues in its QEMU.
    pub fn cancel_migration(&mut self, builder: &GuestBuilder, moment: Duration) -> Result<()> {
        let (_to, mut qmp) = self.begin_migration(builder, SLOW)?;
        std::thread::sleep(moment);
        let active = qmp.command("query-migrate", json!({}))?;
        ensure!(active["status"] == "active", "not in progress: {active}");
        qmp.command("migrate_cancel", json!({}))?;
        let ended = end_of_migration(&mut qmp)?;
        ensure!(ended["status"] == "cancelled", "not cancelled: {ended}");
        Ok(())
    }

    /// Starts a destination and the migration to it. Returns the destination and the monitor of the source.
    fn begin_migration(&mut self, builder: &GuestBuilder, bandwidth: u64) -> Result<(Guest, Qmp)> {
        let to = builder.clone().arguments(["-incoming", "defer"]);
        let mut to = to.power_on()?;
        let uri = format!("unix:{}", to.file("migration.sock").display());
        let uri = json!({ "uri": uri });
        // The new QEMU opens the socket of its monitor some time after its start.
        let Some(mut monitor) = wait_until(LIMIT, || to.qmp().ok()) else {
            let log = to.process().log_tail();
            bail!("the destination has no monitor:\n{log}");
        };
        monitor.command("migrate-incoming", uri.clone())?;
        let mut qmp = self.qmp()?;
        let parameters = json!({ "max-bandwidth": bandwidth });
        qmp.command("migrate-set-parameters", parameters)?;
        qmp.command("migrate", uri)?;
        Ok((to, qmp))
    }
}

/// Waits for the end of a migration. Returns its status.
fn end_of_migration(qmp: &mut Qmp) -> Result<Value> {
    let ended = wait_until(LIMIT, || {
        let status = match qmp.command("query-migrate", json!({})) {
            Ok(status) => status,
            Err(error) => return Some(Err(error)),
        };
        let is_over = matches!(
            status["status"].as_str(),
            Some("completed" | "failed" | "cancelled")
        );
        is_over.then_some(Ok(status))
    });
    ended.context("the migration did not end")?
}
