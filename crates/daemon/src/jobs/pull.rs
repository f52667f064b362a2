//! Drives [`jobs::pull`]: serves points in time over NBD until the backup is ended, on one thread for all its disks. Hung I/O of a disk
//! delays only the end of its own job.

use std::sync::mpsc::Receiver;
use std::sync::{Arc, Mutex};

use control::EventKind;
use control::objects::JobState;
use jobs::pull::{Action, Pull};
use jobs::{Early, Event, Now, Outcome};

use super::backup::{Prepared, finish, take};
use super::exchange::failed;
use super::point_in_time::end_all;
use super::{Context, Job};

struct Driver<'a> {
    context: &'a Context,
    jobs: Vec<Arc<Job>>,
    /// `None`: the disk has lost its point in time.
    disks: Vec<Option<Prepared>>,
    /// Another thread ends the job of a disk that has lost its point in time.
    are_leaving: Vec<bool>,
    /// Reasons of the lost points in time.
    lost: Vec<Option<String>>,
    /// Receives the numbers of the disks that use their sources alone again, after the end of their points in time.
    restored: Option<Receiver<usize>>,
}

/// Serves the points in time, and ends the jobs.
pub(super) fn serve(context: &Context, prepared: Vec<Prepared>) {
    let jobs: Vec<Arc<Job>> = prepared.iter().map(|one| Arc::clone(&one.job)).collect();
    for job in &jobs {
        job.set_state(JobState::Ready, None);
        context.event_bus.publish(EventKind::JobReady, &job.disk);
    }
    let mut driver = Driver {
        context,
        lost: vec![None; jobs.len()],
        are_leaving: vec![false; jobs.len()],
        jobs,
        disks: prepared.into_iter().map(Some).collect(),
        restored: None,
    };
    let (state, reason) = match driver.run() {
        Ok(()) => (JobState::Done, None),
        Err(Early::Cancelled) => (JobState::Cancelled, None),
        Err(Early::Failed(reason)) => (JobState::Failed, Some(reason)),
    };
    for disk in driver.restored.take().into_iter().flatten() {
        // The files are free before the end of the job is announced.
        driver.disks[disk] = None;
        finish(
            &driver.jobs[disk],
            &context.event_bus,
            state,
            reason.clone(),
        );
    }
}

impl Driver<'_> {
    /// Returns the jobs that this thread ends.
    fn jobs(&self) -> impl Iterator<Item = &Arc<Job>> {
        let all = self.jobs.iter().zip(&self.are_leaving);
        all.filter(|(_, is_leaving)| !**is_leaving)
            .map(|(job, _)| job)
    }

    fn run(&mut self) -> Outcome {
        let mut machine = Pull::new(self.jobs.len());
        let mut event = Event::Done;
        loop {
            let Some(job) = self.jobs().next().cloned() else {
                let reason = self.lost.iter().flatten().next().cloned();
                return Err(Early::Failed(reason.unwrap_or_default()));
            };
            let now = Now {
                orders: job.orders(),
                ..Now::default()
            };
            self.find_lost();
            event = match machine.step(&now, &self.lost, event) {
                Action::Wait(time) => job.wait_for_orders(now.orders, time),
                Action::End(outcome) => return outcome,
                action => self.execute(action),
            };
        }
    }

    fn find_lost(&mut self) {
        for (one, lost) in self.disks.iter().zip(&mut self.lost) {
            if let Some(one) = one
                && lost.is_none()
            {
                let name = one.disk.name();
                let error = one.point.point.error();
                *lost = error.map(|error| format!("disk {name}: {error}"));
            }
        }
    }

    fn execute(&mut self, action: Action) -> Event {
        let served = self.disks.iter_mut().flatten();
        match action {
            Action::Lose(disk, reason) => self.lose(disk, reason),
            Action::Finish => served.for_each(|one| one.job.set_state(JobState::Finishing, None)),
            Action::Unexport => served.for_each(|one| one.unserve(self.context)),
            Action::EndPoints => {
                let points = self.disks.iter().enumerate();
                let points =
                    points.filter_map(|(disk, one)| Some((disk, Arc::clone(&one.as_ref()?.point))));
                self.restored = Some(end_all(self.context, points));
            }
            Action::Complete(disk) => return self.complete(disk),
            Action::Revoke(disk) => {
                let one = self.disks[disk].as_mut();
                if let Some(incremental) = one.and_then(|one| one.work.incremental()) {
                    incremental.revoke();
                }
            }
            Action::Discard => self.disks.iter_mut().for_each(|one| *one = None),
            Action::Wait(_) | Action::End(_) => {}
        }
        Event::Done
    }

    /// Ends the export of a disk that has lost its point in time. Another thread ends its job, because the disk's I/O may hang.
    fn lose(&mut self, disk: usize, reason: String) {
        let Some(one) = self.disks[disk].take() else {
            return;
        };
        self.are_leaving[disk] = true;
        one.job.set_state(JobState::Finishing, Some(reason.clone()));
        one.unserve(self.context);
        one.point.point.end();
        // Stays here if the thread cannot start.
        let one = Arc::new(Mutex::new(Some((one, reason))));
        let (of_thread, context) = (Arc::clone(&one), self.context.clone());
        let started = self.context.jobs.run(move || {
            if let Some((one, reason)) = take(&of_thread) {
                leave(&context, one, reason);
            }
        });
        if started.is_err()
            && let Some((one, reason)) = take(&one)
        {
            leave(self.context, one, reason);
        }
    }

    fn complete(&mut self, disk: usize) -> Event {
        let Some(one) = &mut self.disks[disk] else {
            let refusal = failed(&self.jobs[disk].disk, &"its point in time is lost");
            return Event::Failed(refusal.to_string());
        };
        let incremental = one.work.incremental();
        match incremental.map_or(Ok(()), |incremental| incremental.complete()) {
            Ok(()) => Event::Done,
            Err(refusal) => Event::Failed(refusal.to_string()),
        }
    }
}

/// Ends the job of a disk that has lost its point in time, when clients use the disk's source alone.
fn leave(context: &Context, one: Prepared, reason: String) {
    one.point.end();
    let job = Arc::clone(&one.job);
    // The files are free before the end of the job is announced.
    drop(one);
    finish(&job, &context.event_bus, JobState::Failed, Some(reason));
}
