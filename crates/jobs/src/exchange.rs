//! Switches disks to other devices. Slow and fallible steps run before, while clients do I/O. Clients wait while the disks are held.

use crate::{Event, Now, unexpected};

/// Step of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeAction<D> {
    /// Checks the device and attaches the workers to it.
    Prepare(D),
    /// Locks all of the disk: no client's I/O is in flight afterwards.
    Hold,
    /// Checks that no other program has changed the target.
    Check,
    /// Flushes the device. The disk is held: a flush that takes too long must fail.
    Flush,
    /// Separates the changes before and after this moment in dirty bitmaps.
    Record,
    /// Writes records that the disk needs on its new device, for example its identity.
    Persist,
    /// Persists the new configuration, and switches the disk and all workers.
    Replace(D),
    /// Unlocks the disk.
    Release,
    /// Detaches the workers from the device that is not used.
    Detach,
}

/// Work while the disk is held, between the last I/O on the old device and the first on the new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WhileHeld {
    /// No work.
    Nothing,
    /// The disk continues on the new device after a restart: it must be complete and durable.
    MakeDurable,
    /// A point in time begins or ends.
    Record,
}

#[derive(Debug)]
enum Stage {
    Prepare,
    Hold,
    Check,
    Flush,
    Record,
    Persist,
    Replace,
    Release(Result<(), String>),
    Detach(String),
}

/// Result of [`Exchange::step`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExchangeStep<D> {
    /// Action to execute.
    Run(ExchangeAction<D>),
    /// The disk uses the new device.
    Replaced,
    /// The disk is unchanged, not locked, and no worker has the new device.
    Failed(String),
}

/// An exchange in progress.
#[derive(Debug)]
pub struct Exchange<D> {
    device: D,
    while_held: WhileHeld,
    stage: Stage,
}

impl<D: Copy> Exchange<D> {
    /// Begins to switch to a device.
    pub fn begin(device: D, while_held: WhileHeld) -> (Exchange<D>, ExchangeAction<D>) {
        let exchange = Exchange {
            device,
            while_held,
            stage: Stage::Prepare,
        };
        (exchange, ExchangeAction::Prepare(device))
    }

    /// Processes the result of the last action.
    pub fn step(&mut self, now: &Now, event: Event) -> ExchangeStep<D> {
        match (&mut self.stage, event) {
            (Stage::Prepare, Event::Unneeded) => ExchangeStep::Replaced,
            (Stage::Prepare, Event::Done) => self.run(Stage::Hold),
            (Stage::Prepare, Event::Failed(reason)) => self.run(Stage::Detach(reason)),
            (Stage::Hold, Event::Done) => match self.while_held {
                WhileHeld::Nothing => self.run(Stage::Replace),
                WhileHeld::MakeDurable => self.run(Stage::Check),
                WhileHeld::Record => self.run(Stage::Record),
            },
            (Stage::Hold, Event::Failed(reason)) => self.run(Stage::Detach(reason)),
            // No client's write is in flight: a target that is complete now stays complete.
            (Stage::Check, Event::Done) => match now.lost.clone() {
                Some(reason) => self.run(Stage::Release(Err(reason))),
                None => self.run(Stage::Flush),
            },
            (Stage::Flush, Event::Done) => self.run(Stage::Persist),
            (Stage::Record | Stage::Persist, Event::Done) => self.run(Stage::Replace),
            (Stage::Replace, Event::Done) => self.run(Stage::Release(Ok(()))),
            (Stage::Release(result), Event::Done) => match std::mem::replace(result, Ok(())) {
                Ok(()) => ExchangeStep::Replaced,
                Err(reason) => self.run(Stage::Detach(reason)),
            },
            (Stage::Detach(reason), Event::Done) => ExchangeStep::Failed(std::mem::take(reason)),
            (
                Stage::Check | Stage::Flush | Stage::Record | Stage::Persist | Stage::Replace,
                Event::Failed(reason) | Event::Abandoned(reason),
            ) => self.run(Stage::Release(Err(reason))),
            (stage, event) => unexpected(stage, &event),
        }
    }

    fn run(&mut self, stage: Stage) -> ExchangeStep<D> {
        let action = match &stage {
            Stage::Prepare => ExchangeAction::Prepare(self.device),
            Stage::Hold => ExchangeAction::Hold,
            Stage::Check => ExchangeAction::Check,
            Stage::Flush => ExchangeAction::Flush,
            Stage::Record => ExchangeAction::Record,
            Stage::Persist => ExchangeAction::Persist,
            Stage::Replace => ExchangeAction::Replace(self.device),
            Stage::Release(_) => ExchangeAction::Release,
            Stage::Detach(_) => ExchangeAction::Detach,
        };
        self.stage = stage;
        ExchangeStep::Run(action)
    }
}
