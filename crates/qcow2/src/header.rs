//! Image header and header extensions, validated when they are read.

use crate::bitmaps::Bitmaps;
use crate::entry::{EntryFormat, L2Entry};
use crate::{Error, Result, Storage, corrupt, io, subclusters};

const MAGIC: &[u8] = b"QFI\xfb";
/// Size of the fixed part in version 3, including the compression type.
const HEADER_BYTES: usize = 112;
/// End of a version 2 header.
pub(crate) const VERSION_2_BYTES: u64 = 72;
/// Limit for the header with all extensions: the largest cluster size.
const HEAD_BYTES_MAX: usize = 2 << 20;
/// Limits as in QEMU.
pub(crate) const L1_BYTES_MAX: u64 = 32 << 20;
pub(crate) const REFCOUNT_TABLE_BYTES_MAX: u64 = 8 << 20;
pub(crate) const SNAPSHOTS_MAX: u32 = 65_536;
pub(crate) const BACKING_NAME_MAX: usize = 1023;

pub(crate) const DIRTY: u64 = 1;
pub(crate) const CORRUPT: u64 = 1 << 1;
pub(crate) const DATA_FILE: u64 = 1 << 2;
const COMPRESSION_TYPE: u64 = 1 << 3;
pub(crate) const EXTENDED_L2: u64 = 1 << 4;
/// Autoclear bits: bitmaps are consistent; the data file is a raw disk.
pub(crate) const VALID_BITMAPS: u64 = 1;
pub(crate) const RAW_DATA_FILE: u64 = 1 << 1;
/// A subcluster has at least 512 bytes.
pub(crate) const EXTENDED_CLUSTER_BITS_MIN: u32 = 14;

pub(crate) const EXTENSION_END: u32 = 0;
pub(crate) const EXTENSION_BACKING_FORMAT: u32 = 0xe279_2aca;
pub(crate) const EXTENSION_DATA_FILE: u32 = 0x4441_5441;
const EXTENSION_BITMAPS: u32 = 0x2385_2875;
/// Extension of Lunette, which other programs keep and ignore: 16 random bytes ("Lune").
pub(crate) const EXTENSION_IDENTITY: u32 = 0x4c75_6e65;

/// Offsets of header fields that change.
pub(crate) const REFCOUNT_TABLE_FIELD: u64 = 48;
pub(crate) const L1_FIELD: u64 = 36;
pub(crate) const SNAPSHOTS_FIELD: u64 = 60;
pub(crate) const SIZE_FIELD: u64 = 24;
pub(crate) const INCOMPATIBLE_FIELD: u64 = 72;
pub(crate) const AUTOCLEAR_FIELD: u64 = 88;

/// Compression algorithm of compressed clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// Raw deflate, without a zlib header.
    Zlib,
    /// Zstandard.
    Zstd,
}

/// Decoded header.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// Version: 2 or 3.
    pub version: u32,
    /// log2 of the cluster size in bytes.
    pub cluster_bits: u32,
    /// Size of the disk in bytes.
    pub size: u64,
    /// Name of the backing image, as stored.
    pub backing_file: Option<String>,
    /// Format of the backing image.
    pub backing_format: Option<String>,
    /// Number of entries of the L1 table.
    pub l1_entries: u32,
    /// Offset of the L1 table.
    pub l1_offset: u64,
    /// Offset of the refcount table.
    pub refcount_table_offset: u64,
    /// Number of clusters of the refcount table.
    pub refcount_table_clusters: u32,
    /// log2 of the width of a reference count in bits.
    pub refcount_order: u32,
    /// Number of internal snapshots.
    pub snapshots: u32,
    /// Offset of the snapshot table.
    pub snapshots_offset: u64,
    /// Incompatible feature bits: an implementation that does not support one of them must not open the image.
    pub incompatible: u64,
    /// Compatible feature bits: an implementation may ignore unknown ones.
    pub compatible: u64,
    /// Autoclear feature bits: a writer clears unknown ones.
    pub autoclear: u64,
    /// Name of the external data file, as stored.
    pub data_file: Option<String>,
    /// Compression algorithm of compressed clusters.
    pub compression: Compression,
    /// Persistent bitmaps. `None` also if their autoclear bit is clear: their clusters are then leaks.
    pub bitmaps: Option<Bitmaps>,
    /// Random identity that the image got when it was created.
    pub identity: Option<u128>,
}

