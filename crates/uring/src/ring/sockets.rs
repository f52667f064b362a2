//! Receives and sends on sockets.

use guest_memory::IoBuffer;
use io_uring::opcode;
use io_uring::squeue::Flags;

use super::{Ring, transfer_length};
use crate::fd::RingFd;
use crate::message::Message;
use crate::slab::Use;
use crate::{Completion, Owner};
#[cfg(feature = "simulated")]
use crate::{kernel::Kernel, simulated::Work};

/// Completion condition of a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Receive {
    /// Any available bytes.
    Some,
    /// Same as `Some`, without a first attempt: no bytes are expected yet, so the kernel polls first.
    Later,
    /// A full buffer.
    Whole,
}

/// `IORING_RECVSEND_POLL_FIRST`.
const POLL_FIRST: u16 = 1;

impl Ring {
    /// Receives from a socket into the window of `buffer`, which is one segment. A result of 0 is the end of the stream.
    ///
    /// # Panics
    /// When the window has several segments.
    pub fn receive(
        &mut self,
        owner: Owner,
        token: u64,
        fd: &RingFd,
        buffer: IoBuffer,
        how: Receive,
    ) {
        let slot = self.occupy(owner, token, Use::Buffered, Some(fd), buffer);
        let (flags, first) = match how {
            Receive::Some => (0, 0),
            Receive::Later if self.knows_poll_first => (0, POLL_FIRST),
            Receive::Later => (0, 0),
            Receive::Whole => (libc::MSG_WAITALL, 0),
        };
        let [one] = self.slab.slot(slot).buffer.segments() else {
            panic!("receive buffer is not one segment")
        };
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            let whole = how == Receive::Whole;
            return kernel.begin(slot, Work::Receive { whole, done: 0 });
        }
        let entry = opcode::Recv::new(fd.number(), one.base(), transfer_length(one.len()))
            .flags(flags)
            .ioprio(first)
            .build();
        self.push_for(fd, slot, entry);
    }

    /// Sends the rest of a message on a socket. The completion returns the message; pass its result to [`Message::sent`].
    pub fn send(&mut self, owner: Owner, token: u64, fd: &RingFd, message: Box<Message>) {
        self.send_message(owner, token, fd, message, Use::Message);
    }

    /// Same as [`Ring::send`], but a completion does not end a wait. If the socket accepts all bytes at once, as nearly always
    /// with short messages, the iteration that submits the send also reports it. Sending a response and waiting for the next
    /// request is then one system call. If the socket accepts less, the send completes with fewer bytes or with `EAGAIN`.
    pub fn send_quietly(&mut self, owner: Owner, token: u64, fd: &RingFd, message: Box<Message>) {
        let quiet = self.can_be_quiet && message.is_one_header();
        let used = if quiet { Use::Quiet } else { Use::Message };
        self.send_message(owner, token, fd, message, used);
    }

    fn send_message(
        &mut self,
        owner: Owner,
        token: u64,
        fd: &RingFd,
        message: Box<Message>,
        used: Use,
    ) {
        let index = self.occupy(owner, token, used, Some(fd), IoBuffer::default());
        let slot = self.slab.slot(index);
        let header = slot.message.insert(message).header();
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            return kernel.begin(index, Work::Send);
        }
        let mut flags = libc::MSG_NOSIGNAL | libc::MSG_WAITALL;
        let mut skip = Flags::empty();
        if used == Use::Quiet {
            self.quiet.push((index, slot.generation));
            flags |= libc::MSG_DONTWAIT;
            skip = Flags::SKIP_SUCCESS;
        }
        let entry = opcode::SendMsg::new(fd.number(), header)
            .flags(flags as u32)
            .build();
        self.push_for(fd, index, entry.flags(skip));
    }

    /// Completes silent sends. The kernel processes entries in order and reports failures before the next entry, so accepted
    /// sends without a failure are done.
    pub(super) fn end_quiet(&mut self, out: &mut Vec<Completion>) {
        if self.quiet.is_empty() || self.queued() > 0 || !self.backlog.is_empty() {
            return;
        }
        while let Some((index, generation)) = self.quiet.pop() {
            let slot = self.slab.slot(index);
            if slot.used != Use::Quiet || slot.generation != generation {
                continue;
            }
            let message = slot.message.take();
            let bytes = message.as_ref().map_or(0, |message| message.left());
            out.push(Completion {
                owner: slot.owner,
                token: slot.token,
                result: Ok(bytes as u32),
                buffer: None,
                message,
                more: false,
            });
            self.slab.release(index);
        }
    }
}
