//! Block status of requests: memory for the extents of their I/Os, and the descriptors of each metadata context.
//!
//! One I/O on the disk finds a limited number of extents. A request is answered after as many I/Os as its memory has room for, because some
//! clients expect the status of their whole range in one reply.

use bdev::FrozenBitmap;
use block::{Allocation, EXTENT_BYTES, Extent, STATUS_BYTES, decode_extents};
use guest_memory::IoBuffer;
use nbd::reply::Descriptor;
use nbd::wire::{DIRTY, allocation};

/// Minimum size of an extent on most disks: a block of a file system.
const EXTENT_MIN: u64 = 4096;
/// Maximum memory for the extents of one request: 65,280 extents and one more I/O.
const MEMORY_MAX: usize = 1 << 20;
/// Maximum number of I/Os for one request. Clients request the rest.
pub(crate) const IOS_MAX: u32 = 1024;
/// A connection answers no further request in an iteration after replies with this many extents.
pub(crate) const EXTENTS_PER_ITERATION: usize = 1024;
/// Maximum number of extents of a dirty bitmap in one reply. Clients request the rest.
const DIRTY_EXTENTS_MAX: usize = 1 << 16;
/// Maximum range of a dirty bitmap in one reply, in bytes. Bounds the number of bits that a worker examines.
const DIRTY_SPAN_MAX: u64 = 64 << 30;

/// Returns the memory for the extents of a range. `one`: the reply has one extent.
pub(crate) fn memory(length: u64, one: bool) -> usize {
    if one {
        return STATUS_BYTES;
    }
    let extents = usize::try_from(length / EXTENT_MIN).unwrap_or(usize::MAX);
    STATUS_BYTES.saturating_add(bytes(extents)).min(MEMORY_MAX)
}

/// Returns the memory of this number of extents.
pub(crate) fn bytes(extents: usize) -> usize {
    extents.saturating_mul(EXTENT_BYTES)
}

/// Returns true if the memory has room for one more I/O.
pub(crate) fn has_memory(extents: usize, memory: usize) -> bool {
    bytes(extents) + STATUS_BYTES <= memory
}

/// Returns the number of extents that an I/O has found, and the end of the last one. `extents`: the number of those before.
pub(crate) fn found(buffer: &IoBuffer, extents: usize) -> Option<(usize, u64)> {
    let mut encoded = [0; STATUS_BYTES];
    buffer.read_whole(bytes(extents), &mut encoded);
    let (index, last) = decode_extents(&encoded).enumerate().last()?;
    Some((index + 1, last.end))
}

/// Returns the extents of a request.
pub(crate) fn all(buffer: &IoBuffer, extents: usize) -> Vec<Extent> {
    let mut encoded = vec![0; bytes(extents)];
    buffer.read_whole(0, &mut encoded);
    decode_extents(&encoded).collect()
}

/// Range of a block status, in bytes.
pub(crate) struct Range {
    pub offset: u64,
    pub length: u64,
    /// Minimum block size.
    pub block: u64,
}

/// Returns the extents of a dirty bitmap. `one`: the first one only.
pub(crate) fn dirty(range: &Range, bits: &FrozenBitmap, one: bool) -> Vec<Descriptor> {
    let end = range.offset + range.length.min(DIRTY_SPAN_MAX);
    let most = if one { 1 } else { DIRTY_EXTENTS_MAX };
    let (mut at, mut descriptors) = (range.offset, Vec::new());
    while at < end && descriptors.len() < most {
        let (until, is_dirty) = bits.piece(at, end);
        descriptors.push(Descriptor {
            length: until - at,
            flags: if is_dirty { DIRTY } else { 0 },
        });
        at = until;
    }
    descriptors
}

/// Returns the extents of `base:allocation`. A block with pieces of several extents is data if one of them is.
pub(crate) fn allocation(range: &Range, extents: &[Extent]) -> Vec<Descriptor> {
    let flags = |extent: &Extent| match extent.allocation {
        Allocation::Hole => allocation::HOLE | allocation::ZERO,
        Allocation::Reserved => allocation::ZERO,
        Allocation::Data => 0,
    };
    // The standard allows the status "data" for every range.
    descriptors(range, extents, flags, |one, other| one & other, 0)
}

/// Returns the extents of `qemu:allocation-depth`. A block with pieces of several extents is of the first layer that has one of them.
pub(crate) fn depth(range: &Range, extents: &[Extent]) -> Vec<Descriptor> {
    let first = |one: u32, other: u32| match (one, other) {
        (0, depth) | (depth, 0) => depth,
        (one, other) => one.min(other),
    };
    descriptors(range, extents, |extent| extent.depth.into(), first, 1)
}

