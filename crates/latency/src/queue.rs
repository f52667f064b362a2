//! Measurements of one queue along the path of its requests.
//!
//! Owned by the worker that owns the queue. The data is in a [`QueueRecord`], which other threads may read at any time. No
//! locks, and no allocation per request: the histograms of an operation (86 KiB) are allocated at its first use or by
//! [`QueueTimeline::prepare`]. Arrivals are recorded when their batch is submitted, departures when their batch is
//! notified, with one update per batch and step. Recording takes stamps instead of reading the time, so call it when the
//! client no longer waits: after the submission and the notification.

use std::sync::Arc;

use crate::parts::{Part, Parts};
use crate::record::{CounterWords, QueueRecord, SpanHistograms};
use crate::snapshot::{Labels, QueueSnapshot};
use crate::{Clock, Histogram, Operation, SlowRequest, Span, Stage, Stamp};
use serde::{Deserialize, Serialize};

/// Stamps of one request, or of an iteration with shared stamps. A stage without a stamp of its own has the stamp of the
/// stage before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stamps([Stamp; Stage::COUNT]);

impl Stamps {
    /// Returns stamps with `at` for every stage.
    #[inline]
    pub const fn noticed(at: Stamp) -> Self {
        Stamps([at; Stage::COUNT])
    }

    /// Creates stamps in the order of [`Stage::ALL`].
    pub const fn from_array(stamps: [Stamp; Stage::COUNT]) -> Self {
        Stamps(stamps)
    }

    /// Returns the stamps in the order of [`Stage::ALL`].
    pub const fn as_array(&self) -> &[Stamp; Stage::COUNT] {
        &self.0
    }

    /// Sets the stamp of a stage and of all later ones.
    #[inline(always)]
    pub fn mark(&mut self, stage: Stage, at: Stamp) {
        for stamp in self.0.iter_mut().skip(stage as usize) {
            *stamp = at;
        }
    }

    /// Returns the stamp of a stage.
    #[inline]
    pub const fn at(&self, stage: Stage) -> Stamp {
        self.0[stage as usize]
    }

    /// Returns the duration of a span in ticks.
    #[inline(always)]
    pub const fn span(&self, span: Span) -> u64 {
        self.at(span.to()).since(self.at(span.from()))
    }
}

/// Counters of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationCounters {
    /// Requests answered, with success or with an error.
    pub requests: u64,
    /// Bytes of data transferred.
    pub bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
    /// Sum of the stamps at which requests were noticed, in ticks of the machine's clock, modulo 2^64. A client with the
    /// same clock can compute the mean delay before that from its own start times.
    #[serde(default)]
    pub noticed_ticks: u64,
}

/// Counters of a queue since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Counters {
    /// Counters of each operation, in the order of [`Operation::ALL`].
    pub operations: [OperationCounters; Operation::COUNT],
    /// Kicks received.
    pub kicks: u64,
    /// Notifications sent.
    pub notifications: u64,
    /// Iterations of polling for work.
    pub polls: u64,
    /// Number of times that the queue was armed for a kick and its worker slept.
    pub sleeps: u64,
    /// Malformed requests, which have no operation.
    pub malformed: u64,
}

impl Counters {
    /// Returns an operation's counters.
    #[inline]
    pub const fn of(&self, operation: Operation) -> &OperationCounters {
        &self.operations[operation as usize]
    }

    /// Returns an operation's counters for updates.
    #[inline]
    pub const fn of_mut(&mut self, operation: Operation) -> &mut OperationCounters {
        &mut self.operations[operation as usize]
    }

    /// Returns the requests of all operations.
    pub fn requests(&self) -> u64 {
        self.operations
            .iter()
            .fold(0, |sum: u64, one| sum.saturating_add(one.requests))
    }

    /// Returns the bytes of all operations.
    pub fn bytes(&self) -> u64 {
        self.operations
            .iter()
            .fold(0, |sum: u64, one| sum.saturating_add(one.bytes))
    }

    /// Returns the errors of all operations.
    pub fn errors(&self) -> u64 {
        self.operations
            .iter()
            .fold(0, |sum: u64, one| sum.saturating_add(one.errors))
    }

