//! A log-linear histogram of clock ticks with a fixed number of buckets.
//!
//! Written by one thread and readable from any ([`Word`]). Recording takes a few instructions and cannot fail, allocate or
//! overflow. Values below 64 have a bucket each. Above, every octave has 32 buckets, and a bucket is reported as its
//! middle, so the relative error is at most 1/64 (1.6 %). Values of 2^42 ticks (24 minutes at 3 GHz) and more share the
//! last bucket.

use crate::Word;

/// log2 of the buckets per octave.
const SUB_BITS: u32 = 5;
const SUB_BUCKETS: usize = 1 << SUB_BITS;
/// Values are limited to 2^VALUE_BITS - 1 for bucket selection.
const VALUE_BITS: u32 = 42;
/// The largest value outside the shared last bucket.
const VALUE_MAX: u64 = (1 << VALUE_BITS) - 1;
/// The linear part has as many buckets as two octaves.
const BUCKETS: usize = (VALUE_BITS - SUB_BITS + 1) as usize * SUB_BUCKETS;

/// Counts per bucket, with the exact sum and maximum. Written by one thread.
#[derive(Clone, PartialEq, Eq)]
pub struct Histogram {
    /// Lower and upper half of the sum; the upper half changes once in months.
    sum_low: Word,
    sum_high: Word,
    max: Word,
    buckets: [Word; BUCKETS],
}

/// Returns the bucket of a value, below [`BUCKETS`] for every value.
#[inline(always)]
const fn bucket_of(value: u64) -> usize {
    if value > VALUE_MAX {
        return BUCKETS - 1;
    }
    // For a value below 2 * SUB_BUCKETS the shift is 0 and the bucket equals the value.
    let shift = (63 - (value | SUB_BUCKETS as u64).leading_zeros()) - SUB_BITS;
    shift as usize * SUB_BUCKETS + (value >> shift) as usize
}

/// Adds to a count with saturation.
#[inline]
fn add(count: &Word, weight: u64) {
    match count.get().checked_add(weight) {
        Some(sum) => count.set(sum),
        None => count.set(u64::MAX),
    }
}

/// Returns the middle of a bucket, within 1/64 of each of its values.
const fn middle_of(bucket: usize) -> u64 {
    if bucket < 2 * SUB_BUCKETS {
        return bucket as u64;
    }
    let shift = (bucket / SUB_BUCKETS - 1) as u32;
    let low = ((bucket % SUB_BUCKETS + SUB_BUCKETS) as u64) << shift;
    low + (1 << shift) / 2
}

impl Histogram {
    /// Upper bound of the relative error of [`Histogram::quantile`].
    pub const RELATIVE_ERROR: f64 = 1.0 / 64.0;

    /// Creates an empty histogram.
    pub const fn new() -> Self {
        Histogram {
            sum_low: Word::new(0),
            sum_high: Word::new(0),
            max: Word::new(0),
            buckets: [const { Word::new(0) }; BUCKETS],
        }
    }

    /// Records `weight` requests that took `ticks` each.
    #[inline(always)]
    pub fn record(&self, ticks: u64, weight: u64) {
        if ticks == 0 {
            // A span without work, such as a suppressed notification, changes neither sum nor maximum.
            return add(&self.buckets[0], weight);
        }
        // `bucket_of` is in range; the pattern avoids an unreachable panic path.
        if let Some(bucket) = self.buckets.get(bucket_of(ticks)) {
            add(bucket, weight);
        }
        // Branches that are almost never taken cost less than branch-free arithmetic.
        match ticks
            .checked_mul(weight)
            .and_then(|product| self.sum_low.get().checked_add(product))
        {
            Some(sum_low) => self.sum_low.set(sum_low),
            None => self.add_to_sum(u128::from(ticks) * u128::from(weight)),
        }
        if ticks > self.max.get() && weight > 0 {
            self.max.set(ticks);
        }
    }

