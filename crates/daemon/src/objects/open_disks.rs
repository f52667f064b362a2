//! The open disks, with their identities and dirty bitmaps.

use std::sync::Arc;
use std::time::Instant;

use bdev::{Disk, DiskEvent};
use control::EventKind;

use super::events::EventBus;
use super::refusal::{Fault, Refusal};
use super::servers::Servers;
use crate::bitmaps::Bitmaps;
use crate::disks::Disks;
use crate::identities::Identities;
use crate::unit_records::{self, Unrecorded};
use config::Config;

/// The open disks.
pub(crate) struct OpenDisks {
    pub(super) open: Disks,
    pub(super) identities: Identities,
    pub(crate) bitmaps: Arc<Bitmaps>,
    pub(super) servers: Arc<Servers>,
    /// Time of the last attempt to record units again.
    pub(super) last_record: Instant,
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

    /// Records the unit of an iSCSI disk or of a disk on a device, which the next start must find. A failure is tried again.
    pub fn record_unit(&self, disk: &Disk) {
        let saved = unit_records::save(disk.name(), &*disk.device(), self.servers.units.store());
        let unrecorded = &self.servers.unrecorded;
        if unrecorded.set(disk.name(), &saved)
            && let Some(warning) = unrecorded.warning(disk.name())
        {
            tracing::warn!(disk = disk.name(), "{warning}");
        }
    }

    /// Returns the time of the next attempt to record units.
    pub fn next_record(&self) -> Option<Instant> {
        let is_due = !self.servers.unrecorded.disks().is_empty();
        is_due.then(|| self.last_record + Unrecorded::RETRY)
    }

    /// Retries the failed records of units after the retry interval.
    pub fn record_units(&mut self) {
        if self.next_record().is_none_or(|due| due > Instant::now()) {
            return;
        }
        self.last_record = Instant::now();
        for name in self.servers.unrecorded.disks() {
            match self.open.get(&name) {
                Some(disk) => self.record_unit(disk),
                None => self.servers.unrecorded.forget(&name),
            }
        }
    }

    /// Removes a disk. Its saved state is deleted if no disk will have its identity again.
    pub fn remove(&mut self, name: &str) -> Option<Arc<Disk>> {
        let disk = self.open.remove(name)?;
        self.servers.detach_disk(&disk);
        self.bitmaps.forget(name);
        self.servers.unrecorded.forget(name);
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
    disk.state().on_event(move |event| {
        let kind = match event {
            DiskEvent::Waiting => EventKind::DiskWaiting,
            DiskEvent::Resumed => EventKind::DiskResumed,
            DiskEvent::LockWaiting => EventKind::DiskLockWaiting,
            DiskEvent::LockTimeout => EventKind::DiskLockTimeout,
            DiskEvent::LockResumed => EventKind::DiskLockResumed,
        };
        event_bus.publish(kind, &name);
    });
}
