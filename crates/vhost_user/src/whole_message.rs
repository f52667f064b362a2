//! Waits until a complete message has arrived, so that its reader never waits for the rest.
//!
//! The crate `vhost` reads a message to its end, regardless of the socket's time-out. A front end that stops half-way would keep its
//! session forever.

use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, recvmsg};

/// Request, flags, payload size: 32 bits each.
pub(crate) const HEADER: usize = 12;
/// Maximum payload size. The reader refuses a larger size when it sees the header.
pub(crate) const PAYLOAD_MAX: u32 = 4096;
/// Interval of checks for a partial message. Nearly all messages are complete at the first check.
const PAUSE: Duration = Duration::from_millis(2);

/// Maximum number of descriptors in a message of the crate `vhost`. It takes more of them for a temporary shortage.
pub(crate) const DESCRIPTORS_MAX: usize = 32;

const SET_BACKEND_REQ_FD: u32 = 21;

/// Waits for the rest of a message. Also succeeds if the stream has ended, which the reader detects, too. Returns the channel for back-end
/// requests if the message contains one: the crate `vhost` cannot send the required messages on it.
///
/// # Errors
/// `TimedOut`, `InvalidData` for input that the reader cannot handle, or the socket's error.
pub(crate) fn wait(stream: &UnixStream, limit: Duration) -> io::Result<Option<OwnedFd>> {
    let start = Instant::now();
    loop {
        let available = rustix::io::ioctl_fionread(stream)? as usize;
        if available >= HEADER
            && let Some(channel) = parse_if_complete(stream, available)?
        {
            return Ok(channel);
        }
        if has_ended(stream)? {
            return Ok(None);
        }
        if start.elapsed() > limit {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no complete message within {} s", limit.as_secs()),
            ));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Parses a message after `available` bytes, at least the header, have arrived. Returns `None` if the message is incomplete.
fn parse_if_complete(stream: &UnixStream, available: usize) -> io::Result<Option<Option<OwnedFd>>> {
    let mut header = [0; HEADER];
    let (read, first) = peek(stream, &mut header)?;
    if read < HEADER {
        return invalid("the header of a message arrived in pieces, with descriptors between them");
    }
    let size = u32::from_ne_bytes([header[8], header[9], header[10], header[11]]);
    let request = u32::from_ne_bytes([header[0], header[1], header[2], header[3]]);
    let channel = first.filter(|_| request == SET_BACKEND_REQ_FD);
    if size > PAYLOAD_MAX {
        return Ok(Some(channel));
    }
    let length = HEADER + size as usize;
    if available < length {
        return Ok(None);
    }
    let mut message = [0; HEADER + PAYLOAD_MAX as usize];
    // A peek ends after descriptors and may return those of the next message, so their number is not reliable.
    let (read, _) = peek(stream, &mut message[..length])?;
    if read < length && read != HEADER {
        return invalid("a message arrived in pieces, with descriptors between them");
    }
    Ok(Some(channel))
}

/// Peeks at the next bytes. Returns their number and the first of their descriptors.
fn peek(stream: &UnixStream, into: &mut [u8]) -> io::Result<(usize, Option<OwnedFd>)> {
    let mut space =
        [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let received = recvmsg(stream, &mut [IoSliceMut::new(into)], &mut control, flags)?;
    let (mut descriptors, mut first) = (0, None);
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(fds) = message {
            // Peeked descriptors are duplicates and are closed here.
            for fd in fds {
                descriptors += 1;
                first.get_or_insert(fd);
            }
        }
    }
    if received.flags.contains(ReturnFlags::CTRUNC) || descriptors > DESCRIPTORS_MAX {
        return invalid("more than 32 descriptors, or more than there is room for");
    }
    Ok((received.bytes, first))
}

fn invalid<T>(reason: &str) -> io::Result<T> {
    Err(io::Error::new(io::ErrorKind::InvalidData, reason))
}

/// Returns true if the peer has closed its side.
fn has_ended(stream: &UnixStream) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut wait = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut wait, Some(&Timespec::default()))?;
    let closed = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    Ok(wait[0].revents().intersects(closed))
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    const LIMIT: Duration = Duration::from_millis(20);
    /// SET_FEATURES, version 1, 8 bytes.
    const MESSAGE: [u8; 20] = [2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];

    fn wait_for(bytes: &[u8]) -> io::Result<()> {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(bytes).unwrap();
        wait(&ours, LIMIT).map(|_| ())
    }

    #[test]
    fn whole_message_is_read_at_once_and_half_a_one_never() {
        assert!(wait_for(&MESSAGE).is_ok());
        assert!(wait_for(&[&MESSAGE[..], &MESSAGE[..5]].concat()).is_ok());
        for length in [1, 11, 12, 19] {
            let error = wait_for(&MESSAGE[..length]).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::TimedOut, "{length} bytes");
        }
    }

    #[test]
    fn more_descriptors_than_the_reader_takes_are_refused() {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        use std::os::fd::AsFd;
        for (count, taken) in [(1, true), (32, true), (33, false)] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let fds = vec![theirs.as_fd(); count];
            let mut space = [std::mem::MaybeUninit::uninit(); 256];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            let bytes = [std::io::IoSlice::new(&MESSAGE)];
            sendmsg(&theirs, &bytes, &mut control, SendFlags::empty()).unwrap();
            assert_eq!(wait(&ours, LIMIT).is_ok(), taken, "{count} descriptors");
        }
    }

    #[test]
    fn channel_is_taken_from_its_message_only() {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        use std::os::fd::AsFd;
        for (request, taken) in [(21, true), (13, false)] {
            let (ours, theirs) = UnixStream::pair().unwrap();
            let fds = [theirs.as_fd()];
            let mut space = [std::mem::MaybeUninit::uninit(); 64];
            let mut control = SendAncillaryBuffer::new(&mut space);
            assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
            let mut message = MESSAGE;
            message[0] = request;
            let bytes = [std::io::IoSlice::new(&message)];
            sendmsg(&theirs, &bytes, &mut control, SendFlags::empty()).unwrap();
            let channel = wait(&ours, LIMIT).unwrap();
            assert_eq!(channel.is_some(), taken, "request {request}");
        }
    }

    #[test]
    fn descriptors_of_the_message_behind_are_not_this_ones() {
        use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
        use std::os::fd::AsFd;
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&MESSAGE).unwrap();
        let fds = [theirs.as_fd()];
        let mut space = [std::mem::MaybeUninit::uninit(); 64];
        let mut control = SendAncillaryBuffer::new(&mut space);
        assert!(control.push(SendAncillaryMessage::ScmRights(&fds)));
        let bytes = [std::io::IoSlice::new(&MESSAGE)];
        sendmsg(&theirs, &bytes, &mut control, SendFlags::empty()).unwrap();
        wait(&ours, LIMIT).unwrap();
    }

    #[test]
    fn end_of_the_stream_and_an_absurd_size_are_left_to_the_reader() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&MESSAGE[..3]).unwrap();
        drop(theirs);
        assert!(wait(&ours, LIMIT).is_ok());
        let mut absurd = MESSAGE;
        absurd[11] = 0xff;
        assert!(wait_for(&absurd[..12]).is_ok());
    }
}
