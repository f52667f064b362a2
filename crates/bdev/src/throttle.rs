//! A disk's limits: so many requests, and so many bytes, in a second.
//!
//! Two token buckets that all workers share, each one atomic word: the time at which it will be full again. A request
//! reserves its tokens and is told when it may start; who waits, and in which order, is the workers' business.
//! Without limits a request pays one load of a word that is zero. Limits change at any time, from any thread.
//! The word also says that the disk is closed ([`crate::Disk::close`]) and that a range of it is held ([`crate::RangeLocks`]), so that
//! neither costs another load.

use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// So many units of time are a second: sixteenths of a nanosecond keep high rates exact and last for 36 years.
const SECOND: u128 = 16_000_000_000;

/// Of the word: a range of the disk is held. The other bits are the setting.
const HELD: u32 = 1 << 31;

/// Limits of a disk; 0 is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Requests in a second.
    pub iops: u64,
    /// Requests that may come at once after a pause.
    pub iops_burst: u64,
    /// Bytes read and written in a second.
    pub bandwidth: u64,
    /// Bytes that may come at once after a pause.
    pub bandwidth_burst: u64,
}

impl RateLimits {
    /// A rate's burst when none is said: what comes in a twentieth of a second.
    pub const fn usual_burst(rate: u64) -> u64 {
        rate.div_ceil(20)
    }

    /// Is there any?
    pub const fn is_none(&self) -> bool {
        self.iops == 0 && self.bandwidth == 0
    }
}

/// A moment on the throttle's clock.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(u64);

impl Moment {
    /// The moment so much later.
    pub fn plus(self, after: Duration) -> Moment {
        let units = u64::try_from(after.as_nanos() * 16).unwrap_or(u64::MAX);
        Moment(self.0.saturating_add(units))
    }

    /// How long after `earlier` it is.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0).div_ceil(16))
    }
}

#[derive(Debug, Default)]
struct Bucket {
    /// Tokens in a second; 0: no limit.
    rate: AtomicU64,
    /// Tokens that it holds.
    depth: AtomicU64,
    /// When it will be full again.
    full_at: AtomicU64,
}

impl Bucket {
    fn set(&self, rate: u64, depth: u64) {
        self.rate.store(rate, Ordering::Relaxed);
        self.depth.store(depth, Ordering::Relaxed);
        // Who reserves meanwhile sees the rate as soon as it sees that the bucket is full.
        self.full_at.store(0, Ordering::Release);
    }

    /// Takes tokens; the time from which on they are there. What the bucket cannot hold waits for a full one.
    fn reserve(&self, now: u64, tokens: u64) -> u64 {
        let mut full_at = self.full_at.load(Ordering::Acquire);
        loop {
            // Anew each time: a request that is charged at a rate of before is a debt that the bucket does not know.
            let rate = self.rate.load(Ordering::Relaxed);
            if rate == 0 || tokens == 0 {
                return now;
            }
            let time = |tokens: u64| {
                let time = u128::from(tokens) * SECOND / u128::from(rate);
                u64::try_from(time).unwrap_or(u64::MAX >> 1)
            };
            let cost = time(tokens);
            let spare = time(self.depth.load(Ordering::Relaxed)).saturating_sub(cost);
            let begin = full_at.max(now);
            let after = begin.saturating_add(cost);
            match self.full_at.compare_exchange_weak(
                full_at,
                after,
                Ordering::AcqRel,
                Ordering::Acquire,
            ) {
                Ok(_) => return begin.saturating_sub(spare).max(now),
                Err(other) => full_at = other,
            }
        }
    }
}

/// The limits of one disk, as its workers keep to them.
#[derive(Debug)]
pub struct Throttle {
    /// 0: no limits, the disk is open, and no range is held.
    word: AtomicU32,
    requests: Bucket,
    bytes: Bucket,
    began: Instant,
    setting: Mutex<Setting>,
}

#[derive(Debug, Default)]
struct Setting {
    generation: u32,
    limits: RateLimits,
    /// The disk is closed, and what it is closed for writes no more bytes in a second than this.
    closed: Option<u64>,
    held: bool,
}

impl Default for Throttle {
    fn default() -> Self {
        Throttle {
            word: AtomicU32::new(0),
            requests: Bucket::default(),
            bytes: Bucket::default(),
            began: Instant::now(),
            setting: Mutex::default(),
        }
    }
}

