//! An open image: its tables, the owner's state, opening and closing.

use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use crate::data_file::DataFile;
use crate::entry::{self, L2Entry};
use crate::header::{
    AUTOCLEAR_FIELD, CORRUPT, DIRTY, INCOMPATIBLE_FIELD, RAW_DATA_FILE, VALID_BITMAPS,
};
use crate::map::{Map, Table};
use crate::overlap::{self, Access, Structures};
use crate::refcounts::{self, Refcounts};
use crate::release::Released;
use crate::reserve::Reserve;
use crate::snapshots::{self, Snapshot};
use crate::subclusters::{self, Subclusters};
use crate::{Error, Header, Result, Storage, corrupt, io};

/// Options for opening an image.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpenOptions {
    /// Permit no changes.
    pub read_only: bool,
    /// Leave persistent bitmaps valid, because no change alters the content of the disk.
    pub keep_bitmaps: bool,
    /// Open an image that is marked as corrupt also without `read_only`. All changes then fail.
    pub accept_corrupt: bool,
}

impl OpenOptions {
    /// Options for reading and writing.
    pub const READ_WRITE: OpenOptions = OpenOptions {
        read_only: false,
        keep_bitmaps: false,
        accept_corrupt: false,
    };

    /// Options for reading only.
    pub const READ_ONLY: OpenOptions = OpenOptions {
        read_only: true,
        ..OpenOptions::READ_WRITE
    };
}

/// An open image. It has one owner; other threads read its [`Map`].
pub struct Image<S> {
    pub(crate) storage: S,
    pub(crate) data_file: Option<DataFile<S>>,
    pub(crate) header: Header,
    /// A header write failed, so the header may refer to another L1 table.
    pub(crate) is_l1_unsure: bool,
    pub(crate) map: Arc<Map>,
    pub(crate) refcounts: Refcounts,
    pub(crate) snapshots: Vec<Snapshot>,
    /// Offsets of the loaded L2 tables.
    pub(crate) loaded: HashSet<u64>,
    /// Offsets of L2 tables that several L1 entries refer to, with the number of these entries. Each is copied before it is written.
    pub(crate) shared_tables: HashMap<u64, u64>,
    pub(crate) reserve: Reserve,
    pub(crate) released: Released,
    pub(crate) access: Access,
}

impl<S: Storage> Image<S> {
    /// Opens an image without an external data file.
    ///
    /// # Errors
    /// As [`Image::open_with`].
    pub fn open(storage: S, options: OpenOptions) -> Result<Image<S>> {
        Image::open_with(storage, None, options)
    }

    /// Opens an image, with its data file if it has one ([`Header::has_data_file`]). If the image is dirty and writable, its reference
    /// counts are repaired first.
    ///
    /// # Errors
    /// The image cannot be read, is not a qcow2 image, has unsupported features, or is damaged.
    pub fn open_with(storage: S, data: Option<S>, options: OpenOptions) -> Result<Image<S>> {
        let header = Header::read(&storage)?;
        if header.has_data_file() != data.is_some() {
            let has = match header.has_data_file() {
                true => "it needs its external data file",
                false => "it has no external data file",
            };
            return Err(Error::Unsupported(has.to_owned()));
        }
        let is_corrupt = header.incompatible & CORRUPT != 0;
        if is_corrupt && !options.read_only && !options.accept_corrupt {
            return corrupt(MARKED_CORRUPT);
        }
        let read_only = options.read_only || is_corrupt;
        let mut image = Image::read(storage, header, read_only)?;
        image.refcounts.check_table()?;
        image.data_file = data.map(|data| DataFile::new(data, &image.header));
        if !read_only {
            image.begin_writing(options.keep_bitmaps)?;
        } else if !options.read_only {
            image.access = Access::Corrupt(MARKED_CORRUPT.to_owned());
        }
        Ok(image)
    }

    /// Reads the tables, regardless of the state bits in the header.
    pub(crate) fn read(storage: S, header: Header, read_only: bool) -> Result<Image<S>> {
        let mut refcounts = Refcounts::read(&storage, &header)?;
        let snapshots = snapshots::read(&storage, &header)?;
        let l1 = read_table(&storage, header.l1_offset, header.l1_entries)?;
        let bits = header.cluster_bits;
        let structures = Structures::read(&storage, &header, &refcounts.table, &snapshots)?;
        let overlap = structures.register(bits, &mut refcounts.in_use);
        let shared_tables = overlap::register_tables(&l1, bits, &mut refcounts.in_use);
        if !read_only {
            overlap::register_snapshots(&storage, &snapshots, &mut refcounts, bits)?;
        }
        let access = match overlap {
            _ if read_only => Access::ReadOnly,
            Some(why) => Access::Overlapping(why),
            None => Access::ReadWrite,
        };
        let map = new_map(&header, &l1, None, access.permits_writes());
        Ok(Image {
            map: Arc::new(map),
            refcounts,
            snapshots,
            shared_tables,
            access,
            ..Image::unread(storage, header)
        })
    }

