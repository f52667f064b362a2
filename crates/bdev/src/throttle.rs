//! Rate limits of a disk: requests and bytes per second.
//!
//! Two token buckets shared by all workers ([`Bucket`]). A request reserves tokens and gets
//! its earliest start time; waiting and its order are up to workers. The disk's [`Conditions`] show whether there are limits. They may
//! change at any time, on any thread.

use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use latency::Clock;

use crate::bucket::Bucket;
use crate::conditions::{Condition, Conditions};

/// Rate limits of a disk; 0: no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RateLimits {
    /// Requests per second.
    pub iops: u64,
    /// Requests that may start at once after a pause.
    pub iops_burst: u64,
    /// Bytes read and written per second.
    pub bandwidth: u64,
    /// Bytes that may be transferred at once after a pause.
    pub bandwidth_burst: u64,
}

impl RateLimits {
    /// Returns the default burst of a rate: a twentieth of a second.
    pub const fn usual_burst(rate: u64) -> u64 {
        rate.div_ceil(20)
    }

    /// Returns true if there are no limits.
    pub const fn is_none(&self) -> bool {
        self.iops == 0 && self.bandwidth == 0
    }
}

/// A time on a worker's clock. Real clocks of a process share one zero, so that workers can compare times.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Moment(u64);

impl Moment {
    /// Returns the present time.
    pub fn now(clock: &Clock) -> Moment {
        Moment::default().plus(clock.elapsed())
    }

    /// Returns the time that is later by `after`.
    pub fn plus(self, after: Duration) -> Moment {
        let units = u64::try_from(after.as_nanos() * 16).unwrap_or(u64::MAX);
        Moment(self.0.saturating_add(units))
    }

    /// Returns the duration since `earlier`.
    pub fn since(self, earlier: Moment) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0).div_ceil(16))
    }
}

/// Rate limits of one disk, as its workers enforce them.
#[derive(Debug)]
pub struct Throttle {
    conditions: Arc<Conditions>,
    /// 0: no limits.
    generation: AtomicU32,
    requests: Bucket,
    bytes: Bucket,
    setting: Mutex<Setting>,
}

#[derive(Debug, Default)]
struct Setting {
    generation: u32,
    limits: RateLimits,
    /// Additional temporary limit in bytes per second.
    pace: Option<u64>,
}

impl Default for Throttle {
    fn default() -> Self {
        Throttle::new(Arc::default())
    }
}

impl Throttle {
    /// Creates a throttle without limits; the conditions show when there are some.
    pub(crate) fn new(conditions: Arc<Conditions>) -> Throttle {
        Throttle {
            conditions,
            generation: AtomicU32::new(0),
            requests: Bucket::default(),
            bytes: Bucket::default(),
            setting: Mutex::default(),
        }
    }

    /// Sets the limits; waiting requests follow within moments.
    pub fn set(&self, limits: RateLimits) {
        let mut setting = self.setting.lock().unwrap_or_else(PoisonError::into_inner);
        setting.limits = limits;
        self.apply(&mut setting);
    }

    /// Sets or removes an additional temporary limit in bytes per second.
    pub(crate) fn set_pace(&self, pace: Option<u64>) {
        let mut setting = self.setting.lock().unwrap_or_else(PoisonError::into_inner);
        if setting.pace == pace {
            // Setting it again would permit another burst.
            return;
        }
        setting.pace = pace;
        self.apply(&mut setting);
    }

    fn apply(&self, setting: &mut Setting) {
        let limits = setting.limits;
        setting.generation = setting.generation.wrapping_add(1).max(1);
        let number = setting.generation;
        self.requests.set(limits.iops, limits.iops_burst, number);
        let (rate, burst) = match setting.pace {
            Some(pace) if limits.bandwidth == 0 || pace < limits.bandwidth => {
                (pace, RateLimits::usual_burst(pace))
            }
            _ => (limits.bandwidth, limits.bandwidth_burst),
        };
        self.bytes.set(rate, burst, number);
        let limited = !limits.is_none() || setting.pace.is_some();
        let shown = if limited { setting.generation } else { 0 };
        self.generation.store(shown, Ordering::Release);
        self.conditions.set(Condition::Limited, limited);
    }

