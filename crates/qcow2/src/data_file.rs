//! Images with an external data file ("External data file" in QEMU's docs/interop/qcow2.txt): each cluster is at its guest offset.
//! Clusters in it are not counted, shared or compressed. The tables only record which clusters are allocated.
//!
//! An unallocated cluster may have stale content in the file. It is therefore zeroed durably before use, together with a run of
//! unallocated clusters, so that one sync serves many.
//! A write that began before its cluster was freed may still be in progress. While that is possible in a run, the run is not marked as
//! clean, and each of its clusters is zeroed when it is allocated.
//!
//! A raw data file is itself a valid disk: discarded clusters are zeroed in the file and stay allocated in the tables.

use std::collections::{HashMap, HashSet};

use crate::entry::L2Entry;
use crate::{Header, Image, Result, Storage, io};

/// Maximum size of a run, in bytes.
const RUN_BYTES: u64 = 1 << 20;

/// Maximum number of clusters per update of the tables.
const FILLED_TOGETHER: u64 = 4096;

pub(crate) struct DataFile<S> {
    storage: S,
    run_bytes: u64,
    /// Clean runs: their unallocated clusters read as zeroes in the file.
    clean: HashSet<u64>,
    /// Clusters of clean runs that may have content after a failed write.
    stale: HashSet<u64>,
    /// Number of freed clusters per run that may still receive writes.
    given_up: HashMap<u64, u64>,
}

impl<S: Storage> DataFile<S> {
    pub fn new(storage: S, header: &Header) -> DataFile<S> {
        DataFile {
            storage,
            // A run is within one L2 table.
            run_bytes: RUN_BYTES.clamp(header.cluster_bytes(), header.l2_span()),
            clean: HashSet::new(),
            stale: HashSet::new(),
            given_up: HashMap::new(),
        }
    }

    /// Records that a cluster was freed in the tables.
    pub fn give_up(&mut self, offset: u64) {
        let run = offset / self.run_bytes;
        self.clean.remove(&run);
        *self.given_up.entry(run).or_default() += 1;
    }

    /// Records that a freed cluster can no longer receive writes.
    fn end_giving_up(&mut self, offset: u64) {
        let run = offset / self.run_bytes;
        if let Some(clusters) = self.given_up.get_mut(&run) {
            *clusters -= 1;
            if *clusters == 0 {
                self.given_up.remove(&run);
            }
        }
    }

    /// Records that an unallocated cluster may have content.
    pub fn mark_written(&mut self, offset: u64) {
        self.clean.remove(&(offset / self.run_bytes));
    }

    /// Forgets all clean runs, because the durable state of the file is unknown.
    pub fn forget_clean_runs(&mut self) {
        self.clean.clear();
    }
}

impl<S: Storage> Image<S> {
    /// Returns the storage of the data: the image itself, or its data file.
    pub fn data(&self) -> &S {
        match &self.data_file {
            Some(data_file) => &data_file.storage,
            None => &self.storage,
        }
    }

    /// Writes `content`, or zeroes, to an offset of the data file before its cluster is allocated.
    pub(crate) fn fill_in_data_file(
        &mut self,
        offset: u64,
        content: Option<Vec<u8>>,
        must_sync: &mut bool,
    ) -> Result<u64> {
        self.clean_run(offset, must_sync)?;
        if let Some(content) = content {
            *must_sync = true;
            let length = content
                .len()
                .min(self.header.size.saturating_sub(offset) as usize);
            let written = self.data().write_at(offset, &content[..length]);
            if written.is_err()
                && let Some(data_file) = &mut self.data_file
            {
                data_file.stale.insert(offset);
            }
            written.map_err(io("cannot write to the data file"))?;
        }
        Ok(offset)
    }

    /// Zeroes a cluster in the data file, together with the unallocated clusters of its run.
    fn clean_run(&mut self, offset: u64, must_sync: &mut bool) -> Result<()> {
        let Some(data_file) = &self.data_file else {
            return Ok(());
        };
        let (cluster, size) = (self.header.cluster_bytes(), self.header.size);
        let run = offset / data_file.run_bytes;
        let (is_clean, is_stale) = (
            data_file.clean.contains(&run),
            data_file.stale.contains(&offset),
        );
        if is_clean && !is_stale {
            return Ok(());
        }
        *must_sync = true;
        if is_clean || data_file.given_up.contains_key(&run) {
            // Some of the other clusters may be filled already and not yet in the tables.
            self.zero_in_data_file(offset, offset + cluster)?;
            if let Some(data_file) = &mut self.data_file {
                data_file.stale.remove(&offset);
            }
            return Ok(());
        }
        let first = run * data_file.run_bytes;
        let end = (first + data_file.run_bytes).min(size);
        let mut at = first;
        while at < end {
            let mut next = at;
            while next < end && !self.is_in_data_file(next) {
                next += cluster;
            }
            if next > at {
                self.zero_in_data_file(at, next)?;
            }
            at = next.max(at + cluster);
        }
        if let Some(data_file) = &mut self.data_file {
            data_file.clean.insert(run);
        }
        Ok(())
    }

