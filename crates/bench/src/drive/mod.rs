//! Driver thread: reaps, records, submits and publishes requests in batches, with all slots in use.
//!
//! A [`ThreadWork`] owns its devices and streams and returns its measurements. A slot belongs to one stream (one clone of a job) for its
//! lifetime. In the steady state there are no allocations and no locks, and the clock is read once per turn. The time of a request is
//! from the turn that created it to the turn that saw its completion.

mod log;
mod stream;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::Duration;

use anyhow::{Result, bail};
use latency::{Clock, Stamp};

pub use log::{LogEntry, Logger};
pub use stream::{Moments, Stream, StreamResult, Tally};

use crate::driver::{Device, Done, IoKind, PendingQueue};

/// State shared by all threads of a phase and its watcher.
#[derive(Debug, Default)]
pub struct Shared {
    /// Request to stop now.
    pub stop: AtomicBool,
    /// Requests so far, of all threads.
    pub ios: AtomicU64,
    /// Bytes so far.
    pub bytes: AtomicU64,
    /// A device has disconnected: no more completions will arrive.
    pub gone: AtomicBool,
    /// Number of threads that have finished the measured part.
    pub measured: AtomicUsize,
    /// Thread to wake when `measured` changes.
    pub watcher: Option<Thread>,
}

/// Duration of one phase.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Ramp time, which is not measured.
    pub ramp: Duration,
    /// Measured time from the end of the ramp. No request is started later.
    pub runtime: Option<Duration>,
}

/// Interval at which a thread checks the schedule.
const TICK: Duration = Duration::from_millis(20);
/// Polls of an empty ring between two reads of the clock.
const EMPTY_LOOKS: u32 = 64;
/// Timeout for requests in flight at the end.
const DRAIN: Duration = Duration::from_secs(15);

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct Slot {
    stream: u16,
    device: u16,
    ask: IoKind,
    offset: u64,
    length: u32,
    started: Stamp,
    busy: bool,
    /// The discard is complete, and a write of the same blocks follows.
    trimmed: bool,
}

/// Results of one thread.
#[derive(Debug, Default)]
pub struct ThreadResult {
    /// Results per stream.
    pub streams: Vec<StreamResult>,
    /// Kicks in the measured time.
    pub kicks: u64,
    /// Interrupts in the measured time.
    pub interrupts: u64,
    /// CPU time of the thread until the end of the measured time, including the time before it.
    pub cpu_ns: u64,
}

/// Schedule of a thread: start and end of the measured part, and the next check.
struct Schedule {
    tick: u64,
    runtime: Option<Duration>,
    ramp_end: Option<Stamp>,
    end: Option<Stamp>,
    /// Time of the next check.
    next: Stamp,
}

impl Schedule {
    fn new(clock: &Clock, window: Window, begin: Stamp) -> Schedule {
        let after = |time: Duration| Stamp(begin.0 + clock.ticks(time));
        let mut schedule = Schedule {
            tick: clock.ticks(TICK),
            runtime: window.runtime,
            ramp_end: (!window.ramp.is_zero()).then(|| after(window.ramp)),
            end: window.runtime.map(|time| after(window.ramp + time)),
            next: begin,
        };
        schedule.set_next(begin);
        schedule
    }

    /// Returns true at the first check after the ramp. The measured part begins now and has its full length, even if the thread was
    /// scheduled late.
    fn ends_ramp(&mut self, clock: &Clock, now: Stamp) -> bool {
        if self.ramp_end.is_none_or(|at| now < at) {
            return false;
        }
        self.ramp_end = None;
        self.end = self.runtime.map(|time| Stamp(now.0 + clock.ticks(time)));
        true
    }

    fn set_next(&mut self, now: Stamp) {
        let tick = Stamp(now.0 + self.tick);
        let hands = [self.end, self.ramp_end].into_iter().flatten();
        self.next = hands.fold(tick, Stamp::min);
    }

