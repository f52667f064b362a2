//! Takes a command from one I/O to the next: the same for every transport. What differs is behind [`Transport`].
//!
//! Data-out that came with its command (virtio-scsi) and data-out that has to be requested (iSCSI) are two answers of
//! [`Transport::data_out`]. A transport that says "awaited" keeps the step, and gives it to [`execute`] again when the data, or the
//! memory, is there. Runs on the worker of the command's queue or connection; a command of one I/O allocates nothing.

use std::sync::Arc;

use bdev::{Disk, RangeLock};
use block::{IoError, IoErrorKind, IoKind, IoRequest};
use guest_memory::IoBuffer;
use reactor::{DiskHandle, Io};
use scsi::{DiskId, TaskAttribute, UnitId};

use crate::{
    Admission, Held, Task, TaskOrder, TaskStep, Ticket, Units, WorkMemory, end_for_want_of_memory,
};

/// What the transport does next for a command.
#[derive(Debug)]
pub enum Next {
    /// Submit this I/O on the command's own buffer, from its start; then [`Task::resume`].
    Data(DiskHandle, IoRequest),
    /// Submit this I/O on this memory; then [`Task::resume`] with it.
    Scratch(DiskHandle, IoRequest, Box<IoBuffer>),
    /// Nothing, until what the command waits for is there.
    Wait,
    /// Send the response.
    Answer,
    /// Send the response; the task goes on without its initiator: [`Task::go_on`].
    AnswerAndGoOn,
    /// Free the slot: the command was answered before.
    Over,
}

/// Whether a command's data-out is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataOut {
    /// It is.
    There,
    /// The initiator was asked for it, or memory for it is short: the step is tried again.
    Awaited,
}

/// Whether the buffer for a command's data-in is there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataIn {
    /// It is.
    There,
    /// The data lie in memory, and are sent from there: the read is done.
    Lent,
    /// Memory for it is short: the step is tried again.
    Awaited,
}

/// What a command waited for.
pub enum Granted {
    /// Its turn among the tasks of its unit; it keeps the ticket until it has ended.
    Turn(Option<Ticket>),
    /// The range of its disk: [`Task::granted`] is next.
    Range(RangeLock),
}

/// Goes on with a command that waits; it is called, or dropped with what it holds, on any thread.
pub type Waiter = Box<dyn FnOnce(Granted) + Send>;

/// What a command has and holds in its transport's slot.
pub struct Parts<'a> {
    /// Its task.
    pub task: &'a mut Task,
    /// What it holds of its client's memory.
    pub held: &'a mut Held,
    /// That memory.
    pub memory: &'a Arc<WorkMemory>,
    /// Bytes of data-in that its initiator has room for.
    pub data_in: u32,
    /// Bytes of data-out that its initiator sends.
    pub data_out: u32,
}

/// One command, in its transport's slot.
pub trait Transport {
    /// Its task, and what it needs.
    fn parts(&mut self) -> Parts<'_>;

    /// All disks.
    fn units(&self) -> &Units;

    /// The handle on a disk; `None` when it is gone.
    fn disk(&mut self, io: &mut Io, id: DiskId) -> Option<DiskHandle>;

    /// Are the first `length` bytes of its data-out there? Else they are requested.
    fn data_out(&mut self, length: usize) -> DataOut;

    /// A copy of so much of the data-out, or of what there is of it.
    fn copy_data_out(&mut self, length: usize) -> Vec<u8>;

    /// Is there a buffer for this read's data?
    fn data_in(&mut self, io: &mut Io, disk: DiskHandle, request: &IoRequest) -> DataIn;

    /// May it have one more I/O on scratch memory in this turn? Else the step is tried again in another.
    fn may_use_scratch(&mut self) -> bool;

    /// The step that is tried again.
    fn keep(&mut self, step: TaskStep);

    /// Who goes on with the command when its wait is over. A command that has ended by then gives back what it is granted.
    fn waiter(&mut self) -> Waiter;
}

