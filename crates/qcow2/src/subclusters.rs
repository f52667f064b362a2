//! Extended L2 entries: a second word in which each 32nd part of a cluster has two bits. One says that the part is allocated, the other
//! that it reads as zeroes; with neither, the backing image shows ("Extended L2 Entries" in QEMU's docs/interop/qcow2.txt).
//!
//! Whoever reads the map meets both words without a lock. The owner stores them in an order in which either new one, beside the old
//! other one, reads as the cluster did before or does afterwards: see [`Image::store_entry`].

use std::sync::atomic::{AtomicU64, Ordering};

use crate::allocate::Change;
use crate::entry::{self, L2Entry};
use crate::{Backing, Image, Result, Storage, io};

/// Parts of a cluster.
pub(crate) const PER_CLUSTER: u64 = 32;
/// log2 of it.
pub(crate) const BITS: u32 = 5;

/// The second word of an entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Subclusters(pub u64);

/// What one part of a cluster is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Unallocated,
    Zero,
    Allocated,
}

impl Subclusters {
    /// The backing image shows everywhere.
    pub const NONE: Subclusters = Subclusters(0);
    /// All parts are allocated.
    pub const ALL: Subclusters = Subclusters(0xffff_ffff);
    /// All parts read as zeroes.
    pub const ZEROES: Subclusters = Subclusters(0xffff_ffff << 32);

    fn allocated(self) -> u64 {
        self.0 & Subclusters::ALL.0
    }

    /// Can an entry have it? No part is both, and none is allocated where there is no cluster.
    pub fn is_possible(self, has_cluster: bool) -> bool {
        let zero = self.0 >> 32;
        self.allocated() & zero == 0 && (has_cluster || self.allocated() == 0)
    }

    /// Of the part with this number.
    pub fn part(self, number: u64) -> Part {
        match (self.0 >> number & 1, self.0 >> (32 + number) & 1) {
            (1, _) => Part::Allocated,
            (_, 1) => Part::Zero,
            _ => Part::Unallocated,
        }
    }
}

/// Both words of an entry, of one moment.
#[inline]
pub(crate) fn load_both(words: &[AtomicU64], index: usize) -> (u64, Subclusters) {
    let (entry, parts) = (&words[2 * index], &words[2 * index + 1]);
    loop {
        let before = parts.load(Ordering::Acquire);
        let found = entry.load(Ordering::Acquire);
        if parts.load(Ordering::Acquire) == before {
            return (found, Subclusters(before));
        }
    }
}

impl<S: Storage> Image<S> {
    /// Both words of the entry of an offset, whose table is in memory or has no entry.
    pub(crate) fn entry_and_parts(&self, offset: u64) -> (L2Entry, Subclusters) {
        let (table, index) = self.map.place(offset);
        let (entry, parts) = match self.map.tables[table].get() {
            Some(words) if self.header.has_subclusters() => load_both(words, index),
            Some(words) => (words[index].load(Ordering::Acquire), Subclusters::NONE),
            None => (0, Subclusters::NONE),
        };
        (self.header.decode_entry(entry), parts)
    }

    /// Stores an entry for all who read the map.
    ///
    /// A reader has loaded the second word, the first one, and the second one again without a change ([`load_both`]).
    /// - A cluster that becomes zeroes loses its first word last: with the old one, the new parts read as zeroes.
    /// - Compressed data have no parts: once they say that all is allocated, they still read as compressed.
    /// - All else gets a cluster which holds, at the parts that the old second word has, what the old cluster has there.
    pub(crate) fn store_entry(&self, words: &[AtomicU64], index: usize, change: &Change) {
        if !self.header.has_subclusters() {
            words[index].store(change.entry, Ordering::Release);
            return;
        }
        let (entry, parts) = (&words[2 * index], &words[2 * index + 1]);
        let old = self.header.decode_entry(entry.load(Ordering::Acquire));
        if change.entry == 0 || matches!(old, L2Entry::Compressed { .. }) {
            parts.store(change.parts.0, Ordering::Release);
            entry.store(change.entry, Ordering::Release);
        } else {
            entry.store(change.entry, Ordering::Release);
            parts.store(change.parts.0, Ordering::Release);
        }
    }

