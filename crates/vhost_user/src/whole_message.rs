//! Waits until a whole message has come, so that whoever reads it never waits for its rest.
//!
//! The crate `vhost` reads a message to its end, however long that takes and whatever time-out the socket has. A front
//! end that stops half-way would keep its session for ever.

use std::io;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use rustix::net::{RecvFlags, recv};

/// Request, flags, size of the payload: 32 bits each.
const HEADER: usize = 12;
/// No message has more payload; one that says so is refused on sight of its header.
const PAYLOAD_MAX: u32 = 4096;
/// Between two looks at a message that is on its way. Nearly all are there at the first look.
const PAUSE: Duration = Duration::from_millis(2);

/// Waits for the rest of a message that has begun. `Ok` also when there will be no more: the reader sees that too.
///
/// # Errors
/// `TimedOut`, or what the socket says.
pub(crate) fn wait(stream: &UnixStream, limit: Duration) -> io::Result<()> {
    let begun = Instant::now();
    loop {
        let there = rustix::io::ioctl_fionread(stream)?;
        if there >= HEADER as u64 {
            let payload = payload(stream)?;
            if payload > PAYLOAD_MAX || there >= HEADER as u64 + u64::from(payload) {
                return Ok(());
            }
        }
        if has_ended(stream)? {
            return Ok(());
        }
        if begun.elapsed() > limit {
            return Err(io::Error::new(
                io::ErrorKind::TimedOut,
                format!("no whole message within {} s", limit.as_secs()),
            ));
        }
        std::thread::sleep(PAUSE);
    }
}

/// Size of the payload, by the header that waits.
fn payload(stream: &UnixStream) -> io::Result<u32> {
    let mut header = [0; HEADER];
    let (_, read) = recv(stream, &mut header, RecvFlags::PEEK | RecvFlags::DONTWAIT)?;
    if read < HEADER {
        // Descriptors between two pieces of a header: no front end sends it so.
        let text = "a header in pieces, with descriptors between them";
        return Err(io::Error::new(io::ErrorKind::InvalidData, text));
    }
    Ok(u32::from_ne_bytes([
        header[8], header[9], header[10], header[11],
    ]))
}

/// Has the other side said its last word?
fn has_ended(stream: &UnixStream) -> io::Result<bool> {
    use rustix::event::{PollFd, PollFlags, Timespec, poll};
    let mut wait = [PollFd::new(stream, PollFlags::RDHUP)];
    poll(&mut wait, Some(&Timespec::default()))?;
    let gone = PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR;
    Ok(wait[0].revents().intersects(gone))
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
        wait(&ours, LIMIT)
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
