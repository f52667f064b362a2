//! A command as the executor sees it: its data-out is requested by R2T when it has to be, and memory for data may be short.

use block::IoRequest;
use guest_memory::IoBuffer;
use reactor::{DiskHandle, Io};
use scsi::DiskId;
use scsi_exec::{DataIn, DataOut, Parts, TaskStep, Transport, Units, Waiter};

use crate::commands::STEPS_MAX;
use crate::connection::Connection;

pub(crate) struct CommandSlot<'a> {
    pub connection: &'a mut Connection,
    pub index: u32,
}

impl Transport for CommandSlot<'_> {
    #[inline]
    fn parts(&mut self) -> Parts<'_> {
        let slot = self.connection.slots.get(self.index);
        Parts {
            task: &mut slot.task,
            held: &mut slot.held,
            memory: self.connection.buffers.work(),
            data_in: slot.read_length,
            data_out: slot.write_length.unwrap_or(0),
        }
    }

    fn units(&self) -> &Units {
        &self.connection.shared.units
    }

    #[inline]
    fn disk(&mut self, io: &mut Io, id: DiskId) -> Option<DiskHandle> {
        self.connection.disk(io, id)
    }

    fn data_out(&mut self, length: usize) -> DataOut {
        if !self.has_memory(length) {
            return DataOut::Awaited;
        }
        let Some(task) = self.connection.slots.get(self.index).iscsi else {
            return DataOut::There;
        };
        match self.connection.iscsi.solicit(task, length as u32) {
            Ok(true) => DataOut::There,
            Ok(false) => {
                self.connection.slots.get(self.index).asked = true;
                DataOut::Awaited
            }
            // It is being failed, and will be said to be abandoned.
            Err(_) => DataOut::Awaited,
        }
    }

    fn copy_data_out(&mut self, length: usize) -> Vec<u8> {
        let mut data = vec![0; length];
        if let Some(buffer) = &self.connection.slots.get(self.index).buffer {
            data.truncate(buffer.total_len());
            buffer.read_whole(0, &mut data);
        }
        data
    }

    #[inline]
    fn data_in(&mut self, io: &mut Io, disk: DiskHandle, request: &IoRequest) -> DataIn {
        if self.lend(io, disk, request) {
            return DataIn::Lent;
        }
        self.connection.slots.get(self.index).reads = request.length as u32;
        match self.has_memory(request.length as usize) {
            true => DataIn::There,
            false => DataIn::Awaited,
        }
    }

    fn may_use_scratch(&mut self) -> bool {
        let may = self.connection.scratch_steps < STEPS_MAX;
        if !may {
            self.connection.rest(self.index);
        }
        may
    }

    fn keep(&mut self, step: TaskStep) {
        self.connection.slots.get(self.index).step = Some(step);
    }

    fn waiter(&mut self) -> Waiter {
        let place = self.connection.place.clone();
        let id = self.connection.slots.id(self.index);
        Box::new(move |granted| place.tell(move |connection, _| connection.go_on_with(id, granted)))
    }
}

impl CommandSlot<'_> {
    /// A read whose data lie in memory as they are: they are sent from there, without a copy. Not with a data digest, for
    /// they may change after it was made.
    #[inline]
    fn lend(&mut self, io: &mut Io, disk: DiskHandle, request: &IoRequest) -> bool {
        let Connection {
            iscsi,
            slots,
            buffers,
            ..
        } = self.connection;
        let slot = slots.get(self.index);
        if iscsi.digests().data || slot.write_length.is_some() || slot.buffer.is_some() {
            return false;
        }
        let mut shell = buffers.take_shell();
        if !io.look(disk, request, &mut shell) {
            buffers.give_shell(shell);
            return false;
        }
        slot.buffer = Some(shell);
        slot.reads = request.length as u32;
        true
    }

    /// Is there memory for so many bytes? Else the command waits until there is.
    #[inline]
    fn has_memory(&mut self, length: usize) -> bool {
        let connection = &mut *self.connection;
        let slot = connection.slots.get(self.index);
        let held = slot.buffer.as_ref().map_or(0, IoBuffer::total_len);
        if held >= length {
            return true;
        }
        if connection.has_room(length) {
            // With what was in it before, where part of its data is there already.
            connection.buffer_for(self.index, length);
            return true;
        }
        let id = connection.slots.id(self.index);
        connection.starved.push_back(id);
        false
    }
}
