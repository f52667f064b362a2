//! Long operations on disks as state machines, without I/O, threads and clocks. `daemon` drives a machine with a thread, `sim` with a seed:
//! the code that can lose data is the code that the simulator tests.
//!
//! A machine has one method: `step(now, event) -> action`. The driver executes the action, which may block, and passes its result as the
//! next event. One action is in flight at a time, because each needs the result of the one before. Users' commands do not interrupt an
//! action: the driver passes them with every event ([`Now`]), and may make I/O fail early after a cancellation. The first event is
//! [`Event::Done`], the last action is `End`.
//!
//! ```text
//!   copy::Copy                                                       exchange::Exchange: the disk gets another device
//!
//!   insert the layer `mirror` ─────────────┐                           prepare ──▶ hold the disk ──▶ steps while held ──▶ replace
//!      │                                   │                              │failed     │failed             │failed           │
//!   ┌─▶ pace ──▶ check ──▶ survey ──▶ hold │                              ▼           ▼                   ▼                 ▼
//!   │   the part: range::RangeCopy         │                            detach ◀──────────────────────  release         release
//!   └── release ◀── advance                │
//!      │ all copied                        │ failed, cancelled        range::RangeCopy: the copier holds the range
//!   flush the source                       │
//!   ready ◀──▶ switch: flush, Exchange ────┤
//!      │         (check, flush, persist)   ▼                            pieces ──▶ status ──▶ zero
//!      │                               roll back: abandon, report,                   └──▶ read ⇄ write
//!      ▼                               Exchange (source), drain, unlock
//!     End                                  └──▶ End
//! ```
//!
//! The other jobs are lines of stages: `stream::Stream` copies backing data up, `points::Begin` begins the points in time of several disks
//! with an `Exchange`, `points::Restore` ends that of one disk, `push::Push` copies one, `pull::Pull` serves them, `snapshot::Snapshot`
//! flushes old devices and runs an `Exchange`, `commit::Begin` opens the backing image of a commit.
//!
//! A stage is a variant with the data of that stage. An event that does not answer the action in flight is a defect of the driver: `step`
//! panics. Rejected: jobs as blocking functions over a trait. The simulator could drive them, but a property test could not stop them
//! between two actions. Tests: `tests/copy.rs` checks random runs; `crates/sim/mutations` lists seeded defects.

#![forbid(unsafe_code)]

pub mod commit;
pub mod copy;
pub mod exchange;
pub mod points;
pub mod pull;
pub mod push;
pub mod range;
pub mod snapshot;
pub mod stream;

use std::time::Duration;

/// Interval at which a waiting job checks its target and its commands.
pub const PAUSE: Duration = Duration::from_millis(500);

/// Commands of users. They last until they are changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Orders {
    /// The job ends and leaves the disk unchanged.
    pub is_cancelled: bool,
    /// No further part is copied.
    pub is_paused: bool,
    /// The job switches to its target when it is complete.
    pub switches: bool,
    /// The job switches although the disk cannot be flushed, so that acknowledged writes may be missing in the copy.
    pub accepts_loss: bool,
    /// Speed limit in bytes per second; 0 for none.
    pub speed: u64,
}

/// State of the driver at an event.
#[derive(Clone, Debug, Default)]
pub struct Now {
    /// Time since any fixed moment.
    pub time: Duration,
    /// Commands of users.
    pub orders: Orders,
    /// Error that has made the target invalid: a client's write has failed there.
    pub lost: Option<String>,
}

/// Result of an action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// The action has succeeded, or the job begins.
    Done,
    /// The action has failed.
    Failed(String),
    /// The I/O was abandoned and may still be in flight.
    Abandoned(String),
    /// I/Os of clients in the range did not end in time.
    Busy,
    /// The disk has the device already, or the daemon ends.
    Unneeded,
    /// First piece of a range.
    Piece(Piece),
    /// All pieces of a range.
    Pieces(Vec<Piece>),
    /// Data of the backing image were copied up.
    CopiedUp {
        /// End of the part without backing data.
        end: u64,
        /// Bytes copied.
        bytes: u64,
    },
}

/// Range of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// First byte.
    pub from: u64,
    /// First byte after the range.
    pub end: u64,
}

/// Part of a range, from the end of the previous piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// End in bytes.
    pub end: u64,
    /// The piece has data, or must be copied.
    pub is_data: bool,
}

/// End of a job before its goal.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Early {
    /// A user has cancelled the job.
    Cancelled,
    /// The job has failed for this reason.
    Failed(String),
}

/// Result of a job.
pub type Outcome = Result<(), Early>;

/// A copied part, for the speed limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Paced {
    began: Duration,
    bytes: u64,
}

/// Decision before the next part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Pace {
    Continue,
    Wait(Duration),
    Cancelled,
}

impl Now {
    /// Decides whether the job copies its next part, waits because it is paused or too fast, or ends.
    fn pace(&self, part: Option<Paced>) -> Pace {
        if self.orders.is_cancelled {
            return Pace::Cancelled;
        }
        if self.orders.is_paused {
            return Pace::Wait(PAUSE);
        }
        match part.and_then(|part| self.rest(part)) {
            Some(rest) => Pace::Wait(rest),
            None => Pace::Continue,
        }
    }

    /// Returns the delay that the speed limit requires after a part.
    fn rest(&self, part: Paced) -> Option<Duration> {
        if self.orders.speed == 0 {
            return None;
        }
        let due = Duration::from_secs_f64(part.bytes as f64 / self.orders.speed as f64);
        let rest = due.checked_sub(self.time.saturating_sub(part.began));
        rest.filter(|rest| !rest.is_zero())
    }

    /// Returns the reason to end early, if there is one.
    fn early(&self) -> Option<Early> {
        if self.orders.is_cancelled {
            return Some(Early::Cancelled);
        }
        self.lost.clone().map(Early::Failed)
    }

    /// Returns the reason to end after a failed action. A cancellation and a lost target make I/O fail.
    fn early_after(&self, reason: String) -> Early {
        self.early().unwrap_or(Early::Failed(reason))
    }
}

/// Panics: the driver has answered another action.
#[cold]
#[track_caller]
fn unexpected(stage: &dyn std::fmt::Debug, event: &Event) -> ! {
    panic!("the event {event:?} does not answer the action of stage {stage:?}");
}
