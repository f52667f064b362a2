//! I/O with registered memory transfers the same bytes as without.

use std::time::Duration;

use guest_memory::{IoBuffer, Mapping};
use proptest::prelude::*;
use uring::{Completion, Owner, Ring, RingFd, Wait};

const ME: Owner = Owner(3);

/// More I/Os than the threshold of registration.
const OFTEN: usize = 40;

fn one(ring: &mut Ring) -> Completion {
    let mut out = Vec::new();
    while out.is_empty() {
        let wait = Wait::Until(Some(Duration::from_secs(20)));
        ring.enter(wait, &mut out).unwrap();
    }
    assert_eq!(out.len(), 1);
    out.remove(0)
}

fn write(ring: &mut Ring, fd: &RingFd, offset: u64, buffer: IoBuffer) -> IoBuffer {
    ring.adopt(&buffer);
    let length = buffer.len() as u32;
    ring.write(ME, 0, fd, offset, buffer, length.is_multiple_of(100));
    let done = one(ring);
    assert_eq!(done.result, Ok(length));
    done.buffer.unwrap()
}

fn read(ring: &mut Ring, fd: &RingFd, offset: u64, buffer: IoBuffer) -> IoBuffer {
    ring.adopt(&buffer);
    let length = buffer.len() as u32;
    ring.read(ME, 0, fd, offset, buffer);
    let done = one(ring);
    assert_eq!(done.result, Ok(length));
    done.buffer.unwrap()
}

fn bytes(buffer: &IoBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read_at(0, &mut bytes);
    bytes
}

/// A buffer with registered memory.
fn adopted(ring: &mut Ring, length: usize) -> IoBuffer {
    let before = ring.adopted();
    let buffer = IoBuffer::owned(length);
    for _ in 0..OFTEN {
        ring.adopt(&buffer);
    }
    assert_eq!(ring.adopted(), before + 1);
    buffer
}

const FILE: usize = 64 << 10;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn registered_file_and_buffers_behave_as_unregistered(
        moves in prop::collection::vec((any::<bool>(), 0..FILE, 0..FILE, 1usize..9000, any::<u8>(), any::<bool>()), 1..30),
    ) {
        let mut ring = Ring::new(8).unwrap();
        let fd = ring.register(tempfile::tempfile().unwrap());
        let mut buffer = adopted(&mut ring, FILE);
        let (mut file, mut memory) = (vec![0u8; FILE], vec![0u8; FILE]);
        buffer = write(&mut ring, &fd, 0, buffer);
        for (is_write, at, place, length, fill, sliced) in moves {
            let length = length.min(FILE - at).min(FILE - place);
            if length == 0 {
                continue;
            }
            buffer.set_window(0, FILE);
            buffer.fill(place, length, fill);
            memory[place..place + length].fill(fill);
            // A slice is the same memory. A split window is transferred as several segments.
            let part = match sliced {
                true => buffer.slice(place, length),
                false => {
                    buffer.set_window(place, length);
                    buffer.slice(0, length)
                }
            };
            if is_write {
                write(&mut ring, &fd, at as u64, part);
                file[at..at + length].copy_from_slice(&memory[place..place + length]);
            } else {
                read(&mut ring, &fd, at as u64, part);
                memory[place..place + length].copy_from_slice(&file[at..at + length]);
            }
            buffer.set_window(0, FILE);
            prop_assert_eq!(&bytes(&buffer), &memory);
        }
        let plain = read(&mut ring, &fd, 0, IoBuffer::owned(FILE));
        prop_assert_eq!(&bytes(&plain), &file);
    }
}

#[test]
fn registered_slot_is_freed_with_its_memory_and_reused() {
    let mut ring = Ring::new(8).unwrap();
    let fd = ring.register(tempfile::tempfile().unwrap());
    for round in 0..100u8 {
        // The allocator returns the same addresses repeatedly.
        let buffers: Vec<IoBuffer> = (0..200).map(|_| adopted(&mut ring, 4096)).collect();
        for (at, buffer) in buffers.into_iter().enumerate() {
            buffer.fill(0, 4096, round ^ at as u8);
            write(&mut ring, &fd, at as u64 * 4096, buffer);
        }
        let last = read(&mut ring, &fd, 199 * 4096, IoBuffer::owned(4096));
        assert_eq!(bytes(&last), [round ^ 199; 4096]);
        drop(last);
        assert_eq!(ring.adopted(), 0);
    }
}

#[test]
fn memory_that_is_moved_once_or_is_of_a_guest_is_left_alone() {
    let mut ring = Ring::new(8).unwrap();
    for _ in 0..OFTEN {
        ring.adopt(&IoBuffer::owned(4096));
    }
    let (mapping, _file) = Mapping::memfd("guest", 1 << 20).unwrap();
    let buffer = IoBuffer::of_mapping(&mapping, 0, 4096);
    for _ in 0..OFTEN {
        ring.adopt(&buffer);
    }
    assert_eq!(ring.adopted(), 0);
}

#[test]
fn another_ring_moves_it_as_any_memory() {
    let mut first = Ring::new(8).unwrap();
    let mut second = Ring::new(8).unwrap();
    let fd = RingFd::from(tempfile::tempfile().unwrap());
    // The other buffer has the same index on the second ring.
    let other = adopted(&mut second, 4096);
    let buffer = adopted(&mut first, 4096);
    buffer.fill(0, 4096, 7);
    write(&mut second, &fd, 0, buffer);
    assert_eq!((first.adopted(), second.adopted()), (0, 1));
    let other = read(&mut second, &fd, 0, other);
    assert_eq!(bytes(&other), [7; 4096]);
}

#[test]
fn full_table_leaves_the_rest_as_it_is() {
    let mut ring = Ring::new(8).unwrap();
    let fd = RingFd::from(tempfile::tempfile().unwrap());
    let buffers: Vec<IoBuffer> = (0..10_000).map(|_| IoBuffer::owned(4096)).collect();
    for buffer in &buffers {
        (0..OFTEN).for_each(|_| ring.adopt(buffer));
    }
    assert!((64..10_000).contains(&ring.adopted()), "{}", ring.adopted());
    for (at, buffer) in buffers.into_iter().enumerate().skip(9_990) {
        buffer.fill(0, 4096, at as u8);
        write(&mut ring, &fd, 0, buffer);
        let back = read(&mut ring, &fd, 0, IoBuffer::owned(4096));
        assert_eq!(bytes(&back), [at as u8; 4096]);
    }
}
