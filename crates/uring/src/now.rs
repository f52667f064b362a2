//! Non-blocking socket calls that bypass the ring.
//!
//! For a client with one request at a time: its response leaves at once, and neither the response nor the next request needs a
//! slot and a completion. Called on the worker's thread. Raw system calls are used, because the C library's wrappers prepare for
//! thread cancellation each time. Tests: `tests/sockets.rs`.

use std::os::fd::{AsFd, AsRawFd};

use guest_memory::IoBuffer;

use crate::fd::RingFd;
use crate::message::Message;

/// Converts the result of a system call to the form of completions.
fn outcome(result: libc::c_long) -> Result<u32, i32> {
    if result < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error();
        return Err(errno.unwrap_or(libc::EIO));
    }
    // Neither call transfers more than `MAX_RW_COUNT`.
    Ok(result as u32)
}

impl RingFd {
    /// Sends as much of a message as the socket accepts without waiting. Pass the result to [`Message::sent`].
    ///
    /// # Errors
    /// An errno; `EAGAIN` if the socket accepts nothing.
    pub fn send_now(&self, message: &mut Message) -> Result<u32, i32> {
        let socket = self.as_fd().as_raw_fd();
        let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
        // SAFETY: header, ranges and the memory of the buffers belong to the message, and the call only reads them.
        outcome(unsafe { libc::syscall(libc::SYS_sendmsg, socket, message.header(), flags) })
    }

    /// Shuts a connection down in both directions. Receives and sends in flight complete. No effect on a socket that is not
    /// connected.
    pub fn shut_down(&self) {
        rustix::net::shutdown(self, rustix::net::Shutdown::Both).ok();
    }

    /// Receives available bytes into the window of `buffer`, which is one segment. Returns 0 at the end of the stream.
    ///
    /// # Errors
    /// An errno; `EAGAIN` if no bytes are available.
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
        // SAFETY: the buffer keeps this memory, which may be written at any time; the sender's address is not requested.
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
