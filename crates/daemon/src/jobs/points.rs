//! Drives [`jobs::points`]: begins the points in time of the disks of a backup, and exports those of a pull.

use std::sync::Arc;

use jobs::Event;
use jobs::exchange::ExchangeAction;
use jobs::points::{Action, Begin, Layers};

use super::Context;
use super::backup::{BackupOfJob, Prepared, Stage};
use super::exchange::Change;
use super::point_in_time::end_all;
use crate::objects::{NewDevice, Refusal};

struct Driver<'a> {
    context: &'a Context,
    backup: &'a BackupOfJob,
    disks: Vec<Prepared>,
    change: Option<Change>,
    /// Reason of the first failure.
    refusal: Option<Refusal>,
}

/// Begins the points in time. Clients write to the disks from then on, and the jobs may run.
///
/// # Errors
/// The disks are unchanged, and their jobs have ended.
pub(super) fn begin(
    context: &Context,
    backup: &BackupOfJob,
    disks: Vec<Prepared>,
) -> Result<Vec<Prepared>, Refusal> {
    let mut driver = Driver {
        context,
        backup,
        disks,
        change: None,
        refusal: None,
    };
    let mut machine = Begin::default();
    let mut event = Event::Done;
    loop {
        event = match machine.step(event) {
            Action::End(Ok(())) => return Ok(driver.disks),
            Action::End(Err(_)) => return Err(driver.refusal.unwrap_or(Refusal::Ending)),
            action => match driver.execute(&action) {
                Ok(()) => Event::Done,
                Err(refusal) => {
                    let reason = refusal.to_string();
                    driver.refusal.get_or_insert(refusal);
                    Event::Failed(reason)
                }
            },
        };
    }
}

impl Driver<'_> {
    fn execute(&mut self, action: &Action) -> Result<(), Refusal> {
        match action {
            Action::Exchange(action) => return self.exchange(*action),
            Action::CheckLayers => {
                return self
                    .disks
                    .iter()
                    .try_for_each(|one| one.point.check_layer());
            }
            Action::Export => {
                return self
                    .disks
                    .iter()
                    .try_for_each(|one| one.serve(self.context));
            }
            Action::Enter => return self.backup.enter(Stage::Running),
            Action::Unexport => self.disks.iter().for_each(|one| one.unserve(self.context)),
            Action::EndPoints => {
                let points = self.disks.iter().map(|one| Arc::clone(&one.point));
                let ended = end_all(self.context, points.enumerate());
                ended.into_iter().for_each(drop);
            }
            Action::Discard => {
                let ending = Refusal::Ending;
                let refusal = self.refusal.as_ref().unwrap_or(&ending);
                for one in self.disks.drain(..) {
                    one.abandon(self.context, refusal);
                }
            }
            Action::End(_) => {}
        }
        Ok(())
    }

    fn exchange(&mut self, action: ExchangeAction<Layers>) -> Result<(), Refusal> {
        match action {
            ExchangeAction::Prepare(Layers) => {
                let changes = self.disks.iter().map(|one| one.point.change());
                let changes: Vec<NewDevice> = changes.collect();
                let pool = &self.context.servers.pool;
                self.change = Some(Change::prepare(pool, &changes)?);
                Ok(())
            }
            // All disks are held: their bitmaps have the same moment.
            ExchangeAction::Record => {
                let mut bitmaps = self
                    .disks
                    .iter_mut()
                    .filter_map(|one| one.work.incremental());
                bitmaps.try_for_each(|bitmap| bitmap.freeze())
            }
            ExchangeAction::Detach => {
                self.change = None;
                Ok(())
            }
            action => match &mut self.change {
                Some(change) => change.execute(self.context, action),
                None => Ok(()),
            },
        }
    }
}
