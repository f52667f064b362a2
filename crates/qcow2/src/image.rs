//! An open image: its tables, its owner's state, and what opening and closing it do.

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::data_file::DataFile;
use crate::entry::{self, L2Entry};
use crate::header::{AUTOCLEAR_FIELD, CORRUPT, DIRTY, INCOMPATIBLE_FIELD, RAW_DATA_FILE};
use crate::map::{Map, Table};
use crate::refcounts::{self, Refcounts};
use crate::release::Released;
use crate::reserve::Reserve;
use crate::snapshots::{self, Snapshot};
use crate::subclusters::{self, Subclusters};
use crate::{Error, Header, Result, Storage, corrupt, io};

/// How an image is opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Change nothing of it.
    pub read_only: bool,
}

/// An open image. One owner has it; others read its [`Map`].
pub struct Image<S> {
    pub(crate) storage: S,
    /// Has the data, if the image has not.
    pub(crate) data_file: Option<DataFile<S>>,
    pub(crate) header: Header,
    /// The header may name another L1 table than this one has.
    pub(crate) is_l1_unsure: bool,
    pub(crate) map: Arc<Map>,
    pub(crate) refcounts: Refcounts,
    pub(crate) snapshots: Vec<Snapshot>,
    /// Clusters that no other table may point at.
    pub(crate) metadata: HashSet<u64>,
    /// L2 tables in memory, by where they lie: two parts of a disk that share one would be one image in another.
    pub(crate) loaded: HashSet<u64>,
    pub(crate) reserve: Reserve,
    pub(crate) released: Released,
    pub(crate) read_only: bool,
}

impl<S: Storage> Image<S> {
    /// Opens an image whose data lie in it.
    ///
    /// # Errors
    /// As [`Image::open_with`].
    pub fn open(storage: S, options: OpenOptions) -> Result<Image<S>> {
        Image::open_with(storage, None, options)
    }

    /// Opens an image, with its data file if it has one ([`Header::has_data_file`]). One that was not closed cleanly has its reference
    /// counts repaired first, if it may be changed.
    ///
    /// # Errors
    /// It cannot be read, is no such image, has what is not supported, or is damaged.
    pub fn open_with(storage: S, data: Option<S>, options: OpenOptions) -> Result<Image<S>> {
        let header = Header::read(&storage)?;
        if header.has_data_file() != data.is_some() {
            let has = match header.has_data_file() {
                true => "it has a data file, without which it is not opened",
                false => "it has no data file",
            };
            return Err(Error::Unsupported(has.to_owned()));
        }
        if header.incompatible & CORRUPT != 0 && !options.read_only {
            return corrupt(
                "it is marked as damaged; hint: repair it, lunette image check --repair all, or serve it with read_only",
            );
        }
        let mut image = Image::read(storage, header, options)?;
        image.data_file = data.map(|data| DataFile::new(data, &image.header));
        if !options.read_only {
            image.begin_writing()?;
        }
        Ok(image)
    }

    /// Reads the tables, whatever the header says of their state.
    pub(crate) fn read(storage: S, header: Header, options: OpenOptions) -> Result<Image<S>> {
        let refcounts = Refcounts::read(&storage, &header)?;
        let snapshots = snapshots::read(&storage, &header)?;
        let l1 = read_table(&storage, header.l1_offset, header.l1_entries)?;
        let metadata = metadata_clusters(&header, &refcounts);
        let map = new_map(&header, &l1, None);
        Ok(Image {
            storage,
            data_file: None,
            is_l1_unsure: false,
            map: Arc::new(map),
            refcounts,
            snapshots,
            metadata,
            loaded: HashSet::new(),
            reserve: Reserve::default(),
            released: Released::default(),
            read_only: options.read_only,
            header,
        })
    }

    fn begin_writing(&mut self) -> Result<()> {
        self.extend_data_file(self.header.size)?;
        if self.header.incompatible & DIRTY != 0 {
            self.repair_after_crash()?;
        }
        // What this code does not keep up to date is no longer true of the image.
        let true_still = match self.header.is_data_file_raw() {
            true => RAW_DATA_FILE,
            false => 0,
        };
        if self.header.autoclear != true_still {
            self.storage
                .write_at(AUTOCLEAR_FIELD, &true_still.to_be_bytes())
                .and_then(|()| self.storage.sync())
                .map_err(io("cannot write the header"))?;
            self.header.autoclear = true_still;
        }
        Ok(())
    }

    /// The header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Its internal snapshots.
    pub fn snapshots(&self) -> &[Snapshot] {
        &self.snapshots
    }

    /// What it lies in.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// The tables; another map after [`Image::resize`].
    pub fn map(&self) -> Arc<Map> {
        Arc::clone(&self.map)
    }

    /// Marks the image as having, or no longer having, a state of [`DIRTY`] or [`CORRUPT`].
    pub(crate) fn set_incompatible(&mut self, features: u64) -> Result<()> {
        if self.header.version < 3 || self.header.incompatible == features {
            return Ok(());
        }
        self.storage
            .write_at(INCOMPATIBLE_FIELD, &features.to_be_bytes())
            .and_then(|()| self.storage.sync())
            .map_err(io("cannot write the header"))?;
        self.header.incompatible = features;
        Ok(())
    }

    /// Loads the table of an offset into the map.
    ///
    /// # Errors
    /// It cannot be read, or is where no table can be.
    pub fn load(&mut self, offset: u64) -> Result<()> {
        let (table, _) = self.map.place(offset);
        self.load_table(table)
    }

