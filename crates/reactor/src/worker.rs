//! A worker: the loop, the turn, and what messages may do to it.
//!
//! One turn: submit what the last one queued and reap (one io_uring_enter at most), hear of kicks and messages,
//! give finished I/Os to their sources, drain every hot source, publish every touched one. A source is *hot*
//! while it is polled; a worker without work arms its hot sources and sleeps in io_uring.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use backend::{Disk, Finished};
use ring::{Completion, Owner, Ring, RingFd, Wait, WatchId};
use timeline::{Clock, Stamp};

use crate::disk_waits::DiskWaits;
use crate::disks::{Io, Listener, Tag};
use crate::ledger::Ledger;
use crate::mailbox::{Mailbox, WorkerHandle};
use crate::polling::{Idle, PollLimit, PollLimits, Polling};
use crate::source::{Source, SourceId};

/// What a worker counted since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerCounters {
    /// Turns in which there was work.
    pub busy_turns: u64,
    /// Turns in which polling found nothing.
    pub empty_turns: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Messages it ran.
    pub messages: u64,
}

type Stopped = Box<dyn FnOnce(Box<dyn Source>, &mut Io)>;

struct Place {
    id: SourceId,
    source: Box<dyn Source>,
    hot: bool,
    touched: bool,
    watch: Option<(WatchId, Owner)>,
    stopped: Option<Stopped>,
}

/// A worker, as messages see it.
pub struct Worker {
    handle: WorkerHandle,
    io: Io,
    places: Vec<Option<Place>>,
    /// Sources it ever took on.
    added: u32,
    hot: Vec<SourceId>,
    touched: Vec<SourceId>,
    stopping: Vec<SourceId>,
    polling: Polling,
    disk_waits: DiskWaits,
    /// It sleeps for a disk: hot sources' clients notify, and are to stop it.
    sleeps_hot: bool,
    ledger: Arc<Ledger>,
    completions: Vec<Completion>,
    finished: Vec<Finished>,
    sigbus_hits: u32,
    bell_rang: bool,
    ending: bool,
}

/// A source that messages name: it may be gone.
fn find(places: &mut [Option<Place>], id: SourceId) -> Option<&mut Place> {
    let place = places.get_mut(id.place() as usize)?.as_mut()?;
    (place.id == id).then_some(place)
}

/// Submission queue entries per worker; more are submitted in several goes.
const RING_ENTRIES: u32 = 1024;

impl Worker {
    pub(crate) fn new(
        mailbox: Arc<Mailbox>,
        index: u32,
        poll: PollLimits,
        ledger: Arc<Ledger>,
    ) -> std::io::Result<Worker> {
        let handle = WorkerHandle {
            mailbox: mailbox.clone(),
            index,
        };
        ring::guard::guard_this_thread()?;
        let clock = ledger.clock().clone();
        let mut io = Io::new(Ring::new(RING_ENTRIES)?, handle.clone(), ledger.clone());
        let bell = RingFd::from(mailbox.bell().try_clone()?);
        // Listener 0 is the mailbox: see `Io::new`.
        io.ring.watch(Owner(0), 0, &bell);
        Ok(Worker {
            handle,
            io,
            places: Vec::new(),
            added: 0,
            hot: Vec::new(),
            touched: Vec::new(),
            stopping: Vec::new(),
            polling: Polling::new(poll, &clock),
            disk_waits: DiskWaits::new(&clock),
            sleeps_hot: false,
            ledger,
            completions: Vec::with_capacity(RING_ENTRIES as usize),
            finished: Vec::with_capacity(RING_ENTRIES as usize),
            sigbus_hits: guest_memory::sigbus::hits(),
            bell_rang: false,
            ending: false,
        })
    }

    /// A worker on the calling thread, whose turns the caller takes with [`Worker::turn_now`]: for benchmarks and
    /// tests that measure or order turns.
    ///
    /// # Errors
    /// When the kernel gives no io_uring.
    pub fn standalone() -> std::io::Result<Worker> {
        let ledger = Ledger::new(Clock::new());
        Worker::new(Mailbox::new()?, 0, PollLimit::Always.into(), ledger)
    }