    /// Returns the errors of all operations but [`Operation::Other`], which regularly ends with an error, for example when a driver probes
    /// missing units.
    pub fn data_errors(&self) -> u64 {
        self.errors()
            .saturating_sub(self.of(Operation::Other).errors)
    }

    /// Adds all counts of `other`.
    pub fn merge(&mut self, other: &Counters) {
        *self = self.combine(other, u64::saturating_add, u64::wrapping_add);
    }

    /// Returns the difference to `earlier`.
    #[must_use]
    pub fn since(&self, earlier: &Counters) -> Counters {
        self.combine(earlier, u64::saturating_sub, u64::wrapping_sub)
    }

    fn combine(
        &self,
        other: &Counters,
        with: fn(u64, u64) -> u64,
        ticks: fn(u64, u64) -> u64,
    ) -> Counters {
        let mut operations = self.operations;
        for (mine, theirs) in operations.iter_mut().zip(&other.operations) {
            mine.requests = with(mine.requests, theirs.requests);
            mine.bytes = with(mine.bytes, theirs.bytes);
            mine.errors = with(mine.errors, theirs.errors);
            mine.noticed_ticks = ticks(mine.noticed_ticks, theirs.noticed_ticks);
        }
        Counters {
            operations,
            kicks: with(self.kicks, other.kicks),
            notifications: with(self.notifications, other.notifications),
            polls: with(self.polls, other.polls),
            sleeps: with(self.sleeps, other.sleeps),
            malformed: with(self.malformed, other.malformed),
        }
    }
}

/// Requests of one operation and one batch that were reaped together.
#[derive(Clone, Copy, Debug)]
struct Run {
    operation: Operation,
    part: Part,
    weight: u32,
    noticed: Stamp,
    submitted: Stamp,
    answered: Stamp,
}

/// Number of latest runs compared with a reaped request: batches are reaped roughly in order, and the operations of one
/// batch mix.
const RUNS_COMPARED: usize = 4;

/// Histograms and counters of one queue, on the owner's side.
#[derive(Debug)]
pub struct QueueTimeline {
    /// The queue's own record.
    pub(crate) record: Arc<QueueRecord>,
    /// The record for requests: the queue's own, or the part of a disk.
    pub(crate) current: Arc<QueueRecord>,
    pub(crate) parts: Parts,
    recording: bool,
    /// A slow request was recorded since the last check.
    slow_seen: bool,
    /// Copy of the slow log's threshold, in a cache line that every iteration uses.
    slow_threshold: u64,
    slow_due: Stamp,
    /// Requests reaped in this iteration and not notified yet; from `unanswered` on they are also unanswered.
    runs: Vec<Run>,
    unanswered: usize,
}

impl QueueTimeline {
    /// Creates a timeline for a queue with up to `depth` requests in flight.
    pub fn new(labels: Labels, depth: usize) -> Self {
        let record = Arc::new(QueueRecord::new(labels));
        QueueTimeline {
            current: record.clone(),
            record,
            parts: Parts::new(),
            recording: true,
            slow_seen: false,
            slow_threshold: 0,
            slow_due: Stamp(u64::MAX),
            runs: Vec::with_capacity(depth),
            unanswered: 0,
        }
    }

    /// Returns the record that other threads may read.
    pub fn record(&self) -> &Arc<QueueRecord> {
        &self.record
    }

    /// Returns the labels of the queue.
    pub fn labels(&self) -> &Labels {
        self.record.labels()
    }

    /// Returns the counters of the queue as a whole.
    #[inline]
    pub fn counters(&self) -> &CounterWords {
        self.record.words()
    }

    /// Counts an answered request, with or without stamps.
    #[inline(always)]
    pub fn count(&self, operation: Operation, bytes: u64, good: bool) {
        self.current.words().count(operation, bytes, good);
    }

    /// Enables or disables the histograms (enabled at the start); counters are not affected. Together with
    /// [`Clock::stopped`] this serves to measure the cost of stamps.
    pub fn set_recording(&mut self, recording: bool) {
        self.recording = recording;
        self.runs.clear();
        self.unanswered = 0;
    }

