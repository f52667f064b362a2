//! One thread that keeps its slots full: reap, record, submit anew, publish, a batch at a time.
//!
//! A [`Crew`] is given its devices and streams, and gives back what it measured. A slot belongs to one stream (one clone of a
//! job) for good. In the steady state nothing is allocated, nothing locked and the clock is read once per turn.
//! A request's time runs from the turn in which it was made until the turn in which it was seen.

mod log;
mod stream;

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::thread::Thread;
use std::time::Duration;

use anyhow::{Result, bail};
use latency::{Clock, Stamp};

pub use log::{LogEntry, Logger};
pub use stream::{Moments, Stream, StreamResult, Tally};

use crate::driver::{Ask, Device, Done, Seed};

/// What all threads of a phase and whoever watches them share.
#[derive(Debug, Default)]
pub struct Shared {
    /// End now.
    pub stop: AtomicBool,
    /// Requests so far, of all threads.
    pub ios: AtomicU64,
    /// Bytes so far.
    pub bytes: AtomicU64,
    /// A device is gone: it will answer nothing any more.
    pub gone: AtomicBool,
    /// Threads that have done what is measured, and do what follows.
    pub measured: AtomicUsize,
    /// Who watches, and is woken when one more has.
    pub watcher: Option<Thread>,
}

/// How long, for one phase.
#[derive(Clone, Copy, Debug)]
pub struct Window {
    /// Nothing counts before.
    pub ramp: Duration,
    /// Nothing is started later, counted from the ramp's end.
    pub runtime: Option<Duration>,
}

/// How often a thread looks up from its work.
const TICK: Duration = Duration::from_millis(20);
/// Looks at an empty ring between two looks at the clock.
const EMPTY_LOOKS: u32 = 64;
/// What was started must end within this.
const DRAIN: Duration = Duration::from_secs(15);

/// A request in flight.
#[derive(Clone, Copy, Debug)]
struct Slot {
    stream: u16,
    device: u16,
    ask: Ask,
    offset: u64,
    length: u32,
    started: Stamp,
    busy: bool,
    /// Its discard was carried out, and the same blocks are to be written.
    trimmed: bool,
}

/// What one thread found out.
#[derive(Debug, Default)]
pub struct CrewResult {
    /// Per stream.
    pub streams: Vec<StreamResult>,
    /// Kicks in the measured time.
    pub kicks: u64,
    /// Interrupts in the measured time.
    pub interrupts: u64,
    /// CPU time of the thread until the end of the measured time, what came before that included.
    pub cpu_ns: u64,
}

/// When a thread looks up from its work, and when what is measured begins and ends.
struct Schedule {
    tick: u64,
    runtime: Option<Duration>,
    ramp_end: Option<Stamp>,
    end: Option<Stamp>,
    /// Look up then.
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

    /// Is this the first look after the ramp? Then what is measured begins now, however late a thread that was not let run
    /// notices it, and is as long as it is to be.
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

/// One thread's work.
pub struct Crew {
    devices: Vec<Device>,
    streams: Vec<Stream>,
    slots: Vec<Slot>,
    /// Slots that wait for their stream's rate.
    parked: Vec<u16>,
    clock: Clock,
    polling: bool,
    in_flight: usize,
    /// Content on its way to or from a device, for verification.
    scratch: Vec<u8>,
}

impl Crew {
    /// Starts the devices on this thread.
    pub fn new(
        seeds: Vec<Seed>,
        streams: Vec<Stream>,
        clock: Clock,
        polling: bool,
    ) -> Result<Crew> {
        let mut slots = Vec::new();
        for (stream, index) in streams.iter().zip(0u16..) {
            let slot = Slot {
                stream: index,
                device: 0,
                ask: Ask::Read,
                offset: 0,
                length: 0,
                started: Stamp(0),
                busy: false,
                trimmed: false,
            };
            slots.extend(std::iter::repeat_n(slot, usize::from(stream.depth())));
        }
        let largest = streams.iter().map(Stream::largest).max().unwrap_or(0);
        Ok(Crew {
            devices: seeds.into_iter().map(Seed::start).collect::<Result<_>>()?,
            parked: Vec::with_capacity(slots.len()),
            scratch: vec![0; largest as usize],
            streams,
            slots,
            clock,
            polling,
            in_flight: 0,
        })
    }

