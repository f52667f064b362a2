//! Is an image consistent? Counts every use of every cluster and compares.

use std::collections::{BTreeMap, HashMap};

use crate::entry::{self, COPIED, L2Entry};
use crate::header::{CORRUPT, DIRTY};
use crate::image::{OpenOptions, read_table};
use crate::subclusters::Subclusters;
use crate::{Header, Image, Result, Storage, corrupt, io, snapshots};

/// What a check may change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repair {
    /// Nothing.
    Nothing,
    /// Clusters that are counted more often than they are used.
    Leaks,
    /// Those, and counts that are too low.
    All,
}

/// What a check found.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CheckReport {
    /// Clusters of the disk, and those that have data of this image.
    pub clusters: u64,
    /// Clusters that have data of this image.
    pub allocated: u64,
    /// Of those, compressed ones.
    pub compressed: u64,
    /// Clusters that are counted more often than they are used: they only take room.
    pub leaks: u64,
    /// Clusters that are used more often than they are counted, and entries that cannot be.
    pub corruptions: u64,
    /// Leaks that were freed.
    pub leaks_fixed: u64,
    /// Other faults that were repaired.
    pub corruptions_fixed: u64,
    /// The end of the last cluster in use.
    pub end: u64,
    /// What was found, in words, the first of them.
    pub findings: Vec<String>,
}

/// Findings that are put into words.
const FINDINGS_MAX: usize = 20;

impl CheckReport {
    /// Nothing is wrong, or nothing is wrong any more.
    pub fn is_clean(&self) -> bool {
        self.leaks == self.leaks_fixed && self.corruptions == self.corruptions_fixed
    }

    fn find(&mut self, finding: String) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }

    fn fault(&mut self, finding: String) {
        self.corruptions += 1;
        self.find(finding);
    }
}

/// How often each cluster is used.
type Uses = HashMap<u64, u64>;

/// L2 tables by where they lie.
type Tables = BTreeMap<u64, TableUse>;

/// How often L1 tables refer to an L2 table.
#[derive(Default)]
struct TableUse {
    uses: u64,
    /// The disk's own L1 table does; not only those of snapshots.
    is_active: bool,
    /// What it maps begins here in the disk.
    offset: u64,
}

impl<S: Storage> Image<S> {
    /// Checks an image that nobody serves, and repairs it. The image is open afterwards, for reading its header at most.
    ///
    /// # Errors
    /// It cannot be read at all, or repaired.
    pub fn check(storage: S, repair: Repair) -> Result<CheckReport> {
        let header = Header::read(&storage)?;
        let read_only = repair == Repair::Nothing;
        let mut image = Image::read(storage, header, OpenOptions { read_only })?;
        image.examine(repair)
    }

    /// What a dirty image needs before it is written: its counts may be old.
    pub(crate) fn repair_after_crash(&mut self) -> Result<()> {
        let report = self.examine(Repair::All)?;
        if !report.is_clean() {
            return corrupt(format!(
                "it was not closed cleanly and cannot be repaired: {}; hint: qemu-img check -r all",
                report.findings.join("; ")
            ));
        }
        Ok(())
    }

    pub(crate) fn examine(&mut self, repair: Repair) -> Result<CheckReport> {
        let mut report = CheckReport {
            clusters: self.header.size.div_ceil(self.header.cluster_bytes()),
            ..CheckReport::default()
        };
        let (mut uses, mut tables) = (Uses::new(), Tables::new());
        self.count_tables(&mut uses)?;
        let l1 = (self.header.l1_offset, self.header.l1_entries);
        self.find_tables(l1, true, &mut tables, &mut report)?;
        for snapshot in &self.snapshots {
            let l1 = (snapshot.l1_offset, snapshot.l1_entries);
            self.add(&mut uses, l1.0, u64::from(l1.1) * 8, 1);
            self.find_tables(l1, false, &mut tables, &mut report)?;
        }
        self.count_clusters(&tables, &mut uses, &mut report)?;
        let last = uses.keys().max().map_or(0, |last| last + 1);
        report.end = last << self.header.cluster_bits;
        // What uses clusters in a way that is not known has them counted.
        let knows_all = !self.header.has_bitmaps && !self.header.has_unknown_extension;
        if !knows_all {
            report.find(
                "it has extensions whose clusters are not known: leaks are not looked for"
                    .to_owned(),
            );
        }
        self.compare_counts(&uses, last, knows_all, repair, &mut report)?;
        self.compare_flags(&tables, repair, &mut report)?;
        if repair == Repair::All && report.is_clean() {
            self.storage.sync().map_err(io("cannot sync"))?;
            let features = self.header.incompatible & !(DIRTY | CORRUPT);
            self.set_incompatible(features)?;
        }
        Ok(report)
    }