/// Converts extents to those of a context, with whole blocks. `flags_of` returns the flags of an extent, `combined` those of a block with
/// pieces of two extents. `unknown`: the flags without extents.
fn descriptors(
    range: &Range,
    extents: &[Extent],
    flags_of: impl Fn(&Extent) -> u32,
    combined: impl Fn(u32, u32) -> u32,
    unknown: u32,
) -> Vec<Descriptor> {
    let end = range.offset + range.length;
    let mut at = range.offset;
    let mut whole = Descriptors {
        at,
        list: Vec::new(),
    };
    // Flags of the pieces of the block that begins at `whole.at`, if it has some.
    let mut pieces: Option<u32> = None;
    for extent in extents {
        let until = extent.end.min(end);
        if until <= at {
            break;
        }
        at = until;
        let flags = flags_of(extent);
        if let Some(of_pieces) = &mut pieces {
            *of_pieces = combined(*of_pieces, flags);
            let block_end = whole.at.saturating_add(range.block).min(end);
            if until < block_end {
                continue;
            }
            whole.push(block_end, *of_pieces);
        }
        let last = if until == end {
            end
        } else {
            until - until % range.block
        };
        whole.push(last, flags);
        pieces = (until > whole.at).then_some(flags);
    }
    if whole.list.is_empty() {
        whole.push(end, unknown);
    }
    whole.list
}

/// Adjacent extents, up to `at`.
struct Descriptors {
    at: u64,
    list: Vec<Descriptor>,
}

impl Descriptors {
    /// Adds an extent, unless it is empty. Extents with equal flags are merged.
    fn push(&mut self, end: u64, flags: u32) {
        let length = end.saturating_sub(self.at);
        if length == 0 {
            return;
        }
        self.at = end;
        match self.list.last_mut() {
            Some(last) if last.flags == flags => last.length += length,
            _ => self.list.push(Descriptor { length, flags }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::encode_extents;

    fn range(offset: u64, length: u64) -> Range {
        Range {
            offset,
            length,
            block: 512,
        }
    }

    fn pairs(descriptors: &[Descriptor]) -> Vec<(u64, u32)> {
        let pairs = descriptors.iter();
        pairs.map(|one| (one.length, one.flags)).collect()
    }

    #[test]
    fn extents_are_clipped_and_merged() {
        let extents = [
            Extent::hole(4096),
            Extent::data(8192),
            Extent::reserved(u64::MAX),
        ];
        let range = range(1024, 64512);
        let found = pairs(&allocation(&range, &extents));
        assert_eq!(found, [(3072, 3), (4096, 0), (57344, 2)]);
        assert_eq!(pairs(&allocation(&range, &[])), [(64512, 0)]);
        assert_eq!(pairs(&depth(&range, &extents)), [(3072, 0), (61440, 1)]);
        assert_eq!(pairs(&depth(&range, &[])), [(64512, 1)]);
    }

    #[test]
    fn depths_of_layers_are_separate_extents() {
        let extents = [
            Extent::data(4096),
            Extent::data(8192).below(),
            Extent::data(8448).below().below(),
            Extent::hole(9216).below(),
            Extent::hole(u64::MAX),
        ];
        let range = range(0, 16384);
        assert_eq!(pairs(&allocation(&range, &extents)), [(8704, 0), (7680, 3)]);
        let found = pairs(&depth(&range, &extents));
        assert_eq!(found, [(4096, 1), (4096, 2), (512, 3), (7680, 0)]);
    }

    #[test]
    fn memory_grows_with_the_range() {
        assert_eq!(memory(512, false), STATUS_BYTES);
        assert_eq!(memory(u64::MAX, true), STATUS_BYTES);
        assert_eq!(memory(u64::MAX, false), MEMORY_MAX);
        let whole = memory(8 << 20, false);
        assert!(has_memory(2048, whole) && !has_memory(2049, whole));
    }

    /// Returns the flags that all bytes of a block have.
    fn flags_of_block(of: &impl Fn(u64) -> Extent, bytes: std::ops::Range<u64>) -> u32 {
        bytes.fold(3, |flags, at| {
            flags
                & match of(at).allocation {
                    Allocation::Hole => 3,
                    Allocation::Reserved => 2,
                    Allocation::Data => 0,
                }
        })
    }

    #[test]
    fn blocks_with_pieces_of_several_extents_have_common_flags() {
        const BLOCK: u64 = 512;
        let mut random = fastrand::Rng::with_seed(7);
        for _ in 0..2000 {
            // Extents with byte-granular ends, as an NBD server may report them.
            let mut ends = Vec::new();
            let mut at = 0;
            while at < 8192 {
                at += random.u64(1..1500);
                ends.push((at, random.u8(0..3)));
            }
            let of = |at: u64| {
                let (end, kind) = ends[ends.partition_point(|(end, _)| *end <= at)];
                match kind {
                    0 => Extent::hole(end),
                    1 => Extent::reserved(end),
                    _ => Extent::data(end),
                }
            };
            let bytes = encode_extents(1024..8192, of);
            let extents: Vec<Extent> = decode_extents(&bytes).collect();
            let found = allocation(&range(1024, 7168), &extents);
            let mut at = 1024;
            for one in &found {
                assert_eq!(one.length % BLOCK, 0);
                for block in (at..at + one.length).step_by(BLOCK as usize) {
                    let flags = flags_of_block(&of, block..block + BLOCK);
                    assert_eq!(one.flags, flags, "{ends:?} {found:?}");
                }
                at += one.length;
            }
            assert!(at <= 8192);
        }
    }
}
