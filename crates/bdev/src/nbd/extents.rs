//! Block status of an export, from the extents of `base:allocation`.

use std::ops::Range;

use block::{Allocation, EXTENTS_MAX, Extent, IoRequest, encode_extents};
use nbd::reply::Descriptor;
use nbd::wire::allocation;

/// Maximum range of one request in bytes.
pub(super) const RANGE_MAX: u64 = 1 << 30;
/// The range of one request does not shrink below this, in bytes.
const RANGE_MIN: u64 = 1 << 20;

/// Returns the maximum range of the next request after a reply with `count` extents. An I/O uses [`EXTENTS_MAX`] of them, and some servers
/// examine the whole range for each reply.
pub(super) fn next_span(span: u64, count: usize) -> u64 {
    match count > 2 * EXTENTS_MAX {
        true => (span / 4).max(RANGE_MIN),
        false => (span * 2).min(RANGE_MAX),
    }
}

/// Returns the range to request for a block status I/O: whole blocks of the server. `span`: the maximum range.
pub(super) fn requested(io: &IoRequest, span: u64, alignment: u64, capacity: u64) -> Range<u64> {
    let start = io.offset - io.offset % alignment;
    let end = io.offset + io.length.min(span);
    let end = end
        .next_multiple_of(alignment)
        .min(capacity - capacity % alignment);
    start..end.max(start)
}

/// Encodes extents that begin at `start` as the answer to an I/O. Only zeroes are holes: the content of other unallocated blocks is undefined.
pub(super) fn answer(io: &IoRequest, start: u64, descriptors: &[Descriptor]) -> Vec<u8> {
    // The state of blocks and the end of each run of one state: an answer has few extents.
    let mut runs: Vec<(u64, Allocation)> = Vec::new();
    let mut end = start;
    for one in descriptors {
        end = end.saturating_add(one.length);
        let state = allocation(one.flags);
        match runs.last_mut() {
            Some(run) if run.1 == state => run.0 = end,
            _ => runs.push((end, state)),
        }
    }
    let last = io.offset + io.length;
    // Bytes without an extent are not described, except that the first one must be.
    let known = match end > io.offset {
        true => end.min(last),
        false => last,
    };
    encode_extents(io.offset..known, |offset| {
        let at = runs.partition_point(|(end, _)| *end <= offset);
        match runs.get(at) {
            None => Extent::UNKNOWN,
            Some(&(end, Allocation::Hole)) => Extent::hole(end),
            Some(&(end, Allocation::Reserved)) => Extent::reserved(end),
            Some(&(end, Allocation::Data)) => Extent::data(end),
        }
    })
}

fn allocation(flags: u32) -> Allocation {
    let has = |flag| flags & flag != 0;
    match (has(allocation::ZERO), has(allocation::HOLE)) {
        (false, _) => Allocation::Data,
        (true, false) => Allocation::Reserved,
        (true, true) => Allocation::Hole,
    }
}

#[cfg(test)]
mod tests {
    use block::decode_extents;

    use super::*;

    fn answered(io: &IoRequest, start: u64, extents: &[(u64, u32)]) -> Vec<Extent> {
        let extents = extents.iter().copied();
        let descriptors: Vec<Descriptor> = extents
            .map(|(length, flags)| Descriptor { length, flags })
            .collect();
        decode_extents(&answer(io, start, &descriptors)).collect()
    }

    #[test]
    fn only_zeroes_are_holes() {
        let io = IoRequest::block_status(0, 50);
        let extents = [(10, 0), (10, 1), (10, 2), (10, 3), (10, 4)];
        let expected = [
            Extent::data(20),
            Extent::reserved(30),
            Extent::hole(40),
            Extent::data(50),
        ];
        assert_eq!(answered(&io, 0, &extents), expected);
    }

    #[test]
    fn missing_extents_are_data_or_not_described() {
        let io = IoRequest::block_status(4608, 8192);
        assert_eq!(answered(&io, 4096, &[]), [Extent::data(12_800)]);
        assert_eq!(answered(&io, 4096, &[(512, 3)]), [Extent::data(12_800)]);
        assert_eq!(answered(&io, 4096, &[(1024, 3)]), [Extent::hole(5120)]);
        let long = answered(&io, 4096, &[(u64::MAX, 3), (u64::MAX, 0)]);
        assert_eq!(long, [Extent::hole(12_800)]);
    }

    #[test]
    fn requests_have_whole_blocks_of_the_server() {
        let io = IoRequest::block_status(4608, 512);
        assert_eq!(requested(&io, RANGE_MAX, 4096, 1 << 20), 4096..8192);
        assert_eq!(requested(&io, RANGE_MAX, 512, 1 << 20), 4608..5120);
        let all = IoRequest::block_status(0, 1 << 40);
        assert_eq!(requested(&all, RANGE_MAX, 65_536, 1 << 40), 0..1 << 30);
        assert_eq!(requested(&all, RANGE_MIN, 65_536, 1 << 40), 0..1 << 20);
    }

    #[test]
    fn range_shrinks_while_replies_have_many_unused_extents() {
        let mut span = RANGE_MAX;
        for expected in [1 << 28, 1 << 26, 1 << 24, 1 << 22, 1 << 20, 1 << 20] {
            span = next_span(span, 2 * EXTENTS_MAX + 1);
            assert_eq!(span, expected);
        }
        assert_eq!(next_span(span, 2 * EXTENTS_MAX), 1 << 21);
        assert_eq!(next_span(RANGE_MAX, 1), RANGE_MAX);
    }
}
