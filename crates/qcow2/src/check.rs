//! Consistency check: counts every use of every cluster and compares with the reference counts. Invalid entries: see `repair`.
//!
//! Memory: about 1.5 bytes per cluster in use, 4 MiB of reference counts, and 40 bytes per L2 table.

use std::collections::BTreeMap;

use crate::bitmaps::Bitmaps;
use crate::clusters::{ClusterSet, Uses};
use crate::entry::{self, COPIED, L2Entry};
use crate::header::{AUTOCLEAR_FIELD, CORRUPT, DIRTY, RAW_DATA_FILE, VALID_BITMAPS};
use crate::image::read_table;
use crate::{Header, Image, Result, Storage, corrupt, io, snapshots};

/// Changes that a check may make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Makes no change.
    Nothing,
    /// Frees leaked clusters.
    Leaks,
    /// Also corrects counts that are too low and flags that contradict the counts: the faults that a crash can cause.
    Counts,
    /// Also repairs entries with invalid offsets. The data of such entries is lost and reads as zeroes.
    All,
}

/// Result of a check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Number of clusters of the disk.
    pub clusters: u64,
    /// Number of clusters that have data in this image.
    pub allocated: u64,
    /// Number of allocated clusters that are compressed.
    pub compressed: u64,
    /// Number of allocated clusters that are compressed or do not follow the previous one of their L2 table, as `qemu-img check` counts
    /// them.
    pub fragmented: u64,
    /// Number of leaked clusters: their refcount is higher than their number of uses.
    pub leaks: u64,
    /// Number of clusters with a count below their uses, and of invalid entries.
    pub corruptions: u64,
    /// Number of leaks that were freed.
    pub leaks_fixed: u64,
    /// Number of corruptions that were repaired.
    pub corruptions_fixed: u64,
    /// End offset of the last cluster in use.
    pub end: u64,
    /// Descriptions of the first findings.
    pub findings: Vec<String>,
}

/// Maximum number of described findings.
const FINDINGS_MAX: usize = 20;

impl CheckReport {
    /// Returns true if no faults remain.
    pub fn is_clean(&self) -> bool {
        self.leaks == self.leaks_fixed && self.corruptions == self.corruptions_fixed
    }

    fn find(&mut self, finding: String) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }

    pub(crate) fn fault(&mut self, finding: String) {
        self.corruptions += 1;
        self.find(finding);
    }
}

/// L2 tables by offset.
type Tables = BTreeMap<u64, TableUse>;

#[derive(Default)]
pub(crate) struct TableUse {
    /// Number of L1 entries that refer to it.
    pub uses: u64,
    /// The active L1 table refers to it, not only those of snapshots.
    pub is_active: bool,
    /// Disk offset of the first cluster that it maps.
    pub offset: u64,
}

pub(crate) struct Check {
    pub repair: Repair,
    pub report: CheckReport,
    pub uses: Uses,
    tables: Tables,
    /// Clusters of the refcount table and its blocks.
    pub refcount_clusters: ClusterSet,
    /// Number of faults that require a rebuild of the reference counts: missing blocks, and blocks in clusters with other uses.
    pub rebuilt_faults: u64,
}

impl Check {
    /// Records a fault that a rebuild of the reference counts repairs.
    pub fn fault_of_refcounts(&mut self, finding: String) {
        self.rebuilt_faults += 1;
        self.report.fault(finding);
    }
}

impl<S: Storage> Image<S> {
    /// Checks and repairs an image that is not in use. Afterwards only its header may be read.
    ///
    /// # Errors
    /// The image cannot be read or repaired.
    pub fn check(storage: S, repair: Repair) -> Result<CheckReport> {
        let header = Header::read(&storage)?;
        let mut image = Image::read(storage, header, repair == Repair::Nothing)?;
        image.examine(repair)
    }

    /// Repairs the counts of a dirty image before it is written.
    pub(crate) fn repair_after_crash(&mut self) -> Result<()> {
        let report = self.examine(Repair::Counts)?;
        if !report.is_clean() {
            return corrupt(format!(
                "the image was not closed cleanly and cannot be repaired without data loss: {}; hint: lunette image check --repair all",
                report.findings.join("; ")
            ));
        }
        Ok(())
    }

