//! The header of an image and its extensions: read, and checked once.

use crate::bitmaps::Bitmaps;
use crate::entry::{EntryFormat, L2Entry};
use crate::{Error, Result, Storage, corrupt, io, subclusters};

const MAGIC: &[u8] = b"QFI\xfb";
/// Bytes of the fixed part in version 3, with the type of compression.
const HEADER_BYTES: usize = 112;
/// Where a version 2 header ends.
pub(crate) const VERSION_2_BYTES: u64 = 72;
/// What the header and all its extensions may have at most: a cluster of the largest size.
const HEAD_BYTES_MAX: usize = 2 << 20;
/// As QEMU limits them.
pub(crate) const L1_BYTES_MAX: u64 = 32 << 20;
pub(crate) const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
pub(crate) const SNAPSHOTS_MAX: u32 = 65_536;
pub(crate) const BACKING_NAME_MAX: usize = 1023;

pub(crate) const DIRTY: u64 = 1;
pub(crate) const CORRUPT: u64 = 1 << 1;
pub(crate) const DATA_FILE: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
pub(crate) const EXTENDED_L2: u64 = 1 << 4;
/// Autoclear bits: the bitmaps are consistent with the disk; the data file is a raw disk.
pub(crate) const VALID_BITMAPS: u64 = 1;
pub(crate) const RAW_DATA_FILE: u64 = 1 << 1;
/// Parts of clusters have 512 bytes at least.
pub(crate) const EXTENDED_CLUSTER_BITS_MIN: u32 = 14;

pub(crate) const EXTENSION_END: u32 = 0;
pub(crate) const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
pub(crate) const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
const EXTENSION_BITMAPS: u32 = 0x2385_2875;

/// Where fields lie that are written again.
pub(crate) const REFCOUNT_TABLE_FIELD: u64 = 48;
pub(crate) const L1_FIELD: u64 = 36;
pub(crate) const SNAPSHOTS_FIELD: u64 = 60;
pub(crate) const SIZE_FIELD: u64 = 24;
pub(crate) const INCOMPATIBLE_FIELD: u64 = 72;
pub(crate) const AUTOCLEAR_FIELD: u64 = 88;

/// How compressed clusters are compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Deflate without a header.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// What the header says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// 2 or 3.
    pub version: u32,
    /// log2 of the bytes of a cluster.
    pub cluster_bits: u32,
    /// Bytes of the disk.
    pub size: u64,
    /// The name of the backing image, as it is written there.
    pub backing_file: Option<String>,
    /// The format of the backing image.
    pub backing_format: Option<String>,
    /// Entries of the L1 table.
    pub l1_entries: u32,
    /// Where the L1 table lies.
    pub l1_offset: u64,
    /// Where the table of refcount blocks lies.
    pub refcount_table_offset: u64,
    /// Clusters of that table.
    pub refcount_table_clusters: u32,
    /// log2 of the bits of a reference count.
    pub refcount_order: u32,
    /// Internal snapshots.
    pub snapshots: u32,
    /// Where their table lies.
    pub snapshots_offset: u64,
    /// Features without which it cannot be read.
    pub incompatible: u64,
    /// Features that matter to writers who know of them.
    pub compatible: u64,
    /// Features that a writer who does not know them has to clear.
    pub autoclear: u64,
    /// The name of the file that has the data, as it is written there.
    pub data_file: Option<String>,
    /// How compressed clusters are compressed.
    pub compression: Compression,
    /// Persistent bitmaps. `None` also if the autoclear bit for them is not set: their clusters are leaked then.
    pub bitmaps: Option<Bitmaps>,
}

/// Does a file begin as an image of this format?
pub fn is_qcow2(head: &[u8]) -> bool {
    head.starts_with(MAGIC)
}

pub(crate) fn be32(bytes: &[u8], at: usize) -> u32 {
    let field = bytes
        .get(at..at + 4)
        .and_then(|field| field.try_into().ok());
    field.map_or(0, u32::from_be_bytes)
}

pub(crate) fn be64(bytes: &[u8], at: usize) -> u64 {
    let field = bytes
        .get(at..at + 8)
        .and_then(|field| field.try_into().ok());
    field.map_or(0, u64::from_be_bytes)
}