    /// As [`Image::prepare_write`], of one cluster of an image with extended entries: afterwards all its parts are allocated.
    pub(crate) fn prepare_parts(
        &mut self,
        offset: u64,
        backing: &mut Option<&mut dyn Backing>,
        must_sync: &mut bool,
    ) -> Result<Option<Change>> {
        let (found, parts) = self.entry_and_parts(offset);
        let change = |host, given_up| Change {
            offset,
            entry: entry::data(host),
            parts: Subclusters::ALL,
            given_up,
        };
        match found {
            L2Entry::Data { host, copied } => {
                let is_own = copied || self.is_counted_once(host)?;
                if !is_own {
                    let content = self.content_of_parts(offset, (host, parts), backing)?;
                    let new = self.fill_new_cluster(offset, content, must_sync)?;
                    return Ok(Some(change(new, Some(found))));
                }
                if copied && parts == Subclusters::ALL {
                    return Ok(None);
                }
                self.fill_parts(offset, (host, parts), backing, must_sync)?;
                Ok(Some(change(host, None)))
            }
            L2Entry::Compressed { .. } => {
                let mut content = vec![0; self.header.cluster_bytes() as usize];
                self.read_compressed(offset, &mut content)?;
                let new = self.fill_new_cluster(offset, Some(content), must_sync)?;
                Ok(Some(change(new, Some(found))))
            }
            L2Entry::Unallocated => {
                let content = self.content_of_parts(offset, (0, parts), backing)?;
                let new = self.fill_new_cluster(offset, content, must_sync)?;
                Ok(Some(change(new, Some(found))))
            }
            L2Entry::Zero { .. } | L2Entry::Bad => self.bad_entry(offset),
        }
    }

    /// Gives the parts of a cluster that are not allocated what they read as; clients may write to the others meanwhile.
    fn fill_parts(
        &mut self,
        offset: u64,
        (host, parts): (u64, Subclusters),
        backing: &mut Option<&mut dyn Backing>,
        must_sync: &mut bool,
    ) -> Result<()> {
        let part_bytes = self.header.subcluster_bytes();
        let has_unallocated = (0..PER_CLUSTER).any(|part| parts.part(part) == Part::Unallocated);
        let below = match has_unallocated {
            true => self.read_backing(offset, backing)?,
            false => None,
        };
        for number in 0..PER_CLUSTER {
            let at = number * part_bytes;
            let below = match parts.part(number) {
                Part::Allocated => continue,
                Part::Zero => None,
                Part::Unallocated => below.as_ref(),
            };
            *must_sync = true;
            let filled = match below {
                Some(content) => {
                    let content = &content[at as usize..][..part_bytes as usize];
                    self.data().write_at(host + at, content)
                }
                None => self.data().zero(host + at, part_bytes),
            };
            filled.map_err(io("cannot fill a part of a cluster"))?;
        }
        Ok(())
    }

    /// What a cluster reads as; `None`: zeroes.
    fn content_of_parts(
        &mut self,
        offset: u64,
        (host, parts): (u64, Subclusters),
        backing: &mut Option<&mut dyn Backing>,
    ) -> Result<Option<Vec<u8>>> {
        let part_bytes = self.header.subcluster_bytes() as usize;
        let has = |kind| (0..PER_CLUSTER).any(|part| parts.part(part) == kind);
        let own = match has(Part::Allocated) {
            true => Some(self.read_cluster(host)?),
            false => None,
        };
        let below = match has(Part::Unallocated) {
            true => self.read_backing(offset, backing)?,
            false => None,
        };
        if own.is_none() && below.is_none() {
            return Ok(None);
        }
        let mut content = vec![0; self.header.cluster_bytes() as usize];
        for (number, into) in content.chunks_mut(part_bytes).enumerate() {
            let from = match parts.part(number as u64) {
                Part::Allocated => &own,
                Part::Unallocated => &below,
                Part::Zero => continue,
            };
            if let Some(from) = from {
                into.copy_from_slice(&from[number * part_bytes..][..into.len()]);
            }
        }
        Ok(Some(content))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_mean_what_the_format_says() {
        let parts = Subclusters(1 << 33 | 0b101);
        let found: Vec<Part> = (0..4).map(|number| parts.part(number)).collect();
        let wanted = [
            Part::Allocated,
            Part::Zero,
            Part::Allocated,
            Part::Unallocated,
        ];
        assert_eq!(found, wanted);
        assert!(parts.is_possible(true) && !parts.is_possible(false));
        assert!(Subclusters::ZEROES.is_possible(false));
        assert!(
            !Subclusters(1 << 40 | 1 << 8).is_possible(true),
            "a part that is both"
        );
        assert_eq!(Subclusters::ALL.part(31), Part::Allocated);
        assert_eq!(Subclusters::NONE.part(31), Part::Unallocated);
    }
}
