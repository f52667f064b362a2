//! Output of a connection: one message at a time, built from all PDUs queued since the previous message was sent.

use guest_memory::IoBuffer;
use iscsi::target::{Outgoing, Piece};
use request_engine::{Buffers, SendQueue};
use scsi::{AbortScope, TaskTag};
use scsi_exec::{Hold, Ticket};
use uring::Message;

use crate::connection::Connection;

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

#[derive(Default)]
pub(crate) struct Output {
    /// Data and the message. The index of queued data is its name in the protocol.
    pub queue: SendQueue,
    /// Tasks with data in a disk's memory: queued, and in the message.
    owed: Owed,
    owed_in_message: Owed,
    /// Contiguous copy of data for a data digest.
    pub digested: Vec<u8>,
}

impl Output {
    /// Returns the name of the next data.
    pub fn name(&self) -> u64 {
        self.queue.len() as u64
    }

    /// Keeps data until it is sent, under the name from [`Output::name`].
    pub fn keep(&mut self, buffer: IoBuffer) {
        self.queue.keep(buffer);
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
        if !self.owed_in_message.tasks.is_empty() && !self.queue.is_sending() {
            let over = &mut self.owed_in_message;
            over.tasks.clear();
            over.tickets.clear();
            over.waits.clear();
        }
    }

    /// Returns the next message, if there is output and no message in flight.
    pub fn next(
        &mut self,
        outgoing: &mut Outgoing,
        buffers: &mut Buffers<Connection>,
    ) -> Option<Box<Message>> {
        if self.queue.is_sending() || outgoing.is_empty() {
            return None;
        }
        let mut message = self.queue.begin();
        let bytes = |piece: Piece<'_>| match piece {
            Piece::Bytes(bytes) => bytes.len(),
            Piece::Data { .. } => 0,
        };
        let headers = buffers.take_anyway(outgoing.pieces().map(bytes).sum());
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
        self.queue.begun(&message);
        Some(message)
    }
}
