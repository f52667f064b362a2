//! Copies a disk to a target while clients write to both (`bdev::Mirror`). A mirror and a commit then switch the
//! disk to the target. The target of a commit is the backing image. A backup leaves the target with the content of the disk at the end of the job.

use std::time::Duration;

use crate::exchange::{Exchange, ExchangeAction, ExchangeStep, WhileHeld};
use crate::range::{HoleLength, PART, RangeAction, RangeCopy, RangeStep};
use crate::{Early, Event, Now, Outcome, PAUSE, Pace, Paced, Piece, Span, unexpected};

/// Purpose of a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// The disk switches to the target on demand.
    Mirror,
    /// The disk has the layer `mirror` already. It switches to the target, which is locked against other writers.
    Commit,
    /// The disk stays on its source.
    Backup,
}

/// Parts of the disk that the target lacks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lacking {
    /// The whole disk.
    All,
    /// Pieces that the driver lists.
    Pieces,
}

/// Parameters of a copy.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Purpose.
    pub goal: Goal,
    /// Parts that are copied.
    pub lacking: Lacking,
    /// Size of the disk in bytes.
    pub total: u64,
}

/// Devices of the disk during a copy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// The device before the job.
    Source,
    /// The layer that writes to source and target.
    Mirror,
    /// The device that receives the copy.
    Target,
}

/// State that users see.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Announcement {
    /// The copy is complete and waits for its switch. With a reason it waits for a new command: a switch has failed, or the source could
    /// not be flushed.
    Ready(Option<String>),
    /// The last steps, which take no commands but a cancellation.
    Finishing,
    /// The job has failed. It ends when no I/O uses its target.
    Failed(String),
}

/// Step of a copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Step of a switch of the disk to another device.
    Exchange(ExchangeAction<Device>),
    /// Attaches the copier to source and target.
    Open,
    /// Waits for a command or this time.
    Wait(Duration),
    /// Checks that no other program has changed the target.
    Check,
    /// Returns the first piece of a range and whether it has data to copy. Clients may write to the range until it is held.
    Survey(Span),
    /// Locks a range against clients: [`Event::Done`] or [`Event::Busy`].
    Hold(Span),
    /// I/O in the locked range.
    Range(RangeAction),
    /// Clients write to both devices up to `end` from now on.
    Advance {
        /// End of the copied range.
        end: u64,
        /// Bytes written as data.
        bytes: u64,
    },
    /// Unlocks the range.
    Release,
    /// Shows a state to users.
    Announce(Announcement),
    /// Flushes the source while clients do I/O. After a failure, the copy may lack acknowledged writes that the source has lost.
    FlushSource,
    /// Attaches to the target for its flush.
    OpenFlush,
    /// Flushes the target while clients do I/O.
    Flush,
    /// Gives a target that the backup has created its name. It had a temporary name, because it was incomplete.
    Publish,
    /// Completes the checkpoint of an incremental backup.
    Complete,
    /// Clients stop writing to the target.
    Abandon,
    /// The disk could not switch back to its source: waits before the next attempt.
    RetryLater(String),
    /// Waits until no I/O uses the target.
    Drain,
    /// Releases the lock of the target.
    Unlock,
    /// The job has ended.
    End(Outcome),
}

/// Position of the copy, between two parts.
#[derive(Clone, Copy, Debug)]
struct Cursor {
    /// End of the copied bytes.
    at: u64,
    hole: HoleLength,
    paced: Option<Paced>,
}

#[derive(Clone, Copy, Debug)]
struct Part {
    end: u64,
    is_hole: bool,
    began: Duration,
}

#[derive(Debug)]
enum CopyStage {
    Wait,
    Check,
    Survey(Duration),
    Hold(Part),
    Range(Part, RangeCopy),
    Advance(Part, u64),
    /// Unlocks the range of a part that was copied or has failed.
    Release(Result<(), Early>),
}

#[derive(Debug)]
enum SwitchStage {
    /// Flushes the source after the last part was copied.
    Examine,
    Announce,
    Check,
    Wait,
    Finish,
    Source,
    Open,
    Flush,
    Exchange(Exchange<Device>),
    /// The switch has failed for this reason.
    Recheck(String),
}

#[derive(Debug)]
enum BackupStage {
    Finish,
    Open,
    Exchange(Exchange<Device>),
    Flush,
    Check,
    Publish,
    Complete,
}

#[derive(Debug)]
enum RollbackStage {
    Abandon,
    Announce,
    Exchange(Exchange<Device>),
    Retry,
    Drain,
    Unlock,
}

