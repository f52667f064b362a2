//! Passes commands to the SCSI core and executes the I/Os of their plans. Responses are in `responses`.

use bdev::Submission;
use block::IoOutcome;
use guest_memory::IoBuffer;
use iscsi::target::TaskId;
use latency::{DiskNumber, Operation, Stamps};
use reactor::{Io, Job, Step, Tag};
use request_engine::{BatchTransport, Submitted};
use scsi::{Command, DiskId, Lun, Sense, SenseCode, SenseKey, TaskAttribute, TaskTag};
use scsi_exec::{
    Granted, Hold, Task, Ticket, continue_in_background, execute, may_start, operation_of,
};

use crate::command_slot::CommandSlot;
use crate::connection::Connection;
use crate::memory::MEMORY_CHECK;
use crate::slots::{Arrival, Client, SlotId, Stage};

enum Progress {
    /// The response is ready.
    Done,
    /// Waiting for an I/O completion, an event or a later iteration.
    Pending,
    /// Finished, and answered or aborted before.
    Finished,
}

/// Converts the attribute field of a SCSI Command (RFC 7143, 11.3.1).
fn attribute(field: u8) -> TaskAttribute {
    match field {
        2 => TaskAttribute::Ordered,
        3 => TaskAttribute::HeadOfQueue,
        4 => TaskAttribute::Aca,
        _ => TaskAttribute::Simple,
    }
}

impl BatchTransport for Connection {
    type Request = SlotId;

    fn batch(&mut self) -> &mut Vec<SlotId> {
        &mut self.schedule.batch
    }

    /// A command that waits for data-out gets no hint. Reads from memory get one, because the kernel will soon copy them.
    fn next_job(&mut self, io: &mut Io, id: SlotId) -> Option<Job> {
        let (disk, request) = self.slots.current(id)?.task.next_io()?;
        if !request.moves_data() {
            return None;
        }
        let disk = self.disk(io, disk)?;
        Some(Job { disk, io: request })
    }

    #[inline]
    fn submit_one(&mut self, io: &mut Io, id: SlotId, stamps: &Stamps) -> Option<Submitted> {
        let slot = self.slots.current(id).filter(|slot| slot.task.is_ready())?;
        let is_first = slot.arrival == Arrival::New;
        if is_first {
            slot.stamps = *stamps;
        }
        let (operation, part) = (slot.operation.unwrap_or(Operation::Other), slot.part);
        let progress = self.advance(io, id.index);
        let slot = self.slots.get(id.index);
        // A command that waits for data-out is not submitted yet.
        let is_solicited = matches!(slot.arrival, Arrival::Solicited(_));
        let waits = is_solicited && slot.task.is_ready();
        if is_solicited && !waits {
            self.record_data_complete(id.index, stamps.at(latency::Stage::Submitted));
        }
        match progress {
            Progress::Done => self.schedule.done.push(id),
            Progress::Pending if waits => return None,
            Progress::Pending => self.slots.get(id.index).arrival = Arrival::Pending,
            Progress::Finished => {
                self.release(id.index);
                return None;
            }
        }
        let is_done = matches!(progress, Progress::Done);
        Some(Submitted {
            slot: id.index,
            operation,
            part,
            is_counted: is_first && (is_done || !is_solicited),
            is_done,
        })
    }
}

impl Connection {
    /// Returns the slot of an iSCSI task. Takes one if the task has none.
    pub(crate) fn slot_of(&mut self, task: TaskId) -> u32 {
        match self.slots.find(task) {
            Some(slot) => slot.index,
            None => self.slots.take(task).index,
        }
    }

