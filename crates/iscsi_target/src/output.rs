//! Output of a connection: one message at a time, built from all PDUs queued since the previous message was sent.

use std::ops::Range;

use guest_memory::IoBuffer;
use iscsi::target::{Outgoing, Piece};
use scsi::{AbortScope, TaskTag};
use scsi_exec::{Hold, Ticket};
use uring::Message;

use crate::buffers::Buffers;

/// Resources held until data in a disk's memory has been sent.
#[derive(Default)]
struct Owed {
    /// One task per unit; all tasks of a connection have one nexus.
    tasks: Vec<TaskTag>,
    tickets: Vec<Ticket>,
    waits: Vec<Hold>,
}

impl Owed {
    fn add(&mut self, task: TaskTag) {
        if !self.tasks.contains(&task) {
            self.tasks.push(task);
        }
    }

    fn append(&mut self, other: &mut Owed) {
        for task in other.tasks.drain(..) {
            self.add(task);
        }
        self.tickets.append(&mut other.tickets);
        self.waits.append(&mut other.waits);
    }

    fn is_part_of(&self, scope: &AbortScope) -> bool {
        self.tasks.iter().any(|task| scope.matches(*task))
    }
}

/// Maximum bytes that a connection may have copied because of writes to data that it is sending: two of the longest reads.
const COPIED_MAX: usize = 64 << 20;

/// Progress of [`Output::copy_borrowed`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum CopyProgress {
    Done,
    /// The kernel holds a message with such data; recall it.
    Recall,
    /// The message is being recalled.
    Recalled,
}

#[derive(Default)]
pub(crate) struct Output {
    /// Queued data that is not in a message yet. The index is its name in the protocol.
    data: Vec<IoBuffer>,
    /// Tasks with data in a disk's memory: queued, and in the message.
    owed: Owed,
    owed_in_message: Owed,
    /// Reusable message while the kernel has none.
    message: Option<Box<Message>>,
    /// Unsent bytes of the message in the kernel.
    sending: u64,
    /// Address ranges of disks that caused the recall of the message.
    recalled: Vec<Range<usize>>,
    /// Address ranges that the message no longer uses.
    freed: Vec<Range<usize>>,
    /// Bytes copied since the output was last empty.
    copied: usize,
    /// Contiguous copy of data for a data digest.
    pub digested: Vec<u8>,
}

impl Output {
    /// Returns the name of the next data.
    pub fn name(&self) -> u64 {
        self.data.len() as u64
    }

    /// Keeps data until it is sent, under the name from [`Output::name`].
    pub fn keep(&mut self, buffer: IoBuffer) {
        self.data.push(buffer);
    }

    /// Ends the task when the output queued so far has been sent. Its ticket and its waiters are released only then.
    pub fn owe(&mut self, task: TaskTag, ticket: Option<Ticket>, waits: Vec<Hold>) {
        self.owed.add(task);
        self.owed.tickets.extend(ticket);
        self.owed.waits.extend(waits);
    }

    /// Keeps `hold` until the queued data of the scope's tasks has been sent.
    pub fn wait_for_owed(&mut self, scope: &AbortScope, hold: &Hold) {
        // Queued data is sent after the message.
        if self.owed.is_part_of(scope) {
            self.owed.waits.push(hold.clone());
        } else if self.owed_in_message.is_part_of(scope) {
            self.owed_in_message.waits.push(hold.clone());
        }
    }

    /// Returns true if nothing waits for the message to be sent.
    pub fn has_no_waiters(&self) -> bool {
        self.owed_in_message.tickets.is_empty() && self.owed_in_message.waits.is_empty()
    }

    /// Releases the tasks of a completely sent message.
    pub fn settle(&mut self) {
        if !self.owed_in_message.tasks.is_empty() && !self.is_sending() {
            let over = &mut self.owed_in_message;
            over.tasks.clear();
            over.tickets.clear();
            over.waits.clear();
        }
    }

    /// Copies unsent data at these addresses, so that it is not sent from there.
    pub fn copy_borrowed(&mut self, held: &[Range<usize>], buffers: &mut Buffers) -> CopyProgress {
        for data in &mut self.data {
            if let Some(own) = buffers.copy_held(data, held) {
                self.copied += own.total_len();
                buffers.give(std::mem::replace(data, own));
            }
        }
        let lies_on_disk = self.is_sending() && !self.owed_in_message.tasks.is_empty();
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
    pub fn replace_views(&mut self, message: &mut Message, buffers: &mut Buffers) {
        if self.recalled.is_empty() {
            return;
        }
        self.freed = std::mem::take(&mut self.recalled);
        message.replace_views(|view| {
            let own = buffers.copy_held(view, &self.freed)?;
            self.copied += own.total_len();
            Some(own)
        });
    }

    /// Returns true if more was copied for this initiator than allowed.
    pub fn has_copied_too_much(&self) -> bool {
        self.copied > COPIED_MAX
    }

    pub fn is_sending(&self) -> bool {
        self.sending > 0
    }

    /// Returns the bytes that the kernel has not accepted yet.
    pub fn unsent(&self) -> u64 {
        self.sending
    }

    /// Returns the next message, if there is output and no message in flight.
    pub fn next(&mut self, outgoing: &mut Outgoing, buffers: &mut Buffers) -> Option<Box<Message>> {
        if self.is_sending() || outgoing.is_empty() {
            return None;
        }
        let mut message = self.message.take().unwrap_or_default();
        let bytes = |piece: Piece<'_>| match piece {
            Piece::Bytes(bytes) => bytes.len(),
            Piece::Data { .. } => 0,
        };
        let headers = buffers.take_anyway(outgoing.pieces().map(bytes).sum());
        for buffer in self.data.drain(..) {
            message.keep(buffer);
        }
        let mut at = 0;
        for piece in outgoing.pieces() {
            if let Piece::Bytes(bytes) = piece {
                headers.write_whole(at, bytes);
                at += bytes.len();
            }
        }
        let headers = message.keep(headers);
        let mut at = 0;
        for piece in outgoing.pieces() {
            match piece {
                Piece::Bytes(bytes) => {
                    message.add(headers, at, bytes.len());
                    at += bytes.len();
                }
                Piece::Data {
                    buffer,
                    offset,
                    length,
                } => message.add(buffer as usize, offset as usize, length as usize),
            }
        }
        outgoing.clear();
        self.owed_in_message.append(&mut self.owed);
        self.sending = message.left();
        Some(message)
    }

    /// Records `bytes` as sent. Returns the rest of the message, if any.
    pub fn sent(
        &mut self,
        mut message: Box<Message>,
        bytes: u32,
        buffers: &mut Buffers,
    ) -> Option<Box<Message>> {
        message.sent(bytes);
        self.sending = message.left();
        if self.sending > 0 {
            self.replace_views(&mut message, buffers);
            return Some(message);
        }
        self.recycle(message, buffers);
        None
    }

    /// Drops the rest of the message.
    pub fn recycle(&mut self, mut message: Box<Message>, buffers: &mut Buffers) {
        self.sending = 0;
        self.recalled.clear();
        self.freed.clear();
        if self.data.is_empty() {
            self.copied = 0;
        }
        message
            .take_buffers()
            .for_each(|buffer| buffers.give(buffer));
        self.message = Some(message);
    }
}
