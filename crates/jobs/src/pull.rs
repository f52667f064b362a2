//! Serves the points in time of several disks until a user ends the backup. The checkpoints of all disks are complete, or none.

use std::time::Duration;

use crate::{Early, Event, Now, Outcome, PAUSE, unexpected};

/// Step of a pull. Disks have numbers from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Waits for a command or this time.
    Wait(Duration),
    /// A disk has lost its point in time: ends its export and its job. The others are still served.
    Lose(usize, String),
    /// Shows that the last steps begin.
    Finish,
    /// Removes the exports.
    Unexport,
    /// Ends the points in time: the disks use their sources alone.
    EndPoints,
    /// Completes the checkpoint of a disk.
    Complete(usize),
    /// Removes a checkpoint that was completed.
    Revoke(usize),
    /// Removes the scratch files and the bitmaps of checkpoints that are not complete.
    Discard,
    /// The jobs of all disks have ended.
    End(Outcome),
}

#[derive(Debug)]
enum Stage {
    New,
    Wait,
    Lose,
    Finish(Outcome),
    Unexport(Outcome),
    EndPoints(Outcome),
    Complete(usize),
    Revoke(usize, String),
    Discard(Early),
    Ended,
}

type Next = (Stage, Action);

/// A pull. Its points in time are exported already.
#[derive(Debug)]
pub struct Pull {
    /// Disks that have lost their points in time.
    are_lost: Vec<bool>,
    stage: Stage,
}

impl Pull {
    /// Creates a job of `disks` disks.
    pub fn new(disks: usize) -> Pull {
        Pull {
            are_lost: vec![false; disks],
            stage: Stage::New,
        }
    }

    /// Processes the result of the last action. `lost`: reasons why disks have lost their points in time. [`Orders::switches`] ends the
    /// backup.
    ///
    /// [`Orders::switches`]: crate::Orders::switches
    pub fn step(&mut self, now: &Now, lost: &[Option<String>], event: Event) -> Action {
        let stage = std::mem::replace(&mut self.stage, Stage::Ended);
        let (stage, action) = match (stage, event) {
            (Stage::New | Stage::Wait | Stage::Lose, Event::Done) => self.serve(now, lost),
            (Stage::Finish(outcome), Event::Done) => (Stage::Unexport(outcome), Action::Unexport),
            (Stage::Unexport(outcome), Event::Done) => {
                // A client may have read up to now.
                let outcome = outcome.and_then(|()| all_well(lost));
                (Stage::EndPoints(outcome), Action::EndPoints)
            }
            (Stage::EndPoints(Ok(())), Event::Done) => self.complete(0),
            (Stage::EndPoints(Err(early)), Event::Done) => discard(early),
            (Stage::Complete(disk), Event::Done) => self.complete(disk + 1),
            (Stage::Complete(disk), Event::Failed(reason)) => revoke(disk, reason),
            (Stage::Revoke(disk, reason), Event::Done) => revoke(disk, reason),
            (Stage::Discard(early), Event::Done) => (Stage::Ended, Action::End(Err(early))),
            (stage, event) => unexpected(&stage, &event),
        };
        self.stage = stage;
        action
    }

    fn serve(&mut self, now: &Now, lost: &[Option<String>]) -> Next {
        if now.orders.is_cancelled {
            return finish(Err(Early::Cancelled));
        }
        let new = lost
            .iter()
            .zip(&self.are_lost)
            .position(|(lost, is_known)| lost.is_some() && !is_known);
        if let Some(disk) = new {
            self.are_lost[disk] = true;
            let reason = lost[disk].clone().unwrap_or_default();
            return (Stage::Lose, Action::Lose(disk, reason));
        }
        let is_over = self.are_lost.iter().all(|is_lost| *is_lost);
        match is_over || now.orders.switches {
            true => finish(all_well(lost)),
            false => (Stage::Wait, Action::Wait(PAUSE)),
        }
    }

    /// Completes the checkpoints from a disk on.
    fn complete(&self, disk: usize) -> Next {
        match disk < self.are_lost.len() {
            true => (Stage::Complete(disk), Action::Complete(disk)),
            false => (Stage::Ended, Action::End(Ok(()))),
        }
    }
}

/// Fails if a disk has lost its point in time.
fn all_well(lost: &[Option<String>]) -> Outcome {
    let lost = lost.iter().flatten().next();
    lost.map_or(Ok(()), |reason| Err(Early::Failed(reason.clone())))
}

fn finish(outcome: Outcome) -> Next {
    (Stage::Finish(outcome), Action::Finish)
}

/// Removes the checkpoints of the disks before this one.
fn revoke(disk: usize, reason: String) -> Next {
    match disk.checked_sub(1) {
        Some(before) => (Stage::Revoke(before, reason), Action::Revoke(before)),
        None => discard(Early::Failed(reason)),
    }
}

fn discard(early: Early) -> Next {
    (Stage::Discard(early), Action::Discard)
}
