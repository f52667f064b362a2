//! A worker: the loop, the iteration, and the operations available to messages.
//!
//! One iteration: submit the queued operations and reap (at most one io_uring_enter), process kicks and messages, pass
//! finished I/Os to their sources, drain every hot source, publish every touched one. A source is *hot* while it is polled.
//! A worker without work arms its hot sources and sleeps in io_uring. After a sleep for a disk they are still hot, except
//! those that have been quiet.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bdev::{Disk, Finished};
use latency::{Clock, Stamp};
use uring::{Completion, Owner, Ring, RunDelayReader, Wait, WatchId};

use crate::disks::{Io, Listener, Tag};
use crate::ledger::Ledger;
use crate::mailbox::{Mailbox, WorkerHandle};
use crate::polling::{Idle, PollLimit, PollLimits, Polling};
use crate::source::{Source, SourceId};
use crate::time_use::TimeUse;

/// Per-worker counters since start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerCounters {
    /// Iterations with work.
    pub busy_iterations: u64,
    /// Polling iterations without work.
    pub empty_iterations: u64,
    /// Number of sleeps.
    pub sleeps: u64,
    /// Number of executed messages.
    pub messages: u64,
    /// Time in iterations with work, in nanoseconds.
    pub work_ns: u64,
    /// Time of polling that found work, in nanoseconds.
    pub poll_found_ns: u64,
    /// Time of polling that found no work, in nanoseconds.
    pub poll_empty_ns: u64,
    /// Time asleep, in nanoseconds.
    pub sleep_ns: u64,
    /// Number of times that polling was suspended because another thread wanted the CPU.
    pub poll_suspensions: u64,
}

type Stopped = Box<dyn FnOnce(Box<dyn Source>, &mut Io)>;

struct SourceSlot {
    id: SourceId,
    source: Box<dyn Source>,
    hot: bool,
    /// Start of the last iteration that drained the source.
    drained_at: Stamp,
    touched: bool,
    watch: Option<(WatchId, Owner)>,
    stopped: Option<Stopped>,
}

impl SourceSlot {
    /// Returns true if no request is expected soon, and a kick announces the next one.
    #[inline]
    fn is_quiet(&self, now: Stamp, quiet: u64) -> bool {
        now.since(self.drained_at) > quiet && self.watch.is_some() && self.source.in_flight() == 0
    }
}

/// Sources that the worker visits in an iteration.
#[derive(Default)]
struct Marked {
    /// They have had work, and are drained in each iteration.
    hot: Vec<SourceId>,
    /// They have pushed answers that are not published.
    touched: Vec<SourceId>,
    /// They are removed as soon as they have no requests in flight.
    stopping: Vec<SourceId>,
    /// [`QUIET`] in ticks.
    quiet: u64,
}

/// A worker, as visible to messages.
pub struct Worker {
    handle: WorkerHandle,
    io: Io,
    slots: Vec<Option<SourceSlot>>,
    /// Total number of sources added.
    added: u32,
    marked: Marked,
    polling: Polling,
    run_delay: RunDelayReader,
    time_use: TimeUse,
    /// The worker sleeps for a disk: hot sources have notifications enabled, which must be disabled again.
    sleeps_hot: bool,
    ledger: Arc<Ledger>,
    completions: Vec<Completion>,
    finished: Vec<Finished>,
    sigbus_hits: u32,
    bell_rang: bool,
    lifecycle: Lifecycle,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lifecycle {
    Running,
    /// The worker ends when it has no sources and no disks.
    Retiring,
    Ending,
}

/// Returns the place of a source, unless it was removed.
fn find(slots: &mut [Option<SourceSlot>], id: SourceId) -> Option<&mut SourceSlot> {
    let slot = slots.get_mut(id.index() as usize)?.as_mut()?;
    (slot.id == id).then_some(slot)
}

/// Initial capacity for the completions and I/Os of one iteration.
const BATCH: usize = 1024;

/// Time without requests after which a hot source becomes cold when the worker sleeps for a disk.
const QUIET: Duration = Duration::from_millis(1);

impl Worker {
    pub(crate) fn new(
        mailbox: Arc<Mailbox>,
        index: u32,
        poll: PollLimits,
        ring: Ring,
        ledger: Arc<Ledger>,
    ) -> std::io::Result<Worker> {
        let handle = WorkerHandle {
            mailbox: mailbox.clone(),
            index,
        };
        uring::guard::guard_this_thread()?;
        let clock = ledger.clock().clone();
        let mut io = Io::new(ring, handle.clone(), ledger.clone());
        // Listener 0 is the mailbox; see `Io::new`.
        io.ring.watch_event(Owner(0), 0, mailbox.bell())?;
        Ok(Worker {
            handle,
            io,
            slots: Vec::new(),
            added: 0,
            marked: Marked {
                quiet: clock.ticks(QUIET),
                ..Marked::default()
            },
            polling: Polling::new(poll, &clock),
            run_delay: RunDelayReader::open(),
            time_use: TimeUse::new(&clock),
            sleeps_hot: false,
            ledger,
            completions: Vec::with_capacity(BATCH),
            finished: Vec::with_capacity(BATCH),
            sigbus_hits: guest_memory::sigbus::signal_count(),
            bell_rang: false,
            lifecycle: Lifecycle::Running,
        })
    }

