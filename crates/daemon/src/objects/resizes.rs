//! Record of disks that are being resized. After a crash, the next start completes or undoes their resizes.

use std::sync::Arc;

use super::state_store::{Resizing, StateStore};

/// Disks that are being resized, as recorded for a crash.
pub(super) struct Resizes {
    resizing: Vec<Resizing>,
    store: Option<Arc<StateStore>>,
}

impl Resizes {
    pub fn new(store: Option<Arc<StateStore>>) -> Resizes {
        Resizes {
            resizing: Vec::new(),
            store,
        }
    }

    /// Records disks that are about to be resized.
    ///
    /// # Errors
    /// The record cannot be written; it is unchanged.
    pub fn begin(&mut self, new: Vec<Resizing>) -> Result<(), String> {
        if new.is_empty() {
            return Ok(());
        }
        let before = self.resizing.len();
        self.resizing.extend(new);
        let Some(store) = &self.store else {
            return Ok(());
        };
        let recorded = store.begin_resize(&self.resizing);
        if recorded.is_err() {
            self.resizing.truncate(before);
        }
        recorded
    }

    /// Writes the record with the resizes of a change, which [`Resizes::write`] removes.
    ///
    /// # Errors
    /// The record cannot be written.
    pub fn begin_change(&self, new: impl Iterator<Item = Resizing>) -> Result<(), String> {
        let Some(store) = &self.store else {
            return Ok(());
        };
        let new = new.filter(|one| !self.resizing.iter().any(|known| known.disk == one.disk));
        let all: Vec<Resizing> = new.chain(self.resizing.iter().cloned()).collect();
        store.begin_resize(&all)
    }

    /// Adds disks that are shrunk after their change. [`Resizes::begin_change`] has written them.
    pub fn extend(&mut self, new: impl Iterator<Item = Resizing>) {
        self.resizing.extend(new);
    }

    /// Removes disks, without writing the record.
    pub fn remove<'a>(&mut self, disks: impl Iterator<Item = &'a str>) {
        let disks: Vec<&str> = disks.collect();
        self.resizing
            .retain(|one| !disks.contains(&one.disk.as_str()));
    }

    /// Removes disks and writes the record.
    pub fn end<'a>(&mut self, disks: impl Iterator<Item = &'a str>) {
        let disks: Vec<&str> = disks.collect();
        if !disks.is_empty() {
            self.remove(disks.into_iter());
            self.write();
        }
    }

    /// Writes the record. Resizes of an ended change are no longer in it.
    pub fn write(&self) {
        let Some(store) = &self.store else {
            return;
        };
        if self.resizing.is_empty() {
            return store.end_resize();
        }
        if let Err(error) = store.begin_resize(&self.resizing) {
            tracing::warn!("cannot update the record of resizes: {error}");
        }
    }
}
