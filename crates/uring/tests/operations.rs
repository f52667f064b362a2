//! The ring on the real io_uring: files, pipes, eventfds.

use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use guest_memory::{IoBuffer, Mapping};
use uring::{Completion, Owner, Ring, RingFd, Wait, WatchId};

const ME: Owner = Owner(7);

fn enter_until(ring: &mut Ring, count: usize) -> Vec<Completion> {
    let mut out = Vec::new();
    let start = Instant::now();
    while out.len() < count {
        ring.enter(Wait::Until(Some(Duration::from_secs(20))), &mut out)
            .unwrap();
        assert!(start.elapsed() < Duration::from_secs(60), "nothing comes");
    }
    out
}

fn nothing_comes(ring: &mut Ring) -> bool {
    // Completes after all operations that were ready before.
    ring.nop(Owner(99), 99);
    let out = enter_until(ring, 1);
    out.iter().all(|c| c.owner == Owner(99))
}

fn temporary() -> RingFd {
    RingFd::from(tempfile::tempfile().unwrap())
}

fn bytes(buffer: &IoBuffer) -> Vec<u8> {
    let mut bytes = vec![0; buffer.len()];
    buffer.read_at(0, &mut bytes);
    bytes
}

fn pattern(length: usize) -> IoBuffer {
    let buffer = IoBuffer::owned(length);
    for at in 0..length {
        buffer.write_at(at, &[(at * 7 % 251) as u8]);
    }
    buffer
}

fn eventfd() -> RingFd {
    let flags = rustix::event::EventfdFlags::NONBLOCK;
    RingFd::from(rustix::event::eventfd(0, flags).unwrap())
}

fn signal(fd: &RingFd) {
    assert_eq!(rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap(), 8);
}