    pub(crate) fn examine(&mut self, repair: Repair) -> Result<CheckReport> {
        let mut check = Check {
            repair,
            report: CheckReport {
                clusters: self.header.size.div_ceil(self.header.cluster_bytes()),
                ..CheckReport::default()
            },
            uses: Uses::default(),
            tables: Tables::new(),
            refcount_clusters: ClusterSet::default(),
            rebuilt_faults: 0,
        };
        self.find_refcounts(&mut check);
        self.count_structures(&mut check)?;
        let l1 = (self.header.l1_offset, self.header.l1_entries);
        self.find_tables(l1, true, &mut check)?;
        for snapshot in self.snapshots.clone() {
            let l1 = (snapshot.l1_offset, snapshot.l1_entries);
            self.add(&mut check.uses, l1.0, u64::from(l1.1) * 8, 1);
            self.find_tables(l1, false, &mut check)?;
        }
        self.count_clusters(&mut check)?;
        self.count_refcounts(&mut check);
        self.compare_counts(&mut check)?;
        if repair == Repair::All && check.rebuilt_faults > 0 {
            let clusters = self.refcounts.clusters();
            clusters
                .iter()
                .for_each(|cluster| check.uses.lower(*cluster));
            self.refcounts.rebuild(&self.storage, &mut check.uses)?;
            check.report.corruptions_fixed += check.rebuilt_faults;
            check.report.leaks_fixed = check.report.leaks;
        }
        check.report.end = check.uses.end() << self.header.cluster_bits;
        self.compare_flags(&mut check)?;
        let report = check.report;
        if matches!(repair, Repair::Counts | Repair::All) && report.is_clean() {
            self.storage.sync().map_err(io("cannot sync"))?;
            let repaired = match repair {
                Repair::All => DIRTY | CORRUPT,
                _ => DIRTY,
            };
            self.set_incompatible(self.header.incompatible & !repaired)?;
        }
        Ok(report)
    }

    fn add(&self, uses: &mut Uses, offset: u64, bytes: u64, times: u64) {
        if bytes == 0 {
            return;
        }
        let bits = self.header.cluster_bits;
        for cluster in offset >> bits..=(offset + bytes - 1) >> bits {
            uses.add(cluster, times);
        }
    }

    /// Records the clusters of the refcount table and blocks. Their uses are counted last.
    fn find_refcounts(&self, check: &mut Check) {
        for cluster in self.refcounts.clusters() {
            check.refcount_clusters.insert(cluster);
        }
        for offset in &self.refcounts.bad_blocks {
            check.fault_of_refcounts(format!(
                "the refcount table has an invalid refcount block offset {offset:#x}"
            ));
        }
    }

    fn count_structures(&mut self, check: &mut Check) -> Result<()> {
        self.add(&mut check.uses, 0, 1, 1);
        let (l1_offset, l1_bytes) = (self.header.l1_offset, u64::from(self.header.l1_entries) * 8);
        self.add(&mut check.uses, l1_offset, l1_bytes, 1);
        let (_, bytes) = snapshots::read_table(&self.storage, &self.header)?;
        self.add(&mut check.uses, self.header.snapshots_offset, bytes, 1);
        let Some(bitmaps) = self.header.bitmaps else {
            return Ok(());
        };
        match self.count_bitmaps(bitmaps, check) {
            Ok(()) => Ok(()),
            Err(crate::Error::Corrupt(reason)) => {
                check
                    .report
                    .fault(format!("the bitmaps are damaged: {reason}"));
                if check.repair == Repair::All {
                    self.remove_bitmaps()?;
                    check.report.corruptions_fixed += 1;
                }
                Ok(())
            }
            Err(error) => Err(error),
        }
    }

    /// Counts the clusters of bitmaps, unless one of the bitmaps is damaged.
    fn count_bitmaps(&self, bitmaps: Bitmaps, check: &mut Check) -> Result<()> {
        let places = bitmaps.places(&self.storage, &self.header)?;
        Bitmaps::data(&self.storage, &self.header, &places, |_| {})?;
        let uses = &mut check.uses;
        for part in std::iter::once(&places.directory).chain(&places.tables) {
            self.add(uses, part.start, part.end - part.start, 1);
        }
        let cluster = self.header.cluster_bytes();
        Bitmaps::data(&self.storage, &self.header, &places, |host| {
            self.add(uses, host, cluster, 1);
        })
    }

