//! Start and end of sessions; changes of vrings and memory during I/O; idle exports without cost.

mod support;

use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use reactor::PollLimit;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use support::{Rig, Watched, connect, eventually, ram, start_blk};
use vhost_frontend::{
    BlkQueue, Channel, Error, FrontEnd, Layout, LogMemory, Options, Queue, QueueOptions, Verifier,
    kind, status,
};

const SHORT: Duration = Duration::from_secs(10);

#[test]
fn second_front_end_is_refused_and_the_first_goes_on() {
    let rig = Rig::new(1);
    let socket = rig.serve_ram("d", 1);
    let mut first = connect(&socket);
    let mut queue = start_blk(&mut first, 0);
    let mut verifier = Verifier::new(0, 16, 1);
    for _ in 0..5 {
        let second = Channel::connect(&socket).unwrap();
        second.wait_closed(SHORT).unwrap();
        verifier.round(&mut queue, 8).unwrap();
    }
    assert!(rig.is_connected("d"));
    drop((queue, first));
    let mut next = connect(&socket);
    verifier.check_all(&mut start_blk(&mut next, 0)).unwrap();
}

#[test]
fn front_end_that_leaves_amid_its_requests_gives_way_to_the_next() {
    let rig = Rig::new(1);
    let device = Watched::new(ram(1 << 20), Duration::from_millis(20));
    let socket = rig.serve("d", device, 1);
    for _ in 0..10 {
        // The next front end connects while the requests of the last one are in flight.
        let mut front_end = connect(&socket);
        let mut queue = start_blk(&mut front_end, 0);
        for _ in 0..8 {
            let slot = queue.take().unwrap();
            assert!(queue.submit(slot, kind::OUT, 0, 4096, 0));
        }
        queue.publish();
    }
    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    assert_eq!(queue.flush().unwrap(), status::OK);
}

#[test]
fn front_end_that_says_nothing_gives_way() {
    let rig = Rig::new(1);
    let socket = rig.serve_ram("d", 1);
    let silent = UnixStream::connect(&socket).unwrap();
    eventually("the silent one is connected", || rig.is_connected("d"));
    // The first front end has a moment to send a message; earlier connections are refused.
    let mut next = None;
    eventually("it gives way", || {
        next = FrontEnd::connect(&socket, &Options::default()).ok();
        next.is_some()
    });
    let mut front_end = next.unwrap();
    let mut queue = start_blk(&mut front_end, 0);
    assert_eq!(queue.flush().unwrap(), status::OK);
    Channel::from_stream(silent).wait_closed(SHORT).unwrap();
}

/// Sleeps until the device interrupts. Returns false after a time-out.
fn is_interrupted(queue: &mut BlkQueue) -> bool {
    let call = queue.queue().call();
    let limit = Timespec::try_from(SHORT).unwrap();
    let ready = poll(&mut [PollFd::new(call, PollFlags::IN)], Some(&limit)).unwrap();
    ready == 1 && rustix::io::read(call, &mut [0u8; 8]).is_ok()
}

/// The event suppression of a polling driver is checked later, by a worker that polls, sleeps or is busy then.
#[test]
fn polling_driver_is_interrupted_whenever_it_sleeps() {
    const POLLED: usize = 80;
    for (packed, event_idx) in [(false, true), (false, false), (true, true), (true, false)] {
        let rig = Rig::new(1);
        let socket = rig.serve_ram("d", 1);
        let options = Options {
            packed,
            event_idx,
            ..Options::default()
        };
        let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
        let mut queue = start_blk(&mut front_end, 0);
        let submit = |queue: &mut BlkQueue| {
            let slot = queue.take().unwrap();
            assert!(queue.submit(slot, kind::IN, 0, 0, 512));
        };
        for round in 0..200 {
            queue.queue().driver().disable_interrupts();
            for _ in 0..POLLED {
                submit(&mut queue);
                queue.publish();
                let done = loop {
                    match queue.reap() {
                        Some(done) => break done,
                        None => std::thread::yield_now(),
                    }
                };
                queue.release(done.slot);
            }
            // Several requests at once, and later ones while it sleeps for the first.
            for _ in 0..1 + round % 7 {
                submit(&mut queue);
                if round % 3 == 0 {
                    queue.publish();
                }
            }
            queue.publish();
            while queue.in_flight() > 0 {
                let Some(done) = queue.reap() else {
                    assert!(
                        queue.queue().driver().enable_interrupts() || is_interrupted(&mut queue),
                        "round {round}, packed {packed}, event_idx {event_idx}"
                    );
                    continue;
                };
                assert_eq!(done.status, status::OK);
                queue.release(done.slot);
            }
        }
    }
}