#[derive(Debug)]
enum Stage {
    New,
    Insert(Exchange<Device>),
    Open,
    Copy(Cursor, CopyStage),
    Switch(SwitchStage),
    Backup(BackupStage),
    Rollback(Early, RollbackStage),
    Ended,
}

type Next = (Stage, Action);

/// A mirror, a commit, or a backup as of its end.
#[derive(Debug)]
pub struct Copy {
    plan: Plan,
    stage: Stage,
}

impl Copy {
    /// Creates a job that has not begun.
    pub fn new(plan: Plan) -> Copy {
        Copy {
            plan,
            stage: Stage::New,
        }
    }

    /// Processes the result of the last action.
    pub fn step(&mut self, now: &Now, event: Event) -> Action {
        let stage = std::mem::replace(&mut self.stage, Stage::Ended);
        let (stage, action) = match stage {
            Stage::New => self.begin(),
            Stage::Insert(exchange) => self.insert(exchange, now, event),
            Stage::Open => match event {
                Event::Done => self.go_on(first(), now),
                Event::Failed(reason) => early(now.early_after(reason)),
                event => unexpected(&"open", &event),
            },
            Stage::Copy(cursor, stage) => self.copy(cursor, stage, now, event),
            Stage::Switch(stage) => switch(stage, now, event),
            Stage::Backup(stage) => back_up(stage, now, event),
            Stage::Rollback(early, stage) => self.roll_back(early, stage, now, event),
            Stage::Ended => unexpected(&stage, &event),
        };
        self.stage = stage;
        action
    }

    fn begin(&self) -> Next {
        match self.plan.goal {
            Goal::Commit => (Stage::Open, Action::Open),
            Goal::Mirror | Goal::Backup => {
                let (exchange, action) = Exchange::begin(Device::Mirror, WhileHeld::Nothing);
                (Stage::Insert(exchange), Action::Exchange(action))
            }
        }
    }

    fn insert(&self, mut exchange: Exchange<Device>, now: &Now, event: Event) -> Next {
        match exchange.step(now, event) {
            ExchangeStep::Run(action) => (Stage::Insert(exchange), Action::Exchange(action)),
            ExchangeStep::Replaced => (Stage::Open, Action::Open),
            ExchangeStep::Failed(reason) => early(Early::Failed(reason)),
        }
    }

    /// Begins the next part, unless the job must wait or end.
    fn go_on(&self, cursor: Cursor, now: &Now) -> Next {
        match now.pace(cursor.paced) {
            Pace::Cancelled => early(Early::Cancelled),
            Pace::Wait(time) => (Stage::Copy(cursor, CopyStage::Wait), Action::Wait(time)),
            Pace::Continue => match now.early() {
                Some(reason) => early(reason),
                // A later write would restore the length of a truncated file.
                None => (Stage::Copy(cursor, CopyStage::Check), Action::Check),
            },
        }
    }

    fn copy(&self, mut cursor: Cursor, stage: CopyStage, now: &Now, event: Event) -> Next {
        let total = self.plan.total;
        let (stage, action) = match (stage, event) {
            (CopyStage::Wait, Event::Done) => return self.go_on(cursor, now),
            (CopyStage::Check, Event::Done) if cursor.at >= total => return self.copied(now),
            (CopyStage::Check, Event::Done) => {
                let from = cursor.at;
                let end = from + cursor.hole.bytes().min(total - from);
                (
                    CopyStage::Survey(now.time),
                    Action::Survey(Span { from, end }),
                )
            }
            (CopyStage::Check, Event::Failed(reason)) => return early(Early::Failed(reason)),
            (CopyStage::Survey(began), Event::Piece(Piece { end, is_data })) => {
                let is_hole = !is_data;
                let end = match is_hole {
                    true => end.min(total),
                    false => end.min(cursor.at + PART).min(total),
                };
                let part = Part {
                    end,
                    is_hole,
                    began,
                };
                let from = cursor.at;
                (CopyStage::Hold(part), Action::Hold(Span { from, end }))
            }
            (CopyStage::Hold(part), Event::Done) => {
                let (copy, action) = match self.plan.lacking {
                    Lacking::All => RangeCopy::whole(cursor.at, part.end),
                    Lacking::Pieces => RangeCopy::pieces(cursor.at, part.end),
                };
                (CopyStage::Range(part, copy), Action::Range(action))
            }
            // A slow I/O of a client overlaps the range.
            (CopyStage::Hold(_), Event::Busy) => return self.go_on(cursor, now),
            (CopyStage::Range(part, mut copy), event) => match copy.step(event) {
                RangeStep::Run(action) => (CopyStage::Range(part, copy), Action::Range(action)),
                RangeStep::Copied(bytes) => {
                    let end = part.end;
                    (
                        CopyStage::Advance(part, bytes),
                        Action::Advance { end, bytes },
                    )
                }
                RangeStep::Failed(reason) => {
                    let early = now.early_after(reason);
                    (CopyStage::Release(Err(early)), Action::Release)
                }
            },
            (CopyStage::Advance(part, bytes), Event::Done) => {
                cursor = cursor.after(part, bytes, now);
                (CopyStage::Release(Ok(())), Action::Release)
            }
            (CopyStage::Release(Ok(())), Event::Done) => return self.go_on(cursor, now),
            (CopyStage::Release(Err(reason)), Event::Done) => return early(reason),
            (stage, event) => unexpected(&stage, &event),
        };
        (Stage::Copy(cursor, stage), action)
    }