/// Takes a command's step, and those after it until the transport has to act.
#[inline]
pub fn execute(command: &mut impl Transport, io: &mut Io, mut step: TaskStep) -> Next {
    loop {
        step = match step {
            TaskStep::Answer => return Next::Answer,
            TaskStep::AnswerAndGoOn => return Next::AnswerAndGoOn,
            TaskStep::Over => return Next::Over,
            TaskStep::Data(id, request) => {
                let Some(disk) = command.disk(io, id) else {
                    step = offline(command, None);
                    continue;
                };
                let there = match request.kind {
                    IoKind::Read => match command.data_in(io, disk, &request) {
                        DataIn::There => true,
                        DataIn::Awaited => false,
                        DataIn::Lent => {
                            step = command.parts().task.resume(Ok(()), None);
                            continue;
                        }
                    },
                    IoKind::Write => command.data_out(request.length as usize) == DataOut::There,
                    IoKind::Flush | IoKind::Discard | IoKind::WriteZeroes => true,
                };
                if there {
                    return Next::Data(disk, request);
                }
                command.keep(TaskStep::Data(id, request));
                return Next::Wait;
            }
            TaskStep::Scratch(id, request, buffer) => {
                if !command.may_use_scratch() {
                    command.keep(TaskStep::Scratch(id, request, buffer));
                    return Next::Wait;
                }
                let parts = command.parts();
                if !parts
                    .held
                    .take_for_work(parts.memory, parts.task, parts.data_in)
                {
                    step = full(command);
                    continue;
                }
                match command.disk(io, id) {
                    Some(disk) => return Next::Scratch(disk, request, buffer),
                    None => offline(command, Some(*buffer)),
                }
            }
            TaskStep::NeedData(length) => match command.data_out(length) {
                DataOut::There => with_data(command, length),
                DataOut::Awaited => {
                    command.keep(TaskStep::NeedData(length));
                    return Next::Wait;
                }
            },
            TaskStep::Acquire(id, offset, length) => match command.units().disk(id) {
                Some(disk) => {
                    acquire(command, id, &disk, offset, length);
                    return Next::Wait;
                }
                None => offline(command, None),
            },
        }
    }
}

/// May a command begin that is not SIMPLE, or comes while such a one is there? Else its waiter is given its turn later.
#[cold]
pub fn take_turn(
    command: &mut impl Transport,
    order: &Arc<TaskOrder>,
    unit: UnitId,
    attribute: TaskAttribute,
) -> Admission {
    order.admit(unit, attribute, || {
        let waiter = command.waiter();
        Box::new(move |ticket| waiter(Granted::Turn(ticket)))
    })
}

/// Asks for a range of a disk, where nothing else can change anything while the task runs.
#[cold]
fn acquire(command: &mut impl Transport, id: DiskId, disk: &Disk, offset: u64, length: u64) {
    let data = command.parts().task.data_before_range();
    if data > 0 && command.data_out(data) == DataOut::Awaited {
        return command.keep(TaskStep::Acquire(id, offset, length));
    }
    let waiter = command.waiter();
    disk.range_locks()
        .acquire(offset, length, move |lock| waiter(Granted::Range(lock)));
}

#[cold]
fn with_data(command: &mut impl Transport, length: usize) -> TaskStep {
    let parts = command.parts();
    if !parts.held.take_for_data(parts.memory, length) {
        return full(command);
    }
    let data = command.copy_data_out(length);
    command.parts().task.with_data(&data)
}

#[cold]
fn full(command: &mut impl Transport) -> TaskStep {
    let parts = command.parts();
    end_for_want_of_memory(parts.task, parts.data_in.max(parts.data_out))
}

#[cold]
fn offline(command: &mut impl Transport, scratch: Option<IoBuffer>) -> TaskStep {
    let offline = Err(IoError::new(IoErrorKind::Offline));
    command.parts().task.resume(offline, scratch)
}

#[cfg(test)]
mod tests {
    use reactor::Worker;
    use scsi::MemoryStore;

    use super::*;

    struct Fake {
        task: Task,
        held: Held,
        memory: Arc<WorkMemory>,
        units: Arc<Units>,
        has_disk: bool,
        has_turn: bool,
        data_out: DataOut,
        data_in: DataIn,
        kept: Option<TaskStep>,
    }

    impl Fake {
        fn new() -> Fake {
            Fake {
                task: Task::default(),
                held: Held::default(),
                memory: WorkMemory::new(1 << 20),
                units: Units::new(Box::new(MemoryStore::default())),
                has_disk: true,
                has_turn: true,
                data_out: DataOut::There,
                data_in: DataIn::There,
                kept: None,
            }
        }

