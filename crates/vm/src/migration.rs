//! Live migration of a guest to another QEMU on the same machine.

use crate::guest::{Guest, GuestBuilder};
use crate::process::wait_until;
use crate::qmp::Qmp;
use anyhow::{Context, Result, anyhow, bail, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use std::path::Path;
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
    /// After the switch. The destination has not confirmed the state of the devices.
    AtDeviceState,
}

/// Moment of a migration before the guest moves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Moment {
    /// Memory is copied and the guest runs.
    Copy,
    /// The source has stopped the guest and its disks.
    Switch,
}

/// Time between the stop and the death of a destination.
const STOPPED: Duration = Duration::from_secs(1);

/// A migration in progress.
struct Moving {
    /// Destination.
    to: Guest,
    /// Monitor of the source.
    qmp: Qmp,
    /// Monitor of the destination.
    to_qmp: Qmp,
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

    /// Like [`Guest::migrate`], with the commands of libvirt in its order: QEMU's return path confirms the migration, the source waits before
    /// the switch, and the destination starts paused and continues on command.
    pub fn migrate_as_libvirt(&mut self, builder: &GuestBuilder) -> Result<Migration> {
        let paused = builder.clone().arguments(["-S"]);
        let mut moving = self.prepare_migration(&paused, &["events", RETURN_PATH])?;
        moving.begin_until(Moment::Switch)?;
        moving.leave_pause()?;
        moving.wait_for("completed")?;
        moving.continue_destination()?;
        self.move_to(moving)
    }

    /// Saves the guest to a file. Its QEMU ends. [`Guest::restore_from`] continues it.
    pub fn save_to(&mut self, file: &Path) -> Result<()> {
        let mut qmp = self.qmp()?;
        set_capabilities(&mut qmp, &OPTIONAL, false)?;
        set_bandwidth(&mut qmp, FAST)?;
        // QEMU 7.2 has no `file:`.
        let uri = format!("exec:cat >{}", file.display());
        qmp.command("migrate", json!({ "uri": uri }))?;
        wait_for_status(&mut qmp, "completed")?;
        self.process().kill()
    }

    /// Continues a guest that [`Guest::save_to`] has saved in a new QEMU with the devices of `builder`. Scripts continue.
    pub fn restore_from(&mut self, builder: &GuestBuilder, file: &Path) -> Result<()> {
        let incoming = format!("exec:cat {}", file.display());
        let builder = builder.clone().arguments(["-incoming", &incoming]);
        let mut to = builder.power_on()?;
        let mut qmp = to.first_qmp()?;
        qmp.wait_until_running(LIMIT)?;
        to.take_agent(self)?;
        std::mem::swap(self, &mut to);
        Ok(())
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
        let capabilities: &[&str] = match dies {
            DestinationDies::AtDeviceState => &[RETURN_PATH],
            _ => &[],
        };
        let mut moving = self.prepare_migration(builder, capabilities)?;
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
            DestinationDies::AtDeviceState => {
                moving.begin_until(Moment::Switch)?;
                let stopped = moving.to.process();
                stopped.signal(Signal::STOP)?;
                let id = rustix::process::Pid::from_raw(i32::try_from(stopped.id())?);
                // The monitor of the source may not respond while the source writes to the stopped process.
                let killer = std::thread::spawn(move || {
                    std::thread::sleep(STOPPED);
                    id.map(|id| rustix::process::kill_process(id, Signal::KILL))
                });
                moving.leave_pause()?;
                killer.join().ok().flatten().transpose()?;
                moving.to.process().kill()?;
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
        let mut to_qmp = to.first_qmp()?;
        let mut qmp = self.qmp()?;
        // Capabilities of the source persist.
        set_capabilities(&mut qmp, &OPTIONAL, false)?;
        set_capabilities(&mut qmp, capabilities, true)?;
        set_capabilities(&mut to_qmp, capabilities, true)?;
        let mut moving = Moving { to, qmp, to_qmp };
        let uri = moving.uri();
        moving.to_qmp.command("migrate-incoming", uri)?;
        Ok(moving)
    }

    /// Connects to the monitor of a new QEMU, which opens its socket some time after its start.
    fn first_qmp(&mut self) -> Result<Qmp> {
        let Some(qmp) = wait_until(LIMIT, || self.qmp().ok()) else {
            let log = self.process().log_tail();
            bail!("the destination has no monitor:\n{log}");
        };
        Ok(qmp)
    }
}

/// Capability of both sides: the destination confirms the migration. Without it, the source has completed it when all data are sent.
const RETURN_PATH: &str = "return-path";

/// Capabilities that only some migrations have.
const OPTIONAL: [&str; 4] = ["multifd", "auto-converge", "events", RETURN_PATH];

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

fn set_bandwidth(qmp: &mut Qmp, bandwidth: u64) -> Result<()> {
    let parameters = json!({ "max-bandwidth": bandwidth, "downtime-limit": DOWNTIME_LIMIT });
    qmp.command("migrate-set-parameters", parameters)?;
    Ok(())
}

fn wait_for_status(qmp: &mut Qmp, wanted: &str) -> Result<()> {
    let reached = wait_until(LIMIT, || match qmp.command("query-migrate", json!({})) {
        Ok(status) if status["status"] == wanted => Some(Ok(())),
        Ok(status) if is_over(&status) => Some(Err(anyhow!("ended before {wanted}: {status}"))),
        Ok(_) => None,
        Err(error) => Some(Err(error)),
    });
    reached.with_context(|| format!("the migration did not become {wanted}"))?
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
        set_bandwidth(&mut self.qmp, bandwidth)
    }

    /// Continues the guest in a destination that has started paused.
    fn continue_destination(&mut self) -> Result<()> {
        wait_for_status(&mut self.to_qmp, "completed")?;
        ensure!(!self.to_qmp.is_running()?, "the destination is not paused");
        self.to_qmp.command("cont", json!({}))?;
        self.to_qmp.wait_until_running(LIMIT)
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
        wait_for_status(&mut self.qmp, wanted)
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
        let runs = self.qmp.wait_until_running(LIMIT);
        runs.context("in the source")
    }
}

fn is_over(status: &Value) -> bool {
    let status = status["status"].as_str();
    matches!(status, Some("completed" | "failed" | "cancelled"))
}
