//! Transfers whole messages on a Unix socket, with their descriptors.

use std::io::{self, ErrorKind, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::retry_on_intr;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::{DESCRIPTORS_MAX, HEADER, Header};

/// Maximum number of descriptors that the kernel sends at once (SCM_MAX_FD).
const SENT_DESCRIPTORS_MAX: usize = 253;

/// Receives a whole message. Reads no byte of the next one.
///
/// # Errors
/// `UnexpectedEof` at the end of the stream, `TimedOut` if the message is not complete within `limit`, `InvalidData` for an invalid header or
/// too many descriptors, or the error of the socket.
pub fn receive(stream: &UnixStream, limit: Duration) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let until = Instant::now() + limit;
    let (mut bytes, mut fds) = (vec![0; HEADER], Vec::new());
    let mut received = 0;
    while received < bytes.len() {
        if !is_readable(stream, until)? {
            let why = format!("no complete message within {} s", limit.as_secs());
            return Err(io::Error::new(ErrorKind::TimedOut, why));
        }
        received += match receive_some(stream, &mut bytes[received..], &mut fds) {
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(count) => count,
            Err(error) if error.kind() == ErrorKind::WouldBlock => 0,
            Err(error) => return Err(error),
        };
        if received == HEADER {
            let header = Header::parse(&bytes);
            let (header, _) =
                header.map_err(|error| io::Error::new(ErrorKind::InvalidData, error))?;
            bytes.resize(HEADER + header.size as usize, 0);
        }
    }
    Ok((bytes, fds))
}

fn receive_some(stream: &UnixStream, into: &mut [u8], fds: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received =
        retry_on_intr(|| recvmsg(stream, &mut [IoSliceMut::new(into)], &mut control, flags))?;
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received_fds) = message {
            fds.extend(received_fds);
        }
    }
    match received.flags.contains(ReturnFlags::CTRUNC) || fds.len() > DESCRIPTORS_MAX {
        true => Err(io::Error::new(
            ErrorKind::InvalidData,
            "more than 32 descriptors, or more than there is room for",
        )),
        false => Ok(received.bytes),
    }
}

/// Sends bytes with descriptors.
///
/// # Errors
/// `InvalidInput` for too many descriptors, `TimedOut` if the peer does not read within the socket's write timeout, or the error of the socket.
pub fn send(stream: &UnixStream, mut bytes: &[u8], fds: &[impl AsFd]) -> io::Result<()> {
    let fds: Vec<BorrowedFd<'_>> = fds.iter().map(AsFd::as_fd).collect();
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(SENT_DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(ErrorKind::InvalidInput.into());
    }
    while !bytes.is_empty() {
        let flags = SendFlags::NOSIGNAL;
        let sent = retry_on_intr(|| sendmsg(stream, &[IoSlice::new(bytes)], &mut control, flags));
        let sent = sent.map_err(|errno| match errno {
            rustix::io::Errno::AGAIN => {
                io::Error::new(ErrorKind::TimedOut, "the peer does not read")
            }
            errno => errno.into(),
        })?;
        // Descriptors were sent with the first byte.
        control.clear();
        bytes = bytes.get(sent..).unwrap_or_default();
    }
    Ok(())
}

/// Waits until a descriptor is readable. Returns false if it is not before `until`.
///
/// # Errors
/// Returns the error of `poll`.
pub fn is_readable(fd: impl AsFd, until: Instant) -> io::Result<bool> {
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&left)) {
            Ok(count) => return Ok(count > 0),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