        fn take(&mut self, step: TaskStep) -> Next {
            let mut next = None;
            let added = Worker::standalone().unwrap().add(|io, _| {
                next = Some(execute(self, io, step));
                Err(())
            });
            assert_eq!(added, Err(()));
            next.unwrap()
        }
    }

    impl Transport for Fake {
        fn parts(&mut self) -> Parts<'_> {
            Parts {
                task: &mut self.task,
                held: &mut self.held,
                memory: &self.memory,
                data_in: 0,
                data_out: 512,
            }
        }

        fn units(&self) -> &Units {
            &self.units
        }

        fn disk(&mut self, _: &mut Io, _: DiskId) -> Option<DiskHandle> {
            self.has_disk.then_some(DiskHandle::NONE)
        }

        fn data_out(&mut self, _: usize) -> DataOut {
            self.data_out
        }

        fn copy_data_out(&mut self, length: usize) -> Vec<u8> {
            vec![0; length]
        }

        fn data_in(&mut self, _: &mut Io, _: DiskHandle, _: &IoRequest) -> DataIn {
            self.data_in
        }

        fn may_use_scratch(&mut self) -> bool {
            self.has_turn
        }

        fn keep(&mut self, step: TaskStep) {
            self.kept = Some(step);
        }

        fn waiter(&mut self) -> Waiter {
            Box::new(|_| {})
        }
    }

    const DISK: DiskId = DiskId(0);

    #[test]
    fn a_write_whose_data_is_awaited_is_submitted_when_it_is_there() {
        let mut command = Fake::new();
        command.data_out = DataOut::Awaited;
        let step = TaskStep::Data(DISK, IoRequest::write(4096, 512));
        assert!(matches!(command.take(step), Next::Wait));
        let kept = command.kept.take().expect("a step to try again");
        command.data_out = DataOut::There;
        let next = command.take(kept);
        assert!(
            matches!(next, Next::Data(_, request) if request.offset == 4096 && request.length == 512)
        );
    }

    #[test]
    fn parameter_data_that_is_awaited_is_asked_for_again() {
        let mut command = Fake::new();
        command.data_out = DataOut::Awaited;
        assert!(matches!(command.take(TaskStep::NeedData(24)), Next::Wait));
        assert!(matches!(command.kept, Some(TaskStep::NeedData(24))));
    }

    #[test]
    fn a_read_whose_data_is_lent_submits_nothing() {
        let mut command = Fake::new();
        command.data_in = DataIn::Lent;
        let step = TaskStep::Data(DISK, IoRequest::read(0, 512));
        assert!(matches!(command.take(step), Next::Answer));
    }

    #[test]
    fn an_io_on_a_disk_that_is_gone_is_answered_and_its_data_is_not_requested() {
        let mut command = Fake::new();
        (command.has_disk, command.data_out) = (false, DataOut::Awaited);
        let write = TaskStep::Data(DISK, IoRequest::write(0, 512));
        assert!(matches!(command.take(write), Next::Answer));
        let acquire = TaskStep::Acquire(DISK, 0, 512);
        assert!(matches!(command.take(acquire), Next::Answer));
        assert!(command.kept.is_none());
    }

    #[test]
    fn scratch_io_that_gives_way_keeps_its_memory() {
        let mut command = Fake::new();
        command.has_turn = false;
        let buffer = Box::new(IoBuffer::owned(512));
        let step = TaskStep::Scratch(DISK, IoRequest::read(0, 512), buffer);
        assert!(matches!(command.take(step), Next::Wait));
        let kept = command.kept.take().expect("a step to try again");
        command.has_turn = true;
        let next = command.take(kept);
        assert!(matches!(next, Next::Scratch(_, _, buffer) if buffer.len() == 512));
    }

    #[test]
    fn parameter_data_for_which_there_is_no_memory_is_answered_task_set_full() {
        let mut command = Fake::new();
        let mut other = Held::default();
        assert!(other.take_for_data(&command.memory, 1 << 19));
        assert!(matches!(command.take(TaskStep::NeedData(24)), Next::Answer));
        let response = command.task.take_response();
        assert_eq!(response.status, scsi::Status::TaskSetFull);
    }
}
