//! Extended L2 entries. The second word has two bits for each of the 32 subclusters: allocated and reads-as-zeroes. With neither bit, the
//! subcluster reads as the backing image ("Extended L2 Entries" in QEMU's docs/interop/qcow2.txt).
//!
//! Readers of the map load both words without a lock. The owner stores them in such an order that each new word, combined with the other
//! old word, reads either as the old or as the new cluster: see [`Image::store_entry`].

use crate::allocate::Change;
use crate::entry::{self, L2Entry};
use crate::sync::{AtomicU64, Ordering};
use crate::{Backing, Image, Result, Storage, io, word_pair};

/// Number of subclusters per cluster.
pub(crate) const PER_CLUSTER: u64 = 32;
/// log2 of [`PER_CLUSTER`].
pub(crate) const BITS: u32 = 5;

/// Second word of an extended entry.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Subclusters(pub u64);

/// State of one subcluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Part {
    Unallocated,
    Zero,
    Allocated,
}

impl Subclusters {
    /// All subclusters are unallocated.
    pub const NONE: Subclusters = Subclusters(0);
    /// All subclusters are allocated.
    pub const ALL: Subclusters = Subclusters(0xffff_ffff);
    /// All subclusters read as zeroes.
    pub const ZEROES: Subclusters = Subclusters(0xffff_ffff << 32);

    fn allocated(self) -> u64 {
        self.0 & Subclusters::ALL.0
    }

    /// Returns true if the word is valid: no subcluster has both bits, and without a cluster none is allocated.
    pub fn is_possible(self, has_cluster: bool) -> bool {
        let zero = self.0 >> 32;
        self.allocated() & zero == 0 && (has_cluster || self.allocated() == 0)
    }

    /// Returns the state of the subcluster with this index.
    pub fn part(self, number: u64) -> Part {
        match (self.0 >> number & 1, self.0 >> (32 + number) & 1) {
            (1, _) => Part::Allocated,
            (_, 1) => Part::Zero,
            _ => Part::Unallocated,
        }
    }
}

/// Loads a consistent pair of both words of an entry.
#[inline]
pub(crate) fn load_both(words: &[AtomicU64], index: usize) -> (u64, Subclusters) {
    let (entry, parts) = word_pair::load(words, index);
    (entry, Subclusters(parts))
}

impl<S: Storage> Image<S> {
    /// Returns both words of an entry. Its table must be loaded or empty.
    pub(crate) fn entry_and_parts(&self, offset: u64) -> (L2Entry, Subclusters) {
        let (table, index) = self.map.place(offset);
        let (entry, parts) = match self.map.tables[table].get() {
            Some(words) if self.header.has_subclusters() => load_both(words, index),
            Some(words) => (words[index].load(Ordering::Acquire), Subclusters::NONE),
            None => (0, Subclusters::NONE),
        };
        (self.header.decode_entry(entry), parts)
    }

    /// Publishes an entry to readers of the map.
    ///
    /// A reader has loaded the second word and the first word, and both again without a change ([`load_both`]).
    /// - A cluster that becomes zeroes: the first word is stored last. With the old first word, the new second word reads as zeroes.
    /// - Compressed clusters have no subclusters. With all subclusters allocated, the old first word still reads as compressed.
    /// - In all other cases the new cluster contains the old cluster's data in the subclusters that the old second word refers to.
    pub(crate) fn store_entry(&self, words: &[AtomicU64], index: usize, change: &Change) {
        if !self.header.has_subclusters() {
            words[index].store(change.entry, Ordering::Release);
            return;
        }
        let old = words[2 * index].load(Ordering::Acquire);
        let old = self.header.decode_entry(old);
        let new = (change.entry, change.parts.0);
        if change.entry == 0 || matches!(old, L2Entry::Compressed { .. }) {
            word_pair::store_first_word_last(words, index, new);
        } else {
            word_pair::store_second_word_last(words, index, new);
        }
    }

    /// As [`Image::prepare_write`], for one cluster with an extended entry. Afterwards all its subclusters are allocated.
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

    /// Fills the unallocated subclusters with their current content. Clients may write to the other subclusters meanwhile.
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

    /// Returns the content of a cluster, or `None` if it reads as zeroes.
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
    fn subcluster_words_are_decoded_as_specified() {
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
