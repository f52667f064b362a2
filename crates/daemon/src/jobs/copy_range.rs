//! Copies a range between devices that no other I/O changes there. The job shows an I/O on the target that takes long.

use std::fmt::Display;
use std::io;

use bdev::BlockingIo;
use block::{Allocation, Extent, IoFlags, IoRequest};
use jobs::range::RangeAction;
use jobs::{Event, Piece, Span};

use super::Job;

/// Returns the end of the hole at `from`, if there is one.
pub(super) fn hole_at(source: &mut BlockingIo, from: u64, total: u64) -> Option<u64> {
    let extents = source.block_status(from, total - from).ok()?;
    let first: &Extent = extents.first()?;
    let is_hole = first.allocation != Allocation::Data;
    is_hole.then(|| first.end.min(total))
}

/// Beginnings of the errors of [`RangeIo::execute`].
pub(super) const CANNOT_READ: &str = "cannot read the disk";
pub(super) const CANNOT_WRITE: &str = "cannot write to the target";

/// Runs an I/O on the target. The job shows it if it takes long.
pub(super) fn on_target<T>(job: &Job, io: impl FnOnce() -> T) -> T {
    job.waits_for_target(true);
    let done = io();
    job.waits_for_target(false);
    done
}

/// Returns the event of an action without a value.
pub(super) fn result(done: Result<(), impl Display>) -> Event {
    match done {
        Ok(()) => Event::Done,
        Err(error) => Event::Failed(error.to_string()),
    }
}

/// The copier's channels of both devices, with the data between a read and its write.
pub(super) struct RangeIo {
    source: BlockingIo,
    target: BlockingIo,
    bytes: Vec<u8>,
}

impl RangeIo {
    pub fn new(source: BlockingIo, target: BlockingIo) -> RangeIo {
        RangeIo {
            source,
            target,
            bytes: Vec::new(),
        }
    }

    pub fn source(&mut self) -> &mut BlockingIo {
        &mut self.source
    }

    /// Executes an action of a job that copies. The driver lists pieces.
    pub fn execute(&mut self, job: &Job, action: RangeAction) -> Event {
        let (end, at, done) = match action {
            RangeAction::Pieces(Span { end, .. }) => {
                return Event::Pieces(vec![Piece { end, is_data: true }]);
            }
            RangeAction::Status(Span { from, end }) => {
                let hole = hole_at(&mut self.source, from, end);
                return Event::Piece(Piece {
                    end: hole.unwrap_or(end),
                    is_data: hole.is_none(),
                });
            }
            RangeAction::Zero(Span { from, end }) => {
                let zeroes = IoRequest::write_zeroes(from, end - from).flagged(IoFlags::UNMAP);
                let done = on_target(job, || self.target.run_plain(&zeroes));
                (CANNOT_WRITE, from, done)
            }
            RangeAction::Read(Span { from, end }) => {
                self.bytes.resize((end - from) as usize, 0);
                (
                    CANNOT_READ,
                    from,
                    self.source.read_at(from, &mut self.bytes),
                )
            }
            RangeAction::Write(Span { from, .. }) => {
                let done = on_target(job, || self.target.write_at(from, &self.bytes));
                (CANNOT_WRITE, from, done)
            }
        };
        match done {
            Ok(()) => Event::Done,
            Err(error) => {
                let reason = format!("{end}: at byte {at}: {error}");
                match error.kind() {
                    io::ErrorKind::TimedOut => Event::Abandoned(reason),
                    _ => Event::Failed(reason),
                }
            }
        }
    }
}
