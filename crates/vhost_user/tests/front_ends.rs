//! Valid behaviour of front ends that QEMU does not show, or no longer.

mod support;

use std::io::Write;
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bdev::{Fault, FaultAction, FaultPlan, Faulty};
use block::{IoFlags, IoKind};
use reactor::PollLimit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::{Rig, Watched, connect, eventually, ram, start_blk};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, kind, request, status};

const SHORT: Duration = Duration::from_secs(5);

fn is_signalled(fd: impl AsFd) -> bool {
    let limit = Timespec::try_from(SHORT).unwrap();
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&limit)).unwrap() > 0
}

/// Creates a small queue without starting it.
fn place(front_end: &mut FrontEnd) -> BlkQueue {
    let queue = front_end.place_queue(0, &QueueOptions::default()).unwrap();
    BlkQueue::with_queue(front_end, queue, 8, 4096, Layout::Separate).unwrap()
}

/// A daemon is killed after publishing an answer and before the interrupt. The driver sleeps, with nothing else in flight. The next device
/// has nothing to answer.
#[test]
fn driver_gets_the_interrupt_that_an_earlier_device_owed() {
    for packed in [false, true] {
        let rig = Rig::polling(1, PollLimit::Never);
        let socket = rig.serve_ram("d", 1);
        let options = Options {
            packed,
            ..Options::default()
        };
        let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
        let mut queue = start_blk(&mut front_end, 0);
        let slot = queue.take().unwrap();
        assert!(queue.submit(slot, kind::FLUSH, 0, 0, 0));
        queue.publish();
        assert!(is_signalled(queue.queue().call()));
        let base = front_end.stop_queue(0).unwrap();
        // As if the interrupt had not been sent.
        queue.queue().replace_call().unwrap();
        front_end.begin_queue(queue.queue(), base).unwrap();
        assert!(is_signalled(queue.queue().call()), "packed {packed}");
    }
}

/// Firmware without VIRTIO_BLK_F_FLUSH, then a kernel with it, in one session and without RESET_DEVICE.
#[test]
fn write_through_of_one_driver_ends_with_its_session() {
    const FLUSH: u64 = 1 << 9;
    let rig = Rig::polling(1, PollLimit::Never);
    let device = Watched::new(ram(1 << 20), Duration::ZERO);
    let socket = rig.serve("d", device.clone(), 1);
    let options = Options {
        device_features: 0x00ff_ffff & !FLUSH,
        ..Options::default()
    };
    let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
    let mut queue = start_blk(&mut front_end, 0);
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
    assert_eq!(device.seen()[0].flags, IoFlags::FUA);
    front_end.stop_queue(0).unwrap();
    drop(queue);
    device.forget();
    let features = front_end.features() | FLUSH;
    let payload = features.to_ne_bytes();
    front_end
        .acknowledged(request::SET_FEATURES, &payload, &[])
        .unwrap();
    let mut queue = start_blk(&mut front_end, 0);
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
    let seen = device.seen();
    assert_eq!(seen[0].kind, IoKind::Write);
    assert_ne!(seen[0].flags, IoFlags::FUA, "{seen:?}");
}

/// QEMU offers VIRTIO_F_ANY_LAYOUT to legacy drivers regardless of the back end, and sends it if they accept it, as Windows drivers do.
#[test]
fn legacy_driver_may_accept_any_layout() {
    const ANY_LAYOUT: u64 = 1 << 27;
    const VERSION_1: u64 = 1 << 32;
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_ram("d", 1);
    let mut front_end = connect(&socket);
    let features = front_end.features() & !VERSION_1 | ANY_LAYOUT;
    let payload = features.to_ne_bytes();
    front_end
        .acknowledged(request::SET_FEATURES, &payload, &[])
        .unwrap();
    let mut queue = start_blk(&mut front_end, 0);
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
}

