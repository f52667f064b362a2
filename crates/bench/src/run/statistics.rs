//! Median, spread, and the confidence interval of a ratio by bootstrap.

use fastrand::Rng;
use serde::{Deserialize, Serialize};

/// Median and range of values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// Median.
    pub median: f64,
    /// Minimum.
    pub min: f64,
    /// Maximum.
    pub max: f64,
}

impl Spread {
    /// Returns half of the range as a fraction of the median.
    pub fn relative(&self) -> f64 {
        if self.median > 0.0 {
            (self.max - self.min) / 2.0 / self.median
        } else {
            0.0
        }
    }
}

/// An estimate with its 95 % confidence interval.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Interval {
    /// Estimate.
    pub value: f64,
    /// Lower end.
    pub low: f64,
    /// Upper end.
    pub high: f64,
}

fn median(sorted: &[f64]) -> f64 {
    match sorted.len() {
        0 => 0.0,
        count if count % 2 == 1 => sorted[count / 2],
        count => f64::midpoint(sorted[count / 2 - 1], sorted[count / 2]),
    }
}

/// Returns median, minimum and maximum.
pub fn spread(values: &[f64]) -> Spread {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    Spread {
        median: median(&sorted),
        min: sorted.first().copied().unwrap_or(0.0),
        max: sorted.last().copied().unwrap_or(0.0),
    }
}

/// Number of resamplings: enough for two digits of a 95 % interval.
const RESAMPLINGS: usize = 2000;

/// Returns the ratio of the medians of `a` and `b`, measured in turns, with its interval. With equal lengths, paired turns are drawn
/// together, so that drift of the machine cancels.
pub fn bootstrap_ratio(a: &[f64], b: &[f64]) -> Option<Interval> {
    if a.len() != b.len() {
        return bootstrap_ratio_apart(a, b);
    }
    ratio(a, b, |random| {
        let pairs = (0..a.len()).map(|_| random.usize(..a.len()));
        pairs.map(|at| (a[at], b[at])).unzip()
    })
}

/// As [`bootstrap_ratio`], for values that are not paired.
pub fn bootstrap_ratio_apart(a: &[f64], b: &[f64]) -> Option<Interval> {
    ratio(a, b, |random| {
        let mut of = |values: &[f64]| -> Vec<f64> {
            let draw = |_: &f64| values[random.usize(..values.len())];
            values.iter().map(draw).collect()
        };
        (of(a), of(b))
    })
}

fn ratio(
    a: &[f64],
    b: &[f64],
    mut draw: impl FnMut(&mut Rng) -> (Vec<f64>, Vec<f64>),
) -> Option<Interval> {
    let base = spread(b).median;
    if a.is_empty() || b.is_empty() || base <= 0.0 {
        return None;
    }
    let mut random = Rng::with_seed(95);
    let mut ratios: Vec<f64> = (0..RESAMPLINGS)
        .filter_map(|_| {
            let (of_a, of_b) = draw(&mut random);
            let below = spread(&of_b).median;
            (below > 0.0).then(|| spread(&of_a).median / below)
        })
        .collect();
    ratios.sort_by(f64::total_cmp);
    let at = |q: f64| {
        let index = (q * ratios.len() as f64) as usize;
        ratios
            .get(index.min(ratios.len().saturating_sub(1)))
            .copied()
    };
    Some(Interval {
        value: spread(a).median / base,
        low: at(0.025)?,
        high: at(0.975)?,
    })
}

/// Returns the mean of the middle half: insensitive to outliers, and based on more values than the median.
pub fn middle_mean(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let outside = sorted.len() / 4;
    let middle = &sorted[outside..sorted.len() - outside];
    middle.iter().sum::<f64>() / middle.len().max(1) as f64
}

/// Returns the mean of the middle half of independent values, with its interval.
pub fn bootstrap_middle(values: &[f64]) -> Option<Interval> {
    if values.is_empty() {
        return None;
    }
    let mut random = Rng::with_seed(95);
    let mut means: Vec<f64> = (0..RESAMPLINGS)
        .map(|_| {
            let draw = |_: &f64| values[random.usize(..values.len())];
            let drawn: Vec<f64> = values.iter().map(draw).collect();
            middle_mean(&drawn)
        })
        .collect();
    means.sort_by(f64::total_cmp);
    let at = |q: f64| means.get((q * means.len() as f64) as usize).copied();
    Some(Interval {
        value: middle_mean(values),
        low: at(0.025)?,
        high: at(0.975)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn outliers_spare_the_median_and_values_narrow_its_interval() {
        assert_eq!(
            middle_mean(&[1.0, -900.0, 2.0, 3.0, 2.0, 1.0, 3.0, 5000.0]),
            2.0
        );
        assert_eq!((middle_mean(&[7.0]), middle_mean(&[])), (7.0, 0.0));
        let values: Vec<f64> = (0..400).map(|n| f64::from(n * 37 % 101)).collect();
        let [few, many] = [&values[..20], &values[..]].map(|v| bootstrap_middle(v).unwrap());
        assert!(many.low < 50.0 && 50.0 < many.high, "{many:?}");
        assert!(
            many.high - many.low < (few.high - few.low) / 2.0,
            "{few:?} {many:?}"
        );
        assert_eq!(bootstrap_middle(&[]), None);
    }

    #[test]
    fn median_and_spread() {
        let values = spread(&[3.0, 1.0, 2.0, 4.0]);
        assert_eq!((values.median, values.min, values.max), (2.5, 1.0, 4.0));
        assert_eq!(values.relative(), 0.6);
        assert_eq!(spread(&[]), Spread::default());
    }

    #[test]
    fn a_ratio_lies_in_its_interval_and_drift_cancels() {
        // Both drift equally: the ratio is exact.
        let b = [100.0, 120.0, 90.0, 110.0, 105.0];
        let a = b.map(|x| 2.0 * x);
        let ratio = bootstrap_ratio(&a, &b).unwrap();
        assert!((ratio.value - 2.0).abs() < 1e-9);
        assert!((ratio.low - 2.0).abs() < 1e-9 && (ratio.high - 2.0).abs() < 1e-9);
        // Without pairing it is not exact.
        let apart = bootstrap_ratio_apart(&a, &b).unwrap();
        assert!(apart.low < 1.9 && apart.high > 2.1, "{apart:?}");
        let noisy = [90.0, 130.0, 100.0];
        let ratio = bootstrap_ratio(&noisy, &[50.0, 50.0, 50.0, 50.0]).unwrap();
        assert!(ratio.low < ratio.value && ratio.value < ratio.high);
        assert_eq!(bootstrap_ratio(&[], &b), None);
        assert_eq!(bootstrap_ratio(&b, &[0.0]), None);
    }
}
