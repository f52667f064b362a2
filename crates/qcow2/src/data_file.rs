//! Images whose data lie in a file of their own ("External data file" in QEMU's docs/interop/qcow2.txt): each cluster at its offset in
//! the disk. Nothing there is counted, shared or compressed; the tables say only which clusters there are.
//!
//! A cluster that is not there may have anything in the file: what it had before it was given up, or what the file had from the
//! beginning. So before it is used it is made to read as zeroes, durably, as a whole run of such clusters is: one sync for many.
//! A write that began before its cluster was given up may still come. While there may be such a one in a run, that run is not taken to
//! read as zeroes, and each of its clusters is zeroed when it is used.
//!
//! A data file that is raw is a disk by itself: what is discarded there becomes zeroes in the file, and stays in the tables.

use std::collections::{HashMap, HashSet};

use crate::entry::L2Entry;
use crate::{Header, Image, Result, Storage, io};

/// Bytes that are made to read as zeroes together, at most.
const RUN_BYTES: u64 = 1 << 20;

/// Clusters that are put into the tables together.
const FILLED_TOGETHER: u64 = 4096;

/// The file that has the data of an image.
pub(crate) struct DataFile<S> {
    storage: S,
    run_bytes: u64,
    /// Runs whose clusters read as zeroes in the file, as far as the tables do not have them.
    clean: HashSet<u64>,
    /// Clusters of such runs that may have something: a write to them has failed.
    stale: HashSet<u64>,
    /// Clusters of a run that were given up, and may still be written to.
    given_up: HashMap<u64, u64>,
}

impl<S: Storage> DataFile<S> {
    pub fn new(storage: S, header: &Header) -> DataFile<S> {
        DataFile {
            storage,
            // Of one table.
            run_bytes: RUN_BYTES.clamp(header.cluster_bytes(), header.l2_span()),
            clean: HashSet::new(),
            stale: HashSet::new(),
            given_up: HashMap::new(),
        }
    }

    /// A cluster is no longer in the tables.
    pub fn give_up(&mut self, offset: u64) {
        let run = offset / self.run_bytes;
        self.clean.remove(&run);
        *self.given_up.entry(run).or_default() += 1;
    }

    /// Nobody is at a cluster any more that was given up.
    fn end_giving_up(&mut self, offset: u64) {
        let run = offset / self.run_bytes;
        if let Some(clusters) = self.given_up.get_mut(&run) {
            *clusters -= 1;
            if *clusters == 0 {
                self.given_up.remove(&run);
            }
        }
    }

    /// A cluster may have something although the tables do not have it.
    pub fn is_not_clean(&mut self, offset: u64) {
        self.clean.remove(&(offset / self.run_bytes));
    }

    /// It is not known what is on stable storage.
    pub fn is_not_durable(&mut self) {
        self.clean.clear();
    }
}

impl<S: Storage> Image<S> {
    /// What has the data of the disk: the image itself, or its data file.
    pub fn data(&self) -> &S {
        match &self.data_file {
            Some(data_file) => &data_file.storage,
            None => &self.storage,
        }
    }

    /// Takes the place of an offset in the data file, with this content, or zeroes.
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

    /// Makes a cluster read as zeroes in the data file, and those beside it that the tables do not have either.
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
            // Of the others, some may have been filled just now, and not be in the tables yet.
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

    /// Zeroes a part of the data file, up to the disk's end at most.
    fn zero_in_data_file(&self, from: u64, to: u64) -> Result<()> {
        let length = to.min(self.header.size).saturating_sub(from);
        let zeroed = self.data().zero(from, length);
        zeroed.map_err(io("cannot zero clusters of the data file"))
    }

    /// Has the table of an offset a cluster there?
    fn is_in_data_file(&self, offset: u64) -> bool {
        !matches!(
            self.entry(offset),
            L2Entry::Unallocated | L2Entry::Zero { kept: None, .. }
        )
    }

    /// A cluster of a raw data file that is discarded or zeroed.
    pub(crate) fn zero_raw(&self, offset: u64) -> Result<()> {
        self.zero_in_data_file(offset, offset + self.header.cluster_bytes())
    }

    /// Puts all clusters of a range of a raw data file into the tables, so that what others write there is there for the image too.
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

    /// As [`create`](crate::create), for the data file, which has nothing yet.
    ///
    /// # Errors
    /// The storage's.
    pub fn create_raw_data_file(&mut self) -> Result<()> {
        self.fill_raw_tables(0, self.header.size)
    }

    /// Gives the space of clusters back that were given up, sorted, unless they have been taken again.
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
            // Before they are used again they are zeroed anyway.
            self.data().zero(from, to - from).ok();
        }
    }

    /// The data file is as a disk of the new size needs it, before the header says that size.
    pub(crate) fn resize_data_file(&mut self, old: u64, new: u64) -> Result<()> {
        let is_raw = self.header.is_data_file_raw();
        let Some(data_file) = &mut self.data_file else {
            return Ok(());
        };
        // What lies behind the old end was not zeroed with the rest of its run.
        data_file.is_not_clean(old);
        if is_raw && new > old {
            let zeroed = data_file.storage.zero(old, new - old);
            zeroed.map_err(io("cannot zero what the disk gets in the data file"))?;
        }
        self.extend_data_file(new)?;
        let synced = self.sync_data();
        synced.map_err(io("cannot sync the data file"))
    }

    /// Reads of all that the tables may have lie within the data file.
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
        .map_err(io(
            "the data file is smaller than the disk, and cannot be made larger",
        ))
    }

    /// All data are on stable storage.
    pub(crate) fn sync_data(&mut self) -> std::io::Result<()> {
        let synced = self.data().sync();
        if synced.is_err()
            && let Some(data_file) = &mut self.data_file
        {
            data_file.is_not_durable();
        }
        synced
    }
}
