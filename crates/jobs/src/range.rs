//! Copies a range that the job holds: no client changes it meanwhile.

use std::time::Duration;

use crate::{Event, Piece, Span, unexpected};

/// Most bytes of one read and write.
pub const PART: u64 = 1 << 20;

/// I/O of the copier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeAction {
    /// Returns the pieces of a range ([`Event::Pieces`]). Pieces with data are copied. The target already has the others.
    Pieces(Span),
    /// Returns whether the source has data at `from`, and where that ends: [`Event::Piece`]. A failure counts as data.
    Status(Span),
    /// Writes zeroes to the target.
    Zero(Span),
    /// Reads from the source into the buffer.
    Read(Span),
    /// Writes the buffer to the target.
    Write(Span),
}

/// Result of [`RangeCopy::step`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RangeStep {
    /// Action to execute.
    Run(RangeAction),
    /// The target has the range. The number counts bytes written as data.
    Copied(u64),
    /// An I/O has failed for this reason.
    Failed(String),
}

#[derive(Clone, Copy, Debug)]
enum Stage {
    Pieces {
        from: u64,
        end: u64,
    },
    Status {
        from: u64,
        end: u64,
    },
    Zero {
        from: u64,
        end: u64,
    },
    /// Reads up to `to`; the piece ends at `end`.
    Read {
        from: u64,
        to: u64,
        end: u64,
    },
    Write {
        from: u64,
        to: u64,
        end: u64,
    },
}

/// A range that is being copied.
#[derive(Debug)]
pub struct RangeCopy {
    stage: Stage,
    /// Pieces that are still to do.
    rest: std::vec::IntoIter<Piece>,
    copied: u64,
}

impl RangeCopy {
    /// Copies the pieces of a range that the target lacks.
    pub fn pieces(from: u64, end: u64) -> (RangeCopy, RangeAction) {
        let copy = RangeCopy {
            stage: Stage::Pieces { from, end },
            rest: Vec::new().into_iter(),
            copied: 0,
        };
        (copy, RangeAction::Pieces(Span { from, end }))
    }

    /// Copies all of a range.
    pub fn whole(from: u64, end: u64) -> (RangeCopy, RangeAction) {
        let copy = RangeCopy {
            stage: Stage::Status { from, end },
            rest: Vec::new().into_iter(),
            copied: 0,
        };
        (copy, RangeAction::Status(Span { from, end }))
    }

    /// Processes the result of the last action.
    pub fn step(&mut self, event: Event) -> RangeStep {
        match (self.stage, event) {
            (Stage::Pieces { from, .. }, Event::Pieces(pieces)) => {
                self.rest = pieces.into_iter();
                self.next_piece(from)
            }
            (Stage::Status { from, end }, Event::Piece(piece))
                if !piece.is_data && piece.end >= end =>
            {
                self.run(Stage::Zero { from, end })
            }
            (Stage::Status { from, end }, Event::Piece(_) | Event::Failed(_)) => {
                self.read(from, end)
            }
            (Stage::Zero { end, .. }, Event::Done) => self.next_piece(end),
            // A target without this operation receives zeroes as data.
            (Stage::Zero { from, end }, Event::Failed(_)) => self.read(from, end),
            (Stage::Read { from, to, end }, Event::Done) => {
                self.run(Stage::Write { from, to, end })
            }
            (Stage::Write { from, to, end }, Event::Done) => {
                self.copied += to - from;
                match to < end {
                    true => self.read(to, end),
                    false => self.next_piece(end),
                }
            }
            (_, Event::Failed(reason) | Event::Abandoned(reason)) => RangeStep::Failed(reason),
            (stage, event) => unexpected(&stage, &event),
        }
    }

    fn read(&mut self, from: u64, end: u64) -> RangeStep {
        let to = end.min(from + PART);
        self.run(Stage::Read { from, to, end })
    }

    /// Continues with the first piece from `from` that the target lacks.
    fn next_piece(&mut self, mut from: u64) -> RangeStep {
        for Piece { end, is_data } in self.rest.by_ref() {
            if is_data {
                return self.run(Stage::Status { from, end });
            }
            from = end;
        }
        RangeStep::Copied(self.copied)
    }

    fn run(&mut self, stage: Stage) -> RangeStep {
        self.stage = stage;
        RangeStep::Run(match stage {
            Stage::Pieces { from, end } => RangeAction::Pieces(Span { from, end }),
            Stage::Status { from, end } => RangeAction::Status(Span { from, end }),
            Stage::Zero { from, end } => RangeAction::Zero(Span { from, end }),
            Stage::Read { from, to, .. } => RangeAction::Read(Span { from, end: to }),
            Stage::Write { from, to, .. } => RangeAction::Write(Span { from, end: to }),
        })
    }
}

/// Bytes of the first step over a hole.
const HOLE_MIN: u64 = 16 << 20;
/// Most bytes of one step over a hole. An empty disk of 64 TiB takes 1024 steps.
const HOLE_MAX: u64 = 64 << 30;
/// Target duration of a step over a hole, because clients wait for it. Shorter steps grow, longer ones shrink.
const HOLE_TIME: Duration = Duration::from_millis(10);

/// Length of steps over holes, which follows their duration.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HoleLength(u64);

impl HoleLength {
    pub const FIRST: HoleLength = HoleLength(HOLE_MIN);

    pub fn bytes(self) -> u64 {
        self.0
    }

    /// Returns the length after a step of this duration.
    pub fn after(self, time: Duration) -> HoleLength {
        HoleLength(match time < HOLE_TIME {
            true => (self.0 * 2).min(HOLE_MAX),
            false => (self.0 / 4).max(HOLE_MIN),
        })
    }
}
