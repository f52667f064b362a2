//! A virtqueue and its device model, owned by one worker. The methods are the hops of a request, in order.
//!
//! `drain` processes a batch: pops all chains (**popped**), parses them (**parsed**) and submits them (**submitted**). I/Os that complete
//! synchronously are **reaped** there; pending ones end in `finish`. `publish` answers all completed requests (**answered**), stores the
//! used index once and interrupts once (**notified**). For a polling driver, the check of its interrupt suppression is deferred
//! (`interrupt_moderation`). `waiting` holds requests that need several passes. `breach` ends a request or the queue if the driver breaks
//! the rules, with one log line.

mod batch_size;
mod breach;
mod change;
mod dirty_log;
mod interrupt_moderation;
mod measure;
mod resume;
mod waiting;

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;

use bdev::{Disk, Submission};
use block::{IoError, IoOutcome};
use guest_memory::{GuestView, IoBuffer};
use latency::{Clock, PartCounts, QueueRecord, Stage, Stamp, Stamps};
use reactor::{DiskHandle, Io, Source, SourceId, Tag};
use request_engine::{Measurement, Pace, Transport, prefetch_following};
use uring::{RingFd, Signal};
use virtqueue::{DeviceQueue, QueueError};

use crate::device::{BuiltQueue, OnBroken, QueueControl, QueueSetup};
use crate::protocol::{ParsedRequest, Protocol, Request, Step};
use crate::slots::{self, Fill, Slots};
use batch_size::{BATCH, BatchSize};
use breach::REFUSED_BYTES;
use dirty_log::QueueLog;
use interrupt_moderation::InterruptModeration;
use measure::Sorting;

/// Bytes after which a batch ends, so that other sources of the worker do not wait. A RAM disk copies as much in 1 or 2 ms.
const BATCH_BYTES: u64 = 8 << 20;

/// From this batch size on, separate response cache lines are prefetched while popping. Parsing takes a third of the time of popping:
/// prefetches there would exceed the outstanding lines of a core.
const PREFETCH_RESPONSES_MIN: usize = 16;

/// Progress of a request.
enum Progress {
    /// Ready to be answered.
    Done,
    /// Waiting for an I/O completion, an event or a later iteration.
    Pending,
}

/// A virtqueue with its device model `P`.
pub struct Queue<P: Protocol> {
    id: SourceId,
    index: u16,
    ring: Ring,
    protocol: P,
    slots: Slots<P::State>,
    batch: Batch,
    measurement: Measurement,
    sorting: Sorting,
    signals: Signals,
    log: Option<QueueLog>,
    lifecycle: Lifecycle,
    failures: Failures,
}

/// The ring in guest memory.
struct Ring {
    queue: DeviceQueue,
    view: GuestView,
    moderation: InterruptModeration,
}

/// Slots between two hops, and the size of batches.
struct Batch {
    size: BatchSize,
    /// Slots of the batch that is being drained.
    slots: Vec<u16>,
    /// Slots of the batch with pending I/O.
    pending: Vec<u16>,
    /// Slots to be answered at the end of the iteration.
    done: Vec<u16>,
    /// Slots that yielded, with their next step, in order of continuation.
    yielded: VecDeque<(u16, Step)>,
    pace: Pace,
    /// Response cache lines were prefetched when the batch was popped.
    responses_prefetched: bool,
}

/// Descriptors and the callback of the front end.
struct Signals {
    kick: Option<RingFd>,
    call: Option<Signal>,
    error: Option<Signal>,
    on_broken: OnBroken,
}

/// Stage of a queue's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lifecycle {
    /// Pops no chains until the front end enables the queue.
    Disabled,
    Enabled,
    /// Pops no more chains; requests in flight are answered.
    Stopping,
    /// The ring is not accessed any more.
    Broken,
}

impl Lifecycle {
    fn new(is_enabled: bool) -> Lifecycle {
        match is_enabled {
            true => Lifecycle::Enabled,
            false => Lifecycle::Disabled,
        }
    }

    #[inline(always)]
    fn is_broken(self) -> bool {
        matches!(self, Lifecycle::Broken)
    }

