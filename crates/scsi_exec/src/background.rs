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
        let Ok(id) = added;
        worker.wake(id);
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

    /// Executes steps until an I/O is in flight, or until the next iteration of the worker.
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
        let id = self.id;
        self.worker.send(move |worker| worker.wake(id));
    }
}

impl Source for Background {
    /// No client waits for a step, so that the worker does not poll for it.
    fn is_polled(&self) -> bool {
        false
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

    fn publish(&mut self, io: &mut Io) {
        if !self.stopped {
            self.run(io);
        }
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

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::{Duration, Instant};

    use bdev::{Delay, Null, NullOptions};
    use reactor::{PollLimit, PollLimits, Pool, WorkerOptions};
    use scsi::{
        Command, Lun, MemoryStore, Plan, StateSetters, Target, TargetPort, TaskAttribute,
        TransportId,
    };

    use super::*;

    /// SANITIZE, block erase with IMMED, of a disk.
    fn sanitizing(units: &Units, disk: &Arc<Disk>) -> Task {
        let port = Arc::new(TargetPort {
            relative_id: 1,
            group: 1,
            name: None,
            device_name: None,
            state_setters: StateSetters::default(),
        });
        let target = Target::new(vec![port.clone()]);
        let initiator = TransportId::iscsi_device("iqn.2026-11.org.example:i");
        let nexus = target.attach_nexus(initiator, port);
        target.attach_unit(0, units.unit(disk)).unwrap();
        let view = target.view();
        let begin = |cdb: &[u8]| {
            view.begin(&Command {
                nexus: &nexus,
                lun: Lun([0; 8]),
                cdb,
                attribute: TaskAttribute::Simple,
                data_out_length: 0,
                data_in_length: 0,
            })
        };
        // The first command after the attachment reports a unit attention.
        drop(begin(&[0; 6]));
        let mut task = Task::default();
        let plan = begin(&[0x48, 0x82, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert!(matches!(plan, Plan::Run(_)));
        task.start(plan);
        task
    }

    /// Runs SANITIZE of a disk in the background, on a worker that polls only for rings. Returns its busy and empty iterations.
    fn iterations(device: Arc<dyn bdev::BlockDevice>) -> (u64, u64) {
        let options = WorkerOptions {
            count: 1,
            cpus: Vec::new(),
            poll: PollLimits {
                rings: PollLimit::Micros(50),
                network: PollLimit::Never,
                disk: PollLimit::Never,
            },
        };
        let pool = Pool::start(&options).unwrap();
        let units = Units::new(Box::new(MemoryStore::default()));
        let disk = Arc::new(Disk::new("d", None, device).unwrap());
        let task = sanitizing(&units, &disk);
        let worker = pool.select_worker();
        continue_in_background(&worker, &units, task);
        let begin = Instant::now();
        loop {
            let (sender, count) = channel();
            worker.send(move |worker| sender.send(worker.source_count()).unwrap());
            if count.recv().unwrap() == 0 {
                break;
            }
            assert!(begin.elapsed() < Duration::from_secs(60), "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
        let (_, counters) = pool.counters()[0];
        (counters.busy_iterations, counters.empty_iterations)
    }

    #[test]
    fn a_task_does_not_poll_on_a_worker_of_connections() {
        let options = NullOptions {
            size: 1 << 40,
            ..NullOptions::default()
        };
        let null: Arc<dyn bdev::BlockDevice> = Arc::new(Null::create(options).unwrap());
        let slow = Delay::new(null.clone(), Duration::from_micros(100));
        for device in [null, Arc::new(slow)] {
            let (busy, empty) = iterations(device);
            assert!(busy > 4 && empty * 4 < busy, "{busy} busy, {empty} empty");
        }
    }
}
