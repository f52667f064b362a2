//! What a socket takes or gives at once, without the ring.
//!
//! For a client that has one request at a time: its answer leaves before anything else is done, and neither it nor the next
//! request needs a slot and a completion. Called on the worker's thread; nothing here waits. The calls are made as they are: the
//! C library's own prepare each time for the thread to be cancelled. Tests: `tests/sockets.rs`.

use std::os::fd::{AsFd, AsRawFd};

use guest_memory::IoBuffer;

use crate::fd::RingFd;
use crate::message::Message;

/// What a system call gave, as completions say it.
fn outcome(result: libc::c_long) -> Result<u32, i32> {
    if result < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error();
        return Err(errno.unwrap_or(libc::EIO));
    }
    // Neither call moves more than `MAX_RW_COUNT`.
    Ok(result as u32)
}

impl RingFd {
    /// Sends what the socket takes at once of what is left of a message; the result is one to tell [`Message::sent`].
    ///
    /// # Errors
    /// An errno; `EAGAIN` when it takes nothing just now.
    pub fn send_now(&self, message: &mut Message) -> Result<u32, i32> {
        let socket = self.as_fd().as_raw_fd();
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: header, ranges and the memory of the buffers are the message's, and the call only reads them.
        outcome(unsafe { libc::syscall(libc::SYS_sendmsg, socket, message.header(), flags) })
    }

    /// Ends a connection both ways: receives and sends that are in flight complete. Does nothing to a socket that is not
    /// connected any more.
    pub fn shut_down(&self) {
        rustix::net::shutdown(self, rustix::net::Shutdown::Both).ok();
    }

    /// Receives what is there into the window of `buffer`, which is one segment. 0 bytes: the peer sends no more.
    ///
    /// # Errors
    /// An errno; `EAGAIN` when nothing is there.
    ///
    /// # Panics
    /// When the window has several segments.
    pub fn receive_now(&self, buffer: &IoBuffer) -> Result<u32, i32> {
        let [one] = buffer.segments() else {
            panic!("receive buffer is not one segment")
        };
        let socket = self.as_fd().as_raw_fd();
        let (base, length) = (one.base(), one.len());
        let nobody = std::ptr::null_mut::<libc::c_void>();
        let flags = libc::MSG_DONTWAIT;
        // SAFETY: the buffer keeps this memory, which anybody may write at any time; the sender's address is not asked for.
        outcome(unsafe {
            libc::syscall(
                libc::SYS_recvfrom,
                socket,
                base,
                length,
                flags,
                nobody,
                nobody,
            )
        })
    }
}
