//! Disks on an NBD server that loses connections, replies late, not or wrongly, and changes its export.

mod common;
#[path = "common/nbd_peer.rs"]
mod nbd_peer;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bdev::{BlockDevice, DiskState, Nbd, NbdOptions, Tag};
use block::{Extent, IoErrorKind, IoFlags, IoOutcome, IoRequest, decode_extents};
use common::{Worker, bytes, filled};
use guest_memory::IoBuffer;
use nbd::ErrorCode;
use nbd::wire::{command, command_flag, transmission};
use nbd_peer::{ALL_FLAGS, Fault, Peer, PeerOptions};

fn options(peer: &Peer) -> NbdOptions {
    NbdOptions::new(peer.uri().parse().unwrap())
}

fn open(peer: &Peer) -> Nbd {
    Nbd::open(&options(peer)).unwrap_or_else(|error| panic!("{error}"))
}

fn refused(peer: &Peer) -> String {
    let opened = Nbd::open(&options(peer));
    opened
        .err()
        .map(|error| error.to_string())
        .expect("refused")
}

fn kind(outcome: IoOutcome) -> Option<IoErrorKind> {
    outcome.err().map(|error| error.kind)
}

fn wait_for_reason(nbd: &Nbd, part: &str) {
    let begun = Instant::now();
    loop {
        let state = nbd.capabilities().remote.unwrap().state();
        if matches!(&state, DiskState::Unavailable { reason, .. } if reason.contains(part)) {
            return;
        }
        assert!(begun.elapsed() < Duration::from_secs(20), "{part}: {state}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// With and without several connections: on the worker's ring and on a thread.
fn both_ways(test: impl Fn(&Peer, bool)) {
    for has_multi_conn in [true, false] {
        let flags = match has_multi_conn {
            true => ALL_FLAGS,
            false => ALL_FLAGS & !transmission::CAN_MULTI_CONN,
        };
        let options = PeerOptions {
            flags,
            ..PeerOptions::default()
        };
        test(&Peer::start(options), has_multi_conn);
    }
}

#[test]
fn each_request_is_sent_again_after_lost_connections() {
    both_ways(|peer, _| {
        let nbd = open(peer);
        let mut worker = Worker::new(&nbd);
        assert_eq!(worker.write(0, &[1; 4096]), Ok(()));
        peer.change(|options| options.fault = Fault::EndAfter(9));
        peer.disconnect();
        let writes: Vec<u64> = (0..64u64)
            .map(|block| {
                let io = IoRequest::write(block * 4096, 4096);
                worker.submit(io, filled(&[block as u8 + 1; 4096]))
            })
            .collect();
        for tag in writes {
            assert_eq!(worker.wait(tag).0, Ok(()));
        }
        let reads: Vec<(u64, u64)> = (0..64u64)
            .map(|block| {
                let io = IoRequest::read(block * 4096, 4096);
                (block, worker.submit(io, IoBuffer::owned(4096)))
            })
            .collect();
        for (block, tag) in reads {
            let (outcome, buffer) = worker.wait(tag);
            assert_eq!(outcome, Ok(()));
            assert!(bytes(&buffer).iter().all(|byte| *byte == block as u8 + 1));
        }
        assert!(peer.accepted() > 10, "{} connections", peer.accepted());
    });
}

/// No connection lasts until all parts of the write are acknowledged. There are more losses than a request without progress survives.
#[test]
fn long_write_continues_where_a_lost_connection_has_ended() {
    let peer = Peer::start(PeerOptions {
        payload_max: 4096,
        ..PeerOptions::default()
    });
    let nbd = open(&peer);
    let mut worker = Worker::new(&nbd);
    peer.change(|options| options.fault = Fault::EndAfter(3));
    peer.disconnect();
    let data: Vec<u8> = (0..1 << 20).map(|at| (at / 777) as u8).collect();
    assert_eq!(worker.write(0, &data), Ok(()));
    assert!(worker.read(0, 1 << 20).unwrap() == data);
    assert!(peer.accepted() > 128, "{} connections", peer.accepted());
}

#[test]
fn flush_covers_writes_of_a_lost_connection_only_with_multi_conn() {
    both_ways(|peer, has_multi_conn| {
        let nbd = open(peer);
        let mut worker = Worker::new(&nbd);
        let flush = IoRequest::flush();
        // A flushed or durable write survives any server.
        assert_eq!(worker.write(0, &[1; 512]), Ok(()));
        assert_eq!(worker.do_plain(flush), Ok(()));
        let durable = IoRequest::write(512, 512).flagged(IoFlags::FUA);
        assert_eq!(worker.run(durable, filled(&[2; 512])), Ok(()));
        peer.disconnect();
        assert_eq!(worker.read(0, 512).unwrap(), [1; 512]);
        assert_eq!(worker.do_plain(flush), Ok(()));
        assert_eq!(worker.write(0, &[3; 512]), Ok(()));
        peer.disconnect();
        assert_eq!(worker.read(0, 512).unwrap(), [3; 512]);
        for _ in 0..2 {
            let expected = (!has_multi_conn).then_some(IoErrorKind::WriteMedium);
            assert_eq!(kind(worker.do_plain(flush)), expected);
        }
        assert_eq!(worker.write(0, &[4; 512]), Ok(()));
    });
}

#[test]
fn silent_and_dripping_servers_are_left_and_a_cancelled_request_ends() {
    both_ways(|peer, _| {
        peer.change(|options| options.fault = Fault::Silent);
        let nbd = Nbd::open(&NbdOptions {
            response_timeout: Duration::from_secs(1),
            ..options(peer)
        });
        let nbd = nbd.unwrap();
        let mut worker = Worker::new(&nbd);
        let read = worker.submit(IoRequest::read(0, 4096), IoBuffer::owned(4096));
        wait_for_requests(&mut worker, peer, 1);
        peer.change(|options| options.fault = Fault::Dripping);
        wait_for_requests(&mut worker, peer, 2);
        peer.change(|options| options.fault = Fault::None);
        assert_eq!(worker.wait(read).0, Ok(()), "over the third connection");

        peer.change(|options| options.fault = Fault::Silent);
        peer.disconnect();
        let before = peer.requests().len();
        let stuck = worker.submit(IoRequest::write(0, 512), filled(&[1; 512]));
        let other = worker.submit(IoRequest::read(4096, 4096), IoBuffer::owned(4096));
        wait_for_requests(&mut worker, peer, before + 2);
        peer.change(|options| options.fault = Fault::None);
        worker.backend.abort(&mut worker.ring, Tag(stuck));
        assert_eq!(kind(worker.wait(stuck).0), Some(IoErrorKind::Cancelled));
        assert_eq!(worker.wait(other).0, Ok(()));
    });
}

/// Submits queued operations until the server has this many requests.
fn wait_for_requests(worker: &mut Worker, peer: &Peer, count: usize) {
    let begun = Instant::now();
    while peer.requests().len() < count {
        assert!(begun.elapsed() < Duration::from_secs(20));
        worker.turn(Duration::from_millis(5));
    }
}

#[test]
fn io_waits_for_the_server_and_fails_after_the_timeout() {
    both_ways(|peer, _| {
        let nbd = Nbd::open(&NbdOptions {
            replacement_timeout: Duration::from_secs(1),
            ..options(peer)
        });
        let nbd = nbd.unwrap();
        let changes = Arc::new(AtomicUsize::new(0));
        let seen = Arc::clone(&changes);
        nbd.capabilities()
            .remote
            .unwrap()
            .on_change(Box::new(move || {
                seen.fetch_add(1, Ordering::Relaxed);
            }));
        let mut worker = Worker::new(&nbd);
        assert_eq!(worker.write(0, &[7; 512]), Ok(()));
        peer.stop();
        let waiting = worker.submit(IoRequest::read(0, 512), IoBuffer::owned(512));
        assert_eq!(kind(worker.wait(waiting).0), Some(IoErrorKind::Offline));
        let at_once = worker.read(0, 512).map(drop);
        assert_eq!(kind(at_once), Some(IoErrorKind::Offline));
        wait_for_reason(&nbd, "cannot connect to ");
        let before = changes.load(Ordering::Relaxed);
        peer.listen();
        while changes.load(Ordering::Relaxed) == before {
            worker.turn(Duration::from_millis(5));
        }
        worker.turn(Duration::from_millis(100));
        assert_eq!(nbd.capabilities().remote.unwrap().state(), DiskState::Ready);
        assert_eq!(worker.read(0, 512).unwrap(), [7; 512]);
    });
}

#[test]
fn disk_without_users_shows_that_its_server_is_gone() {
    let peer = Peer::start(PeerOptions::default());
    let nbd = open(&peer);
    let state = || nbd.capabilities().remote.unwrap().state();
    let wait = |is_ready: bool| {
        let begun = Instant::now();
        while (state() == DiskState::Ready) != is_ready {
            assert!(begun.elapsed() < Duration::from_secs(20), "{}", state());
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    assert_eq!(state(), DiskState::Ready);
    peer.stop();
    wait(false);
    peer.listen();
    wait(true);
    let mut worker = Worker::new(&nbd);
    assert_eq!(worker.write(0, &[7; 512]), Ok(()));
}

#[test]
fn io_fails_after_the_timeout_if_a_server_accepts_and_hangs() {
    both_ways(|peer, _| {
        let nbd = Nbd::open(&NbdOptions {
            replacement_timeout: Duration::from_secs(2),
            response_timeout: Duration::from_secs(1),
            ..options(peer)
        });
        let nbd = nbd.unwrap();
        let mut worker = Worker::new(&nbd);
        assert_eq!(worker.write(0, &[7; 512]), Ok(()));
        peer.change(|options| options.fault = Fault::Silent);
        peer.disconnect();
        let begun = Instant::now();
        let read = worker.submit(IoRequest::read(0, 512), IoBuffer::owned(512));
        assert_eq!(kind(worker.wait(read).0), Some(IoErrorKind::Offline));
        // A response time, the limit, and at most one more response time; without the limit more than a minute.
        assert!(begun.elapsed() < Duration::from_secs(15));
        assert!(begun.elapsed() >= Duration::from_secs(2));
        peer.change(|options| options.fault = Fault::None);
        let begun = Instant::now();
        while worker.read(0, 512) != Ok(vec![7; 512]) {
            assert!(begun.elapsed() < Duration::from_secs(20));
            worker.turn(Duration::from_millis(50));
        }
    });
}

#[test]
fn changed_export_is_refused_by_name_and_a_larger_one_adopted() {
    type Change = fn(&mut PeerOptions);
    let changes: [(Change, &str); 6] = [
        (
            |peer| peer.size -= 512,
            "has shrunk from 1048576 to 1048064 bytes",
        ),
        (
            |peer| peer.flags |= transmission::READ_ONLY,
            "is now read-only",
        ),
        (
            |peer| peer.flags &= !transmission::SEND_TRIM,
            "no longer has TRIM",
        ),
        (
            |peer| peer.name = "d1",
            "calls the export \"d1\", it was \"d0\"",
        ),
        (|peer| peer.minimum = 4096, "other block sizes"),
        (
            |peer| peer.has_allocation = false,
            "no longer reports allocated extents",
        ),
    ];
    for (change, reason) in changes {
        let peer = Peer::start(PeerOptions::default());
        let nbd = open(&peer);
        let mut worker = Worker::new(&nbd);
        assert_eq!(worker.write(0, &[1; 512]), Ok(()));
        peer.change(change);
        peer.disconnect();
        let read = worker.submit(IoRequest::read(0, 512), IoBuffer::owned(512));
        worker.turn(Duration::from_millis(50));
        wait_for_reason(&nbd, reason);
        peer.change(|options| {
            *options = PeerOptions {
                size: 2 << 20,
                ..PeerOptions::default()
            };
        });
        assert_eq!(worker.wait(read).0, Ok(()));
        assert_eq!(nbd.capacity().bytes(), 2 << 20);
        assert_eq!(worker.write((2 << 20) - 512, &[1; 512]), Ok(()));
    }
}

#[test]
fn connections_with_the_size_before_a_growth_are_replaced() {
    both_ways(|peer, has_multi_conn| {
        let nbd = open(peer);
        let mut workers = [Worker::new(&nbd), Worker::new(&nbd)];
        for worker in &mut workers {
            assert_eq!(worker.write(0, &[1; 4096]), Ok(()));
        }
        peer.change(|options| options.size = 2 << 20);
        let remote = nbd.capabilities().remote.unwrap();
        remote.read_size().unwrap();
        let before = peer.accepted();
        for worker in &mut workers {
            let offsets = [4096, 1 << 20, 8192, (2 << 20) - 4096];
            let tags =
                offsets.map(|at| worker.submit(IoRequest::write(at, 4096), filled(&[2; 4096])));
            for tag in tags {
                assert_eq!(worker.wait(tag).0, Ok(()));
            }
            let status = IoRequest::block_status(0, 2 << 20);
            assert_eq!(
                worker.run(status, IoBuffer::owned(block::STATUS_BYTES)),
                Ok(())
            );
            // Without CAN_MULTI_CONN, the last flush of a connection covers its writes.
            assert_eq!(worker.do_plain(IoRequest::flush()), Ok(()));
        }
        assert_eq!(remote.state(), DiskState::Ready);
        let replaced = if has_multi_conn { 2 } else { 1 };
        assert_eq!(peer.accepted() - before, replaced);
    });
}

/// A flush over the connection of the next daemon would not cover writes of this one.
#[test]
fn connection_without_multi_conn_is_flushed_before_it_ends() {
    both_ways(|peer, has_multi_conn| {
        let nbd: Arc<dyn BlockDevice> = Arc::new(open(peer));
        assert_eq!(Worker::new(&*nbd).write(0, &[1; 512]), Ok(()));
        assert_eq!(bdev::needs_flush_before_close(&*nbd), !has_multi_conn);
        bdev::flush_before_close(&nbd).unwrap();
        drop(nbd);
        let commands = || -> Vec<u16> {
            let requests = peer.requests();
            requests.iter().map(|request| request.command).collect()
        };
        if has_multi_conn {
            assert!(!commands().contains(&command::FLUSH));
            return;
        }
        let begun = Instant::now();
        while commands().last() != Some(&command::DISC) {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "{:?}",
                commands()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        assert_eq!(commands(), [command::WRITE, command::FLUSH, command::DISC]);
    });
}

#[test]
fn flush_before_the_end_reports_writes_of_a_lost_connection() {
    let peer = Peer::start(PeerOptions {
        flags: ALL_FLAGS & !transmission::CAN_MULTI_CONN,
        ..PeerOptions::default()
    });
    let nbd: Arc<dyn BlockDevice> = Arc::new(open(&peer));
    assert_eq!(Worker::new(&*nbd).write(0, &[1; 512]), Ok(()));
    peer.disconnect();
    bdev::flush_before_close(&nbd).unwrap_err();

    // Without such writes, a server that is gone delays nothing.
    let nbd = open(&peer);
    peer.stop();
    wait_for_reason(&nbd, "");
    let nbd: Arc<dyn BlockDevice> = Arc::new(nbd);
    assert!(!bdev::needs_flush_before_close(&*nbd));
    bdev::flush_before_close(&nbd).unwrap();
}

#[test]
fn requests_respect_the_block_sizes_of_the_server() {
    for (minimum, payload_max) in [(4096, 8192), (65_536, 65_536)] {
        let peer = Peer::start(PeerOptions {
            minimum,
            payload_max,
            ..PeerOptions::default()
        });
        let nbd = open(&peer);
        let info = nbd.info();
        assert_eq!(info.io_alignment, minimum);
        assert_eq!(info.geometry.block_size(), 4096);
        let mut worker = Worker::new(&nbd);
        let data: Vec<u8> = (0..1 << 20).map(|at| (at / 777) as u8).collect();
        assert_eq!(worker.write(0, &data), Ok(()));
        assert!(worker.read(0, 1 << 20).unwrap() == data);
        let read = worker.submit(
            IoRequest::block_status(1024, 512),
            IoBuffer::owned(block::STATUS_BYTES),
        );
        let (outcome, buffer) = worker.wait(read);
        assert_eq!(outcome, Ok(()));
        let extents: Vec<Extent> = decode_extents(&bytes(&buffer)).collect();
        assert_eq!(extents, [Extent::data(1536)]);
        assert!(peer.requests().iter().all(|request| {
            let moves = matches!(request.command, command::READ | command::WRITE);
            !moves || request.length <= payload_max.into()
        }));
    }
}

#[test]
fn tail_of_an_export_is_left_out() {
    let peer = Peer::start(PeerOptions {
        size: (1 << 20) + 700,
        ..PeerOptions::default()
    });
    let refused = bdev::open_remote(&peer.uri(), true).map(drop).unwrap_err();
    assert!(refused.contains("its last 188 bytes"), "{refused}");
    let nbd = open(&peer);
    assert_eq!(nbd.capacity().bytes(), (1 << 20) + 512);
    let mut worker = Worker::new(&nbd);
    assert_eq!(worker.write(1 << 20, &[1; 512]), Ok(()));
    let beyond = worker.write((1 << 20) + 512, &[1; 512]);
    assert_eq!(kind(beyond), Some(IoErrorKind::OutOfRange));
}

#[test]
fn only_zeroes_are_reported_as_holes() {
    both_ways(|peer, _| {
        let nbd = open(peer);
        let mut worker = Worker::new(&nbd);
        assert_eq!(worker.write(4096, &[1; 1024]), Ok(()));
        let status = IoRequest::block_status(0, 1 << 20);
        let tag = worker.submit(status, IoBuffer::owned(block::STATUS_BYTES));
        let (outcome, buffer) = worker.wait(tag);
        assert_eq!(outcome, Ok(()));
        let extents: Vec<Extent> = decode_extents(&bytes(&buffer)).collect();
        let expected = [
            Extent::hole(4096),
            Extent::data(5120),
            Extent::hole(1 << 20),
        ];
        assert_eq!(extents, expected);
    });
    let peer = Peer::start(PeerOptions {
        has_allocation: false,
        ..PeerOptions::default()
    });
    let nbd = open(&peer);
    let mut worker = Worker::new(&nbd);
    let status = IoRequest::block_status(512, 4096);
    let tag = worker.submit(status, IoBuffer::owned(block::STATUS_BYTES));
    let (_, buffer) = worker.wait(tag);
    let extents: Vec<Extent> = decode_extents(&bytes(&buffer)).collect();
    assert_eq!(extents, [Extent::data(4608)]);
    assert!(peer.requests().is_empty());
}

#[test]
fn flags_of_requests_follow_the_io() {
    let peer = Peer::start(PeerOptions::default());
    let nbd = open(&peer);
    let mut worker = Worker::new(&nbd);
    let write = IoRequest::write(0, 512);
    worker.run(write, filled(&[1; 512])).unwrap();
    worker
        .run(write.flagged(IoFlags::FUA), filled(&[1; 512]))
        .unwrap();
    let zeroes = IoRequest::write_zeroes(0, 4096);
    worker.do_plain(zeroes).unwrap();
    worker
        .do_plain(zeroes.flagged(IoFlags::UNMAP.with(IoFlags::FUA)))
        .unwrap();
    worker.do_plain(IoRequest::discard(4096, 4096)).unwrap();
    let payload = command_flag::PAYLOAD_LEN;
    let sent: Vec<(u16, u16)> = peer
        .requests()
        .iter()
        .map(|request| (request.command, request.flags & !payload))
        .collect();
    let expected = [
        (command::WRITE, 0),
        (command::WRITE, command_flag::FUA),
        (command::WRITE_ZEROES, command_flag::NO_HOLE),
        (command::WRITE_ZEROES, command_flag::FUA),
        (command::TRIM, 0),
    ];
    assert_eq!(sent, expected);
}

#[test]
fn durable_writes_without_fua_are_flushed() {
    let peer = Peer::start(PeerOptions {
        flags: ALL_FLAGS & !transmission::SEND_FUA,
        ..PeerOptions::default()
    });
    let nbd = open(&peer);
    let mut worker = Worker::new(&nbd);
    let write = IoRequest::write(0, 512).flagged(IoFlags::FUA);
    worker.run(write, filled(&[1; 512])).unwrap();
    let commands = |peer: &Peer| -> Vec<u16> {
        let requests = peer.requests();
        requests.iter().map(|one| one.command).collect()
    };
    assert_eq!(commands(&peer), [command::WRITE, command::FLUSH]);
    let writethrough = Nbd::open(&NbdOptions {
        writethrough: true,
        ..options(&peer)
    });
    let nbd = writethrough.unwrap();
    assert!(!nbd.info().write_cache);
    let mut worker = Worker::new(&nbd);
    worker.write(0, &[1; 512]).unwrap();
    worker.do_plain(IoRequest::flush()).unwrap();
    assert_eq!(commands(&peer)[2..], [command::WRITE, command::FLUSH]);
}

/// The server may have lost its volatile cache with the connection: a flush alone does not make the write durable.
#[test]
fn durable_write_is_repeated_if_a_loss_precedes_its_flush() {
    for writethrough in [false, true] {
        let peer = Peer::start(PeerOptions {
            flags: ALL_FLAGS & !transmission::SEND_FUA,
            fault: Fault::EndAfter(3),
            ..PeerOptions::default()
        });
        let nbd = Nbd::open(&NbdOptions {
            writethrough,
            ..options(&peer)
        });
        let nbd = nbd.unwrap();
        let mut worker = Worker::new(&nbd);
        assert_eq!(worker.read(0, 512).unwrap(), [0; 512]);
        // Only the connection of the read ends, instead of the reply to the flush.
        peer.change(|options| options.fault = Fault::None);
        let write = match writethrough {
            true => IoRequest::write(0, 512),
            false => IoRequest::write(0, 512).flagged(IoFlags::FUA),
        };
        assert_eq!(worker.run(write, filled(&[1; 512])), Ok(()));
        let requests = peer.requests();
        let commands: Vec<u16> = requests.iter().map(|one| one.command).collect();
        let (write, flush) = (command::WRITE, command::FLUSH);
        assert_eq!(commands, [command::READ, write, flush, write, flush]);
    }
}

#[test]
fn every_write_has_fua_on_a_server_without_flush() {
    let without = |flags: u16| PeerOptions {
        flags: ALL_FLAGS & !flags,
        ..PeerOptions::default()
    };
    let peer = Peer::start(without(transmission::SEND_FLUSH));
    let nbd = open(&peer);
    assert!(!nbd.info().write_cache);
    let mut worker = Worker::new(&nbd);
    worker.write(0, &[1; 512]).unwrap();
    worker.do_plain(IoRequest::flush()).unwrap();
    let [write] = &peer.requests()[..] else {
        panic!("{:?}", peer.requests());
    };
    assert!(write.flags & command_flag::FUA != 0);
    let peer = Peer::start(without(transmission::SEND_FLUSH | transmission::SEND_FUA));
    assert!(refused(&peer).contains("neither FLUSH nor FUA"));
    let read_only = Nbd::open(&NbdOptions {
        read_only: true,
        ..options(&peer)
    });
    let nbd = read_only.unwrap();
    let mut worker = Worker::new(&nbd);
    assert_eq!(worker.do_plain(IoRequest::flush()), Ok(()));
    assert_eq!(
        kind(worker.write(0, &[1; 512])),
        Some(IoErrorKind::ReadOnly)
    );
}

#[test]
fn errors_of_the_server_have_their_kind() {
    for (code, of_write, of_read) in [
        (
            ErrorCode::Io,
            IoErrorKind::WriteMedium,
            IoErrorKind::ReadMedium,
        ),
        (
            ErrorCode::NoSpace,
            IoErrorKind::NoSpace,
            IoErrorKind::NoSpace,
        ),
        (
            ErrorCode::Perm,
            IoErrorKind::ReadOnly,
            IoErrorKind::ReadOnly,
        ),
    ] {
        let peer = Peer::start(PeerOptions {
            fault: Fault::Fail(code),
            ..PeerOptions::default()
        });
        let nbd = open(&peer);
        let mut worker = Worker::new(&nbd);
        assert_eq!(kind(worker.write(0, &[1; 512])), Some(of_write));
        assert_eq!(kind(worker.read(0, 512).map(drop)), Some(of_read));
    }
}

#[test]
fn shutdown_of_the_server_and_garbage_end_the_connection() {
    for fault in [Fault::Fail(ErrorCode::Shutdown), Fault::Garbage] {
        let peer = Peer::start(PeerOptions {
            fault,
            ..PeerOptions::default()
        });
        let nbd = open(&peer);
        let mut worker = Worker::new(&nbd);
        let write = worker.submit(IoRequest::write(0, 512), filled(&[9; 512]));
        while peer.accepted() < 2 {
            worker.turn(Duration::from_millis(5));
        }
        peer.change(|options| options.fault = Fault::None);
        assert_eq!(worker.wait(write).0, Ok(()));
        assert_eq!(worker.read(0, 512).unwrap(), [9; 512]);
    }
}

#[test]
fn each_worker_has_a_connection_if_the_server_permits_it() {
    both_ways(|peer, has_multi_conn| {
        for (multi_conn, count) in [(true, if has_multi_conn { 3 } else { 1 }), (false, 1)] {
            let before = peer.accepted();
            let nbd = Nbd::open(&NbdOptions {
                multi_conn,
                ..options(peer)
            });
            let nbd = nbd.unwrap();
            let mut workers: Vec<Worker> = (0..3).map(|_| Worker::new(&nbd)).collect();
            for (worker, byte) in workers.iter_mut().zip(1..) {
                worker.write(u64::from(byte) * 512, &[byte; 512]).unwrap();
            }
            for worker in &mut workers {
                assert_eq!(worker.read(1024, 512).unwrap(), [2; 512]);
            }
            assert_eq!(peer.accepted() - before, count);
        }
    });
}

#[test]
fn closed_channel_disconnects_and_another_one_attaches() {
    both_ways(|peer, _| {
        let nbd = open(peer);
        for round in 0..3 {
            let mut worker = Worker::new(&nbd);
            worker.write(0, &[round; 512]).unwrap();
            worker.backend.close(&mut worker.ring);
            while !worker.backend.is_closed() {
                worker.turn(Duration::from_millis(5));
            }
        }
        drop(nbd);
        let begun = Instant::now();
        while peer.requests().last().map(|one| one.command) != Some(command::DISC) {
            assert!(
                begun.elapsed() < Duration::from_secs(20),
                "{:?}",
                peer.requests()
            );
            std::thread::sleep(Duration::from_millis(5));
        }
    });
}