    /// Creates an image with tables that are not read, because another process may change them. Each range of its map is
    /// [`Mapping::NotLoaded`](crate::Mapping::NotLoaded). The image must be opened again before anything but header and map is used.
    pub fn unread(storage: S, header: Header) -> Image<S> {
        let tables = header.size.div_ceil(header.l2_span()) as usize;
        let map = new_map(&header, &vec![UNREAD_TABLE; tables], None, false);
        Image {
            storage,
            data_file: None,
            is_l1_unsure: false,
            map: Arc::new(map),
            refcounts: Refcounts::unread(&header),
            snapshots: Vec::new(),
            loaded: HashSet::new(),
            shared_tables: HashMap::new(),
            reserve: Reserve::default(),
            released: Released::default(),
            access: Access::ReadOnly,
            header,
        }
    }

    fn begin_writing(&mut self, keep_bitmaps: bool) -> Result<()> {
        self.extend_data_file(self.header.size)?;
        if self.header.incompatible & DIRTY != 0 {
            self.repair_after_crash()?;
        }
        // Clear the autoclear bits of all features that this crate does not maintain.
        let mut true_still = match self.header.is_data_file_raw() {
            true => RAW_DATA_FILE,
            false => 0,
        };
        if keep_bitmaps {
            true_still |= self.header.autoclear & VALID_BITMAPS;
        }
        if self.header.autoclear != true_still {
            self.storage
                .write_at(AUTOCLEAR_FIELD, &true_still.to_be_bytes())
                .and_then(|()| self.storage.sync())
                .map_err(io("cannot write the header"))?;
            self.header.autoclear = true_still;
        }
        if true_still & VALID_BITMAPS == 0 {
            self.header.bitmaps = None;
        }
        Ok(())
    }

    /// Returns the header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns the internal snapshots.
    pub fn snapshots(&self) -> &[Snapshot] {
        &self.snapshots
    }

    /// Returns the storage of the image.
    pub fn storage(&self) -> &S {
        &self.storage
    }

    /// Returns the current map. [`Image::resize`] replaces it.
    pub fn map(&self) -> Arc<Map> {
        Arc::clone(&self.map)
    }

    /// Writes the incompatible feature bits. Used to set or clear [`DIRTY`] and [`CORRUPT`].
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

    /// Loads the L2 table of an offset into the map.
    ///
    /// # Errors
    /// The table cannot be read, or its offset is invalid.
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
        let size = self
            .storage
            .size()
            .map_err(io("cannot read the size of the file"))?;
        let cluster = host >> self.header.cluster_bits;
        if self.refcounts.in_use.is_structure(cluster) {
            return Err(Error::Overlap(format!(
                "the L2 table {table} at {host:#x} overlaps another table"
            )));
        }
        if host >= size {
            return corrupt(format!(
                "the L2 table {table} at {host:#x} is beyond the end of the file"
            ));
        }
        let entries = self.read_l2(host)?;
        if entries.iter().all(|entry| *entry == 0) {
            self.map.is_empty[table].store(true, Ordering::Release);
            return Ok(());
        }
        if !self.loaded.insert(host) && !self.is_counted_for_all(host)? {
            return Err(Error::Overlap(format!("two L2 tables are at {host:#x}")));
        }
        let mut entries = entries;
        let first = table as u64 * self.header.l2_span();
        let words = self.header.entry_words();
        for (words, index) in entries.chunks_mut(words).zip(0..) {
            let offset = first + (index << self.header.cluster_bits);
            self.check_entry(words, offset, size);
        }
        let checked: Table = entries.into_iter().map(AtomicU64::new).collect();
        // Only the owner sets it, so this cannot fail.
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

    /// Returns whether the reference count of an L2 table is at least the number of L1 entries that refer to it.
    pub(crate) fn is_counted_for_all(&mut self, host: u64) -> Result<bool> {
        let Some(named) = self.shared_tables.get(&host).copied() else {
            return Ok(false);
        };
        let cluster = host >> self.header.cluster_bits;
        Ok(self.refcounts.get(&self.storage, cluster)? >= named)
    }