    /// Returns the slot's buffer, enlarged to at least `length` bytes. The content is preserved.
    pub(crate) fn buffer_for(&mut self, slot: u32, length: usize) -> &IoBuffer {
        let expected = self
            .slots
            .get(slot)
            .iscsi()
            .and_then(|task| self.iscsi.command(task))
            .map_or(0, |command| command.write_length() as usize);
        let slot = self.slots.get(slot);
        let large_enough = slot
            .buffer
            .as_ref()
            .is_some_and(|buffer| buffer.total_len() >= length);
        if !large_enough {
            // Unsolicited data is limited by FirstBurstLength: one buffer of that size holds all of it, and whole small writes.
            let first_burst = 64 << 10;
            let larger = self
                .memory
                .buffers
                .take_anyway(length.max(expected.min(first_burst)));
            if let Some(smaller) = slot.buffer.take() {
                smaller.copy_to(&larger);
                if slot.receiving {
                    self.memory.buffers.lose(&smaller);
                } else {
                    self.memory.buffers.give(smaller);
                }
            }
            slot.buffer = Some(larger);
        }
        slot.buffer.get_or_insert_default()
    }

    /// Begins a command, in CmdSN order.
    pub(crate) fn begin(&mut self, task: TaskId) {
        let index = self.slot_of(task);
        if self.login.recovers {
            self.take_over(index, task);
        }
        let Some(command) = self.iscsi.command(task) else {
            return;
        };
        let slot = self.slots.get(index);
        slot.lun = command.lun;
        slot.read_length = command.read_length();
        slot.write_length = command.write.then(|| command.write_length());
        let attribute = attribute(command.attribute);
        match self.login.session() {
            Some(session) if !session.order.is_free(attribute) => {
                self.start_in_order(index, attribute);
            }
            _ => self.start(index),
        }
    }

    /// Begins a command that is not SIMPLE, or that arrives while such a command exists. It starts when the task order allows it.
    #[cold]
    fn start_in_order(&mut self, index: u32, attribute: TaskAttribute) {
        let lun = Lun(self.slots.get(index).lun);
        let unit = self.login.session_mut().and_then(|session| {
            session.view.refresh();
            let unit = session.view.unit(lun)?.id();
            Some((session.order.clone(), unit, session.nexus.id()))
        });
        if let Some((order, unit, nexus)) = unit {
            // A waiting command also counts as a task of this nexus.
            self.slots.get(index).tag = Some(TaskTag { nexus, unit });
            let connection = &mut *self;
            let command = &mut CommandSlot { connection, index };
            if !may_start(command, &order, unit, attribute) {
                return;
            }
        }
        // A command for a missing unit is in no task set.
        self.start(index);
    }

    /// Delivers the resource that a command waited for. Drops it if the command is gone.
    pub(crate) fn grant(&mut self, id: SlotId, granted: Granted) {
        let Some(slot) = self.slots.current(id) else {
            return;
        };
        if let Client::Aborted(_) = slot.client {
            return;
        }
        let starts = matches!(granted, Granted::Start(_));
        slot.task.grant(granted);
        match starts {
            true => self.start(id.index),
            false => self.schedule.batch.push(id),
        }
    }

    /// Hop 3: lets the core plan the command.
    fn start(&mut self, index: u32) {
        let id = self.slots.id(index);
        let slot = self.slots.get(index);
        let (Some(task), Some(session)) = (slot.iscsi(), self.login.session_mut()) else {
            return;
        };
        let Some(command) = self.iscsi.command(task) else {
            return;
        };
        let lun = Lun(slot.lun);
        session.view.refresh();
        slot.stage = Stage::Started;
        let unit = session.view.unit(lun);
        let disk = unit.map_or(DiskNumber::NONE, |unit| DiskNumber(unit.disk().0));
        slot.tag = unit.map(|unit| TaskTag {
            nexus: session.nexus.id(),
            unit: unit.id(),
        });
        let asked = Command {
            nexus: &session.nexus,
            lun,
            cdb: &command.cdb,
            attribute: attribute(command.attribute),
            data_out_length: slot.write_length.unwrap_or(0).into(),
            data_in_length: slot.read_length.into(),
        };
        let plan = if session.read_only && session.view.changes(&asked) {
            let sense = Sense::new(SenseKey::DataProtect, SenseCode::WRITE_PROTECTED);
            session.view.refuse(&asked, sense)
        } else {
            session.view.begin(&asked)
        };
        slot.task.start(plan);
        let direct = slot.task.next_io().map(|(_, request)| request);
        let opcode = command.cdb.first().copied().unwrap_or(0);
        let operation = operation_of(opcode, direct.as_ref());
        slot.operation = Some(operation);
        let name = || {
            let disk = self.shared.units.disk(DiskId(disk.0))?;
            Some(disk.name().to_owned())
        };
        slot.part = self.measurement.timeline.part_of(disk, operation, name);
        slot.bytes = direct.map_or(0, |request| match request.moves_data() {
            true => request.length as u32,
            false => 0,
        });
        slot.offset = direct.map_or(0, |request| request.offset);
        let parsed = probes::Parsed {
            id: self.measurement.probe_id(index),
            operation: slot.operation.unwrap_or(Operation::Other) as u64,
            offset: slot.offset,
            length: u64::from(slot.bytes),
        };
        let (itt, worker) = (command.itt, self.handle.worker.index());
        probes::popped(worker, || std::iter::once((parsed.id, u64::from(itt))));
        probes::parsed(|| std::iter::once(parsed));
        self.schedule.batch.push(id);
    }

