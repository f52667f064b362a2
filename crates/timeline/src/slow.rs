//! The slowest requests of the last minute, whole: which queue, what it asked, every stamp.
//!
//! Owned by one worker, next to its queues. A request that is not slow costs two comparisons; only the earliest of a
//! turn and those above the threshold are looked at, and nothing allocates after the start. The minute is seven windows
//! of ten seconds, each with its own slowest, so an old slow request cannot hide a later one for longer.

use crate::{Clock, Operation, Stage, Stamp, Stamps};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Ten seconds, so that what falls out at once is a small part of the minute.
const WINDOW: Duration = Duration::from_secs(10);
/// Six whole windows are a minute; the seventh is being filled.
const WINDOWS: usize = 7;

/// One request, as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowRequest {
    /// The worker's own number for the queue.
    pub queue: u32,
    /// What it was.
    pub operation: Operation,
    /// Descriptor head or initiator task tag.
    pub tag: u64,
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// Its stamps; the last two are filled in by [`SlowLog::finish_turn`].
    pub stamps: Stamps,
}

impl SlowRequest {
    fn ticks(&self) -> u64 {
        self.stamps
            .at(Stage::Notified)
            .since(self.stamps.at(Stage::Noticed))
    }
}

/// One request in nanoseconds, ready to be sent and printed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowRequestSnapshot {
    /// The worker's own number for the queue.
    pub queue: u32,
    /// What it was.
    pub operation: Operation,
    /// Descriptor head or initiator task tag.
    pub tag: u64,
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
    /// How long ago it was notified.
    pub age_ns: u64,
    /// From noticed to notified.
    pub total_ns: u64,
    /// Each stage's time since noticed, in the order of [`Stage::ALL`].
    pub stages_ns: [u64; Stage::COUNT],
}

/// Keeps the slowest requests of the last minute.
#[derive(Clone, Debug)]
pub struct SlowLog {
    keep: usize,
    window_ticks: u64,
    windows: [Vec<SlowRequest>; WINDOWS],
    current: usize,
    current_ends: Stamp,
    /// Ticks that a request must exceed; 0 until the current window is full.
    threshold: u64,
    /// The request of this turn that was noticed first: the slowest, once all are notified together.
    earliest: Option<SlowRequest>,
    /// Further requests of this turn above the threshold.
    candidates: Vec<SlowRequest>,
}

impl SlowLog {
    /// A log of the `keep` slowest requests.
    pub fn new(clock: &Clock, keep: usize) -> Self {
        let window_ticks = clock.ticks(WINDOW);
        SlowLog {
            keep,
            window_ticks,
            windows: std::array::from_fn(|_| Vec::with_capacity(keep)),
            current: 0,
            current_ends: Stamp(clock.now().0.saturating_add(window_ticks)),
            threshold: 0,
            earliest: None,
            candidates: Vec::with_capacity(keep),
        }
    }

    /// Offers a request that was noticed and reaped at these stamps; `request` describes it when it may be kept.
    #[inline]
    pub fn offer(&mut self, noticed: Stamp, reaped: Stamp, request: impl FnOnce() -> SlowRequest) {
        let Some(earliest) = &self.earliest else {
            self.earliest = Some(request());
            return;
        };
        // Room for as many as could be kept; in a turn with more, the first ones stand for all.
        let room = self.candidates.len() < self.keep;
        if noticed < earliest.stamps.at(Stage::Noticed) {
            if room {
                self.candidates.push(*earliest);
            }
            self.earliest = Some(request());
        } else if room && reaped.since(noticed) > self.threshold {
            self.candidates.push(request());
        }
    }

    /// Ends a turn: the offered requests were answered and notified at these stamps, and are kept if slow enough.
    #[inline]
    pub fn finish_turn(&mut self, answered: Stamp, notified: Stamp) {
        let Some(earliest) = &self.earliest else {
            return;
        };
        let slowest = notified.since(earliest.stamps.at(Stage::Noticed));
        if slowest > self.threshold || notified >= self.current_ends {
            self.keep_slow(*earliest, answered, notified);
        }
        // Not `take`, which would copy the whole request out.
        self.earliest = None;
        self.candidates.clear();
    }

    /// The slowest requests of the last minute, slowest first.
    pub fn snapshot(&self, clock: &Clock) -> Vec<SlowRequestSnapshot> {
        let now = clock.now();
        let minute = self.window_ticks.saturating_mul(WINDOWS as u64 - 1);
        let mut slow: Vec<SlowRequest> = self.windows.iter().flatten().copied().collect();
        slow.retain(|request| now.since(request.stamps.at(Stage::Notified)) <= minute);
        slow.sort_by_key(|request| std::cmp::Reverse(request.ticks()));
        slow.truncate(self.keep);
        let in_nanos = |request: SlowRequest| {
            let noticed = request.stamps.at(Stage::Noticed);
            SlowRequestSnapshot {
                queue: request.queue,
                operation: request.operation,
                tag: request.tag,
                offset: request.offset,
                length: request.length,
                age_ns: clock.nanos(now.since(request.stamps.at(Stage::Notified))),
                total_ns: clock.nanos(request.ticks()),
                stages_ns: request
                    .stamps
                    .as_array()
                    .map(|stamp| clock.nanos(stamp.since(noticed))),
            }
        };
        slow.into_iter().map(in_nanos).collect()
    }

