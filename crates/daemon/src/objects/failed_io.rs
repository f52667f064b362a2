//! Disks with failed I/Os that wait (`on_error`). API clients receive an event and can resume the disk.

use std::sync::Arc;

use bdev::Disk;

use super::owner::Owner;
use super::refusal::{Fault, Refusal};

impl Owner {
    /// Resubmits the failed I/Os of a disk on every worker.
    ///
    /// # Errors
    /// If the disk does not exist or is not open.
    pub fn resume_disk(&mut self, name: &str) -> Result<(), Refusal> {
        let disk = self.disks.get(name).ok_or_else(|| {
            let fault = Fault::new(format!("disk `{name}` does not exist or is not open"));
            Refusal::NotFound(fault)
        })?;
        self.resume(disk);
        Ok(())
    }

    pub(super) fn resume(&self, disk: &Arc<Disk>) {
        for worker in self.servers.pool.workers() {
            let disk = disk.clone();
            worker.send(move |worker| worker.resume_disk(&disk));
        }
    }

    /// Sends an event when the first I/O of a disk waits and when none waits any more.
    pub(super) fn follow_waiting(&self, disk: &Arc<Disk>) {
        let (event_bus, name) = (self.event_bus.clone(), disk.name().to_owned());
        disk.state().on_waiting(move |waits| {
            let event = if waits {
                "disk.waiting"
            } else {
                "disk.resumed"
            };
            event_bus.publish(event, &name);
        });
    }
}