    /// Runs to the end of the window, or of the streams, or until told to stop.
    pub fn run(mut self, window: Window, shared: &Shared) -> Result<CrewResult> {
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
        let mut told = (0, 0);
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
                    // Without a pause the line that the device is about to write is torn from it again and again.
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
            // Rarely: the schedule, and whoever watches.
            self.tell(shared, &mut told);
            if schedule.ends_ramp(&self.clock, now) {
                signals = self.signals();
                self.streams.iter_mut().for_each(|stream| stream.begin(now));
                told = (0, 0);
            }
            schedule.set_next(now);
            let over = schedule.is_over(now) || shared.stop.load(Ordering::Relaxed);
            if over || (self.in_flight == 0 && self.parked.is_empty()) {
                break;
            }
        }
        self.tell(shared, &mut told);
        self.end(signals, cpu_before, shared)
    }

    /// Closes the books at the end of what is measured; then lets requests in flight end, and reads back what has to be.
    fn end(mut self, before: (u64, u64), cpu_before: u64, shared: &Shared) -> Result<CrewResult> {
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
        Ok(CrewResult {
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

    fn tell(&self, shared: &Shared, told: &mut (u64, u64)) {
        let (ios, bytes) = self
            .streams
            .iter()
            .map(Stream::counted)
            .fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        shared.ios.fetch_add(ios - told.0, Ordering::Relaxed);
        shared.bytes.fetch_add(bytes - told.1, Ordering::Relaxed);
        *told = (ios, bytes);
    }

    fn publish(&mut self) -> Result<()> {
        for device in &mut self.devices {
            device.publish()?;
        }
        Ok(())
    }

    /// Nothing has come back.
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
        // With a rate to keep the thread wakes by itself.
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

    /// Puts a slot's next request on its way, if its stream has one.
    #[inline]
    fn start(&mut self, index: u16, now: Stamp) -> Result<()> {
        let slot = &mut self.slots[usize::from(index)];
        let stream = &mut self.streams[usize::from(slot.stream)];
        if std::mem::take(&mut slot.trimmed) {
            stream.follow_up();
            let (device, offset, length) = (slot.device, slot.offset, slot.length);
            self.put(index, device, Ask::Write, offset, length);
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
        if ask == Ask::Write && stream.verifies() {
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
            bail!("the device answered slot {} twice", done.slot);
        }
        slot.busy = false;
        self.in_flight -= 1;
        let stream = &mut self.streams[usize::from(slot.stream)];
        stream.note(slot.ask, slot.started, now);
        if !self.devices[usize::from(slot.device)].settled(done).ok {
            stream.failed(slot.ask, slot.offset, slot.length);
            return Ok(());
        }
        slot.trimmed = slot.ask == Ask::Trim && stream.writes_after_trims();
        let ticks = now.since(slot.started);
        stream.count(slot.ask, slot.offset, slot.length, ticks, now);
        if stream.verifies() {
            match slot.ask {
                Ask::Write => stream.written(slot.device, slot.offset, slot.length),
                Ask::Read if stream.checks_reads() => {
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

    /// Waits for all that is in flight, without counting it.
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
                    bail!("the device is gone");
                }
                if now > until {
                    bail!(
                        "the device did not answer {} requests within {} s",
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

    /// What follows the measured part: flushes, and reading back what was written.
    fn tidy_up(&mut self, stopped: bool, shared: &Shared) -> Result<()> {
        for index in 0..self.streams.len() {
            let first = self
                .slots
                .iter()
                .position(|s| usize::from(s.stream) == index);
            let Some(first) = first else { continue };
            if self.streams[index].flushes_at_end() {
                for device in 0..self.devices.len() {
                    self.one(first as u16, device as u16, Ask::Flush, shared)?;
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
                self.put(slot, device, Ask::Read, offset, length);
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

    fn put(&mut self, index: u16, device: u16, ask: Ask, offset: u64, length: u32) {
        let slot = &mut self.slots[usize::from(index)];
        (slot.device, slot.ask, slot.offset, slot.length) = (device, ask, offset, length);
        slot.started = self.clock.now();
        slot.busy = true;
        self.in_flight += 1;
        self.devices[usize::from(device)].submit(index, ask, offset, length);
    }

    /// One request by itself, of no data.
    fn one(&mut self, slot: u16, device: u16, ask: Ask, shared: &Shared) -> Result<()> {
        self.put(slot, device, ask, 0, 0);
        self.publish()?;
        self.drain(shared)
    }
}

/// CPU time of this thread in nanoseconds.
pub(crate) fn cpu_time() -> u64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}