    pub(crate) fn load_table(&mut self, table: usize) -> Result<()> {
        if self.map.tables[table].get().is_some() {
            return Ok(());
        }
        let at = entry::l2_table(self.map.l1_entry(table), self.header.cluster_bits);
        let host = match at {
            Ok(None) => return Ok(()),
            Ok(Some(host)) => host,
            Err(()) => return corrupt(format!("entry {table} of the L1 table is damaged")),
        };
        let size = self.storage.size().map_err(io("cannot read the size"))?;
        if self.metadata.contains(&(host >> self.header.cluster_bits)) || host >= size {
            return corrupt(format!(
                "the L2 table {table} lies at {host:#x}, where none can be"
            ));
        }
        let entries = self.read_l2(host)?;
        if entries.iter().all(|entry| *entry == 0) {
            self.map.is_empty[table].store(true, Ordering::Release);
            return Ok(());
        }
        if !self.loaded.insert(host) {
            return corrupt(format!("two L2 tables lie at {host:#x}"));
        }
        let mut entries = entries;
        let first = table as u64 * self.header.l2_span();
        let words = self.header.entry_words();
        for (words, index) in entries.chunks_mut(words).zip(0..) {
            let offset = first + (index << self.header.cluster_bits);
            if !self.is_possible(words, offset, size) {
                words.fill(0);
                words[0] = BAD_ENTRY;
            }
        }
        let checked: Table = entries.into_iter().map(AtomicU64::new).collect();
        // Nobody else sets it.
        self.map.tables[table].set(checked).ok();
        Ok(())
    }

    pub(crate) fn read_l2(&self, host: u64) -> Result<Vec<u64>> {
        let mut bytes = vec![0; self.header.cluster_bytes() as usize];
        self.storage
            .read_at(host, &mut bytes)
            .map_err(io("cannot read an L2 table"))?;
        Ok(refcounts::entries(&bytes).collect())
    }

    /// Can data of this offset lie where the entry says?
    fn is_possible(&self, words: &[u64], offset: u64, size: u64) -> bool {
        let bits = self.header.cluster_bits;
        let entry = self.header.decode_entry(words[0]);
        let is_there = |host: u64| match self.header.has_data_file() {
            true => host == offset,
            false => host < size && !self.metadata.contains(&(host >> bits)),
        };
        let parts = words.get(1).copied().map(Subclusters);
        let fits = |has_cluster| parts.is_none_or(|parts| parts.is_possible(has_cluster));
        match entry {
            L2Entry::Bad => false,
            L2Entry::Unallocated | L2Entry::Zero { kept: None, .. } => fits(false),
            L2Entry::Data { host, .. }
            | L2Entry::Zero {
                kept: Some(host), ..
            } => is_there(host) && fits(true),
            L2Entry::Compressed { host, .. } => is_there(host),
        }
    }

    pub(crate) fn entry(&self, offset: u64) -> L2Entry {
        self.entry_and_parts(offset).0
    }

    /// Gives back what was reserved, and makes everything durable. Nobody uses the map any more.
    ///
    /// # Errors
    /// The storage's; the image is as after a crash then: some clusters may be counted that nobody uses.
    pub fn close(&mut self) -> Result<()> {
        if self.read_only {
            return Ok(());
        }
        self.release()?;
        self.return_reserve()?;
        self.sync_data().map_err(io("cannot sync"))?;
        self.storage.sync().map_err(io("cannot sync"))
    }
}

/// What a table that is wrong has in memory: reserved bits are set.
const BAD_ENTRY: u64 = 1 << 57;

pub(crate) fn read_table(storage: &impl Storage, offset: u64, entries: u32) -> Result<Vec<u64>> {
    let mut bytes = vec![0; entries as usize * 8];
    if entries > 0 {
        storage
            .read_at(offset, &mut bytes)
            .map_err(io("cannot read the L1 table"))?;
    }
    Ok(refcounts::entries(&bytes).collect())
}

/// Tables of the header's size; those that are loaded are kept.
pub(crate) fn new_map(header: &Header, l1: &[u64], old: Option<&Map>) -> Map {
    let tables = header.size.div_ceil(header.l2_span()) as usize;
    let loaded = |table: usize| -> OnceLock<Table> {
        match old.and_then(|old| old.tables.get(table)?.get()) {
            Some(loaded) => OnceLock::from(Arc::clone(loaded)),
            None => OnceLock::new(),
        }
    };
    let is_empty = |table: usize| {
        let is_empty = old.and_then(|old| old.is_empty.get(table));
        AtomicBool::new(is_empty.is_some_and(|empty| empty.load(Ordering::Acquire)))
    };
    Map {
        cluster_bits: header.cluster_bits,
        entries: header.entry_format(),
        part_bits: if header.has_subclusters() {
            subclusters::BITS
        } else {
            0
        },
        size: header.size,
        l1: (0..tables)
            .map(|table| AtomicU64::new(l1.get(table).copied().unwrap_or(0)))
            .collect(),
        tables: (0..tables).map(loaded).collect(),
        is_empty: (0..tables).map(is_empty).collect(),
    }
}

/// Clusters of the tables that are always there.
fn metadata_clusters(header: &Header, refcounts: &Refcounts) -> HashSet<u64> {
    let (bits, cluster) = (header.cluster_bits, header.cluster_bytes());
    let mut metadata = HashSet::from([0]);
    let l1_clusters = (u64::from(header.l1_entries) * 8).div_ceil(cluster);
    let l1_first = header.l1_offset >> bits;
    metadata.extend(l1_first..l1_first + l1_clusters);
    let table_first = header.refcount_table_offset >> bits;
    metadata.extend(table_first..table_first + u64::from(header.refcount_table_clusters));
    let blocks = refcounts.table.iter().filter(|offset| **offset != 0);
    metadata.extend(blocks.map(|offset| offset >> bits));
    metadata
}
