//! Handover of a front end to another server and back, during its requests: it notices nothing, and no request is lost or repeated.

mod support;

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bdev::{Attach, BlockDevice, Capabilities, IoChannel, OnTurn, TurnDevice};
use block::{Capacity, DiskInfo};
use support::{Rig, Watched, connect, eventually, ram, start_blk};
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
    let device = Watched::new(ram(1 << 20), Duration::ZERO);
    device.hold();
    let rig = Rig::new(1);
    let socket = rig.serve("d", device.clone(), 1);
    let mut front_end = FrontEnd::connect(&socket, &Options::default()).unwrap();
    let options = QueueOptions::default();
    let mut queue =
        BlkQueue::start(&mut front_end, 0, &options, 16, 64 << 10, Layout::Separate).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| queue.write(0, &[1; 512]));
        eventually("the write", || !device.seen().is_empty());
        let handed = rig.server.hand_over_sessions();
        // Ends the write.
        device.set_delay(Duration::ZERO);
        assert!(handed.is_empty());
    });
}

/// One front end stops in the middle of a message. Its session ends, and the other front end's requests do not wait for it.
#[test]
fn partial_message_holds_up_no_other_session() {
    let servers = [Rig::new(1), Rig::new(1)];
    let device = ram(1 << 20);
    let socket = servers[0].serve("d", device.clone(), 1);
    servers[1].serve("d", device, 1);
    let other = servers[0].serve("half", ram(1 << 20), 1);
    let mut half = UnixStream::connect(other).unwrap();
    // The first 6 bytes of SET_MEM_TABLE, version 1.
    half.write_all(&[5, 0, 0, 0, 1, 0]).unwrap();
    eventually("the session", || servers[0].is_connected("half"));
    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let work = scope.spawn(|| {
            let mut longest = Duration::ZERO;
            while !is_over.load(Ordering::Relaxed) {
                let began = Instant::now();
                assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
                longest = longest.max(began.elapsed());
            }
            longest
        });
        let handed = servers[0].server.hand_over_sessions();
        let exports: Vec<&str> = handed.iter().map(|one| one.export.as_str()).collect();
        assert_eq!(exports, ["d"]);
        for session in handed {
            servers[1].server.take_over_session(session).unwrap();
        }
        is_over.store(true, Ordering::Relaxed);
        let longest = work.join().unwrap();
        assert!(longest < Duration::from_millis(900), "{longest:?}");
    });
    // The front end reads the end of the connection.
    half.set_read_timeout(Some(Duration::from_secs(2))).unwrap();
    assert_eq!(half.read(&mut [0; 1]).unwrap(), 0);
}

/// A session in the middle of a message is found without an effect on it or on others.
#[test]
fn partial_message_makes_its_session_unresponsive() {
    let rig = Rig::new(1);
    let socket = rig.serve("d", ram(1 << 20), 1);
    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    let mut half = UnixStream::connect(rig.serve("half", ram(1 << 20), 1)).unwrap();
    // GET_FEATURES, version 1.
    let message = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];
    half.write_all(&message[..6]).unwrap();
    let limit = Duration::from_millis(100);
    eventually("an unresponsive session", || {
        rig.server.unresponsive_sessions(limit) == ["half"]
    });
    half.write_all(&message[6..]).unwrap();
    half.read_exact(&mut [0; 20]).unwrap();
    eventually("no unresponsive session", || {
        rig.server.unresponsive_sessions(limit).is_empty()
    });
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
}

/// A second front end connects between the start of the new server and the handover of the first one's session.
#[test]
fn second_front_end_does_not_get_the_export_of_a_session() {
    let servers = [Rig::new(1), Rig::new(1)];
    let device = ram(1 << 20);
    let mut front_end = connect(&servers[0].serve("d", device.clone(), 1));
    let mut queue = start_blk(&mut front_end, 0);
    servers[1].server.hold_accepting();
    let socket = servers[1].serve("d", device, 1);
    // Wakes the accepting thread, which would accept the second front end.
    let mut second = UnixStream::connect(&socket).unwrap();
    servers[1].serve_ram("other", 1);
    for session in servers[0].server.hand_over_sessions() {
        servers[1].server.take_over_session(session).unwrap();
    }
    servers[1].server.accept();
    second
        .set_read_timeout(Some(Duration::from_secs(20)))
        .unwrap();
    assert_eq!(second.read(&mut [0; 1]).unwrap(), 0, "it is not refused");
    drop(second);
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
    assert!(servers[1].is_connected("d"));
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

/// A disk that never releases its locks.
struct Unreleased(Arc<dyn BlockDevice>);

impl TurnDevice for Unreleased {
    fn wait_for_release(&self, until: Duration) {
        std::thread::sleep(until.saturating_sub(latency::Clock::shared().elapsed()));
    }

    fn on_turn(&self, _on_turn: OnTurn) {}

    fn release_error(&self) -> Option<String> {
        None
    }
}

impl BlockDevice for Unreleased {
    fn info(&self) -> DiskInfo {
        self.0.info()
    }

    fn capacity(&self) -> &Arc<Capacity> {
        self.0.capacity()
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.0.set_size(bytes)
    }

    fn kind(&self) -> &'static str {
        "unreleased"
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            turns: Some(self),
            ..Capabilities::NONE
        }
    }

    fn attach(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        self.0.attach(attach)
    }
}

/// The locks of a disk are released slowly. The other process gets the session meanwhile.
#[test]
fn session_does_not_wait_for_the_locks_of_its_disk() {
    let servers = [Rig::new(1), Rig::new(1)];
    let content = ram(1 << 20);
    let socket = servers[0].serve("d", Arc::new(Unreleased(content.clone())), 1);
    servers[1].serve("d", content, 1);
    let mut front_end = connect(&socket);
    let mut queue = start_blk(&mut front_end, 0);
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
    let handed = servers[0].server.hand_over_sessions();
    assert_eq!(handed.len(), 1);
    for session in handed {
        servers[1].server.take_over_session(session).unwrap();
    }
    assert_eq!(queue.write(0, &[2; 512]).unwrap(), status::OK);
}