/// The base must be 0x8000_8000. With 0, both wrap counters would be 0, and the device would never see a chain.
#[test]
fn packed_ring_that_never_ran_stands_at_its_start() {
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_ram("d", 1);
    let options = Options {
        packed: true,
        ..Options::default()
    };
    let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
    let base = front_end.stop_queue(0).unwrap();
    assert_eq!(base, 0x8000_8000);
    let mut queue = place(&mut front_end);
    front_end.begin_queue(queue.queue(), base).unwrap();
    let slot = queue.take().unwrap();
    assert!(queue.submit(slot, kind::FLUSH, 0, 0, 0));
    queue.publish();
    assert_eq!(queue.wait_for(SHORT).unwrap().status, status::OK);
}

#[test]
fn front_end_that_asks_and_does_not_read_answers_holds_nobody_up() {
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_ram("d", 1);
    let mut stream = UnixStream::connect(&socket).unwrap();
    let words = [request::GET_FEATURES, 1, 0];
    let message = words.map(u32::to_ne_bytes).concat();
    stream.set_nonblocking(true).unwrap();
    // Until no buffer has room.
    let mut last = Instant::now();
    while last.elapsed() < Duration::from_millis(500) {
        match stream.write(&message) {
            Ok(length) => {
                assert_eq!(length, message.len());
                last = Instant::now();
            }
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    let (tell, removed) = mpsc::channel();
    std::thread::scope(|scope| {
        let server = &rig.server;
        scope.spawn(move || {
            server.remove("d");
            tell.send(()).ok();
        });
        let in_time = removed.recv_timeout(Duration::from_secs(30));
        // Otherwise the test would hang, too.
        drop(stream);
        assert!(in_time.is_ok(), "its export cannot be removed");
    });
}

/// Each complete memory table stays mapped while requests use it. The total number of mappings is limited.
#[test]
fn front_end_with_slow_requests_does_not_take_all_room_for_memory() {
    let rig = Rig::polling(1, PollLimit::Never);
    let device = Watched::new(ram(1 << 20), Duration::ZERO);
    let slow = Arc::new(Faulty::new(device.clone(), FaultPlan::default()));
    slow.inject(Fault {
        kind: IoKind::Read,
        skip: 0,
        times: 1_000,
        action: FaultAction::Hold,
    });
    let socket = rig.serve("d", slow.clone(), 1);
    let mut front_end = connect(&socket);
    let options = QueueOptions::default();
    let mut queue =
        BlkQueue::start(&mut front_end, 0, &options, 40, 512, Layout::Separate).unwrap();
    let mut changes = 0;
    let refused = loop {
        let Some(slot) = queue.take() else {
            break None;
        };
        assert!(queue.submit(slot, kind::IN, 0, 0, 512));
        queue.publish();
        eventually("in flight", || device.seen().len() == changes + 1);
        if front_end.send_memory().is_err() {
            break Some(changes);
        }
        changes += 1;
    };
    slow.release();
    assert_eq!(refused, Some(32));
    // The requests have drained, and the next front end is served.
    drop((queue, front_end));
    eventually("its session ends", || !rig.is_connected("d"));
    let mut next = connect(&socket);
    let mut queue = start_blk(&mut next, 0);
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
}

/// Tables that differ by single regions share the others, but many of them can use many regions.
#[test]
fn front_end_with_slow_requests_leaves_room_for_others() {
    let rig = Rig::polling(1, PollLimit::Never);
    let device = Watched::new(ram(1 << 20), Duration::ZERO);
    let slow = Arc::new(Faulty::new(device.clone(), FaultPlan::default()));
    slow.inject(Fault {
        kind: IoKind::Read,
        skip: 0,
        times: 1_000,
        action: FaultAction::Hold,
    });
    let socket = rig.serve("d", slow.clone(), 1);
    let mut front_end = connect(&socket);
    let options = QueueOptions::default();
    let mut queue =
        BlkQueue::start(&mut front_end, 0, &options, 10, 512, Layout::Separate).unwrap();
    let (mut used, mut refused) = (0, false);
    while let (Some(slot), false) = (queue.take(), refused) {
        let added = (0..300).map_while(|_| front_end.add_region(4096).ok());
        let added: Vec<_> = added.map(|area| area.address).collect();
        refused = added.len() < 300;
        if refused {
            break;
        }
        assert!(queue.submit(slot, kind::IN, 0, 0, 512));
        queue.publish();
        used += 1;
        eventually("in flight", || device.seen().len() == used);
        let removed = added.into_iter().map(|at| front_end.remove_region(at));
        refused = removed.into_iter().any(|removed| removed.is_err());
    }
    slow.release();
    assert!(refused && used < 6, "{used} requests use 300 regions each");
}

/// Memory grows in many small steps (virtio-mem), up to the number of slots, even if requests are slow.
#[test]
fn memory_can_grow_by_many_regions_while_requests_are_slow() {
    let rig = Rig::polling(1, PollLimit::Never);
    let device = Watched::new(ram(1 << 20), Duration::ZERO);
    let slow = Arc::new(Faulty::new(device.clone(), FaultPlan::default()));
    slow.inject(Fault {
        kind: IoKind::Read,
        skip: 0,
        times: 1_000,
        action: FaultAction::Hold,
    });
    let socket = rig.serve("d", slow.clone(), 1);
    let mut front_end = connect(&socket);
    let options = QueueOptions::default();
    let mut queue =
        BlkQueue::start(&mut front_end, 0, &options, 40, 512, Layout::Separate).unwrap();
    let mut added = Ok(0);
    while let (Some(slot), Ok(count)) = (queue.take(), &added) {
        assert!(queue.submit(slot, kind::IN, 0, 0, 512));
        queue.publish();
        eventually("in flight", || device.seen().len() == count + 1);
        added = front_end.add_region(4096).map(|_| count + 1);
    }
    slow.release();
    assert_eq!(added.unwrap(), 40);
    for _ in 0..40 {
        assert_eq!(queue.wait().unwrap().status, status::OK);
    }
}

/// Call, kick and error descriptors must not let third parties block the daemon: files may be on a file system of the front end. A socket
/// may linger when it is closed, or contain a lingering one in an unread message.
#[test]
fn descriptors_that_are_no_events_are_refused() {
    let (reader, writer) = std::io::pipe().unwrap();
    let (ours, theirs) = UnixStream::pair().unwrap();
    let file = tempfile::tempfile().unwrap();
    let directory = std::fs::File::open("/").unwrap();
    let memory = rustix::fs::memfd_create("m", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    for (fd, taken) in [
        (writer.as_fd(), true),
        (reader.as_fd(), true),
        (ours.as_fd(), false),
        (file.as_fd(), false),
        (directory.as_fd(), false),
        (memory.as_fd(), false),
    ] {
        let rig = Rig::polling(1, PollLimit::Never);
        let socket = rig.serve_ram("d", 1);
        for name in [
            request::SET_VRING_CALL,
            request::SET_VRING_ERR,
            request::SET_VRING_KICK,
        ] {
            let mut front_end = connect(&socket);
            let queue = front_end.place_queue(0, &QueueOptions::default()).unwrap();
            front_end.describe_queue(&queue, 0).unwrap();
            let set = front_end.acknowledged(name, &0u64.to_ne_bytes(), &[fd]);
            assert_eq!(set.is_ok(), taken, "{name}: {fd:?}, {set:?}");
            drop((queue, front_end));
            eventually("its session ends", || !rig.is_connected("d"));
        }
    }
    drop((reader, theirs));
}

/// Cloud Hypervisor sends the available index as the base after a back end has restarted. Without an in-flight region only the ring records
/// the requests that the previous back end had popped.
#[test]
fn old_requests_are_answered_when_base_is_the_avail_index() {
    // Eight requests of three descriptors each. The used index or position is at the start of the ring.
    for (packed, base) in [(false, 8), (true, 0x8000_8018)] {
        let rig = Rig::polling(1, PollLimit::Never);
        let socket = rig.serve_ram("d", 1);
        let options = Options {
            packed,
            ..Options::default()
        };
        let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
        let mut queue = place(&mut front_end);
        for sector in 0..8 {
            let slot = queue.take().unwrap();
            queue.data(slot).write(0, &[7; 512]);
            assert!(queue.submit(slot, kind::OUT, sector, 512, 0));
        }
        queue.publish();
        front_end.begin_queue(queue.queue(), base).unwrap();
        for answered in 0..8 {
            let done = queue.wait_for(SHORT);
            let done = done.unwrap_or_else(|e| panic!("packed {packed}, {answered} answered: {e}"));
            assert_eq!(done.status, status::OK);
            queue.release(done.slot);
        }
        let mut data = [0; 8 * 512];
        assert_eq!(queue.read(0, &mut data).unwrap(), status::OK);
        assert_eq!(data, [7; 8 * 512]);
    }
}

/// A front end that always starts at 0, and one that resumes correctly.
#[test]
fn ring_goes_on_at_its_used_index_whatever_the_base() {
    for base in [0, 3, 9, 10] {
        let rig = Rig::polling(1, PollLimit::Never);
        let device = Watched::new(ram(1 << 20), Duration::ZERO);
        let socket = rig.serve("d", device.clone(), 1);
        let mut front_end = connect(&socket);
        let mut queue = start_blk(&mut front_end, 0);
        for _ in 0..10 {
            assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
        }
        assert_eq!(front_end.stop_queue(0).unwrap(), 10);
        device.forget();
        front_end.begin_queue(queue.queue(), base).unwrap();
        assert_eq!(queue.write(512, &[2; 512]).unwrap(), status::OK);
        // No request is executed a second time.
        assert_eq!(device.seen().len(), 1, "base {base}: {:?}", device.seen());
    }
}

/// "It is recommended that back-ends either ignore this message, or use it to disable all rings" (RESET_OWNER).
#[test]
fn reset_owner_changes_nothing_of_the_session() {
    for packed in [false, true] {
        let rig = Rig::polling(1, PollLimit::Never);
        let device = Watched::new(ram(1 << 20), Duration::from_millis(500));
        let socket = rig.serve("d", device.clone(), 1);
        let options = Options {
            packed,
            ..Options::default()
        };
        let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
        let indirect = QueueOptions {
            indirect: Some(8),
            ..QueueOptions::default()
        };
        let start = |front_end: &mut FrontEnd| {
            BlkQueue::start(front_end, 0, &indirect, 8, 4096, Layout::Separate).unwrap()
        };
        let mut queue = start(&mut front_end);
        for _ in 0..4 {
            let slot = queue.take().unwrap();
            assert!(queue.submit(slot, kind::OUT, 0, 512, 0));
        }
        queue.publish();
        eventually("all are in flight", || device.seen().len() == 4);
        let begun = Instant::now();
        front_end
            .acknowledged(request::RESET_OWNER, &[], &[])
            .unwrap();
        assert!(begun.elapsed() < Duration::from_millis(300), "it waits");
        for _ in 0..4 {
            let done = queue.wait_for(SHORT).unwrap();
            assert_eq!(done.status, status::OK);
            queue.release(done.slot);
        }
        device.set_delay(Duration::ZERO);
        front_end.stop_queue(0).unwrap();
        front_end
            .acknowledged(request::RESET_OWNER, &[], &[])
            .unwrap();
        // Another ring, without SET_FEATURES before it.
        let mut queue = start(&mut front_end);
        assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
    }
}

/// RESET_DEVICE resets the device; no rule requires the front end to send its features again.
#[test]
fn features_outlive_a_reset_of_the_device() {
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_ram("d", 1);
    let options = Options {
        packed: true,
        ..Options::default()
    };
    let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
    let mut queue = start_blk(&mut front_end, 0);
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
    front_end.reset_device().unwrap();
    let mut queue = start_blk(&mut front_end, 0);
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
}
