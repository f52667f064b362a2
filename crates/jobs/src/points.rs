//! Begins the points in time of the disks of a backup at one moment, and exports those of a pull. [`crate::push`] or [`crate::pull`]
//! continues. [`Restore`] ends the point in time of one disk.

use crate::exchange::{Exchange, ExchangeAction, ExchangeStep, WhileHeld};
use crate::{Early, Event, Now, Outcome, unexpected};

/// The layers that copy before write, of all disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Layers;

/// Step of the start of a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Step of the switch of all disks to their layers, while all of them are held.
    Exchange(ExchangeAction<Layers>),
    /// Checks that each disk uses its layer: a disk may have been removed.
    CheckLayers,
    /// Exports the points in time of a pull.
    Export,
    /// Lets the jobs run. Fails if the backup was cancelled.
    Enter,
    /// Removes the exports.
    Unexport,
    /// Ends the points in time: the disks use their sources alone.
    EndPoints,
    /// Removes the targets that the backup has created, the scratch files and the bitmaps of its checkpoints.
    Discard,
    /// The jobs run, or the disks are unchanged.
    End(Outcome),
}

#[derive(Debug)]
enum Stage {
    New,
    Exchange(Exchange<Layers>),
    CheckLayers,
    Export,
    Enter,
    Unexport(String),
    EndPoints(String),
    Discard(String),
    Ended,
}

type Next = (Stage, Action);

/// The start of a backup. Its targets and scratch files exist already.
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
            (Stage::New, Event::Done) => {
                let (exchange, action) = Exchange::begin(Layers, WhileHeld::Record);
                (Stage::Exchange(exchange), Action::Exchange(action))
            }
            (Stage::Exchange(mut exchange), event) => match exchange.step(&Now::default(), event) {
                ExchangeStep::Run(action) => (Stage::Exchange(exchange), Action::Exchange(action)),
                ExchangeStep::Replaced => (Stage::CheckLayers, Action::CheckLayers),
                ExchangeStep::Failed(reason) => end_points(reason),
            },
            (Stage::CheckLayers, Event::Done) => (Stage::Export, Action::Export),
            (Stage::CheckLayers, Event::Failed(reason)) => end_points(reason),
            (Stage::Export, Event::Done) => (Stage::Enter, Action::Enter),
            (Stage::Enter, Event::Done) => (Stage::Ended, Action::End(Ok(()))),
            // Some exports may exist.
            (Stage::Export | Stage::Enter, Event::Failed(reason)) => {
                (Stage::Unexport(reason), Action::Unexport)
            }
            (Stage::Unexport(reason), Event::Done) => end_points(reason),
            (Stage::EndPoints(reason), Event::Done) => (Stage::Discard(reason), Action::Discard),
            (Stage::Discard(reason), Event::Done) => {
                (Stage::Ended, Action::End(Err(Early::Failed(reason))))
            }
            (stage, event) => unexpected(&stage, &event),
        };
        self.stage = stage;
        action
    }
}

fn end_points(reason: String) -> Next {
    (Stage::EndPoints(reason), Action::EndPoints)
}

/// The device of a disk below the layer of its point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Source;

/// Step of the end of a point in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RestoreAction {
    /// Ends copies before writes: no client waits for one while the disk is held.
    EndPoint,
    /// Step of the switch of the disk to its source.
    Exchange(ExchangeAction<Source>),
    /// The switch has failed for this reason: waits before the next attempt.
    RetryLater(String),
    /// The disk uses its source alone, or the daemon ends.
    End,
}

#[derive(Debug)]
enum RestoreStage {
    New,
    EndPoint,
    Exchange(Exchange<Source>),
    Retry,
    Ended,
}

/// The end of the point in time of one disk. Retries without limit: a disk must not stay on the layer of a job that has ended.
#[derive(Debug)]
pub struct Restore {
    stage: RestoreStage,
}

impl Default for Restore {
    fn default() -> Restore {
        Restore {
            stage: RestoreStage::New,
        }
    }
}

impl Restore {
    /// Processes the result of the last action. A driver answers [`ExchangeAction::Prepare`] with [`Event::Unneeded`] if the daemon ends.
    pub fn step(&mut self, event: Event) -> RestoreAction {
        let stage = std::mem::replace(&mut self.stage, RestoreStage::Ended);
        let (stage, action) = match (stage, event) {
            (RestoreStage::New, Event::Done) => (RestoreStage::EndPoint, RestoreAction::EndPoint),
            (RestoreStage::EndPoint | RestoreStage::Retry, Event::Done) => {
                let (exchange, action) = Exchange::begin(Source, WhileHeld::Nothing);
                let action = RestoreAction::Exchange(action);
                (RestoreStage::Exchange(exchange), action)
            }
            (RestoreStage::Exchange(mut exchange), event) => {
                match exchange.step(&Now::default(), event) {
                    ExchangeStep::Run(action) => {
                        let action = RestoreAction::Exchange(action);
                        (RestoreStage::Exchange(exchange), action)
                    }
                    ExchangeStep::Replaced => (RestoreStage::Ended, RestoreAction::End),
                    ExchangeStep::Failed(reason) => {
                        (RestoreStage::Retry, RestoreAction::RetryLater(reason))
                    }
                }
            }
            (stage, event) => unexpected(&stage, &event),
        };
        self.stage = stage;
        action
    }
}
