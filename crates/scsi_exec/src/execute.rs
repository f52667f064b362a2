//! Executes a command from one I/O to the next, for every transport: finds the disk, limits memory, and waits for data-out, range locks and
//! other tasks. [`Transport`] covers the differences between transports.
//!
//! Data-out that came with its command (virtio-scsi) and data-out that must be requested (iSCSI, R2T) are two results of
//! [`Transport::data_out`]. While the command waits, the task keeps its need; [`execute`] is called again when the data arrive. Runs on the
//! worker of the command's queue or connection. A command of one I/O allocates nothing.

use std::sync::Arc;

use block::{IoError, IoErrorKind, IoKind, IoOutcome};
use reactor::{Io, Job, Step};
use scsi::{AbortScope, TaskAttribute, UnitId};

use crate::task::{Granted, Need, Task};
use crate::{Admission, Call, DiskHandles, Exempt, TaskOperation, TaskOrder, Units, WorkMemory};

/// State of the buffer for a command's data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Data {
    /// Ready for the I/O.
    Ready,
    /// The data of a read are in memory and are sent from there: no I/O is needed.
    Borrowed,
    /// The data were requested, or memory is short: [`execute`] is called again when they are available.
    Awaited,
}

/// Resumes a waiting command. Called, or dropped with everything it holds, on any thread.
pub type Waiter = Box<dyn FnOnce(Granted) + Send>;

/// Borrowed state of a command in its transport's slot.
pub struct Parts<'a> {
    /// Task of the command.
    pub task: &'a mut Task,
    /// Next I/O of the command.
    pub job: &'a mut Job,
    /// Disk handles of the command's queue or connection.
    pub disks: &'a mut DiskHandles,
    /// All logical units.
    pub units: &'a Units,
    /// Memory budget of the command's client.
    pub memory: &'a Arc<WorkMemory>,
    /// Size of the initiator's data-in buffer, in bytes.
    pub data_in: u32,
    /// Size of the initiator's data-out, in bytes.
    pub data_out: u32,
}

/// A command in its transport's slot.
pub trait Transport {
    /// Returns the command's state.
    fn parts(&mut self) -> Parts<'_>;

    /// Prepares the buffer for the command's job, a read.
    fn data_in(&mut self, io: &mut Io) -> Data;

    /// Prepares the buffer with the first `length` bytes of data-out, and requests them if they have not arrived.
    fn data_out(&mut self, length: usize) -> Data;

    /// Copies the start of the data-out, which has arrived.
    fn copy_data_out(&self, data: &mut [u8]);

    /// Returns a callback that resumes the command after a wait: [`Task::grant`], then [`execute`]. It has no effect if the command has
    /// ended by then.
    fn waiter(&mut self) -> Waiter;

    /// Returns true if the command may run one more I/O on scratch memory in this iteration. Otherwise [`execute`] is called again in a
    /// later iteration.
    fn may_use_scratch(&mut self) -> bool {
        true
    }

    /// Returns the later tasks that the command does not abort.
    fn exempt(&self) -> Option<Exempt> {
        None
    }
}

const OFFLINE: IoOutcome = Err(IoError::new(IoErrorKind::Offline));

/// Advances a command until it needs its transport.
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
                    // The last ones belong to programs and use scratch memory.
                    IoKind::Flush
                    | IoKind::Discard
                    | IoKind::WriteZeroes
                    | IoKind::CompareAndWrite
                    | IoKind::BlockStatus
                    | IoKind::ReplaceState
                    | IoKind::ScsiCommand => Data::Ready,
                };
                match data {
                    Data::Ready => return Step::Data,
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

/// Serves the rare needs. Returns `None` if the task has a new need.
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
                task.end_without_memory(expected);
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
                parts.task.end_without_memory(expected);
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
        Need::AnswerAndDetach => return Some(Step::AnswerAndDetach),
        Need::Finished => return Some(Step::Finished),
        Need::Nothing | Need::Data(..) | Need::Answer => return Some(Step::Wait),
    }
    None
}

/// Returns the need to the task until the transport calls [`execute`] again.
fn wait(command: &mut impl Transport, need: Need) -> Step {
    command.parts().task.return_need(need);
    Step::Wait
}

/// PREEMPT AND ABORT: delays the response until the tasks of the scope have ended on all workers.
#[cold]
fn abort_first(command: &mut impl Transport, scope: AbortScope) -> Step {
    let waiter = command.waiter();
    let call = Call::of_scope(scope, TaskOperation::Abort).except(command.exempt());
    let parts = command.parts();
    if let Some(scope) = call.scope() {
        parts.task.set_aborting(scope);
    }
    let runners = parts.units.runners();
    runners.call(&call, move || waiter(Granted::Aborted));
    Step::Wait
}