    /// Returns the next action after the whole disk was copied.
    fn copied(&self, now: &Now) -> Next {
        match self.plan.goal {
            Goal::Mirror | Goal::Commit if now.orders.accepts_loss => ready(None),
            Goal::Mirror | Goal::Commit => {
                (Stage::Switch(SwitchStage::Examine), Action::FlushSource)
            }
            Goal::Backup => (
                Stage::Backup(BackupStage::Finish),
                Action::Announce(Announcement::Finishing),
            ),
        }
    }

    fn roll_back(&self, early: Early, stage: RollbackStage, now: &Now, event: Event) -> Next {
        let (stage, action) = match (stage, event) {
            (RollbackStage::Abandon, Event::Done) => match &early {
                Early::Cancelled => restore(),
                // Reported at once: I/O on the target may take long to end.
                Early::Failed(reason) => {
                    let announcement = Announcement::Failed(reason.clone());
                    (RollbackStage::Announce, Action::Announce(announcement))
                }
            },
            (RollbackStage::Announce | RollbackStage::Retry, Event::Done) => restore(),
            (RollbackStage::Exchange(mut exchange), event) => match exchange.step(now, event) {
                ExchangeStep::Run(action) => {
                    (RollbackStage::Exchange(exchange), Action::Exchange(action))
                }
                ExchangeStep::Replaced => (RollbackStage::Drain, Action::Drain),
                // A disk must not stay on the layer of a job that has ended.
                ExchangeStep::Failed(reason) => (RollbackStage::Retry, Action::RetryLater(reason)),
            },
            (RollbackStage::Drain, Event::Done) if self.plan.goal == Goal::Commit => {
                (RollbackStage::Unlock, Action::Unlock)
            }
            (RollbackStage::Drain | RollbackStage::Unlock, Event::Done) => {
                return (Stage::Ended, Action::End(Err(early)));
            }
            (stage, event) => unexpected(&stage, &event),
        };
        (Stage::Rollback(early, stage), action)
    }
}

fn first() -> Cursor {
    Cursor {
        at: 0,
        hole: HoleLength::FIRST,
        paced: None,
    }
}

impl Cursor {
    /// Returns the position after a copied part.
    fn after(self, part: Part, bytes: u64, now: &Now) -> Cursor {
        let Part {
            end,
            is_hole,
            began,
        } = part;
        let time = now.time.saturating_sub(began);
        Cursor {
            at: end,
            hole: match is_hole {
                true => self.hole.after(time),
                false => self.hole,
            },
            paced: (bytes > 0).then_some(Paced { began, bytes }),
        }
    }
}

/// Begins to roll back.
fn early(early: Early) -> Next {
    (
        Stage::Rollback(early, RollbackStage::Abandon),
        Action::Abandon,
    )
}

fn restore() -> (RollbackStage, Action) {
    let (exchange, action) = Exchange::begin(Device::Source, WhileHeld::Nothing);
    (RollbackStage::Exchange(exchange), Action::Exchange(action))
}

/// Returns the announcement of a complete copy after the flush of its source.
fn examined(now: &Now, event: Event) -> Next {
    let fault = match event {
        Event::Done => None,
        Event::Failed(reason) | Event::Abandoned(reason) => {
            (!now.orders.accepts_loss).then_some(reason)
        }
        event => unexpected(&SwitchStage::Examine, &event),
    };
    match now.early() {
        Some(reason) => early(reason),
        None => ready(fault),
    }
}

/// Announces a complete copy.
fn ready(reason: Option<String>) -> Next {
    (
        Stage::Switch(SwitchStage::Announce),
        Action::Announce(Announcement::Ready(reason)),
    )
}

