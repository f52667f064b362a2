//! A task that goes on without the queue or connection that brought it: a sanitize operation whose command was answered
//! or aborted, whose initiator has left, or which a restart interrupted.
//!
//! A source of its own on the worker where it was left; it ends itself when the task is over. If the worker ends first, or
//! the disk is taken out of the process, the task is dropped where it is, to go on when the disk is there again.

use std::convert::Infallible;
use std::sync::Arc;

use bdev::{Disk, Submission};
use block::{IoError, IoErrorKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use latency::{QueueRecord, Stamp};
use reactor::{DiskHandle, Io, Source, SourceId, Tag, WorkerHandle};
use scsi::DiskId;
use uring::RingFd;

use crate::{Task, TaskStep, Units};

/// I/Os in one iteration when they end at once, and bytes that count as one more.
const STEPS_MAX: usize = 32;
const STEP_BYTES: usize = 128 << 10;

/// Has a task go on to its end on this worker; `first` gives its next step.
pub fn go_on_in_background(
    worker: &WorkerHandle,
    units: &Arc<Units>,
    mut task: Task,
    first: impl FnOnce(&mut Task) -> TaskStep + Send + 'static,
) {
    let (handle, units) = (worker.clone(), units.clone());
    worker.send(move |worker| {
        let step = Some(first(&mut task));
        let added: Result<SourceId, Infallible> = worker.add(|_, id| {
            Ok(Box::new(Background {
                id,
                worker: handle,
                units,
                task,
                step,
                disk: None,
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
    task: Task,
    /// `None`: an I/O is in flight, or it is over.
    step: Option<TaskStep>,
    disk: Option<(DiskId, DiskHandle)>,
    in_flight: bool,
    /// Nothing more is begun.
    stopped: bool,
}

impl Background {
    fn disk(&mut self, io: &mut Io, id: DiskId) -> Option<DiskHandle> {
        match self.disk {
            Some((known, handle)) if known == id => Some(handle),
            other => {
                let handle = io.open(&self.units.disk(id)?);
                if let Some((_, old)) = other {
                    io.close(old);
                }
                self.disk = Some((id, handle));
                Some(handle)
            }
        }
    }

    fn submit(
        &mut self,
        io: &mut Io,
        disk: DiskId,
        request: &IoRequest,
        buffer: &mut IoBuffer,
    ) -> Submission {
        let tag = Tag {
            source: self.id,
            slot: 0,
        };
        match self.disk(io, disk) {
            Some(handle) => io.submit(handle, request, buffer, tag),
            None => Submission::Done(Err(IoError::new(IoErrorKind::Offline))),
        }
    }

    /// It begins nothing more, and is taken out of its worker.
    fn leave(&mut self) {
        self.stop();
        let id = self.id;
        self.worker.send(move |worker| worker.stop(id, |_, _| {}));
    }

    fn run(&mut self, io: &mut Io) {
        let mut steps = 0;
        while steps < STEPS_MAX {
            let Some(step) = self.step.take() else { return };
            self.step = Some(match step {
                TaskStep::Scratch(disk, request, mut buffer) => {
                    steps += 1 + buffer.len() / STEP_BYTES;
                    match self.submit(io, disk, &request, &mut buffer) {
                        Submission::Pending => {
                            self.in_flight = true;
                            return;
                        }
                        Submission::Done(outcome) => self.task.resume(outcome, Some(*buffer)),
                    }
                }
                TaskStep::AnswerAndGoOn => self.task.go_on(),
                // Nobody is there any more who has data or waits for an answer.
                TaskStep::Answer
                | TaskStep::Over
                | TaskStep::Data(..)
                | TaskStep::NeedData(_)
                | TaskStep::Acquire(..) => {
                    self.task.abandon();
                    return self.leave();
                }
            });
        }
    }
}

impl Source for Background {
    fn ready(&mut self, _now: Stamp) -> bool {
        self.step.is_some()
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
            self.step = Some(self.task.resume(outcome, Some(buffer)));
        }
    }

    fn publish(&mut self, _io: &mut Io) {}

    fn arm(&mut self) -> bool {
        self.step.is_some()
    }

    fn disarm(&mut self) {}

    fn in_flight(&self) -> usize {
        usize::from(self.in_flight)
    }

    fn kick(&self) -> Option<RingFd> {
        None
    }

    fn stop(&mut self) {
        (self.step, self.stopped) = (None, true);
    }

    fn let_go(&mut self, io: &mut Io, disk: &Arc<Disk>) {
        if let Some((_, handle)) = self.disk.take_if(|(_, handle)| io.is_of(*handle, disk)) {
            io.close(handle);
            self.leave();
        }
    }

    fn closed(&mut self, io: &mut Io) {
        if let Some((_, handle)) = self.disk.take() {
            io.close(handle);
        }
    }

    fn record(&self) -> Option<Arc<QueueRecord>> {
        None
    }
}
