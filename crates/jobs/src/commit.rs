//! Begins a commit: reopens the image of a disk over its writable backing image, and switches the disk to an empty mirror of both.
//! [`crate::copy`] continues. The disk is locked before the image is reopened: only one open copy of an image may write.

use crate::{Early, Event, Outcome, unexpected};

/// Step of the start of a commit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Locks all of the disk.
    Hold,
    /// Releases the locks of the image and opens it and its backing image again, to write.
    Reopen,
    /// Attaches the workers to the mirror of both.
    Prepare,
    /// Switches the disk and all workers to the mirror.
    Replace,
    /// Detaches the workers from the mirror.
    Detach,
    /// Closes the second copy of the image, and locks the image again.
    Undo,
    /// Unlocks the disk.
    Release,
    /// The disk uses the mirror, or the image as before.
    End(Outcome),
}

#[derive(Debug)]
enum Stage {
    New,
    Hold,
    Reopen,
    Prepare,
    Replace,
    Detach(String),
    Undo(String),
    Release(Outcome),
    Ended,
}

/// The start of a commit.
#[derive(Debug)]
pub struct Begin {
    stage: Stage,
}

impl Default for Begin {
    fn default() -> Begin {
        Begin { stage: Stage::New }
    }
}

impl Begin {
    /// Processes the result of the last action.
    pub fn step(&mut self, event: Event) -> Action {
        let stage = std::mem::replace(&mut self.stage, Stage::Ended);
        let (stage, action) = match (stage, event) {
            (Stage::New, Event::Done) => (Stage::Hold, Action::Hold),
            (Stage::Hold, Event::Done) => (Stage::Reopen, Action::Reopen),
            (Stage::Hold, Event::Failed(reason)) => {
                (Stage::Ended, Action::End(Err(Early::Failed(reason))))
            }
            (Stage::Reopen, Event::Done) => (Stage::Prepare, Action::Prepare),
            (Stage::Prepare, Event::Done) => (Stage::Replace, Action::Replace),
            (Stage::Replace, Event::Done) => (Stage::Release(Ok(())), Action::Release),
            // Before the first client writes to the disk again.
            (Stage::Reopen, Event::Failed(reason)) => (Stage::Undo(reason), Action::Undo),
            (Stage::Prepare | Stage::Replace, Event::Failed(reason)) => {
                (Stage::Detach(reason), Action::Detach)
            }
            (Stage::Detach(reason), Event::Done) => (Stage::Undo(reason), Action::Undo),
            (Stage::Undo(reason), Event::Done) => {
                (Stage::Release(Err(Early::Failed(reason))), Action::Release)
            }
            (Stage::Release(outcome), Event::Done) => (Stage::Ended, Action::End(outcome)),
            (stage, event) => unexpected(&stage, &event),
        };
        self.stage = stage;
        action
    }
}