    /// Creates a worker on the calling thread, which must also have created the ring. The caller runs its iterations with
    /// [`Worker::iterate_once`]. For benchmarks and tests that measure or order iterations.
    ///
    /// # Errors
    /// If no file descriptor is available for the mailbox.
    pub fn standalone(ring: Ring, clock: Clock) -> std::io::Result<Worker> {
        let mailbox = Mailbox::new(ring.event()?);
        Worker::new(
            mailbox,
            0,
            PollLimit::Always.into(),
            ring,
            Ledger::new(clock),
        )
    }

    /// Sets whether sources added from now on record the stages of their requests; the default is true. False serves to
    /// measure the cost of stamps.
    pub fn set_recording(&mut self, recording: bool) {
        self.io.recording = recording;
    }

    /// Runs one iteration without waiting. Returns true if there was work.
    pub fn iterate_once(&mut self) -> bool {
        self.iterate(Wait::No).0
    }

    /// Returns the worker's own handle.
    pub fn handle(&self) -> &WorkerHandle {
        &self.handle
    }

    /// Returns the context of its sources.
    pub fn io(&mut self) -> &mut Io {
        &mut self.io
    }

    /// Continues deferred I/Os after a range of a disk was released.
    pub(crate) fn resume_deferred(&mut self, disk: u32) {
        self.io.resume_deferred(disk, &mut self.finished);
    }

    /// Starts a read-modify-write after its range lock was granted.
    pub(crate) fn unaligned_granted(&mut self, disk: u32, number: u64, lock: bdev::RangeLock) {
        self.io
            .unaligned_granted(disk, number, lock, &mut self.finished);
    }

    /// Returns the worker's counters.
    pub fn counters(&self) -> WorkerCounters {
        self.ledger.counters()
    }

    /// Returns the number of sources.
    pub fn source_count(&self) -> usize {
        self.slots.iter().flatten().count()
    }

