//! The open disks, with their identities and dirty bitmaps.

use std::sync::Arc;

use bdev::Disk;

use super::events::EventBus;
use super::refusal::{Fault, Refusal};
use super::servers::Servers;
use crate::bitmaps::Bitmaps;
use crate::disks::Disks;
use crate::identities::Identities;
use crate::unit_records;
use config::Config;

/// The open disks.
pub(crate) struct OpenDisks {
    pub(super) open: Disks,
    pub(super) identities: Identities,
    pub(crate) bitmaps: Arc<Bitmaps>,
    pub(super) servers: Arc<Servers>,
}

impl OpenDisks {
    /// Returns the name of the disk with this medium.
    pub fn of_medium(&self, key: &str) -> Option<String> {
        let is_it = |disk: &Disk| {
            let device = disk.device();
            device.medium().is_some_and(|medium| medium.key() == key)
        };
        let mut disks = self.open.iter();
        disks
            .find(|(_, disk)| is_it(disk))
            .map(|(name, _)| name.clone())
    }

    /// Saves the identities of disks without a medium for the next start.
    pub fn keep_volatile_identities(&mut self, config: &Config) {
        self.identities.keep_volatile(config, &self.open);
    }

    /// Records the unit of an iSCSI disk, which its next first login must find.
    pub fn record_unit(&self, disk: &Disk) {
        let saved = unit_records::save(disk.name(), &*disk.device(), self.servers.units.store());
        if let Err(error) = saved {
            tracing::warn!(
                disk = disk.name(),
                "cannot record the identity of its logical unit, the next start accepts any unit: {error}; hint: make the state folder writable"
            );
        }
    }

    /// Removes a disk. Its saved state is deleted if no disk will have its identity again.
    pub fn remove(&mut self, name: &str) -> Option<Arc<Disk>> {
        let disk = self.open.remove(name)?;
        self.servers.detach_disk(&disk);
        self.bitmaps.forget(name);
        let device = disk.device();
        let is_gone = match device.capabilities().removable {
            Some(removable) => removable.forget(),
            None => device.medium().is_none(),
        };
        if is_gone {
            scsi::forget(self.servers.units.store(), &disk.info());
        }
        Some(disk)
    }

    /// Resubmits the failed I/Os of a disk (`on_error`) on every worker.
    ///
    /// # Errors
    /// If the disk does not exist or is not open.
    pub fn resume_named(&self, name: &str) -> Result<(), Refusal> {
        let disk = self.open.get(name).ok_or_else(|| {
            let fault = Fault::new(format!("disk `{name}` does not exist or is not open"));
            Refusal::NotFound(fault)
        })?;
        self.resume(disk);
        Ok(())
    }

    /// Resubmits the failed I/Os of a disk on every worker.
    pub fn resume(&self, disk: &Arc<Disk>) {
        for worker in self.servers.pool.workers() {
            let disk = disk.clone();
            worker.send(move |worker| worker.resume_disk(&disk));
        }
    }
}

/// Sends events when the first I/O of a disk waits (`on_error`) and when none waits any more, and likewise for the locks of the disk.
pub(super) fn follow_waiting(disk: &Arc<Disk>, event_bus: &EventBus) {
    let (event_bus, name) = (event_bus.clone(), disk.name().to_owned());
    disk.state()
        .on_event(move |event| event_bus.publish(event.word(), &name));
}