/// Returns true if the command may start now. Called for a command that is not SIMPLE, or that arrives while such a command is present.
/// Otherwise its waiter is granted the start later.
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
    use block::{DiskInfo, Geometry};
    use reactor::Worker;
    use scsi::{
        Command, Directory, DiskId, LogicalUnit, Lun, MemoryStore, PlainEnd, PlainIo, Plan,
        Response, Status, Target, TargetPort, TransportId, UnitConfig,
    };

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

    const GONE: DiskId = DiskId(7);

    /// Returns the plan for a command to a unit of the disk [`GONE`] with blocks of 512 bytes.
    fn plan_of(cdb: &[u8], data_in_length: u64, data_out_length: u64) -> Plan {
        let port = Arc::new(TargetPort {
            relative_id: 1,
            group: 1,
            name: None,
            device_name: None,
            state_setters: scsi::StateSetters::default(),
        });
        let target = Target::new(vec![port.clone()]);
        let initiator = TransportId::iscsi_device("iqn.2026-11.org.example:i");
        let nexus = target.attach_nexus(initiator, port);
        let directory = Directory::new(Box::new(MemoryStore::default()));
        let config = UnitConfig {
            disk: GONE,
            info: DiskInfo {
                geometry: Geometry::new(512, 512 * 8),
                physical_block_size: 512,
                io_alignment: 512,
                optimal_io_size: 0,
                read_only: false,
                write_cache: false,
                discard_granularity: None,
                discard_zeroes: false,
                write_zeroes: false,
                anchors: false,
                atomic_writes: None,
                compare_and_write: None,
                shared: false,
                rotational: false,
                passthrough: None,
                identity: block::Identity::from_random_bits(1),
                serial: String::new(),
                naa: 1,
            },
            removable: false,
            medium: None,
        };
        let unit = LogicalUnit::new(&directory, config);
        target.attach_unit(0, unit).unwrap();
        let view = target.view();
        let begin = |cdb, data_in_length, data_out_length| {
            view.begin(&Command {
                nexus: &nexus,
                lun: Lun([0; 8]),
                cdb,
                attribute: TaskAttribute::Simple,
                data_out_length,
                data_in_length,
            })
        };
        // The first command after the attachment reports a unit attention.
        let test_unit_ready = [0; 6];
        drop(begin(&test_unit_ready, 0, 0));
        begin(cdb, data_in_length, data_out_length)
    }

    /// MODE SELECT(6) with this length of the parameter list.
    fn mode_select(length: u8) -> Plan {
        plan_of(&[0x15, 0x10, 0, 0, length, 0], 0, length.into())
    }

    /// READ(10) of one block into a buffer that ends inside the block: an I/O on scratch memory.
    fn read_of_half_a_block() -> Plan {
        plan_of(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0], 256, 0)
    }

    fn direct(request: block::IoRequest, exclusive: bool) -> Plan {
        let end = PlainEnd::default();
        let mut io = PlainIo { request, end }.on(GONE);
        io.exclusive = exclusive;
        Plan::Io(io)
    }

    #[test]
    fn io_to_a_removed_disk_fails_and_requests_no_data() {
        for plan in [
            direct(block::IoRequest::write(0, 512), false),
            read_of_half_a_block(),
            direct(block::IoRequest::write(0, 512), true),
        ] {
            let mut command = Fake::new(Data::Awaited);
            command.task.start(plan);
            assert!(command.task.is_ready());
            assert!(matches!(command.execute(), Step::Answer));
            assert!(!command.task.is_ready());
        }
    }

    #[test]
    fn missing_parameter_data_are_requested_until_complete() {
        let mut command = Fake::new(Data::Awaited);
        command.task.start(mode_select(24));
        for _ in 0..2 {
            assert!(matches!(command.execute(), Step::Wait));
            assert!(command.task.is_ready());
        }
        command.data = Data::Ready;
        assert!(matches!(command.execute(), Step::Answer));
    }

    #[test]
    fn parameter_data_without_memory_is_task_set_full() {
        let mut command = Fake::new(Data::Ready);
        command.memory = WorkMemory::new(64);
        let mut other = Task::default();
        assert!(other.may_take_data(&command.memory, 50));
        command.task.start(mode_select(24));
        assert!(matches!(command.execute(), Step::Answer));
        assert_eq!(command.task.take_response().status, Status::TaskSetFull);
        other.end();
        command.task.start(mode_select(24));
        assert!(matches!(command.execute(), Step::Answer));
        assert_ne!(command.task.take_response().status, Status::TaskSetFull);
    }

    #[test]
    fn idle_task_waits_and_finished_task_is_answered() {
        let mut command = Fake::new(Data::Ready);
        assert!(matches!(command.execute(), Step::Wait));
        command.task.start(Plan::Done(Response::good()));
        assert!(matches!(command.execute(), Step::Answer));
        assert!(command.task.take_response().status == Status::Good);
        assert!(command.task.is_idle());
    }

    /// The running operation is detached. Holds on the command's end, and its memory, stay with the command.
    #[test]
    fn detached_run_releases_waiting_holds() {
        let memory = WorkMemory::new(64);
        let (hold, holding) = crate::Holding::new();
        let mut task = Task::default();
        task.hold(&hold);
        drop(hold);
        assert!(task.may_take_data(&memory, 64));
        task.start(read_of_half_a_block());
        let detached = task.detach();
        assert!(detached.is_ready() && !task.is_ready());
        assert!(!holding.wait(std::time::Duration::ZERO));
        drop(task.end());
        assert!(holding.wait(std::time::Duration::ZERO));
        assert!(Task::default().may_take_data(&memory, 64));
    }
}