    /// Executes a command's steps until one has to wait.
    fn advance(&mut self, io: &mut Io, index: u32) -> Progress {
        let tag = Tag {
            source: self.handle.source,
            slot: index,
        };
        loop {
            let connection = &mut *self;
            let step = execute(&mut CommandSlot { connection, index }, io);
            let slot = self.slots.get(index);
            let job = slot.job;
            match step {
                Step::Wait => return Progress::Pending,
                Step::Finished => return Progress::Finished,
                Step::Answer | Step::AnswerAndDetach => {
                    let detaches = matches!(step, Step::AnswerAndDetach);
                    match slot.client {
                        Client::Task(_) if detaches => slot.stage = Stage::Detaching,
                        Client::Task(_) => slot.stage = Stage::Done,
                        Client::Session(itt) => {
                            self.keep_answer(index, itt, detaches);
                            return Progress::Finished;
                        }
                        Client::None | Client::Aborted(_) | Client::Background(_) => {
                            if detaches {
                                self.detach(index, Task::continue_detached);
                            }
                            return Progress::Finished;
                        }
                    }
                    return Progress::Done;
                }
                Step::Data => {
                    slot.touched = true;
                    let mut part = self.memory.buffers.take_shell();
                    if let (Some(buffer), true) = (&slot.buffer, job.io.moves_data()) {
                        buffer.slice_into(0, job.io.length as usize, &mut part);
                    }
                    let Submission::Done(outcome) = io.submit(job.disk, &job.io, &mut part, tag)
                    else {
                        self.slots.begin_io(index, Stage::Data);
                        return Progress::Pending;
                    };
                    self.memory.buffers.give_shell(part);
                    slot.task.resume(outcome, None);
                }
                Step::Scratch(mut buffer) => {
                    slot.touched = true;
                    let Submission::Done(outcome) = io.submit(job.disk, &job.io, &mut buffer, tag)
                    else {
                        self.slots.begin_io(index, Stage::Scratch);
                        return Progress::Pending;
                    };
                    if matches!(slot.client, Client::Background(_)) {
                        self.detach(index, move |task| task.resume(outcome, None));
                        return Progress::Finished;
                    }
                    self.schedule.pace.count(buffer.len(), true);
                    slot.task.resume(outcome, Some(*buffer));
                }
            }
        }
    }

    /// Defers a command to a later iteration.
    pub(crate) fn rest(&mut self, index: u32) {
        self.schedule.resting.push(self.slots.id(index));
        if self.schedule.resting.len() == 1 {
            self.handle.send(|connection, io| {
                let resting = std::mem::take(&mut connection.schedule.resting);
                connection.schedule.batch.extend(resting);
                connection.submit_batch(io, None);
            });
        }
    }

    /// Reserves `length` bytes and returns true, or returns false and has the connection woken when memory may be available.
    #[inline]
    pub(crate) fn reserve_memory(&mut self, length: usize) -> bool {
        if self.memory.buffers.has(length) {
            return true;
        }
        self.wait_for_memory(length)
    }

