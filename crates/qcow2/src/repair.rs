//! Repairs L1 and L2 entries with invalid offsets, like `qemu-img check -r all` and beyond it: afterwards `qemu-img check` reports no
//! errors.
//!
//! If only the reserved bits of an entry are wrong, they are cleared. Any other invalid entry is lost: its part of the disk reads as
//! zeroes, or as the backing image where the image has no entry for zeroes (version 2, and L1 entries).

use crate::check::{Check, Repair};
use crate::entry::{self, COMPRESSED, COPIED, L2Entry, OFFSET, RESERVED, ZERO};
use crate::subclusters::Subclusters;
use crate::{Image, Result, Storage, io};

impl<S: Storage> Image<S> {
    /// Checks the L1 entry at file offset `at`; its table maps the disk from `offset` on. Returns the entry that the check counts.
    pub(crate) fn checked_l1_entry(
        &mut self,
        (at, l1_entry): (u64, u64),
        (offset, size): (u64, u64),
        check: &mut Check,
    ) -> Result<u64> {
        if self.is_l1_entry_possible(l1_entry, size, check)? {
            return Ok(l1_entry);
        }
        let without_reserved = l1_entry & (COPIED | OFFSET);
        let (replacement, consequence) =
            match self.is_l1_entry_possible(without_reserved, size, check)? {
                true => (without_reserved, String::new()),
                // A flag without a table.
                false if without_reserved & OFFSET == 0 => (0, String::new()),
                false => {
                    let span = self.header.l2_span();
                    let lost = format!("; the data of {span} bytes at offset {offset} are lost");
                    (0, lost)
                }
            };
        check.report.fault(format!(
            "the L1 entry at {at:#x} is invalid: {l1_entry:#x}{consequence}"
        ));
        self.repair_entry(at, &[replacement], check)?;
        Ok(replacement)
    }

    fn is_l1_entry_possible(&self, l1_entry: u64, size: u64, check: &Check) -> Result<bool> {
        let bits = self.header.cluster_bits;
        Ok(match entry::l2_table(l1_entry, bits) {
            Ok(None) => l1_entry == 0,
            Ok(Some(host)) if host >= size => false,
            // Either the entry or the refcount table is wrong. If the entry is right, the reference counts are rebuilt.
            Ok(Some(host)) if check.refcount_clusters.contains(host >> bits) => {
                self.is_table(host, size)?
            }
            Ok(Some(host)) => !self.refcounts.in_use.is_structure(host >> bits),
            Err(()) => false,
        })
    }

    /// Returns true if the content of a cluster is a valid L2 table.
    fn is_table(&self, host: u64, size: u64) -> Result<bool> {
        let words = self.header.entry_words();
        let entries = self.read_l2(host)?;
        let mut entries = entries.chunks_exact(words);
        Ok(
            entries.all(|entry| match self.header.decode_entry(entry[0]) {
                L2Entry::Unallocated | L2Entry::Zero { kept: None, .. } => true,
                L2Entry::Data { host, .. }
                | L2Entry::Zero {
                    kept: Some(host), ..
                }
                | L2Entry::Compressed { host, .. } => host < size,
                L2Entry::Bad => false,
            }),
        )
    }

    /// Checks an L2 entry at file offset `at`, for disk offset `offset`. Returns the first word of the entry that the check counts.
    pub(crate) fn checked_entry(
        &self,
        words: &[u64],
        (at, offset): (u64, u64),
        size: u64,
        check: &mut Check,
    ) -> Result<u64> {
        let Some(fault) = self.fault_of(words, offset, size, check) else {
            return Ok(words[0]);
        };
        let without_reserved = self.without_reserved(words);
        let is_right = self
            .fault_of(&without_reserved, offset, size, check)
            .is_none();
        let (replacement, consequence) = match is_right {
            true => (without_reserved, String::new()),
            false => {
                let lost = format!("; the data at offset {offset} are lost");
                (self.lost_entry(offset), lost)
            }
        };
        check.report.fault(format!(
            "the L2 entry at {at:#x} {fault}: {:#x}{consequence}",
            words[0]
        ));
        self.repair_entry(at, &replacement, check)?;
        Ok(replacement[0])
    }

    fn fault_of(
        &self,
        words: &[u64],
        offset: u64,
        size: u64,
        check: &Check,
    ) -> Option<&'static str> {
        let bits = self.header.cluster_bits;
        let parts = words.get(1).copied().map(Subclusters);
        let fits = |has_cluster| parts.is_none_or(|parts| parts.is_possible(has_cluster));
        let is_metadata = |cluster| {
            self.refcounts.in_use.is_metadata(cluster) && !check.refcount_clusters.contains(cluster)
        };
        let (host, fits) = match self.header.decode_entry(words[0]) {
            L2Entry::Unallocated | L2Entry::Zero { kept: None, .. } if fits(false) => return None,
            L2Entry::Bad | L2Entry::Unallocated | L2Entry::Zero { kept: None, .. } => (0, false),
            L2Entry::Data { host, .. }
            | L2Entry::Zero {
                kept: Some(host), ..
            } => (host, fits(true)),
            L2Entry::Compressed { host, .. } => (host, parts.is_none_or(|parts| parts.0 == 0)),
        };
        match self.header.has_data_file() {
            _ if !fits => Some("is invalid"),
            true if host != offset => Some("points to a wrong offset of the data file"),
            true => None,
            false if host >= size => Some("points beyond the end of the file"),
            false if is_metadata(host >> bits) => Some("points to a metadata cluster"),
            false => None,
        }
    }

    /// Returns the entry with its reserved bits cleared.
    fn without_reserved(&self, words: &[u64]) -> Vec<u64> {
        let mut words = words.to_vec();
        if words[0] & COMPRESSED != 0 && !self.header.has_data_file() {
            words[0] &= !COPIED;
            words[1..].fill(0);
        } else {
            words[0] &= !(RESERVED | COMPRESSED);
            if !self.header.entry_format().has_zeroes {
                words[0] &= !ZERO;
            }
        }
        words
    }

    /// Returns the replacement entry for a cluster with lost data.
    fn lost_entry(&self, offset: u64) -> Vec<u64> {
        match (
            self.header.is_data_file_raw(),
            self.header.has_subclusters(),
        ) {
            // The data file is the raw disk, so none of its clusters is lost.
            (true, false) => vec![entry::data(offset)],
            (true, true) => vec![entry::data(offset), Subclusters::ALL.0],
            (false, true) => vec![0, Subclusters::ZEROES.0],
            (false, false) if self.header.has_zero_flag() => vec![ZERO],
            (false, false) => vec![0],
        }
    }

    fn repair_entry(&self, at: u64, words: &[u64], check: &mut Check) -> Result<()> {
        if check.repair != Repair::All {
            return Ok(());
        }
        let bytes: Vec<u8> = words.iter().flat_map(|word| word.to_be_bytes()).collect();
        let written = self.storage.write_at(at, &bytes);
        written.map_err(io("cannot write a table"))?;
        check.report.corruptions_fixed += 1;
        Ok(())
    }
}