    /// Enables or disables a queue that neither stops nor is broken.
    fn enable(&mut self, is_enabled: bool) {
        if matches!(self, Lifecycle::Disabled | Lifecycle::Enabled) {
            *self = Lifecycle::new(is_enabled);
        }
    }

    /// Stops a queue that is not broken.
    fn stop(&mut self) {
        if !self.is_broken() {
            *self = Lifecycle::Stopping;
        }
    }

    /// Marks the queue as broken. Returns false if it was broken before.
    fn set_broken(&mut self) -> bool {
        let before = std::mem::replace(self, Lifecycle::Broken);
        !before.is_broken()
    }
}

/// Handling of failed requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failures {
    /// Failed requests are answered. No in-flight region records unanswered requests.
    Untracked,
    /// Failed requests are answered. An in-flight region records unanswered requests.
    Tracked,
    /// Failed requests stay unanswered in the in-flight region, for the next device.
    Retained,
}

impl<P: Protocol> Queue<P> {
    /// Creates a queue from a front end's parameters; `id` is its place in its worker.
    ///
    /// # Errors
    /// Fails if the ring is not in guest memory, or if its parameters are invalid.
    pub fn new(
        setup: QueueSetup,
        id: SourceId,
        clock: &Clock,
        protocol: P,
    ) -> Result<Queue<P>, QueueError> {
        let size = setup.config.size;
        let mut ring = DeviceQueue::new(setup.config, &setup.memory)?;
        let failures = match setup.inflight {
            Some(_) => Failures::Tracked,
            None => Failures::Untracked,
        };
        resume::resume(&mut ring, setup.inflight, &setup.labels)?;
        let depth = usize::from(size);
        let probe_id_base = probes::queue(setup.labels.worker, id.index());
        let mut queue = Queue {
            id,
            index: setup.index,
            ring: Ring {
                queue: ring,
                view: GuestView::new(setup.memory),
                moderation: InterruptModeration::new(clock),
            },
            protocol,
            slots: Slots::new(size),
            batch: Batch {
                size: BatchSize::new(),
                slots: Vec::with_capacity(BATCH),
                pending: Vec::with_capacity(BATCH),
                done: Vec::with_capacity(depth),
                yielded: VecDeque::new(),
                pace: Pace::default(),
                responses_prefetched: false,
            },
            measurement: Measurement::new(setup.labels, depth, probe_id_base),
            sorting: Sorting::default(),
            signals: Signals {
                kick: setup.kick.map(RingFd::from),
                call: setup.call.map(Signal::new),
                error: setup.error.map(Signal::new),
                on_broken: setup.on_broken,
            },
            log: None,
            lifecycle: Lifecycle::new(setup.enabled),
            failures,
        };
        queue.set_log(setup.log);
        Ok(queue)
    }

    /// Returns the queue in the form that workers and control planes use.
    pub fn built(self) -> BuiltQueue {
        fn control<P: Protocol>(source: &mut dyn Source) -> Option<&mut dyn QueueControl> {
            let queue = (source as &mut dyn Any).downcast_mut::<Queue<P>>()?;
            Some(queue)
        }
        BuiltQueue {
            source: Box::new(self),
            control: control::<P>,
        }
    }

    /// Returns the device type's part, for events and task management.
    pub fn protocol(&mut self) -> &mut P {
        &mut self.protocol
    }

    /// Hop 2: pops chains from the ring into slots.
    fn pop_batch(&mut self) {
        let polls = self.measurement.timeline.counters().polls.get();
        let available = usize::from(self.ring.queue.waiting());
        let batch_size = self.batch.size.next(polls, available);
        let limit = BATCH.min(self.protocol.batch_limit()).min(batch_size);
        self.batch.responses_prefetched =
            P::SEPARATE_RESPONSE && available.min(limit) >= PREFETCH_RESPONSES_MIN;
        let mut bytes = 0;
        while self.batch.slots.len() < limit && bytes < BATCH_BYTES {
            let pop = |chain: &mut _| self.ring.queue.pop(&self.ring.view, chain);
            match self.slots.fill(self.batch.responses_prefetched, pop) {
                Fill::Filled(index, more) => {
                    bytes += more;
                    self.batch.slots.push(index);
                }
                Fill::Empty | Fill::Full => return,
                Fill::DuplicateId(id) => {
                    return self.end(&format_args!("chain {id} is already in flight"));
                }
                Fill::Failed(index, error) => match self.refuse_popped(index, error) {
                    true => bytes += REFUSED_BYTES,
                    false => return,
                },
            }
        }
    }

