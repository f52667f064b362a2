//! Sockets deliver all bytes in order, also from partial sends.

use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use guest_memory::IoBuffer;
use uring::{Completion, Message, Owner, Receive, Ring, RingFd, Wait};

fn pair(ring: &mut Ring) -> (RingFd, UnixStream) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    (ring.register(OwnedFd::from(ours)), theirs)
}

fn next(ring: &mut Ring) -> Completion {
    let mut out = Vec::new();
    while out.is_empty() {
        let wait = Wait::Until(Some(Duration::from_secs(20)));
        ring.enter(wait, &mut out).unwrap();
    }
    out.remove(0)
}

#[test]
fn message_of_many_ranges_arrives_whole_and_gives_its_buffers_back() {
    let mut ring = Ring::new(8).unwrap();
    let (socket, mut peer) = pair(&mut ring);
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        peer.read_to_end(&mut all).unwrap();
        all
    });
    let mut message = Box::<Message>::default();
    let bytes: Vec<u8> = (0..3 << 20).map(|n: u32| (n / 5) as u8).collect();
    let buffer = IoBuffer::owned(bytes.len());
    buffer.write_at(0, &bytes);
    let kept = message.keep(buffer);
    // More ranges than one system call accepts, and more bytes than the socket.
    for at in (0..bytes.len()).step_by(1024) {
        message.add(kept, at, 1024);
    }
    while message.left() > 0 {
        ring.send(Owner(1), 7, &socket, message);
        let done = next(&mut ring);
        assert_eq!((done.owner, done.token), (Owner(1), 7));
        message = done.message.unwrap();
        message.sent(done.result.unwrap());
    }
    assert_eq!(message.take_buffers().count(), 1);
    drop(socket);
    drop(ring);
    assert!(reader.join().unwrap() == bytes);
}

#[test]
fn receive_returns_available_or_all_bytes() {
    let mut ring = Ring::new(8).unwrap();
    let (socket, mut peer) = pair(&mut ring);
    peer.write_all(b"moon").unwrap();
    ring.receive(Owner(1), 1, &socket, IoBuffer::owned(100), Receive::Some);
    let done = next(&mut ring);
    assert_eq!(done.result, Ok(4));
    let mut bytes = [0; 4];
    done.buffer.unwrap().read_at(0, &mut bytes);
    assert_eq!(&bytes, b"moon");

    peer.write_all(b"half").unwrap();
    ring.receive(Owner(1), 2, &socket, IoBuffer::owned(8), Receive::Whole);
    let mut out = Vec::new();
    ring.enter(Wait::No, &mut out).unwrap();
    assert!(out.is_empty(), "not before all of it is there");
    peer.write_all(b"moon").unwrap();
    assert_eq!(next(&mut ring).result, Ok(8));

    drop(peer);
    ring.receive(Owner(1), 3, &socket, IoBuffer::owned(8), Receive::Later);
    assert_eq!(next(&mut ring).result, Ok(0), "end of stream");
}

fn message(bytes: &[u8]) -> Box<Message> {
    let mut message = Box::<Message>::default();
    let buffer = IoBuffer::owned(bytes.len());
    buffer.write_at(0, bytes);
    let kept = message.keep(buffer);
    message.add(kept, 0, bytes.len());
    message
}

#[test]
fn quiet_send_is_reported_without_ending_the_wait() {
    let mut ring = Ring::new(8).unwrap();
    let (socket, mut peer) = pair(&mut ring);
    ring.send_quietly(Owner(1), 1, &socket, message(b"moon"));
    ring.timer(Owner(2), 2, Duration::from_millis(20));
    let mut out = Vec::new();
    ring.enter(Wait::Until(None), &mut out).unwrap();
    out.sort_by_key(|completion| completion.token);
    let [sent, timer] = &out[..] else {
        panic!("both: {out:?}")
    };
    assert_eq!(sent.result, Ok(4));
    assert_eq!(sent.message.as_ref().unwrap().left(), 4);
    assert_eq!((timer.token, timer.result), (2, Err(libc_etime())));
    assert_eq!(ring.in_flight(), 0);
    let mut bytes = [0; 4];
    peer.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"moon");
}

fn libc_etime() -> i32 {
    62
}

#[test]
fn quiet_send_that_does_not_go_as_a_whole_ends_the_wait() {
    let mut ring = Ring::new(8).unwrap();
    let (socket, mut peer) = pair(&mut ring);
    let bytes = vec![7; 8 << 20];
    ring.send_quietly(Owner(1), 1, &socket, message(&bytes));
    let first = next(&mut ring);
    let taken = first.result.unwrap();
    assert!(taken > 0 && taken < 8 << 20, "{taken}");
    let mut left = first.message.unwrap();
    left.sent(taken);
    // The socket is full now.
    ring.send_quietly(Owner(1), 2, &socket, left);
    let second = next(&mut ring);
    assert_eq!((second.token, second.result), (2, Err(11)), "EAGAIN");
    let reader = std::thread::spawn(move || {
        let mut all = Vec::new();
        peer.read_to_end(&mut all).unwrap();
        all
    });
    let mut left = second.message.unwrap();
    while left.left() > 0 {
        ring.send(Owner(1), 3, &socket, left);
        let done = next(&mut ring);
        left = done.message.unwrap();
        left.sent(done.result.unwrap());
    }
    drop(socket);
    drop(ring);
    assert!(reader.join().unwrap() == bytes);
}

#[test]
fn quiet_send_to_a_peer_that_has_left_fails() {
    let mut ring = Ring::new(8).unwrap();
    let (socket, peer) = pair(&mut ring);
    drop(peer);
    ring.send_quietly(Owner(1), 1, &socket, message(b"moon"));
    let done = next(&mut ring);
    assert_eq!(done.result, Err(32), "EPIPE");
    assert!(done.message.is_some());
}

#[test]
fn message_goes_at_once_as_far_as_the_socket_takes_it() {
    let mut ring = Ring::new(8).unwrap();
    let (socket, mut peer) = pair(&mut ring);
    let mut short = message(b"moon");
    assert_eq!(socket.send_now(&mut short), Ok(4));
    let mut bytes = [0; 4];
    peer.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"moon");

    let all: Vec<u8> = (0..8 << 20).map(|n: u32| (n / 3) as u8).collect();
    let mut long = message(&all);
    let taken = socket.send_now(&mut long).unwrap();
    assert!(taken > 0 && taken < 8 << 20, "{taken}");
    long.sent(taken);
    assert_eq!(socket.send_now(&mut long), Err(11), "EAGAIN");
    let mut came = vec![0; taken as usize];
    peer.read_exact(&mut came).unwrap();
    assert!(came == all[..taken as usize]);
    drop(peer);
    assert_eq!(socket.send_now(&mut long), Err(32), "EPIPE");
}

#[test]
fn available_data_are_received_immediately() {
    let mut ring = Ring::new(8).unwrap();
    let (socket, mut peer) = pair(&mut ring);
    let buffer = IoBuffer::owned(8);
    assert_eq!(socket.receive_now(&buffer), Err(11), "EAGAIN");
    peer.write_all(b"full moon").unwrap();
    assert_eq!(socket.receive_now(&buffer), Ok(8));
    let mut bytes = [0; 8];
    buffer.read_at(0, &mut bytes);
    assert_eq!(&bytes, b"full moo");
    assert_eq!(socket.receive_now(&buffer), Ok(1));
    drop(peer);
    assert_eq!(socket.receive_now(&buffer), Ok(0), "end of stream");
}
