//! Replaces the devices of disks in use. The new configuration is persisted, then all workers switch. The caller holds the disks and has
//! attached all workers to the new devices: see [`crate::jobs`].

use std::sync::Arc;

use bdev::{BlockDevice, Condition, Disk};

use super::open_disks::follow_waiting;
use super::owner::{Owner, refused};
use super::refusal::{Fault, Refusal};
use super::relations;
use config::DiskConfig;

/// A disk and its new device.
#[derive(Clone)]
pub struct NewDevice {
    /// The disk.
    pub disk: Arc<Disk>,
    /// New device, with the same content.
    pub device: Arc<dyn BlockDevice>,
    /// New configuration; `None` keeps the old one, and the old device after a restart.
    pub config: Option<DiskConfig>,
}

impl Owner {
    /// Returns the configuration of a disk that is served and not being sanitized or formatted.
    ///
    /// # Errors
    /// The reason why the disk cannot be used.
    pub(crate) fn is_there(&self, disk: &Arc<Disk>) -> Result<&DiskConfig, Refusal> {
        let name = disk.name();
        let found = self
            .disks
            .open
            .get(name)
            .filter(|found| Arc::ptr_eq(found, disk));
        let (Some(_), Some(config)) = (found, self.configs.wanted.disk(name)) else {
            let fault = Fault::new(format!("disk {name} no longer exists"));
            return Err(Refusal::NotFound(fault));
        };
        if disk.conditions().has(Condition::Closed) {
            let fault = Fault::new(format!("disk {name} is being sanitized or formatted"));
            return Err(Refusal::Conflict(vec![
                fault.help("wait until the operation has ended"),
            ]));
        }
        if self.drains.resizes(name) {
            let fault = Fault::new(format!("disk {name} is being resized"));
            return Err(Refusal::Conflict(vec![fault.help(super::draining::HELP)]));
        }
        if self.drains.renews(name) {
            let detail = format!("disk {name} is being given an identity");
            return Err(Refusal::conflict(detail, super::draining::HELP));
        }
        Ok(config)
    }

    /// Checks that changes of a disk survive a restart.
    ///
    /// # Errors
    /// If the disk is configured in the file or flags and the daemon does not persist changes.
    pub(crate) fn keeps_changes_of(&self, disk: &str) -> Result<(), Refusal> {
        if self.state_store.is_some() || self.configs.base.disk(disk).is_none() {
            return Ok(());
        }
        let detail = format!(
            "disk {disk} would return to its configuration in the file or flags at a restart, because this daemon has no state folder"
        );
        let help = "start the daemon with a state folder, --state DIR, or add the disk at run time";
        Err(Refusal::Conflict(vec![Fault::new(detail).help(help)]))
    }

    /// Replaces the devices of disks atomically. Requires that no read or change is in flight and every worker is attached.
    ///
    /// # Errors
    /// Nothing has changed then.
    pub(crate) fn replace_devices(&mut self, changes: &[NewDevice]) -> Result<(), Refusal> {
        let mut next = self.configs.wanted.clone();
        for NewDevice {
            disk,
            device,
            config,
        } in changes
        {
            self.is_there(disk)?;
            let name = disk.name();
            let kept = disk.check_device(&**device);
            kept.map_err(|broken| refused(vec![format!("disk {name}: {broken}")]))?;
            let Some(config) = config else { continue };
            self.keeps_changes_of(name)?;
            if let Some(known) = next.disks.iter_mut().find(|known| known.name == *name) {
                *known = config.clone();
            }
        }
        let faults = relations::check_change(&self.configs.wanted, &next);
        if !faults.is_empty() {
            return Err(Refusal::Invalid(faults));
        }
        if next != self.configs.wanted {
            self.keep(&next, false)?;
        }
        for NewDevice {
            disk,
            device,
            config,
        } in changes
        {
            let name = disk.name();
            if let Err(broken) = disk.replace_device(Arc::clone(device)) {
                // The size cannot have changed, because only this thread changes sizes.
                tracing::error!(disk = name, "cannot replace the device: {broken}");
                continue;
            }
            for worker in self.servers.pool.workers() {
                let disk = Arc::clone(disk);
                // A worker that has ended does no I/O.
                worker.call(move |w| w.io().change_device(&disk)).ok();
            }
            self.follow_size(name, disk);
            follow_waiting(disk, &self.event_bus);
            if config.is_some() {
                self.disks.record_unit(disk);
            }
        }
        self.set_config(next);
        self.disks.keep_volatile_identities(&self.configs.wanted);
        self.publish();
        Ok(())
    }
}