    /// Hop 3: parses each request.
    fn parse_batch(&mut self, io: &mut Io) {
        self.protocol.refresh();
        let mut batch = std::mem::take(&mut self.batch.slots);
        let mut refused = false;
        for &index in &batch {
            let tag = self.tag(index);
            let slot = self.slots.get(index);
            if P::SEPARATE_RESPONSE && !self.batch.responses_prefetched {
                slot.request.chain.buffer.prefetch_second_half();
            }
            match self.protocol.parse(io, &mut slot.request, tag) {
                Ok(ParsedRequest {
                    step,
                    operation,
                    bytes,
                }) => {
                    (slot.operation, slot.bytes) = (operation, bytes);
                    slot.was_pending = false;
                    slot.offset = slot.request.job.io.offset;
                    if !matches!(step, Step::Data) {
                        slot.set_first_step(step);
                    }
                }
                Err(malformed) => {
                    self.refuse_malformed(index, malformed);
                    refused = true;
                }
            }
        }
        if refused {
            batch.retain(|index| self.slots.get(*index).stage != slots::Stage::Free);
        }
        self.batch.slots = batch;
        if P::MULTIPLE_DISKS && (self.protocol.disk_changed() || self.sorting.is_mixed) {
            self.sort_by_disk();
        }
    }

    #[inline(always)]
    fn tag(&self, index: u16) -> Tag {
        Tag {
            source: self.id,
            slot: u32::from(index),
        }
    }

    /// Hop 4: submits each request's I/O to its disk. Those that complete synchronously are done.
    #[inline(always)]
    fn submit_batch<const MIXED: bool>(&mut self, io: &mut Io, stamps: Stamps) {
        let mut counts = PartCounts {
            part: self.sorting.part,
            ..PartCounts::default()
        };
        let mut batch = std::mem::take(&mut self.batch.slots);
        let done_before = self.batch.done.len();
        let mut done = 0;
        // Number of requests with a successor that is worth a prefetch hint.
        let prefetched = match io.wants_prefetch() {
            true => batch.len().saturating_sub(1),
            false => 0,
        };
        for at in 0..batch.len() {
            let index = batch[at];
            if at < prefetched {
                self.prefetch_next(io, &batch[at + 1..]);
            }
            let slot = self.slots.get(index);
            let operation = slot.operation as usize;
            if MIXED {
                self.measurement.turn_to(&mut counts, slot.part);
            }
            match self.run_first_step(io, index) {
                Progress::Done => {
                    // Stored in the part of `batch` that is already submitted.
                    batch[done] = index;
                    done += 1;
                    counts.at_once[operation] += 1;
                }
                Progress::Pending => {
                    self.batch.pending.push(index);
                    counts.pending[operation] += 1;
                }
            }
        }
        self.batch.done.extend_from_slice(&batch[..done]);
        batch.clear();
        self.batch.slots = batch;
        let now = self.measurement.stamp(io);
        let synchronous = self.batch.done.get(done_before..).unwrap_or(&[]);
        let id = |index: &u16| self.measurement.probe_id(u32::from(*index));
        if !synchronous.is_empty() {
            probes::submitted(|| synchronous.iter().map(id));
            probes::reaped(|| synchronous.iter().map(id));
        }
        if !self.batch.pending.is_empty() {
            probes::submitted(|| self.batch.pending.iter().map(id));
            // Pending requests are submitted now, synchronous ones were submitted when they were parsed.
            let mut stamps = stamps;
            stamps.mark(Stage::Submitted, now);
            for index in self.batch.pending.drain(..) {
                let slot = self.slots.get(index);
                slot.was_pending = true;
                slot.noticed = stamps.at(Stage::Noticed);
                slot.popped = stamps.at(Stage::Popped);
                slot.parsed = stamps.at(Stage::Parsed);
                slot.submitted = now;
            }
        }
        // The stamps of synchronous requests already have the time of their submission: that of parsing.
        self.measurement.submitted(&counts, stamps, now, now);
    }

