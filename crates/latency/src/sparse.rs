//! A histogram in nanoseconds with only its used buckets, for transport, merging and reports.

use crate::histogram::rank_of;
use crate::{Clock, Histogram};
use serde::{Deserialize, Serialize};

/// Values in nanoseconds with their counts, ascending. Quantiles are within 1.6 % or half a nanosecond.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct SparseHistogram {
    /// Number of values.
    pub count: u64,
    /// Sum of the values: exact up to 2^53 ns (104 days), rounded above.
    pub sum_ns: f64,
    /// Maximum.
    pub max_ns: u64,
    /// Pairs of value and count, ascending by value.
    pub buckets: Vec<(u64, u64)>,
}

impl SparseHistogram {
    /// Converts a histogram of this clock's ticks to nanoseconds.
    pub fn from_ticks(histogram: &Histogram, clock: &Clock) -> Self {
        // One long conversion gives a more exact ratio than rounded single ones.
        let ns_per_tick = clock.nanos(1 << 40) as f64 / (1u64 << 40) as f64;
        let mut sparse = SparseHistogram {
            count: 0,
            sum_ns: (histogram.sum() as f64 * ns_per_tick).round(),
            max_ns: clock.nanos(histogram.max()),
            buckets: Vec::new(),
        };
        for (ticks, count) in histogram.used_buckets() {
            sparse.count = sparse.count.saturating_add(count);
            push(&mut sparse.buckets, clock.nanos(ticks), count);
        }
        sparse
    }

    /// Creates a histogram of exact values in nanoseconds, for drivers with samples of their own.
    pub fn from_nanos(values: impl IntoIterator<Item = u64>) -> Self {
        let mut values: Vec<u64> = values.into_iter().collect();
        values.sort_unstable();
        let mut sparse = SparseHistogram::default();
        for value in values {
            sparse.count += 1;
            sparse.sum_ns += value as f64;
            sparse.max_ns = value;
            push(&mut sparse.buckets, value, 1);
        }
        sparse
    }

    /// Returns true if there are no values.
    pub const fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the mean in nanoseconds; 0 if empty.
    pub fn mean_ns(&self) -> f64 {
        if self.count == 0 {
            0.0
        } else {
            self.sum_ns / self.count as f64
        }
    }

    /// Returns the value at quantile `q` (0 to 1) by nearest rank; 0 if empty.
    pub fn quantile_ns(&self, q: f64) -> u64 {
        let rank = rank_of(q, self.count);
        let mut seen = 0u64;
        for (value, count) in &self.buckets {
            seen = seen.saturating_add(*count);
            if seen >= rank {
                return *value;
            }
        }
        self.max_ns
    }

    /// Returns the number of values up to `nanos`, as for the cumulative buckets of a metrics page.
    pub fn count_at_most(&self, nanos: u64) -> u64 {
        let below = self.buckets.iter().take_while(|(value, _)| *value <= nanos);
        below.fold(0, |sum: u64, (_, count)| sum.saturating_add(*count))
    }

    /// Adds all counts of `other`.
    pub fn merge(&mut self, other: &SparseHistogram) {
        self.count = self.count.saturating_add(other.count);
        self.sum_ns += other.sum_ns;
        self.max_ns = self.max_ns.max(other.max_ns);
        if other.buckets.is_empty() {
            return;
        }
        let mut both = std::mem::take(&mut self.buckets);
        both.extend_from_slice(&other.buckets);
        both.sort_by_key(|(value, _)| *value);
        for (value, count) in both {
            push(&mut self.buckets, value, count);
        }
    }

    /// Returns the difference to `earlier`, a histogram of the same source. The maximum is exact only if it was reached
    /// since then; otherwise it is that of the highest bucket that grew.
    #[must_use]
    pub fn since(&self, earlier: &SparseHistogram) -> SparseHistogram {
        let mut old = earlier.buckets.iter().peekable();
        let mut grown = SparseHistogram {
            sum_ns: (self.sum_ns - earlier.sum_ns).max(0.0),
            ..Default::default()
        };
        // The highest bucket is reported as the maximum. The maximum may have grown within the bucket, so the earlier
        // histogram may have the bucket at a smaller value. In merged histograms such a bucket may be found one value
        // later.
        let mut before = 0u64;
        for (value, count) in &self.buckets {
            while let Some((_, count)) = old.next_if(|(before, _)| before <= value) {
                before = before.saturating_add(*count);
            }
            let since = count.saturating_sub(before);
            before = before.saturating_sub(*count);
            let count = since;
            if count > 0 {
                grown.count = grown.count.saturating_add(count);
                grown.max_ns = *value;
                grown.buckets.push((*value, count));
            }
        }
        if self.max_ns > earlier.max_ns {
            grown.max_ns = self.max_ns;
        }
        grown
    }
}