    /// Adds a source. `make` receives the id of the new source. A polled source is polled in the next iteration even without
    /// a kick.
    ///
    /// # Errors
    /// Errors of `make`.
    pub fn add<E>(
        &mut self,
        make: impl FnOnce(&mut Io, SourceId) -> Result<Box<dyn Source>, E>,
    ) -> Result<SourceId, E> {
        let free = self.slots.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.slots.push(None);
            self.slots.len() - 1
        });
        let id = SourceId::new(index, self.added);
        self.added = self.added.wrapping_add(1);
        let mut source = make(&mut self.io, id)?;
        source.set_recording(self.io.recording);
        if let Some(record) = source.record() {
            self.ledger.register(record);
        }
        self.handle.mailbox.sources.fetch_add(1, Ordering::Relaxed);
        self.slots[index] = Some(SourceSlot {
            id,
            source,
            hot: false,
            drained_at: Stamp(0),
            touched: false,
            watch: None,
            stopped: None,
        });
        self.rewatch(id);
        self.heat(id);
        Ok(id)
    }

    /// Returns a source of this worker, unless it was removed.
    pub fn source(&mut self, id: SourceId) -> Option<(&mut dyn Source, &mut Io)> {
        let slot = find(&mut self.slots, id)?;
        Some((&mut *slot.source, &mut self.io))
    }

    /// Publishes a source in this iteration. A polled source is also polled, as if it had been kicked.
    pub fn wake(&mut self, id: SourceId) {
        if find(&mut self.slots, id).is_some() {
            self.heat(id);
            self.touch(id);
        }
    }

    /// Watches a source's kick descriptor again after it has changed.
    pub fn rewatch(&mut self, id: SourceId) {
        let Some(slot) = find(&mut self.slots, id) else {
            return;
        };
        if let Some((watch, owner)) = slot.watch.take() {
            self.io.ring.unwatch(watch);
            self.io.unlisten(owner);
        }
        if let Some(kick) = slot.source.kick() {
            let owner = self.io.listen(Listener::Kick(id));
            let watch = self.io.ring.watch(owner, 0, &kick);
            slot.watch = Some((watch, owner));
        }
    }

    /// Stops a source: it accepts no new requests, and is passed to `stopped` when those in flight are answered.
    pub fn stop(&mut self, id: SourceId, stopped: impl FnOnce(Box<dyn Source>, &mut Io) + 'static) {
        let Some(slot) = find(&mut self.slots, id) else {
            return;
        };
        if slot.stopped.is_some() {
            return;
        }
        slot.source.stop();
        self.io.end_source(id, &mut self.finished);
        slot.stopped = Some(Box::new(stopped));
        self.marked.stopping.push(id);
        self.touch(id);
    }

    /// Makes every source close its handle on a disk that is being removed from the process.
    pub fn close_disk(&mut self, disk: &Arc<Disk>) {
        for slot in self.slots.iter_mut().flatten() {
            slot.source.close_disk(&mut self.io, disk);
        }
        self.io.fail_waiting(disk, &mut self.finished);
    }

    /// Submits the failed and waiting I/Os of a disk again.
    pub fn resume_disk(&mut self, disk: &Arc<Disk>) {
        self.io.resume_disk(disk, &mut self.finished);
    }

    /// Drops the measurements of a removed export's sources.
    pub fn forget(&self, export: &str) {
        self.ledger.forget(export);
    }

    pub(crate) fn end(&mut self) {
        self.lifecycle = Lifecycle::Ending;
    }

    /// Ends the worker once it has no sources and no disks.
    pub(crate) fn retire(&mut self) {
        if self.lifecycle == Lifecycle::Running {
            self.lifecycle = Lifecycle::Retiring;
        }
    }

    pub(crate) fn run(mut self) {
        let mut wait = Wait::No;
        while self.lifecycle != Lifecycle::Ending {
            let (worked, noticed) = self.iterate(wait);
            wait = self.next_wait(worked, noticed);
        }
        for slot in self.slots.iter_mut().flatten() {
            slot.source.flush_notifications();
        }
        self.handle.mailbox.close();
    }

    /// Runs one iteration. Returns whether there was work, and the start time.
    fn iterate(&mut self, wait: Wait) -> (bool, Stamp) {
        let mut completions = std::mem::take(&mut self.completions);
        if let Err(error) = self.io.ring.enter(wait, &mut completions) {
            // A peer cannot cause this, and a worker without its ring cannot serve anything.
            panic!("io_uring_enter failed: {error}");
        }
        let noticed = self.io.now();
        self.time_use.woke(noticed, &self.ledger.iterations.time);
        let slept = self.polling.slept();
        if slept {
            self.polling.woke(noticed);
        }
        if std::mem::take(&mut self.sleeps_hot) {
            self.disarm_hot();
        }
        let mut worked = !completions.is_empty();
        let is_single = completions.len() == 1;
        for completion in completions.drain(..) {
            self.handle_completion(completion, noticed);
        }
        self.completions = completions;
        let bell_rang = std::mem::take(&mut self.bell_rang);
        // Messages alone are no activity: the watchdog sends some to idle workers.
        if slept && worked && !(is_single && bell_rang) {
            self.ledger.activity.report();
        }
        if bell_rang {
            self.run_messages();
        }
        self.check_memory();
        worked |= self.finish_reaped(noticed);
        worked |= self.drain_hot(noticed);
        self.publish_touched(noticed);
        if self.io.reclaims_borrowed() {
            self.reclaim_borrowed();
        }
        self.take_out_stopped();
        if worked {
            self.ledger.iterations.busy_iterations.add(1);
        } else {
            self.ledger.iterations.empty_iterations.add(1);
        }
        (worked, noticed)
    }

    fn handle_completion(&mut self, completion: Completion, noticed: Stamp) {
        let Some(listener) = self.io.listeners.get(completion.owner.0 as usize) else {
            return;
        };
        match *listener {
            Listener::Free => {}
            Listener::Disk(disk) => self.io.complete(disk, completion, &mut self.finished),
            Listener::Retry(disk) => self.io.attach_again(disk, &mut self.finished),
            Listener::Kick(id) => self.kicked(id, completion.more),
            Listener::Mailbox => self.bell_rang = true,
            Listener::Pace => self.io.pace(completion.token, &mut self.finished),
            Listener::Late => self.io.cancel_late(completion.token),
            Listener::Source(id) => {
                if let Some(Some(slot)) = self.slots.get_mut(id.index() as usize) {
                    slot.source.completed(&mut self.io, completion, noticed);
                    self.touch(id);
                }
            }
        }
    }

    fn kicked(&mut self, id: SourceId, more: bool) {
        if let Some(Some(slot)) = self.slots.get_mut(id.index() as usize) {
            slot.source.kicked();
        }
        self.heat(id);
        if !more {
            self.kick_lost(id);
        }
    }

    /// Unwatches a kick descriptor that has hung up or cannot be polled; a watch would fire continuously.
    fn kick_lost(&mut self, id: SourceId) {
        if let Some(Some(slot)) = self.slots.get_mut(id.index() as usize) {
            if let Some((watch, owner)) = slot.watch.take() {
                self.io.ring.unwatch(watch);
                self.io.unlisten(owner);
            }
            slot.source.kick_lost();
            self.touch(id);
        }
    }

    fn run_messages(&mut self) {
        // The event need not be read: the watch reports every signal, and one that arrives now is processed in the next
        // iteration.
        for message in self.handle.mailbox.take() {
            message(self);
            self.ledger.iterations.messages.add(1);
        }
    }

    fn check_memory(&mut self) {
        let hits = guest_memory::sigbus::signal_count();
        if hits != self.sigbus_hits {
            self.sigbus_hits = hits;
            for slot in self.slots.iter_mut().flatten() {
                slot.source.memory_lost();
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
            if let Some(Some(slot)) = self.slots.get_mut(tag.source.index() as usize) {
                slot.source
                    .finish(&mut self.io, tag.slot, buffer, outcome, reaped);
                self.touch(tag.source);
            }
        }
        self.finished = finished;
        true
    }

    fn drain_hot(&mut self, noticed: Stamp) -> bool {
        let mut worked = false;
        for index in 0..self.marked.hot.len() {
            let id = self.marked.hot[index];
            let Some(Some(slot)) = self.slots.get_mut(id.index() as usize) else {
                continue;
            };
            if slot.source.ready(noticed) {
                slot.drained_at = noticed;
                slot.source.drain(&mut self.io, noticed);
                worked = true;
                self.touch(id);
            }
        }
        worked
    }

    fn publish_touched(&mut self, noticed: Stamp) {
        for index in 0..self.marked.touched.len() {
            let id = self.marked.touched[index];
            if let Some(Some(slot)) = self.slots.get_mut(id.index() as usize) {
                slot.touched = false;
                slot.source.publish(&mut self.io);
                // The source may have lacked room for requests while it was full, and no further kick announces them.
                if !slot.hot {
                    slot.source.flush_notifications();
                    if slot.source.ready(noticed) {
                        self.heat(id);
                    }
                }
            }
        }
        self.marked.touched.clear();
    }

    /// Makes sources return the data that they send from disks' memory; most of it has been sent by now.
    #[cold]
    fn reclaim_borrowed(&mut self) {
        let held = self.io.held_memory();
        let mut still = false;
        if !held.is_empty() {
            for slot in self.slots.iter_mut().flatten() {
                still |= slot.source.return_borrowed(&mut self.io, &held);
            }
        }
        self.io.finish_reclaim(still);
    }

    fn take_out_stopped(&mut self) {
        let mut index = 0;
        while index < self.marked.stopping.len() {
            let id = self.marked.stopping[index];
            let slot = &mut self.slots[id.index() as usize];
            if slot
                .as_ref()
                .is_some_and(|slot| slot.source.in_flight() > 0)
            {
                index += 1;
                continue;
            }
            self.marked.stopping.swap_remove(index);
            self.marked.hot.retain(|hot| *hot != id);
            let Some(mut slot) = slot.take() else {
                continue;
            };
            self.handle.mailbox.sources.fetch_sub(1, Ordering::Relaxed);
            slot.source.flush_notifications();
            slot.source.closed(&mut self.io);
            self.io.remove_source(id);
            if let Some(record) = slot.source.record() {
                self.ledger.retire(&record);
            }
            if let Some((watch, owner)) = slot.watch {
                self.io.ring.unwatch(watch);
                self.io.unlisten(owner);
            }
            if let Some(stopped) = slot.stopped {
                stopped(slot.source, &mut self.io);
            }
        }
    }

    #[inline]
    fn touch(&mut self, id: SourceId) {
        if let Some(Some(slot)) = self.slots.get_mut(id.index() as usize)
            && !slot.touched
        {
            slot.touched = true;
            self.marked.touched.push(id);
        }
    }

    fn heat(&mut self, id: SourceId) {
        if let Some(Some(slot)) = self.slots.get_mut(id.index() as usize)
            && !slot.hot
            && slot.source.is_polled()
        {
            slot.hot = true;
            slot.source.disarm();
            self.marked.hot.push(id);
        }
    }

    fn next_wait(&mut self, worked: bool, noticed: Stamp) -> Wait {
        let time = &self.ledger.iterations.time;
        self.time_use.iterated(worked, noticed, time);
        self.polling.serves(!self.marked.hot.is_empty());
        if worked {
            self.polling.worked(noticed);
            if self.io.pending > 0 {
                self.polling.submits(noticed);
            }
            if self.polling.is_on() {
                return Wait::No;
            }
        }
        let is_retiring = self.lifecycle == Lifecycle::Retiring;
        if is_retiring && self.source_count() == 0 && !self.io.has_disks() {
            self.end();
            return Wait::No;
        }
        // The duration of an empty iteration is negligible.
        let now = if worked { self.io.now() } else { noticed };
        if self.io.pending > 0 {
            return self.wait_for_disk(now, worked);
        }
        if self.polling.idle(now) == Idle::Poll {
            return self.poll(now);
        }
        if self.arm_hot() {
            // The sources stay hot and armed: an extra kick is cheaper than a missed check.
            return Wait::No;
        }
        for id in self.marked.hot.drain(..) {
            if let Some(Some(slot)) = self.slots.get_mut(id.index() as usize) {
                slot.hot = false;
            }
        }
        self.polling.sleeping(now);
        self.sleep(now)
    }

    /// Counts a sleep that begins.
    fn sleep(&mut self, now: Stamp) -> Wait {
        let counters = &self.ledger.iterations;
        counters.sleeps.add(1);
        self.time_use.sleeping(now, &counters.time);
        Wait::Until(None)
    }

    /// Continues polling. Reads the run delay when it is due.
    #[inline]
    fn poll(&mut self, now: Stamp) -> Wait {
        if self.polling.is_reading_due(now)
            && self.polling.read_run_delay(now, self.run_delay.read())
        {
            self.ledger.iterations.poll_suspensions.add(1);
        }
        std::hint::spin_loop();
        Wait::No
    }

    /// Chooses the wait for a disk. Hot sources stay hot, except quiet ones: they are polled without a kick when the disk has
    /// completed.
    #[inline]
    fn wait_for_disk(&mut self, now: Stamp, worked: bool) -> Wait {
        // A timer starts the I/Os that wait for limits, so polling does not make them faster.
        let pending = self.io.pending.saturating_sub(self.io.limited.get());
        if self.polling.waits_for_disk(pending, now) == Idle::Poll {
            if worked {
                // The next iteration submits the I/Os before it polls.
                self.polling.begin_later();
            }
            return self.poll(now);
        }
        self.sleeps_hot = true;
        if self.arm_hot() {
            return Wait::No;
        }
        self.cool_quiet(now);
        self.polling.sleeping_for_disk(now);
        self.sleep(now)
    }

    /// Makes quiet sources cold after [`Worker::arm_hot`] has enabled their notifications. Otherwise each sleep for a disk
    /// would enable and disable these again. A kick makes a source hot.
    fn cool_quiet(&mut self, now: Stamp) {
        let (slots, quiet) = (&mut self.slots, self.marked.quiet);
        self.marked.hot.retain(|id| {
            let Some(Some(slot)) = slots.get_mut(id.index() as usize) else {
                return true;
            };
            slot.hot = !slot.is_quiet(now, quiet);
            slot.hot
        });
    }

    /// Enables notifications of hot sources. Returns true if work arrived in the meantime.
    fn arm_hot(&mut self) -> bool {
        let mut raced = false;
        for id in &self.marked.hot {
            if let Some(Some(slot)) = self.slots.get_mut(id.index() as usize) {
                slot.source.flush_notifications();
                raced |= slot.source.arm();
            }
        }
        raced
    }

    fn disarm_hot(&mut self) {
        for id in &self.marked.hot {
            if let Some(Some(slot)) = self.slots.get_mut(id.index() as usize) {
                slot.source.disarm();
            }
        }
    }
}

#[cfg(test)]
mod tests;
