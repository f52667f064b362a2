//! A token bucket that all workers share without a lock: one atomic word, the time at which the bucket is full again.

use crate::sync::{AtomicU64, Ordering};

/// Time units per second: sixteenths of a nanosecond keep high rates exact and last for 18 years.
pub(crate) const SECOND: u128 = 16_000_000_000;

/// Marks a full bucket of a new setting. The other bits are the number of the setting. Times are smaller.
const FULL: u64 = 1 << 63;

#[derive(Debug)]
pub(crate) struct Bucket {
    /// Tokens per second; 0: no limit.
    rate: AtomicU64,
    /// Capacity of the bucket in tokens.
    depth: AtomicU64,
    /// Time at which it is full again, or [`FULL`] with the number of the setting.
    full_at: AtomicU64,
}

impl Default for Bucket {
    fn default() -> Bucket {
        Bucket {
            rate: AtomicU64::new(0),
            depth: AtomicU64::new(0),
            full_at: AtomicU64::new(FULL),
        }
    }
}

impl Bucket {
    /// Fills the bucket and sets its rate. Each setting has another number.
    pub(crate) fn set(&self, rate: u64, depth: u64, setting: u32) {
        self.rate.store(rate, Ordering::Relaxed);
        self.depth.store(depth, Ordering::Relaxed);
        // A reservation that sees the full bucket also sees its rate. One that has read the old rate finds another number.
        let full = FULL | u64::from(setting);
        // An exchange instead of a store, because loom does not order a store after the exchange of a reservation.
        self.full_at.swap(full, Ordering::Release);
    }

    /// Takes tokens; returns the time from when they are available. More than the bucket holds waits for a full one.
    pub(crate) fn reserve(&self, now: u64, tokens: u64) -> u64 {
        let mut full_at = self.full_at.load(Ordering::Acquire);
        loop {
            // Read in each attempt: a charge at an old rate would be a debt unknown to the bucket.
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
            let begin = match full_at >= FULL {
                true => now,
                false => full_at.max(now),
            };
            let after = begin.saturating_add(cost).min(FULL - 1);
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
