//! I/O works with memory that the kernel refuses to lock and register. In a test program of its
//! own, because it drops the capability to lock memory and sets the limit.

use std::time::Duration;

use guest_memory::IoBuffer;
use rustix::process::{Resource, Rlimit, setrlimit};
use rustix::thread::{CapabilitySet, CapabilitySets, capabilities, set_capabilities};
use uring::{Owner, Ring, RingFd, Wait};

fn move_and_compare(ring: &mut Ring, fd: &RingFd, buffer: IoBuffer, byte: u8) -> IoBuffer {
    buffer.fill(0, buffer.len(), byte);
    let mut out = Vec::new();
    ring.write(Owner(1), 1, fd, 0, buffer, false);
    while out.is_empty() {
        let wait = Wait::Until(Some(Duration::from_secs(20)));
        ring.enter(wait, &mut out).unwrap();
    }
    let buffer = out.remove(0).buffer.unwrap();
    buffer.fill(0, buffer.len(), 0);
    ring.read(Owner(1), 2, fd, 0, buffer);
    while out.is_empty() {
        let wait = Wait::Until(Some(Duration::from_secs(20)));
        ring.enter(wait, &mut out).unwrap();
    }
    let buffer = out.remove(0).buffer.unwrap();
    let mut bytes = vec![0; buffer.len()];
    buffer.read_at(0, &mut bytes);
    assert!(bytes.iter().all(|b| *b == byte));
    buffer
}

#[test]
fn limit_of_locked_memory_is_met_without_an_error() {
    let all = capabilities(None).unwrap();
    let fewer = CapabilitySets {
        effective: all.effective - CapabilitySet::IPC_LOCK,
        ..all
    };
    set_capabilities(None, fewer).unwrap();
    let limit = Rlimit {
        current: Some(256 << 10),
        maximum: Some(256 << 10),
    };
    setrlimit(Resource::Memlock, limit).unwrap();
    let mut ring = Ring::new(8).unwrap();
    let fd = RingFd::from(tempfile::tempfile().unwrap());
    let mut buffers: Vec<IoBuffer> = (0..8).map(|_| IoBuffer::owned(64 << 10)).collect();
    for round in 0..4 {
        for buffer in &mut buffers {
            (0..40).for_each(|_| ring.adopt(buffer));
            *buffer = move_and_compare(&mut ring, &fd, std::mem::take(buffer), round);
        }
    }
    // Some fit, the others do not.
    let adopted = ring.adopted();
    assert!((1..=4).contains(&adopted), "{adopted}");
    // Dropped buffers make room for others.
    buffers.truncate(4);
    buffers.reverse();
    buffers.truncate(1);
    drop(buffers);
    ring.enter(Wait::No, &mut Vec::new()).unwrap();
    let buffer = IoBuffer::owned(64 << 10);
    (0..40).for_each(|_| ring.adopt(&buffer));
    assert_eq!(ring.adopted(), 1);
}
