//! Copies the data of an image's backing image into the image, which then has no backing image. Clusters that clients write belong to the
//! image already.

use std::time::Duration;

use crate::{Early, Event, Now, Outcome, Pace, Paced, Span, unexpected};

/// Most bytes of one step. Client allocations wait for a step of the image's owner.
const PART_MAX: u64 = 1 << 20;
/// Bytes of the first step.
const PART_MIN: u64 = 64 << 10;
/// Target duration of a step. Longer steps reduce the length, because a cancellation waits for one step.
const STEP_TIME: Duration = Duration::from_millis(100);

/// Step of a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Waits for a command or this time.
    Wait(Duration),
    /// Copies data from `from` up, about as many bytes as the range has: [`Event::CopiedUp`].
    CopyUp(Span),
    /// Shows the progress to users.
    Advance {
        /// End of the copied range.
        end: u64,
        /// Bytes written as data.
        bytes: u64,
    },
    /// Shows that the last steps begin.
    Finish,
    /// Removes the name of the backing image from the image, which is durable first.
    Detach,
    /// Closes the files of the backing image: [`Event::Busy`] while a worker uses them.
    Close,
    /// The job has ended.
    End(Outcome),
}

#[derive(Clone, Copy, Debug)]
struct Cursor {
    at: u64,
    length: u64,
    paced: Option<Paced>,
}

#[derive(Debug)]
enum Stage {
    New,
    Wait(Cursor),
    CopyUp(Cursor, Duration),
    Advance(Cursor),
    Finish,
    Detach,
    Close,
    Ended,
}

type Next = (Stage, Action);

/// A stream.
#[derive(Debug)]
pub struct Stream {
    /// Size of the disk in bytes.
    total: u64,
    stage: Stage,
}

impl Stream {
    /// Creates a job that has not begun, for a disk of `total` bytes.
    pub fn new(total: u64) -> Stream {
        Stream {
            total,
            stage: Stage::New,
        }
    }

    /// Processes the result of the last action.
    pub fn step(&mut self, now: &Now, event: Event) -> Action {
        let stage = std::mem::replace(&mut self.stage, Stage::Ended);
        let (stage, action) = match (stage, event) {
            (Stage::New, Event::Done) => self.go_on(
                Cursor {
                    at: 0,
                    length: PART_MIN,
                    paced: None,
                },
                now,
            ),
            (Stage::Wait(cursor) | Stage::Advance(cursor), Event::Done) => self.go_on(cursor, now),
            (Stage::CopyUp(cursor, began), Event::CopiedUp { end, bytes }) => {
                let end = end.min(self.total);
                let is_late = now.time.saturating_sub(began) > STEP_TIME;
                let cursor = Cursor {
                    at: end,
                    length: match is_late {
                        true => PART_MIN,
                        false => (cursor.length * 2).min(PART_MAX),
                    },
                    paced: (bytes > 0).then_some(Paced { began, bytes }),
                };
                (Stage::Advance(cursor), Action::Advance { end, bytes })
            }
            (Stage::Finish, Event::Done) => (Stage::Detach, Action::Detach),
            (Stage::Detach, Event::Done) => (Stage::Close, Action::Close),
            (Stage::Close, Event::Busy) => (Stage::Close, Action::Close),
            (Stage::Close, Event::Done) => (Stage::Ended, Action::End(Ok(()))),
            (Stage::CopyUp(..) | Stage::Detach | Stage::Close, Event::Failed(reason)) => {
                (Stage::Ended, Action::End(Err(Early::Failed(reason))))
            }
            (stage, event) => unexpected(&stage, &event),
        };
        self.stage = stage;
        action
    }

    fn go_on(&self, cursor: Cursor, now: &Now) -> Next {
        let from = cursor.at;
        if from >= self.total {
            return (Stage::Finish, Action::Finish);
        }
        match now.pace(cursor.paced) {
            // Copied data stays in the image.
            Pace::Cancelled => (Stage::Ended, Action::End(Err(Early::Cancelled))),
            Pace::Wait(time) => (Stage::Wait(cursor), Action::Wait(time)),
            Pace::Continue => {
                let end = from + cursor.length;
                (
                    Stage::CopyUp(cursor, now.time),
                    Action::CopyUp(Span { from, end }),
                )
            }
        }
    }
}
