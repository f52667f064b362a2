//! Prefetch hints: announces the next I/Os of a batch to their disks, while an earlier one is submitted.

use bdev::{PREFETCH_DISTANCE, Prefetch};
use reactor::{Io, Job};

/// Sends hints for two requests of `following`, which are submitted after the present one: for the next request, and for the one at
/// [`PREFETCH_DISTANCE`]. `job` returns the I/O of a request, or `None` if it gets no hint. The caller checks [`Io::wants_prefetch`] once
/// per batch.
#[inline(always)]
pub fn prefetch_following<T: Copy>(
    io: &mut Io,
    following: &[T],
    mut job: impl FnMut(&mut Io, T) -> Option<Job>,
) {
    let distant = following.get(PREFETCH_DISTANCE - 1);
    for (request, soon) in [
        (following.first(), Prefetch::Next),
        (distant, Prefetch::Later),
    ] {
        if let Some(request) = request
            && let Some(Job {
                disk,
                io: announced,
            }) = job(io, *request)
        {
            io.prefetch(disk, &announced, soon);
        }
    }
}