#[test]
fn get_vring_base_answers_when_everything_in_flight_is_answered() {
    for packed in [false, true] {
        let rig = Rig::new(1);
        let device = Watched::new(ram(1 << 20), Duration::from_millis(60));
        let socket = rig.serve("d", device.clone(), 1);
        let options = Options {
            packed,
            ..Options::default()
        };
        let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
        let mut queue = start_blk(&mut front_end, 0);
        for _ in 0..10 {
            let slot = queue.take().unwrap();
            assert!(queue.submit(slot, kind::OUT, 8, 512, 0));
        }
        queue.publish();
        eventually("all are in flight", || device.seen().len() == 10);
        let base = front_end.stop_queue(0).unwrap();
        let mut answered = 0;
        while let Some(done) = queue.reap() {
            assert_eq!(done.status, status::OK);
            queue.release(done.slot);
            answered += 1;
        }
        if packed {
            // Three descriptors each, in a ring of 128: both positions 30, wrap counter 1.
            assert_eq!(answered, 10);
            assert_eq!(base, 0x801e_801e);
        } else {
            assert_eq!((answered, base), (10, 10));
        }
        // The queue continues from this position.
        front_end.begin_queue(queue.queue(), base).unwrap();
        assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
        assert_eq!(queue.flush().unwrap(), status::OK);
    }
}

#[test]
fn requests_that_wait_when_a_ring_starts_need_no_kick() {
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_ram("d", 1);
    for with_kick_fd in [true, false] {
        let mut front_end = connect(&socket);
        let queue = front_end.place_queue(0, &QueueOptions::default()).unwrap();
        let mut queue =
            BlkQueue::with_queue(&mut front_end, queue, 8, 4096, Layout::Separate).unwrap();
        for _ in 0..8 {
            let slot = queue.take().unwrap();
            assert!(queue.submit(slot, kind::OUT, 0, 4096, 0));
        }
        assert!(
            !with_kick_fd || queue.queue().driver().publish(),
            "a ring that never ran wants a kick"
        );
        if with_kick_fd {
            // The kick descriptor is present but never written.
            front_end.begin_queue(queue.queue(), 0).unwrap();
        } else {
            queue.queue().driver().publish();
            front_end.describe_queue(queue.queue(), 0).unwrap();
            front_end.enable(0, true).unwrap();
            let call = queue.queue().call().as_fd().try_clone_to_owned().unwrap();
            front_end.set_call(0, Some(call.as_fd())).unwrap();
            front_end.set_kick(0, None).unwrap();
        }
        for _ in 0..8 {
            let done = queue.wait().unwrap();
            assert_eq!(done.status, status::OK);
        }
    }
}

#[test]
fn ring_that_is_enabled_later_is_processed_then() {
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_ram("d", 1);
    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    front_end.enable(0, false).unwrap();
    let slot = queue.take().unwrap();
    assert!(queue.submit(slot, kind::FLUSH, 0, 0, 0));
    queue.queue().driver().publish();
    queue.queue().kick();
    // The acknowledgement follows an iteration of the worker.
    front_end.enable(0, false).unwrap();
    assert!(matches!(
        queue.wait_for(Duration::from_millis(20)),
        Err(Error::Timeout(_))
    ));
    front_end.enable(0, true).unwrap();
    assert_eq!(queue.wait().unwrap().status, status::OK);
}

#[test]
fn interrupt_may_change_while_requests_are_in_flight() {
    let rig = Rig::new(1);
    let device = Watched::new(ram(1 << 20), Duration::from_millis(5));
    let socket = rig.serve("d", device, 1);
    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    for round in 0..20 {
        let slot = queue.take().unwrap();
        assert!(queue.submit(slot, kind::OUT, 0, 512, 0));
        queue.publish();
        queue.queue().replace_call().unwrap();
        let call = queue.queue().call().try_clone().unwrap();
        front_end.set_call(0, Some(call.as_fd())).unwrap();
        if round % 4 == 3 {
            let kick = queue.queue().kick_fd().try_clone().unwrap();
            front_end.set_kick(0, Some(kick.as_fd())).unwrap();
        }
        let done = queue.wait().unwrap();
        assert_eq!(done.status, status::OK);
        queue.release(done.slot);
    }
}

