//! When a worker sleeps, which sources it arms first, and how messages affect sources that are added and removed.

use std::cell::RefCell;
use std::rc::Rc;

use bdev::{Delay, Null, NullOptions, RateLimits, Submission};
use block::{IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use latency::QueueRecord;
use rustix::event::{EventfdFlags, eventfd};
use uring::RingFd;

use super::*;

/// Calls to a source.
#[derive(Default)]
struct Seen {
    flushed: usize,
    armed: usize,
    disarmed: usize,
    kicked: usize,
    /// Work arrives while the source is armed.
    races: bool,
    is_connection: bool,
    in_flight: usize,
}

struct Client(Rc<RefCell<Seen>>, Option<RingFd>);

impl Source for Client {
    fn is_polled(&self) -> bool {
        !self.0.borrow().is_connection
    }
    fn ready(&mut self, _now: Stamp) -> bool {
        false
    }
    fn drain(&mut self, _io: &mut Io, _noticed: Stamp) {}
    fn finish(&mut self, _: &mut Io, _: u32, _: IoBuffer, _: IoOutcome, _: Stamp) {}
    fn publish(&mut self, _io: &mut Io) {}
    fn flush_notifications(&mut self) {
        self.0.borrow_mut().flushed += 1;
    }
    fn arm(&mut self) -> bool {
        self.0.borrow_mut().armed += 1;
        self.0.borrow().races
    }
    fn disarm(&mut self) {
        self.0.borrow_mut().disarmed += 1;
    }
    fn in_flight(&self) -> usize {
        self.0.borrow().in_flight
    }
    fn kick(&self) -> Option<RingFd> {
        self.1.clone()
    }
    fn kicked(&mut self) {
        self.0.borrow_mut().kicked += 1;
    }
    fn stop(&mut self) {}
    fn closed(&mut self, _io: &mut Io) {}
    fn record(&self) -> Option<Arc<QueueRecord>> {
        None
    }
}

/// Creates a polling worker with a client; its disk has an expected latency of about 60 microseconds.
fn worker_that_waits() -> (Worker, Rc<RefCell<Seen>>) {
    worker_with(None)
}

/// Creates a worker with a client, on a clock that stands still.
fn new_worker(limits: PollLimits, client: Client) -> (Worker, SourceId) {
    let (clock, _) = Clock::simulated();
    let (ledger, ring) = (Ledger::new(clock), Ring::new(64).unwrap());
    let mailbox = Mailbox::new(ring.event().unwrap());
    let mut worker = Worker::new(mailbox, 0, limits, ring, ledger).unwrap();
    let added = worker.add(|_, _| Ok::<Box<dyn Source>, ()>(Box::new(client)));
    (worker, added.unwrap())
}

fn worker_with(kick: Option<RingFd>) -> (Worker, Rc<RefCell<Seen>>) {
    let seen = Rc::new(RefCell::new(Seen::default()));
    let client = Client(seen.clone(), kick);
    let (mut worker, _) = new_worker(PollLimit::Micros(50).into(), client);
    for wait in 0..1_000u64 {
        worker.polling.waits_for_disk(1, Stamp(wait));
        worker.polling.worked(Stamp(wait + 60_000));
    }
    (worker, seen)
}

#[test]
fn worker_sleeps_for_a_slow_disk_with_notifications_on() {
    let (mut worker, seen) = worker_that_waits();
    assert_eq!(worker.next_wait(false, Stamp(1_000)), Wait::No);
    assert_eq!(worker.next_wait(false, Stamp(4_000)), Wait::No);
    assert_eq!(seen.borrow().armed, 0, "no disk is waited for");
    worker.io.pending = 1;
    assert_eq!(
        worker.next_wait(false, Stamp(5_000)),
        Wait::No,
        "it looks first"
    );
    assert_eq!(worker.next_wait(false, Stamp(8_000)), Wait::Until(None));
    let before = seen.borrow().disarmed;
    assert_eq!(seen.borrow().armed, 1);
    // The disk completes; the client is polled again without a kick.
    worker.io.pending = 0;
    worker.iterate(Wait::No);
    assert_eq!(seen.borrow().disarmed, before + 1);
    assert_eq!(worker.next_wait(true, Stamp(66_000)), Wait::No);
    assert_eq!(worker.next_wait(false, Stamp(67_000)), Wait::No);
    assert_eq!(seen.borrow().armed, 1);
}

#[test]
fn connection_does_not_select_the_polling_limit_for_rings() {
    let limits = PollLimits {
        rings: PollLimit::Micros(50),
        network: PollLimit::Never,
        disk: PollLimit::Never,
    };
    let client = |is_connection| {
        let seen = Seen {
            is_connection,
            ..Seen::default()
        };
        Client(Rc::new(RefCell::new(seen)), None)
    };
    let (mut worker, id) = new_worker(limits, client(true));
    assert_eq!(worker.next_wait(true, Stamp(1_000)), Wait::Until(None));
    // The end of the login and the checks of deadlines wake the connection.
    worker.wake(id);
    worker.iterate(Wait::No);
    assert_eq!(worker.next_wait(true, Stamp(2_000)), Wait::Until(None));
    let (mut worker, _) = new_worker(limits, client(false));
    assert_eq!(worker.next_wait(true, Stamp(1_000)), Wait::No);
}

#[test]
fn worker_sleeps_while_all_io_waits_for_limits() {
    let (mut worker, source) =
        new_worker(PollLimit::Micros(50).into(), Client(Rc::default(), None));
    let null = Null::create(NullOptions::default()).unwrap();
    let disk = Arc::new(Disk::new("d", None, Arc::new(null)).unwrap());
    let handle = worker.io.open(&disk);
    disk.set_limits(RateLimits {
        iops: 1,
        iops_burst: 1,
        ..RateLimits::default()
    });
    let read = |worker: &mut Worker, slot| {
        let mut buffer = IoBuffer::owned(4096);
        let tag = Tag { source, slot };
        let request = IoRequest::read(0, 4096);
        worker.io.submit(handle, &request, &mut buffer, tag)
    };
    assert_eq!(read(&mut worker, 0), Submission::Done(Ok(())));
    assert_eq!(read(&mut worker, 1), Submission::Pending);
    assert_eq!(
        worker.next_wait(false, Stamp(5_000)),
        Wait::No,
        "it looks first"
    );
    assert_eq!(worker.next_wait(false, Stamp(8_000)), Wait::Until(None));
    worker.stop(source, |_, _| ());
    worker.iterate(Wait::No);
    assert_eq!((worker.io.pending, worker.io.limited.get()), (0, 0));
}

#[test]
fn deferred_work_of_a_source_is_done_before_sleep_and_end() {
    let flushed = |seen: &Rc<RefCell<Seen>>| std::mem::take(&mut seen.borrow_mut().flushed);
    // The worker sleeps until a disk has completed.
    let (mut worker, seen) = worker_that_waits();
    worker.io.pending = 1;
    worker.next_wait(false, Stamp(5_000));
    assert_eq!(flushed(&seen), 0, "it looks first");
    assert_eq!(worker.next_wait(false, Stamp(8_000)), Wait::Until(None));
    assert_eq!(flushed(&seen), 1);
    // The worker sleeps until any event, and publishes a source that is not polled.
    worker.io.pending = 0;
    worker.next_wait(true, Stamp(900_000));
    worker.next_wait(false, Stamp(949_000));
    assert_eq!(flushed(&seen), 0);
    assert_eq!(worker.next_wait(false, Stamp(999_000)), Wait::Until(None));
    assert_eq!(flushed(&seen), 1);
    let id = worker.slots[0].as_ref().map(|index| index.id).unwrap();
    worker.touch(id);
    worker.iterate_once();
    assert_eq!(flushed(&seen), 1);
    // The worker ends.
    worker.end();
    worker.run();
    assert_eq!(flushed(&seen), 1);
    // The worker removes the source.
    let (mut worker, seen) = worker_that_waits();
    let id = worker.slots[0].as_ref().map(|index| index.id).unwrap();
    worker.stop(id, |_, _| ());
    worker.iterate_once();
    assert_eq!((flushed(&seen), worker.source_count()), (1, 0));
}

#[test]
fn polling_for_a_disk_begins_after_the_submission() {
    let (mut worker, _) = worker_that_waits();
    for _ in 0..4 {
        worker.polling.serves(true);
        worker.polling.sleeping(Stamp(0));
        worker.polling.woke(Stamp(1_000_000));
    }
    assert!(!worker.polling.is_on(), "the window for clients is closed");
    worker.io.pending = 1;
    assert_eq!(worker.next_wait(true, Stamp(0)), Wait::No);
    // The submission took 15 us.
    assert_eq!(
        worker.next_wait(false, Stamp(15_000)),
        Wait::No,
        "it looks for requests"
    );
    assert_eq!(worker.next_wait(false, Stamp(18_000)), Wait::Until(None));
}

#[test]
fn disk_latency_does_not_affect_the_client_window() {
    let (mut worker, seen) = worker_that_waits();
    worker.io.pending = 1;
    worker.next_wait(false, Stamp(1_000));
    assert_eq!(worker.next_wait(false, Stamp(9_000)), Wait::Until(None));
    assert!(!worker.polling.slept(), "nothing is learned from it");
    worker.io.pending = 0;
    assert_eq!(worker.next_wait(true, Stamp(900_000)), Wait::No);
    assert_eq!(worker.next_wait(false, Stamp(949_000)), Wait::No);
    assert_eq!(worker.next_wait(false, Stamp(999_000)), Wait::Until(None));
    assert!(worker.polling.slept());
    assert_eq!(seen.borrow().armed, 2);
}

#[test]
fn worker_does_not_sleep_if_work_arrives() {
    let (mut worker, seen) = worker_that_waits();
    worker.io.pending = 1;
    seen.borrow_mut().races = true;
    assert_eq!(worker.next_wait(false, Stamp(1_000)), Wait::No);
    assert_eq!(worker.next_wait(false, Stamp(4_000)), Wait::No);
    assert_eq!(seen.borrow().armed, 1);
    let before = seen.borrow().disarmed;
    worker.iterate(Wait::No);
    assert_eq!(seen.borrow().disarmed, before + 1);
}

#[test]
fn quiet_source_is_armed_once_until_its_next_kick() {
    let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let (mut worker, seen) = worker_with(Some(RingFd::from(fd.try_clone().unwrap())));
    let sleep_for_disk = |worker: &mut Worker, at| {
        worker.iterate(Wait::No);
        worker.io.pending = 1;
        worker.next_wait(true, Stamp(at));
        worker.next_wait(false, Stamp(at + 1_000));
        let wait = worker.next_wait(false, Stamp(at + 4_000));
        assert_eq!(wait, Wait::Until(None));
        seen.borrow().armed
    };
    seen.borrow_mut().in_flight = 1;
    assert_eq!(sleep_for_disk(&mut worker, 0), 1);
    assert_eq!(sleep_for_disk(&mut worker, 2_000_000), 2);
    seen.borrow_mut().in_flight = 0;
    for at in [4_000_000, 6_000_000, 8_000_000] {
        assert_eq!(sleep_for_disk(&mut worker, at), 3);
    }
    rustix::io::write(&fd, &1u64.to_ne_bytes()).unwrap();
    worker.iterate(Wait::Until(Some(std::time::Duration::from_secs(60))));
    assert_eq!(sleep_for_disk(&mut worker, 10_000_000), 4);
}

#[test]
fn every_kick_is_delivered_to_hot_and_idle_sources() {
    let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
    let kick = |fd: &std::os::fd::OwnedFd| {
        rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
    };
    let mut worker = worker_with(Some(RingFd::from(fd.try_clone().unwrap())));
    let (worker, seen) = (&mut worker.0, &worker.1);
    worker.iterate(Wait::No);
    assert_eq!(seen.borrow().kicked, 0, "it is hot because it is new");
    for kicks in 1..=3 {
        kick(&fd);
        worker.iterate(Wait::Until(Some(std::time::Duration::from_secs(60))));
        assert_eq!(seen.borrow().kicked, kicks);
    }
    assert_eq!(seen.borrow().disarmed, 1, "it was hot all the time");
}

#[test]
fn stale_source_id_never_reaches_a_reused_slot() {
    let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
    let add = |worker: &mut Worker| {
        let client = Client(Rc::default(), None);
        worker
            .add(|_, _| Ok::<Box<dyn Source>, ()>(Box::new(client)))
            .unwrap()
    };
    let (first, other) = (add(&mut worker), add(&mut worker));
    let gone = Rc::new(RefCell::new(0));
    let stop = |worker: &mut Worker, id| {
        let gone = gone.clone();
        worker.stop(id, move |_, _| *gone.borrow_mut() += 1);
        worker.iterate_once();
    };
    stop(&mut worker, first);
    let second = add(&mut worker);
    assert_eq!(first.index(), second.index());
    assert!(worker.source(first).is_none() && worker.source(second).is_some());
    worker.wake(first);
    worker.rewatch(first);
    stop(&mut worker, first);
    assert_eq!((*gone.borrow(), worker.source_count()), (1, 2));
    stop(&mut worker, second);
    assert_eq!((*gone.borrow(), worker.source_count()), (2, 1));
    assert!(worker.source(other).is_some());
}

/// The highest bits of a tag mark counted I/Os. Source ids must not reach them, although a worker adds an unlimited number
/// of sources, one for each started queue and each connection.
#[test]
fn range_is_granted_when_all_earlier_ios_have_ended() {
    let slow = Delay::new(
        Arc::new(Null::create(NullOptions::default()).unwrap()),
        std::time::Duration::from_millis(5),
    );
    let disk = Arc::new(Disk::new("d", None, Arc::new(slow)).unwrap());
    let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
    let handle = worker.io.open(&disk);
    let submit = |worker: &mut Worker, request: &IoRequest, source| {
        let tag = Tag { source, slot: 5 };
        let mut buffer = IoBuffer::owned(4096);
        let submitted = worker.io.submit(handle, request, &mut buffer, tag);
        assert_eq!(submitted, Submission::Pending);
    };
    for nth in 0..5_000 {
        let client = Client(Rc::default(), None);
        let id = worker
            .add(|_, _| Ok::<Box<dyn Source>, ()>(Box::new(client)))
            .unwrap();
        if nth % 512 == 0 {
            let mut requests = [IoRequest::read(0, 4096), IoRequest::write(0, 4096)];
            if nth % 1024 == 0 {
                requests.reverse();
            }
            submit(&mut worker, &requests[0], id);
            // It ends while the other one is in flight.
            std::thread::sleep(std::time::Duration::from_millis(3));
            submit(&mut worker, &requests[1], id);
            let (grant, granted) = std::sync::mpsc::channel();
            disk.range_locks()
                .acquire(0, 4096, move |lease| drop(grant.send(lease)));
            let mut runs = true;
            while runs {
                worker.iterate_once();
                runs = worker.io.pending > 0;
                let early = runs && granted.try_recv().is_ok();
                let request = requests[1];
                assert!(!early, "while {request:?} is in flight, source {nth}");
            }
            worker.iterate_once();
            assert!(granted.try_recv().is_ok(), "never, source {nth}");
        }
        worker.stop(id, |_, _| ());
        worker.iterate_once();
    }
}
