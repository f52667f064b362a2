//! Log of the slowest requests of the last minute, with request and stamps.
//!
//! Part of a queue's record. A batch without slow requests costs one comparison with the threshold; only a slow request is
//! described and stored. Nothing allocates after the start. The minute consists of seven windows of ten seconds with
//! separate logs, so that an old slow request hides a later one for at most one window.

use crate::{Clock, Operation, Stage, Stamp, Stamps};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Length of a window: ten seconds, so that expiry removes only a small part of the minute.
const WINDOW: Duration = Duration::from_secs(10);
/// Six complete windows are a minute; the seventh is being filled.
const WINDOWS: usize = 7;

/// Slow requests per queue and window.
pub(crate) const KEPT: usize = 16;
/// Slow requests per queue.
pub(crate) const HELD: usize = KEPT * WINDOWS;

/// A logical unit of an export.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnitAddress {
    /// Target; 0 if there is only one.
    pub target: u8,
    /// Logical unit number.
    pub lun: u16,
}

/// One slow request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlowRequest {
    /// The operation.
    pub operation: Operation,
    /// Descriptor head or initiator task tag.
    pub tag: u64,
    /// Logical unit, if the export may have several.
    pub unit: Option<UnitAddress>,
    /// First byte on the disk.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// All stamps of the request.
    pub stamps: Stamps,
}

impl SlowRequest {
    /// Returns the time from noticed to notified, in ticks.
    pub const fn ticks(&self) -> u64 {
        self.notified().since(self.stamps.at(Stage::Noticed))
    }

    const fn notified(&self) -> Stamp {
        self.stamps.at(Stage::Notified)
    }
}

/// One slow request in nanoseconds, ready to send and print.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SlowRequestSnapshot {
    /// The operation.
    pub operation: Operation,
    /// Descriptor head or initiator task tag.
    pub tag: u64,
    /// Logical unit, if the export may have several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unit: Option<UnitAddress>,
    /// Name of the disk, if the sender can resolve it.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub disk: String,
    /// First byte on the disk.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
    /// Time since the notification.
    pub age_ns: u64,
    /// Time of the notification in milliseconds since 1970. The API sets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ended_ms: Option<u64>,
    /// Time from noticed to notified.
    pub total_ns: u64,
    /// Time from noticed to each stage, in the order of [`Stage::ALL`].
    pub stages_ns: [u64; Stage::COUNT],
}

impl SlowRequestSnapshot {
    /// Maximum age of a displayed request.
    pub const AGE_NS_MAX: u64 = 60_000_000_000;
}

/// Stores the slowest requests of the last minute.
#[derive(Clone, Debug)]
pub struct SlowLog {
    keep: usize,
    window_ticks: u64,
    windows: [Vec<SlowRequest>; WINDOWS],
    current: usize,
    current_ends: Stamp,
    /// Ticks that a request must exceed; 0 until the current window is full.
    threshold: u64,
}

impl SlowLog {
    /// Creates a log of the `keep` slowest requests.
    pub fn new(clock: &Clock, keep: usize) -> Self {
        let window_ticks = clock.ticks(WINDOW);
        SlowLog {
            keep,
            window_ticks,
            windows: std::array::from_fn(|_| Vec::with_capacity(keep)),
            current: 0,
            current_ends: Stamp(clock.now().0.saturating_add(window_ticks)),
            threshold: if keep == 0 { u64::MAX } else { 0 },
        }
    }

    /// Returns the ticks that a request must exceed to be stored.
    #[inline]
    pub const fn threshold(&self) -> u64 {
        self.threshold
    }

    /// Returns the expiry of the threshold.
    #[inline]
    pub const fn due(&self) -> Stamp {
        self.current_ends
    }

    /// Stores a request if it is slow enough.
    #[cold]
    pub fn offer(&mut self, request: SlowRequest) {
        self.rotate(request.notified());
        if request.ticks() <= self.threshold {
            return;
        }
        let window = &mut self.windows[self.current];
        if window.len() < self.keep {
            window.push(request);
        } else if let Some(fastest) = window.iter_mut().min_by_key(|kept| kept.ticks()) {
            *fastest = request;
        }
        if window.len() >= self.keep {
            let least = window.iter().map(SlowRequest::ticks).min();
            self.threshold = least.unwrap_or(u64::MAX);
        }
    }

