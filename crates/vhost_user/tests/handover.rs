//! Handover of a front end to another server and back, during its requests: it notices nothing, and no request is lost or repeated.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use support::{Rig, Watched, eventually, ram};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions, Verifier, status};

/// For each ring layout.
const HANDOVERS: u64 = 100;

/// Runs verified I/O on two queues in turns, until `is_over`.
fn work(front_end: &mut FrontEnd, is_over: &AtomicBool, rounds: &AtomicU64) {
    let options = QueueOptions::default();
    let mut start = |index| {
        BlkQueue::start(front_end, index, &options, 16, 64 << 10, Layout::Separate).unwrap()
    };
    let mut queues = [start(0), start(1)];
    let mut verifier = Verifier::new(0, 128, 7);
    while !is_over.load(Ordering::Relaxed) {
        for queue in &mut queues {
            verifier.round(queue, 8).unwrap();
            rounds.fetch_add(1, Ordering::Relaxed);
        }
    }
    verifier.check_all(&mut queues[0]).unwrap();
}

fn check_handover(packed: bool) {
    let device = Watched::new(ram(1 << 20), Duration::from_micros(200));
    let servers = [Rig::new(2), Rig::new(1)];
    let socket = servers[0].serve("d", device.clone(), 2);
    servers[1].serve("d", device, 2);
    let options = Options {
        packed,
        ..Options::default()
    };
    let mut front_end = FrontEnd::connect(&socket, &options).unwrap();
    let (is_over, rounds) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        scope.spawn(|| work(&mut front_end, &is_over, &rounds));
        for nth in 0..HANDOVERS {
            let (from, to) = (&servers[nth as usize % 2], &servers[(nth as usize + 1) % 2]);
            let before = rounds.load(Ordering::Relaxed);
            eventually("rounds between handovers", || {
                rounds.load(Ordering::Relaxed) >= before + 2
            });
            let handed = from.server.hand_over_sessions();
            assert_eq!(handed.len(), 1, "handover {nth}");
            eventually("the end of the session here", || !from.is_connected("d"));
            assert_eq!(from.queues_running(), 0, "handover {nth}");
            for session in handed {
                to.server.take_over_session(session).unwrap();
            }
            assert!(to.is_connected("d"));
        }
        is_over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn split_rings_go_on_in_another_server_and_back() {
    check_handover(false);
}

#[test]
fn packed_rings_go_on_in_another_server_and_back() {
    check_handover(true);
}

/// Hands over the setup before the first queue, and memory that was added later.
#[test]
fn front_end_that_has_begun_to_set_up_goes_on_with_that() {
    let device = ram(1 << 20);
    let servers = [Rig::new(1), Rig::new(1)];
    let socket = servers[0].serve("d", Arc::clone(&device), 2);
    servers[1].serve("d", device, 2);
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let hand_over = |from: usize, to: usize| {
        for session in servers[from].server.hand_over_sessions() {
            servers[to].server.take_over_session(session).unwrap();
        }
    };
    hand_over(0, 1);
    let options = QueueOptions::default();
    let start = |front_end: &mut FrontEnd, index| {
        BlkQueue::start(front_end, index, &options, 16, 64 << 10, Layout::Separate).unwrap()
    };
    let mut first = start(&mut front_end, 0);
    assert_eq!(first.write(0, &[1; 512]).unwrap(), status::OK);
    hand_over(1, 0);
    // The queue is stopped, and started from the beginning in the other process.
    let base = front_end.stop_queue(0).unwrap();
    assert_eq!(base, 1);
    drop(first);
    hand_over(0, 1);
    let first = start(&mut front_end, 0);
    let mut second = start(&mut front_end, 1);
    let mut read = [0; 512];
    assert_eq!(second.read(0, &mut read).unwrap(), status::OK);
    assert_eq!(read, [1; 512]);
    front_end.reset_device().unwrap();
    hand_over(1, 0);
    assert_eq!(servers[0].queues_running(), 0);
    drop((first, second));
    // The front end disconnects, and both servers are free.
    drop(front_end);
    eventually("the end of the session", || !servers[0].is_connected("d"));
}

#[test]
fn session_that_does_not_stop_is_not_waited_for_for_ever() {
    let device = Watched::new(ram(1 << 20), Duration::from_secs(6));
    let rig = Rig::new(1);
    let socket = rig.serve("d", device, 1);
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let options = QueueOptions::default();
    let mut queue =
        BlkQueue::start(&mut front_end, 0, &options, 16, 64 << 10, Layout::Separate).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| queue.write(0, &[1; 512]));
        std::thread::sleep(Duration::from_millis(200));
        let began = Instant::now();
        assert!(rig.server.hand_over_sessions().is_empty());
        assert!(began.elapsed() < Duration::from_millis(5900));
    });
}

/// The server ends before its session threads: the connections no longer belong to it.
#[test]
fn server_that_ends_after_a_handover_ends_nobody() {
    const FRONT_ENDS: usize = 16;
    let device = ram(1 << 20);
    let successor = Rig::new(1);
    let names: Vec<String> = (0..FRONT_ENDS).map(|nth| nth.to_string()).collect();
    for name in &names {
        successor.serve(name, Arc::clone(&device), 1);
    }
    for _ in 0..20 {
        let rig = Rig::new(1);
        let mut all = Vec::new();
        for name in &names {
            let socket = rig.serve(name, Arc::clone(&device), 1);
            let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
            let options = QueueOptions::default();
            let queue = BlkQueue::start(&mut front_end, 0, &options, 4, 4096, Layout::Separate);
            all.push((queue.unwrap(), front_end));
        }
        let handed = rig.server.hand_over_sessions();
        assert_eq!(handed.len(), FRONT_ENDS);
        drop(rig);
        for session in handed {
            successor.server.take_over_session(session).unwrap();
        }
        for (queue, _) in &mut all {
            assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
        }
        drop(all);
        eventually("the end of all sessions", || {
            !names.iter().any(|name| successor.is_connected(name))
        });
    }
}
