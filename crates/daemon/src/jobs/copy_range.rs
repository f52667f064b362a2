//! Copies a range between devices that no other I/O changes there. The job shows an I/O on the target that takes long.

use std::io;

use bdev::BlockingIo;
use block::{Allocation, Extent, IoFlags, IoRequest};

use super::Job;

/// Bytes copied per step. Clients of a mirror wait for a step that overlaps their I/O.
pub(super) const PART: u64 = 1 << 20;

/// Returns the end of the hole at `from`, if there is one.
pub(super) fn hole_at(source: &mut BlockingIo, from: u64, total: u64) -> Option<u64> {
    let extents = source.block_status(from, total - from).ok()?;
    let first: &Extent = extents.first()?;
    let is_hole = first.allocation != Allocation::Data;
    is_hole.then(|| first.end.min(total))
}

/// Beginnings of the errors of [`copy_range`].
pub(super) const CANNOT_READ: &str = "cannot read the disk";
pub(super) const CANNOT_WRITE: &str = "cannot write to the target";

fn at_end(end: &str, at: u64, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{end}: at byte {at}: {error}"))
}

/// Runs an I/O on the target. The job shows it if it takes long.
pub(super) fn on_target<T>(job: &Job, io: impl FnOnce() -> T) -> T {
    job.waits_for_target(true);
    let done = io();
    job.waits_for_target(false);
    done
}

/// Copies a range that the caller holds. Returns the bytes copied, 0 for a hole.
pub(super) fn copy_range(
    job: &Job,
    source: &mut BlockingIo,
    target: &mut BlockingIo,
    from: u64,
    end: u64,
) -> io::Result<u64> {
    if hole_at(source, from, end) == Some(end) {
        let zeroes = IoRequest::write_zeroes(from, end - from).flagged(IoFlags::UNMAP);
        match on_target(job, || target.run_plain(&zeroes)) {
            Ok(()) => return Ok(0),
            // The write is still in flight.
            Err(error) if error.kind() == io::ErrorKind::TimedOut => {
                return Err(at_end(CANNOT_WRITE, from, &error));
            }
            // A target without this operation receives zeroes as data.
            Err(_) => {}
        }
    }
    let mut at = from;
    let mut bytes = vec![0; PART.min(end - from) as usize];
    while at < end {
        let length = PART.min(end - at) as usize;
        let read = source.read_at(at, &mut bytes[..length]);
        read.map_err(|error| at_end(CANNOT_READ, at, &error))?;
        let written = on_target(job, || target.write_at(at, &bytes[..length]));
        written.map_err(|error| at_end(CANNOT_WRITE, at, &error))?;
        at += length as u64;
    }
    Ok(end - from)
}
