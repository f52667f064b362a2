//! Drives [`jobs::push`]: copies a point in time of a disk to the target of a backup, on the thread of the job.

use std::sync::Arc;

use control::objects::JobState;
use jobs::push::{Action, Push};
use jobs::range::RangeAction;
use jobs::{Early, Event, Now, Outcome, Piece, Span};

use super::Context;
use super::backup::{Prepared, Work, finish};
use super::copy_range::{CANNOT_READ, RangeIo, result};
use super::copying::Copying;
use super::exchange::Flush;
use super::incremental::Incremental;
use super::point_in_time::PointOfDisk;

/// Resources of a running backup. Fields are dropped in this order: I/O that was abandoned ends last.
struct Driver {
    copying: Copying,
    point: Arc<PointOfDisk>,
    range: Option<RangeIo>,
    flush: Option<Flush>,
}

/// Copies the points in time to their targets, and ends the jobs.
pub(super) fn back_up(_context: &Context, prepared: Vec<Prepared>) {
    for Prepared { point, work, .. } in prepared {
        if let Work::Push(copying) = work {
            back_up_one(*copying, point);
        }
    }
}

fn back_up_one(copying: Copying, point: Arc<PointOfDisk>) {
    let job = Arc::clone(&copying.job);
    let event_bus = copying.context.event_bus.clone();
    let mut driver = Driver {
        copying,
        point,
        range: None,
        flush: None,
    };
    let (state, reason) = match driver.run() {
        Ok(()) => (JobState::Done, None),
        Err(Early::Cancelled) => (JobState::Cancelled, None),
        Err(Early::Failed(reason)) => (JobState::Failed, Some(reason)),
    };
    // The devices are free before the end of the job is announced.
    drop(driver);
    finish(&job, &event_bus, state, reason);
}

impl Driver {
    fn run(&mut self) -> Outcome {
        let mut machine = Push::new(self.copying.job.total);
        let mut event = Event::Done;
        loop {
            let job = &self.copying.job;
            let now = Now {
                time: job.started.elapsed(),
                orders: job.orders(),
                lost: self.point.point.error().map(|error| error.to_string()),
            };
            event = match machine.step(&now, event) {
                Action::Wait(time) => job.wait_for_orders(now.orders, time),
                Action::End(outcome) => {
                    if outcome.is_ok() {
                        self.copying.keep_target();
                    }
                    return outcome;
                }
                action => self.execute(action),
            };
        }
    }

    fn execute(&mut self, action: Action) -> Event {
        let job = &self.copying.job;
        match action {
            Action::Open => return self.open(),
            Action::Check => return result(self.copying.check_target()),
            Action::Changed(span) => return self.changed(span),
            Action::Range(action) => return self.copy_range(action),
            Action::Advance { end, bytes } => {
                self.point.point.release(end);
                job.advance(end, bytes);
            }
            Action::EndPoint => self.point.end(),
            Action::Finish => job.set_state(JobState::Finishing, None),
            Action::OpenFlush => return self.open_flush(),
            Action::Flush => {
                let flushed = self.flush.as_mut().map_or(Ok(()), Flush::run);
                return result(flushed);
            }
            Action::Publish => return result(self.copying.publish()),
            Action::Complete => {
                let incremental = self.copying.incremental.as_mut();
                return result(incremental.map_or(Ok(()), Incremental::complete));
            }
            Action::Remove(early) => {
                if let Early::Failed(reason) = early {
                    job.set_state(JobState::Finishing, Some(reason));
                }
                self.copying.remove_target();
            }
            Action::Wait(_) | Action::End(_) => {}
        }
        Event::Done
    }

    fn open(&mut self) -> Event {
        let copying = &self.copying;
        let source = copying.open(&self.point.point.reader(), None);
        let opened = source.and_then(|source| {
            let target = copying.open(&copying.target, None)?;
            Ok(RangeIo::new(source, target))
        });
        result(opened.map(|range| self.range = Some(range)))
    }

    fn open_flush(&mut self) -> Event {
        let target = Arc::clone(&self.copying.target);
        let patient = |io| self.copying.patient(io, None);
        let flush = Flush::prepare(&self.copying.job.disk, target, patient);
        result(flush.map(|flush| self.flush = Some(flush)))
    }

    fn changed(&self, Span { from, end }: Span) -> Event {
        let incremental = self.copying.incremental.as_ref();
        let changed = incremental.and_then(Incremental::frozen);
        let piece = changed.map_or((end, true), |bits| bits.piece(from, end));
        let (end, is_data) = piece;
        Event::Piece(Piece { end, is_data })
    }

    fn copy_range(&mut self, action: RangeAction) -> Event {
        let Some(range) = &mut self.range else {
            return Event::Failed("the copier is not attached".to_owned());
        };
        let name = |error: String| match error.starts_with(CANNOT_READ) {
            true => error,
            false => self.copying.name_target(&error),
        };
        match range.execute(&self.copying.job, action) {
            Event::Failed(error) => Event::Failed(name(error)),
            Event::Abandoned(error) => Event::Abandoned(name(error)),
            event => event,
        }
    }
}
