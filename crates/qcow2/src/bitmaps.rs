//! Persistent bitmaps ("Bitmaps extension" in QEMU's docs/interop/qcow2.txt): the list, and the places of their directory, tables and data.
//! Their content is never read or written here.

use std::ops::Range;

use crate::header::{be32, be64};
use crate::refcounts::entries;
use crate::{Error, Header, Result, Storage, corrupt, io};

const EXTENSION_BYTES: usize = 24;
/// Limits as in QEMU.
const BITMAPS_MAX: u32 = 65_535;
const DIRECTORY_BYTES_MAX: u64 = BITMAPS_MAX as u64 * (ENTRY_BYTES as u64 + 1023);
/// Limit for the entries of all bitmap tables: 8 TiB of bitmaps in 64 KiB clusters.
const TABLE_ENTRIES_MAX: u64 = 1 << 27;
/// Size of the fixed part of a directory entry.
const ENTRY_BYTES: usize = 24;
/// Flags of a directory entry.
const IN_USE: u32 = 1;
const AUTO: u32 = 2;
/// The offset in an entry of a bitmap table.
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;
/// Unit for reading a bitmap table, in bytes.
const PIECE_BYTES: u64 = 1 << 20;

/// Bitmaps extension of the header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bitmaps {
    /// Number of bitmaps.
    pub count: u32,
    directory_offset: u64,
    directory_bytes: u64,
}

/// An entry of the bitmap directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bitmap {
    /// Name of the bitmap.
    pub name: String,
    /// Bytes of the disk for each bit.
    pub granularity: u64,
    /// The bitmap was not saved, and its content is invalid.
    pub is_in_use: bool,
    /// The bitmap records writes to the disk.
    pub is_enabled: bool,
}

/// Byte ranges of the image that bitmaps occupy.
#[derive(Debug, Default)]
pub(crate) struct Places {
    pub directory: Range<u64>,
    /// One range per bitmap.
    pub tables: Vec<Range<u64>>,
    pub bitmaps: Vec<Bitmap>,
}

impl Bitmap {
    fn decode(entry: &[u8], name: Range<usize>) -> Bitmap {
        let name = entry.get(name).unwrap_or_default();
        let flags = be32(entry, 12);
        Bitmap {
            name: String::from_utf8_lossy(name).into_owned(),
            granularity: 1_u64.checked_shl(entry[17].into()).unwrap_or(0),
            is_in_use: flags & IN_USE != 0,
            is_enabled: flags & AUTO != 0,
        }
    }
}

impl Bitmaps {
    /// Decodes the extension. An extension with a wrong length decodes to 0 bitmaps, which [`Bitmaps::places`] rejects.
    pub(crate) fn decode(extension: &[u8]) -> Bitmaps {
        let extension = match extension.len() {
            EXTENSION_BYTES => extension,
            _ => &[],
        };
        Bitmaps {
            count: be32(extension, 0),
            directory_bytes: be64(extension, 8),
            directory_offset: be64(extension, 16),
        }
    }

    /// Reads the list of bitmaps.
    ///
    /// # Errors
    /// The storage's, or the directory is damaged.
    pub fn list(&self, storage: &impl Storage, header: &Header) -> Result<Vec<Bitmap>> {
        Ok(self.places(storage, header)?.bitmaps)
    }

    /// Reads the directory.
    ///
    /// # Errors
    /// The storage failed, or the directory is damaged.
    pub(crate) fn places(&self, storage: &impl Storage, header: &Header) -> Result<Places> {
        let size = storage
            .size()
            .map_err(io("cannot read the size of the file"))?;
        let range = |structure: &str, offset: u64, bytes: u64| {
            let end = offset.checked_add(bytes).filter(|end| *end <= size);
            match end {
                Some(end) if offset > 0 && offset.is_multiple_of(header.cluster_bytes()) => {
                    Ok(offset..end)
                }
                _ => corrupt(format!(
                    "the {structure} has an invalid location: offset {offset:#x}, {bytes} bytes"
                )),
            }
        };
        if self.count == 0 || self.count > BITMAPS_MAX || self.directory_bytes > DIRECTORY_BYTES_MAX
        {
            return corrupt(format!(
                "invalid bitmap directory: {} bytes for {} bitmaps",
                self.directory_bytes, self.count
            ));
        }
        let directory = range(
            "bitmap directory",
            self.directory_offset,
            self.directory_bytes,
        )?;
        let mut bytes = vec![0; self.directory_bytes as usize];
        let read = storage.read_at(directory.start, &mut bytes);
        read.map_err(io("cannot read the bitmap directory"))?;
        let mut places = Places {
            directory,
            ..Places::default()
        };
        let (mut rest, mut all_entries) = (bytes.as_slice(), 0);
        for _ in 0..self.count {
            let short = |at: usize| (be32(rest, at) >> 16) as usize;
            let extra = be32(rest, 20) as usize;
            let name_at = ENTRY_BYTES.saturating_add(extra);
            let name_end = name_at.saturating_add(short(18));
            let length = name_end.checked_next_multiple_of(8).unwrap_or(usize::MAX);
            let Some((entry, others)) = rest.split_at_checked(length) else {
                return corrupt("the bitmap directory is shorter than its entries");
            };
            let table_entries = u64::from(be32(entry, 8));
            all_entries += table_entries;
            if all_entries > TABLE_ENTRIES_MAX {
                return corrupt("the bitmap tables have too many entries");
            }
            if table_entries > 0 {
                let table = range("bitmap table", be64(entry, 0), table_entries * 8)?;
                places.tables.push(table);
            }
            places
                .bitmaps
                .push(Bitmap::decode(entry, name_at..name_end));
            rest = others;
        }
        Ok(places)
    }

    /// Calls `found` with the offset of each cluster of bitmap data.
    ///
    /// # Errors
    /// The storage failed, or an entry is damaged.
    pub(crate) fn data(
        storage: &impl Storage,
        header: &Header,
        places: &Places,
        mut found: impl FnMut(u64),
    ) -> Result<()> {
        let size = storage
            .size()
            .map_err(io("cannot read the size of the file"))?;
        for table in &places.tables {
            let mut at = table.start;
            while at < table.end {
                let mut piece = vec![0; PIECE_BYTES.min(table.end - at) as usize];
                let read = storage.read_at(at, &mut piece);
                read.map_err(io("cannot read a bitmap table"))?;
                for entry in entries(&piece) {
                    let host = entry & OFFSET;
                    // Bit 0 without an offset: all bits are set, and no cluster is allocated.
                    let is_possible = match host {
                        0 => entry & !1 == 0,
                        host => {
                            entry == host
                                && host.is_multiple_of(header.cluster_bytes())
                                && host < size
                        }
                    };
                    if !is_possible {
                        return Err(Error::Corrupt(format!(
                            "an entry of a bitmap table is damaged: {entry:#x}"
                        )));
                    }
                    if host != 0 {
                        found(host);
                    }
                }
                at += piece.len() as u64;
            }
        }
        Ok(())
    }
}