impl Throttle {
    /// Sets the limits anew; what waits is let go by the new ones within moments.
    pub fn set(&self, limits: RateLimits) {
        let mut setting = self.setting.lock().unwrap_or_else(PoisonError::into_inner);
        setting.limits = limits;
        self.apply(&mut setting);
    }

    /// The disk is closed, or open again: what comes from now on must look, with limits or without. What it is closed for
    /// keeps to the limits, and to so many bytes in a second.
    pub(crate) fn set_closed(&self, pace: Option<u64>) {
        let mut setting = self.setting.lock().unwrap_or_else(PoisonError::into_inner);
        setting.closed = pace;
        self.apply(&mut setting);
    }

    /// A range of the disk is held, or none is any more. What waits for the limits goes on waiting by the same setting.
    pub(crate) fn set_held(&self, held: bool) {
        let mut setting = self.setting.lock().unwrap_or_else(PoisonError::into_inner);
        setting.held = held;
        self.store(&setting);
    }

    fn apply(&self, setting: &mut Setting) {
        let limits = setting.limits;
        self.requests.set(limits.iops, limits.iops_burst);
        match setting.closed {
            Some(pace) if limits.bandwidth == 0 || pace < limits.bandwidth => {
                self.bytes.set(pace, RateLimits::usual_burst(pace));
            }
            _ => self.bytes.set(limits.bandwidth, limits.bandwidth_burst),
        }
        self.tell(setting);
    }

    fn tell(&self, setting: &mut Setting) {
        setting.generation = ((setting.generation + 1) & !HELD).max(1);
        self.store(setting);
    }

    fn store(&self, setting: &Setting) {
        let nothing = setting.limits.is_none() && setting.closed.is_none();
        let word = if nothing { 0 } else { setting.generation };
        let held = if setting.held { HELD } else { 0 };
        self.word.store(word | held, Ordering::Release);
    }

    /// The limits as they are.
    pub fn limits(&self) -> RateLimits {
        self.setting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .limits
    }

    /// 0 while there are no limits, the disk is open and no range of it is held: an I/O may go on without another look.
    #[inline]
    pub fn word(&self) -> u32 {
        self.word.load(Ordering::Acquire)
    }

    /// 0 while there are no limits and the disk is open; another number for every setting.
    pub fn setting(&self) -> u32 {
        self.word() & !HELD
    }

    /// Is a range of the disk held?
    pub fn is_held(&self) -> bool {
        self.word() & HELD != 0
    }

    /// The present moment.
    pub fn now(&self) -> Moment {
        Moment(u64::try_from(self.began.elapsed().as_nanos() * 16).unwrap_or(u64::MAX))
    }