    /// Returns true if times are recorded. Otherwise the clock need not be read.
    #[inline]
    pub const fn is_recording(&self) -> bool {
        self.recording
    }

    /// Returns true if a slow request was recorded since the last call. The owner then passes the requests that it has just
    /// answered to [`QueueTimeline::record_slow`], which selects the slow ones.
    #[inline]
    pub fn take_slow_seen(&mut self) -> bool {
        std::mem::take(&mut self.slow_seen)
    }

    /// Returns true if a request of this age may be among the slowest.
    #[inline]
    pub const fn may_be_slow(&self, ticks: u64) -> bool {
        self.recording && ticks > self.slow_threshold
    }

    /// Stores a request if it is one of the slowest of the current ten seconds.
    #[cold]
    pub fn record_slow(&mut self, clock: &Clock, request: SlowRequest) {
        if let Some(limits) = self.record.record_slow(clock, request) {
            (self.slow_threshold, self.slow_due) = limits;
        }
    }

    /// Compares with the threshold, and with the time at which the threshold expires.
    #[inline]
    fn check_slow(&mut self, noticed: Stamp, notified: Stamp) {
        self.slow_seen |=
            notified.since(noticed) > self.slow_threshold || notified >= self.slow_due;
    }

    /// Allocates an operation's histograms before its first request.
    pub fn prepare(&mut self, operation: Operation) {
        self.record.spans(operation);
    }

    /// Records one span of a batch: `weight` requests that took `ticks` each.
    #[inline]
    pub fn record_batch(&mut self, operation: Operation, span: Span, ticks: u64, weight: u32) {
        if self.recording {
            self.current.spans(operation)[span as usize].record(ticks, u64::from(weight));
        }
    }

    /// Records all spans of one request.
    pub fn record_request(&mut self, operation: Operation, stamps: &Stamps) {
        self.record_whole(operation, stamps, 1);
    }

    /// Records an iteration with shared stamps, as with a synchronous backend. `counts` is by operation, in the order of
    /// [`Operation::ALL`].
    pub fn record_iteration(&mut self, counts: &[u32; Operation::COUNT], stamps: &Stamps) {
        for (operation, weight) in with_counts(counts) {
            self.record_whole(operation, stamps, weight);
        }
        self.check_slow(stamps.at(Stage::Noticed), stamps.at(Stage::Notified));
    }

    /// Records the spans from noticed to submitted of a submitted batch. `counts` is by operation, in the order of
    /// [`Operation::ALL`].
    pub fn record_arrivals(&mut self, counts: &[u32; Operation::COUNT], stamps: &Stamps) {
        if !self.recording {
            return;
        }
        for (operation, weight) in with_counts(counts) {
            let histograms = self.current.spans(operation);
            for span in [Span::Popped, Span::Parsed, Span::Submitted] {
                histograms[span as usize].record(stamps.span(span), u64::from(weight));
            }
        }
    }

    /// Records the spans from noticed to submitted of one request, including the reception of its data.
    pub fn record_arrival(&mut self, operation: Operation, stamps: &Stamps) {
        if !self.recording {
            return;
        }
        let histograms = self.current.spans(operation);
        for span in [
            Span::Popped,
            Span::Parsed,
            Span::Awaited,
            Span::Received,
            Span::Submitted,
        ] {
            histograms[span as usize].record(stamps.span(span), 1);
        }
    }

    /// Adds a reaped request; `noticed` and `submitted` are the stamps of its batch. Requests of the same batch are
    /// combined.
    #[inline]
    pub fn note_reaped(&mut self, operation: Operation, noticed: Stamp, submitted: Stamp) {
        if !self.recording {
            return;
        }
        let part = self.parts.written();
        let unanswered = self.runs.iter_mut().skip(self.unanswered);
        for run in unanswered.rev().take(RUNS_COMPARED) {
            let same = run.operation == operation && run.part == part;
            if same && run.noticed == noticed && run.submitted == submitted {
                run.weight = run.weight.saturating_add(1);
                return;
            }
        }
        self.runs.push(Run {
            operation,
            part,
            weight: 1,
            noticed,
            submitted,
            answered: Stamp(0),
        });
    }

