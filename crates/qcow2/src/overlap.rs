//! Overlap checks, as in QEMU: neither data nor metadata may be written over a structure of the image.
//!
//! Each cluster is checked once, not per request:
//! - An L2 entry that refers to a cluster with metadata is rejected when the table is loaded.
//! - A cluster in use is rejected when it is allocated, regardless of its reference count.
//! - Overlapping structures are found when the image is opened.
//!
//! The first rejected change sets the corrupt bit. From then on all changes are rejected, and workers have a map without writable
//! clusters. Reads continue.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use crate::clusters::ClusterSet;
use crate::header::CORRUPT;
use crate::image::{new_map, read_table};
use crate::refcounts::Refcounts;
use crate::snapshots::Snapshot;
use crate::{Error, Header, Image, Result, Storage, entry, snapshots};

/// Limit for the snapshots' L1 entries that are read to find L2 tables: 8 MiB for all snapshots together.
const SNAPSHOT_ENTRIES_MAX: u64 = 1 << 20;

/// Clusters in use.
#[derive(Debug, Default)]
pub(crate) struct InUse {
    /// Header, L1 tables, refcount table and blocks, snapshot table, bitmap directory and tables.
    structures: ClusterSet,
    /// All structures, and the L2 tables of the disk and of its snapshots.
    metadata: ClusterSet,
    /// Clusters of data and tables that loaded L2 tables refer to, or that were allocated since the image was opened.
    mapped: ClusterSet,
}

impl InUse {
    pub fn add_structures(&mut self, clusters: Range<u64>) {
        self.structures.insert_all(clusters.clone());
        self.metadata.insert_all(clusters);
    }

    pub fn add_table(&mut self, cluster: u64) {
        self.metadata.insert(cluster);
    }

    pub fn add_mapped(&mut self, cluster: u64) {
        self.mapped.insert(cluster);
    }

    pub fn is_structure(&self, cluster: u64) -> bool {
        self.structures.contains(cluster)
    }

    pub fn is_metadata(&self, cluster: u64) -> bool {
        self.metadata.contains(cluster)
    }

    /// Returns an error if one of the clusters is in use.
    pub fn check_free(&self, mut clusters: Range<u64>) -> Result<()> {
        let is_used =
            |cluster: &u64| self.metadata.contains(*cluster) || self.mapped.contains(*cluster);
        match clusters.find(is_used) {
            None => Ok(()),
            Some(cluster) => Err(Error::Overlap(format!(
                "cluster {cluster} is in use but has the reference count 0"
            ))),
        }
    }

    /// Removes freed clusters.
    pub fn remove(&mut self, clusters: Range<u64>) {
        for cluster in clusters {
            self.structures.remove(cluster);
            self.metadata.remove(cluster);
            self.mapped.remove(cluster);
        }
    }
}