#[test]
fn regions_come_go_and_move_while_requests_are_in_flight() {
    let rig = Rig::new(2);
    let device = Watched::new(ram(16 << 20), Duration::from_millis(10));
    let socket = rig.serve("d", Arc::clone(&device) as _, 2);
    let mut front_end = connect(&socket);
    let mut queues = [
        front_end.start_queue(0, &QueueOptions::default()).unwrap(),
        front_end.start_queue(1, &QueueOptions::default()).unwrap(),
    ];
    let headers = front_end.allocate(4096, 4096).unwrap();
    for round in 0u8..20 {
        device.forget();
        let region = front_end.add_region(1 << 20).unwrap();
        region.write(0, &vec![round + 1; 1 << 20]);
        for (index, queue) in queues.iter_mut().enumerate() {
            submit_write(
                queue,
                &headers.part(index * 64, 64),
                region.element(),
                round,
            );
        }
        // A request that a worker has not taken yet would refer to memory that is gone.
        eventually("both writes have started", || device.seen().len() >= 2);
        match round % 3 {
            0 => {
                // Removed during the writes, which end as if it were present.
                front_end.remove_region(region.address).unwrap();
            }
            1 => front_end.send_memory().unwrap(),
            _ => {
                front_end.remove_region(region.address).unwrap();
                front_end.add_region(4096).unwrap();
            }
        }
        for (index, queue) in queues.iter_mut().enumerate() {
            let used = wait_used(queue);
            assert_eq!(used, 1);
            let mut answer = [0xff];
            headers.part(index * 64, 64).read(32, &mut answer);
            assert_eq!(answer, [status::OK], "round {round}");
        }
    }
    // The data written is that of the regions at submission.
    let mut blk = {
        drop(queues);
        drop(front_end);
        let mut next = connect(&socket);
        (start_blk(&mut next, 0), next)
    };
    let mut got = [0; 4096];
    for round in 0u8..7 {
        let offset = u64::from(round) << 20;
        assert_eq!(blk.0.read(offset, &mut got).unwrap(), status::OK);
        let last = (0..20u8).rfind(|r| r % 7 == round).unwrap();
        assert!(got.iter().all(|byte| *byte == last + 1), "region {round}");
    }
}

fn submit_write(queue: &mut Queue, header: &vhost_frontend::Area, data: (u64, u32), round: u8) {
    let mut bytes = [0; 16];
    bytes[0] = 1;
    bytes[8..].copy_from_slice(&(u64::from(round % 7) << 11).to_le_bytes());
    header.write(0, &bytes);
    header.write(32, &[0xff]);
    let readable = [header.part(0, 16).element(), data];
    assert!(queue.add(&readable, &[header.part(32, 1).element()], 0));
    queue.publish();
}

fn wait_used(queue: &mut Queue) -> u32 {
    queue.wait(Duration::from_secs(20)).unwrap();
    queue.pop_used().unwrap().written
}

#[test]
fn device_with_256_queues_serves_on_all_of_them() {
    let rig = Rig::new(2);
    let socket = rig.serve_ram("d", 256);
    let options = Options {
        memory: 64 << 20,
        ..Options::default()
    };
    let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
    assert_eq!(front_end.queue_count(), 256);
    let queue_options = QueueOptions {
        size: 16,
        ..QueueOptions::default()
    };
    let mut queues: Vec<_> = (0..256)
        .map(|index| {
            BlkQueue::start(
                &mut front_end,
                index,
                &queue_options,
                2,
                4096,
                Layout::Separate,
            )
            .unwrap()
        })
        .collect();
    let mut verifier = Verifier::new(0, 64, 3);
    for queue in &mut queues {
        verifier.round(queue, 2).unwrap();
    }
    let places = rig.pool.snapshots();
    let on = |worker| places.iter().filter(|p| p.labels.worker == worker).count();
    assert_eq!((on(0), on(1)), (128, 128));
}

#[test]
fn device_reset_stops_everything_and_begins_anew() {
    let rig = Rig::new(1);
    let socket = rig.serve_ram("d", 1);
    let mut front_end = connect(&socket);
    let mut verifier = Verifier::new(0, 16, 1);
    let mut queue = start_blk(&mut front_end, 0);
    verifier.round(&mut queue, 8).unwrap();
    front_end.reset_device().unwrap();
    assert_eq!(rig.queues_running(), 0);
    let features = front_end.features().to_ne_bytes();
    front_end
        .acknowledged(vhost_frontend::request::SET_FEATURES, &features, &[])
        .unwrap();
    let mut queue = start_blk(&mut front_end, 0);
    verifier.check_all(&mut queue).unwrap();
}

