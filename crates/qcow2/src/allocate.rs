//! Copy-on-write allocation before a write, and zeroing of clusters. Runs in the image's owner.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::entry::{self, COPIED, L2Entry, ZERO};
use crate::map::Table;
use crate::subclusters::Subclusters;
use crate::{Backing, Error, Image, Result, Storage, corrupt, io};

/// New entry for one cluster.
pub(crate) struct Change {
    pub offset: u64,
    pub entry: u64,
    /// Second word of an extended entry.
    pub parts: Subclusters,
    /// Previous entry, if its clusters are freed.
    pub given_up: Option<L2Entry>,
}

/// Maximum number of entries in one write.
const CHANGES_MAX: usize = 4096;

impl<S: Storage> Image<S> {
    /// Makes clusters writable in place. `offsets` are disk offsets, one per cluster. Afterwards each cluster is a data cluster with a
    /// reference count of one and unchanged content. Returns the failures, by offset.
    pub fn prepare_write(
        &mut self,
        offsets: &[u64],
        backing: Option<&mut dyn Backing>,
    ) -> Vec<(u64, Error)> {
        let mut failed = Vec::new();
        for offset in offsets {
            if let Err(error) = self.check_access() {
                failed.push((offset & !(self.header.cluster_bytes() - 1), error));
            }
        }
        if failed.is_empty() {
            failed = self.prepare_all(offsets, backing);
        }
        let overlap = failed.iter().find_map(|(_, error)| match error {
            Error::Overlap(why) => Some(why.clone()),
            _ => None,
        });
        if let Some(why) = overlap {
            self.mark_corrupt(&why);
        }
        failed
    }

    fn prepare_all(
        &mut self,
        offsets: &[u64],
        mut backing: Option<&mut dyn Backing>,
    ) -> Vec<(u64, Error)> {
        let (mut changes, mut failed) = (Vec::new(), Vec::new());
        let mut must_sync = false;
        let mask = !(self.header.cluster_bytes() - 1);
        let mut offsets: Vec<u64> = offsets.iter().map(|offset| offset & mask).collect();
        offsets.sort_unstable();
        offsets.dedup();
        for offset in offsets {
            let (table, _) = self.map.place(offset);
            let prepared = self
                .own_table(table)
                .and_then(|()| self.prepare(offset, &mut backing, &mut must_sync));
            match prepared {
                Ok(change) => changes.extend(change),
                Err(error) => failed.push((offset, error)),
            }
        }
        if must_sync && let Err(error) = self.sync_data() {
            // The clusters stay counted, because their content is undefined after a failed sync.
            let errno = error.raw_os_error().unwrap_or(5);
            for change in changes {
                let source = std::io::Error::from_raw_os_error(errno);
                let operation = "cannot sync";
                failed.push((change.offset, Error::Io { operation, source }));
            }
            return failed;
        }
        failed.extend(self.write_entries(changes));
        failed
    }

    fn prepare(
        &mut self,
        offset: u64,
        backing: &mut Option<&mut dyn Backing>,
        must_sync: &mut bool,
    ) -> Result<Option<Change>> {
        if self.header.has_subclusters() {
            return self.prepare_parts(offset, backing, must_sync);
        }
        let found = self.entry(offset);
        let change = |entry, given_up| {
            Ok(Some(Change {
                offset,
                entry,
                parts: Subclusters::NONE,
                given_up,
            }))
        };
        let content = match found {
            L2Entry::Bad => return self.bad_entry(offset),
            L2Entry::Data { copied: true, .. } => return Ok(None),
            L2Entry::Data { host, .. } => {
                if self.is_counted_once(host)? {
                    return change(entry::data(host), None);
                }
                Some(self.read_cluster(host)?)
            }
            L2Entry::Zero {
                kept: Some(host),
                copied,
            } if copied || self.is_counted_once(host)? => {
                self.data()
                    .zero(host, self.header.cluster_bytes())
                    .map_err(io("cannot zero a cluster"))?;
                *must_sync = true;
                return change(entry::data(host), None);
            }
            L2Entry::Zero { .. } => None,
            L2Entry::Compressed { .. } => {
                let mut content = vec![0; self.header.cluster_bytes() as usize];
                self.read_compressed(offset, &mut content)?;
                Some(content)
            }
            L2Entry::Unallocated => self.read_backing(offset, backing)?,
        };
        let host = self.fill_new_cluster(offset, content, must_sync)?;
        change(entry::data(host), Some(found))
    }

    pub(crate) fn is_counted_once(&mut self, host: u64) -> Result<bool> {
        let cluster = host >> self.header.cluster_bits;
        Ok(self.refcounts.get(&self.storage, cluster)? == 1)
    }