/// Returns true if a file begins with the qcow2 magic.
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
    /// The storage does not contain a qcow2 image, or the header is invalid or has unsupported features.
    pub fn read(storage: &impl Storage) -> Result<Header> {
        let mut fixed = [0; HEADER_BYTES];
        storage
            .read_at(0, &mut fixed)
            .map_err(io("cannot read the header"))?;
        if !is_qcow2(&fixed) {
            return Err(Error::Unsupported("it is not a qcow2 image".to_owned()));
        }
        let cluster_bits = be32(&fixed, 20);
        if !(9..=21).contains(&cluster_bits) {
            return corrupt(format!(
                "invalid cluster size 2^{cluster_bits} bytes: it must be 2^9 to 2^21"
            ));
        }
        let mut head = vec![0; (1 << cluster_bits).clamp(HEADER_BYTES, HEAD_BYTES_MAX)];
        storage
            .read_at(0, &mut head)
            .map_err(io("cannot read the header"))?;
        let header = Header::decode(&head)?;
        header.check(
            storage
                .size()
                .map_err(io("cannot read the size of the file"))?,
        )?;
        Ok(header)
    }

    fn decode(head: &[u8]) -> Result<Header> {
        let version = be32(head, 4);
        if !matches!(version, 2 | 3) {
            return Err(Error::Unsupported(format!(
                "unsupported version {version} of the format; supported are 2 and 3"
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
                "the image is encrypted ({method}), which is not supported; hint: make a plain copy with qemu-img convert"
            )));
        }
        let header_bytes = if is_3 {
            u64::from(be32(head, 100))
        } else {
            VERSION_2_BYTES
        };
        if is_3 && (header_bytes < 104 || !header_bytes.is_multiple_of(8)) {
            return corrupt(format!("invalid header length {header_bytes} bytes"));
        }
        let compression = match head[104] {
            _ if incompatible & COMPRESSION_TYPE == 0 => Compression::Zlib,
            0 => Compression::Zlib,
            1 => Compression::Zstd,
            other => {
                return Err(Error::Unsupported(format!(
                    "unsupported compression type {other}"
                )));
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
            identity: None,
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
                EXTENSION_IDENTITY => {
                    self.identity = bytes.try_into().ok().map(u128::from_be_bytes);
                }
                _ => {}
            }
            at += 8 + length.next_multiple_of(8);
        }
        Ok(())
    }

    /// Returns the cluster size in bytes.
    pub fn cluster_bytes(&self) -> u64 {
        1 << self.cluster_bits
    }

    /// Returns true if this version has the zero flag in L2 entries.
    pub fn has_zero_flag(&self) -> bool {
        self.version >= 3
    }

    /// Returns true if the image has extended L2 entries (32 subclusters per cluster).
    pub fn has_subclusters(&self) -> bool {
        self.incompatible & EXTENDED_L2 != 0
    }

    /// Returns the allocation unit in bytes: a subcluster, or a cluster if there are no subclusters.
    pub fn subcluster_bytes(&self) -> u64 {
        match self.has_subclusters() {
            true => self.cluster_bytes() >> subclusters::BITS,
            false => self.cluster_bytes(),
        }
    }

    /// Returns the number of 64-bit words of an L2 entry.
    pub(crate) fn entry_words(&self) -> usize {
        1 + usize::from(self.has_subclusters())
    }

    /// Decodes an entry, or the first word of an extended entry.
    pub(crate) fn decode_entry(&self, entry: u64) -> L2Entry {
        self.entry_format().decode(entry)
    }

    pub(crate) fn entry_format(&self) -> EntryFormat {
        EntryFormat {
            cluster_bits: self.cluster_bits,
            // Extended entries have zero bits in their second word instead.
            has_zeroes: self.has_zero_flag() && !self.has_subclusters(),
            has_data_file: self.has_data_file(),
        }
    }

    /// Returns whether the image is marked as corrupt.
    pub fn is_corrupt(&self) -> bool {
        self.incompatible & CORRUPT != 0
    }

    /// Returns true if the data is in an external data file, each cluster at its guest offset.
    pub fn has_data_file(&self) -> bool {
        self.incompatible & DATA_FILE != 0
    }

    /// Returns true if the data file is also a valid raw disk.
    pub fn is_data_file_raw(&self) -> bool {
        self.has_data_file() && self.autoclear & RAW_DATA_FILE != 0
    }

    /// Returns the number of bytes that one L2 table maps.
    pub(crate) fn l2_span(&self) -> u64 {
        self.cluster_bytes() << (self.cluster_bits - 3 - u32::from(self.has_subclusters()))
    }

    /// Validates offsets and sizes; `file` is the size of the storage.
    fn check(&self, file: u64) -> Result<()> {
        let cluster = self.cluster_bytes();
        let lies = |structure: &str, offset: u64, bytes: u64| {
            let end = offset.checked_add(bytes);
            if offset == 0 || !offset.is_multiple_of(cluster) || end.is_none_or(|end| end > file) {
                return corrupt(format!(
                    "the {structure} has an invalid location: offset {offset}, {bytes} bytes, in a file of {file} bytes"
                ));
            }
            Ok(())
        };
        if self.refcount_order > 6 {
            return corrupt(format!(
                "invalid reference count width 2^{} bits",
                self.refcount_order
            ));
        }
        if self.size > i64::MAX as u64 || !self.size.is_multiple_of(512) {
            return corrupt(format!("invalid disk size {} bytes", self.size));
        }
        if self.has_subclusters() && self.cluster_bits < EXTENDED_CLUSTER_BITS_MIN {
            return corrupt(format!(
                "extended L2 entries are invalid with clusters of {} bytes",
                self.cluster_bytes()
            ));
        }
        let needed = self.size.div_ceil(self.l2_span());
        let l1_bytes = u64::from(self.l1_entries) * 8;
        if needed > u64::from(self.l1_entries) || l1_bytes > L1_BYTES_MAX {
            return corrupt(format!(
                "invalid L1 table of {} entries for a disk of {} bytes",
                self.l1_entries, self.size
            ));
        }
        if self.l1_entries > 0 {
            lies("L1 table", self.l1_offset, l1_bytes)?;
        }
        let table_bytes = u64::from(self.refcount_table_clusters) * cluster;
        if table_bytes == 0 || table_bytes > REFCOUNT_TABLE_BYTES_MAX {
            return corrupt(format!("invalid refcount table of {table_bytes} bytes"));
        }
        lies("refcount table", self.refcount_table_offset, table_bytes)?;
        if self.snapshots > SNAPSHOTS_MAX {
            return corrupt(format!("too many snapshots: {}", self.snapshots));
        }
        if self.snapshots > 0 && self.has_data_file() {
            return corrupt("it has both internal snapshots and an external data file");
        }
        if self.is_data_file_raw() && self.backing_file.is_some() {
            return corrupt("it has both a backing image and data_file_raw");
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
            "the image has unknown incompatible features (bits {:#x})",
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
            "the backing file's name has an invalid location: offset {at}, {length} bytes"
        ));
    };
    match std::str::from_utf8(name) {
        Ok(name) => Ok(Some(name.to_owned())),
        Err(_) => Err(Error::Unsupported(
            "the backing file's name is not UTF-8; hint: set another name with qemu-img rebase -u"
                .to_owned(),
        )),
    }
}
