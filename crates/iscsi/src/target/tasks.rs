//! Task table of one connection: a fixed number of slots, found by ITT or by [`TaskId`].

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher};

use smallvec::SmallVec;

use super::data_out::WriteData;
use super::retransmission::SentData;
use super::steps::{Completion, Transfer};

/// Task identifier: slot number and generation, so that a stale identifier finds no task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct TaskId(u32);

impl TaskId {
    fn new(index: usize, generation: u16) -> Self {
        TaskId(u32::from(generation) << 16 | (index as u32 & 0xffff))
    }

    /// Returns the slot number, below [`crate::target::Connection::task_slots`].
    pub fn index(self) -> usize {
        (self.0 & 0xffff) as usize
    }

    fn generation(self) -> u16 {
        (self.0 >> 16) as u16
    }
}

/// A SCSI Command as the initiator sent it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Command {
    /// Logical unit, as on the wire.
    pub lun: [u8; 8],
    /// The CDB: 16 bytes, or more with an extended CDB.
    pub cdb: SmallVec<[u8; 32]>,
    /// Initiator Task Tag.
    pub itt: u32,
    /// CmdSN.
    pub cmd_sn: u32,
    /// The attribute field; see [`crate::pdu::TaskAttribute`].
    pub attribute: u8,
    /// R: the command reads data.
    pub read: bool,
    /// W: the command writes data.
    pub write: bool,
    /// The command was sent for immediate delivery.
    pub immediate: bool,
    /// Expected Data Transfer Length in bytes; of the write part if both directions are used.
    pub expected_length: u32,
    /// Expected bidirectional read data length in bytes.
    pub bidirectional_read_length: Option<u32>,
}

impl Command {
    /// Returns the maximum number of bytes from the initiator.
    pub fn write_length(&self) -> u32 {
        if self.write { self.expected_length } else { 0 }
    }

    /// Returns the maximum number of bytes to the initiator.
    pub fn read_length(&self) -> u32 {
        match (self.read, self.write) {
            (true, false) => self.expected_length,
            (true, true) => self.bidirectional_read_length.unwrap_or(0),
            (false, _) => 0,
        }
    }
}

/// A response delayed until the initiator has sent all outstanding data.
#[derive(Clone, Debug)]
pub(crate) struct Pending {
    pub response: u8,
    pub status: u8,
    pub sense: SmallVec<[u8; 32]>,
    pub transfer: Transfer,
}

impl Pending {
    pub fn new(completion: &Completion<'_>) -> Self {
        Pending {
            response: completion.response,
            status: completion.status,
            sense: SmallVec::from_slice(completion.sense),
            transfer: completion.transfer,
        }
    }
}

/// One task.
#[derive(Debug)]
pub(crate) struct Task {
    pub command: Command,
    pub data: WriteData,
    /// The task was reported to the caller.
    pub seen: bool,
    /// The command was delivered; the caller must answer it.
    pub delivered: bool,
    pub pending: Option<Box<Pending>>,
    /// Number of Data-In and R2T PDUs sent: DataSN and R2TSN share a counter (11.7.5, 11.8).
    pub data_sn: u32,
    /// Remaining bytes of the current Data-In sequence.
    pub burst_left: u32,
    /// The initiator received the Data-In PDUs before this DataSN on a lost connection.
    pub skip_data: u32,
    /// Read data for retransmission.
    pub sent_data: Option<Box<SentData>>,
}

impl Task {
    /// Creates a task for a received command that was not reported to the caller yet.
    pub fn new(command: Command, data: WriteData, max_burst: u32) -> Task {
        Task {
            command,
            data,
            seen: false,
            delivered: false,
            pending: None,
            data_sn: 0,
            burst_left: max_burst,
            skip_data: 0,
            sent_data: None,
        }
    }
}

struct TaskSlot {
    generation: u16,
    task: Option<Task>,
}

/// Hashes a tag with a secret key, so that the peer cannot provoke collisions.
#[derive(Clone, Copy)]
struct TagHash(u64);

