//! One worker's share of a disk's limits: decides when each I/O may start.
//!
//! Each source has a line, and only the head of a line reserves its start with the disk's [`Throttle`]. The sources of all
//! workers therefore take turns, independent of their queue depths. Owned by the worker's handle on the disk; unused while
//! the disk has no limits.

use std::cell::Cell;
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use bdev::{Moment, Throttle};
use block::{IoKind, IoRequest};
use latency::Clock;

use crate::admission::Deferred;

/// Maximum interval between checks of a line, because limits may change.
const LOOK_AGAIN: Duration = Duration::from_millis(20);

struct Line {
    source: u32,
    /// Start time of the head, computed with the limits of this setting number.
    start: Moment,
    setting: u32,
    /// Waiting I/Os with the time of their arrival.
    waiting: VecDeque<(Moment, Deferred)>,
}

/// Number of a worker's I/Os that wait for limits, shared by all of its disks.
#[derive(Clone, Default)]
pub(crate) struct Limited(Rc<Cell<usize>>);

impl Limited {
    #[inline]
    pub fn get(&self) -> usize {
        self.0.get()
    }

    fn add(&self, count: usize) {
        self.0.set(self.0.get() + count);
    }

    fn subtract(&self, count: usize) {
        self.0.set(self.0.get() - count);
    }
}

/// The lines of one disk.
pub(crate) struct Pacing {
    clock: Clock,
    limited: Limited,
    lines: Vec<Line>,
    /// Sources that are about to end.
    leaving: Vec<u32>,
    /// Expiry of the timer that was set last.
    armed: Option<Moment>,
    /// Number of timers set so far.
    timers: u32,
}

impl Pacing {
    /// Creates an empty set of lines on the worker's clock. Its I/Os are also counted in `limited`.
    pub fn new(clock: &Clock, limited: &Limited) -> Pacing {
        Pacing {
            clock: clock.clone(),
            limited: limited.clone(),
            lines: Vec::new(),
            leaving: Vec::new(),
            armed: None,
            timers: 0,
        }
    }

    /// Returns the worker's clock.
    pub fn clock(&self) -> &Clock {
        &self.clock
    }

    fn now(&self) -> Moment {
        Moment::now(&self.clock)
    }

    /// Returns true if this I/O may start now; otherwise the caller must pass it to [`Pacing::wait`].
    pub fn may_start(&mut self, throttle: &Throttle, source: u32, request: &IoRequest) -> bool {
        if request.kind == IoKind::Flush {
            // A flush persists completed writes only; none of those waits.
            return true;
        }
        if self.is_leaving(source) {
            return true;
        }
        if self.lines.iter().any(|line| line.source == source) {
            return false;
        }
        let (setting, now) = (throttle.setting(), self.now());
        let start = throttle.reserve(now, request.buffer_length());
        if start <= now {
            return true;
        }
        self.lines.push(Line {
            source,
            start,
            setting,
            waiting: VecDeque::new(),
        });
        false
    }

    /// Appends an I/O to its source's line.
    pub fn wait(&mut self, source: u32, deferred: Deferred) {
        let now = self.now();
        if let Some(line) = self.lines.iter_mut().find(|line| line.source == source) {
            line.waiting.push_back((now, deferred));
            self.limited.add(1);
        }
    }

    /// Returns the next I/O that may start, and the time that it has waited.
    pub fn next(&mut self, throttle: &Throttle) -> Option<(Duration, Deferred)> {
        let (setting, now) = (throttle.setting(), self.now());
        for line in &mut self.lines {
            if line.setting != setting {
                line.setting = setting;
                line.start = match line.waiting.front() {
                    Some((_, head)) if setting != 0 => {
                        throttle.reserve(now, head.request.buffer_length())
                    }
                    _ => now,
                };
            }
        }
        let first = self.lines.iter().enumerate().min_by_key(|(_, l)| l.start);
        let (at, start) = first.map(|(at, line)| (at, line.start))?;
        if start > now {
            return None;
        }
        let line = self.lines.get_mut(at)?;
        let first = line.waiting.pop_front();
        self.limited.subtract(usize::from(first.is_some()));
        match line.waiting.front() {
            Some((_, head)) if setting != 0 => {
                line.start = throttle.reserve(now, head.request.buffer_length())
            }
            Some(_) => {}
            None => {
                self.lines.swap_remove(at);
            }
        }
        first.map(|(since, deferred)| (now.since(since), deferred))
    }

    /// Removes and returns all waiting I/Os of a source that is about to end, regardless of limits. Its later I/Os do not
    /// wait either. The reservation of its head is not returned.
    pub fn end_source(
        &mut self,
        source: u32,
    ) -> impl Iterator<Item = (Duration, Deferred)> + use<> {
        self.leaving.push(source);
        let at = self.lines.iter().position(|line| line.source == source);
        let waiting = at.map_or_else(VecDeque::new, |at| self.lines.swap_remove(at).waiting);
        self.limited.subtract(waiting.len());
        let now = self.now();
        waiting
            .into_iter()
            .map(move |(since, deferred)| (now.since(since), deferred))
    }

    /// Returns true if the source is about to end.
    pub fn is_leaving(&self, source: u32) -> bool {
        self.leaving.contains(&source)
    }

    /// Removes the state of a source that has ended.
    pub fn remove_source(&mut self, source: u32) {
        self.leaving.retain(|leaving| *leaving != source);
    }

    /// Returns true if no I/O waits.
    pub fn is_empty(&self) -> bool {
        self.lines.is_empty()
    }

