//! Runs a task without its queue or connection: a sanitize operation after its response or abort, after its
//! initiator left, or after a restart.
//!
//! Each task is a [`Source`] on the worker that it was left on, and removes itself when the task ends. If the worker ends first, or the
//! disk is removed from the process, the task is dropped; it resumes when the disk is added again.

use std::convert::Infallible;
use std::sync::Arc;

use bdev::{Disk, Submission};
use block::{IoError, IoErrorKind, IoOutcome};
use guest_memory::IoBuffer;
use latency::{QueueRecord, Stamp};
use reactor::{Io, Source, SourceId, Tag, WorkerHandle};
use request_engine::Pace;

use crate::task::Need;
use crate::{DiskHandles, Task, Units};

/// Executes the rest of a task on this worker, independently of the caller.
pub fn continue_in_background(worker: &WorkerHandle, units: &Arc<Units>, task: Task) {
    let (handle, units) = (worker.clone(), units.clone());
    worker.send(move |worker| {
        let added: Result<SourceId, Infallible> = worker.add(|_, id| {
            Ok(Box::new(Background {
                id,
                worker: handle,
                units,
                task,
                disks: DiskHandles::default(),
                in_flight: false,
                stopped: false,
            }))
        });
        let Ok(_) = added;
    });
}

struct Background {
    id: SourceId,
    worker: WorkerHandle,
    units: Arc<Units>,
    /// The task. While an I/O is in flight and after the task's end, there is no next step.
    task: Task,
    disks: DiskHandles,
    in_flight: bool,
    /// No more I/O is started.
    stopped: bool,
}

impl Background {
    /// Stops the task and removes the source from its worker.
    fn end_task(&mut self) {
        self.stop();
        let id = self.id;
        self.worker.send(move |worker| worker.stop(id, |_, _| {}));
    }

    fn run(&mut self, io: &mut Io) {
        let tag = Tag {
            source: self.id,
            slot: 0,
        };
        let mut pace = Pace::default();
        while !pace.is_exhausted() {
            match self.task.take_need() {
                Need::Nothing => return,
                Need::Scratch(id, request, part) => {
                    let mut buffer = self.task.scratch(request.kind, part);
                    pace.count(buffer.len(), true);
                    let submitted = match self.disks.get(io, &self.units, id) {
                        Some(disk) => io.submit(disk, &request, &mut buffer, tag),
                        None => Submission::Done(Err(IoError::new(IoErrorKind::Offline))),
                    };
                    match submitted {
                        Submission::Pending => self.in_flight = true,
                        Submission::Done(outcome) => self.task.resume(outcome, Some(*buffer)),
                    }
                }
                Need::AnswerAndDetach => self.task.continue_detached(),
                // No initiator is left to send data-out or receive a response.
                Need::Answer
                | Need::Finished
                | Need::Data(..)
                | Need::DataOut(_)
                | Need::Range(..) => {
                    self.task.abandon();
                    return self.end_task();
                }
            }
        }
    }
}

impl Source for Background {
    fn ready(&mut self, _now: Stamp) -> bool {
        !self.stopped && self.task.is_ready()
    }

    fn drain(&mut self, io: &mut Io, _noticed: Stamp) {
        self.run(io);
    }

    fn finish(
        &mut self,
        _io: &mut Io,
        _slot: u32,
        buffer: IoBuffer,
        outcome: IoOutcome,
        _reaped: Stamp,
    ) {
        self.in_flight = false;
        if !self.stopped {
            self.task.resume(outcome, Some(buffer));
        }
    }

    fn publish(&mut self, _io: &mut Io) {}

    fn arm(&mut self) -> bool {
        !self.stopped && self.task.is_ready()
    }

    fn in_flight(&self) -> usize {
        usize::from(self.in_flight)
    }

    fn stop(&mut self) {
        self.stopped = true;
    }

    fn close_disk(&mut self, io: &mut Io, disk: &Arc<Disk>) {
        if self.disks.close_disk(io, disk) {
            self.end_task();
        }
    }

    fn closed(&mut self, io: &mut Io) {
        self.disks.close(io);
    }

    fn record(&self) -> Option<Arc<QueueRecord>> {
        None
    }
}