    /// Allocates a cluster for an offset and writes `content`, or zeroes, into it.
    pub(crate) fn fill_new_cluster(
        &mut self,
        offset: u64,
        content: Option<Vec<u8>>,
        must_sync: &mut bool,
    ) -> Result<u64> {
        let content = content.filter(|content| content.iter().any(|byte| *byte != 0));
        if self.data_file.is_some() {
            return self.fill_in_data_file(offset, content, must_sync);
        }
        let host = self.take_cluster()?;
        if let Some(content) = content {
            *must_sync = true;
            if let Err(error) = self.storage.write_at(host, &content) {
                self.released.add(host >> self.header.cluster_bits);
                return Err(io("cannot write a cluster")(error));
            }
        }
        Ok(host)
    }

    pub(crate) fn read_cluster(&self, host: u64) -> Result<Vec<u8>> {
        let mut content = vec![0; self.header.cluster_bytes() as usize];
        self.data()
            .read_at(host, &mut content)
            .map_err(io("cannot read a cluster"))?;
        Ok(content)
    }

    pub(crate) fn read_backing(
        &self,
        offset: u64,
        backing: &mut Option<&mut dyn Backing>,
    ) -> Result<Option<Vec<u8>>> {
        let Some(backing) = backing else {
            return Ok(None);
        };
        let cluster = self.header.cluster_bytes();
        let known = backing.size().saturating_sub(offset).min(cluster);
        if known == 0 {
            return Ok(None);
        }
        let mut content = vec![0; cluster as usize];
        backing
            .read_at(offset, &mut content[..known as usize])
            .map_err(io("cannot read the backing image"))?;
        Ok(Some(content))
    }

    /// Makes an L2 table private to the active L1 table and loads it.
    pub(crate) fn own_table(&mut self, table: usize) -> Result<()> {
        let bits = self.header.cluster_bits;
        self.load_table(table)?;
        let old = self.map.l1_entry(table);
        let words = 1 << (bits - 3);
        // A table without entries is not loaded yet. The slot is filled before the L1 table refers to it.
        self.map.tables[table].get_or_init(|| (0..words).map(|_| AtomicU64::new(0)).collect());
        let shared = self.map.l2_offset(table).unwrap_or(0);
        if self.shared_tables.contains_key(&shared)
            && (old & COPIED != 0 || !self.is_counted_for_all(shared)?)
        {
            return Err(Error::Overlap(format!(
                "several L1 entries name the L2 table at {shared:#x}"
            )));
        }
        if old & COPIED != 0 {
            return Ok(());
        }
        let Some(old) = self.map.l2_offset(table) else {
            let host = self.take_cluster()?;
            self.loaded.insert(host);
            self.refcounts.in_use.add_table(host >> bits);
            return self.write_l1(table, entry::data(host));
        };
        if self.refcounts.get(&self.storage, old >> bits)? == 1 {
            return self.write_l1(table, entry::data(old));
        }
        let entries = self.read_l2(old)?;
        let bytes: Vec<u8> = entries
            .iter()
            .flat_map(|entry| entry.to_be_bytes())
            .collect();
        let host = self.take_cluster()?;
        self.storage
            .write_at(host, &bytes)
            .and_then(|()| self.storage.sync())
            .map_err(io("cannot write an L2 table"))?;
        self.write_l1(table, entry::data(host))?;
        self.leave_table(old);
        self.refcounts.in_use.add_table(host >> bits);
        self.loaded.insert(host);
        self.released.add(old >> bits);
        Ok(())
    }

    /// Records that an L1 entry no longer refers to this L2 table.
    pub(crate) fn leave_table(&mut self, host: u64) {
        match self.shared_tables.get_mut(&host) {
            Some(named) if *named > 2 => *named -= 1,
            _ => {
                self.shared_tables.remove(&host);
                self.loaded.remove(&host);
            }
        }
    }

    pub(crate) fn write_l1(&mut self, table: usize, entry: u64) -> Result<()> {
        self.make_l1_sure()?;
        let at = self.header.l1_offset + table as u64 * 8;
        self.storage
            .write_at(at, &entry.to_be_bytes())
            .map_err(io("cannot write the L1 table"))?;
        self.map.l1[table].store(entry, Ordering::Release);
        Ok(())
    }

    /// Writes and publishes entries that are sorted by offset. Adjacent entries share one write.
    fn write_entries(&mut self, changes: Vec<Change>) -> Vec<(u64, Error)> {
        let mut failed = Vec::new();
        let mut rest = changes.as_slice();
        while let Some(first) = rest.first() {
            let (table, index) = self.map.place(first.offset);
            let is_next = |(n, change): &(usize, &Change)| {
                self.map.place(change.offset) == (table, index + n)
            };
            let together = rest.iter().enumerate().take_while(is_next).count();
            let (run, after) = rest.split_at(together);
            rest = after;
            if let Err(error) = self.write_run(table, index, run) {
                let errno = error.errno();
                if let Some(data_file) = &mut self.data_file {
                    run.iter()
                        .for_each(|change| data_file.mark_written(change.offset));
                }
                failed.extend(run.iter().map(|change| {
                    let source = std::io::Error::from_raw_os_error(errno);
                    let operation = "cannot write an L2 table";
                    (change.offset, Error::Io { operation, source })
                }));
                continue;
            }
            for change in run {
                if let Some(entry) = change.given_up {
                    self.release_entry(change.offset, entry);
                }
            }
        }
        failed
    }

