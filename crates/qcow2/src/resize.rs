//! Resizes images.

use std::sync::Arc;

use crate::allocate::Change;
use crate::entry::L2Entry;
use crate::header::{L1_FIELD, SIZE_FIELD};
use crate::image::new_map;
use crate::map::Mapping;
use crate::subclusters::Subclusters;
use crate::{Backing, Error, Image, Result, Storage, io};

/// Limit as in QEMU.
const L1_ENTRIES_MAX: u64 = (32 << 20) / 8;

impl<S: Storage> Image<S> {
    /// Resizes the disk. Added space reads as zeroes regardless of the backing image; removed space is freed. The map is replaced.
    ///
    /// # Errors
    /// The storage failed, or no L1 table can cover that size. The disk then keeps its old size.
    pub fn resize(&mut self, size: u64, backing: Option<&mut dyn Backing>) -> Result<()> {
        self.check_access()?;
        let resized = self.resize_to(size, backing);
        self.after_change(resized)
    }

    fn resize_to(&mut self, size: u64, backing: Option<&mut dyn Backing>) -> Result<()> {
        let old = self.header.size;
        let resized = match size.cmp(&old) {
            std::cmp::Ordering::Equal => return Ok(()),
            std::cmp::Ordering::Greater => self.grow(old, size, backing),
            std::cmp::Ordering::Less => self.shrink(old, size),
        };
        let written = resized.and_then(|()| {
            self.resize_data_file(old, size)?;
            self.storage
                .sync()
                .and_then(|()| self.storage.write_at(SIZE_FIELD, &size.to_be_bytes()))
                .and_then(|()| self.storage.sync())
                .map_err(io("cannot write the header"))
        });
        match written {
            Ok(()) => {
                self.set_size(size);
                // The image is correct without these entries. They matter only to other programs that write to the data file.
                self.fill_raw_tables(old, size).ok();
            }
            // Tables that were moved or created stay.
            Err(_) => self.set_size(old),
        }
        written
    }

    fn set_size(&mut self, size: u64) {
        self.header.size = size;
        let l1 = self.map.l1_entries();
        let may_write = self.access.permits_writes();
        self.map = Arc::new(new_map(&self.header, &l1, Some(&self.map), may_write));
    }

    fn grow(&mut self, old: u64, size: u64, mut backing: Option<&mut dyn Backing>) -> Result<()> {
        let needed = size.div_ceil(self.header.l2_span());
        if needed > L1_ENTRIES_MAX || size > i64::MAX as u64 {
            return Err(Error::Unsupported(format!(
                "clusters of {} bytes are too small for a size of {size} bytes; hint: convert the image with qemu-img convert -o cluster_size=2M",
                self.header.cluster_bytes()
            )));
        }
        let needed = needed as u32;
        if needed > self.header.l1_entries {
            self.move_l1(needed)?;
        }
        self.clear_l1(needed)?;
        self.set_size(size);
        let cluster = self.header.cluster_bytes();
        let whole = old.next_multiple_of(cluster).min(size);
        let covered = backing.as_ref().map_or(0, |backing| backing.size());
        if old < whole {
            self.zero_within(old, whole - old, covered, &mut backing)?;
        }
        // The L2 table of the old end may have stale entries beyond it. With a raw data file, all entries stay, and the file is zeroed.
        let stale_end = match self.header.is_data_file_raw() {
            true => whole,
            false => old.next_multiple_of(self.header.l2_span()).min(size),
        };
        let covered_end = covered.min(size).next_multiple_of(cluster).min(size);
        let end = stale_end.max(covered_end);
        if whole < stale_end {
            self.clear_damaged(whole, stale_end)?;
        }
        if whole < end {
            self.zero_clusters(whole, end - whole, covered)?;
        }
        Ok(())
    }

    /// Clears damaged entries of new clusters in one L2 table. What they refer to stays counted.
    fn clear_damaged(&mut self, from: u64, to: u64) -> Result<()> {
        let (table, _) = self.map.place(from);
        self.load_table(table)?;
        let offsets = (from..to).step_by(self.header.cluster_bytes() as usize);
        let damaged = offsets.filter(|offset| self.entry(*offset) == L2Entry::Bad);
        let cleared = damaged.map(|offset| Change {
            offset,
            entry: 0,
            parts: Subclusters::NONE,
            given_up: None,
        });
        let mut changes: Vec<Change> = cleared.collect();
        if changes.is_empty() {
            return Ok(());
        }
        self.own_table(table)?;
        self.write_all(&mut changes)
    }

