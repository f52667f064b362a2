//! Data that a connection sends: queued buffers, and one message in the kernel.
//!
//! Buffers may point at memory of a disk. Before another request changes this memory, [`SendQueue::copy_borrowed`] replaces the unsent part by
//! copies; a message in the kernel is recalled for this.

use std::ops::Range;

use guest_memory::IoBuffer;
use uring::Message;

use crate::BufferPool;

/// Memory of a connection.
pub trait SendMemory {
    /// Copies the data of a shell that overlaps one of these address ranges.
    fn copy_held(&mut self, shell: &IoBuffer, held: &[Range<usize>]) -> Option<IoBuffer>;

    /// Gives a buffer or a shell back.
    fn give(&mut self, buffer: IoBuffer);
}

impl SendMemory for BufferPool {
    fn copy_held(&mut self, shell: &IoBuffer, held: &[Range<usize>]) -> Option<IoBuffer> {
        BufferPool::copy_held(self, shell, held)
    }

    fn give(&mut self, buffer: IoBuffer) {
        BufferPool::give(self, buffer);
    }
}

/// Maximum bytes that a connection may have copied because of writes to data that it is sending: two of the longest reads.
const COPIED_MAX: usize = 64 << 20;

/// Progress of [`SendQueue::copy_borrowed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CopyProgress {
    /// Nothing points at the memory any more.
    Done,
    /// The kernel holds a message with such data; recall it.
    Recall,
    /// The message is being recalled.
    Recalled,
}

/// Queued data and the message in the kernel.
#[derive(Default)]
pub struct SendQueue {
    /// Queued data that is not in a message yet.
    data: Vec<IoBuffer>,
    /// Reusable message while the kernel has none.
    message: Option<Box<Message>>,
    /// Unsent bytes of the message in the kernel.
    sending: u64,
    /// Bytes of all messages that the kernel has accepted.
    sent_bytes: u64,
    /// The message in the kernel points at memory of a disk.
    has_views: bool,
    /// Address ranges of disks that caused the recall of the message.
    recalled: Vec<Range<usize>>,
    /// Address ranges that the message no longer uses.
    freed: Vec<Range<usize>>,
    /// Bytes copied since the queue was last empty.
    copied: usize,
}

impl SendQueue {
    /// Returns the number of queued buffers, which is the index of the next one.
    pub fn len(&self) -> usize {
        self.data.len()
    }

    /// Returns true if no data is queued.
    pub fn is_empty(&self) -> bool {
        self.data.is_empty()
    }

    /// Queues data for the next message.
    pub fn keep(&mut self, buffer: IoBuffer) {
        self.data.push(buffer);
    }

    /// Removes all queued data, for a message that contains a copy.
    pub fn take_data(&mut self) -> Vec<IoBuffer> {
        std::mem::take(&mut self.data)
    }

    /// Copies unsent data at these addresses, so that it is not sent from there.
    pub fn copy_borrowed(
        &mut self,
        held: &[Range<usize>],
        memory: &mut impl SendMemory,
    ) -> CopyProgress {
        for data in &mut self.data {
            if let Some(own) = memory.copy_held(data, held) {
                self.copied += own.total_len();
                memory.give(std::mem::replace(data, own));
            }
        }
        let lies_on_disk = self.is_sending() && self.has_views;
        if !lies_on_disk || held.iter().all(|range| self.freed.contains(range)) {
            return CopyProgress::Done;
        }
        let first = self.recalled.is_empty();
        held.clone_into(&mut self.recalled);
        match first {
            true => CopyProgress::Recall,
            false => CopyProgress::Recalled,
        }
    }

    /// Replaces the rest of a recalled message by copies.
    pub fn replace_views(&mut self, message: &mut Message, memory: &mut impl SendMemory) {
        if self.recalled.is_empty() {
            return;
        }
        self.freed = std::mem::take(&mut self.recalled);
        message.replace_views(|view| {
            let own = memory.copy_held(view, &self.freed)?;
            self.copied += own.total_len();
            Some(own)
        });
    }

    /// Returns true if more was copied for this client than allowed.
    pub fn has_copied_too_much(&self) -> bool {
        self.copied > COPIED_MAX
    }

    /// Returns true while the kernel has a message.
    #[inline]
    pub fn is_sending(&self) -> bool {
        self.sending > 0
    }

    /// Returns the bytes that the kernel has not accepted yet.
    #[inline]
    pub fn unsent(&self) -> u64 {
        self.sending
    }

    /// Returns the bytes that the kernel has accepted since the start.
    pub fn sent_bytes(&self) -> u64 {
        self.sent_bytes
    }

    /// Begins a message with all queued data: buffer N of the message is the queue's. The caller adds ranges and passes it to
    /// [`SendQueue::begun`].
    #[inline]
    pub fn begin(&mut self) -> Box<Message> {
        let mut message = self.message.take().unwrap_or_default();
        self.has_views = false;
        for buffer in self.data.drain(..) {
            self.has_views |= !buffer.is_owned();
            message.keep(buffer);
        }
        message
    }

    /// Records that the kernel gets this message.
    #[inline]
    pub fn begun(&mut self, message: &Message) {
        self.sending = message.left();
    }

    /// Records `bytes` as sent. Returns the rest of the message, if any.
    #[inline]
    pub fn sent(
        &mut self,
        mut message: Box<Message>,
        bytes: u32,
        memory: &mut impl SendMemory,
    ) -> Option<Box<Message>> {
        message.sent(bytes);
        self.sent_bytes += u64::from(bytes);
        self.sending = message.left();
        if self.sending > 0 {
            self.replace_views(&mut message, memory);
            return Some(message);
        }
        self.recycle(message, memory);
        None
    }

    /// Drops the rest of the message.
    pub fn recycle(&mut self, mut message: Box<Message>, memory: &mut impl SendMemory) {
        self.sending = 0;
        self.recalled.clear();
        self.freed.clear();
        if self.data.is_empty() {
            self.copied = 0;
        }
        message
            .take_buffers()
            .for_each(|buffer| memory.give(buffer));
        self.message = Some(message);
    }
}
