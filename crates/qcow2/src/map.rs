//! Map from guest offsets to host offsets. Any thread reads the tables without a lock; only the image's owner changes them.
//!
//! An L2 table is loaded on first use and stays in memory: 8 bytes per cluster, or 128 MiB per TiB of a fully used disk with 64 KiB
//! clusters. Empty tables use no memory. Extended entries use 16 bytes per cluster: see `subclusters.rs`.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::entry::{self, EntryFormat, L2Entry};
use crate::subclusters::{self, Part};

/// An L2 table in memory.
pub(crate) type Table = Arc<[AtomicU64]>;

/// Tables of an image. A resize creates a new map.
pub struct Map {
    pub(crate) cluster_bits: u32,
    pub(crate) entries: EntryFormat,
    /// log2 of the number of subclusters per cluster: 5, or 0.
    pub(crate) part_bits: u32,
    pub(crate) size: u64,
    /// Clusters may be written in place. False for a corrupt image.
    pub(crate) may_write: bool,
    /// Entries of the L1 table.
    pub(crate) l1: Box<[AtomicU64]>,
    pub(crate) tables: Box<[OnceLock<Table>]>,
    /// Tables on storage without entries. They need not be loaded.
    pub(crate) is_empty: Box<[AtomicBool]>,
}

/// State of a range of the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mapping {
    /// The owner must load the L2 table first.
    NotLoaded,
    /// Not allocated in this image: reads as the backing image, or as zeroes.
    Unallocated,
    /// Reads as zeroes regardless of the backing image.
    Zero,
    /// Data at `host`; may be written in place if `writable`.
    Data {
        /// Offset in the storage.
        host: u64,
        /// The cluster is not shared, for example with a snapshot.
        writable: bool,
    },
    /// Compressed data, read by the owner.
    Compressed,
    /// The entry is invalid.
    Bad,
}

/// A range of the disk with one mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Mapping of the range.
    pub mapping: Mapping,
    /// Length in bytes, from the requested offset.
    pub length: u64,
}

impl Map {
    /// Returns the size of the disk in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the cluster size in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    pub(crate) fn place(&self, offset: u64) -> (usize, usize) {
        let cluster = offset >> self.cluster_bits;
        let entries_bits = self.cluster_bits - 3 - u32::from(self.part_bits > 0);
        let in_table = cluster & ((1 << entries_bits) - 1);
        ((cluster >> entries_bits) as usize, in_table as usize)
    }

    /// Returns the mapping of one byte, valid for its allocation unit.
    #[inline]
    fn at(&self, offset: u64) -> Mapping {
        let (table, index) = self.place(offset);
        let Some(slot) = self.tables.get(table) else {
            return Mapping::Bad;
        };
        let Some(entries) = slot.get() else {
            return self.at_absent(offset, table);
        };
        if self.part_bits > 0 {
            return self.at_part(offset, entries, index);
        }
        let entry = entries[index].load(Ordering::Acquire);
        match self.entries.decode(entry) {
            L2Entry::Unallocated => Mapping::Unallocated,
            L2Entry::Zero { .. } => Mapping::Zero,
            L2Entry::Data { host, copied } => Mapping::Data {
                host: host + (offset & (self.cluster_bytes() - 1)),
                writable: copied & self.may_write,
            },
            L2Entry::Compressed { .. } => Mapping::Compressed,
            L2Entry::Bad => Mapping::Bad,
        }
    }

    /// Returns the mapping of one byte, valid for its subcluster.
    fn at_part(&self, offset: u64, entries: &Table, index: usize) -> Mapping {
        let (entry, parts) = subclusters::load_both(entries, index);
        let in_cluster = offset & (self.cluster_bytes() - 1);
        let part = parts.part(in_cluster >> (self.cluster_bits - self.part_bits));
        match self.entries.decode(entry) {
            L2Entry::Compressed { .. } => Mapping::Compressed,
            L2Entry::Bad | L2Entry::Zero { .. } => Mapping::Bad,
            L2Entry::Unallocated if part == Part::Allocated => Mapping::Bad,
            L2Entry::Data { host, copied } if part == Part::Allocated => Mapping::Data {
                host: host + in_cluster,
                writable: copied & self.may_write,
            },
            _ if part == Part::Zero => Mapping::Zero,
            _ => Mapping::Unallocated,
        }
    }

    #[cold]
    fn at_absent(&self, offset: u64, table: usize) -> Mapping {
        // The slot of a new table is filled before the L1 entry is published.
        let is_absent = self.l1[table].load(Ordering::Acquire) == 0;
        if is_absent || self.is_empty[table].load(Ordering::Acquire) {
            return Mapping::Unallocated;
        }
        match self.tables[table].get() {
            Some(_) => self.at(offset),
            None => Mapping::NotLoaded,
        }
    }

    /// Returns the number of bytes from `offset` on that are in an empty L2 table; 0 for other tables.
    pub fn absent_bytes(&self, offset: u64) -> u64 {
        let (table, index) = self.place(offset);
        // The order of these loads matters: the slot is filled before the first entry is published.
        let slot = self.tables.get(table);
        let is_absent = slot.is_some_and(|slot| slot.get().is_none())
            && (self.l1[table].load(Ordering::Acquire) == 0
                || self.is_empty[table].load(Ordering::Acquire));
        let entries = 1_u64 << (self.cluster_bits - 3 - u32::from(self.part_bits > 0));
        match is_absent {
            true => {
                ((entries - index as u64) << self.cluster_bits)
                    - (offset & (self.cluster_bytes() - 1))
            }
            false => 0,
        }
    }

    /// Returns the longest prefix of the range with one mapping and contiguous host offsets. Compressed clusters are returned one at a
    /// time.
    #[inline]
    pub fn segment(&self, offset: u64, length: u64) -> Segment {
        let mapping = self.at(offset);
        let unit = match mapping {
            Mapping::Compressed => self.cluster_bytes(),
            _ => self.cluster_bytes() >> self.part_bits,
        };
        let mut known = unit - (offset & (unit - 1));
        if known >= length {
            return Segment { mapping, length };
        }
        let is_absent = mapping == Mapping::Unallocated;
        if is_absent {
            known = known.max(self.absent_bytes(offset));
        }
        while known < length {
            let next = self.at(offset + known);
            let goes_on = match (mapping, next) {
                (
                    Mapping::Data { host, writable },
                    Mapping::Data {
                        host: next,
                        writable: next_writable,
                    },
                ) => next == host + known && writable == next_writable,
                (Mapping::Compressed | Mapping::NotLoaded | Mapping::Bad, _) => false,
                (one, other) => one == other,
            };
            if !goes_on {
                break;
            }
            known += match is_absent {
                true => unit.max(self.absent_bytes(offset + known)),
                false => unit,
            };
        }
        Segment {
            mapping,
            length: known.min(length),
        }
    }

    pub(crate) fn l1_entry(&self, table: usize) -> u64 {
        self.l1[table].load(Ordering::Acquire)
    }

    pub(crate) fn l1_entries(&self) -> Vec<u64> {
        let entries = self.l1.iter();
        entries.map(|entry| entry.load(Ordering::Acquire)).collect()
    }

    pub(crate) fn l2_offset(&self, table: usize) -> Option<u64> {
        entry::l2_table(self.l1_entry(table), self.cluster_bits).ok()?
    }
}

impl std::fmt::Debug for Map {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Map").field("size", &self.size).finish()
    }
}
