//! New identity for a disk, for a copy that carries the identity of its original.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bdev::Disk;
use block::Identity;

use super::Message;
use super::owner::{Owner, refused};
use super::refusal::{Fault, Refusal};
use crate::identities::{self, Identities, Unwritten};

/// Receives the result of a renewal.
pub type Renewed = Box<dyn FnOnce(Result<(), Refusal>) + Send>;

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

    /// Gives an unused disk a new identity, which is written on a helper thread. Replies afterwards.
    ///
    /// # Errors
    /// The reason for the refusal. The disk keeps its identity, and there is no reply.
    pub fn renew_identity(&mut self, name: &str, reply: Renewed) -> Result<(), Refusal> {
        let Some(disk) = self.disks.open.get(name).cloned() else {
            let detail = format!("there is no disk `{name}`");
            return Err(Refusal::NotFound(Fault::new(detail)));
        };
        let users = super::users(&self.configs.wanted, name);
        if !users.is_empty() {
            let detail = format!("disk {name} is in use: {}", users.join(", "));
            let help = "remove these first, because their clients would see another disk";
            return Err(Refusal::Conflict(vec![Fault::new(detail).help(help)]));
        }
        // A job may write the identity, too.
        if let Some(conflict) = self.jobs.at_work(name) {
            return Err(Refusal::Conflict(vec![conflict]));
        }
        if self.drains.is_busy(name) {
            let detail = format!("disk {name} is being removed, resized or given an identity");
            return Err(Refusal::conflict(detail, super::draining::HELP));
        }
        // A registered unit has state that was saved under the old identity.
        self.servers.detach_disk(&disk);
        let number = self.drains.begin_renewal(name);
        let (messages, units) = (self.messages.clone(), Arc::clone(&self.servers.units));
        let write = move || {
            let written = Identities::write_new(&disk, units.store());
            let message: Message =
                Box::new(move |owner| owner.end_renewal(number, &disk, written, reply));
            // Fails at the end of the daemon, without an owner.
            messages.send(message).ok();
        };
        if let Err(error) = self
            .helpers
            .run(&self.configs.blocking_storage(name), write)
        {
            self.drains.end(number);
            let reason =
                format!("disk {name}: cannot start a thread to write its identity: {error}");
            return Err(refused(vec![reason]));
        }
        self.publish();
        Ok(())
    }

    fn end_renewal(
        &mut self,
        number: u64,
        disk: &Disk,
        written: Result<Identity, String>,
        reply: Renewed,
    ) {
        self.drains.end(number);
        if let Ok(identity) = &written {
            if disk.device().medium().is_none() {
                scsi::forget(self.servers.units.store(), &disk.info());
            }
            disk.set_identity(*identity);
            self.disks.bitmaps.renamed(disk);
            self.disks.keep_volatile_identities(&self.configs.wanted);
        }
        self.publish();
        let renewed = written.map(drop);
        reply(renewed.map_err(|reason| refused(vec![format!("disk {}: {reason}", disk.name())])));
    }

    /// Saves the identity record of this key again, if a disk has it. Waits [`PATIENCE`] for its storage.
    ///
    /// # Errors
    /// The reason why it cannot be saved.
    pub(super) fn save_identity_again(&self, key: &str) -> std::io::Result<()> {
        let Some(disk) = Identities::disk_of_record(&self.disks.open, key) else {
            return Ok(());
        };
        let place = self.configs.blocking_storage(disk.name());
        let units = Arc::clone(&self.servers.units);
        let (written, is_written) = mpsc::channel();
        self.helpers.run(&place, move || {
            let saved = Identities::write_again(&disk, units.store());
            drop(disk);
            written.send(saved).ok();
        })?;
        let saved = is_written
            .recv_timeout(PATIENCE)
            .unwrap_or_else(|_| Err("the storage of its disk does not answer".to_owned()));
        saved.map_err(std::io::Error::other)
    }
}