    /// Whether sources that are added from now on record what their requests' stages take; they do unless told. Without
    /// that is what stamps are measured against.
    pub fn set_recording(&mut self, recording: bool) {
        self.io.recording = recording;
    }

    /// One turn without waiting; true when there was work in it.
    pub fn turn_now(&mut self) -> bool {
        self.turn(Wait::No).0
    }

    /// The worker's own address.
    pub fn handle(&self) -> &WorkerHandle {
        &self.handle
    }

    /// The context in which its sources run.
    pub fn io(&mut self) -> &mut Io {
        &mut self.io
    }

    /// A range of a disk was released: its changes that were set aside go on.
    pub(crate) fn unpark(&mut self, disk: u32) {
        self.io.unpark(disk, &mut self.finished);
    }

    /// What it counted.
    pub fn counters(&self) -> WorkerCounters {
        self.ledger.counters()
    }

    /// How many sources it owns.
    pub fn source_count(&self) -> usize {
        self.places.iter().flatten().count()
    }

    /// Takes a source on. `make` is given the place that the source will have; the source is looked at in the
    /// next turn, kick or no kick.
    ///
    /// # Errors
    /// What `make` returns.
    pub fn add<E>(
        &mut self,
        make: impl FnOnce(&mut Io, SourceId) -> Result<Box<dyn Source>, E>,
    ) -> Result<SourceId, E> {
        let free = self.places.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.places.push(None);
            self.places.len() - 1
        });
        let id = SourceId::new(index, self.added);
        self.added = self.added.wrapping_add(1);
        let mut source = make(&mut self.io, id)?;
        source.set_recording(self.io.recording);
        if let Some(record) = source.record() {
            self.ledger.register(record);
        }
        self.handle.mailbox.sources.fetch_add(1, Ordering::Relaxed);
        self.places[index] = Some(Place {
            id,
            source,
            hot: false,
            touched: false,
            watch: None,
            stopped: None,
        });
        self.rewatch(id);
        self.heat(id);
        Ok(id)
    }

    /// A source that this worker owns, if it is still there.
    pub fn source(&mut self, id: SourceId) -> Option<(&mut dyn Source, &mut Io)> {
        let place = find(&mut self.places, id)?;
        Some((&mut *place.source, &mut self.io))
    }

    /// Looks at a source in this turn, as if it had been kicked, and publishes it.
    pub fn wake(&mut self, id: SourceId) {
        if find(&mut self.places, id).is_some() {
            self.heat(id);
            self.touch(id);
        }
    }

    /// Watches a source's kick descriptor anew, after it has changed.
    pub fn rewatch(&mut self, id: SourceId) {
        let Some(place) = find(&mut self.places, id) else {
            return;
        };
        if let Some((watch, owner)) = place.watch.take() {
            self.io.ring.unwatch(watch);
            self.io.unlisten(owner);
        }
        if let Some(kick) = place.source.kick() {
            let owner = self.io.listen(Listener::Kick(id));
            let watch = self.io.ring.watch(owner, 0, &kick);
            place.watch = Some((watch, owner));
        }
    }

    /// Stops a source: it takes no new request, and when those in flight are answered it is handed to `stopped`.
    pub fn stop(&mut self, id: SourceId, stopped: impl FnOnce(Box<dyn Source>, &mut Io) + 'static) {
        let Some(place) = find(&mut self.places, id) else {
            return;
        };
        if place.stopped.is_some() {
            return;
        }
        place.source.stop();
        self.io.leave(id, &mut self.finished);
        place.stopped = Some(Box::new(stopped));
        self.stopping.push(id);
        self.touch(id);
    }

    /// Has every source close its handle on a disk that is being taken out of the process.
    pub fn let_go(&mut self, disk: &Arc<Disk>) {
        for place in self.places.iter_mut().flatten() {
            place.source.let_go(&mut self.io, disk);
        }
    }

    /// Forgets what sources of an export that is gone have measured.
    pub fn forget(&self, export: &str) {
        self.ledger.forget(export);
    }

    pub(crate) fn end(&mut self) {
        self.ending = true;
    }

    /// Turns until told to end.
    pub(crate) fn run(mut self) {
        let mut wait = Wait::No;
        while !self.ending {
            let (worked, noticed) = self.turn(wait);
            wait = self.next_wait(worked, noticed);
        }
        for place in self.places.iter_mut().flatten() {
            place.source.settle();
        }
        self.handle.mailbox.close();
    }

    /// One turn: whether there was work in it, and when it began.
    fn turn(&mut self, wait: Wait) -> (bool, Stamp) {
        let mut completions = std::mem::take(&mut self.completions);
        if let Err(error) = self.io.ring.turn(wait, &mut completions) {
            // Nothing that a peer does can cause this; without its ring a worker can serve nobody.
            panic!("io_uring_enter failed: {error}");
        }
        let noticed = self.io.now();
        if self.polling.slept() {
            self.polling.woke(noticed);
        }
        if std::mem::take(&mut self.sleeps_hot) {
            self.disarm_hot();
        }
        let mut worked = !completions.is_empty();
        for completion in completions.drain(..) {
            self.heard(completion, noticed);
        }
        self.completions = completions;
        if std::mem::take(&mut self.bell_rang) {
            self.run_messages();
        }
        self.check_memory();
        worked |= self.finish_reaped(noticed);
        worked |= self.drain_hot(noticed);
        self.publish_touched(noticed);
        self.take_out_stopped();
        if worked {
            self.ledger.turns.busy_turns.add(1);
        } else {
            self.ledger.turns.empty_turns.add(1);
        }
        (worked, noticed)
    }

    fn heard(&mut self, completion: Completion, noticed: Stamp) {
        let Some(listener) = self.io.listeners.get(completion.owner.0 as usize) else {
            return;
        };
        match *listener {
            Listener::Free => {}
            Listener::Disk(disk) => self.io.complete(disk, completion, &mut self.finished),
            Listener::Kick(id) => self.kicked(id, completion.more),
            Listener::Mailbox => self.bell_rang = true,
            Listener::Pace => self.io.pace(completion.token, &mut self.finished),
            Listener::Source(id) => {
                if let Some(Some(place)) = self.places.get_mut(id.place() as usize) {
                    place.source.completed(&mut self.io, completion, noticed);
                    self.touch(id);
                }
            }
        }
    }

    fn kicked(&mut self, id: SourceId, more: bool) {
        if let Some(Some(place)) = self.places.get_mut(id.place() as usize) {
            place.source.kicked();
        }
        self.heat(id);
        if !more {
            self.kick_lost(id);
        }
    }

    /// A kick that has hung up, or cannot be waited for, would ring without end if it were watched again.
    fn kick_lost(&mut self, id: SourceId) {
        if let Some(Some(place)) = self.places.get_mut(id.place() as usize) {
            if let Some((watch, owner)) = place.watch.take() {
                self.io.ring.unwatch(watch);
                self.io.unlisten(owner);
            }
            place.source.kick_lost();
            self.touch(id);
        }
    }

    fn run_messages(&mut self) {
        // The bell need not be read: its watch hears every ring, and one that comes now is heard next turn.
        for message in self.handle.mailbox.take() {
            message(self);
            self.ledger.turns.messages.add(1);
        }
    }

    fn check_memory(&mut self) {
        let hits = guest_memory::sigbus::hits();
        if hits != self.sigbus_hits {
            self.sigbus_hits = hits;
            for place in self.places.iter_mut().flatten() {
                place.source.memory_lost();
            }
        }
    }

    fn finish_reaped(&mut self, reaped: Stamp) -> bool {
        if self.finished.is_empty() {
            return false;
        }
        let mut finished = std::mem::take(&mut self.finished);
        self.io.pending -= finished.len();
        for Finished {
            tag,
            buffer,
            outcome,
        } in finished.drain(..)
        {
            let tag = Tag::unpack(tag);
            if let Some(Some(place)) = self.places.get_mut(tag.source.place() as usize) {
                place
                    .source
                    .finish(&mut self.io, tag.slot, buffer, outcome, reaped);
                self.touch(tag.source);
            }
        }
        self.finished = finished;
        true
    }

    fn drain_hot(&mut self, noticed: Stamp) -> bool {
        let mut worked = false;
        for index in 0..self.hot.len() {
            let id = self.hot[index];
            let Some(Some(place)) = self.places.get_mut(id.place() as usize) else {
                continue;
            };
            if place.source.ready(noticed) {
                place.source.drain(&mut self.io, noticed);
                worked = true;
                self.touch(id);
            }
        }
        worked
    }

    fn publish_touched(&mut self, noticed: Stamp) {
        for index in 0..self.touched.len() {
            let id = self.touched[index];
            if let Some(Some(place)) = self.places.get_mut(id.place() as usize) {
                place.touched = false;
                place.source.publish(&mut self.io);
                // It may have had no room for what came while it was full, and nobody kicks for that again.
                if !place.hot {
                    place.source.settle();
                    if place.source.ready(noticed) {
                        self.heat(id);
                    }
                }
            }
        }
        self.touched.clear();
    }

    fn take_out_stopped(&mut self) {
        let mut index = 0;
        while index < self.stopping.len() {
            let id = self.stopping[index];
            let slot = &mut self.places[id.place() as usize];
            if slot
                .as_ref()
                .is_some_and(|place| place.source.in_flight() > 0)
            {
                index += 1;
                continue;
            }
            self.stopping.swap_remove(index);
            self.hot.retain(|hot| *hot != id);
            let Some(mut place) = slot.take() else {
                continue;
            };
            self.handle.mailbox.sources.fetch_sub(1, Ordering::Relaxed);
            place.source.settle();
            place.source.closed(&mut self.io);
            self.io.left(id);
            if let Some(record) = place.source.record() {
                self.ledger.retire(&record);
            }
            if let Some((watch, owner)) = place.watch {
                self.io.ring.unwatch(watch);
                self.io.unlisten(owner);
            }
            if let Some(stopped) = place.stopped {
                stopped(place.source, &mut self.io);
            }
        }
    }

    #[inline]
    fn touch(&mut self, id: SourceId) {
        if let Some(Some(place)) = self.places.get_mut(id.place() as usize)
            && !place.touched
        {
            place.touched = true;
            self.touched.push(id);
        }
    }

    fn heat(&mut self, id: SourceId) {
        if let Some(Some(place)) = self.places.get_mut(id.place() as usize)
            && !place.hot
        {
            place.hot = true;
            place.source.disarm();
            self.hot.push(id);
        }
    }

    fn next_wait(&mut self, worked: bool, noticed: Stamp) -> Wait {
        self.polling.serves(!self.hot.is_empty());
        if worked {
            self.polling.worked(noticed);
            self.disk_waits.worked(noticed);
            if self.polling.is_on() {
                return Wait::No;
            }
        }
        // An empty turn took no time to speak of.
        let now = if worked { self.io.now() } else { noticed };
        if self.io.pending > 0 {
            return self.wait_for_disk(now);
        }
        if self.polling.idle(now) == Idle::Poll {
            std::hint::spin_loop();
            return Wait::No;
        }
        if self.arm_hot() {
            // They stay hot and armed: a kick too many costs less than a look too few.
            return Wait::No;
        }
        for id in self.hot.drain(..) {
            if let Some(Some(place)) = self.places.get_mut(id.place() as usize) {
                place.hot = false;
            }
        }
        self.ledger.turns.sleeps.add(1);
        self.polling.sleeping(now);
        Wait::Until(None)
    }

    /// Sources that are hot stay so: their clients are looked for again when the disk has completed, without a kick.
    #[inline]
    fn wait_for_disk(&mut self, now: Stamp) -> Wait {
        let waited = self.disk_waits.waited(now);
        let expected = self.disk_waits.expected();
        if self
            .polling
            .waits_for_disk(self.io.pending, expected, waited)
            == Idle::Poll
        {
            std::hint::spin_loop();
            return Wait::No;
        }
        self.sleeps_hot = true;
        if self.arm_hot() {
            return Wait::No;
        }
        self.ledger.turns.sleeps.add(1);
        Wait::Until(None)
    }

    /// Asks hot sources' clients for notifications; true when work came meanwhile.
    fn arm_hot(&mut self) -> bool {
        let mut raced = false;
        for id in &self.hot {
            if let Some(Some(place)) = self.places.get_mut(id.place() as usize) {
                place.source.settle();
                raced |= place.source.arm();
            }
        }
        raced
    }

    fn disarm_hot(&mut self) {
        for id in &self.hot {
            if let Some(Some(place)) = self.places.get_mut(id.place() as usize) {
                place.source.disarm();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;
    use std::rc::Rc;

    use backend::{Delay, Null, NullOptions, Submission};
    use disk::{IoOutcome, IoRequest};
    use guest_memory::IoBuffer;
    use rustix::event::{EventfdFlags, eventfd};
    use timeline::QueueRecord;

    use super::*;

    /// What was asked of a source.
    #[derive(Default)]
    struct Seen {
        settled: usize,
        armed: usize,
        disarmed: usize,
        kicked: usize,
        /// Work comes while it is armed.
        races: bool,
    }

    struct Client(Rc<RefCell<Seen>>, Option<RingFd>);

    impl Source for Client {
        fn ready(&mut self, _now: Stamp) -> bool {
            false
        }
        fn drain(&mut self, _io: &mut Io, _noticed: Stamp) {}
        fn finish(&mut self, _: &mut Io, _: u32, _: IoBuffer, _: IoOutcome, _: Stamp) {}
        fn publish(&mut self, _io: &mut Io) {}
        fn settle(&mut self) {
            self.0.borrow_mut().settled += 1;
        }
        fn arm(&mut self) -> bool {
            self.0.borrow_mut().armed += 1;
            self.0.borrow().races
        }
        fn disarm(&mut self) {
            self.0.borrow_mut().disarmed += 1;
        }
        fn in_flight(&self) -> usize {
            0
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

    /// A worker that polls, has a client, and knows that its disk takes about 60 microseconds.
    fn worker_that_waits() -> (Worker, Rc<RefCell<Seen>>) {
        worker_with(None)
    }

    fn worker_with(kick: Option<RingFd>) -> (Worker, Rc<RefCell<Seen>>) {
        let (clock, _) = Clock::simulated();
        let ledger = Ledger::new(clock);
        let mailbox = Mailbox::new().unwrap();
        let mut worker = Worker::new(mailbox, 0, PollLimit::Micros(50).into(), ledger).unwrap();
        let seen = Rc::new(RefCell::new(Seen::default()));
        let client = Client(seen.clone(), kick);
        let added = worker.add(|_, _| Ok::<Box<dyn Source>, ()>(Box::new(client)));
        assert!(added.is_ok());
        for wait in 0..1_000u64 {
            worker.disk_waits.waited(Stamp(wait));
            worker.disk_waits.worked(Stamp(wait + 60_000));
        }
        (worker, seen)
    }

    #[test]
    fn worker_that_waits_for_a_slow_disk_sleeps_with_notifications_on_and_then_polls_on() {
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
        // The disk completes; the client is looked for again without a kick.
        worker.io.pending = 0;
        worker.turn(Wait::No);
        assert_eq!(seen.borrow().disarmed, before + 1);
        assert_eq!(worker.next_wait(true, Stamp(66_000)), Wait::No);
        assert_eq!(worker.next_wait(false, Stamp(67_000)), Wait::No);
        assert_eq!(seen.borrow().armed, 1);
    }

    #[test]
    fn what_a_source_has_left_for_later_is_done_before_the_worker_sleeps_or_lets_go_of_it_or_ends()
    {
        let settled = |seen: &Rc<RefCell<Seen>>| std::mem::take(&mut seen.borrow_mut().settled);
        // It sleeps until a disk has completed.
        let (mut worker, seen) = worker_that_waits();
        worker.io.pending = 1;
        worker.next_wait(false, Stamp(5_000));
        assert_eq!(settled(&seen), 0, "it looks first");
        assert_eq!(worker.next_wait(false, Stamp(8_000)), Wait::Until(None));
        assert_eq!(settled(&seen), 1);
        // It sleeps until anything comes, and publishes a source that is not polled.
        worker.io.pending = 0;
        worker.next_wait(true, Stamp(900_000));
        worker.next_wait(false, Stamp(949_000));
        assert_eq!(settled(&seen), 0);
        assert_eq!(worker.next_wait(false, Stamp(999_000)), Wait::Until(None));
        assert_eq!(settled(&seen), 1);
        let id = worker.places[0].as_ref().map(|place| place.id).unwrap();
        worker.touch(id);
        worker.turn_now();
        assert_eq!(settled(&seen), 1);
        // It ends.
        worker.end();
        worker.run();
        assert_eq!(settled(&seen), 1);
        // It lets go of the source.
        let (mut worker, seen) = worker_that_waits();
        let id = worker.places[0].as_ref().map(|place| place.id).unwrap();
        worker.stop(id, |_, _| ());
        worker.turn_now();
        assert_eq!((settled(&seen), worker.source_count()), (1, 0));
    }

    #[test]
    fn how_long_a_disk_takes_says_nothing_of_how_soon_clients_come() {
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
    fn worker_does_not_sleep_when_work_comes_just_then() {
        let (mut worker, seen) = worker_that_waits();
        worker.io.pending = 1;
        seen.borrow_mut().races = true;
        assert_eq!(worker.next_wait(false, Stamp(1_000)), Wait::No);
        assert_eq!(worker.next_wait(false, Stamp(4_000)), Wait::No);
        assert_eq!(seen.borrow().armed, 1);
        let before = seen.borrow().disarmed;
        worker.turn(Wait::No);
        assert_eq!(seen.borrow().disarmed, before + 1);
    }

    #[test]
    fn every_kick_is_told_whether_its_client_is_hot_or_not() {
        let fd = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let kick = |fd: &std::os::fd::OwnedFd| {
            rustix::io::write(fd, &1u64.to_ne_bytes()).unwrap();
        };
        let mut worker = worker_with(Some(RingFd::from(fd.try_clone().unwrap())));
        let (worker, seen) = (&mut worker.0, &worker.1);
        worker.turn(Wait::No);
        assert_eq!(seen.borrow().kicked, 0, "it is hot because it is new");
        for kicks in 1..=3 {
            kick(&fd);
            worker.turn(Wait::Until(Some(std::time::Duration::from_secs(60))));
            assert_eq!(seen.borrow().kicked, kicks);
        }
        assert_eq!(seen.borrow().disarmed, 1, "it was hot all the time");
    }

    #[test]
    fn id_of_a_source_that_is_gone_finds_nobody_though_another_has_its_place() {
        let mut worker = Worker::standalone().unwrap();
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
            worker.turn_now();
        };
        stop(&mut worker, first);
        let second = add(&mut worker);
        assert_eq!(first.place(), second.place());
        assert!(worker.source(first).is_none() && worker.source(second).is_some());
        worker.wake(first);
        worker.rewatch(first);
        stop(&mut worker, first);
        assert_eq!((*gone.borrow(), worker.source_count()), (1, 2));
        stop(&mut worker, second);
        assert_eq!((*gone.borrow(), worker.source_count()), (2, 1));
        assert!(worker.source(other).is_some());
    }

    /// A tag says in its highest bits whether it is a change that is counted. A worker takes on a source for each queue that
    /// starts and each connection that is made: there is no end to their number.
    #[test]
    fn range_is_granted_when_its_changes_have_ended_and_no_sooner_however_many_sources_there_were()
    {
        let slow = Delay::new(
            Arc::new(Null::create(NullOptions::default()).unwrap()),
            std::time::Duration::from_millis(5),
        );
        let disk = Arc::new(Disk::new("d", None, Arc::new(slow)).unwrap());
        let mut worker = Worker::standalone().unwrap();
        let handle = worker.io.open(&disk).unwrap();
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
                submit(&mut worker, &IoRequest::read(0, 4096), id);
                // It ends while the write is in flight.
                std::thread::sleep(std::time::Duration::from_millis(3));
                submit(&mut worker, &IoRequest::write(0, 4096), id);
                let (grant, granted) = std::sync::mpsc::channel();
                disk.gate()
                    .acquire(0, 4096, move |lease| drop(grant.send(lease)));
                let mut writes = true;
                while writes {
                    worker.turn_now();
                    writes = worker.io.pending > 0;
                    let early = writes && granted.try_recv().is_ok();
                    assert!(!early, "while a write is in flight, source {nth}");
                }
                worker.turn_now();
                assert!(granted.try_recv().is_ok(), "never, source {nth}");
            }
            worker.stop(id, |_, _| ());
            worker.turn_now();
        }
    }
}
