//! A request that cannot be served in a valid ring: only this request is refused, with an error response if there is room for one.
//!
//! A device type writes its error to the first or last device-writable bytes. A second walk along the chain finds them. It skips unreadable
//! parts, and its length is limited for any chain.

use guest_memory::{Appender, GuestView};

use crate::chain::{Limits, Table, Visitor};
use crate::layout::{DESCRIPTOR_SIZE, Descriptor, INDIRECT, NEXT, WRITE};
use crate::{Chain, QueueError};

/// Maximum device-writable bytes at the start of a refused chain: enough for a virtio-scsi response.
const FRONT: u32 = 128;
/// Maximum number of table descriptors to read: `next` cannot address more.
const STEPS: u32 = 1 << 16;

/// Error of a pop.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PopError {
    /// The ring cannot be trusted: the queue is broken.
    #[error(transparent)]
    Queue(QueueError),
    /// A request cannot be served. Its chain has its ID and descriptor count, and must be returned with `push`.
    #[error("{}", .0.error)]
    Request(Box<Refusal>),
}

impl PopError {
    /// Returns the error.
    pub fn error(&self) -> &QueueError {
        match self {
            PopError::Queue(error) => error,
            PopError::Request(refusal) => &refusal.error,
        }
    }
}

/// A refused request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Error of the request.
    pub error: QueueError,
    /// Space for an error response in the chain's buffer.
    pub space: ResponseSpace,
}

/// Device-writable memory of a refused chain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseSpace {
    /// Number of its first bytes that are present, from [`Chain::readable`] on in the buffer.
    pub front: u32,
    /// The buffer's last byte is the last device-writable byte.
    pub last: bool,
}

/// Error of a walk along a chain.
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
    /// Returns the error. A [`Survey`] reports errors of the ring only.
    pub fn into_error(self) -> QueueError {
        match self {
            WalkError::Ring(error) | WalkError::Request(error) => error,
        }
    }
}

/// State of the second walk along a refused chain, which reports errors of the ring only.
pub(crate) struct Survey<'a> {
    appender: Appender<'a>,
    limits: Limits,
    front: u32,
    /// All writable bytes so far are in guest memory.
    is_front_mapped: bool,
    /// Address of the last writable byte.
    last: Option<u64>,
    /// The walk has reached the chain's end.
    reached_end: bool,
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
            is_front_mapped: true,
            last: None,
            reached_end: true,
        }
    }

    /// Leaves the response space in the chain's buffer.
    pub fn finish(mut self, error: QueueError) -> Box<Refusal> {
        let last = self.last.filter(|_| self.reached_end);
        let last = last.is_some_and(|at| self.appender.append(at, 1).is_ok());
        self.appender.finish();
        let front = self.front;
        Box::new(Refusal {
            error,
            space: ResponseSpace { front, last },
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
                // The response begins near the start, and the status is the last element.
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
        if self.is_front_mapped && take > 0 {
            self.is_front_mapped = self.appender.append(address, take).is_ok();
            self.front += if self.is_front_mapped { take } else { 0 };
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
        let is_valid_length = length.is_multiple_of(DESCRIPTOR_SIZE as u32);
        let count = length / DESCRIPTOR_SIZE as u32;
        let reached_end = is_valid_length && self.entries(table, count).is_some();
        self.reached_end &= reached_end && !linked;
        Ok(())
    }
}
