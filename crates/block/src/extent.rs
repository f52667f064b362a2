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
    /// Number of the layer that has the bytes: 1 is the disk itself, 2 its backing image, and so on. 0: no layer has them.
    pub depth: u8,
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
            depth: 0,
            end,
        }
    }

    /// Creates an allocated extent without data up to `end`.
    pub const fn reserved(end: u64) -> Extent {
        Extent {
            allocation: Allocation::Reserved,
            depth: 1,
            end,
        }
    }

    /// Creates an extent of possible data up to `end`.
    pub const fn data(end: u64) -> Extent {
        Extent {
            allocation: Allocation::Data,
            depth: 1,
            end,
        }
    }

    /// Creates an extent of zeroes up to `end` that hides the backing image.
    pub const fn zeroes(end: u64) -> Extent {
        Extent {
            depth: 1,
            ..Extent::hole(end)
        }
    }

    /// Returns the extent as seen through one more layer above it.
    #[must_use]
    pub const fn below(self) -> Extent {
        Extent {
            depth: match self.depth {
                0 => 0,
                depth => depth.saturating_add(1),
            },
            ..self
        }
    }
}

/// Buffer size of a block status I/O in bytes.
pub const STATUS_BYTES: usize = 4096;

/// Bytes of an encoded extent: its end, the number of its state, and its depth, little-endian.
pub const EXTENT_BYTES: usize = 16;

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
            Some(last) if is_same(last, &found) => last.end = end,
            _ => extents.push(Extent { end, ..found }),
        }
        at = end;
    }
    let mut bytes: Vec<u8> = extents.iter().flat_map(Extent::encode).collect();
    bytes.resize(STATUS_BYTES, 0);
    bytes
}

fn is_same(one: &Extent, other: &Extent) -> bool {
    (one.allocation, one.depth) == (other.allocation, other.depth)
}

/// Decodes the output of [`encode_extents`], up to the first invalid entry.
pub fn decode_extents(bytes: &[u8]) -> impl Iterator<Item = Extent> {
    bytes.chunks_exact(EXTENT_BYTES).map_while(Extent::decode)
}

/// Applies [`Extent::below`] to the output of [`encode_extents`].
pub fn move_extents_below(bytes: &mut [u8]) {
    for one in bytes.chunks_exact_mut(EXTENT_BYTES) {
        let Some(extent) = Extent::decode(one) else {
            return;
        };
        one.copy_from_slice(&extent.below().encode());
    }
}

impl Extent {
    fn encode(&self) -> [u8; EXTENT_BYTES] {
        let number: u8 = match self.allocation {
            Allocation::Hole => 1,
            Allocation::Reserved => 2,
            Allocation::Data => 3,
        };
        let mut bytes = [0; EXTENT_BYTES];
        bytes[..8].copy_from_slice(&self.end.to_le_bytes());
        bytes[8] = number;
        bytes[9] = self.depth;
        bytes
    }

    fn decode(bytes: &[u8]) -> Option<Extent> {
        let (end, state) = bytes.split_first_chunk::<8>()?;
        let allocation = match state.first()? {
            1 => Allocation::Hole,
            2 => Allocation::Reserved,
            3 => Allocation::Data,
            _ => return None,
        };
        Some(Extent {
            allocation,
            depth: *state.get(1)?,
            end: u64::from_le_bytes(*end),
        })
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
    fn extents_of_different_layers_are_separate() {
        let map = [
            Extent::zeroes(10),
            Extent::hole(20),
            Extent::data(30),
            Extent::data(40).below(),
        ];
        let at = |offset| *map.iter().find(|extent| offset < extent.end).unwrap();
        let mut bytes = encode_extents(0..40, at);
        assert_eq!(decode_extents(&bytes).collect::<Vec<_>>(), map);
        move_extents_below(&mut bytes);
        let depths: Vec<u8> = decode_extents(&bytes).map(|one| one.depth).collect();
        assert_eq!(depths, [2, 0, 2, 3]);
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
