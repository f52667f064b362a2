//! Responses to completed commands: status, data and sense, in order of completion.

use guest_memory::IoBuffer;
use iscsi::target::{Completion, TaskId, Then, Transfer};
use reactor::Io;
use request_engine::BatchTransport;
use scsi::{Residual, Response, Status};
use scsi_exec::Task;

use crate::connection::Connection;
use crate::slots::{SlotId, Stage};

/// Maximum size of the data digest buffer that is kept.
const DIGESTED_BYTES_KEPT: usize = 1 << 20;

/// Returns the bytes that the CDB transfers: the expected length, corrected by the residual.
pub(crate) fn transfer(read: u32, write: Option<u32>, residual: Residual) -> Transfer {
    let moved = |expected: u32| {
        let expected = u64::from(expected);
        match residual {
            Residual::None => expected,
            Residual::Underflow(less) => expected.saturating_sub(less),
            Residual::Overflow(more) => expected.saturating_add(more),
        }
    };
    match write {
        Some(write) => Transfer {
            data_in: u64::from(read),
            data_out: moved(write),
        },
        None => Transfer {
            data_in: moved(read),
            data_out: 0,
        },
    }
}

impl Connection {
    /// Hop 6: answers all completed commands, and executes the commands that this unblocks.
    pub(crate) fn answer_all(&mut self, io: &mut Io) {
        loop {
            let mut done = std::mem::take(&mut self.schedule.done);
            for id in done.drain(..) {
                self.answer(id);
            }
            if self.schedule.done.is_empty() {
                self.schedule.done = done;
            }
            self.feed_starved();
            if self.schedule.batch.is_empty() && self.schedule.done.is_empty() {
                return;
            }
            self.submit_batch(io, None);
        }
    }

    /// Continues commands that wait for memory, in order, as far as it suffices.
    fn feed_starved(&mut self) {
        for _ in 0..self.schedule.starved.len() {
            let Some((id, length)) = self.schedule.starved.pop_front() else {
                return;
            };
            if self.slots.current(id).is_none() {
                continue;
            }
            if !self.reserve_memory(length) {
                self.schedule.starved.push_front((id, length));
                return;
            }
            self.buffer_for(id.index, length);
            self.schedule.batch.push(id);
        }
        // The commands that waited may have been aborted.
        self.memory.buffers.give_up();
    }

    pub(crate) fn answer(&mut self, id: SlotId) {
        let Some(slot) = self.slots.current(id) else {
            return;
        };
        let response = slot.task.take_response();
        self.deliver(id.index, response);
    }

    fn deliver(&mut self, index: u32, response: Response) {
        self.count(index, &response);
        let slot = self.slots.get(index);
        let (detaches, reads) = (slot.stage == Stage::Detaching, slot.reads as usize);
        let transfer = transfer(slot.read_length, slot.write_length, response.residual);
        // A failed read sends the bytes that its device reports as transferred.
        let reads = match (response.status, response.residual) {
            (Status::Good | Status::ConditionMet, _) => reads,
            (_, Residual::Underflow(bytes)) => {
                reads.min((slot.read_length as usize).saturating_sub(bytes as usize))
            }
            (_, Residual::None | Residual::Overflow(_)) => reads,
        };
        let data = if reads > 0 {
            slot.buffer.take().map(|buffer| (buffer, reads))
        } else if !response.data.is_empty() {
            let buffer = self.memory.buffers.take_anyway(response.data.len());
            buffer.write_whole(0, &response.data);
            Some((buffer, response.data.len()))
        } else {
            None
        };
        // The task keeps its place in the task order until data from the disk's memory was sent.
        let mut owes_place = None;
        if let Some(task) = self.slots.part(index) {
            let sense = response.sense_data();
            let completion = Completion {
                response: 0,
                status: response.status as u8,
                sense: &sense,
                transfer,
            };
            let borrowed = data.as_ref().is_some_and(|(buffer, _)| !buffer.is_owned());
            // Fails if the protocol has ended the task itself.
            if self.send(task, data, &completion).is_ok() && borrowed {
                owes_place = self.slots.get(index).tag;
            }
        }
        if detaches {
            self.detach(index, Task::continue_detached);
        }
        let (ticket, waits) = self.free_slot(index);
        if let Some(tag) = owes_place {
            self.output.owe(tag, ticket, waits);
        }
    }

    fn send(
        &mut self,
        task: TaskId,
        data: Option<(IoBuffer, usize)>,
        completion: &Completion<'_>,
    ) -> Result<(), iscsi::target::NoSuchTask> {
        let Some((buffer, length)) = data else {
            return self.iscsi.respond(task, completion);
        };
        let then = if completion.sense.is_empty() {
            Then::Status {
                status: completion.status,
                transfer: completion.transfer,
            }
        } else {
            Then::Response
        };
        let name = self.output.name();
        let queued = if self.iscsi.sees_data() {
            let mut bytes = std::mem::take(&mut self.output.digested);
            bytes.resize(length, 0);
            buffer.read_whole(0, &mut bytes);
            let queued = self.iscsi.data_in(task, name, 0, &bytes, then);
            if bytes.capacity() <= DIGESTED_BYTES_KEPT {
                self.output.digested = bytes;
            }
            queued
        } else {
            self.iscsi
                .data_in_unseen(task, name, 0, length as u32, then)
        };
        self.output.keep(buffer);
        queued?;
        match then {
            Then::Response => self.iscsi.respond(task, completion),
            _ => Ok(()),
        }
    }
}