    fn is_over(&self, now: Stamp) -> bool {
        self.end.is_some_and(|end| now >= end)
    }
}

/// Work of one thread.
pub struct ThreadWork {
    devices: Vec<Device>,
    streams: Vec<Stream>,
    slots: Vec<Slot>,
    /// Slots delayed by the rate of their stream.
    parked: Vec<u16>,
    clock: Clock,
    polling: bool,
    in_flight: usize,
    /// Buffer for content to be written or verified.
    scratch: Vec<u8>,
}

impl ThreadWork {
    /// Starts the devices on this thread.
    pub fn new(
        seeds: Vec<PendingQueue>,
        streams: Vec<Stream>,
        clock: Clock,
        polling: bool,
    ) -> Result<ThreadWork> {
        let mut slots = Vec::new();
        for (stream, index) in streams.iter().zip(0u16..) {
            let slot = Slot {
                stream: index,
                device: 0,
                ask: IoKind::Read,
                offset: 0,
                length: 0,
                started: Stamp(0),
                busy: false,
                trimmed: false,
            };
            slots.extend(std::iter::repeat_n(slot, usize::from(stream.depth())));
        }
        let largest = streams.iter().map(Stream::largest).max().unwrap_or(0);
        Ok(ThreadWork {
            devices: seeds
                .into_iter()
                .map(PendingQueue::start)
                .collect::<Result<_>>()?,
            parked: Vec::with_capacity(slots.len()),
            scratch: vec![0; largest as usize],
            streams,
            slots,
            clock,
            polling,
            in_flight: 0,
        })
    }

    /// Runs until the window or the streams end, or until a stop is requested.
    pub fn run(mut self, window: Window, shared: &Shared) -> Result<ThreadResult> {
        let cpu_before = cpu_time();
        let begin = self.clock.now();
        let mut schedule = Schedule::new(&self.clock, window, begin);
        for stream in &mut self.streams {
            stream.begin(begin);
        }
        for slot in 0..self.slots.len() as u16 {
            self.start(slot, begin)?;
        }
        self.publish()?;
        let mut signals = (0, 0);
        let mut reported = (0, 0);
        let mut done: Vec<Done> = Vec::with_capacity(self.slots.len());
        let mut empty = 0u32;
        loop {
            done.clear();
            for device in &mut self.devices {
                device.reap(&mut done)?;
            }
            if done.is_empty() {
                empty += 1;
                if self.polling && empty < EMPTY_LOOKS && self.parked.is_empty() {
                    // Without a pause, the polling repeatedly takes the cache line from the device that is about to write it.
                    std::hint::spin_loop();
                    continue;
                }
                empty = 0;
                self.idle()?;
            }
            let now = self.clock.now();
            for one in &done {
                self.finish(*one, now)?;
                self.start(one.slot, now)?;
            }
            if !self.parked.is_empty() {
                self.unpark(now)?;
            }
            self.publish()?;
            if now < schedule.next && self.in_flight > 0 {
                continue;
            }
            // Update the schedule and the watcher at intervals.
            self.publish_progress(shared, &mut reported);
            if schedule.ends_ramp(&self.clock, now) {
                signals = self.signals();
                self.streams.iter_mut().for_each(|stream| stream.begin(now));
                reported = (0, 0);
            }
            schedule.set_next(now);
            let over = schedule.is_over(now) || shared.stop.load(Ordering::Relaxed);
            if over || (self.in_flight == 0 && self.parked.is_empty()) {
                break;
            }
        }
        self.publish_progress(shared, &mut reported);
        self.end(signals, cpu_before, shared)
    }

