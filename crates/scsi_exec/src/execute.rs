//! Takes a command from one I/O to the next, for every transport: finds the disk, bounds the memory, waits for data-out, for
//! ranges, for other tasks. What differs between transports is behind [`Transport`].
//!
//! Data-out that came with its command (virtio-scsi) and data-out that has to be requested (iSCSI, R2T) are two answers of
//! [`Transport::data_out`]; where it is awaited the task keeps what it needs, and [`execute`] is called again when it is there.
//! Runs on the worker of the command's queue or connection; a command of one I/O allocates nothing.

use std::sync::Arc;

use block::{IoError, IoErrorKind, IoKind, IoOutcome};
use reactor::{Io, Job, Step};
use scsi::{AbortScope, TaskAttribute, UnitId};

use crate::task::{Granted, Need, Task};
use crate::{Admission, Call, DiskHandles, Exempt, TaskOrder, Units, Want, WorkMemory};

/// Whether the buffer of a command's data is ready for its I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// It is.
    There,
    /// The data of a read lie in memory, and are sent from there: nothing is to be read.
    Borrowed,
    /// The data were requested, or memory for them is short: [`execute`] is called again when they are there.
    Awaited,
}

/// Goes on with a command that waits; called, or dropped with what it holds, on any thread.
pub type Waiter = Box<dyn FnOnce(Granted) + Send>;

/// What a command has and uses in its transport's slot.
pub struct Parts<'a> {
    /// Its task.
    pub task: &'a mut Task,
    /// Its next I/O.
    pub job: &'a mut Job,
    /// The handles of its queue or connection.
    pub disks: &'a mut DiskHandles,
    /// All disks.
    pub units: &'a Units,
    /// Its client's memory.
    pub memory: &'a Arc<WorkMemory>,
    /// Bytes of data-in that its initiator has room for.
    pub data_in: u32,
    /// Bytes of data-out that its initiator has.
    pub data_out: u32,
}

/// A command in its transport's slot.
pub trait Transport {
    /// What it has and uses.
    fn parts(&mut self) -> Parts<'_>;

    /// Makes the buffer ready for its job, a read.
    fn data_in(&mut self, io: &mut Io) -> Data;

    /// Makes the buffer ready with the first `length` bytes of its data-out, which are requested if they are not there.
    fn data_out(&mut self, length: usize) -> Data;

    /// Copies the start of its data-out, which is there.
    fn copy_data_out(&self, data: &mut [u8]);

    /// What goes on with it when a wait is over: [`Task::grant`], then [`execute`]. One that has ended by then does not.
    fn waiter(&mut self) -> Waiter;

    /// May it have one more I/O on scratch memory in this iteration? Else [`execute`] is called again in another.
    fn may_use_scratch(&mut self) -> bool {
        true
    }

    /// Which tasks it does not abort, for they were sent later.
    fn exempt(&self) -> Option<Exempt> {
        None
    }
}

const OFFLINE: IoOutcome = Err(IoError::new(IoErrorKind::Offline));

/// Takes a command as far as it goes without its transport.
#[inline]
pub fn execute(command: &mut impl Transport, io: &mut Io) -> Step {
    loop {
        let parts = command.parts();
        match parts.task.take_need() {
            Need::Data(id, request) => {
                let Some(disk) = parts.disks.get(io, parts.units, id) else {
                    parts.task.resume(OFFLINE, None);
                    continue;
                };
                *parts.job = Job { disk, io: request };
                let data = match request.kind {
                    IoKind::Read => command.data_in(io),
                    IoKind::Write => command.data_out(request.length as usize),
                    // The last ones are a program's, on scratch memory.
                    IoKind::Flush
                    | IoKind::Discard
                    | IoKind::WriteZeroes
                    | IoKind::CompareAndWrite
                    | IoKind::BlockStatus
                    | IoKind::ReplaceState
                    | IoKind::ScsiCommand => Data::There,
                };
                match data {
                    Data::There => return Step::Data,
                    Data::Borrowed => command.parts().task.resume(Ok(()), None),
                    Data::Awaited => return wait(command, Need::Data(id, request)),
                }
            }
            Need::Answer => match parts.task.take_abort() {
                None => return Step::Answer,
                Some(scope) => return abort_first(command, *scope),
            },
            need => {
                if let Some(step) = execute_other(command, io, need) {
                    return step;
                }
            }
        }
    }
}

