//! Measurements of a queue or connection: the stamps and counts of the requests of one iteration.
//!
//! Owned by the worker of the source. A stamp is taken once per batch and hop. [`Measurement::submitted`] records a batch after its
//! submission, [`Measurement::answered`] a request when its response is written, and [`Measurement::notified`] the iteration after the
//! notification, when the client no longer waits.

use latency::{
    Clock, Labels, MixedBatch, Operation, Part, PartCounts, QueueTimeline, SlowRequest, Stage,
    Stamp, Stamps,
};
use reactor::Io;

/// Maximum number of released requests per iteration that may be recorded as slow.
const SLOW_MAX: usize = 64;

/// Measurements of one queue or connection.
pub struct Measurement {
    /// Counters and histograms.
    pub timeline: QueueTimeline,
    /// Upper bits of the request IDs in USDT probes.
    pub probe_id_base: u64,
    /// Requests of this iteration that completed synchronously: shared stamps, a count per operation, and the partition.
    synchronous: Vec<(Stamps, [u32; Operation::COUNT], Part)>,
    /// Counts of the batch that is being submitted, if its requests address several disks.
    mixed: MixedBatch,
    /// Time at which the current requests or completions were noticed.
    pub noticed: Stamp,
    /// Time of the last completion in this iteration, or the default stamp.
    pub reaped: Stamp,
    /// Requests of this iteration that may be among the slowest, if their slots were released.
    slow: Vec<SlowRequest>,
}

impl Measurement {
    /// Creates the measurements of a source with up to `depth` requests in flight.
    pub fn new(labels: Labels, depth: usize, probe_id_base: u64) -> Measurement {
        Measurement {
            timeline: QueueTimeline::new(labels, depth),
            probe_id_base,
            synchronous: Vec::with_capacity(4),
            mixed: MixedBatch::default(),
            noticed: Stamp::default(),
            reaped: Stamp::default(),
            slow: Vec::new(),
        }
    }

    /// Returns the ID of a request in USDT probes.
    #[inline(always)]
    pub fn probe_id(&self, slot: u32) -> u64 {
        probes::id(self.probe_id_base, slot)
    }

    /// Returns the time, or the default stamp if nothing is recorded.
    #[inline]
    pub fn stamp(&self, io: &Io) -> Stamp {
        match self.timeline.is_recording() {
            true => io.now(),
            false => Stamp::default(),
        }
    }

    /// Continues the counts of the batch with a request of `part`.
    #[inline(always)]
    pub fn turn_to(&mut self, counts: &mut PartCounts, part: Part) {
        if part != counts.part {
            self.mixed.turn_to(counts, part);
        }
    }

    /// Records a batch; `counts` are its last counts. Pending requests were submitted at `submitted`. Synchronous ones have the submission
    /// stamp of the batch, and had completed by `reaped`.
    #[inline(always)]
    pub fn submitted(
        &mut self,
        counts: &PartCounts,
        stamps: Stamps,
        submitted: Stamp,
        reaped: Stamp,
    ) {
        if self.mixed.is_empty() {
            return self.count_submitted(counts, stamps, submitted, reaped);
        }
        self.mixed.add(counts);
        let mut mixed = std::mem::take(&mut self.mixed);
        for counts in mixed.drain() {
            self.count_submitted(&counts, stamps, submitted, reaped);
        }
        self.mixed = mixed;
    }

    #[inline(always)]
    fn count_submitted(
        &mut self,
        counts: &PartCounts,
        mut stamps: Stamps,
        submitted: Stamp,
        reaped: Stamp,
    ) {
        if counts.pending != [0; Operation::COUNT] {
            let mut stamps = stamps;
            stamps.mark(Stage::Submitted, submitted);
            self.timeline.select(counts.part);
            self.timeline.record_arrivals(&counts.pending, &stamps);
        }
        if counts.at_once != [0; Operation::COUNT] {
            stamps.mark(Stage::Reaped, reaped);
            self.synchronous.push((stamps, counts.at_once, counts.part));
        }
    }