    /// Ends the measurement, waits for requests in flight, and reads data back for verification.
    fn end(mut self, before: (u64, u64), cpu_before: u64, shared: &Shared) -> Result<ThreadResult> {
        let now = self.clock.now();
        self.streams.iter_mut().for_each(|stream| stream.end(now));
        let after = self.signals();
        let cpu_ns = cpu_time().saturating_sub(cpu_before);
        shared.measured.fetch_add(1, Ordering::Relaxed);
        if let Some(watcher) = &shared.watcher {
            watcher.unpark();
        }
        self.drain(shared)?;
        let stopped = shared.stop.load(Ordering::Relaxed);
        self.tidy_up(stopped, shared)?;
        Ok(ThreadResult {
            streams: self
                .streams
                .into_iter()
                .map(|stream| stream.result(&self.clock))
                .collect(),
            kicks: after.0 - before.0,
            interrupts: after.1 - before.1,
            cpu_ns,
        })
    }

    fn signals(&mut self) -> (u64, u64) {
        let each = self.devices.iter_mut().map(Device::signals);
        each.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1))
    }

    /// Adds the requests and bytes since the last call to the shared counters.
    fn publish_progress(&self, shared: &Shared, reported: &mut (u64, u64)) {
        let (ios, bytes) = self
            .streams
            .iter()
            .map(Stream::counted)
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        shared.ios.fetch_add(ios - reported.0, Ordering::Relaxed);
        shared
            .bytes
            .fetch_add(bytes - reported.1, Ordering::Relaxed);
        *reported = (ios, bytes);
    }

    fn publish(&mut self) -> Result<()> {
        for device in &mut self.devices {
            device.publish()?;
        }
        Ok(())
    }

    /// Waits after a poll without completions.
    fn idle(&mut self) -> Result<()> {
        if self.in_flight == 0 {
            if !self.parked.is_empty() && !self.polling {
                std::thread::sleep(Duration::from_micros(50));
            }
            return Ok(());
        }
        if self.polling {
            return Ok(());
        }
        // With a rate limit the thread wakes up by itself.
        let limit = if self.parked.is_empty() {
            Duration::from_secs(3600)
        } else {
            Duration::from_micros(100)
        };
        match &mut self.devices[..] {
            [only] => only.wait(limit),
            _ => Ok(()),
        }
    }

    /// Submits the next request of a slot, if its stream has one.
    #[inline]
    fn start(&mut self, index: u16, now: Stamp) -> Result<()> {
        let slot = &mut self.slots[usize::from(index)];
        let stream = &mut self.streams[usize::from(slot.stream)];
        if std::mem::take(&mut slot.trimmed) {
            stream.follow_up();
            let (device, offset, length) = (slot.device, slot.offset, slot.length);
            self.put(index, device, IoKind::Write, offset, length);
            return Ok(());
        }
        if !stream.may_start(now) {
            if stream.is_waiting() {
                self.parked.push(index);
            }
            return Ok(());
        }
        let Some((ask, io)) = stream.next_request() else {
            return Ok(());
        };
        (slot.ask, slot.offset, slot.length) = (ask, io.offset, io.length);
        slot.device = stream.device();
        slot.started = now;
        slot.busy = true;
        let device = &mut self.devices[usize::from(slot.device)];
        if ask == IoKind::Write && stream.verifies() {
            let data = &mut self.scratch[..io.length as usize];
            stream.fill(slot.device, io.offset, data);
            device.write_data(index, data);
            slot.started = self.clock.now();
        }
        device.submit(index, ask, io.offset, io.length);
        self.in_flight += 1;
        Ok(())
    }

    #[inline]
    fn finish(&mut self, done: Done, now: Stamp) -> Result<()> {
        let slot = &mut self.slots[usize::from(done.slot)];
        if !slot.busy {
            bail!("the device completed slot {} twice", done.slot);
        }
        slot.busy = false;
        self.in_flight -= 1;
        let stream = &mut self.streams[usize::from(slot.stream)];
        stream.note(slot.ask, slot.started, now);
        if !self.devices[usize::from(slot.device)].settled(done).ok {
            stream.failed(slot.ask, slot.offset, slot.length);
            return Ok(());
        }
        slot.trimmed = slot.ask == IoKind::Trim && stream.writes_after_trims();
        let ticks = now.since(slot.started);
        stream.count(slot.ask, slot.offset, slot.length, ticks, now);
        if stream.verifies() {
            match slot.ask {
                IoKind::Write => stream.written(slot.device, slot.offset, slot.length),
                IoKind::Read if stream.checks_reads() => {
                    let data = &mut self.scratch[..slot.length as usize];
                    self.devices[usize::from(slot.device)].read_data(done.slot, data);
                    stream.check(slot.device, slot.offset, data);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn unpark(&mut self, now: Stamp) -> Result<()> {
        for _ in 0..self.parked.len() {
            let Some(slot) = self.parked.pop() else {
                break;
            };
            let before = self.parked.len();
            self.start(slot, now)?;
            if self.parked.len() > before {
                break;
            }
        }
        Ok(())
    }

    /// Waits for all requests in flight, without counting them.
    fn drain(&mut self, shared: &Shared) -> Result<()> {
        let until = Stamp(self.clock.now().0 + self.clock.ticks(DRAIN));
        let mut done = Vec::with_capacity(self.slots.len());
        while self.in_flight > 0 {
            done.clear();
            for device in &mut self.devices {
                device.reap(&mut done)?;
            }
            let now = self.clock.now();
            for one in &done {
                self.finish(*one, now)?;
            }
            if done.is_empty() {
                if shared.gone.load(Ordering::Relaxed) {
                    bail!("the device has disconnected");
                }
                if now > until {
                    bail!(
                        "the device did not complete {} requests within {} s",
                        self.in_flight,
                        DRAIN.as_secs()
                    );
                }
                match &mut self.devices[..] {
                    [only @ Device::File(_)] => only.wait(TICK)?,
                    _ => std::thread::yield_now(),
                }
            }
        }
        Ok(())
    }

    /// Runs the part after the measurement: flushes and verification reads.
    fn tidy_up(&mut self, stopped: bool, shared: &Shared) -> Result<()> {
        for index in 0..self.streams.len() {
            let first = self
                .slots
                .iter()
                .position(|s| usize::from(s.stream) == index);
            let Some(first) = first else { continue };
            if self.streams[index].flushes_at_end() {
                for device in 0..self.devices.len() {
                    self.one(first as u16, device as u16, IoKind::Flush, shared)?;
                }
            }
            if !self.streams[index].reads_back() || stopped {
                continue;
            }
            for device in 0..self.devices.len() as u16 {
                self.read_back(index, first as u16, device, shared)?;
            }
        }
        Ok(())
    }

    fn read_back(&mut self, stream: usize, first: u16, device: u16, shared: &Shared) -> Result<()> {
        let mut runs = self.streams[stream].runs(device).into_iter();
        let depth = self.streams[stream].depth();
        loop {
            let mut any = false;
            for (slot, (offset, length)) in
                (first..first + depth).zip(runs.by_ref().take(depth.into()))
            {
                self.put(slot, device, IoKind::Read, offset, length);
                any = true;
            }
            if !any || shared.stop.load(Ordering::Relaxed) || self.streams[stream].is_over() {
                return Ok(());
            }
            self.streams[stream].begin_check();
            self.publish()?;
            self.drain(shared)?;
            self.streams[stream].end_check();
        }
    }

    fn put(&mut self, index: u16, device: u16, ask: IoKind, offset: u64, length: u32) {
        let slot = &mut self.slots[usize::from(index)];
        (slot.device, slot.ask, slot.offset, slot.length) = (device, ask, offset, length);
        slot.started = self.clock.now();
        slot.busy = true;
        self.in_flight += 1;
        self.devices[usize::from(device)].submit(index, ask, offset, length);
    }

    /// Runs a single request without data.
    fn one(&mut self, slot: u16, device: u16, ask: IoKind, shared: &Shared) -> Result<()> {
        self.put(slot, device, ask, 0, 0);
        self.publish()?;
        self.drain(shared)
    }
}

/// Returns the CPU time of this thread in nanoseconds.
pub(crate) fn cpu_time() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