impl Header {
    /// Reads the header of an image.
    ///
    /// # Errors
    /// It is no image, it has what is not supported, or it says what cannot be.
    pub fn read(storage: &impl Storage) -> Result<Header> {
        let mut fixed = [0; HEADER_BYTES];
        storage
            .read_at(0, &mut fixed)
            .map_err(io("cannot read the header"))?;
        if !is_qcow2(&fixed) {
            return Err(Error::Unsupported("it is no qcow2 image".to_owned()));
        }
        let cluster_bits = be32(&fixed, 20);
        if !(9..=21).contains(&cluster_bits) {
            return corrupt(format!(
                "clusters of 2^{cluster_bits} bytes: the format has 2^9 to 2^21"
            ));
        }
        let mut head = vec![0; (1 << cluster_bits).clamp(HEADER_BYTES, HEAD_BYTES_MAX)];
        storage
            .read_at(0, &mut head)
            .map_err(io("cannot read the header"))?;
        let header = Header::decode(&head)?;
        header.check(storage.size().map_err(io("cannot read the size"))?)?;
        Ok(header)
    }

    fn decode(head: &[u8]) -> Result<Header> {
        let version = be32(head, 4);
        if !matches!(version, 2 | 3) {
            return Err(Error::Unsupported(format!(
                "version {version} of the format; versions 2 and 3 are known"
            )));
        }
        let is_3 = version == 3;
        let only_3 = |field: u64| if is_3 { field } else { 0 };
        let incompatible = only_3(be64(head, 72));
        check_features(incompatible)?;
        let method = be32(head, 32);
        if method != 0 {
            let method = if method == 2 { "LUKS" } else { "AES" };
            return Err(Error::Unsupported(format!(
                "it is encrypted ({method}), which is not supported; hint: qemu-img convert makes a plain copy"
            )));
        }
        let header_bytes = if is_3 {
            u64::from(be32(head, 100))
        } else {
            VERSION_2_BYTES
        };
        if is_3 && (header_bytes < 104 || !header_bytes.is_multiple_of(8)) {
            return corrupt(format!("a header of {header_bytes} bytes"));
        }
        let compression = match head[104] {
            _ if incompatible & COMPRESSION_TYPE == 0 => Compression::Zlib,
            0 => Compression::Zlib,
            1 => Compression::Zstd,
            other => {
                return Err(Error::Unsupported(format!("compression type {other}")));
            }
        };
        let mut header = Header {
            version,
            cluster_bits: be32(head, 20),
            size: be64(head, 24),
            backing_file: backing_file(head)?,
            backing_format: None,
            l1_entries: be32(head, 36),
            l1_offset: be64(head, 40),
            refcount_table_offset: be64(head, 48),
            refcount_table_clusters: be32(head, 56),
            refcount_order: if is_3 { be32(head, 96) } else { 4 },
            snapshots: be32(head, 60),
            snapshots_offset: be64(head, 64),
            incompatible,
            compatible: only_3(be64(head, 80)),
            autoclear: only_3(be64(head, 88)),
            data_file: None,
            compression,
            bitmaps: None,
        };
        header.extensions(head, header_bytes)?;
        Ok(header)
    }

    fn extensions(&mut self, head: &[u8], from: u64) -> Result<()> {
        let names_at = be64(head, 8);
        let end = match names_at {
            0 => head.len() as u64,
            at => at.min(head.len() as u64),
        };
        let mut at = from;
        while at + 8 <= end {
            let start = at as usize;
            let (kind, length) = (be32(head, start), u64::from(be32(head, start + 4)));
            if kind == EXTENSION_END {
                return Ok(());
            }
            let Some(bytes) = head.get(start + 8..(at + 8 + length) as usize) else {
                return corrupt("a header extension is longer than the header");
            };
            match kind {
                EXTENSION_BACKING_FORMAT => {
                    self.backing_format = Some(String::from_utf8_lossy(bytes).into_owned());
                }
                EXTENSION_DATA_FILE => {
                    self.data_file = Some(String::from_utf8_lossy(bytes).into_owned());
                }
                EXTENSION_BITMAPS if self.autoclear & VALID_BITMAPS != 0 => {
                    self.bitmaps = Some(Bitmaps::decode(bytes));
                }
                _ => {}
            }
            at += 8 + length.next_multiple_of(8);
        }
        Ok(())
    }

    /// Bytes of a cluster.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Has the version a flag for clusters that read as zeroes?
    pub fn has_zero_flag(&self) -> bool {
        self.version >= 3
    }

    /// Have clusters parts that are allocated by themselves (extended L2 entries)?
    pub fn has_subclusters(&self) -> bool {
        self.incompatible & EXTENDED_L2 != 0
    }

    /// Bytes of the parts in which clusters are allocated: a 32nd part, or the whole one.
    pub fn subcluster_bytes(&self) -> u64 {
        match self.has_subclusters() {
            true => self.cluster_bytes() >> subclusters::BITS,
            false => self.cluster_bytes(),
        }
    }

    /// Words of an L2 entry.
    pub(crate) fn entry_words(&self) -> usize {
        1 + usize::from(self.has_subclusters())
    }

    /// Reads an entry, or the first word of one.
    pub(crate) fn decode_entry(&self, entry: u64) -> L2Entry {
        self.entry_format().decode(entry)
    }

