//! New identity for a disk, for a copy that carries the identity of its original.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use super::owner::{Owner, refused};
use super::refusal::{Fault, Refusal};
use crate::identities::{self, Identities, Unwritten};

/// Longest wait for the identities of new disks. Storage that has just opened a file answers much sooner.
const PATIENCE: Duration = Duration::from_secs(2);

impl Owner {
    /// Writes identities on helper threads, each with the place of its storage. Waits [`PATIENCE`] for them: clients see a disk with an
    /// identity that outlives a crash of the daemon, unless its storage does not answer.
    pub(super) fn write_identities(&self, unwritten: Vec<(String, Unwritten)>) {
        let mut missing = BTreeSet::new();
        let mut places: BTreeMap<String, Vec<Unwritten>> = BTreeMap::new();
        for (place, one) in unwritten {
            missing.insert(one.disk.name().to_owned());
            places.entry(place).or_default().push(one);
        }
        let (written, is_written) = mpsc::channel();
        for (place, group) in places {
            let (units, written) = (Arc::clone(&self.servers.units), written.clone());
            let write = move || {
                let files = group.into_iter().filter_map(|one| {
                    let (disk, file) = (one.disk.name().to_owned(), one.write(units.store()));
                    // Dropped before the reply, so that a disk that is removed next has no other holder and its file is closed.
                    drop(one);
                    // The owner may have ceased to wait.
                    written.send(disk).ok();
                    file
                });
                let files: Vec<OwnedFd> = files.collect();
                drop(written);
                identities::sync(&files);
            };
            if let Err(error) = self.helpers.run(&place, write) {
                tracing::warn!("cannot start a thread to write identities: {error}");
            }
        }
        drop(written);
        let end = Instant::now() + PATIENCE;
        while !missing.is_empty()
            && let Ok(disk) = is_written.recv_timeout(end.saturating_duration_since(Instant::now()))
        {
            missing.remove(&disk);
        }
        for disk in missing {
            tracing::warn!(
                disk,
                "identity not written yet, because the storage does not answer; after a crash the disk has another identity"
            );
        }
    }

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
            let help = "remove these first, because their clients would see another disk";
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
