//! Commands of a connection: one slot each, from the first PDU of a command until none of its I/O is in flight.
//!
//! A slot outlives its iSCSI task if the task was aborted during I/O or continues in the background.

use std::ops::{Deref, DerefMut};

use guest_memory::IoBuffer;
use iscsi::target::TaskId;
use latency::{Operation, Part, Stamp, Stamps};
use reactor::Job;
use scsi::TaskTag;
use scsi_exec::{Hold, Task, Ticket};

/// Identifies a slot. A stale ID has another generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotId {
    pub index: u32,
    pub generation: u32,
}

/// Stage of the command in a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No command.
    #[default]
    Free,
    /// Receiving immediate data, or waiting for its turn in the task order.
    New,
    /// Planned: has a step to execute, or waits for data, memory or another task.
    Started,
    /// I/O on the command's own buffer in flight.
    Data,
    /// I/O on scratch memory in flight.
    Scratch,
    /// Ready for its response.
    Done,
    /// Ready for its response. The task continues in the background afterwards.
    Detaching,
}

/// Recipient of a command's response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Client {
    /// None: the command was answered.
    #[default]
    None,
    /// The iSCSI task on this connection.
    Task(TaskId),
    /// The session, which retains the response of the task with this ITT after the loss of the connection.
    Session(u32),
    /// None: aborted. No further steps are executed. Contains the ITT at the time of the abort.
    Aborted(Option<u32>),
    /// None: aborted, but the task continues in the background after the I/O in flight. Contains the ITT at the time of the abort.
    Background(Option<u32>),
}

/// Measurement of a command's arrival.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Arrival {
    /// Not submitted yet.
    #[default]
    New,
    /// Waiting for solicited data. The stamps are the arrivals of its first and last part so far.
    Solicited([Stamp; 2]),
    /// Counted as pending.
    Pending,
}

#[derive(Default)]
pub(crate) struct ConnectionSlot {
    pub generation: u32,
    pub task: Box<Task>,
    /// The next I/O, or the one in flight.
    pub job: Job,
    /// Command data, as large as the part that can be transferred by now.
    pub buffer: Option<IoBuffer>,
    state: CommandState,
}

/// State that is reset for each command.
#[derive(Clone, Copy, Default)]
pub(crate) struct CommandState {
    pub stage: Stage,
    pub client: Client,
    pub arrival: Arrival,
    /// The kernel receives into the buffer.
    pub receiving: bool,
    /// An I/O was submitted.
    pub touched: bool,
    pub lun: [u8; 8],
    pub tag: Option<TaskTag>,
    pub read_length: u32,
    /// `None`: no data-out is expected.
    pub write_length: Option<u32>,
    /// Bytes that a read stores in the buffer.
    pub reads: u32,
    pub operation: Option<Operation>,
    /// Partition of its measurements.
    pub part: Part,
    pub bytes: u32,
    /// Disk offset in bytes.
    pub offset: u64,
    /// Stamps of the stages so far.
    pub stamps: Stamps,
}

impl Deref for ConnectionSlot {
    type Target = CommandState;

    fn deref(&self) -> &CommandState {
        &self.state
    }
}

impl DerefMut for ConnectionSlot {
    fn deref_mut(&mut self) -> &mut CommandState {
        &mut self.state
    }
}

impl ConnectionSlot {
    /// Returns the iSCSI task, until it was answered or aborted.
    pub fn iscsi(&self) -> Option<TaskId> {
        match self.client {
            Client::Task(task) => Some(task),
            _ => None,
        }
    }

    /// Returns true if the core has planned the command.
    pub fn is_started(&self) -> bool {
        !matches!(self.stage, Stage::Free | Stage::New)
    }

    /// Returns true if an I/O is in flight.
    pub fn is_busy(&self) -> bool {
        matches!(self.stage, Stage::Data | Stage::Scratch)
    }

    /// Resets the slot. Returns the command's ticket in the task order and the holds that wait for its end.
    fn clear(&mut self) -> (Option<Ticket>, Vec<Hold>) {
        self.generation = self.generation.wrapping_add(1);
        (self.buffer, self.state) = (None, CommandState::default());
        self.task.abandon();
        self.task.end()
    }
}

const _: () = assert!(size_of::<ConnectionSlot>() <= 312 && size_of::<CommandState>() <= 184);

const NONE: u32 = u32::MAX;

#[derive(Default)]
pub(crate) struct Slots {
    slots: Vec<ConnectionSlot>,
    free: Vec<u32>,
    /// Slots by index of the iSCSI task.
    by_task: Vec<u32>,
    /// Number of slots with an I/O in flight.
    busy: usize,
}

impl Slots {
    /// Allocates the index for `tasks` iSCSI tasks.
    pub fn set_tasks(&mut self, tasks: usize) {
        self.by_task.resize(tasks, NONE);
    }