    #[cold]
    fn add_to_sum(&self, ticks: u128) {
        let sum = self.sum().saturating_add(ticks);
        self.sum_low.set(sum as u64);
        self.sum_high.set((sum >> 64) as u64);
    }

    /// Adds all counts of `other`.
    pub fn merge(&self, other: &Histogram) {
        for (mine, theirs) in self.buckets.iter().zip(&other.buckets) {
            mine.set(mine.get().saturating_add(theirs.get()));
        }
        self.add_to_sum(other.sum());
        self.max.set(self.max.get().max(other.max.get()));
    }

    /// Resets the histogram.
    pub fn clear(&self) {
        for word in self.buckets.iter() {
            word.set(0);
        }
        for word in [&self.sum_low, &self.sum_high, &self.max] {
            word.set(0);
        }
    }

    /// Returns the number of recorded values.
    pub fn count(&self) -> u64 {
        self.used_buckets()
            .fold(0, |sum: u64, (_, count)| sum.saturating_add(count))
    }

    /// Returns the exact maximum.
    pub fn max(&self) -> u64 {
        self.max.get()
    }

    /// Returns the exact sum.
    pub fn sum(&self) -> u128 {
        u128::from(self.sum_high.get()) << 64 | u128::from(self.sum_low.get())
    }

    /// Returns the mean; 0 if empty.
    pub fn mean(&self) -> f64 {
        match self.count() {
            0 => 0.0,
            count => self.sum() as f64 / count as f64,
        }
    }

    /// Returns the value at quantile `q` (0 to 1) by nearest rank, within [`Histogram::RELATIVE_ERROR`]; 0 if empty.
    pub fn quantile(&self, q: f64) -> u64 {
        let rank = rank_of(q, self.count());
        let mut seen = 0u64;
        for (value, count) in self.used_buckets() {
            seen = seen.saturating_add(count);
            if seen >= rank {
                return value;
            }
        }
        self.max()
    }

    /// Returns the used buckets in ascending order: middle (at most the maximum) and count.
    pub fn used_buckets(&self) -> impl Iterator<Item = (u64, u64)> + '_ {
        // Read once, so that the values ascend even while the owner writes.
        let max = self.max();
        // Most octaves are empty, which takes a few instructions to detect.
        let octaves = self.buckets.chunks_exact(SUB_BUCKETS).enumerate();
        let used = octaves
            .filter(|(_, counts)| counts.iter().fold(0, |any, count| any | count.get()) != 0);
        used.flat_map(move |(octave, counts)| {
            let counts = counts.iter().map(Word::get).enumerate();
            let counts = counts.filter(|(_, count)| *count > 0);
            counts.map(move |(step, count)| (value_of(octave * SUB_BUCKETS + step, max), count))
        })
    }
}

fn value_of(bucket: usize, max: u64) -> u64 {
    if bucket == BUCKETS - 1 {
        max
    } else {
        middle_of(bucket).min(max)
    }
}

/// Returns the nearest rank, from 1 to `count`, of quantile `q`.
pub(crate) fn rank_of(q: f64, count: u64) -> u64 {
    // A float that is too large, negative or NaN is clamped by the cast, then by `clamp`.
    ((q * count as f64).ceil() as u64).clamp(1, count.max(1))
}

impl Default for Histogram {
    fn default() -> Self {
        Histogram::new()
    }
}

impl std::fmt::Debug for Histogram {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Histogram")
            .field("count", &self.count())
            .field("max", &self.max())
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Values with the distribution of latencies: any order of magnitude.
    fn values() -> impl Strategy<Value = Vec<u64>> {
        prop::collection::vec(
            (0u32..41, any::<u64>()).prop_map(|(bits, noise)| noise & ((2 << bits) - 1)),
            1..200,
        )
    }