/// Waits for the command to switch, then switches.
fn switch(stage: SwitchStage, now: &Now, event: Event) -> Next {
    let (stage, action) = match (stage, event) {
        (SwitchStage::Examine, event) => return examined(now, event),
        (SwitchStage::Announce | SwitchStage::Wait, Event::Done) => match now.early() {
            Some(reason) => return early(reason),
            None => (SwitchStage::Check, Action::Check),
        },
        (SwitchStage::Check, Event::Done) => match now.early() {
            Some(reason) => return early(reason),
            None if now.orders.switches => (
                SwitchStage::Finish,
                Action::Announce(Announcement::Finishing),
            ),
            None => (SwitchStage::Wait, Action::Wait(PAUSE)),
        },
        (SwitchStage::Check, Event::Failed(reason)) => return early(now.early_after(reason)),
        // The target has every write of the time after the copy, but perhaps not what the source had lost before.
        (SwitchStage::Finish, Event::Done) if !now.orders.accepts_loss => {
            (SwitchStage::Source, Action::FlushSource)
        }
        (SwitchStage::Finish | SwitchStage::Source, Event::Done) => {
            (SwitchStage::Open, Action::OpenFlush)
        }
        // The user no longer waits for the source.
        (SwitchStage::Source, Event::Failed(_) | Event::Abandoned(_))
            if now.orders.accepts_loss =>
        {
            (SwitchStage::Open, Action::OpenFlush)
        }
        // Clients wait only for the second flush, while the disk is held.
        (SwitchStage::Open, Event::Done) => (SwitchStage::Flush, Action::Flush),
        (SwitchStage::Flush, Event::Done) => match now.early() {
            Some(reason) => return early(reason),
            None => {
                let (exchange, action) = Exchange::begin(Device::Target, WhileHeld::MakeDurable);
                (SwitchStage::Exchange(exchange), Action::Exchange(action))
            }
        },
        (SwitchStage::Exchange(mut exchange), event) => match exchange.step(now, event) {
            ExchangeStep::Run(action) => {
                (SwitchStage::Exchange(exchange), Action::Exchange(action))
            }
            ExchangeStep::Replaced => return (Stage::Ended, Action::End(Ok(()))),
            ExchangeStep::Failed(reason) => (SwitchStage::Recheck(reason), Action::Check),
        },
        (
            SwitchStage::Source | SwitchStage::Open | SwitchStage::Flush,
            Event::Failed(reason) | Event::Abandoned(reason),
        ) => (SwitchStage::Recheck(reason), Action::Check),
        // The target is still complete. The switch can be requested again.
        (SwitchStage::Recheck(reason), Event::Done) => (
            SwitchStage::Announce,
            Action::Announce(Announcement::Ready(Some(reason))),
        ),
        (SwitchStage::Recheck(_), Event::Failed(reason)) => return early(now.early_after(reason)),
        (stage, event) => unexpected(&stage, &event),
    };
    (Stage::Switch(stage), action)
}

/// Ends a backup. It contains all writes up to the exchange and none after it.
fn back_up(stage: BackupStage, now: &Now, event: Event) -> Next {
    let (stage, action) = match (stage, event) {
        (BackupStage::Finish, Event::Done) => (BackupStage::Open, Action::OpenFlush),
        (BackupStage::Open, Event::Done) => {
            let (exchange, action) = Exchange::begin(Device::Source, WhileHeld::Record);
            (BackupStage::Exchange(exchange), Action::Exchange(action))
        }
        (BackupStage::Exchange(mut exchange), event) => match exchange.step(now, event) {
            ExchangeStep::Run(action) => {
                (BackupStage::Exchange(exchange), Action::Exchange(action))
            }
            ExchangeStep::Replaced => match now.early() {
                Some(reason) => return early(reason),
                // No client writes to the target any more.
                None => (BackupStage::Flush, Action::Flush),
            },
            ExchangeStep::Failed(reason) => return early(Early::Failed(reason)),
        },
        (BackupStage::Flush, Event::Done) => (BackupStage::Check, Action::Check),
        (BackupStage::Check, Event::Done) => (BackupStage::Publish, Action::Publish),
        (BackupStage::Publish, Event::Done) => (BackupStage::Complete, Action::Complete),
        (BackupStage::Complete, Event::Done) => return (Stage::Ended, Action::End(Ok(()))),
        (
            BackupStage::Open
            | BackupStage::Flush
            | BackupStage::Check
            | BackupStage::Publish
            | BackupStage::Complete,
            Event::Failed(reason) | Event::Abandoned(reason),
        ) => return early(now.early_after(reason)),
        (stage, event) => unexpected(&stage, &event),
    };
    (Stage::Backup(stage), action)
}