    /// Returns true if requests of this iteration have completed synchronously.
    #[inline(always)]
    pub fn has_synchronous(&self) -> bool {
        !self.synchronous.is_empty()
    }

    /// Counts a request after its response was written. `pended` has the stamps of noticed and submitted if its I/O was pending.
    #[inline(always)]
    pub fn answered(
        &mut self,
        operation: Operation,
        bytes: u64,
        good: bool,
        pended: Option<(Stamp, Stamp)>,
    ) {
        self.timeline.count(operation, bytes, good);
        if let Some((noticed, submitted)) = pended {
            self.timeline.note_reaped(operation, noticed, submitted);
        }
    }

    /// Counts a request and prepares for the release of its slot before the notification. `pended`: its I/O was pending. `describe` returns the request with
    /// its stamps if it may be one of the slowest.
    #[inline]
    #[expect(
        clippy::too_many_arguments,
        reason = "the fields of a slot, which differs between transports"
    )]
    pub fn answered_and_released(
        &mut self,
        slot: u32,
        operation: Operation,
        bytes: u64,
        good: bool,
        pended: bool,
        mut stamps: Stamps,
        describe: impl FnOnce(Stamps) -> SlowRequest,
    ) {
        let (noticed, submitted) = (stamps.at(Stage::Noticed), stamps.at(Stage::Submitted));
        self.answered(
            operation,
            bytes,
            good,
            pended.then_some((noticed, submitted)),
        );
        let id = self.probe_id(slot);
        probes::answered(|| std::iter::once((id, good)));
        probes::notified(|| std::iter::once(id));
        // The factor covers the time until the response is sent.
        let latest = self.reaped.max(submitted);
        let may_be_slow = self.timeline.may_be_slow(2 * latest.since(noticed));
        if may_be_slow && self.slow.len() < SLOW_MAX {
            stamps.mark(Stage::Reaped, latest);
            self.note_slow(describe(stamps));
        }
    }

    /// Records the iteration: its responses were written at `answered`, and the client was notified at `notified`. Returns true if a
    /// request was slow.
    #[inline(always)]
    pub(crate) fn notified(&mut self, answered: Stamp, notified: Stamp) -> bool {
        for (stamps, counts, part) in &mut self.synchronous {
            stamps.mark(Stage::Answered, answered);
            stamps.mark(Stage::Notified, notified);
            self.timeline.select(*part);
            self.timeline.record_iteration(counts, stamps);
        }
        // Without a completion in this iteration, another event has just ended the wait.
        if self.reaped == Stamp::default() {
            self.reaped = answered;
        }
        self.timeline.record_answered(self.reaped, answered);
        self.timeline.record_notified(notified);
        self.timeline.take_slow_seen()
    }

    /// Returns the stamps of the synchronous requests of this iteration, of the last batch if there are several.
    pub fn shared_stamps(&self) -> Stamps {
        self.synchronous
            .last()
            .map_or(Stamps::default(), |(stamps, ..)| *stamps)
    }

    /// Notes a request that may be one of the slowest of this iteration.
    #[cold]
    pub fn note_slow(&mut self, request: SlowRequest) {
        self.slow.push(request);
    }

    /// Stores the slowest of the noted requests.
    #[cold]
    pub(crate) fn record_slow(&mut self, clock: &Clock, answered: Stamp, notified: Stamp) {
        for mut request in self.slow.drain(..) {
            request.stamps.mark(Stage::Answered, answered);
            request.stamps.mark(Stage::Notified, notified);
            self.timeline.record_slow(clock, request);
        }
    }

    /// Ends the iteration. `in_flight`: number of unanswered requests.
    #[inline(always)]
    pub(crate) fn end_iteration(&mut self, in_flight: usize) {
        self.reaped = Stamp::default();
        self.synchronous.clear();
        self.slow.clear();
        self.note_in_flight(in_flight);
    }

    /// Publishes the number of unanswered requests.
    #[inline(always)]
    pub fn note_in_flight(&self, in_flight: usize) {
        self.timeline.counters().in_flight.set(in_flight as u64);
    }
}
