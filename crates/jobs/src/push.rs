//! Copies a disk as of the start of the job to a target, while clients write (`bdev::PointInTime`).

use std::time::Duration;

use crate::range::{PART, RangeAction, RangeCopy, RangeStep};
use crate::{Early, Event, Now, Outcome, Pace, Paced, Piece, Span, unexpected};

/// Most bytes without data that are passed over or zeroed per step.
const STEP_MAX: u64 = 1 << 30;

/// Step of a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Attaches the copier to the point in time and the target.
    Open,
    /// Waits for a command or this time.
    Wait(Duration),
    /// Checks that no other program has changed the target.
    Check,
    /// Returns the first piece of a range and whether the target lacks it.
    Changed(Span),
    /// I/O of the copier.
    Range(RangeAction),
    /// The point in time is not needed up to `end` any more.
    Advance {
        /// End of the copied range.
        end: u64,
        /// Bytes written as data.
        bytes: u64,
    },
    /// Ends the point in time: the disk uses its source alone.
    EndPoint,
    /// Shows that the last steps begin.
    Finish,
    /// Attaches to the target for its flush.
    OpenFlush,
    /// Flushes the target.
    Flush,
    /// Gives a target that the job has created its name. It had a temporary name, because it was incomplete.
    Publish,
    /// Completes the checkpoint of the backup.
    Complete,
    /// Removes a target that the job has created: later backups must not find a partial image.
    Remove(Early),
    /// The job has ended.
    End(Outcome),
}

#[derive(Clone, Copy, Debug)]
struct Cursor {
    at: u64,
    paced: Option<Paced>,
}

#[derive(Debug)]
enum Stage {
    New,
    Open,
    Wait(Cursor),
    Check(Cursor),
    Changed(Cursor, Duration),
    /// Looks for a hole at the start of a range.
    Hole(Cursor, Duration, Span),
    Range(Cursor, Duration, u64, RangeCopy),
    Advance(Cursor),
    EndPoint(Outcome),
    Finish,
    OpenFlush,
    Flush,
    CheckComplete,
    Publish,
    Complete,
    Remove(Early),
    Ended,
}

type Next = (Stage, Action);

/// A backup of one disk.
#[derive(Debug)]
pub struct Push {
    /// Size of the disk in bytes.
    total: u64,
    stage: Stage,
}

impl Push {
    /// Creates a job that has not begun, for a disk of `total` bytes. Its point in time has begun.
    pub fn new(total: u64) -> Push {
        Push {
            total,
            stage: Stage::New,
        }
    }

    /// Processes the result of the last action. [`Now::lost`]: the point in time is lost.
    pub fn step(&mut self, now: &Now, event: Event) -> Action {
        let stage = std::mem::replace(&mut self.stage, Stage::Ended);
        let (stage, action) = match (stage, event) {
            (Stage::New, Event::Done) => (Stage::Open, Action::Open),
            (Stage::Open, Event::Done) => self.go_on(Cursor { at: 0, paced: None }, now),
            (Stage::Wait(cursor) | Stage::Advance(cursor), Event::Done) => self.go_on(cursor, now),
            (Stage::Check(cursor), Event::Done) => {
                let from = cursor.at;
                let end = self.total.min(from + STEP_MAX);
                let stage = Stage::Changed(cursor, now.time);
                (stage, Action::Changed(Span { from, end }))
            }
            (Stage::Changed(cursor, began), Event::Piece(Piece { end, is_data })) => {
                let span = Span {
                    from: cursor.at,
                    end,
                };
                match is_data {
                    true => {
                        let action = Action::Range(RangeAction::Status(span));
                        (Stage::Hole(cursor, began, span), action)
                    }
                    false => copied(began, end, 0),
                }
            }
            (Stage::Hole(cursor, began, span), event) => {
                let end = match event {
                    Event::Piece(Piece {
                        end,
                        is_data: false,
                    }) => end.min(span.end),
                    _ => span.end.min(cursor.at + PART),
                };
                let (copy, action) = RangeCopy::whole(cursor.at, end);
                let stage = Stage::Range(cursor, began, end, copy);
                (stage, Action::Range(action))
            }
            (Stage::Range(cursor, began, end, mut copy), event) => match copy.step(event) {
                RangeStep::Run(action) => {
                    let stage = Stage::Range(cursor, began, end, copy);
                    (stage, Action::Range(action))
                }
                RangeStep::Copied(bytes) => copied(began, end, bytes),
                RangeStep::Failed(reason) => end_point(Err(now.early_after(reason))),
            },
            (Stage::Open | Stage::Check(_), Event::Failed(reason)) => {
                end_point(Err(now.early_after(reason)))
            }
            (stage, event) => complete(stage, now, event),
        };
        self.stage = stage;
        action
    }

    fn go_on(&self, cursor: Cursor, now: &Now) -> Next {
        if cursor.at >= self.total {
            return end_point(Ok(()));
        }
        match now.pace(cursor.paced) {
            Pace::Cancelled => end_point(Err(Early::Cancelled)),
            Pace::Wait(time) => (Stage::Wait(cursor), Action::Wait(time)),
            // A later write would restore the length of a truncated file.
            Pace::Continue => (Stage::Check(cursor), Action::Check),
        }
    }
}

fn copied(began: Duration, end: u64, bytes: u64) -> Next {
    let cursor = Cursor {
        at: end,
        paced: (bytes > 0).then_some(Paced { began, bytes }),
    };
    (Stage::Advance(cursor), Action::Advance { end, bytes })
}

/// Clients do not wait for the end of the target's I/O.
fn end_point(outcome: Outcome) -> Next {
    (Stage::EndPoint(outcome), Action::EndPoint)
}

fn remove(early: Early) -> Next {
    (Stage::Remove(early.clone()), Action::Remove(early))
}

/// Makes the target durable and its checkpoint complete.
fn complete(stage: Stage, now: &Now, event: Event) -> Next {
    match (stage, event) {
        (Stage::EndPoint(Ok(())), Event::Done) => (Stage::Finish, Action::Finish),
        (Stage::EndPoint(Err(early)), Event::Done) => remove(early),
        (Stage::Finish, Event::Done) => (Stage::OpenFlush, Action::OpenFlush),
        (Stage::OpenFlush, Event::Done) => (Stage::Flush, Action::Flush),
        (Stage::Flush, Event::Done) => (Stage::CheckComplete, Action::Check),
        (Stage::CheckComplete, Event::Done) => (Stage::Publish, Action::Publish),
        (Stage::Publish, Event::Done) => (Stage::Complete, Action::Complete),
        (Stage::Complete, Event::Done) => (Stage::Ended, Action::End(Ok(()))),
        (
            Stage::OpenFlush
            | Stage::Flush
            | Stage::CheckComplete
            | Stage::Publish
            | Stage::Complete,
            Event::Failed(reason) | Event::Abandoned(reason),
        ) => remove(match now.orders.is_cancelled {
            true => Early::Cancelled,
            // The job has ended the point in time, so `lost` does not apply.
            false => Early::Failed(reason),
        }),
        (Stage::Remove(early), Event::Done) => (Stage::Ended, Action::End(Err(early))),
        (stage, event) => unexpected(&stage, &event),
    }
}