/// Does what few commands need; `None`: the task needs something else now.
#[inline(never)]
fn execute_other(command: &mut impl Transport, io: &mut Io, need: Need) -> Option<Step> {
    if matches!(need, Need::Scratch(..)) && !command.may_use_scratch() {
        return Some(wait(command, need));
    }
    let parts = command.parts();
    let (task, expected) = (parts.task, parts.data_in.max(parts.data_out));
    match need {
        Need::Scratch(id, request, part) => match parts.disks.get(io, parts.units, id) {
            None => task.resume(OFFLINE, None),
            Some(_) if !task.may_work(parts.memory, parts.data_in) => {
                task.end_for_want_of_memory(expected);
            }
            Some(disk) => {
                *parts.job = Job { disk, io: request };
                return Some(Step::Scratch(task.scratch(request.kind, part)));
            }
        },
        Need::DataOut(length) => {
            if command.data_out(length) == Data::Awaited {
                return Some(wait(command, need));
            }
            let parts = command.parts();
            if parts.task.may_take_data(parts.memory, length) {
                let mut data = vec![0; length.min(parts.data_out as usize)];
                command.copy_data_out(&mut data);
                command.parts().task.with_data(data);
            } else {
                parts.task.end_for_want_of_memory(expected);
            }
        }
        Need::Range(id, offset, length) => {
            let Some(disk) = parts.units.disk(id) else {
                task.resume(OFFLINE, None);
                return None;
            };
            let data = task.data_before_range();
            if data > 0 && command.data_out(data) == Data::Awaited {
                return Some(wait(command, need));
            }
            let waiter = command.waiter();
            disk.range_locks()
                .acquire(offset, length, move |lock| waiter(Granted::Range(lock)));
            return Some(Step::Wait);
        }
        Need::AnswerAndGoOn => return Some(Step::AnswerAndGoOn),
        Need::Over => return Some(Step::Over),
        Need::Nothing | Need::Data(..) | Need::Answer => return Some(Step::Wait),
    }
    None
}

/// What it needs is tried again when its transport says so.
fn wait(command: &mut impl Transport, need: Need) -> Step {
    command.parts().task.keep_need(need);
    Step::Wait
}

/// PREEMPT AND ABORT: the answer waits until the tasks of the scope have ended, on all workers.
#[cold]
fn abort_first(command: &mut impl Transport, scope: AbortScope) -> Step {
    let waiter = command.waiter();
    let call = Call::of_scope(scope, Want::Abort).except(command.exempt());
    let parts = command.parts();
    if let Some(scope) = call.scope() {
        parts.task.set_aborting(scope);
    }
    let runners = parts.units.runners();
    runners.call(&call, move || waiter(Granted::Aborted));
    Step::Wait
}

/// May a command start that is not SIMPLE, or comes while such a one is there? Else its waiter is granted the start later.
#[cold]
pub fn may_start(
    command: &mut impl Transport,
    order: &Arc<TaskOrder>,
    unit: UnitId,
    attribute: TaskAttribute,
) -> bool {
    let admission = order.admit(unit, attribute, || {
        let waiter = command.waiter();
        Box::new(move |ticket| waiter(Granted::Start(ticket)))
    });
    match admission {
        Admission::Now(ticket) => command.parts().task.grant(Granted::Start(ticket)),
        Admission::Defer => return false,
    }
    true
}

#[cfg(test)]
mod tests {
    use reactor::Worker;
    use scsi::{MemoryStore, Plan, Response, Status};

    use super::*;

    struct Fake {
        task: Task,
        job: Job,
        disks: DiskHandles,
        units: Arc<Units>,
        memory: Arc<WorkMemory>,
        data: Data,
    }