impl BuildHasher for TagHash {
    type Hasher = TagHash;

    fn build_hasher(&self) -> TagHash {
        *self
    }
}

impl Hasher for TagHash {
    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u32((*byte).into());
        }
    }

    fn write_u32(&mut self, tag: u32) {
        let product = u128::from(self.0 ^ u64::from(tag)) * 0x9e37_79b9_7f4a_7c15;
        self.0 = (product >> 64) as u64 ^ product as u64;
    }

    fn finish(&self) -> u64 {
        self.0
    }
}

pub(crate) struct TaskTable {
    slots: Vec<TaskSlot>,
    free: Vec<u16>,
    by_tag: HashMap<u32, u16, TagHash>,
    /// ITTs of the most recently aborted tasks, at most one for each slot. Data for them may still arrive.
    aborted: VecDeque<u32>,
}

impl std::fmt::Debug for TaskTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(
            f,
            "TaskTable({} of {})",
            self.by_tag.len(),
            self.slots.len()
        )
    }
}

impl TaskTable {
    /// Creates `size` slots; `key` is random.
    pub fn new(size: usize, key: u64) -> Self {
        let size = size.min(usize::from(u16::MAX));
        TaskTable {
            slots: (0..size)
                .map(|_| TaskSlot {
                    generation: 0,
                    task: None,
                })
                .collect(),
            free: (0..size as u16).rev().collect(),
            by_tag: HashMap::with_capacity_and_hasher(size, TagHash(key)),
            aborted: VecDeque::new(),
        }
    }

    pub fn size(&self) -> usize {
        self.slots.len()
    }

    /// Returns true if a slot is free.
    pub fn has_room(&self) -> bool {
        !self.free.is_empty()
    }

    pub fn find(&self, itt: u32) -> Option<TaskId> {
        let index = usize::from(*self.by_tag.get(&itt)?);
        self.slots
            .get(index)
            .map(|slot| TaskId::new(index, slot.generation))
    }

    pub fn get(&self, id: TaskId) -> Option<&Task> {
        let slot = self.slots.get(id.index())?;
        slot.task
            .as_ref()
            .filter(|_| slot.generation == id.generation())
    }

    pub fn get_mut(&mut self, id: TaskId) -> Option<&mut Task> {
        let slot = self.slots.get_mut(id.index())?;
        slot.task
            .as_mut()
            .filter(|_| slot.generation == id.generation())
    }

    /// Adds a task; its ITT must be unused. Returns `None` if no slot is free.
    pub fn insert(&mut self, task: Task) -> Option<TaskId> {
        let index = self.free.pop()?;
        let slot = self.slots.get_mut(usize::from(index))?;
        slot.generation = slot.generation.wrapping_add(1);
        self.by_tag.insert(task.command.itt, index);
        slot.task = Some(task);
        Some(TaskId::new(index.into(), slot.generation))
    }

    pub fn remove(&mut self, id: TaskId) -> Option<Task> {
        let slot = self.slots.get_mut(id.index())?;
        if slot.generation != id.generation() {
            return None;
        }
        let task = slot.task.take()?;
        self.by_tag.remove(&task.command.itt);
        self.free.push(id.index() as u16);
        Some(task)
    }

    /// Records the ITT of an aborted task.
    pub fn remember_aborted(&mut self, itt: u32) {
        if self.aborted.len() == self.slots.len() {
            self.aborted.pop_front();
        }
        self.aborted.push_back(itt);
    }

    /// Returns true if a task with this ITT was aborted recently.
    pub fn was_aborted(&self, itt: u32) -> bool {
        self.aborted.contains(&itt)
    }

    /// Removes all tasks.
    pub fn clear(&mut self) {
        for index in 0..self.slots.len() {
            let id = TaskId::new(index, self.slots[index].generation);
            self.remove(id);
        }
    }

    pub fn iter(&self) -> impl Iterator<Item = (TaskId, &Task)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            slot.task
                .as_ref()
                .map(|task| (TaskId::new(index, slot.generation), task))
        })
    }
}
