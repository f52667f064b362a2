//! Commands through the SCSI core, and their plans through their I/Os. Their answers: `answers`.

use bdev::{PREFETCH_DISTANCE, Prefetch};
use block::{IoError, IoErrorKind, IoKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use iscsi::target::TaskId;
use latency::{DiskNumber, Operation, PartCounts, Stage, Stamp, Stamps};
use reactor::{DiskHandle, Io, Tag};
use scsi::{Command, DiskId, Lun, Sense, SenseCode, SenseKey, TaskAttribute, TaskTag};
use scsi_exec::{Admission, Hold, StartTask, Task, TaskStep, go_on_in_background, operation_of};

use crate::connection::Connection;
use crate::slots::SlotId;

/// Steps of one command in one iteration, I/Os on scratch memory of all commands that end at once in it, and bytes of these that count as
/// one more: long ones give way to the worker's other work.
const STEPS_MAX: usize = 32;
const STEP_BYTES: usize = 128 << 10;

/// How far a command has come.
enum Progress {
    /// Its response is there.
    Done,
    /// Somebody will come back to it.
    Pending,
    /// It was answered or aborted before and has ended.
    Over,
}

/// The attribute field of a SCSI Command (11.3.1).
fn attribute(field: u8) -> TaskAttribute {
    match field {
        2 => TaskAttribute::Ordered,
        3 => TaskAttribute::HeadOfQueue,
        4 => TaskAttribute::Aca,
        _ => TaskAttribute::Simple,
    }
}

/// Does it change what is on the medium, or who may use it? For initiators that may only read.
fn changes(cdb: &[u8]) -> bool {
    use scsi::opcode::*;
    let opcode = cdb.first().copied().unwrap_or(0);
    matches!(
        opcode,
        WRITE_6
            | WRITE_10
            | WRITE_12
            | WRITE_16
            | WRITE_AND_VERIFY_10
            | WRITE_AND_VERIFY_12
            | WRITE_AND_VERIFY_16
            | WRITE_SAME_10
            | WRITE_SAME_16
            | UNMAP
            | SANITIZE
            | COMPARE_AND_WRITE
            | ORWRITE_16
            | WRITE_ATOMIC_16
            | EXTENDED_COPY
            | MODE_SELECT_6
            | MODE_SELECT_10
            | START_STOP_UNIT
            | PREVENT_ALLOW
            | RESERVE_6
            | RESERVE_10
            | PERSISTENT_RESERVE_OUT
            | MAINTENANCE_OUT
            | FORMAT_UNIT
    )
}

impl Connection {
    /// The slot of an iSCSI task, taken at first sight.
    pub(crate) fn slot_of(&mut self, task: TaskId) -> u32 {
        match self.slots.find(task) {
            Some(slot) => slot.index,
            None => self.slots.take(task).index,
        }
    }

    /// The slot's buffer with at least so many bytes, and what was in it before.
    pub(crate) fn buffer_for(&mut self, slot: u32, length: usize) -> &IoBuffer {
        let expected = self
            .slots
            .get(slot)
            .iscsi
            .and_then(|task| self.iscsi.command(task))
            .map_or(0, |command| command.write_length() as usize);
        let slot = self.slots.get(slot);
        let large_enough = slot
            .buffer
            .as_ref()
            .is_some_and(|buffer| buffer.total_len() >= length);
        if !large_enough {
            // Unsolicited data is bounded by FirstBurstLength: one buffer takes it all, and small writes whole.
            let first_burst = 64 << 10;
            let larger = self
                .buffers
                .take_anyway(length.max(expected.min(first_burst)));
            if let Some(smaller) = slot.buffer.take() {
                smaller.copy_to(&larger);
                if slot.receiving {
                    self.buffers.lose(&smaller);
                } else {
                    self.buffers.give(smaller);
                }
            }
            slot.buffer = Some(larger);
        }
        slot.buffer.get_or_insert_default()
    }

    /// A command, in the order of CmdSN.
    pub(crate) fn begin(&mut self, task: TaskId) {
        let index = self.slot_of(task);
        let Some(command) = self.iscsi.command(task) else {
            return;
        };
        let slot = self.slots.get(index);
        slot.lun = command.lun;
        slot.read_length = command.read_length();
        slot.write_length = command.write.then(|| command.write_length());
        let attribute = attribute(command.attribute);
        match &self.session {
            Some(session) if !session.order.is_free(attribute) => {
                self.take_turn(index, attribute);
            }
            _ => self.start(index),
        }
    }

    /// A command that is not SIMPLE, or comes while such a one is there: it begins when its turn has come.
    #[cold]
    fn take_turn(&mut self, index: u32, attribute: TaskAttribute) {
        let lun = Lun(self.slots.get(index).lun);
        let unit = self.session.as_mut().and_then(|session| {
            session.view.refresh();
            let unit = session.view.unit(lun)?.id();
            Some((session.order.clone(), unit))
        });
        // What no unit gets is in no task set.
        let Some((order, unit)) = unit else {
            return self.start(index);
        };
        // While it waits, too, it is one of this nexus' tasks.
        self.slots.get(index).tag = self.nexus_id().map(|nexus| TaskTag { nexus, unit });
        let (place, id) = (self.place.clone(), self.slots.id(index));
        let later = || -> StartTask {
            Box::new(move |ticket| {
                place.tell(move |connection, _| {
                    // Where the command is gone it has had its turn.
                    if let Some(slot) = connection.slots.current(id) {
                        slot.ticket = ticket;
                        connection.start(id.index);
                    }
                });
            })
        };
        if let Admission::Now(ticket) = order.admit(unit, attribute, later) {
            self.slots.get(index).ticket = ticket;
            self.start(index);
        }
    }

    /// Hop 3: what the core makes of it.
    fn start(&mut self, index: u32) {
        let id = self.slots.id(index);
        let slot = self.slots.get(index);
        let (Some(task), Some(session)) = (slot.iscsi, self.session.as_mut()) else {
            return;
        };
        let Some(command) = self.iscsi.command(task) else {
            return;
        };
        let lun = Lun(slot.lun);
        session.view.refresh();
        slot.begun = true;
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
        let plan = if session.read_only && changes(&command.cdb) {
            let sense = Sense::new(SenseKey::DataProtect, SenseCode::WRITE_PROTECTED);
            session.view.refuse(&asked, sense)
        } else {
            session.view.begin(&asked)
        };
        let step = slot.task.start(plan);
        let direct = match &step {
            TaskStep::Data(_, request) => Some(request),
            _ => None,
        };
        let opcode = command.cdb.first().copied().unwrap_or(0);
        let operation = operation_of(opcode, direct);
        slot.operation = Some(operation);
        if let Some(timeline) = &mut self.timeline {
            let name = || {
                let disk = self.shared.units.disk(DiskId(disk.0))?;
                Some(disk.name().to_owned())
            };
            slot.part = timeline.part_of(disk, operation, name);
        }
        slot.bytes = direct.map_or(0, |request| match request.moves_data() {
            true => request.length as u32,
            false => 0,
        });
        slot.offset = direct.map_or(0, |request| request.offset);
        let parsed = probes::Parsed {
            id: probes::id(self.probed, index),
            operation: slot.operation.unwrap_or(Operation::Other) as u64,
            offset: slot.offset,
            length: u64::from(slot.bytes),
        };
        slot.step = Some(step);
        let (itt, worker) = (command.itt, self.place.worker.index());
        probes::popped(worker, || std::iter::once((parsed.id, u64::from(itt))));
        probes::parsed(|| std::iter::once(parsed));
        self.batch.push(id);
    }

    /// Hops 4 and 5: gives each command's I/O to its disk. What came with the same receive shares its stamps.
    pub(crate) fn submit_batch(&mut self, io: &mut Io, stamps: Option<&mut Stamps>) {
        if self.batch.is_empty() {
            return;
        }
        let mut counts = PartCounts::default();
        if let Some(first) = self.batch.first().and_then(|id| self.slots.current(*id)) {
            counts.part = first.part;
        }
        let now = self.stamp(io);
        let mut own = Stamps::noticed(now);
        let stamps = stamps.unwrap_or(&mut own);
        stamps.mark(Stage::Submitted, now);
        let mut batch = std::mem::take(&mut self.batch);
        let tell = io.wants_prefetch();
        for at in 0..batch.len() {
            let id = batch[at];
            if tell {
                self.tell_next(io, &batch[at + 1..]);
            }
            let Some(slot) = self.slots.current(id) else {
                continue;
            };
            let Some(step) = slot.step.take() else {
                continue;
            };
            let operation = slot.operation.unwrap_or(Operation::Other) as usize;
            let first = !slot.pended;
            if first {
                slot.stamps = *stamps;
            }
            if slot.part != counts.part {
                self.mixed.turn_to(&mut counts, slot.part);
            }
            let progress = self.advance(io, id.index, step);
            let slot = self.slots.get(id.index);
            // What waits for its client's data has not been submitted yet.
            let waits = slot.asked && slot.step.is_some();
            let asked = slot.asked && !waits;
            if asked {
                self.data_came(id.index, now);
            }
            match progress {
                Progress::Done => {
                    self.done.push(id);
                    counts.at_once[operation] += u32::from(first);
                    probes::submitted(|| std::iter::once(probes::id(self.probed, id.index)));
                    probes::reaped(|| std::iter::once(probes::id(self.probed, id.index)));
                }
                Progress::Pending => {
                    self.slots.get(id.index).pended = true;
                    if !waits {
                        counts.pending[operation] += u32::from(first && !asked);
                        probes::submitted(|| std::iter::once(probes::id(self.probed, id.index)));
                    }
                }
                Progress::Over => self.release(id.index),
            }
        }
        if self.batch.is_empty() {
            batch.clear();
            self.batch = batch;
        }
        let reaped = self.stamp(io);
        if self.reaped == Stamp::default() {
            self.reaped = reaped;
        }
        let before = *stamps;
        stamps.mark(Stage::Reaped, reaped);
        if self.mixed.is_empty() {
            return self.count_submitted(&counts, &before, reaped);
        }
        self.mixed.add(&counts);
        let mut mixed = std::mem::take(&mut self.mixed);
        for counts in mixed.drain() {
            self.count_submitted(&counts, &before, reaped);
        }
        self.mixed = mixed;
    }

    /// Of these the first is submitted after the one that is about to be, unless its data have yet to come. What lies in memory and
    /// is read leaves soon, too: the kernel copies it.
    fn tell_next(&mut self, io: &mut Io, following: &[SlotId]) {
        for (at, soon) in [
            (0, Prefetch::Next),
            (PREFETCH_DISTANCE - 1, Prefetch::Later),
        ] {
            let slot = following.get(at).and_then(|id| self.slots.current(*id));
            if let Some(&TaskStep::Data(disk, request)) = slot.and_then(|slot| slot.step.as_ref())
                && request.moves_data()
                && let Some(handle) = self.disk(io, disk)
            {
                io.prefetch(handle, &request, soon);
            }
        }
    }

    /// Takes a command's steps as far as they go without waiting.
    fn advance(&mut self, io: &mut Io, index: u32, mut step: TaskStep) -> Progress {
        let tag = Tag {
            source: self.place.source,
            slot: index,
        };
        let mut steps = 0;
        while steps < STEPS_MAX {
            steps += 1;
            step = match step {
                TaskStep::Answer if self.slots.get(index).iscsi.is_some() => return Progress::Done,
                TaskStep::Answer | TaskStep::Over => return Progress::Over,
                TaskStep::AnswerAndGoOn => {
                    let slot = self.slots.get(index);
                    if slot.iscsi.is_some() {
                        slot.goes_on = true;
                        return Progress::Done;
                    }
                    let task = std::mem::take(&mut slot.task);
                    self.leave(task, Task::go_on);
                    return Progress::Over;
                }
                TaskStep::Acquire(disk, offset, length) => {
                    let data = self.slots.get(index).task.data_before_range();
                    let again = TaskStep::Acquire(disk, offset, length);
                    if data > 0 && !self.has_data(index, data, again) {
                        return Progress::Pending;
                    }
                    match self.acquire(index, disk, offset, length) {
                        true => return Progress::Pending,
                        false => {
                            let offline = Err(IoError::new(IoErrorKind::Offline));
                            self.slots.get(index).task.resume(offline, None)
                        }
                    }
                }
                TaskStep::NeedData(length) => {
                    if !self.has_data(index, length, TaskStep::NeedData(length)) {
                        return Progress::Pending;
                    }
                    let slot = self.slots.get(index);
                    if !slot.held.take_for_data(self.buffers.work(), length) {
                        step = slot.end_for_want_of_memory();
                        continue;
                    }
                    let mut data = vec![0; length];
                    if let Some(buffer) = &slot.buffer {
                        data.truncate(buffer.total_len());
                        buffer.read_whole(0, &mut data);
                    }
                    slot.task.with_data(data)
                }
                TaskStep::Data(disk, request) => {
                    if self.lend(io, index, disk, &request) {
                        step = self.slots.get(index).task.resume(Ok(()), None);
                        continue;
                    }
                    let length = request.length as usize;
                    let ready = match request.kind {
                        IoKind::Read => {
                            self.slots.get(index).reads = request.length as u32;
                            self.has_memory(index, length, TaskStep::Data(disk, request))
                        }
                        IoKind::Write => {
                            self.has_data(index, length, TaskStep::Data(disk, request))
                        }
                        // A compare and write is a program's, on scratch memory.
                        IoKind::Flush
                        | IoKind::Discard
                        | IoKind::WriteZeroes
                        | IoKind::CompareAndWrite => true,
                    };
                    if !ready {
                        return Progress::Pending;
                    }
                    let handle = self.disk(io, disk);
                    let slot = self.slots.get(index);
                    let mut part = self.buffers.take_shell();
                    if let (Some(buffer), true) = (&slot.buffer, request.moves_data()) {
                        buffer.slice_into(0, length, &mut part);
                    }
                    match submit(io, handle, &request, &mut part, tag) {
                        Some(outcome) => {
                            self.buffers.give_shell(part);
                            slot.task.resume(outcome, None)
                        }
                        None => {
                            (slot.busy, slot.scratch) = (true, false);
                            return Progress::Pending;
                        }
                    }
                }
                TaskStep::Scratch(..) if self.scratch_steps >= STEPS_MAX => break,
                TaskStep::Scratch(disk, request, mut buffer) => {
                    let cost = 1 + buffer.len() / STEP_BYTES;
                    let handle = self.disk(io, disk);
                    let slot = self.slots.get(index);
                    let (held, room) = (&mut slot.held, slot.read_length);
                    if !held.take_for_work(self.buffers.work(), &slot.task, room) {
                        step = slot.end_for_want_of_memory();
                        continue;
                    }
                    match submit(io, handle, &request, &mut buffer, tag) {
                        Some(outcome) if slot.left => {
                            self.leave_after(index, outcome);
                            return Progress::Over;
                        }
                        Some(outcome) => {
                            self.scratch_steps += cost;
                            slot.task.resume(outcome, Some(*buffer))
                        }
                        None => {
                            (slot.busy, slot.scratch) = (true, true);
                            return Progress::Pending;
                        }
                    }
                }
            };
        }
        self.slots.get(index).step = Some(step);
        self.rest(index);
        Progress::Pending
    }

    /// A read whose data lie in memory as they are: they are sent from there, without a copy. Not with a data digest, for
    /// they may change after it was made.
    #[inline]
    fn lend(&mut self, io: &mut Io, index: u32, disk: DiskId, request: &IoRequest) -> bool {
        if request.kind != IoKind::Read || self.iscsi.digests().data {
            return false;
        }
        let Some(handle) = self.disk(io, disk) else {
            return false;
        };
        let slot = self.slots.get(index);
        if slot.write_length.is_some() || slot.buffer.is_some() {
            return false;
        }
        let mut shell = self.buffers.take_shell();
        if !io.borrow(handle, request, &mut shell) {
            self.buffers.give_shell(shell);
            return false;
        }
        slot.buffer = Some(shell);
        slot.reads = request.length as u32;
        true
    }

    /// The task goes on when nothing else can change its range. False: there is no such disk.
    fn acquire(&mut self, index: u32, disk: DiskId, offset: u64, length: u64) -> bool {
        let Some(disk) = self.shared().units.disk(disk) else {
            return false;
        };
        let (place, id) = (self.place.clone(), self.slots.id(index));
        disk.range_locks().acquire(offset, length, move |lease| {
            place.tell(move |connection, _| {
                // Where the command is gone the range is given back.
                if let Some(slot) = connection.slots.current(id)
                    && !slot.aborted
                {
                    slot.step = Some(slot.task.granted(lease));
                    connection.batch.push(id);
                }
            });
        });
        true
    }

    /// Goes on in another iteration.
    fn rest(&mut self, index: u32) {
        self.resting.push(self.slots.id(index));
        if self.resting.len() == 1 {
            self.place.tell(|connection, io| {
                let resting = std::mem::take(&mut connection.resting);
                connection.batch.extend(resting);
                connection.submit_batch(io, None);
            });
        }
    }

    /// Is there memory for so many bytes? Else the step is kept until there is.
    fn has_memory(&mut self, index: u32, length: usize, step: TaskStep) -> bool {
        let slot = self.slots.get(index);
        let held = slot.buffer.as_ref().map_or(0, IoBuffer::total_len);
        if held >= length {
            return true;
        }
        if self.has_room(length) {
            // With what was in it before, where part of its data is there already.
            self.buffer_for(index, length);
            return true;
        }
        self.slots.get(index).step = Some(step);
        self.starved.push_back(self.slots.id(index));
        false
    }

    /// Is there memory for so many bytes? They are taken at once, then. Else the connection is told when there is.
    #[inline]
    pub(crate) fn has_room(&mut self, length: usize) -> bool {
        if self.buffers.has(length) {
            return true;
        }
        self.buffers.wait(&self.place);
        self.buffers.has(length)
    }

    /// Are the first so many bytes of a write here? Else they are asked for, and the step is kept until they are.
    fn has_data(&mut self, index: u32, length: usize, step: TaskStep) -> bool {
        let kept = match &step {
            TaskStep::Data(disk, request) => TaskStep::Data(*disk, *request),
            TaskStep::Acquire(disk, offset, length) => TaskStep::Acquire(*disk, *offset, *length),
            _ => TaskStep::NeedData(length),
        };
        if !self.has_memory(index, length, kept) {
            return false;
        }
        let Some(task) = self.slots.get(index).iscsi else {
            return true;
        };
        match self.iscsi.solicit(task, length as u32) {
            Ok(true) => true,
            Ok(false) => {
                let slot = self.slots.get(index);
                (slot.step, slot.asked) = (Some(step), true);
                false
            }
            // It is being failed, and will be said to be abandoned.
            Err(_) => false,
        }
    }

    /// An I/O has finished.
    pub(crate) fn io_done(
        &mut self,
        io: &mut Io,
        index: u32,
        buffer: IoBuffer,
        outcome: IoOutcome,
    ) {
        let id = probes::id(self.probed, index);
        probes::reaped(|| std::iter::once(id));
        let slot = self.slots.get(index);
        slot.busy = false;
        if slot.aborted {
            return self.release(index);
        }
        if slot.left {
            self.leave_after(index, outcome);
            return self.release(index);
        }
        let scratch = if slot.scratch {
            Some(buffer)
        } else {
            self.buffers.give_shell(buffer);
            None
        };
        let next = slot.task.resume(outcome, scratch);
        match self.advance(io, index, next) {
            Progress::Done => self.done.push(self.slots.id(index)),
            Progress::Pending => {}
            Progress::Over => self.release(index),
        }
    }

    /// Takes a command back. `wait` is let go of once it can touch no disk any more.
    pub(crate) fn abort_slot(&mut self, io: &mut Io, index: u32, wait: Option<&Hold>) {
        if let Some(task) = self.slots.part(index) {
            // Where the protocol gave it up itself there is nothing left to abort.
            self.iscsi.abort(task).ok();
        }
        let slot = self.slots.get(index);
        if !slot.aborted && slot.task.survives_abort() {
            slot.left = true;
            return;
        }
        if slot.aborted {
            if slot.busy {
                slot.waits.extend(wait.cloned());
            }
            return;
        }
        slot.aborted = true;
        slot.response = None;
        if slot.busy {
            slot.waits.extend(wait.cloned());
            // Nor does it wait any more for a disk that has failed it.
            io.cancel_waiting(self.place.source, |slot| slot == index);
        } else {
            self.release(index);
        }
    }

    /// What no abort ends goes on by itself.
    pub(crate) fn leave(
        &self,
        task: Task,
        first: impl FnOnce(&mut Task) -> TaskStep + Send + 'static,
    ) {
        go_on_in_background(&self.place.worker, &self.shared().units, task, first);
    }

    #[cold]
    fn leave_after(&mut self, index: u32, outcome: IoOutcome) {
        let task = std::mem::take(&mut self.slots.get(index).task);
        self.leave(task, move |task| task.resume(outcome, None));
    }

    /// Nothing of a command is left to do.
    pub(crate) fn release(&mut self, index: u32) {
        let slot = self.slots.get(index);
        if let Some(buffer) = slot.buffer.take() {
            if slot.receiving {
                self.buffers.lose(&buffer);
            } else {
                self.buffers.give(buffer);
            }
        }
        if let (true, Some(tag)) = (slot.lent, slot.tag) {
            let (ticket, waits) = (slot.ticket.take(), std::mem::take(&mut slot.waits));
            self.output.owe(tag, ticket, waits);
        }
        self.slots.free(index);
    }
}

/// Gives an I/O to its disk; `None` when it is pending.
fn submit(
    io: &mut Io,
    handle: Option<DiskHandle>,
    request: &IoRequest,
    buffer: &mut IoBuffer,
    tag: Tag,
) -> Option<IoOutcome> {
    let Some(handle) = handle else {
        return Some(Err(IoError::new(IoErrorKind::Offline)));
    };
    match io.submit(handle, request, buffer, tag) {
        bdev::Submission::Done(outcome) => Some(outcome),
        bdev::Submission::Pending => None,
    }
}