    /// Returns the configured limits.
    pub fn limits(&self) -> RateLimits {
        self.setting
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .limits
    }

    /// Returns 0 without limits, and a different number for every setting.
    pub fn setting(&self) -> u32 {
        self.generation.load(Ordering::Acquire)
    }

    /// Reserves a request of `bytes`; returns its earliest start time.
    pub fn reserve(&self, now: Moment, bytes: u64) -> Moment {
        let request = self.requests.reserve(now.0, 1);
        Moment(request.max(self.bytes.reserve(now.0, bytes)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::bucket::SECOND;

    const MILLISECOND: u64 = SECOND as u64 / 1000;

    fn throttle(limits: RateLimits) -> Throttle {
        let throttle = Throttle::default();
        throttle.set(limits);
        throttle
    }

    #[test]
    fn burst_passes_immediately_and_the_rest_at_the_rate() {
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
    fn request_larger_than_the_bucket_leaves_a_debt_to_the_next() {
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
    fn each_setting_has_its_number_and_no_limits_have_zero() {
        let throttle = Throttle::default();
        assert_eq!(throttle.setting(), 0);
        let limits = RateLimits {
            iops: 1,
            ..RateLimits::default()
        };
        throttle.set(limits);
        let first = throttle.setting();
        throttle.reserve(Moment(0), 1);
        assert_eq!(throttle.reserve(Moment(0), 1).0, SECOND as u64);
        throttle.set(limits);
        assert!(throttle.setting() != 0 && throttle.setting() != first);
        assert!(throttle.conditions.has(Condition::Limited));
        assert_eq!(
            throttle.reserve(Moment(0), 1).0,
            0,
            "a new setting is a full bucket"
        );
        assert_eq!(throttle.limits(), limits);
        throttle.set(RateLimits::default());
        assert_eq!(throttle.setting(), 0);
        assert!(throttle.conditions.is_clear());
    }

    #[test]
    fn pace_applies_with_and_without_limits_until_removed() {
        let throttle = Throttle::default();
        throttle.set_pace(Some(1_000_000));
        assert_ne!(throttle.setting(), 0);
        throttle.set(RateLimits::default());
        assert_ne!(throttle.setting(), 0, "limits that go do not lift it");
        throttle.set_pace(None);
        assert_eq!(throttle.setting(), 0);
        let now = Moment(7);
        throttle.reserve(now, 1 << 40);
        assert_eq!(throttle.reserve(now, 1 << 40), now, "it has no limits");
    }

    #[test]
    fn lower_of_pace_and_limit_applies() {
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
            throttle.set_pace(Some(1_000_000));
            let now = Moment(MILLISECOND);
            // the content of the bucket, and a debt
            throttle.reserve(now, first);
            throttle.reserve(now, 100_000);
            let wait = throttle.reserve(now, 1).since(now);
            assert_eq!(wait.as_millis(), usual, "limit {limit}");
            throttle.set_pace(None);
            assert_eq!(throttle.limits(), bandwidth(limit));
            throttle.reserve(now, limit);
            let rest = throttle.reserve(now, limit).since(now).as_millis();
            let expected = if limit == 0 { 0 } else { 1000 };
            assert_eq!(rest, expected, "the limit is as it was");
        }
    }

    proptest! {
        /// In no span of time do more requests start than burst and rate permit, give or take the last one. A bucket with enough tokens
        /// delays none.
        #[test]
        fn no_interval_exceeds_burst_and_rate(
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
                    // one larger than the bucket starts when it is full
                    prop_assert!(sum <= allowed(bandwidth, bandwidth_burst) + (1 << 20), "{} bytes in {}", sum, span);
                    count += 1;
                    sum += u128::from(bytes);
                }
            }
        }
    }
}