/// Appends a value that is not below the last one.
fn push(buckets: &mut Vec<(u64, u64)>, value: u64, count: u64) {
    match buckets.last_mut() {
        Some((last, sum)) if *last == value => *sum = sum.saturating_add(count),
        _ => buckets.push((value, count)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn of(values: &[u64]) -> SparseHistogram {
        SparseHistogram::from_nanos(values.iter().copied())
    }

    #[test]
    fn a_maximum_that_grew_within_its_bucket_counts_once() {
        let (clock, _) = Clock::simulated();
        let histogram = Histogram::new();
        for value in [20_000_100, 20_000_200, 20_000_300] {
            histogram.record(value, 1);
        }
        let before = SparseHistogram::from_ticks(&histogram, &clock);
        histogram.record(20_090_000, 1);
        let after = SparseHistogram::from_ticks(&histogram, &clock);
        assert_ne!(
            before.buckets[0].0, after.buckets[0].0,
            "one bucket, shown otherwise"
        );
        let since = after.since(&before);
        assert_eq!((since.count, since.sum_ns), (1, 20_090_000.0));
    }

    #[test]
    fn maxima_of_merged_histograms_in_one_bucket_count_once() {
        let (clock, _) = Clock::simulated();
        let (one, other) = (Histogram::new(), Histogram::new());
        one.record(20_000_100, 3);
        other.record(20_050_000, 1);
        let merged = || {
            let mut both = SparseHistogram::from_ticks(&one, &clock);
            both.merge(&SparseHistogram::from_ticks(&other, &clock));
            both
        };
        let before = merged();
        one.record(20_090_000, 1);
        assert_eq!(merged().since(&before).count, 1);
        assert_eq!(merged().since(&merged()).count, 0);
    }

    fn values() -> impl Strategy<Value = Vec<u64>> {
        prop::collection::vec(0u64..2000, 0..60)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn merge_is_associative_and_since_undoes_it(a in values(), b in values(), c in values()) {
            let mut left = of(&a);
            left.merge(&of(&b));
            left.merge(&of(&c));
            let mut right_part = of(&b);
            right_part.merge(&of(&c));
            let mut right = of(&a);
            right.merge(&right_part);
            prop_assert_eq!(&left, &right);
            prop_assert_eq!(&left, &of(&[a.clone(), b.clone(), c.clone()].concat()));
            prop_assert_eq!(left.since(&of(&a)), right_part);
        }

        #[test]
        fn ticks_become_nanoseconds_and_keep_their_quantiles(values in prop::collection::vec(1u64..1 << 40, 1..60)) {
            let (clock, _) = Clock::simulated();
            let histogram = Histogram::new();
            values.iter().for_each(|value| histogram.record(*value, 1));
            let sparse = SparseHistogram::from_ticks(&histogram, &clock);
            for q in [0.0, 0.5, 0.99, 1.0] {
                prop_assert_eq!(sparse.quantile_ns(q), histogram.quantile(q));
            }
            prop_assert_eq!(sparse.count, histogram.count());
            prop_assert_eq!(sparse.sum_ns, histogram.sum() as f64);
            prop_assert_eq!(sparse.count_at_most(sparse.max_ns), sparse.count);
            let json = serde_json::to_string(&sparse).unwrap();
            prop_assert_eq!(serde_json::from_str::<SparseHistogram>(&json).unwrap(), sparse);
        }
    }

    #[test]
    fn empty_histogram_has_zeroes() {
        let empty = SparseHistogram::default();
        assert!(empty.is_empty());
        assert_eq!(
            (
                empty.quantile_ns(0.5),
                empty.mean_ns(),
                empty.count_at_most(9)
            ),
            (0, 0.0, 0)
        );
        assert_eq!(of(&[3]).since(&of(&[3])), empty);
    }

    #[test]
    fn counts_saturate() {
        let huge = SparseHistogram {
            count: u64::MAX,
            sum_ns: 1.0,
            max_ns: 9,
            buckets: vec![(9, u64::MAX)],
        };
        let mut twice = huge.clone();
        twice.merge(&huge);
        assert_eq!((twice.count, twice.quantile_ns(1.0)), (u64::MAX, 9));
    }
}