    /// Marks the bitmaps as invalid. Their clusters are then leaks.
    fn remove_bitmaps(&mut self) -> Result<()> {
        let autoclear = self.header.autoclear & !VALID_BITMAPS;
        let written = self
            .storage
            .write_at(AUTOCLEAR_FIELD, &autoclear.to_be_bytes());
        written.map_err(io("cannot write the header"))?;
        (self.header.autoclear, self.header.bitmaps) = (autoclear, None);
        Ok(())
    }

    /// Finds the L2 tables of an L1 table. Entries with invalid offsets are faults.
    fn find_tables(
        &mut self,
        (l1_offset, l1_entries): (u64, u32),
        is_active: bool,
        check: &mut Check,
    ) -> Result<()> {
        let size = self
            .storage
            .size()
            .map_err(io("cannot read the size of the file"))?;
        let bits = self.header.cluster_bits;
        let l1 = read_table(&self.storage, l1_offset, l1_entries)?;
        for (number, l1_entry) in (0..).zip(l1) {
            let at = l1_offset + number * 8;
            let offset = number * self.header.l2_span();
            let l1_entry = self.checked_l1_entry((at, l1_entry), (offset, size), check)?;
            if let Ok(Some(host)) = entry::l2_table(l1_entry, bits) {
                let table = check.tables.entry(host).or_default();
                table.uses += 1;
                table.is_active |= is_active;
                table.offset = offset;
                self.refcounts.in_use.add_table(host >> bits);
            }
        }
        Ok(())
    }

    /// Counts the clusters that L2 tables use. Each table is read once, however many L1 tables refer to it.
    fn count_clusters(&mut self, check: &mut Check) -> Result<()> {
        let size = self
            .storage
            .size()
            .map_err(io("cannot read the size of the file"))?;
        let bits = self.header.cluster_bits;
        let tables = std::mem::take(&mut check.tables);
        for (host, table) in &tables {
            self.add(
                &mut check.uses,
                *host,
                self.header.cluster_bytes(),
                table.uses,
            );
            let words = self.header.entry_words();
            let mut next = None;
            for (index, entry) in (0..).zip(self.read_l2(*host)?.chunks_exact(words)) {
                let place = (
                    host + index * words as u64 * 8,
                    table.offset + (index << bits),
                );
                let entry = self.checked_entry(entry, place, size, check)?;
                self.count_entry(entry, table, &mut next, check);
            }
        }
        check.tables = tables;
        Ok(())
    }

    /// Counts the clusters of an entry. `next` is the end of the last cluster of the table.
    fn count_entry(&self, entry: u64, table: &TableUse, next: &mut Option<u64>, check: &mut Check) {
        let active = u64::from(table.is_active);
        match self.header.decode_entry(entry) {
            L2Entry::Unallocated | L2Entry::Zero { kept: None, .. } | L2Entry::Bad => {}
            L2Entry::Data { host, .. }
            | L2Entry::Zero {
                kept: Some(host), ..
            } => {
                let cluster = self.header.cluster_bytes();
                if !self.header.has_data_file() {
                    self.add(&mut check.uses, host, cluster, table.uses);
                }
                check.report.allocated += active;
                if next.is_some_and(|next| next != host) {
                    check.report.fragmented += active;
                }
                *next = Some(host.saturating_add(cluster));
            }
            L2Entry::Compressed { host, bytes } => {
                self.add(&mut check.uses, host, bytes, table.uses);
                check.report.allocated += active;
                check.report.compressed += active;
                check.report.fragmented += active;
            }
        }
    }

    /// Counts the clusters of the refcount table and blocks. Other uses of these clusters are faults.
    fn count_refcounts(&self, check: &mut Check) {
        for cluster in self.refcounts.clusters() {
            if check.uses.get(cluster) > 0 {
                check.fault_of_refcounts(format!(
                    "cluster {cluster} is a refcount block and has another use"
                ));
            }
            check.uses.add(cluster, 1);
        }
    }