    fn write_run(&self, table: usize, index: usize, run: &[Change]) -> Result<()> {
        let (Some(at), Some(entries)) = (self.map.l2_offset(table), self.loaded_table(table))
        else {
            return corrupt(format!("L2 table {table} is missing"));
        };
        let words = self.header.entry_words();
        let mut bytes = Vec::with_capacity(run.len() * words * 8);
        for change in run {
            bytes.extend(change.entry.to_be_bytes());
            if words > 1 {
                bytes.extend(change.parts.0.to_be_bytes());
            }
        }
        let at = at + (index * words * 8) as u64;
        let written = self.storage.write_at(at, &bytes);
        // With a raw data file, the tables must be durable before the cluster is written.
        let written = written.and_then(|()| match self.header.is_data_file_raw() {
            true => self.storage.sync(),
            false => Ok(()),
        });
        if let Err(error) = written {
            // Part of the run may be on storage although memory has the old entries.
            let before = &entries[index * words..][..run.len() * words];
            let before = before.iter().map(|word| word.load(Ordering::Acquire));
            let before: Vec<u8> = before.flat_map(u64::to_be_bytes).collect();
            self.storage.write_at(at, &before).ok();
            return Err(io("cannot write an L2 table")(error));
        }
        for (nth, change) in run.iter().enumerate() {
            self.store_entry(&entries, index + nth, change);
        }
        Ok(())
    }

    fn loaded_table(&self, table: usize) -> Option<Table> {
        self.map.tables.get(table)?.get().map(Arc::clone)
    }

    /// Returns true if clusters can be zeroed without a write even where the backing image has data.
    pub fn can_zero(&self) -> bool {
        self.header.has_zero_flag()
    }

    /// Makes whole clusters read as zeroes and frees their old clusters. `backing` is the size of the backing image. A range that the
    /// backing image covers requires [`Image::can_zero`].
    ///
    /// # Errors
    /// The storage failed, or a table is damaged. Some clusters may have been zeroed.
    pub fn zero_clusters(&mut self, offset: u64, length: u64, backing: u64) -> Result<()> {
        self.check_access()?;
        let zeroed = self.zero_all(offset, length, backing);
        self.after_change(zeroed)
    }

    fn zero_all(&mut self, offset: u64, length: u64, backing: u64) -> Result<()> {
        let cluster = self.header.cluster_bytes();
        let span = self.header.l2_span();
        let mut at = offset;
        let mut changes: Vec<Change> = Vec::new();
        while at < offset + length {
            let (table, _) = self.map.place(at);
            self.load_table(table)?;
            let has_none = self.map.tables[table].get().is_none();
            if has_none && at >= backing {
                at = (at / span + 1) * span;
                continue;
            }
            if let Some(change) = self.zeroed(at, backing)? {
                if changes
                    .first()
                    .is_none_or(|first| self.map.place(first.offset).0 != table)
                {
                    self.write_all(&mut changes)?;
                    self.own_table(table)?;
                }
                changes.push(change);
                if changes.len() >= CHANGES_MAX {
                    self.write_all(&mut changes)?;
                }
            }
            at += cluster;
        }
        self.write_all(&mut changes)
    }

    /// Writes and publishes changes of one L2 table, sorted by offset. Leaves none of them in `changes`.
    pub(crate) fn write_all(&mut self, changes: &mut Vec<Change>) -> Result<()> {
        let failed = self.write_entries(std::mem::take(changes));
        match failed.into_iter().next() {
            None => Ok(()),
            Some((_, error)) => Err(error),
        }
    }

    fn zeroed(&mut self, offset: u64, backing: u64) -> Result<Option<Change>> {
        let is_covered = offset < backing;
        let (entry, zeroes) = match (is_covered, self.header.has_subclusters()) {
            (true, false) => (ZERO, Subclusters::NONE),
            (true, true) => (0, Subclusters::ZEROES),
            (false, _) => (0, Subclusters::NONE),
        };
        let (found, parts) = self.entry_and_parts(offset);
        match found {
            L2Entry::Bad => self.bad_entry(offset),
            L2Entry::Data { host, .. } if self.header.is_data_file_raw() => {
                self.zero_raw(host).map(|()| None)
            }
            L2Entry::Unallocated if !is_covered => Ok(None),
            L2Entry::Zero { kept: None, .. } => Ok(None),
            L2Entry::Unallocated if parts == Subclusters::ZEROES => Ok(None),
            _ => Ok(Some(Change {
                offset,
                entry,
                parts: zeroes,
                given_up: Some(found),
            })),
        }
    }
}