    /// Records service and answering of all requests reaped since the last call. An iteration may reap and answer more than
    /// once.
    #[inline]
    pub fn record_answered(&mut self, reaped: Stamp, answered: Stamp) {
        if !self.runs.is_empty() {
            self.record_runs_answered(reaped, answered);
        }
    }

    fn record_runs_answered(&mut self, reaped: Stamp, answered: Stamp) {
        for index in self.unanswered..self.runs.len() {
            let Some(run) = self.runs.get_mut(index) else {
                break;
            };
            run.answered = answered;
            let run = *run;
            self.select(run.part);
            let histograms = self.current.spans(run.operation);
            let weight = u64::from(run.weight);
            histograms[Span::Reaped as usize].record(reaped.since(run.submitted), weight);
            histograms[Span::Answered as usize].record(answered.since(reaped), weight);
        }
        self.unanswered = self.runs.len();
    }

    /// Records notification and total time of all answered requests and removes them.
    #[inline]
    pub fn record_notified(&mut self, notified: Stamp) {
        if !self.runs.is_empty() {
            self.record_runs_notified(notified);
        }
    }

    fn record_runs_notified(&mut self, notified: Stamp) {
        for index in 0..self.unanswered {
            let Some(run) = self.runs.get(index).copied() else {
                break;
            };
            self.check_slow(run.noticed, notified);
            self.select(run.part);
            let words = self.current.words();
            words.noticed(run.operation, run.noticed, run.weight);
            let histograms = self.current.spans(run.operation);
            let weight = u64::from(run.weight);
            histograms[Span::Notified as usize].record(notified.since(run.answered), weight);
            histograms[Span::Total as usize].record(notified.since(run.noticed), weight);
        }
        if self.unanswered == self.runs.len() {
            self.runs.clear();
        } else {
            self.runs.drain(..self.unanswered);
        }
        self.unanswered = 0;
    }

    /// Returns a histogram in ticks; `None` if the operation was never used.
    pub fn histogram(&self, operation: Operation, span: Span) -> Option<&Histogram> {
        self.record.histogram(operation, span)
    }

    /// Returns all measurements so far, in nanoseconds.
    pub fn snapshot(&self, clock: &Clock) -> QueueSnapshot {
        self.record.snapshot(clock)
    }

    /// Resets all histograms and counters; requests in flight are counted when they end.
    pub fn reset(&mut self) {
        self.record.reset();
        (self.slow_threshold, self.slow_due) = (0, Stamp(u64::MAX));
    }

    fn record_whole(&mut self, operation: Operation, stamps: &Stamps, weight: u32) {
        if !self.recording {
            return;
        }
        let words = self.current.words();
        words.noticed(operation, stamps.at(Stage::Noticed), weight);
        let histograms = self.current.spans(operation);
        // [`Span::COMMON`], unrolled, so that stamps and histogram of each span are constants.
        record_span::<{ Span::Popped as usize }>(histograms, stamps, weight);
        record_span::<{ Span::Parsed as usize }>(histograms, stamps, weight);
        record_span::<{ Span::Submitted as usize }>(histograms, stamps, weight);
        record_span::<{ Span::Reaped as usize }>(histograms, stamps, weight);
        record_span::<{ Span::Answered as usize }>(histograms, stamps, weight);
        record_span::<{ Span::Notified as usize }>(histograms, stamps, weight);
        record_span::<{ Span::Total as usize }>(histograms, stamps, weight);
    }
}

#[inline(always)]
fn record_span<const SPAN: usize>(histograms: &SpanHistograms, stamps: &Stamps, weight: u32) {
    let (from, to) = const { (Span::ALL[SPAN].from(), Span::ALL[SPAN].to()) };
    let ticks = stamps.at(to).since(stamps.at(from));
    histograms[SPAN].record(ticks, u64::from(weight));
}