    pub fn find(&self, task: TaskId) -> Option<SlotId> {
        let index = *self.by_task.get(task.index())?;
        let slot = self.slots.get(index as usize)?;
        (slot.client == Client::Task(task)).then_some(SlotId {
            index,
            generation: slot.generation,
        })
    }

    /// Takes a slot for an iSCSI task that has none.
    pub fn take(&mut self, task: TaskId) -> SlotId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(ConnectionSlot::default());
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        (slot.stage, slot.client) = (Stage::New, Client::Task(task));
        if let Some(entry) = self.by_task.get_mut(task.index()) {
            *entry = index;
        }
        SlotId {
            index,
            generation: slot.generation,
        }
    }

    pub fn get(&mut self, index: u32) -> &mut ConnectionSlot {
        &mut self.slots[index as usize]
    }

    pub fn task(&self, index: u32) -> Option<TaskId> {
        self.slots[index as usize].iscsi()
    }

    pub fn buffer(&self, index: u32) -> Option<&IoBuffer> {
        self.slots[index as usize].buffer.as_ref()
    }

    pub fn current(&mut self, id: SlotId) -> Option<&mut ConnectionSlot> {
        let slot = self.slots.get_mut(id.index as usize)?;
        (slot.stage != Stage::Free && slot.generation == id.generation).then_some(slot)
    }

    pub fn id(&self, index: u32) -> SlotId {
        SlotId {
            index,
            generation: self.slots[index as usize].generation,
        }
    }

    /// Separates the slot from its ended iSCSI task. The slot may stay in use.
    pub fn part(&mut self, index: u32) -> Option<TaskId> {
        let slot = &mut self.slots[index as usize];
        let task = slot.iscsi()?;
        slot.client = Client::None;
        if let Some(entry) = self.by_task.get_mut(task.index())
            && *entry == index
        {
            *entry = NONE;
        }
        Some(task)
    }

    /// Frees a slot. The caller must have taken its buffer. Returns the command's ticket in the task order and the holds that wait for its
    /// end.
    #[must_use]
    pub fn free(&mut self, index: u32) -> (Option<Ticket>, Vec<Hold>) {
        self.part(index);
        let ended = self.slots[index as usize].clear();
        self.free.push(index);
        ended
    }

    /// Returns a slot that was aborted with this ITT and has I/O in flight.
    pub fn aborted(&mut self, itt: u32, lun: [u8; 8]) -> Option<&mut ConnectionSlot> {
        let clients = [Client::Aborted(Some(itt)), Client::Background(Some(itt))];
        let is_it = |slot: &ConnectionSlot| {
            slot.is_busy() && clients.contains(&slot.client) && slot.lun == lun
        };
        self.slots.iter_mut().find(|slot| is_it(slot))
    }

    /// Records that an I/O of a command is in flight; `stage` is [`Stage::Data`] or [`Stage::Scratch`].
    #[inline]
    pub fn begin_io(&mut self, index: u32, stage: Stage) {
        self.slots[index as usize].stage = stage;
        self.busy += 1;
    }

    /// Records the end of an I/O. Returns the stage during the I/O.
    #[inline]
    pub fn end_io(&mut self, index: u32) -> Stage {
        self.busy -= 1;
        std::mem::replace(&mut self.slots[index as usize].stage, Stage::Started)
    }

    /// Returns the indices of the slots in use.
    pub fn used(&self) -> impl Iterator<Item = u32> {
        let all = self.slots.iter().enumerate();
        all.filter(|(_, slot)| slot.stage != Stage::Free)
            .map(|(index, _)| index as u32)
    }

    /// Returns the number of slots with an I/O in flight, without a visit to each slot.
    #[inline]
    pub fn busy(&self) -> usize {
        debug_assert_eq!(self.busy, self.count_busy());
        self.busy
    }

    fn count_busy(&self) -> usize {
        self.slots.iter().filter(|slot| slot.is_busy()).count()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_with_io_in_flight_are_counted() {
        let mut slots = Slots::default();
        slots.slots.resize_with(8, ConnectionSlot::default);
        let mut random = fastrand::Rng::with_seed(9);
        for _ in 0..1_000 {
            let index = random.u32(..8);
            let io = [Stage::Data, Stage::Scratch][random.usize(..2)];
            let stage = slots.get(index).stage;
            match stage {
                Stage::Free => slots.get(index).stage = Stage::Started,
                Stage::Data | Stage::Scratch => assert_eq!(slots.end_io(index), stage),
                _ if random.bool() => drop(slots.free(index)),
                _ => slots.begin_io(index, io),
            }
            assert_eq!(slots.busy(), slots.count_busy());
        }
    }
}
