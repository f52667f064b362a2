//! A command as the SCSI executor's transport. Missing data-out is requested by R2T, and memory for data may be short.

use guest_memory::IoBuffer;
use latency::Stamp;
use reactor::Io;
use scsi_exec::{Data, Exempt, Parts, Transport, Waiter};

use crate::connection::Connection;
use crate::slots::Arrival;

pub(crate) struct CommandSlot<'a> {
    pub connection: &'a mut Connection,
    pub index: u32,
}

impl Transport for CommandSlot<'_> {
    #[inline(always)]
    fn parts(&mut self) -> Parts<'_> {
        let connection = &mut *self.connection;
        let slot = connection.slots.get(self.index);
        let (data_in, data_out) = (slot.read_length, slot.write_length.unwrap_or(0));
        Parts {
            task: &mut slot.task,
            job: &mut slot.job,
            disks: &mut connection.disks,
            units: &connection.shared.units,
            memory: &connection.memory.work,
            data_in,
            data_out,
        }
    }

    /// Borrows data that a disk has in memory and sends it from there. Not with a data digest, because the data may change after the digest
    /// was computed, and not if it may have to be sent again.
    #[inline]
    fn data_in(&mut self, io: &mut Io) -> Data {
        let connection = &mut *self.connection;
        let seen = connection.iscsi.sees_data();
        let slot = connection.slots.get(self.index);
        let (disk, request) = (slot.job.disk, slot.job.io);
        slot.reads = request.length as u32;
        if !seen && slot.write_length.is_none() && slot.buffer.is_none() {
            let mut shell = connection.memory.buffers.take_shell();
            if io.borrow(disk, &request, &mut shell) {
                slot.buffer = Some(shell);
                return Data::Borrowed;
            }
            connection.memory.buffers.give_shell(shell);
        }
        match self.reserve_memory(request.length as usize) {
            true => Data::Ready,
            false => Data::Awaited,
        }
    }

    fn data_out(&mut self, length: usize) -> Data {
        if !self.reserve_memory(length) {
            return Data::Awaited;
        }
        let Connection { slots, iscsi, .. } = &mut *self.connection;
        let slot = slots.get(self.index);
        // A task that is being failed gets no data; it will be reported as abandoned.
        let there = |task| iscsi.solicit(task, length as u32).ok();
        match slot.iscsi().map_or(Some(true), there) {
            Some(true) => Data::Ready,
            there => {
                if there.is_some() && !matches!(slot.arrival, Arrival::Solicited(_)) {
                    slot.arrival = Arrival::Solicited([Stamp::default(); 2]);
                }
                Data::Awaited
            }
        }
    }

    fn copy_data_out(&self, data: &mut [u8]) {
        if let Some(buffer) = self.connection.slots.buffer(self.index) {
            buffer.read_whole(0, data);
        }
    }

    fn waiter(&mut self) -> Waiter {
        let (handle, id) = (
            self.connection.handle.clone(),
            self.connection.slots.id(self.index),
        );
        Box::new(move |granted| handle.send(move |connection, _| connection.grant(id, granted)))
    }

    fn may_use_scratch(&mut self) -> bool {
        let may = !self.connection.schedule.pace.is_exhausted();
        if !may {
            self.connection.rest(self.index);
        }
        may
    }

    fn exempt(&self) -> Option<Exempt> {
        self.connection
            .sent_later(self.connection.cmd_sn(self.index)?)
    }
}

impl CommandSlot<'_> {
    /// Reserves `length` bytes for the command. Without memory, returns false and queues the command until there is some.
    #[inline]
    fn reserve_memory(&mut self, length: usize) -> bool {
        let connection = &mut *self.connection;
        let held = connection.slots.get(self.index).buffer.as_ref();
        if held.map_or(0, IoBuffer::total_len) >= length {
            return true;
        }
        let room = connection.reserve_memory(length);
        if room {
            // Preserves the buffer's content: part of the data may have arrived.
            connection.buffer_for(self.index, length);
        } else {
            let id = connection.slots.id(self.index);
            connection.schedule.starved.push_back((id, length));
        }
        room
    }
}