    #[cold]
    fn wait_for_memory(&mut self, length: usize) -> bool {
        if !self.memory.buffers.is_waiting() {
            self.shared.schedule_check(self.number(), MEMORY_CHECK);
        }
        self.memory.buffers.wait(&self.handle);
        // Memory may have been returned just before.
        if self.memory.buffers.has(length) {
            return true;
        }
        if let Some(key) = self.login.key() {
            let waits_beyond_own_limit = self.memory.buffers.waits_beyond_own_limit();
            self.shared
                .reclaim_memory(key.tsih, &self.memory.reclaims, waits_beyond_own_limit);
        }
        false
    }

    pub(crate) fn io_done(
        &mut self,
        io: &mut Io,
        index: u32,
        buffer: IoBuffer,
        outcome: IoOutcome,
    ) {
        let id = self.measurement.probe_id(index);
        probes::reaped(|| std::iter::once(id));
        let stage = self.slots.end_io(index);
        let slot = self.slots.get(index);
        match slot.client {
            Client::Aborted(_) => return self.release(index),
            Client::Background(_) => {
                self.detach(index, move |task| task.resume(outcome, None));
                return self.release(index);
            }
            Client::None | Client::Task(_) | Client::Session(_) => {}
        }
        let scratch = if stage == Stage::Scratch {
            Some(buffer)
        } else {
            self.memory.buffers.give_shell(buffer);
            None
        };
        slot.task.resume(outcome, scratch);
        match self.advance(io, index) {
            Progress::Done => self.schedule.done.push(self.slots.id(index)),
            Progress::Pending => {}
            Progress::Finished => self.release(index),
        }
    }

    /// Aborts a command. Drops `wait` when the command can no longer access a disk.
    pub(crate) fn abort_slot(&mut self, io: &mut Io, index: u32, wait: Option<&Hold>) {
        let slot = self.slots.get(index);
        let itt = match slot.client {
            Client::Task(task) => {
                let command = self.iscsi.command(task);
                let itt = command.map(|command| command.itt);
                self.slots.part(index);
                // Fails if the protocol has ended the task itself.
                self.iscsi.abort(task).ok();
                itt
            }
            Client::Session(itt) => {
                self.lose_answer(index);
                Some(itt)
            }
            Client::Background(itt) => itt,
            Client::None => None,
            // The I/O of the aborted command is in flight.
            Client::Aborted(_) => {
                if let Some(wait) = wait {
                    slot.task.hold(wait);
                }
                return;
            }
        };
        let slot = self.slots.get(index);
        if slot.task.survives_abort() {
            slot.client = Client::Background(itt);
            return;
        }
        slot.client = Client::Aborted(itt);
        if slot.is_busy() {
            if let Some(wait) = wait {
                slot.task.hold(wait);
            }
            // Also cancels an I/O that waits to be retried after an error of its disk.
            io.cancel_waiting(self.handle.source, |slot| slot == index);
        } else {
            self.release(index);
        }
    }

    /// Detaches a task that continues in the background: it cannot be aborted, or it was answered.
    #[cold]
    pub(crate) fn detach(&mut self, index: u32, next: impl FnOnce(&mut Task)) {
        let mut task = self.slots.get(index).task.detach();
        next(&mut task);
        continue_in_background(&self.handle.worker, &self.shared.units, task);
    }

    /// Releases the slot of a finished command.
    pub(crate) fn release(&mut self, index: u32) {
        drop(self.free_slot(index));
    }

    /// Like [`Connection::release`]. Returns the command's ticket in the task order and the holds that wait for its end.
    pub(crate) fn free_slot(&mut self, index: u32) -> (Option<Ticket>, Vec<Hold>) {
        let slot = self.slots.get(index);
        if let Some(buffer) = slot.buffer.take() {
            if slot.receiving {
                self.memory.buffers.lose(&buffer);
            } else {
                self.memory.buffers.give(buffer);
            }
        }
        self.slots.free(index)
    }
}