    /// Zeroes a part of one cluster.
    fn zero_within(
        &mut self,
        offset: u64,
        length: u64,
        covered: u64,
        backing: &mut Option<&mut dyn Backing>,
    ) -> Result<()> {
        self.load(offset)?;
        if self.is_zero_within(offset, length, covered) {
            return Ok(());
        }
        let backing = backing
            .as_mut()
            .map(|backing| &mut **backing as &mut dyn Backing);
        if let Some((_, error)) = self.prepare_write(&[offset], backing).into_iter().next() {
            return Err(error);
        }
        match self.map.segment(offset, length).mapping {
            Mapping::Data { host, .. } => self
                .data()
                .zero(host, length)
                .map_err(io("cannot zero a part of a cluster")),
            _ => crate::corrupt(format!("cannot write at offset {offset}")),
        }
    }

    /// Returns true if the entry of a cluster makes this part of it read as zeroes.
    fn is_zero_within(&self, offset: u64, length: u64, covered: u64) -> bool {
        let mut at = offset;
        while at < offset + length {
            let found = self.map.segment(at, offset + length - at);
            match found.mapping {
                Mapping::Zero => {}
                Mapping::Unallocated if at >= covered => {}
                _ => return false,
            }
            at += found.length;
        }
        true
    }

    fn shrink(&mut self, old: u64, size: u64) -> Result<()> {
        let whole = size.next_multiple_of(self.header.cluster_bytes());
        if whole < old {
            self.zero_clusters(whole, old - whole, 0)?;
        }
        let kept = size.div_ceil(self.header.l2_span()) as usize;
        for table in kept..self.map.tables.len() {
            if let Some(host) = self.map.l2_offset(table) {
                self.write_l1(table, 0)?;
                self.leave_table(host);
                self.released.add(host >> self.header.cluster_bits);
            }
        }
        Ok(())
    }

    /// Clears L1 entries beyond the old end, because they may be stale.
    fn clear_l1(&mut self, entries: u32) -> Result<()> {
        self.make_l1_sure()?;
        let from = self.map.l1.len() as u64;
        let zeroes = vec![0; u64::from(entries).saturating_sub(from) as usize * 8];
        self.storage
            .write_at(self.header.l1_offset + from * 8, &zeroes)
            .map_err(io("cannot write the L1 table"))
    }

    /// Writes the location of the L1 table into the header and syncs.
    fn name_l1(&self, entries: u32, offset: u64) -> std::io::Result<()> {
        let mut field = entries.to_be_bytes().to_vec();
        field.extend(offset.to_be_bytes());
        self.storage.write_at(L1_FIELD, &field)?;
        self.storage.sync()
    }

    /// Rewrites the header field after a failed write, because its state is then undefined. Must run before the table changes.
    pub(crate) fn make_l1_sure(&mut self) -> Result<()> {
        if self.is_l1_unsure {
            let named = self.name_l1(self.header.l1_entries, self.header.l1_offset);
            named.map_err(io("cannot write the header"))?;
            self.is_l1_unsure = false;
        }
        Ok(())
    }

    fn move_l1(&mut self, entries: u32) -> Result<()> {
        self.make_l1_sure()?;
        let bits = self.header.cluster_bits;
        let bytes = u64::from(entries) * 8;
        let clusters = bytes.div_ceil(self.header.cluster_bytes());
        let first = self.take_together(clusters)?;
        let l1 = self.map.l1_entries().into_iter();
        let mut table: Vec<u8> = l1.flat_map(u64::to_be_bytes).collect();
        table.resize(bytes as usize, 0);
        self.storage
            .write_at(first << bits, &table)
            .and_then(|()| self.storage.sync())
            .map_err(io("cannot write a larger L1 table"))?;
        if let Err(error) = self.name_l1(entries, first << bits) {
            self.is_l1_unsure = true;
            // If this fails too, it is retried before the next change.
            self.make_l1_sure().ok();
            return Err(io("cannot write the header")(error));
        }
        let old = self.header.l1_offset >> bits;
        let old_clusters =
            (u64::from(self.header.l1_entries) * 8).div_ceil(self.header.cluster_bytes());
        let in_use = &mut self.refcounts.in_use;
        in_use.add_structures(first..first + clusters);
        (old..old + old_clusters).for_each(|cluster| self.released.add(cluster));
        (self.header.l1_entries, self.header.l1_offset) = (entries, first << bits);
        Ok(())
    }
}
