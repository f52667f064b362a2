//! New identity for a disk, for a copy that carries the identity of its original.

use super::owner::{Owner, refused};
use super::refusal::{Fault, Refusal};
use crate::identities::Identities;

impl Owner {
    /// Returns the name of the disk with this medium.
    pub fn disk_of_medium(&self, key: &str) -> Option<String> {
        let is_it = |disk: &bdev::Disk| {
            let device = disk.device();
            device.medium().is_some_and(|medium| medium.key() == key)
        };
        let mut disks = self.disks.iter();
        disks
            .find(|(_, disk)| is_it(disk))
            .map(|(name, _)| name.clone())
    }

    /// Gives an unused disk a new identity.
    ///
    /// # Errors
    /// The reason for the refusal. The disk keeps its identity.
    pub fn renew_identity(&mut self, name: &str) -> Result<(), Refusal> {
        let Some(disk) = self.disks.get(name).cloned() else {
            let detail = format!("there is no disk `{name}`");
            return Err(Refusal::NotFound(Fault::new(detail)));
        };
        let users = super::users(&self.config, name);
        if !users.is_empty() {
            let detail = format!("disk {name} is in use: {}", users.join(", "));
            let help = "remove these first: to their clients it would become another disk";
            return Err(Refusal::Conflict(vec![Fault::new(detail).help(help)]));
        }
        // A registered unit has state that was saved under the old identity.
        self.servers.let_go(&disk);
        let store = self.servers.units.store();
        if disk.device().medium().is_none() {
            scsi::forget(store, &disk.info());
        }
        let renewed = Identities::renew(&disk, store);
        renewed.map_err(|reason| refused(vec![format!("disk {name}: {reason}")]))?;
        self.bitmaps.renamed(&disk);
        self.identities.keep_volatile(&self.config, &self.disks);
        self.publish();
        Ok(())
    }
}
