//! What a connection sends: one message at a time, made of everything that was queued when the one before had left.

use std::ops::Range;

use guest_memory::IoBuffer;
use iscsi::target::{Outgoing, Piece};
use scsi::{AbortScope, TaskTag};
use scsi_exec::{Hold, Ticket};
use uring::Message;

use crate::buffers::Buffers;

/// What is kept until data that lie on a disk have been sent.
#[derive(Default)]
struct Owed {
    /// One of the tasks of each unit: all of a connection are of one nexus.
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

/// Bytes of data that a connection may have copied because somebody writes to where they lie: two of the longest reads.
const COPIED_MAX: usize = 64 << 20;

/// How far [`Output::give_back`] has come.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GivingBack {
    Done,
    /// The kernel has a message with such data, and is to be asked to let go of it.
    Recall,
    /// It was asked.
    Recalled,
}

#[derive(Default)]
pub(crate) struct Output {
    /// Data queued with the protocol by its place here, and not yet in a message.
    data: Vec<IoBuffer>,
    /// Tasks whose data lie on a disk until they are sent: queued, and in the message.
    owed: Owed,
    owed_in_message: Owed,
    /// Not in the kernel: empty, or to go on.
    message: Option<Box<Message>>,
    /// In the kernel: so many bytes.
    sending: u64,
    /// The kernel was asked to let go of the message, so that nothing is sent from these addresses of disks.
    recalled: Vec<Range<usize>>,
    /// Nothing of the message lies there.
    freed: Vec<Range<usize>>,
    /// Bytes copied since all had been sent.
    copied: usize,
}

impl Output {
    /// The next data's name.
    pub fn name(&self) -> u64 {
        self.data.len() as u64
    }

    /// Keeps data until it is sent, under the name that [`Output::name`] gave.
    pub fn keep(&mut self, buffer: IoBuffer) {
        self.data.push(buffer);
    }

    /// The task is over when what is queued by now has left: only then its place and what waits for it may go.
    pub fn owe(&mut self, task: TaskTag, ticket: Option<Ticket>, waits: Vec<Hold>) {
        self.owed.add(task);
        self.owed.tickets.extend(ticket);
        self.owed.waits.extend(waits);
    }

    /// Keeps `hold` until the data of those tasks of the scope that are owed now have left.
    pub fn wait_for_owed(&mut self, scope: &AbortScope, hold: &Hold) {
        // What is queued leaves after what is in the message.
        if self.owed.is_part_of(scope) {
            self.owed.waits.push(hold.clone());
        } else if self.owed_in_message.is_part_of(scope) {
            self.owed_in_message.waits.push(hold.clone());
        }
    }

    /// Does nobody wait for what the message sends?
    pub fn owes_nobody(&self) -> bool {
        self.owed_in_message.tickets.is_empty() && self.owed_in_message.waits.is_empty()
    }

    /// Lets go of the tasks that are over now.
    pub fn settle(&mut self) {
        if !self.owed_in_message.tasks.is_empty() && !self.is_sending() {
            let over = &mut self.owed_in_message;
            over.tasks.clear();
            over.tickets.clear();
            over.waits.clear();
        }
    }

    /// Copies what would be sent from these addresses.
    pub fn give_back(&mut self, held: &[Range<usize>], buffers: &mut Buffers) -> GivingBack {
        for data in &mut self.data {
            if let Some(own) = buffers.copy_held(data, held) {
                self.copied += own.total_len();
                buffers.give(std::mem::replace(data, own));
            }
        }
        let lies_on_disk = self.is_sending() && !self.owed_in_message.tasks.is_empty();
        if !lies_on_disk || held.iter().all(|range| self.freed.contains(range)) {
            return GivingBack::Done;
        }
        let first = self.recalled.is_empty();
        held.clone_into(&mut self.recalled);
        match first {
            true => GivingBack::Recall,
            false => GivingBack::Recalled,
        }
    }

    /// What is left of a message that was recalled is sent from copies.
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

    /// Has the initiator had more copied than it may, before it took any of that?
    pub fn has_copied_too_much(&self) -> bool {
        self.copied > COPIED_MAX
    }

    pub fn is_sending(&self) -> bool {
        self.sending > 0
    }

    /// Bytes that the kernel has not taken yet.
    pub fn unsent(&self) -> u64 {
        self.sending
    }

    /// The message that is to be sent now, if there is anything to send and none is on its way.
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

    /// The kernel has sent so many bytes; gives what is left, to be sent next.
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

    /// The message is not going to be sent.
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