    /// Compares the counts with the uses and corrects them, unless a rebuild replaces them.
    fn compare_counts(&mut self, check: &mut Check) -> Result<()> {
        // An unknown autoclear feature may have clusters of its own.
        let has_unknown = self.header.autoclear & !(VALID_BITMAPS | RAW_DATA_FILE) != 0;
        if has_unknown {
            let autoclear = self.header.autoclear;
            check.report.find(format!(
                "leaks are not searched: the image has unknown features (autoclear bits {autoclear:#x})"
            ));
        }
        let sets = check.repair == Repair::Counts
            || check.repair == Repair::All && check.rebuilt_faults == 0;
        let frees = sets || check.repair == Repair::Leaks;
        let per_block = self.refcounts.per_block();
        let mut blocks: Vec<u64> = check.uses.groups(per_block);
        blocks.extend(self.refcounts.block_numbers());
        blocks.sort_unstable();
        blocks.dedup();
        for block in blocks {
            let first = block * per_block;
            let counts = self.refcounts.counts(&self.storage, block)?;
            let uses = check.uses.range(first..first + per_block);
            for (cluster, used) in (first..).zip(uses) {
                let counted = counts.get(cluster - first);
                let finding = || {
                    format!(
                        "cluster {cluster} has {used} references and the reference count {counted}"
                    )
                };
                if counted < used {
                    if used > self.refcounts.max() {
                        check.report.fault(finding());
                    } else if !counts.has_block() || !sets {
                        check.fault_of_refcounts(finding());
                    } else {
                        check.report.fault(finding());
                        self.refcounts.set(&self.storage, cluster, 1, used)?;
                        check.report.corruptions_fixed += 1;
                    }
                } else if counted > used && !has_unknown {
                    check.report.leaks += 1;
                    check.report.find(finding());
                    if frees {
                        self.refcounts.set(&self.storage, cluster, 1, used)?;
                        check.report.leaks_fixed += 1;
                    }
                }
            }
        }
        Ok(())
    }

    /// Compares the COPIED flags of the active tables with the reference counts.
    fn compare_flags(&mut self, check: &mut Check) -> Result<()> {
        let (l1_offset, bits) = (self.header.l1_offset, self.header.cluster_bits);
        let l1 = read_table(&self.storage, l1_offset, self.header.l1_entries)?;
        for (number, l1_entry) in l1.into_iter().enumerate() {
            if let Ok(Some(host)) = entry::l2_table(l1_entry, bits) {
                let at = l1_offset + number as u64 * 8;
                self.compare_flag((at, host, l1_entry), check)?;
            }
        }
        if self.header.has_data_file() {
            return Ok(());
        }
        let tables = std::mem::take(&mut check.tables);
        let active = tables.iter().filter(|(_, table)| table.is_active);
        for (table, _) in active {
            let words = self.header.entry_words();
            for (index, entry) in self.read_l2(*table)?.chunks(words).enumerate() {
                if let L2Entry::Data { host, .. }
                | L2Entry::Zero {
                    kept: Some(host), ..
                } = self.header.decode_entry(entry[0])
                {
                    let at = table + (index * words * 8) as u64;
                    self.compare_flag((at, host, entry[0]), check)?;
                }
            }
        }
        check.tables = tables;
        Ok(())
    }

    fn compare_flag(
        &mut self,
        (at, host, entry): (u64, u64, u64),
        check: &mut Check,
    ) -> Result<()> {
        let cluster = host >> self.header.cluster_bits;
        let is_alone = self.refcounts.get(&self.storage, cluster)? == 1;
        if is_alone == (entry & COPIED != 0) {
            return Ok(());
        }
        check.report.fault(format!(
            "the entry at {at:#x} has a wrong COPIED flag for cluster {cluster}"
        ));
        if matches!(check.repair, Repair::Counts | Repair::All) {
            let right = (entry ^ COPIED).to_be_bytes();
            self.storage
                .write_at(at, &right)
                .map_err(io("cannot write a table"))?;
            check.report.corruptions_fixed += 1;
        }
        Ok(())
    }
}
