//! Requests of a connection: one slot each, from the header until the reply is queued.

use guest_memory::IoBuffer;
use latency::{Operation, Stamps};
use nbd::ErrorCode;
use nbd::reply::ReplyTo;
use nbd::request::Action;

/// Stage of the request in a slot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    /// No request.
    #[default]
    Free,
    /// The payload of a write is being received.
    Receiving,
    /// The next I/O of the request can be submitted.
    Ready,
    /// An I/O is in flight: of the command, or a part of its range.
    Submitted,
    /// The flush after a change with FUA is in flight.
    Flushing,
    /// The reply can be sent.
    Done(Result<(), ErrorCode>),
}

/// Values of a request. The buffer is separate, because it is reused.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Values {
    pub action: Action,
    pub to: ReplyTo,
    pub length: u64,
    pub operation: Operation,
}

pub(crate) struct Slot {
    pub stage: Stage,
    pub values: Values,
    /// Bytes of the range that earlier I/Os have covered.
    pub covered: u64,
    /// Extents in `buffer`, of a block status.
    pub extents: usize,
    /// I/Os of a block status that have ended.
    pub ios: u32,
    /// Data: received, read, or in the memory of the disk.
    pub buffer: Option<IoBuffer>,
    /// The request was pending, so that `stamps` are not those of a batch.
    pub pended: bool,
    pub stamps: Stamps,
}

/// Slots of one connection. Their number grows to the largest number of requests in flight.
#[derive(Default)]
pub(crate) struct Slots {
    all: Vec<Slot>,
    free: Vec<u32>,
}

impl Slots {
    /// Takes a slot for a request.
    pub fn take(&mut self, values: Values, stage: Stage) -> u32 {
        let slot = Slot {
            stage,
            values,
            covered: 0,
            extents: 0,
            ios: 0,
            buffer: None,
            pended: false,
            stamps: Stamps::default(),
        };
        match self.free.pop() {
            Some(index) => {
                self.all[index as usize] = slot;
                index
            }
            None => {
                self.all.push(slot);
                (self.all.len() - 1) as u32
            }
        }
    }

    #[inline]
    pub fn get(&mut self, index: u32) -> &mut Slot {
        &mut self.all[index as usize]
    }

    /// Releases a slot. Returns its buffer.
    pub fn free(&mut self, index: u32) -> Option<IoBuffer> {
        let slot = &mut self.all[index as usize];
        assert!(slot.stage != Stage::Free, "slot was released before");
        slot.stage = Stage::Free;
        self.free.push(index);
        slot.buffer.take()
    }

    /// Returns the number of requests.
    #[inline]
    pub fn busy(&self) -> usize {
        self.all.len() - self.free.len()
    }

    /// Returns the slots with a request.
    pub fn used(&self) -> Vec<u32> {
        let slots = self.all.iter().zip(0u32..);
        let used = slots.filter(|(slot, _)| slot.stage != Stage::Free);
        used.map(|(_, index)| index).collect()
    }
}