    fn filled(values: &[u64]) -> Histogram {
        let histogram = Histogram::new();
        values.iter().for_each(|value| histogram.record(*value, 1));
        histogram
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn quantiles_agree_with_an_exact_sort(mut values in values(), q in 0.0f64..=1.0) {
            let histogram = filled(&values);
            values.sort_unstable();
            for q in [q, 0.0, 0.5, 0.99, 0.999, 1.0] {
                let exact = values[(q * values.len() as f64).ceil().max(1.0) as usize - 1];
                let error = histogram.quantile(q).abs_diff(exact) as f64;
                prop_assert!(error <= exact as f64 * Histogram::RELATIVE_ERROR,
                    "quantile {q}: {} for {exact}", histogram.quantile(q));
            }
            prop_assert_eq!(histogram.max(), values[values.len() - 1]);
            prop_assert_eq!(histogram.count(), values.len() as u64);
            prop_assert_eq!(histogram.sum(), values.iter().map(|v| u128::from(*v)).sum::<u128>());
        }

        #[test]
        fn a_weight_equals_repeated_records(values in values(), weight in 0u64..20) {
            let (weighted, repeated) = (Histogram::new(), Histogram::new());
            for value in values {
                weighted.record(value, weight);
                (0..weight).for_each(|_| repeated.record(value, 1));
            }
            prop_assert_eq!(weighted, repeated);
        }

        #[test]
        fn merge_is_associative_and_equals_recording_all(a in values(), b in values(), c in values()) {
            let (ha, hb, hc) = (filled(&a), filled(&b), filled(&c));
            let left = ha.clone();
            left.merge(&hb);
            left.merge(&hc);
            let right_part = hb;
            right_part.merge(&hc);
            let right = ha;
            right.merge(&right_part);
            prop_assert_eq!(&left, &right);
            prop_assert_eq!(left, filled(&[a, b, c].concat()));
        }

        #[test]
        fn every_value_is_near_the_middle_of_its_bucket(value in any::<u64>(), shift in 0u32..64) {
            let value = value >> shift;
            let bucket = bucket_of(value);
            prop_assert!(bucket < BUCKETS);
            if value <= VALUE_MAX {
                let error = middle_of(bucket).abs_diff(value) as f64;
                prop_assert!(error <= value as f64 * Histogram::RELATIVE_ERROR);
            }
        }
    }

    #[test]
    fn buckets_are_contiguous_and_the_last_one_takes_the_largest_values() {
        let mut last = 0;
        for octave in 0..VALUE_BITS {
            for step in 0..256u64 {
                let value = (1 << octave) + (step << octave) / 256;
                let bucket = bucket_of(value);
                assert!(bucket == last || bucket == last + 1, "{value}");
                last = bucket;
            }
        }
        assert_eq!(last, BUCKETS - 1);
        assert_eq!(bucket_of(u64::MAX), BUCKETS - 1);
    }

    #[test]
    fn counts_and_sums_saturate() {
        let histogram = Histogram::new();
        for _ in 0..3 {
            histogram.record(u64::MAX, u64::MAX);
        }
        assert_eq!(
            (histogram.count(), histogram.max(), histogram.sum()),
            (u64::MAX, u64::MAX, u128::MAX)
        );
        assert_eq!(histogram.quantile(0.5), u64::MAX);
        let other = histogram.clone();
        histogram.merge(&other);
        histogram.record(1, 1);
        assert_eq!(histogram.count(), u64::MAX);
        assert!(histogram.mean().is_finite());
    }

    #[test]
    fn empty_histogram_has_zeroes() {
        let histogram = Histogram::new();
        histogram.record(5, 0);
        assert_eq!(
            (histogram.count(), histogram.max(), histogram.quantile(0.99)),
            (0, 0, 0)
        );
        assert_eq!(histogram.mean(), 0.0);
        histogram.record(5, 1);
        assert_eq!(
            (histogram.quantile(f64::NAN), histogram.quantile(7.0)),
            (5, 5)
        );
        histogram.clear();
        assert_eq!(histogram, Histogram::default());
    }
}