#[test]
fn written_data_are_read_back() {
    let mut ring = Ring::new(8).unwrap();
    let fd = temporary();
    let data = pattern(10_000);
    let expected = bytes(&data);
    ring.write(ME, 1, &fd, 512, data, true);
    let done = enter_until(&mut ring, 1).remove(0);
    assert_eq!((done.owner, done.token, done.result), (ME, 1, Ok(10_000)));
    assert_eq!(bytes(&done.buffer.unwrap()), expected);
    ring.read(ME, 2, &fd, 512, IoBuffer::owned(10_000));
    let done = enter_until(&mut ring, 1).remove(0);
    assert_eq!((done.token, done.result, done.more), (2, Ok(10_000), false));
    assert_eq!(bytes(&done.buffer.unwrap()), expected);
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn only_the_window_is_moved_and_in_order_of_its_segments() {
    let mut ring = Ring::new(8).unwrap();
    let fd = temporary();
    let mut whole = pattern(4096);
    // Borders of earlier windows stay segment borders.
    for start in [100, 200, 300, 1000, 3000] {
        whole.set_window(start, 50);
    }
    whole.set_window(150, 3500);
    assert!(whole.segments().len() > 4);
    let expected = bytes(&whole);
    ring.write(ME, 1, &fd, 0, whole, false);
    assert_eq!(enter_until(&mut ring, 1)[0].result, Ok(3500));
    let mut into = IoBuffer::owned(4096);
    for start in [5, 6, 7, 2000, 2001, 3001] {
        into.set_window(start, 50);
    }
    into.set_window(3, 3500);
    ring.read(ME, 2, &fd, 0, into);
    let done = enter_until(&mut ring, 1).remove(0);
    assert_eq!(bytes(&done.buffer.unwrap()), expected);
}

#[test]
fn errors_come_as_errno() {
    let mut ring = Ring::new(8).unwrap();
    let fd = RingFd::from(std::fs::File::open("/dev/null").unwrap());
    ring.write(ME, 1, &fd, 0, pattern(10), false);
    assert_eq!(enter_until(&mut ring, 1)[0].result, Err(libc::EBADF));
}

#[test]
fn fallocate_and_fsync() {
    let mut ring = Ring::new(8).unwrap();
    let fd = temporary();
    ring.fallocate(ME, 1, &fd, 0, 0, 1 << 20);
    assert_eq!(enter_until(&mut ring, 1)[0].result, Ok(0));
    assert_eq!(rustix::fs::fstat(&fd).unwrap().st_size, 1 << 20);
    ring.fsync(ME, 2, &fd, true);
    ring.fsync(ME, 3, &fd, false);
    let done = enter_until(&mut ring, 2);
    assert!(done.iter().all(|c| c.result == Ok(0) && c.buffer.is_none()));
}

#[test]
fn more_operations_than_entries_are_all_done() {
    let mut ring = Ring::new(4).unwrap();
    let fd = temporary();
    for token in 0..1000 {
        ring.write(ME, token, &fd, token * 16, pattern(16), false);
    }
    let mut tokens: Vec<u64> = enter_until(&mut ring, 1000)
        .iter()
        .map(|c| c.token)
        .collect();
    tokens.sort_unstable();
    assert!(tokens.iter().copied().eq(0..1000));
    assert_eq!(ring.in_flight(), 0);
}

#[test]
fn watch_fires_for_each_later_write_without_reading() {
    let mut ring = Ring::new(8).unwrap();
    let fd = eventfd();
    ring.watch(ME, 5, &fd);
    assert!(nothing_comes(&mut ring));
    for _ in 0..500 {
        signal(&fd);
        let done = enter_until(&mut ring, 1);
        assert_eq!(done.len(), 1);
        assert_eq!((done[0].token, done[0].more), (5, true));
    }
    assert!(nothing_comes(&mut ring));
    assert_eq!((ring.in_flight(), ring.watches()), (0, 1));
}

#[test]
fn watch_reports_earlier_data() {
    let mut ring = Ring::new(8).unwrap();
    let fd = eventfd();
    signal(&fd);
    ring.watch(ME, 5, &fd);
    assert_eq!(enter_until(&mut ring, 1)[0].token, 5);
}

#[test]
fn watches_survive_a_completion_queue_that_overflows() {
    let mut ring = Ring::new(2).unwrap();
    let fds: Vec<RingFd> = (0..64).map(|_| eventfd()).collect();
    for (token, fd) in fds.iter().enumerate() {
        ring.watch(ME, token as u64, fd);
    }
    assert!(nothing_comes(&mut ring));
    for _ in 0..3 {
        fds.iter().for_each(signal);
        let mut seen = [false; 64];
        while seen.contains(&false) {
            for done in enter_until(&mut ring, 1) {
                assert!(done.more);
                seen[done.token as usize] = true;
            }
        }
    }
}

#[test]
fn ended_watch_is_silent() {
    let mut ring = Ring::new(8).unwrap();
    let fd = eventfd();
    let id = ring.watch(ME, 5, &fd);
    assert!(nothing_comes(&mut ring));
    signal(&fd);
    ring.unwatch(id);
    signal(&fd);
    assert!(nothing_comes(&mut ring));
    ring.unwatch(id);
    assert!(nothing_comes(&mut ring));
    assert_eq!(ring.watches(), 0);
}

#[test]
fn old_id_does_not_end_a_newer_watch() {
    let mut ring = Ring::new(8).unwrap();
    let fd = eventfd();
    let old: WatchId = ring.watch(ME, 1, &fd);
    ring.unwatch(old);
    assert!(nothing_comes(&mut ring));
    ring.watch(ME, 2, &fd);
    ring.unwatch(old);
    signal(&fd);
    assert_eq!(enter_until(&mut ring, 1)[0].token, 2);
}

#[test]
fn hang_up_is_the_last_event_of_a_watch() {
    let mut ring = Ring::new(8).unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    ring.watch(ME, 5, RingFd::from(reader));
    assert!(nothing_comes(&mut ring));
    drop(writer);
    let done = enter_until(&mut ring, 1);
    assert!(!done.last().unwrap().more);
    assert!(nothing_comes(&mut ring));
    assert_eq!(ring.watches(), 0);
}

#[test]
fn iteration_without_work_returns_and_time_ends_a_wait() {
    let mut ring = Ring::new(8).unwrap();
    let mut out = Vec::new();
    ring.enter(Wait::No, &mut out).unwrap();
    let time = Wait::Until(Some(Duration::from_millis(5)));
    ring.enter(time, &mut out).unwrap();
    assert!(out.is_empty());
    ring.timer(ME, 3, Duration::from_millis(1));
    assert_eq!(enter_until(&mut ring, 1)[0].result, Err(libc::ETIME));
}

#[test]
fn descriptor_stays_open_until_its_operation_completes() {
    let mut ring = Ring::new(8).unwrap();
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let reader = RingFd::from(reader);
    ring.read(ME, 1, &reader, 0, IoBuffer::owned(4));
    drop(reader);
    let mut out = Vec::new();
    ring.enter(Wait::No, &mut out).unwrap();
    std::fs::File::from(writer).write_all(b"moon").unwrap();
    let done = enter_until(&mut ring, 1).remove(0);
    assert_eq!(bytes(&done.buffer.unwrap()), b"moon");
}

#[test]
fn dropped_ring_gives_up_its_reads_before_their_buffers() {
    let mapping = Mapping::anonymous(4096).unwrap();
    let watch = Arc::downgrade(&mapping);
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let probe: OwnedFd = reader.as_fd().try_clone_to_owned().unwrap();
    let reader = RingFd::from(reader);
    let mut ring = Ring::new(2).unwrap();
    for token in 0..100 {
        let buffer = IoBuffer::of_mapping(&mapping, 0, 4096);
        ring.read(ME, token, &reader, 0, buffer);
    }
    ring.watch(ME, 1000, eventfd());
    let mut out = Vec::new();
    ring.enter(Wait::No, &mut out).unwrap();
    assert_eq!(ring.in_flight(), 100);
    drop((mapping, reader));
    drop(ring);
    assert!(watch.upgrade().is_none(), "all buffers came back");
    // The kernel has stopped reading: written bytes stay in the pipe.
    std::fs::File::from(writer).write_all(b"moon").unwrap();
    let mut got = [0; 4];
    rustix::io::read(&probe, &mut got).unwrap();
    assert_eq!(&got, b"moon");
}

#[test]
fn no_wake_up_is_lost_between_threads() {
    const ROUNDS: u64 = 3000;
    let flags = rustix::event::EventfdFlags::NONBLOCK;
    let bell = Arc::new(rustix::event::eventfd(0, flags).unwrap());
    let rung = Arc::new(AtomicU64::new(0));
    let heard = Arc::new(AtomicU64::new(0));
    let ringer = {
        let (bell, rung, heard) = (bell.clone(), rung.clone(), heard.clone());
        std::thread::spawn(move || {
            for round in 1..=ROUNDS {
                rung.store(round, Ordering::SeqCst);
                rustix::io::write(&*bell, &1u64.to_ne_bytes()).unwrap();
                // Some rounds let the other thread sleep. The others continue at once.
                while round % 3 != 0 && heard.load(Ordering::SeqCst) < round {
                    std::hint::spin_loop();
                    std::thread::yield_now();
                }
            }
        })
    };
    let mut ring = Ring::new(8).unwrap();
    ring.watch(ME, 0, RingFd::from(bell.try_clone().unwrap()));
    while heard.load(Ordering::SeqCst) < ROUNDS {
        assert!(enter_until(&mut ring, 1).iter().all(|c| c.more));
        heard.store(rung.load(Ordering::SeqCst), Ordering::SeqCst);
    }
    ringer.join().unwrap();
}

#[test]
fn registered_descriptor_works_and_is_closed_after_its_last_use() {
    let mut ring = Ring::new(8).unwrap();
    let mut out = Vec::new();
    for round in 0..10_u8 {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        let reader = ring.register(reader);
        ring.watch(ME, 1, &reader);
        ring.read(ME, 2, &reader, 0, IoBuffer::owned(1));
        ring.enter(Wait::No, &mut out).unwrap();
        rustix::io::write(&writer, &[round]).unwrap();
        let done = enter_until(&mut ring, 2);
        assert!(done.iter().any(|c| (c.token, c.more) == (1, true)));
        let read = done.iter().find(|c| c.token == 2).unwrap();
        assert_eq!(bytes(read.buffer.as_ref().unwrap()), [round]);
        drop(reader);
        // The watch holds the last reference to the reader. After its end, writes to the pipe fail.
        rustix::io::write(&writer, &[round]).unwrap();
        enter_until(&mut ring, 1);
        drop(ring);
        while rustix::io::write(&writer, &[round]).is_ok() {
            std::thread::yield_now();
        }
        ring = Ring::new(8).unwrap();
    }
}

#[test]
fn registered_descriptor_is_swept_in_the_next_iteration() {
    let mut ring = Ring::new(8).unwrap();
    let mut out = Vec::new();
    for _ in 0..300 {
        let (reader, writer) = rustix::pipe::pipe().unwrap();
        drop(ring.register(reader));
        ring.enter(Wait::No, &mut out).unwrap();
        // The kernel releases the file some time after the call.
        while rustix::io::write(&writer, b"x").is_ok() {
            std::thread::yield_now();
        }
    }
}