/// Returns the operations that occur in a batch, with their counts.
fn with_counts(counts: &[u32; Operation::COUNT]) -> impl Iterator<Item = (Operation, u32)> {
    Operation::ALL
        .into_iter()
        .zip(*counts)
        .filter(|(_, count)| *count > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const BATCH: Stamps = Stamps::from_array([
        Stamp(100),
        Stamp(110),
        Stamp(130),
        Stamp(130),
        Stamp(130),
        Stamp(160),
        Stamp(1160),
        Stamp(1190),
        Stamp(1200),
    ]);

    fn timeline() -> QueueTimeline {
        QueueTimeline::new(Labels::default(), 8)
    }

    fn assert_same(left: &QueueTimeline, right: &QueueTimeline) {
        for operation in Operation::ALL {
            for span in Span::ALL {
                assert_eq!(
                    left.histogram(operation, span),
                    right.histogram(operation, span),
                    "{operation} {span}"
                );
            }
        }
    }

    #[test]
    fn every_span_gets_the_time_between_its_stages() {
        let mut queue = timeline();
        queue.record_request(Operation::Read, &BATCH);
        let ticks = Span::COMMON.map(|span| queue.histogram(Operation::Read, span).unwrap().sum());
        assert_eq!(ticks, [10, 20, 30, 1000, 30, 10, 1100]);
        assert_eq!(queue.histogram(Operation::Write, Span::Total), None);
    }

    #[test]
    fn a_turn_equals_its_requests_one_by_one_and_its_batches_in_halves() {
        let (mut iteration, mut single, mut halves, mut spans) =
            (timeline(), timeline(), timeline(), timeline());
        iteration.record_iteration(&[3, 2, 0, 0, 0], &BATCH);
        halves.record_arrivals(&[3, 2, 0, 0, 0], &BATCH);
        for operation in [
            Operation::Read,
            Operation::Write,
            Operation::Read,
            Operation::Write,
            Operation::Read,
        ] {
            single.record_request(operation, &BATCH);
            halves.note_reaped(
                operation,
                BATCH.at(Stage::Noticed),
                BATCH.at(Stage::Submitted),
            );
        }
        assert_eq!(halves.runs.len(), 2, "one run per operation");
        halves.record_answered(BATCH.at(Stage::Reaped), BATCH.at(Stage::Answered));
        halves.record_notified(BATCH.at(Stage::Notified));
        for span in Span::COMMON {
            spans.record_batch(Operation::Read, span, BATCH.span(span), 3);
            spans.record_batch(Operation::Write, span, BATCH.span(span), 2);
        }
        assert_same(&iteration, &single);
        assert_same(&iteration, &halves);
        assert_same(&iteration, &spans);
    }

    #[test]
    fn a_turn_may_reap_twice_and_notify_once() {
        let (mut queue, mut expected) = (timeline(), timeline());
        let mut stamps = [BATCH, BATCH];
        stamps[1].mark(Stage::Submitted, Stamp(170));
        stamps[1].mark(Stage::Reaped, Stamp(1191));
        stamps[1].mark(Stage::Answered, Stamp(1195));
        stamps[1].mark(Stage::Notified, Stamp(1200));
        for one in &stamps {
            queue.record_arrivals(&[1, 0, 0, 0, 0], one);
            queue.note_reaped(
                Operation::Read,
                one.at(Stage::Noticed),
                one.at(Stage::Submitted),
            );
            queue.record_answered(one.at(Stage::Reaped), one.at(Stage::Answered));
            expected.record_request(Operation::Read, one);
        }
        queue.note_reaped(Operation::Read, Stamp(1), Stamp(2));
        queue.record_notified(Stamp(1200));
        assert_eq!(
            (queue.runs.len(), queue.unanswered),
            (1, 0),
            "unanswered requests remain"
        );
        assert_same(&queue, &expected);
    }

    #[test]
    fn a_stage_without_a_stamp_takes_no_time() {
        let mut stamps = Stamps::noticed(Stamp(5));
        stamps.mark(Stage::Submitted, Stamp(9));
        assert_eq!(
            Span::ALL.map(|span| stamps.span(span)),
            [0, 0, 0, 0, 4, 0, 0, 0, 4]
        );
    }

    #[test]
    fn data_that_was_asked_for_has_spans_of_its_own() {
        let mut queue = timeline();
        let mut stamps = BATCH;
        stamps.mark(Stage::Awaited, Stamp(150));
        stamps.mark(Stage::Received, Stamp(155));
        stamps.mark(Stage::Submitted, Stamp(160));
        queue.record_arrival(Operation::Write, &stamps);
        let ticks = |span| queue.histogram(Operation::Write, span).unwrap().sum();
        assert_eq!(
            [Span::Parsed, Span::Awaited, Span::Received, Span::Submitted].map(ticks),
            [20, 20, 5, 5]
        );
    }

    #[test]
    fn the_owner_is_asked_only_for_requests_that_may_be_slow() {
        let (clock, time) = Clock::simulated();
        let mut queue = timeline();
        let described = SlowRequest {
            operation: Operation::Read,
            tag: 1,
            unit: None,
            offset: 0,
            length: 512,
            stamps: BATCH,
        };
        for _ in 0..crate::slow::KEPT {
            queue.record_iteration(&[1, 0, 0, 0, 0], &BATCH);
            assert!(queue.take_slow_seen());
            queue.record_slow(&clock, described);
        }
        queue.record_iteration(&[1, 0, 0, 0, 0], &BATCH);
        assert!(!queue.take_slow_seen(), "as slow as all that are kept");
        queue.note_reaped(Operation::Read, Stamp(99), Stamp(160));
        queue.record_answered(Stamp(1160), Stamp(1190));
        queue.record_notified(Stamp(1200));
        assert!(queue.take_slow_seen() && !queue.take_slow_seen());
        time.set(2000);
        let slow = queue.snapshot(&clock).slow;
        assert_eq!(
            (slow.len(), slow[0].total_ns, slow[0].age_ns),
            (16, 1100, 800)
        );
        // Ten seconds later, a lower latency is slow again.
        let later = BATCH
            .as_array()
            .map(|stamp| Stamp(stamp.0 + 11_000_000_000));
        queue.record_iteration(&[1, 0, 0, 0, 0], &Stamps::from_array(later));
        assert!(queue.take_slow_seen());
    }

    #[test]
    fn switched_off_it_counts_but_records_nothing() {
        let mut queue = timeline();
        queue.set_recording(false);
        queue.record_iteration(&[1; 5], &BATCH);
        queue.record_arrivals(&[1; 5], &BATCH);
        queue.record_batch(Operation::Read, Span::Total, 1, 1);
        queue.note_reaped(Operation::Read, Stamp(1), Stamp(2));
        queue.record_answered(Stamp(3), Stamp(4));
        queue.record_notified(Stamp(5));
        queue.count(Operation::Read, 0, true);
        assert_same(&queue, &timeline());
        assert_eq!(queue.counters().get().requests(), 1);
    }

    #[test]
    fn reset_clears_counters_and_snapshots_skip_unused_ones() {
        let (clock, _) = Clock::simulated();
        let mut queue = timeline();
        queue.record_batch(Operation::Flush, Span::Reaped, 7, 2);
        let latencies = queue.snapshot(&clock).latencies;
        let flush = &latencies.operations[&Operation::Flush];
        assert_eq!((latencies.operations.len(), flush.spans.len()), (1, 1));
        assert_eq!(flush.spans[&Span::Reaped].buckets, [(7, 2)]);
        queue.reset();
        assert!(
            queue
                .histogram(Operation::Flush, Span::Reaped)
                .unwrap()
                .count()
                == 0
        );
    }

    #[test]
    fn counters_merge_and_subtract_by_field() {
        let mut one = Counters {
            kicks: 3,
            polls: 9,
            ..Default::default()
        };
        *one.of_mut(Operation::Write) = OperationCounters {
            requests: 5,
            bytes: 4096,
            errors: 1,
            noticed_ticks: u64::MAX,
        };
        let mut both = one;
        both.merge(&one);
        assert_eq!(
            (both.kicks, both.requests(), both.bytes(), both.errors()),
            (6, 10, 8192, 2)
        );
        let ticks = both.of(Operation::Write).noticed_ticks;
        assert_eq!(ticks, u64::MAX - 1, "stamps add up modulo 2^64");
        assert_eq!(both.since(&one), one);
    }
}
