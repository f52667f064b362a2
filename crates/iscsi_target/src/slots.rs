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

#[derive(Default)]
pub(crate) struct Slot {
    pub generation: u32,
    /// The iSCSI task, until it was answered.
    pub iscsi: Option<TaskId>,
    pub task: Task,
    /// The next I/O, or the one in flight.
    pub job: Job,
    /// Command data, as large as the part that can be transferred by now.
    pub buffer: Option<IoBuffer>,
    state: State,
}

/// State that is reset for each command.
#[derive(Clone, Copy, Default)]
pub(crate) struct State {
    used: bool,
    /// Read data is sent from the disk's memory. The task keeps its place in the task order until the data was sent.
    pub borrowed: bool,
    /// The kernel receives into the buffer.
    pub receiving: bool,
    /// An I/O is in flight.
    pub busy: bool,
    /// An I/O was submitted.
    pub touched: bool,
    /// ITT of a task without connection that has to retain its response.
    pub lost: Option<u32>,
    /// The I/O uses scratch memory.
    pub scratch: bool,
    /// The task was aborted and executes no further steps.
    pub aborted: bool,
    /// ITT at the time of the abort.
    pub aborted_itt: Option<u32>,
    /// Aborted, but continues in the background after the I/O in flight.
    pub left: bool,
    pub begun: bool,
    /// The task continues after its answer.
    pub goes_on: bool,
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
    /// A batch has submitted it before.
    pub pended: bool,
    /// Its data was solicited, and its arrival is not recorded yet.
    pub asked: bool,
    /// Arrival times of the first and last solicited data.
    pub awaited: Stamp,
    pub received: Stamp,
    /// Stamps of the stages so far.
    pub stamps: Stamps,
}

impl Deref for Slot {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Slot {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Slot {
    /// Resets the slot. Returns the command's ticket in the task order and the holds that wait for its end.
    fn clear(&mut self) -> (Option<Ticket>, Vec<Hold>) {
        self.generation = self.generation.wrapping_add(1);
        (self.iscsi, self.buffer, self.state) = (None, None, State::default());
        self.task.abandon();
        self.task.end()
    }
}

const NONE: u32 = u32::MAX;

#[derive(Default)]
pub(crate) struct Slots {
    slots: Vec<Slot>,
    free: Vec<u32>,
    /// Slots by index of the iSCSI task.
    by_task: Vec<u32>,
}

impl Slots {
    /// Allocates the index for `tasks` iSCSI tasks.
    pub fn set_tasks(&mut self, tasks: usize) {
        self.by_task.resize(tasks, NONE);
    }

    pub fn find(&self, task: TaskId) -> Option<SlotId> {
        let index = *self.by_task.get(task.index())?;
        let slot = self.slots.get(index as usize)?;
        (slot.iscsi == Some(task)).then_some(SlotId {
            index,
            generation: slot.generation,
        })
    }

    /// Takes a slot for an iSCSI task that has none.
    pub fn take(&mut self, task: TaskId) -> SlotId {
        let index = self.free.pop().unwrap_or_else(|| {
            self.slots.push(Slot::default());
            (self.slots.len() - 1) as u32
        });
        let slot = &mut self.slots[index as usize];
        slot.used = true;
        slot.iscsi = Some(task);
        if let Some(place) = self.by_task.get_mut(task.index()) {
            *place = index;
        }
        SlotId {
            index,
            generation: slot.generation,
        }
    }

    pub fn get(&mut self, index: u32) -> &mut Slot {
        &mut self.slots[index as usize]
    }

    pub fn task(&self, index: u32) -> Option<TaskId> {
        self.slots[index as usize].iscsi
    }

    pub fn buffer(&self, index: u32) -> Option<&IoBuffer> {
        self.slots[index as usize].buffer.as_ref()
    }

    pub fn current(&mut self, id: SlotId) -> Option<&mut Slot> {
        let slot = self.slots.get_mut(id.index as usize)?;
        (slot.used && slot.generation == id.generation).then_some(slot)
    }

    pub fn id(&self, index: u32) -> SlotId {
        SlotId {
            index,
            generation: self.slots[index as usize].generation,
        }
    }

    /// Separates the slot from its ended iSCSI task. The slot may stay in use.
    pub fn part(&mut self, index: u32) -> Option<TaskId> {
        let task = self.slots[index as usize].iscsi.take()?;
        if let Some(place) = self.by_task.get_mut(task.index())
            && *place == index
        {
            *place = NONE;
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
    pub fn aborted(&mut self, itt: u32, lun: [u8; 8]) -> Option<&mut Slot> {
        let is_it = |slot: &Slot| {
            slot.used && slot.busy && slot.aborted_itt == Some(itt) && slot.lun == lun
        };
        self.slots.iter_mut().find(|slot| is_it(slot))
    }

    /// Returns the indices of the slots in use.
    pub fn used(&self) -> impl Iterator<Item = u32> {
        let all = self.slots.iter().enumerate();
        all.filter(|(_, slot)| slot.used)
            .map(|(index, _)| index as u32)
    }

    pub fn busy(&self) -> usize {
        self.slots.iter().filter(|slot| slot.busy).count()
    }
}
