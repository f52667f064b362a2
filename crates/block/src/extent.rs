//! Allocation state of a range of a disk.

use std::ops::Range;

/// Allocation state of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allocation {
    /// Not allocated: reads as zeroes; a write must allocate space.
    Hole,
    /// Allocated without data: reads as zeroes; a write has its space.
    Reserved,
    /// Allocated, may contain data other than zeroes.
    Data,
}

/// A range with one allocation state, from a requested offset to `end`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Allocation state.
    pub allocation: Allocation,
    /// End of the range (exclusive), beyond the offset. The next extent may have the same state.
    pub end: u64,
}

impl Extent {
    /// The extent that is correct for every disk: data up to the end.
    pub const UNKNOWN: Extent = Extent::data(u64::MAX);

    /// Creates an unallocated extent up to `end`.
    pub const fn hole(end: u64) -> Extent {
        Extent {
            allocation: Allocation::Hole,
            end,
        }
    }

    /// Creates an allocated extent without data up to `end`.
    pub const fn reserved(end: u64) -> Extent {
        Extent {
            allocation: Allocation::Reserved,
            end,
        }
    }

    /// Creates an extent of possible data up to `end`.
    pub const fn data(end: u64) -> Extent {
        Extent {
            allocation: Allocation::Data,
            end,
        }
    }
}

/// Buffer size of a block status I/O in bytes.
pub const STATUS_BYTES: usize = 4096;

/// Bytes of an encoded extent: its end and the number of its state, little-endian.
const EXTENT_BYTES: usize = 16;

/// Maximum number of extents in one block status I/O.
pub const EXTENTS_MAX: usize = STATUS_BYTES / EXTENT_BYTES;

/// Encodes the extents of a range from its first byte, in the buffer format of a block status I/O. `extent_at` returns the
/// extent at a byte and is called at most [`EXTENTS_MAX`] times. Adjacent extents of the same state are merged; zeroes
/// follow the last one.
pub fn encode_extents(range: Range<u64>, mut extent_at: impl FnMut(u64) -> Extent) -> Vec<u8> {
    let mut extents: Vec<Extent> = Vec::new();
    let mut at = range.start;
    for _ in 0..EXTENTS_MAX {
        if at >= range.end {
            break;
        }
        let found = extent_at(at);
        let end = found.end.clamp(at + 1, range.end);
        match extents.last_mut() {
            Some(last) if last.allocation == found.allocation => last.end = end,
            _ => extents.push(Extent { end, ..found }),
        }
        at = end;
    }
    let mut bytes: Vec<u8> = extents.iter().flat_map(Extent::encode).collect();
    bytes.resize(STATUS_BYTES, 0);
    bytes
}

/// Decodes the output of [`encode_extents`], up to the first invalid entry.
pub fn decode_extents(bytes: &[u8]) -> impl Iterator<Item = Extent> {
    bytes.chunks_exact(EXTENT_BYTES).map_while(Extent::decode)
}

impl Extent {
    fn encode(&self) -> [u8; EXTENT_BYTES] {
        let number: u64 = match self.allocation {
            Allocation::Hole => 1,
            Allocation::Reserved => 2,
            Allocation::Data => 3,
        };
        let mut bytes = [0; EXTENT_BYTES];
        bytes[..8].copy_from_slice(&self.end.to_le_bytes());
        bytes[8..].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Extent> {
        let (end, number) = bytes.split_first_chunk::<8>()?;
        let allocation = match number.first()? {
            1 => Allocation::Hole,
            2 => Allocation::Reserved,
            3 => Allocation::Data,
            _ => return None,
        };
        let end = u64::from_le_bytes(*end);
        Some(Extent { allocation, end })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extents(range: Range<u64>, map: &[Extent]) -> Vec<Extent> {
        let at = |offset| *map.iter().find(|extent| offset < extent.end).unwrap();
        let bytes = encode_extents(range, at);
        assert_eq!(bytes.len(), STATUS_BYTES);
        decode_extents(&bytes).collect()
    }

    #[test]
    fn extents_are_cut_to_the_range_and_neighbours_joined() {
        let map = [
            Extent::hole(10),
            Extent::data(20),
            Extent::data(30),
            Extent::reserved(40),
            Extent::hole(u64::MAX),
        ];
        let found = extents(5..100, &map);
        let expected = [
            Extent::hole(10),
            Extent::data(30),
            Extent::reserved(40),
            Extent::hole(100),
        ];
        assert_eq!(found, expected);
        assert_eq!(extents(15..16, &map), [Extent::data(16)]);
        assert_eq!(extents(15..15, &map), []);
    }

    #[test]
    fn extents_are_limited_by_the_buffer() {
        let at = |offset: u64| match offset % 2 {
            0 => Extent::hole(offset + 1),
            _ => Extent::data(offset + 1),
        };
        let bytes = encode_extents(0..1000, at);
        assert_eq!(decode_extents(&bytes).count(), 256);
        assert_eq!(decode_extents(&bytes).last(), Some(Extent::data(256)));
    }

    /// A device that reports an empty extent would otherwise be queried for the same byte endlessly.
    #[test]
    fn an_extent_that_ends_where_it_begins_is_one_byte() {
        let bytes = encode_extents(0..3, Extent::data);
        assert_eq!(
            decode_extents(&bytes).collect::<Vec<_>>(),
            [Extent::data(3)]
        );
    }
}