/// Structures of an image at fixed offsets.
pub(crate) struct Structures {
    /// Structures that are written in place: header, L1 table, refcount table and its blocks.
    written: Vec<(&'static str, Range<u64>)>,
    /// Structures of snapshots and bitmaps.
    others: Vec<(&'static str, Range<u64>)>,
}

impl Structures {
    /// Lists the byte ranges of the structures. Damaged bitmaps are omitted.
    pub fn read(
        storage: &impl Storage,
        header: &Header,
        blocks: &[u64],
        snapshots: &[Snapshot],
    ) -> Result<Structures> {
        let range = |offset: u64, bytes: u64| offset..offset + bytes;
        let cluster = header.cluster_bytes();
        let l1_bytes = u64::from(header.l1_entries) * 8;
        let mut written = vec![
            ("header", range(0, cluster)),
            ("L1 table", range(header.l1_offset, l1_bytes)),
            (
                "refcount table",
                range(
                    header.refcount_table_offset,
                    u64::from(header.refcount_table_clusters) * cluster,
                ),
            ),
        ];
        let blocks = blocks.iter().filter(|block| **block != 0);
        written.extend(blocks.map(|block| ("refcount block", range(*block, cluster))));
        let (_, table_bytes) = snapshots::read_table(storage, header)?;
        let table = range(header.snapshots_offset, table_bytes);
        let mut others = vec![("snapshot table", table)];
        others.extend(snapshots.iter().map(|snapshot| {
            let bytes = u64::from(snapshot.l1_entries) * 8;
            ("L1 table of a snapshot", range(snapshot.l1_offset, bytes))
        }));
        let bitmaps = header.bitmaps;
        if let Some(Ok(places)) = bitmaps.map(|bitmaps| bitmaps.places(storage, header)) {
            others.push(("bitmap directory", places.directory));
            others.extend(
                places
                    .tables
                    .into_iter()
                    .map(|table| ("bitmap table", table)),
            );
        }
        Ok(Structures { written, others })
    }

    /// Adds all structures to the clusters in use. Returns a description of two overlapping structures if writes to one would change the
    /// other.
    pub fn register(self, cluster_bits: u32, in_use: &mut InUse) -> Option<String> {
        let clusters = |bytes: &Range<u64>| {
            let end = match bytes.is_empty() {
                true => bytes.start,
                false => bytes.end.next_multiple_of(1 << cluster_bits),
            };
            bytes.start >> cluster_bits..end >> cluster_bits
        };
        let mut overlap = None;
        let mut check = |in_use: &InUse, (name, bytes): &(&str, Range<u64>)| {
            if clusters(bytes).any(|cluster| in_use.is_structure(cluster)) {
                let start = bytes.start;
                overlap = Some(format!("the {name} at {start:#x} overlaps another table"));
            }
        };
        for structure in &self.written {
            check(in_use, structure);
            in_use.add_structures(clusters(&structure.1));
        }
        for structure in &self.others {
            check(in_use, structure);
        }
        for (_, bytes) in &self.others {
            in_use.add_structures(clusters(bytes));
        }
        overlap
    }
}

/// Adds the L2 tables of an L1 table to the clusters in use. Returns the tables with several L1 entries, and the number of these entries.
pub(crate) fn register_tables(
    l1: &[u64],
    cluster_bits: u32,
    in_use: &mut InUse,
) -> HashMap<u64, u64> {
    let mut seen = ClusterSet::default();
    let mut shared = HashMap::new();
    for l1_entry in l1 {
        if let Ok(Some(host)) = entry::l2_table(*l1_entry, cluster_bits) {
            if !seen.insert(host >> cluster_bits) {
                *shared.entry(host).or_insert(1) += 1;
            }
            in_use.add_table(host >> cluster_bits);
        }
    }
    shared
}

/// Adds the L2 tables of snapshots to the clusters in use, if their L1 tables are small.
pub(crate) fn register_snapshots(
    storage: &impl Storage,
    snapshots: &[Snapshot],
    refcounts: &mut Refcounts,
    cluster_bits: u32,
) -> Result<()> {
    let entries = snapshots.iter().map(|one| u64::from(one.l1_entries));
    if entries.sum::<u64>() > SNAPSHOT_ENTRIES_MAX {
        return Ok(());
    }
    for snapshot in snapshots {
        let l1 = read_table(storage, snapshot.l1_offset, snapshot.l1_entries)?;
        register_tables(&l1, cluster_bits, &mut refcounts.in_use);
    }
    Ok(())
}

/// Permission to change an image.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Access {
    ReadWrite,
    ReadOnly,
    /// Structures overlap, for the given reason. The first change marks the image as corrupt.
    Overlapping(String),
    /// Marked as corrupt, for the given reason.
    Corrupt(String),
}

impl Access {
    /// Returns whether workers may write to clusters in place.
    pub fn permits_writes(&self) -> bool {
        matches!(self, Access::ReadWrite | Access::Overlapping(_))
    }
}

impl<S: Storage> Image<S> {
    /// Returns the reason why the image is marked as corrupt and therefore read-only.
    pub fn corruption(&self) -> Option<&str> {
        match &self.access {
            Access::Corrupt(why) => Some(why),
            _ => None,
        }
    }

    /// Returns an error if the image may not be changed.
    pub(crate) fn check_access(&mut self) -> Result<()> {
        match &self.access {
            Access::ReadWrite => Ok(()),
            Access::ReadOnly => Err(Error::Unsupported("it is open read-only".to_owned())),
            Access::Corrupt(why) => Err(Error::Overlap(why.clone())),
            Access::Overlapping(why) => {
                let why = why.clone();
                self.mark_corrupt(&why);
                Err(Error::Overlap(why))
            }
        }
    }

    /// Marks the image as corrupt if a change was rejected because of an overlap.
    pub(crate) fn after_change<T>(&mut self, result: Result<T>) -> Result<T> {
        if let Err(Error::Overlap(why)) = &result {
            self.mark_corrupt(why);
        }
        result
    }

    pub(crate) fn mark_corrupt(&mut self, why: &str) {
        if !self.access.permits_writes() {
            return;
        }
        // Version 2 has no such bit. If the header cannot be written, the image becomes read-only anyway.
        self.set_incompatible(self.header.incompatible | CORRUPT)
            .ok();
        self.access = Access::Corrupt(why.to_owned());
        let l1 = self.map.l1_entries();
        self.map = Arc::new(new_map(&self.header, &l1, Some(&self.map), false));
    }
}
