//! Whole messages on a socket.

use std::io::{ErrorKind, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vhost_user_wire::stream::{receive, send};

const LIMIT: Duration = Duration::from_millis(20);
/// SET_FEATURES, version 1, 8 bytes.
const MESSAGE: [u8; 20] = [2, 0, 0, 0, 1, 0, 0, 0, 8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8];

/// Receives from a stream that has these bytes.
fn received(bytes: &[u8]) -> Result<Vec<u8>, ErrorKind> {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(bytes).unwrap();
    let (bytes, _) = receive(&ours, LIMIT).map_err(|error| error.kind())?;
    Ok(bytes)
}

#[test]
fn whole_message_is_received_and_half_a_one_never() {
    assert_eq!(received(&MESSAGE).unwrap(), MESSAGE);
    let more = [&MESSAGE[..], &MESSAGE[..5]].concat();
    assert_eq!(received(&more).unwrap(), MESSAGE);
    for length in [1, 11, 12, 19] {
        let error = received(&MESSAGE[..length]).unwrap_err();
        assert_eq!(error, ErrorKind::TimedOut, "{length} bytes");
    }
}

#[test]
fn payload_size_and_version_are_limited() {
    for (at, byte) in [(11, 0xff), (9, 0x10), (4, 2)] {
        let mut message = MESSAGE;
        message[at] = byte;
        assert_eq!(received(&message).unwrap_err(), ErrorKind::InvalidData);
    }
}

#[test]
fn end_of_the_stream_is_an_error_of_its_own() {
    for length in [0, 3, 13] {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&MESSAGE[..length]).unwrap();
        drop(theirs);
        let error = receive(&ours, LIMIT).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::UnexpectedEof);
    }
}

#[test]
fn more_than_32_descriptors_are_refused() {
    for (count, is_received) in [(1, true), (32, true), (33, false), (253, false)] {
        let (ours, theirs) = UnixStream::pair().unwrap();
        send(&theirs, &MESSAGE, &vec![theirs.as_fd(); count]).unwrap();
        let received = receive(&ours, LIMIT);
        assert_eq!(received.is_ok(), is_received, "{count} descriptors");
        assert!(received.is_ok_and(|(_, fds)| fds.len() == count) || !is_received);
    }
    let (ours, _theirs) = UnixStream::pair().unwrap();
    let error = send(&ours, &MESSAGE, &vec![ours.as_fd(); 300]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[test]
fn descriptors_of_the_next_message_stay_with_it() {
    let (ours, mut theirs) = UnixStream::pair().unwrap();
    theirs.write_all(&MESSAGE).unwrap();
    send(&theirs, &MESSAGE, &[theirs.as_fd()]).unwrap();
    for count in [0, 1] {
        let (bytes, fds) = receive(&ours, LIMIT).unwrap();
        assert_eq!((bytes, fds.len()), (MESSAGE.to_vec(), count));
    }
}
