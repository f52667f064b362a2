//! Non-blocking calls on the real sockets of a simulation.

use std::os::fd::{AsFd, AsRawFd};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::super::slab::SlabSlot;

pub(super) fn outcome(result: isize) -> Result<u32, i32> {
    if result < 0 {
        let errno = std::io::Error::last_os_error().raw_os_error();
        return Err(errno.unwrap_or(libc::EIO));
    }
    Ok(result as u32)
}

pub(super) fn is_readable(slot: &SlabSlot) -> bool {
    let Some(fd) = &slot.fd else {
        return false;
    };
    let mut fds = [PollFd::new(fd, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec::default())).is_ok_and(|ready| ready > 0)
}

/// Returns `None` if more bytes are needed. `little` takes only a part of the available bytes.
pub(super) fn receive(
    slot: &SlabSlot,
    whole: bool,
    done: &mut usize,
    little: bool,
) -> Option<Result<u32, i32>> {
    let (Some(fd), [one]) = (&slot.fd, slot.buffer.segments()) else {
        return Some(Err(libc::EINVAL));
    };
    let left = one.len() - *done;
    let wanted = if little { left.min(7) } else { left };
    let into = one.base().wrapping_add(*done);
    // SAFETY: the slot keeps the buffer, which may be written at any time, and the range lies in
    // it.
    let result = outcome(unsafe {
        libc::recv(
            fd.as_fd().as_raw_fd(),
            into.cast(),
            wanted,
            libc::MSG_DONTWAIT,
        )
    });
    match result {
        Err(libc::EAGAIN) => None,
        Ok(bytes) if whole && bytes > 0 => {
            *done += bytes as usize;
            (*done == one.len()).then_some(Ok(*done as u32))
        }
        Ok(0) if whole => Some(Ok(*done as u32)),
        result => Some(result),
    }
}

/// Returns `None` if the socket accepts nothing. `little` sends only the first range.
pub(super) fn send(slot: &mut SlabSlot, little: bool) -> Option<Result<u32, i32>> {
    let (Some(fd), Some(message)) = (&slot.fd, &mut slot.message) else {
        return Some(Err(libc::EINVAL));
    };
    let flags = libc::MSG_NOSIGNAL | libc::MSG_DONTWAIT;
    // SAFETY: a header of integers and pointers, which point into the message.
    let mut header = unsafe { *message.header() };
    if little {
        header.msg_iovlen = header.msg_iovlen.min(1);
    }
    // SAFETY: ranges and the memory of the buffers belong to the message, and the call only reads
    // them.
    match outcome(unsafe { libc::sendmsg(fd.as_fd().as_raw_fd(), &raw const header, flags) }) {
        Err(libc::EAGAIN) => None,
        result => Some(result),
    }
}