    /// Executes a request's first step: usually an I/O, and usually the only step.
    #[inline(always)]
    fn run_first_step(&mut self, io: &mut Io, index: u16) -> Progress {
        let tag = self.tag(index);
        let slot = self.slots.get(index);
        if slot.stage == slots::Stage::Parsed {
            return self.run_other_step(io, index);
        }
        let request = &mut slot.request;
        let job = &request.job;
        match io.submit(job.disk, &job.io, &mut request.chain.buffer, tag) {
            Submission::Pending => Progress::Pending,
            // Separate from failures, so that no error is copied.
            Submission::Done(Ok(())) => match self.protocol.resume_data(io, request, Ok(())) {
                Step::Answer => Progress::Done,
                step => self.advance(io, index, step),
            },
            Submission::Done(Err(error)) => self.fail_first_step(io, index, error),
        }
    }

    #[cold]
    fn fail_first_step(&mut self, io: &mut Io, index: u16, error: IoError) -> Progress {
        let request = &mut self.slots.get(index).request;
        match self.protocol.resume_data(io, request, Err(error)) {
            Step::Answer => Progress::Done,
            step => self.advance(io, index, step),
        }
    }

    /// Sends prefetch hints for the requests after the present one. The job of a slot with another first step is stale; its hint is useless
    /// but harmless.
    #[inline(never)]
    fn prefetch_next(&mut self, io: &mut Io, following: &[u16]) {
        let slots = &mut self.slots;
        prefetch_following(io, following, |_, index| Some(slots.get(index).request.job));
    }

    #[inline(never)]
    fn run_other_step(&mut self, io: &mut Io, index: u16) -> Progress {
        let step = self.slots.get(index).step.take();
        self.advance(io, index, step.unwrap_or(Step::Data))
    }

    /// Executes a request's steps until one has to wait.
    #[inline(never)]
    fn advance(&mut self, io: &mut Io, index: u16, mut step: Step) -> Progress {
        let tag = self.tag(index);
        let slot = self.slots.get(index);
        loop {
            let (submitted, scratch, bytes) = match step {
                Step::Scratch(_) | Step::Data if self.batch.pace.is_exhausted() => {
                    self.batch.yielded.push_back((index, step));
                    return Progress::Pending;
                }
                Step::Answer | Step::Finished => {
                    slot.stage = slots::Stage::Done;
                    return Progress::Done;
                }
                Step::AnswerAndDetach => {
                    slot.stage = slots::Stage::Detaching;
                    return Progress::Done;
                }
                Step::Wait => {
                    slot.stage = slots::Stage::Waiting;
                    return Progress::Pending;
                }
                Step::Data => {
                    slot.stage = slots::Stage::Data;
                    let Request { chain, job, .. } = &mut slot.request;
                    let buffer = &mut chain.buffer;
                    let bytes = buffer.len();
                    (io.submit(job.disk, &job.io, buffer, tag), None, bytes)
                }
                Step::Scratch(mut scratch) => {
                    slot.stage = slots::Stage::Scratch;
                    let (job, bytes) = (slot.request.job, scratch.len());
                    let submitted = io.submit(job.disk, &job.io, &mut scratch, tag);
                    (submitted, Some(scratch), bytes)
                }
            };
            let Submission::Done(outcome) = submitted else {
                return Progress::Pending;
            };
            self.batch.pace.count(bytes, scratch.is_some());
            let scratch = scratch.map(|scratch| *scratch);
            step = self
                .protocol
                .resume(io, &mut slot.request, outcome, scratch);
        }
    }

    /// Continues a request with a step after its first one.
    fn continue_with(&mut self, io: &mut Io, index: u16, step: Step) {
        if let Progress::Done = self.advance(io, index, step) {
            self.batch.done.push(index);
        }
    }