    impl Fake {
        fn new(data: Data) -> Fake {
            Fake {
                task: Task::default(),
                job: Job::default(),
                disks: DiskHandles::default(),
                units: Units::new(Box::new(MemoryStore::default())),
                memory: WorkMemory::new(1 << 20),
                data,
            }
        }

        fn execute(&mut self) -> Step {
            let mut step = None;
            let ring = uring::Ring::new(4).unwrap();
            let mut worker = Worker::standalone(ring, latency::Clock::new()).unwrap();
            let added = worker.add(|io, _| {
                step = Some(execute(self, io));
                Err(())
            });
            assert_eq!(added, Err(()));
            step.unwrap()
        }
    }

    impl Transport for Fake {
        fn parts(&mut self) -> Parts<'_> {
            Parts {
                task: &mut self.task,
                job: &mut self.job,
                disks: &mut self.disks,
                units: &self.units,
                memory: &self.memory,
                data_in: 0,
                data_out: 512,
            }
        }

        fn data_in(&mut self, _: &mut Io) -> Data {
            self.data
        }

        fn data_out(&mut self, _: usize) -> Data {
            self.data
        }

        fn copy_data_out(&self, data: &mut [u8]) {
            data.fill(1);
        }

        fn waiter(&mut self) -> Waiter {
            Box::new(|_| {})
        }
    }

    const GONE: scsi::DiskId = scsi::DiskId(7);

    #[test]
    fn io_to_a_removed_disk_fails_and_requests_no_data() {
        for need in [
            Need::Data(GONE, block::IoRequest::write(0, 512)),
            Need::Scratch(GONE, block::IoRequest::read(0, 512), 0..512),
            Need::Range(GONE, 0, 512),
        ] {
            let mut command = Fake::new(Data::Awaited);
            command.task.keep_need(need);
            assert!(matches!(command.execute(), Step::Answer));
            assert!(!command.task.is_ready());
        }
    }

    #[test]
    fn parameter_data_that_is_awaited_is_needed_again_until_it_is_there() {
        let mut command = Fake::new(Data::Awaited);
        command.task.keep_need(Need::DataOut(24));
        for _ in 0..2 {
            assert!(matches!(command.execute(), Step::Wait));
            assert!(command.task.is_ready());
        }
        command.data = Data::There;
        assert!(matches!(command.execute(), Step::Answer));
    }

    #[test]
    fn parameter_data_without_memory_is_task_set_full() {
        let mut command = Fake::new(Data::There);
        command.memory = WorkMemory::new(64);
        let mut other = Task::default();
        assert!(other.may_take_data(&command.memory, 50));
        command.task.keep_need(Need::DataOut(24));
        assert!(matches!(command.execute(), Step::Answer));
        assert_eq!(command.task.take_response().status, Status::TaskSetFull);
        other.end();
        command.task.keep_need(Need::DataOut(24));
        assert!(matches!(command.execute(), Step::Answer));
        assert_ne!(command.task.take_response().status, Status::TaskSetFull);
    }

    #[test]
    fn a_task_that_needs_nothing_waits_and_one_that_is_done_is_answered() {
        let mut command = Fake::new(Data::There);
        assert!(matches!(command.execute(), Step::Wait));
        command.task.start(Plan::Done(Response::good()));
        assert!(matches!(command.execute(), Step::Answer));
        assert!(command.task.take_response().status == Status::Good);
        assert!(command.task.is_idle());
    }

    /// What runs goes on elsewhere; who waits for the command's end, and its memory, stay with the command.
    #[test]
    fn what_is_detached_takes_nobody_along_who_waits_for_the_command() {
        let memory = WorkMemory::new(64);
        let (hold, holding) = crate::Holding::new();
        let mut task = Task::default();
        task.hold(&hold);
        drop(hold);
        assert!(task.may_take_data(&memory, 64));
        task.keep_need(Need::AnswerAndGoOn);
        let detached = task.detach();
        assert!(detached.is_ready() && !task.is_ready());
        assert!(!holding.wait(std::time::Duration::ZERO));
        drop(task.end());
        assert!(holding.wait(std::time::Duration::ZERO));
        assert!(Task::default().may_take_data(&memory, 64));
    }
}
