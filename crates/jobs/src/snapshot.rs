//! Switches disks to new images over their old devices, all at one moment. The old devices are then read-only.

use crate::exchange::{Exchange, ExchangeAction, ExchangeStep, WhileHeld};
use crate::{Early, Event, Now, Outcome, unexpected};

/// The new images of all disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overlays;

/// Step of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Action {
    /// Attaches to the old devices for their flush.
    OpenFlush,
    /// Flushes the old devices while clients do I/O.
    Flush,
    /// Step of the switch to the new images. It flushes the old devices: client flushes reach only the new images.
    Exchange(ExchangeAction<Overlays>),
    /// Removes the new images, which no client has written.
    Remove,
    /// Makes the old devices read-only and releases their locks against other readers.
    Unlock,
    /// The job has ended.
    End(Outcome),
}

#[derive(Debug)]
enum Stage {
    New,
    Open,
    Flush,
    Exchange(Exchange<Overlays>),
    Remove(String),
    Unlock,
    Ended,
}

/// A snapshot of disks with new images that are not in use.
#[derive(Debug)]
pub struct Snapshot {
    stage: Stage,
}

impl Default for Snapshot {
    fn default() -> Snapshot {
        Snapshot { stage: Stage::New }
    }
}

impl Snapshot {
    /// Processes the result of the last action.
    pub fn step(&mut self, event: Event) -> Action {
        let now = Now::default();
        let stage = std::mem::replace(&mut self.stage, Stage::Ended);
        let (stage, action) = match (stage, event) {
            (Stage::New, Event::Done) => (Stage::Open, Action::OpenFlush),
            // Clients wait only for the second flush, while the disks are held.
            (Stage::Open, Event::Done) => (Stage::Flush, Action::Flush),
            (Stage::Flush, Event::Done) => {
                let (exchange, action) = Exchange::begin(Overlays, WhileHeld::MakeDurable);
                (Stage::Exchange(exchange), Action::Exchange(action))
            }
            (Stage::Exchange(mut exchange), event) => match exchange.step(&now, event) {
                ExchangeStep::Run(action) => (Stage::Exchange(exchange), Action::Exchange(action)),
                ExchangeStep::Replaced => (Stage::Unlock, Action::Unlock),
                ExchangeStep::Failed(reason) => (Stage::Remove(reason), Action::Remove),
            },
            (Stage::Open | Stage::Flush, Event::Failed(reason) | Event::Abandoned(reason)) => {
                (Stage::Remove(reason), Action::Remove)
            }
            (Stage::Remove(reason), Event::Done) => {
                (Stage::Ended, Action::End(Err(Early::Failed(reason))))
            }
            (Stage::Unlock, Event::Done) => (Stage::Ended, Action::End(Ok(()))),
            (stage, event) => unexpected(&stage, &event),
        };
        self.stage = stage;
        action
    }
}