#[test]
fn export_that_is_removed_ends_its_session_and_no_other() {
    let rig = Rig::new(1);
    let (a, b) = (rig.serve_ram("a", 1), rig.serve_ram("b", 1));
    let (mut at_a, mut at_b) = (connect(&a), connect(&b));
    let (_queue, mut queue) = (start_blk(&mut at_a, 0), start_blk(&mut at_b, 0));
    assert!(rig.server.remove("a") && !rig.server.remove("a"));
    at_a.channel().wait_closed(SHORT).unwrap();
    assert!(!a.exists() && b.exists());
    Verifier::new(0, 16, 1).round(&mut queue, 8).unwrap();
}

#[test]
fn worker_sleeps_whatever_its_kicks_are() {
    let (hung_up, writer) = std::io::pipe().unwrap();
    drop(writer);
    let odd = [
        OwnedFd::from(hung_up),
        tempfile::tempfile().unwrap().into(),
        std::fs::File::open("/dev/zero").unwrap().into(),
        std::fs::File::open("/proc/self/stat").unwrap().into(),
    ];
    for (number, kick) in odd.iter().enumerate() {
        let rig = Rig::polling(1, PollLimit::Never);
        let socket = rig.serve_ram("d", 1);
        let front_end = connect(&socket);
        let mut front_end = front_end;
        let queue = front_end.place_queue(0, &QueueOptions::default()).unwrap();
        front_end.describe_queue(&queue, 0).unwrap();
        front_end.enable(0, true).unwrap();
        // The back end may refuse the descriptor, and the session may end.
        let set = front_end.set_kick(0, Some(kick.as_fd()));
        std::thread::sleep(Duration::from_millis(50));
        let iterations = || {
            let counters = rig.pool.counters()[0].1;
            counters.busy_iterations + counters.empty_iterations
        };
        let before = iterations();
        std::thread::sleep(Duration::from_millis(100));
        let after = iterations();
        assert!(
            after - before < 20,
            "kick {number} ({set:?}): {before} iterations, then {after}"
        );
    }
}

#[test]
fn large_requests_in_great_number_are_taken_a_few_at_a_time() {
    const REQUESTS: u64 = 64;
    let rig = Rig::polling(1, PollLimit::Never);
    let socket = rig.serve_ram("d", 1);
    let mut front_end = connect(&socket);
    let mut queue = front_end
        .place_queue(
            0,
            &QueueOptions {
                size: 256,
                ..QueueOptions::default()
            },
        )
        .unwrap();
    let header = front_end.allocate(4096, 4096).unwrap();
    header.write(0, &[0; 4096]);
    // All requests read 2 MiB to the same memory.
    let data = front_end.allocate(2 << 20, 4096).unwrap();
    for token in 0..REQUESTS {
        let writable = [data.element(), header.part(64, 1).element()];
        assert!(queue.add(&[header.part(0, 16).element()], &writable, token));
    }
    queue.driver().publish();
    let before = rig.pool.counters()[0].1.busy_iterations;
    front_end.begin_queue(&queue, queue.base()).unwrap();
    for _ in 0..REQUESTS {
        queue.wait(Duration::from_secs(20)).unwrap();
        assert_eq!(queue.pop_used().unwrap().written, (2 << 20) + 1);
    }
    // Between two iterations the worker serves its other queues.
    let iterations = rig.pool.counters()[0].1.busy_iterations - before;
    assert!(iterations >= 16, "128 MiB in {iterations} iterations");
}

/// A process that has removed the file and listens there keeps its socket.
#[test]
fn socket_of_another_at_the_same_path_is_not_removed() {
    let rig = Rig::new(1);
    let (taken, own) = (rig.serve_ram("taken", 1), rig.serve_ram("own", 1));
    std::fs::remove_file(&taken).unwrap();
    let _other = std::os::unix::net::UnixListener::bind(&taken).unwrap();
    assert!(rig.server.remove("taken") && rig.server.remove("own"));
    assert!(taken.exists() && !own.exists());
}

/// Cloud Hypervisor disables rings before it copies the last pages of a migration. The destination starts behind all available requests.
#[test]
fn requests_without_a_kick_end_before_a_logged_ring_is_disabled() {
    let rig = Rig::polling(1, PollLimit::Never);
    let device = Watched::new(ram(1 << 20), Duration::from_millis(20));
    let socket = rig.serve("d", device, 1);
    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    let spec = front_end.memory().regions()[0].spec;
    let log = LogMemory::below(spec.guest_address + spec.size).unwrap();
    front_end.set_log(&log).unwrap();
    front_end.log_data(true).unwrap();
    let slot = queue.take().unwrap();
    assert!(queue.submit(slot, kind::FLUSH, 0, 0, 0));
    queue.queue().driver().publish();
    front_end.enable(0, false).unwrap();
    assert!(queue.reap().is_some(), "the request is still in the ring");
}