    fn add(&self, uses: &mut Uses, offset: u64, bytes: u64, times: u64) {
        if bytes == 0 {
            return;
        }
        let bits = self.header.cluster_bits;
        for cluster in offset >> bits..=(offset + bytes - 1) >> bits {
            *uses.entry(cluster).or_default() += times;
        }
    }

    fn count_tables(&self, uses: &mut Uses) -> Result<()> {
        let header = &self.header;
        let cluster = header.cluster_bytes();
        self.add(uses, 0, 1, 1);
        self.add(uses, header.l1_offset, u64::from(header.l1_entries) * 8, 1);
        let bytes = u64::from(header.refcount_table_clusters) * cluster;
        self.add(uses, header.refcount_table_offset, bytes, 1);
        for block in self.refcounts.table.iter().filter(|block| **block != 0) {
            self.add(uses, *block, cluster, 1);
        }
        let (_, bytes) = snapshots::read_table(&self.storage, header)?;
        self.add(uses, header.snapshots_offset, bytes, 1);
        Ok(())
    }

    /// The L2 tables of an L1 table; entries that cannot be are faults of it.
    fn find_tables(
        &self,
        (l1_offset, l1_entries): (u64, u32),
        is_active: bool,
        tables: &mut Tables,
        report: &mut CheckReport,
    ) -> Result<()> {
        let size = self.storage.size().map_err(io("cannot read the size"))?;
        for (number, l1_entry) in read_table(&self.storage, l1_offset, l1_entries)?
            .into_iter()
            .enumerate()
        {
            match entry::l2_table(l1_entry, self.header.cluster_bits) {
                Ok(None) => {}
                Ok(Some(host)) if host < size => {
                    let table = tables.entry(host).or_default();
                    table.uses += 1;
                    table.is_active |= is_active;
                    table.offset = number as u64 * self.header.l2_span();
                }
                _ => report.fault(format!(
                    "entry {number} of an L1 table cannot be: {l1_entry:#x}"
                )),
            }
        }
        Ok(())
    }

    /// Counts what L2 tables use. Each is read once, however many L1 tables refer to it.
    fn count_clusters(
        &self,
        tables: &Tables,
        uses: &mut Uses,
        report: &mut CheckReport,
    ) -> Result<()> {
        let size = self.storage.size().map_err(io("cannot read the size"))?;
        for (host, table) in tables {
            self.add(uses, *host, self.header.cluster_bytes(), table.uses);
            let words = self.header.entry_words();
            for (index, entry) in self.read_l2(*host)?.chunks(words).enumerate() {
                let offset = table.offset + ((index as u64) << self.header.cluster_bits);
                if !self.count_entry(entry, (offset, size), table, uses, report) {
                    let at = host + (index * words * 8) as u64;
                    report.fault(format!("the L2 entry at {at:#x} cannot be: {entry:#x?}"));
                }
            }
        }
        Ok(())
    }

    /// False: there is no such entry.
    fn count_entry(
        &self,
        words: &[u64],
        (offset, size): (u64, u64),
        table: &TableUse,
        uses: &mut Uses,
        report: &mut CheckReport,
    ) -> bool {
        let bits = self.header.cluster_bits;
        let active = u64::from(table.is_active);
        let found = self.header.decode_entry(words[0]);
        let has_cluster = matches!(found, L2Entry::Data { .. });
        let parts = words.get(1).copied().map(Subclusters);
        let is_plain = !matches!(found, L2Entry::Compressed { .. });
        if is_plain && parts.is_some_and(|parts| !parts.is_possible(has_cluster)) {
            return false;
        }
        match found {
            L2Entry::Unallocated | L2Entry::Zero { kept: None, .. } => {}
            L2Entry::Data { host, .. }
            | L2Entry::Zero {
                kept: Some(host), ..
            } if self.header.has_data_file() => {
                report.allocated += active;
                return host == offset;
            }
            L2Entry::Data { host, .. }
            | L2Entry::Zero {
                kept: Some(host), ..
            } if host < size => {
                self.add(uses, host, 1 << bits, table.uses);
                report.allocated += active;
            }
            L2Entry::Compressed { host, bytes } if host < size => {
                self.add(uses, host, bytes, table.uses);
                report.allocated += active;
                report.compressed += active;
            }
            L2Entry::Data { .. }
            | L2Entry::Zero { .. }
            | L2Entry::Compressed { .. }
            | L2Entry::Bad => return false,
        }
        true
    }

