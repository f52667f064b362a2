//! Another device under disks that are in use: the configuration that says so is persisted, then all workers change over. Whoever asks for
//! it holds the disks, and has every worker attached to the new devices: see [`crate::jobs`].

use std::sync::Arc;

use bdev::{BlockDevice, Condition, Disk};

use super::owner::{Owner, refused};
use super::refusal::{Fault, Refusal};
use super::relations;
use crate::identities::Identities;
use config::{DiskConfig, ExportRef};

/// A disk, and the device that it is to have.
#[derive(Clone)]
pub struct NewDevice {
    /// The disk.
    pub disk: Arc<Disk>,
    /// The device, which has the same content.
    pub device: Arc<dyn BlockDevice>,
    /// How it is configured from then on; `None`: as before, and after a restart the disk is what it was.
    pub config: Option<DiskConfig>,
}

impl Owner {
    /// Is a disk served, and as it was when somebody began to work on it? One that is being sanitized is nobody else's.
    ///
    /// # Errors
    /// What is in the way.
    pub(crate) fn is_there(&self, disk: &Arc<Disk>) -> Result<&DiskConfig, Refusal> {
        let name = disk.name();
        let found = self
            .disks
            .get(name)
            .filter(|found| Arc::ptr_eq(found, disk));
        let (Some(_), Some(config)) = (found, self.config.disk(name)) else {
            let fault = Fault::new(format!("disk {name} is not there any more"));
            return Err(Refusal::NotFound(fault));
        };
        if disk.conditions().has(Condition::Closed) {
            let fault = Fault::new(format!("disk {name} is being sanitized or formatted"));
            return Err(Refusal::Conflict(vec![
                fault.help("wait until that has ended"),
            ]));
        }
        Ok(config)
    }

    /// Returns whether a SCSI export has the disk as a logical unit.
    pub(crate) fn is_shown_by_scsi(&self, disk: &str) -> bool {
        let mut luns = self.config.exports().filter_map(ExportRef::luns).flatten();
        luns.any(|lun| lun.disk == disk)
    }

    /// Would a restart find a disk where it is from now on?
    ///
    /// # Errors
    /// When the file would say something else, and nothing on top of it.
    pub(crate) fn keeps_changes_of(&self, disk: &str) -> Result<(), Refusal> {
        if self.state_store.is_some() || self.base.disk(disk).is_none() {
            return Ok(());
        }
        let detail = format!(
            "disk {disk} would be what the file or the flags say after a restart, for this daemon keeps no changes"
        );
        let help = "give it a state folder, --state DIR, or add the disk at run time";
        Err(Refusal::Conflict(vec![Fault::new(detail).help(help)]))
    }

    /// Gives disks other devices, all of them or none. No read and no change of theirs is in flight, and every worker has attached.
    ///
    /// # Errors
    /// Nothing has changed then.
    pub(crate) fn replace_devices(&mut self, changes: &[NewDevice]) -> Result<(), Refusal> {
        let mut next = self.config.clone();
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
            let store = self.servers.units.store();
            let written = Identities::carry_over(disk, &**device, store);
            written.map_err(|reason| refused(vec![format!("disk {name}: {reason}")]))?;
        }
        let faults = relations::check_change(&self.config, &next);
        if !faults.is_empty() {
            return Err(Refusal::Invalid(faults));
        }
        if next != self.config {
            self.keep(&next, false)?;
        }
        for NewDevice { disk, device, .. } in changes {
            let name = disk.name();
            if let Err(broken) = disk.replace_device(Arc::clone(device)) {
                // Its size cannot have changed since: that is this thread's business.
                tracing::error!(disk = name, "cannot have another device: {broken}");
                continue;
            }
            for worker in self.servers.pool.workers() {
                let disk = Arc::clone(disk);
                // One that has ended has no I/O.
                worker.call(move |w| w.io().change_device(&disk)).ok();
            }
            self.follow_size(name, disk);
            self.follow_waiting(disk);
        }
        self.set_config(next);
        self.identities.keep_volatile(&self.config, &self.disks);
        self.publish();
        Ok(())
    }
}