    /// Replaces an entry with an invalid offset by [`BAD_ENTRY`]. Marks the clusters of valid entries as in use.
    fn check_entry(&mut self, words: &mut [u64], offset: u64, size: u64) {
        let found = self.header.decode_entry(words[0]);
        let parts = words.get(1).copied().map(Subclusters);
        let fits = |has_cluster| parts.is_none_or(|parts| parts.is_possible(has_cluster));
        let (host, bytes, fits) = match found {
            L2Entry::Unallocated | L2Entry::Zero { kept: None, .. } if fits(false) => return,
            L2Entry::Data { host, .. }
            | L2Entry::Zero {
                kept: Some(host), ..
            } => (host, self.header.cluster_bytes(), fits(true)),
            L2Entry::Compressed { host, bytes } => (host, bytes, true),
            L2Entry::Bad | L2Entry::Unallocated | L2Entry::Zero { .. } => (0, 1, false),
        };
        let clusters =
            host >> self.header.cluster_bits..=(host + bytes - 1) >> self.header.cluster_bits;
        let in_use = &mut self.refcounts.in_use;
        let replacement = match self.header.has_data_file() {
            true if fits && host == offset => return,
            true => BAD_ENTRY,
            false if !fits || host >= size => BAD_ENTRY,
            false if clusters.clone().any(|cluster| in_use.is_metadata(cluster)) => {
                BAD_ENTRY | OVERLAPPING
            }
            false => return clusters.for_each(|cluster| in_use.add_mapped(cluster)),
        };
        words.fill(0);
        words[0] = replacement;
    }

    /// Returns the error for a change at an offset with a damaged entry.
    pub(crate) fn bad_entry<T>(&self, offset: u64) -> Result<T> {
        let (table, index) = self.map.place(offset);
        let words = self.map.tables.get(table).and_then(|slot| slot.get());
        let word = words.and_then(|words| words.get(index * self.header.entry_words()));
        let word = word.map_or(BAD_ENTRY, |word| word.load(Ordering::Acquire));
        match word & OVERLAPPING {
            0 => corrupt(format!("the L2 entry of offset {offset} is damaged")),
            _ => Err(Error::Overlap(format!(
                "the L2 entry of offset {offset} points to a metadata cluster"
            ))),
        }
    }

    pub(crate) fn entry(&self, offset: u64) -> L2Entry {
        self.entry_and_parts(offset).0
    }

    /// Frees the reserved clusters and makes all changes durable. The map must no longer be in use.
    ///
    /// # Errors
    /// The storage failed. The image is then in the same state as after a crash: some clusters may be leaked.
    pub fn close(&mut self) -> Result<()> {
        if !self.access.permits_writes() {
            return Ok(());
        }
        self.release()?;
        self.return_reserve()?;
        self.sync_data().map_err(io("cannot sync"))?;
        self.storage.sync().map_err(io("cannot sync"))
    }
}

/// L1 entry of a table that is not read: neither absent nor valid.
const UNREAD_TABLE: u64 = 1;

/// Damaged entry in memory: a reserved bit is set.
const BAD_ENTRY: u64 = 1 << 57;
/// Flag of a damaged entry that refers to a cluster with metadata.
const OVERLAPPING: u64 = 1 << 58;

const MARKED_CORRUPT: &str = "the image is marked as corrupt; hint: repair it with lunette image check --repair all, or serve it with read_only";

pub(crate) fn read_table(storage: &impl Storage, offset: u64, entries: u32) -> Result<Vec<u64>> {
    let mut bytes = vec![0; entries as usize * 8];
    if entries > 0 {
        storage
            .read_at(offset, &mut bytes)
            .map_err(io("cannot read the L1 table"))?;
    }
    Ok(refcounts::entries(&bytes).collect())
}

/// Creates a map for the size in the header and takes over the loaded tables of the old map.
pub(crate) fn new_map(header: &Header, l1: &[u64], old: Option<&Map>, may_write: bool) -> Map {
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
    // A flag without a table is no table, so that it is not loaded again and again.
    let l1_entry = |table: usize| {
        let entry = l1.get(table).copied().unwrap_or(0);
        match entry::l2_table(entry, header.cluster_bits) {
            Ok(None) => AtomicU64::new(0),
            _ => AtomicU64::new(entry),
        }
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
        may_write,
        l1: (0..tables).map(l1_entry).collect(),
        tables: (0..tables).map(loaded).collect(),
        is_empty: (0..tables).map(is_empty).collect(),
    }
}