    pub(crate) fn entry_format(&self) -> EntryFormat {
        EntryFormat {
            cluster_bits: self.cluster_bits,
            // Extended entries have a word for that.
            has_zeroes: self.has_zero_flag() && !self.has_subclusters(),
            has_data_file: self.has_data_file(),
        }
    }

    /// Returns whether the image is marked as corrupt.
    pub fn is_corrupt(&self) -> bool {
        self.incompatible & CORRUPT != 0
    }

    /// Do data lie in a file of their own, each cluster at its offset in the disk?
    pub fn has_data_file(&self) -> bool {
        self.incompatible & DATA_FILE != 0
    }

    /// Can the data file be read without the image, as a raw disk?
    pub fn is_data_file_raw(&self) -> bool {
        self.has_data_file() && self.autoclear & RAW_DATA_FILE != 0
    }

    /// Bytes that one L2 table maps.
    pub(crate) fn l2_span(&self) -> u64 {
        self.cluster_bytes() << (self.cluster_bits - 3 - u32::from(self.has_subclusters()))
    }

    /// Where everything is has to be possible; `file` is the size of the storage.
    fn check(&self, file: u64) -> Result<()> {
        let cluster = self.cluster_bytes();
        let lies = |what: &str, offset: u64, bytes: u64| {
            let end = offset.checked_add(bytes);
            if offset == 0 || !offset.is_multiple_of(cluster) || end.is_none_or(|end| end > file) {
                return corrupt(format!(
                    "the {what} lies at {offset} with {bytes} bytes, in a file of {file} bytes"
                ));
            }
            Ok(())
        };
        if self.refcount_order > 6 {
            return corrupt(format!(
                "reference counts of 2^{} bits",
                self.refcount_order
            ));
        }
        if self.size > i64::MAX as u64 || !self.size.is_multiple_of(512) {
            return corrupt(format!("a disk of {} bytes", self.size));
        }
        if self.has_subclusters() && self.cluster_bits < EXTENDED_CLUSTER_BITS_MIN {
            return corrupt(format!(
                "extended L2 entries with clusters of {} bytes",
                self.cluster_bytes()
            ));
        }
        let needed = self.size.div_ceil(self.l2_span());
        let l1_bytes = u64::from(self.l1_entries) * 8;
        if needed > u64::from(self.l1_entries) || l1_bytes > L1_BYTES_MAX {
            return corrupt(format!(
                "an L1 table of {} entries for a disk of {} bytes",
                self.l1_entries, self.size
            ));
        }
        if self.l1_entries > 0 {
            lies("L1 table", self.l1_offset, l1_bytes)?;
        }
        let table_bytes = u64::from(self.refcount_table_clusters) * cluster;
        if table_bytes == 0 || table_bytes > REFCOUNT_TABLE_BYTES_MAX {
            return corrupt(format!("a refcount table of {table_bytes} bytes"));
        }
        lies("refcount table", self.refcount_table_offset, table_bytes)?;
        if self.snapshots > SNAPSHOTS_MAX {
            return corrupt(format!("{} snapshots", self.snapshots));
        }
        if self.snapshots > 0 && self.has_data_file() {
            return corrupt("it has snapshots, and a data file, which has one content");
        }
        if self.is_data_file_raw() && self.backing_file.is_some() {
            return corrupt(
                "it stands on another image, and its data file is said to be all of it",
            );
        }
        if self.snapshots > 0 {
            lies("snapshot table", self.snapshots_offset, 1)?;
        }
        Ok(())
    }
}

fn check_features(incompatible: u64) -> Result<()> {
    let known = DIRTY | CORRUPT | DATA_FILE | COMPRESSION_TYPE | EXTENDED_L2;
    if incompatible & !known != 0 {
        return Err(Error::Unsupported(format!(
            "it has incompatible features that are not known (bits {:#x})",
            incompatible & !known
        )));
    }
    Ok(())
}

fn backing_file(head: &[u8]) -> Result<Option<String>> {
    let (at, length) = (be64(head, 8), be32(head, 16) as usize);
    if at == 0 || length == 0 {
        return Ok(None);
    }
    let name = usize::try_from(at)
        .ok()
        .and_then(|at| head.get(at..at.checked_add(length)?));
    let Some(name) = name.filter(|name| name.len() <= BACKING_NAME_MAX) else {
        return corrupt(format!(
            "the backing file's name lies at {at} with {length} bytes"
        ));
    };
    match std::str::from_utf8(name) {
        Ok(name) => Ok(Some(name.to_owned())),
        Err(_) => Err(Error::Unsupported(
            "the backing file's name is not UTF-8; hint: qemu-img rebase -u gives it another"
                .to_owned(),
        )),
    }
}