    /// Zeroes a range of the data file, up to the end of the disk.
    fn zero_in_data_file(&self, from: u64, to: u64) -> Result<()> {
        let length = to.min(self.header.size).saturating_sub(from);
        let zeroed = self.data().zero(from, length);
        zeroed.map_err(io("cannot zero clusters of the data file"))
    }

    /// Returns true if the tables have a cluster at this offset.
    fn is_in_data_file(&self, offset: u64) -> bool {
        !matches!(
            self.entry(offset),
            L2Entry::Unallocated | L2Entry::Zero { kept: None, .. }
        )
    }

    /// Zeroes a cluster of a raw data file, for a discard or a write of zeroes.
    pub(crate) fn zero_raw(&self, offset: u64) -> Result<()> {
        self.zero_in_data_file(offset, offset + self.header.cluster_bytes())
    }

    /// Allocates all clusters of a range of a raw data file in the tables, so that writes by other programs are visible in the image.
    pub(crate) fn fill_raw_tables(&mut self, from: u64, to: u64) -> Result<()> {
        if !self.header.is_data_file_raw() {
            return Ok(());
        }
        let cluster = self.header.cluster_bytes();
        let mut at = from / cluster * cluster;
        while at < to {
            let end = (at + FILLED_TOGETHER * cluster).min(to);
            let offsets: Vec<u64> = (at..end).step_by(cluster as usize).collect();
            if let Some((_, error)) = self.prepare_write(&offsets, None).pop() {
                return Err(error);
            }
            at = end;
        }
        Ok(())
    }

    /// Allocates the clusters of a new raw data file, after [`create`](crate::create()).
    ///
    /// # Errors
    /// The storage failed.
    pub fn create_raw_data_file(&mut self) -> Result<()> {
        self.fill_raw_tables(0, self.header.size)
    }

    /// Discards freed clusters, sorted by offset, unless they are allocated again.
    pub(crate) fn free_in_data_file(&mut self, offsets: impl Iterator<Item = u64>) {
        let cluster = self.header.cluster_bytes();
        let mut free: Vec<(u64, u64)> = Vec::new();
        for offset in offsets {
            if let Some(data_file) = &mut self.data_file {
                data_file.end_giving_up(offset);
            }
            if offset < self.header.size && self.is_in_data_file(offset) {
                continue;
            }
            match free.last_mut() {
                Some((_, end)) if *end == offset => *end += cluster,
                Some((_, end)) if *end > offset => {}
                _ => free.push((offset, offset + cluster)),
            }
        }
        for (from, to) in free {
            // Errors are ignored: clusters are zeroed again before reuse.
            self.data().zero(from, to - from).ok();
        }
    }

    /// Adapts the data file to a new disk size, before the header changes.
    pub(crate) fn resize_data_file(&mut self, old: u64, new: u64) -> Result<()> {
        let is_raw = self.header.is_data_file_raw();
        let Some(data_file) = &mut self.data_file else {
            return Ok(());
        };
        // The part beyond the old end was not zeroed with the rest of its run.
        data_file.mark_written(old);
        if is_raw && new > old {
            let zeroed = data_file.storage.zero(old, new - old);
            zeroed.map_err(io("cannot zero the new part of the data file"))?;
        }
        self.extend_data_file(new)?;
        let synced = self.sync_data();
        synced.map_err(io("cannot sync the data file"))
    }

    /// Extends the data file so that reads of all allocated clusters are within it.
    pub(crate) fn extend_data_file(&self, disk: u64) -> Result<()> {
        let Some(data_file) = &self.data_file else {
            return Ok(());
        };
        let storage = &data_file.storage;
        let found = storage.size();
        let found = found.map_err(io("cannot read the size of the data file"))?;
        match found < disk {
            true => storage.zero(found, disk - found),
            false => Ok(()),
        }
        .map_err(io("the data file is smaller than the disk and cannot grow"))
    }

    /// Flushes all data to stable storage.
    pub(crate) fn sync_data(&mut self) -> std::io::Result<()> {
        let synced = self.data().sync();
        if synced.is_err()
            && let Some(data_file) = &mut self.data_file
        {
            data_file.forget_clean_runs();
        }
        synced
    }
}
