//! A request that cannot be served and says nothing of the ring: it is refused alone, with an error where there is a place for one.
//!
//! A device type writes its error to the first or to the last bytes that the device may write. They are looked for in a second
//! walk along the chain, which takes what it can read and is bounded however the driver has laid the chain out.

use guest_memory::{Appender, GuestView};

use crate::chain::{Limits, Table, Visitor};
use crate::layout::{DESCRIPTOR_SIZE, Descriptor, INDIRECT, NEXT, WRITE};
use crate::{Chain, QueueError};

/// Bytes at the start of what the device writes that a refused chain has: room for a virtio-scsi response.
const FRONT: u32 = 128;
/// Descriptors of a table that are looked at, at most: `next` tells no more apart.
const STEPS: u32 = 1 << 16;

/// Why a chain was not popped.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PopError {
    /// The ring cannot be trusted: the queue is broken.
    #[error(transparent)]
    Queue(QueueError),
    /// A request cannot be served. Its chain has its id and descriptors, and has to be given back with `push`.
    #[error("{}", .0.error)]
    Request(Box<Refusal>),
}

impl PopError {
    /// What was wrong.
    pub fn error(&self) -> &QueueError {
        match self {
            PopError::Queue(error) => error,
            PopError::Request(refusal) => &refusal.error,
        }
    }
}

/// A request that is refused.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// What is wrong with it.
    pub error: QueueError,
    /// Where an error can be written, in the chain's buffer.
    pub place: ErrorPlace,
}

/// What there is of the memory that the device may write, of a chain that is refused.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ErrorPlace {
    /// Its first bytes, from [`Chain::readable`] on in the buffer.
    pub front: u32,
    /// Is the buffer's last byte its last one?
    pub last: bool,
}

/// What a walk along a chain ended with.
pub(crate) enum WalkError {
    Ring(QueueError),
    Request(QueueError),
}

impl From<QueueError> for WalkError {
    fn from(error: QueueError) -> WalkError {
        WalkError::Request(error)
    }
}

impl WalkError {
    /// Nothing but the ring is wrong in the eyes of a [`Survey`].
    pub fn into_error(self) -> QueueError {
        match self {
            WalkError::Ring(error) | WalkError::Request(error) => error,
        }
    }
}

/// The second walk: never finds fault with a request.
pub(crate) struct Survey<'a> {
    appender: Appender<'a>,
    limits: Limits,
    front: u32,
    /// What was writable so far is in the memory.
    whole: bool,
    /// Address of the last writable byte.
    last: Option<u64>,
    /// The walk has come to the chain's end.
    ended: bool,
}

impl<'a> Survey<'a> {
    pub fn new(view: &'a GuestView, chain: &'a mut Chain, limits: Limits) -> Survey<'a> {
        (chain.readable, chain.writable) = (0, 0);
        let mut appender = view.appender(&mut chain.buffer);
        appender.begin_second_half();
        Survey {
            appender,
            limits,
            front: 0,
            whole: true,
            last: None,
            ended: true,
        }
    }

    /// The chain's buffer is its place from now on.
    pub fn finish(mut self, error: QueueError) -> Box<Refusal> {
        let last = self.last.filter(|_| self.ended);
        let last = last.is_some_and(|at| self.appender.append(at, 1).is_ok());
        self.appender.finish();
        let front = self.front;
        Box::new(Refusal {
            error,
            place: ErrorPlace { front, last },
        })
    }

    fn entries(&mut self, table: u64, count: u32) -> Option<()> {
        let kind = self.limits.table;
        let mut index = 0;
        for step in 0..count.min(STEPS) {
            let at = table.checked_add(u64::from(index) * DESCRIPTOR_SIZE as u64)?;
            let d = self.appender.read::<Descriptor>(at).ok()?;
            let flags = kind.flags(&d);
            if flags & INDIRECT == 0 {
                self.write_to(d.address.get(), d.length.get(), flags);
            }
            index = match kind {
                Table::Linked if flags & NEXT == 0 => return Some(()),
                Table::Linked => u32::from(d.next.get()),
                Table::InOrder if index + 1 == count => return Some(()),
                // The response begins near the start, the status is the last of all.
                Table::InOrder if step >= self.limits.indirect_descriptors.into() => count - 1,
                Table::InOrder => index + 1,
            };
            if index >= count {
                return None;
            }
        }
        None
    }

    fn write_to(&mut self, address: u64, length: u32, flags: u16) {
        if flags & WRITE == 0 || length == 0 {
            return;
        }
        let take = length.min(FRONT - self.front);
        if self.whole && take > 0 {
            self.whole = self.appender.append(address, take).is_ok();
            self.front += if self.whole { take } else { 0 };
        }
        self.last = address.checked_add(u64::from(length) - 1);
    }
}

impl Visitor for Survey<'_> {
    fn element(&mut self, address: u64, length: u32, flags: u16) -> Result<(), QueueError> {
        self.write_to(address, length, flags);
        Ok(())
    }

    fn table(
        &mut self,
        table: u64,
        length: u32,
        _before: u16,
        linked: bool,
    ) -> Result<(), QueueError> {
        let whole = length.is_multiple_of(DESCRIPTOR_SIZE as u32);
        let count = length / DESCRIPTOR_SIZE as u32;
        let ended = whole && self.entries(table, count).is_some();
        self.ended &= ended && !linked;
        Ok(())
    }
}
