//! A connection's commands: a slot each, from the first sight of a command until nothing of it is in flight.
//!
//! A slot outlives its iSCSI task where a task was aborted while its I/O ran, or goes on in the background.

use std::ops::{Deref, DerefMut};

use guest_memory::IoBuffer;
use iscsi::target::TaskId;
use latency::{Operation, Part, Stamp, Stamps};
use reactor::Job;
use scsi::TaskTag;
use scsi_exec::{Hold, Task, Ticket};

/// Names a slot; a stale name finds another generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SlotId {
    pub index: u32,
    pub generation: u32,
}

#[derive(Default)]
pub(crate) struct Slot {
    pub generation: u32,
    /// The iSCSI task, as long as it is to be answered.
    pub iscsi: Option<TaskId>,
    pub task: Task,
    /// Its next I/O, or the one in flight.
    pub job: Job,
    /// Command data; as large as what of it may move by now.
    pub buffer: Option<IoBuffer>,
    state: State,
}

/// What begins anew with each command.
#[derive(Clone, Copy, Default)]
pub(crate) struct State {
    used: bool,
    /// What was read is sent from where it lies on the disk: the task's order lasts until it has left.
    pub borrowed: bool,
    /// The kernel receives into the buffer.
    pub receiving: bool,
    /// An I/O is in flight.
    pub busy: bool,
    /// An I/O was submitted.
    pub touched: bool,
    /// Its connection is lost, and its answer waits for another one: its ITT.
    pub lost: Option<u32>,
    /// The I/O works on scratch memory.
    pub scratch: bool,
    /// Aborted: it does nothing more.
    pub aborted: bool,
    /// The ITT that it had when it was aborted.
    pub aborted_itt: Option<u32>,
    /// Aborted, but what it does goes on elsewhere after its present I/O.
    pub left: bool,
    pub begun: bool,
    /// The answer was sent, or there is none, and the task goes on.
    pub goes_on: bool,
    pub lun: [u8; 8],
    pub tag: Option<TaskTag>,
    pub read_length: u32,
    /// `None`: no data-out is expected.
    pub write_length: Option<u32>,
    /// Bytes that a read moves into the buffer.
    pub reads: u32,
    pub operation: Option<Operation>,
    /// Whose measurements it belongs to.
    pub part: Part,
    pub bytes: u32,
    /// First byte on the disk.
    pub offset: u64,
    /// It has been through a batch before.
    pub pended: bool,
    /// Its data had to be waited for, and its way in is not recorded yet.
    pub asked: bool,
    /// When the first and the last of that data were there.
    pub awaited: Stamp,
    pub received: Stamp,
    /// As far as it has come.
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
    /// As new, in place. Gives the command's place among the others, and who waited for its end.
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
    /// By the iSCSI task's index.
    by_task: Vec<u32>,
}

impl Slots {
    /// Room for as many iSCSI tasks.
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

    /// A slot for an iSCSI task that has none.
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

    /// Its iSCSI task, as long as that is to be answered.
    pub fn task(&self, index: u32) -> Option<TaskId> {
        self.slots[index as usize].iscsi
    }

    /// Its command data.
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

    /// The iSCSI task is over; the slot may go on.
    pub fn part(&mut self, index: u32) -> Option<TaskId> {
        let task = self.slots[index as usize].iscsi.take()?;
        if let Some(place) = self.by_task.get_mut(task.index())
            && *place == index
        {
            *place = NONE;
        }
        Some(task)
    }

    /// Empties a slot, whose buffer must have been taken; gives the command's place among the others, and who waited for its end.
    #[must_use]
    pub fn free(&mut self, index: u32) -> (Option<Ticket>, Vec<Hold>) {
        self.part(index);
        let ended = self.slots[index as usize].clear();
        self.free.push(index);
        ended
    }

    /// What was aborted with this ITT and has I/O in flight.
    pub fn aborted(&mut self, itt: u32, lun: [u8; 8]) -> Option<&mut Slot> {
        let is_it = |slot: &Slot| {
            slot.used && slot.busy && slot.aborted_itt == Some(itt) && slot.lun == lun
        };
        self.slots.iter_mut().find(|slot| is_it(slot))
    }

    /// Slots in use.
    pub fn used(&self) -> impl Iterator<Item = u32> {
        let all = self.slots.iter().enumerate();
        all.filter(|(_, slot)| slot.used)
            .map(|(index, _)| index as u32)
    }

    pub fn busy(&self) -> usize {
        self.slots.iter().filter(|slot| slot.busy).count()
    }
}