    /// Returns delay and number of a timer to set, unless a sufficient one is running. An expired timer counts as running
    /// until it has fired.
    pub fn timer(&mut self) -> Option<(Duration, u32)> {
        let now = self.now();
        let start = self.lines.iter().map(|line| line.start).min()?;
        if self.armed.is_some_and(|armed| armed <= start) {
            return None;
        }
        let fires = start.min(now.plus(LOOK_AGAIN));
        let after = fires.since(now);
        self.armed = Some(fires);
        self.timers = self.timers.wrapping_add(1);
        Some((after, self.timers))
    }

    /// Handles the timer with this number. A replaced timer is ignored; otherwise each would start another one as long as
    /// I/Os wait.
    pub fn fired(&mut self, number: u32) {
        if number == self.timers {
            self.armed = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use bdev::{RateLimits, Tag};
    use guest_memory::IoBuffer;

    use super::*;

    fn deferred(number: u64) -> Deferred {
        Deferred {
            request: IoRequest::read(0, 4096),
            buffer: IoBuffer::default(),
            tag: Tag(number),
            is_paid: true,
        }
    }

    #[test]
    fn sources_take_turns_with_queues_of_any_length() {
        let throttle = Throttle::default();
        throttle.set(RateLimits {
            bandwidth: 1,
            bandwidth_burst: 1,
            ..RateLimits::default()
        });
        let (clock, time) = Clock::simulated();
        let mut pacing = Pacing::new(&clock, &Limited::default());
        let read = IoRequest::read(0, 4096);
        assert!(pacing.may_start(&throttle, 1, &read));
        for number in 0..100 {
            assert!(!pacing.may_start(&throttle, 1, &read));
            pacing.wait(1, deferred(number));
        }
        for number in 100..103 {
            assert!(!pacing.may_start(&throttle, 2, &read));
            pacing.wait(2, deferred(number));
        }
        assert!(pacing.next(&throttle).is_none());
        assert!(pacing.timer().is_some_and(|(after, _)| after <= LOOK_AGAIN));
        assert!(pacing.timer().is_none(), "one is enough");
        // At a high rate, heads reserve their starts one after the other.
        throttle.set(RateLimits {
            iops: 1_000_000,
            iops_burst: 1,
            ..RateLimits::default()
        });
        let mut order = Vec::new();
        while order.len() < 103 {
            time.advance(1_000);
            order.extend(pacing.next(&throttle).map(|(_, deferred)| deferred.tag.0));
        }
        let of_second: Vec<usize> = (0..103).filter(|&at| order[at] >= 100).collect();
        assert!(of_second[2] <= 6, "every other one: {of_second:?}");
        assert!(pacing.lines.is_empty());
    }

    #[test]
    fn one_timer_at_a_time_is_set_though_it_fires_late() {
        let throttle = Throttle::default();
        throttle.set(RateLimits {
            iops: 1_000,
            iops_burst: 1,
            ..RateLimits::default()
        });
        let (clock, time) = Clock::simulated();
        let mut pacing = Pacing::new(&clock, &Limited::default());
        let read = IoRequest::read(0, 4096);
        assert!(pacing.may_start(&throttle, 1, &read));
        for number in 0..3 {
            assert!(!pacing.may_start(&throttle, 1, &read));
            pacing.wait(1, deferred(number));
        }
        let (after, first) = pacing.timer().unwrap();
        // The kernel starts the timer after the worker has read its clock, so the timer fires one millisecond late.
        time.advance(after.as_nanos() as u64 + 1_000_000);
        assert!(pacing.timer().is_none(), "the first is still to fire");
        pacing.fired(first);
        let (_, second) = pacing.timer().unwrap();
        pacing.fired(first);
        assert!(pacing.timer().is_none(), "the second is still to fire");
        pacing.fired(second);
        assert!(pacing.timer().is_some());
    }

    #[test]
    fn flush_never_waits_and_an_ending_source_drops_its_queue() {
        let throttle = Throttle::default();
        throttle.set(RateLimits {
            bandwidth: 1,
            bandwidth_burst: 1,
            ..RateLimits::default()
        });
        let (clock, _) = Clock::simulated();
        let mut pacing = Pacing::new(&clock, &Limited::default());
        let read = IoRequest::read(0, 4096);
        assert!(pacing.may_start(&throttle, 1, &read));
        for number in 0..3 {
            assert!(!pacing.may_start(&throttle, 1, &read));
            pacing.wait(1, deferred(number));
        }
        assert!(pacing.may_start(&throttle, 1, &IoRequest::flush()));
        assert!(pacing.end_source(2).next().is_none());
        assert_eq!(pacing.limited.get(), 3, "the flush does not wait");
        let order = pacing.end_source(1).map(|(_, deferred)| deferred.tag.0);
        let order: Vec<u64> = order.collect();
        assert_eq!(order, [0, 1, 2]);
        assert!(pacing.lines.is_empty() && pacing.limited.get() == 0);
    }

    #[test]
    fn removed_limits_release_all_waiting_io() {
        let throttle = Throttle::default();
        throttle.set(RateLimits {
            bandwidth: 1,
            bandwidth_burst: 1,
            ..RateLimits::default()
        });
        let (clock, _) = Clock::simulated();
        let mut pacing = Pacing::new(&clock, &Limited::default());
        let read = IoRequest::read(0, 4096);
        assert!(pacing.may_start(&throttle, 1, &read));
        for number in 0..3 {
            assert!(!pacing.may_start(&throttle, 1, &read));
            pacing.wait(1, deferred(number));
        }
        throttle.set(RateLimits::default());
        let order: Vec<u64> =
            std::iter::from_fn(|| pacing.next(&throttle).map(|(_, deferred)| deferred.tag.0))
                .collect();
        assert_eq!(order, [0, 1, 2]);
        assert_eq!(pacing.limited.get(), 0);
    }
}