    /// Reserves a request that moves so many bytes: from when on it may start.
    pub fn reserve(&self, now: Moment, bytes: u64) -> Moment {
        let request = self.requests.reserve(now.0, 1);
        Moment(request.max(self.bytes.reserve(now.0, bytes)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const MILLISECOND: u64 = SECOND as u64 / 1000;

    fn throttle(limits: RateLimits) -> Throttle {
        let throttle = Throttle::default();
        throttle.set(limits);
        throttle
    }

    #[test]
    fn a_burst_comes_at_once_and_the_rest_at_the_rate() {
        let throttle = throttle(RateLimits {
            iops: 1000,
            iops_burst: 3,
            ..RateLimits::default()
        });
        let now = Moment(50 * MILLISECOND);
        let starts: Vec<u64> = (0..6)
            .map(|_| throttle.reserve(now, 4096).0 / MILLISECOND)
            .collect();
        assert_eq!(starts, [50, 50, 50, 51, 52, 53]);
    }

    #[test]
    fn a_request_larger_than_the_bucket_waits_for_a_full_one_and_the_next_for_its_debt() {
        let throttle = throttle(RateLimits {
            bandwidth: 1_000_000,
            bandwidth_burst: 1000,
            ..RateLimits::default()
        });
        let now = Moment(MILLISECOND);
        assert_eq!(throttle.reserve(now, 10_000), now);
        assert_eq!(
            throttle.reserve(now, 1000).since(now),
            Duration::from_millis(10)
        );
        assert_eq!(throttle.reserve(now, 0), now, "a flush moves nothing");
    }

    #[test]
    fn no_limits_are_a_zero_and_each_setting_has_a_number_of_its_own() {
        let throttle = Throttle::default();
        assert_eq!(throttle.word(), 0);
        let limits = RateLimits {
            iops: 1,
            ..RateLimits::default()
        };
        throttle.set(limits);
        let first = throttle.word();
        throttle.reserve(Moment(0), 1);
        assert_eq!(throttle.reserve(Moment(0), 1).0, SECOND as u64);
        throttle.set(limits);
        assert!(throttle.word() != 0 && throttle.word() != first);
        assert_eq!(
            throttle.reserve(Moment(0), 1).0,
            0,
            "a new setting is a full bucket"
        );
        assert_eq!(throttle.limits(), limits);
        throttle.set(RateLimits::default());
        assert_eq!(throttle.word(), 0);
    }

    #[test]
    fn a_closed_disk_is_told_by_the_word_with_limits_or_without() {
        let throttle = Throttle::default();
        throttle.set_closed(Some(1_000_000));
        assert_ne!(throttle.word(), 0);
        throttle.set(RateLimits::default());
        assert_ne!(throttle.word(), 0, "limits that go do not open it");
        throttle.set_closed(None);
        assert_eq!(throttle.word(), 0);
        let now = Moment(7);
        throttle.reserve(now, 1 << 40);
        assert_eq!(throttle.reserve(now, 1 << 40), now, "it has no limits");
    }

    #[test]
    fn what_a_disk_is_closed_for_keeps_to_its_pace_or_to_a_lower_limit() {
        let bandwidth = |bandwidth| RateLimits {
            bandwidth,
            bandwidth_burst: bandwidth,
            ..RateLimits::default()
        };
        for (limit, first, usual) in [
            (0, 50_000, 100),
            (4_000_000, 50_000, 100),
            (500_000, 500_000, 200),
        ] {
            let throttle = throttle(bandwidth(limit));
            throttle.set_closed(Some(1_000_000));
            let now = Moment(MILLISECOND);
            // what the bucket holds, and a debt
            throttle.reserve(now, first);
            throttle.reserve(now, 100_000);
            let wait = throttle.reserve(now, 1).since(now);
            assert_eq!(wait.as_millis(), usual, "limit {limit}");
            throttle.set_closed(None);
            assert_eq!(throttle.limits(), bandwidth(limit));
            throttle.reserve(now, limit);
            let rest = throttle.reserve(now, limit).since(now).as_millis();
            let expected = if limit == 0 { 0 } else { 1000 };
            assert_eq!(rest, expected, "the limit is as it was");
        }
    }

    #[test]
    fn held_range_is_told_by_the_word_and_is_no_new_setting() {
        let throttle = Throttle::default();
        throttle.set_held(true);
        assert!(throttle.is_held());
        assert_eq!((throttle.word() == 0, throttle.setting()), (false, 0));
        throttle.set(RateLimits {
            iops: 1,
            ..RateLimits::default()
        });
        let setting = throttle.setting();
        assert!(throttle.is_held() && setting != 0);
        throttle.set_held(false);
        assert_eq!((throttle.is_held(), throttle.setting()), (false, setting));
        throttle.set(RateLimits::default());
        assert_eq!(throttle.word(), 0);
    }

    proptest! {
        /// However requests come: in no span of time do more start than burst and rate allow, give or take the last
        /// one; and a bucket that has what is asked for lets nobody wait.
        #[test]
        fn no_span_of_time_has_more_than_burst_and_rate(
            iops in 1u64..100_000, iops_burst in 1u64..1000,
            bandwidth in 1u64..1 << 34, bandwidth_burst in 1u64..1 << 26,
            requests in prop::collection::vec((0u64..20 * MILLISECOND, 0u64..1 << 20), 1..80),
        ) {
            let throttle = throttle(RateLimits { iops, iops_burst, bandwidth, bandwidth_burst });
            let (mut now, mut begun) = (0, Vec::new());
            for (pause, bytes) in requests {
                now += pause;
                let start = throttle.reserve(Moment(now), bytes).0;
                prop_assert!(start >= now);
                begun.push((start, bytes));
            }
            begun.sort_unstable();
            for from in 0..begun.len() {
                let (mut count, mut sum) = (0u128, 0u128);
                for &(start, bytes) in &begun[from..] {
                    let span = u128::from(start - begun[from].0);
                    let allowed = |rate: u64, burst: u64| u128::from(burst) + u128::from(rate) * span / SECOND;
                    prop_assert!(count <= allowed(iops, iops_burst) + 1, "{} requests in {}", count, span);
                    // one that is larger than the bucket goes when it is full
                    prop_assert!(sum <= allowed(bandwidth, bandwidth_burst) + (1 << 20), "{} bytes in {}", sum, span);
                    count += 1;
                    sum += u128::from(bytes);
                }
            }
        }
    }
}