    fn compare_counts(
        &mut self,
        uses: &Uses,
        last: u64,
        knows_all: bool,
        repair: Repair,
        report: &mut CheckReport,
    ) -> Result<()> {
        // In the order of the counts: looking each up would take most of a check's time.
        let mut uses: Vec<(u64, u64)> = uses.iter().map(|(at, times)| (*at, *times)).collect();
        uses.sort_unstable();
        let mut uses = uses.into_iter().peekable();
        let per_block = self.refcounts.per_block();
        let blocks = self.refcounts.table.len() as u64;
        for block in 0..blocks.max(last.div_ceil(per_block)) {
            let is_there = self
                .refcounts
                .table
                .get(block as usize)
                .is_some_and(|offset| *offset != 0);
            if !is_there && block * per_block >= last {
                continue;
            }
            let first = block * per_block;
            while uses.next_if(|(cluster, _)| *cluster < first).is_some() {}
            let counts = self.refcounts.counts(&self.storage, block)?;
            for cluster in first..first + per_block {
                let used = uses.next_if(|(used, _)| *used == cluster);
                let used = used.map_or(0, |(_, times)| times);
                let counted = counts.get(cluster - first);
                if counted < used {
                    report.fault(format!(
                        "cluster {cluster} is used {used} times and counted {counted} times"
                    ));
                    let can = is_there && used <= self.refcounts.max();
                    if repair == Repair::All && can {
                        self.refcounts.set(&self.storage, cluster, 1, used)?;
                        report.corruptions_fixed += 1;
                    }
                } else if counted > used && knows_all {
                    report.leaks += 1;
                    report.find(format!(
                        "cluster {cluster} is used {used} times and counted {counted} times"
                    ));
                    if repair != Repair::Nothing {
                        self.refcounts.set(&self.storage, cluster, 1, used)?;
                        report.leaks_fixed += 1;
                    }
                }
            }
        }
        Ok(())
    }

    /// The flag of an entry says whether its cluster is counted once. Of the disk, not of snapshots.
    fn compare_flags(
        &mut self,
        tables: &Tables,
        repair: Repair,
        report: &mut CheckReport,
    ) -> Result<()> {
        let (l1_offset, bits) = (self.header.l1_offset, self.header.cluster_bits);
        let l1 = read_table(&self.storage, l1_offset, self.header.l1_entries)?;
        for (number, l1_entry) in l1.into_iter().enumerate() {
            if let Ok(Some(host)) = entry::l2_table(l1_entry, bits) {
                let at = l1_offset + number as u64 * 8;
                self.compare_flag((at, host, l1_entry), repair, report)?;
            }
        }
        if self.header.has_data_file() {
            return Ok(());
        }
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
                    self.compare_flag((at, host, entry[0]), repair, report)?;
                }
            }
        }
        Ok(())
    }

    fn compare_flag(
        &mut self,
        (at, host, entry): (u64, u64, u64),
        repair: Repair,
        report: &mut CheckReport,
    ) -> Result<()> {
        let cluster = host >> self.header.cluster_bits;
        let is_alone = self.refcounts.get(&self.storage, cluster)? == 1;
        if is_alone == (entry & COPIED != 0) {
            return Ok(());
        }
        report.fault(format!(
            "the entry at {at:#x} is wrong in saying whether cluster {cluster} is shared"
        ));
        if repair == Repair::All {
            let right = (entry ^ COPIED).to_be_bytes();
            self.storage
                .write_at(at, &right)
                .map_err(io("cannot write a table"))?;
            report.corruptions_fixed += 1;
        }
        Ok(())
    }
}