    /// Hop 6: writes the responses and returns the chains.
    #[inline(always)]
    fn answer_done<const MIXED: bool, const LOGGED: bool>(&mut self) {
        let is_broken = self.lifecycle.is_broken();
        for &index in &self.batch.done {
            self.slots
                .answer_and_release(index, &self.ring.view, |slot| {
                    let answer = self.protocol.answer(&mut slot.request);
                    let bytes = u64::from(slot.bytes);
                    slot.good = answer.good;
                    if MIXED {
                        self.measurement.timeline.select(slot.part);
                    }
                    // The stamps are in a cache line that synchronous requests do not touch.
                    let pending_stamps = match slot.was_pending {
                        true => Some((slot.noticed, slot.submitted)),
                        false => None,
                    };
                    self.measurement
                        .answered(slot.operation, bytes, answer.good, pending_stamps);
                    if LOGGED && let Some(log) = &self.log {
                        log.mark(&slot.request.chain);
                    }
                    if !is_broken {
                        let chain = &slot.request.chain;
                        self.ring
                            .queue
                            .push(chain.id, chain.descriptors, answer.written);
                    }
                    if slot.stage == slots::Stage::Detaching {
                        self.protocol.detach(&mut slot.request);
                    }
                });
        }
    }

    /// Fires the probes of hops 6 and 7.
    #[inline]
    fn fire_probes(&mut self) {
        let (done, slots) = (&self.batch.done, &mut self.slots);
        let id = |index: &u16| self.measurement.probe_id(u32::from(*index));
        probes::answered(|| done.iter().map(|index| (id(index), slots.get(*index).good)));
        probes::notified(|| done.iter().map(id));
    }

    fn accepts(&self) -> bool {
        self.lifecycle == Lifecycle::Enabled && self.protocol.wants_chains()
    }
}

impl<P: Protocol> Transport for Queue<P> {
    #[inline(always)]
    fn measurement(&mut self) -> &mut Measurement {
        &mut self.measurement
    }

    #[inline(always)]
    fn requests(&self) -> usize {
        self.slots.in_flight()
    }

    #[inline(always)]
    fn pop(&mut self) {
        probes::noticed(self.measurement.probe_id_base);
        self.pop_batch();
    }

    #[inline(always)]
    fn parse(&mut self, io: &mut Io) {
        let probe_id_base = self.measurement.probe_id_base;
        if !self.batch.slots.is_empty() {
            let (batch, slots) = (&self.batch.slots, &mut self.slots);
            probes::popped(u32::from(self.index), || {
                batch.iter().map(|index| {
                    let id = probes::id(probe_id_base, u32::from(*index));
                    (id, u64::from(slots.get(*index).request.chain.id))
                })
            });
        }
        self.parse_batch(io);
        self.check_suppression_if_due(self.measurement.noticed);
    }

    #[inline(always)]
    fn submit(&mut self, io: &mut Io, stamps: Stamps) {
        let probe_id_base = self.measurement.probe_id_base;
        if !self.batch.slots.is_empty() {
            let (batch, slots) = (&self.batch.slots, &mut self.slots);
            probes::parsed(|| {
                batch.iter().map(|index| {
                    let slot = slots.get(*index);
                    probes::Parsed {
                        id: probes::id(probe_id_base, u32::from(*index)),
                        operation: slot.operation as u64,
                        offset: slot.offset,
                        length: u64::from(slot.bytes),
                    }
                })
            });
        }
        if P::MULTIPLE_DISKS && self.sorting.is_mixed {
            self.submit_mixed(io, stamps);
        } else {
            self.submit_batch::<false>(io, stamps);
        }
        self.measurement.note_in_flight(self.slots.in_flight());
    }

    #[inline(always)]
    fn answer(&mut self, _io: &mut Io) -> bool {
        let is_logged = self.log.is_some();
        if is_logged {
            self.answer_logged();
        } else if P::MULTIPLE_DISKS && self.sorting.is_mixed {
            self.answer_mixed();
        } else {
            self.answer_done::<false, false>();
        }
        let is_wanted = self.publish_answers();
        if is_logged {
            self.end_logged();
        }
        self.protocol.answers_published();
        is_wanted
    }

    #[inline(always)]
    fn notify(&mut self, _io: &mut Io, is_needed: bool) -> bool {
        let interrupts = is_needed && self.signals.call.is_some();
        self.batch
            .size
            .published(interrupts && self.measurement.has_synchronous());
        if interrupts {
            self.interrupt_driver();
        }
        interrupts
    }

    #[cold]
    fn describe_slow(&mut self) {
        self.describe_answered();
    }
}