    /// Returns the slowest requests of the last minute, slowest first.
    pub fn snapshot(&self, clock: &Clock) -> Vec<SlowRequestSnapshot> {
        let now = clock.now();
        let minute = self.window_ticks.saturating_mul(WINDOWS as u64 - 1);
        let mut slow: Vec<SlowRequest> = self.windows.iter().flatten().copied().collect();
        slow.retain(|request| now.since(request.notified()) <= minute);
        slow.sort_by_key(|request| std::cmp::Reverse(request.ticks()));
        slow.truncate(self.keep);
        let in_nanos = |request: SlowRequest| {
            let noticed = request.stamps.at(Stage::Noticed);
            let since = |stamp: Stamp| clock.nanos(stamp.since(noticed));
            SlowRequestSnapshot {
                operation: request.operation,
                tag: request.tag,
                unit: request.unit,
                disk: String::new(),
                offset: request.offset,
                length: request.length,
                age_ns: clock.nanos(now.since(request.notified())),
                ended_ms: None,
                total_ns: clock.nanos(request.ticks()),
                stages_ns: request.stamps.as_array().map(since),
            }
        };
        slow.into_iter().map(in_nanos).collect()
    }

    /// Starts the window of `now` and empties the windows in between.
    fn rotate(&mut self, now: Stamp) {
        if now < self.current_ends || self.keep == 0 {
            return;
        }
        let passed = 1 + now.since(self.current_ends) / self.window_ticks.max(1);
        for _ in 0..passed.min(WINDOWS as u64) {
            self.current = (self.current + 1) % WINDOWS;
            self.windows[self.current].clear();
        }
        let passed = passed.saturating_mul(self.window_ticks);
        self.current_ends = Stamp(self.current_ends.0.saturating_add(passed));
        self.threshold = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = 1_000_000_000;

    /// Offers requests with these total times, all notified at `at`.
    fn offer(log: &mut SlowLog, time: &crate::SimulatedTime, at: u64, totals: &[u64]) {
        for total in totals {
            let mut stamps = Stamps::noticed(Stamp(at - total));
            stamps.mark(Stage::Reaped, Stamp(at - 2));
            stamps.mark(Stage::Notified, Stamp(at));
            log.offer(SlowRequest {
                operation: Operation::Read,
                tag: *total,
                unit: None,
                offset: 0,
                length: 512,
                stamps,
            });
        }
        time.set(at);
    }

    fn totals(log: &SlowLog, clock: &Clock) -> Vec<u64> {
        let slow = log.snapshot(clock);
        slow.iter().map(|request| request.total_ns).collect()
    }

    #[test]
    fn slowest_requests_are_recorded_in_any_order() {
        let (clock, time) = Clock::simulated();
        let mut log = SlowLog::new(&clock, 3);
        let batches = [[5, 900, 20], [7, 8, 9], [600, 10, 11], [12, 700, 800]];
        for (batch, at) in batches.iter().zip(1..) {
            offer(&mut log, &time, 1000 * at, batch);
        }
        assert_eq!(totals(&log, &clock), [900, 800, 700]);
        assert_eq!(log.threshold(), 700);
        let slowest = &log.snapshot(&clock)[0];
        assert_eq!((slowest.tag, slowest.age_ns), (900, 3000));
        assert_eq!(slowest.stages_ns, [0, 0, 0, 0, 0, 0, 898, 898, 900]);
    }

    #[test]
    fn a_minute_later_it_is_forgotten_and_hid_no_later_one() {
        let (clock, time) = Clock::simulated();
        let mut log = SlowLog::new(&clock, 2);
        offer(&mut log, &time, SECOND, &[900, 800]);
        offer(&mut log, &time, 15 * SECOND, &[50]);
        offer(&mut log, &time, 16 * SECOND, &[40, 60]);
        assert_eq!(totals(&log, &clock), [900, 800]);
        time.set(62 * SECOND);
        assert_eq!(totals(&log, &clock), [60, 50]);
        offer(&mut log, &time, 3600 * SECOND, &[1 + 2]);
        assert_eq!(totals(&log, &clock), [3]);
    }

    #[test]
    fn a_log_that_keeps_nothing_keeps_nothing() {
        let (clock, time) = Clock::simulated();
        let mut log = SlowLog::new(&clock, 0);
        offer(&mut log, &time, 1000, &[5, 6]);
        offer(&mut log, &time, 20 * SECOND, &[5, 6]);
        assert_eq!(log.snapshot(&clock), []);
    }
}