    #[cold]
    fn keep_slow(&mut self, earliest: SlowRequest, answered: Stamp, notified: Stamp) {
        self.rotate(notified);
        for index in 0..=self.candidates.len() {
            // The earliest comes last, so that the loop borrows nothing.
            let mut request = self.candidates.get(index).copied().unwrap_or(earliest);
            request.stamps.mark(Stage::Answered, answered);
            request.stamps.mark(Stage::Notified, notified);
            if request.ticks() > self.threshold {
                self.insert(request);
            }
        }
    }

    /// Puts a request into the current window, in place of the fastest there when it is full.
    fn insert(&mut self, request: SlowRequest) {
        let window = &mut self.windows[self.current];
        if window.len() < self.keep {
            window.push(request);
        } else if let Some(fastest) = window.iter_mut().min_by_key(|kept| kept.ticks()) {
            *fastest = request;
        }
        if window.len() >= self.keep {
            self.threshold = window
                .iter()
                .map(SlowRequest::ticks)
                .min()
                .unwrap_or(u64::MAX);
        }
    }

    /// Begins the window that `now` belongs to and empties those in between.
    fn rotate(&mut self, now: Stamp) {
        if now < self.current_ends {
            return;
        }
        let passed = 1 + now.since(self.current_ends) / self.window_ticks.max(1);
        for _ in 0..passed.min(WINDOWS as u64) {
            self.current = (self.current + 1) % WINDOWS;
            self.windows[self.current].clear();
        }
        self.current_ends = Stamp(
            self.current_ends
                .0
                .saturating_add(passed.saturating_mul(self.window_ticks)),
        );
        self.threshold = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// A turn at `reaped` in which requests of these total times are reaped, answered 1 ns and notified 2 ns later.
    fn turn(log: &mut SlowLog, time: &crate::SimulatedTime, reaped: u64, totals: &[u64]) {
        for total in totals {
            let mut stamps = Stamps::noticed(Stamp(reaped + 2 - total));
            stamps.mark(Stage::Reaped, Stamp(reaped));
            let request = SlowRequest {
                queue: 1,
                operation: Operation::Read,
                tag: *total,
                offset: 0,
                length: 512,
                stamps,
            };
            log.offer(stamps.at(Stage::Noticed), Stamp(reaped), || request);
        }
        log.finish_turn(Stamp(reaped + 1), Stamp(reaped + 2));
        time.set(reaped + 2);
    }

    fn totals(log: &SlowLog, clock: &Clock) -> Vec<u64> {
        log.snapshot(clock)
            .iter()
            .map(|request| request.total_ns)
            .collect()
    }

    #[test]
    fn the_slowest_are_kept_in_whatever_order_and_turn_they_come() {
        let (clock, time) = Clock::simulated();
        let mut log = SlowLog::new(&clock, 3);
        for (n, batch) in [[5, 900, 20], [7, 8, 9], [600, 10, 11], [12, 700, 800]]
            .iter()
            .enumerate()
        {
            turn(&mut log, &time, 1000 * (n as u64 + 1), batch);
        }
        assert_eq!(totals(&log, &clock), [900, 800, 700]);
        let slowest = &log.snapshot(&clock)[0];
        assert_eq!((slowest.tag, slowest.age_ns), (900, 3000));
        assert_eq!(slowest.stages_ns, [0, 0, 0, 0, 898, 899, 900]);
    }

    #[test]
    fn a_request_that_only_its_notification_made_slow_is_kept() {
        let (clock, time) = Clock::simulated();
        let mut log = SlowLog::new(&clock, 1);
        turn(&mut log, &time, 1000, &[500]);
        let mut stamps = Stamps::noticed(Stamp(2000));
        stamps.mark(Stage::Reaped, Stamp(2010));
        let request = SlowRequest {
            queue: 1,
            operation: Operation::Write,
            tag: 7,
            offset: 0,
            length: 0,
            stamps,
        };
        log.offer(Stamp(2000), Stamp(2010), || request);
        log.finish_turn(Stamp(2020), Stamp(9000));
        assert_eq!(totals(&log, &clock), [7000]);
    }

    #[test]
    fn a_minute_later_it_is_forgotten_and_hid_no_later_one() {
        let (clock, time) = Clock::simulated();
        let mut log = SlowLog::new(&clock, 2);
        turn(&mut log, &time, SECOND, &[900, 800]);
        turn(&mut log, &time, 15 * SECOND, &[50]);
        turn(&mut log, &time, 16 * SECOND, &[40, 60]);
        assert_eq!(totals(&log, &clock), [900, 800]);
        time.set(62 * SECOND);
        assert_eq!(totals(&log, &clock), [60, 50]);
        turn(&mut log, &time, 3600 * SECOND, &[1 + 2]);
        assert_eq!(totals(&log, &clock), [3]);
    }

    #[test]
    fn a_log_that_keeps_nothing_keeps_nothing() {
        let (clock, time) = Clock::simulated();
        let mut log = SlowLog::new(&clock, 0);
        turn(&mut log, &time, 1000, &[5, 6]);
        assert_eq!(log.snapshot(&clock), []);
    }
}