impl<P: Protocol> Source for Queue<P> {
    #[inline]
    fn ready(&mut self, now: Stamp) -> bool {
        let ready = self.accepts() && self.slots.has_free() && self.ring.queue.available() > 0
            || !self.batch.yielded.is_empty();
        if ready {
            self.ring.queue.prefetch_next(&self.ring.view);
            self.slots.prefetch_next();
        } else {
            self.measurement.timeline.counters().polls.add(1);
            self.check_suppression_if_due(now);
        }
        ready
    }

    fn drain(&mut self, io: &mut Io, noticed: Stamp) {
        self.measurement.noticed = noticed;
        if !self.batch.yielded.is_empty() {
            self.continue_yielded(io);
            if !self.accepts() {
                return;
            }
        }
        self.take_in(io, noticed);
    }

    fn finish(
        &mut self,
        io: &mut Io,
        slot: u32,
        buffer: IoBuffer,
        outcome: IoOutcome,
        reaped: Stamp,
    ) {
        (self.measurement.reaped, self.measurement.noticed) = (reaped, reaped);
        let Ok(index) = u16::try_from(slot) else {
            return;
        };
        if self.failures == Failures::Retained && outcome.is_err() {
            self.mark_chain(index);
            self.slots
                .answer_and_release(index, &self.ring.view, |_| ());
            return;
        }
        let id = self.measurement.probe_id(slot);
        probes::reaped(|| std::iter::once(id));
        let slot = self.slots.get(index);
        let scratch = if slot.stage == slots::Stage::Scratch {
            Some(buffer)
        } else {
            slot.request.chain.buffer = buffer;
            None
        };
        let step = self
            .protocol
            .resume(io, &mut slot.request, outcome, scratch);
        self.continue_with(io, index, step);
    }

    fn publish(&mut self, io: &mut Io) {
        self.publish_responses(io);
        if !self.batch.done.is_empty() {
            self.fire_probes();
        }
        if P::MULTIPLE_DISKS && !self.sorting.is_mixed {
            self.measurement.timeline.select(self.sorting.part);
        }
        self.batch.pace = Pace::default();
        self.batch.done.clear();
    }

    fn flush_notifications(&mut self) {
        self.check_suppression();
    }

    fn arm(&mut self) -> bool {
        if !self.batch.yielded.is_empty() {
            return true;
        }
        if !self.accepts() {
            return false;
        }
        // A driver without a kick eventfd is polled (vhost-user protocol, SET_VRING_KICK).
        if self.signals.kick.is_none() {
            return self.slots.has_free();
        }
        self.measurement.timeline.counters().sleeps.add(1);
        self.ring.queue.enable_notifications() && self.slots.has_free()
    }

    fn kicked(&mut self) {
        self.measurement.timeline.counters().kicks.add(1);
    }

    fn disarm(&mut self) {
        if !self.lifecycle.is_broken() {
            self.ring.queue.disable_notifications();
        }
    }

    fn in_flight(&self) -> usize {
        self.slots.in_flight()
    }

    fn kick(&self) -> Option<RingFd> {
        self.signals.kick.clone()
    }

    fn kick_lost(&mut self) {
        self.end_by_front_end(&"the kick descriptor cannot be polled");
    }

    fn memory_lost(&mut self) {
        if self.ring.view.table().is_poisoned() {
            self.end_by_front_end(&"the memory file was truncated");
        }
        self.check_log();
    }

    fn stop(&mut self) {
        self.lifecycle.stop();
        self.protocol.stop();
    }

    fn record(&self) -> Option<Arc<QueueRecord>> {
        Some(self.measurement.timeline.record().clone())
    }

    fn set_recording(&mut self, recording: bool) {
        self.measurement.timeline.set_recording(recording);
    }

    fn close_disk(&mut self, io: &mut Io, disk: &Arc<Disk>) {
        // A request between two steps keeps its handle, which could belong to another disk when the request continues.
        for slot in self.slots.all() {
            let job = &mut slot.request.job;
            if io.is_of(job.disk, disk) {
                job.disk = DiskHandle::NONE;
            }
        }
        self.protocol.close_disk(io, disk);
    }

    fn closed(&mut self, io: &mut Io) {
        self.protocol.close(io);
    }
}
