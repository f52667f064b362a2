//! Conclusions from paired turns.
//!
//! Two variants are measured alternately, so each turn gives one ratio. The logarithms of these ratios are tested with a paired t-test. A
//! difference needs an interval that excludes 1. Equality needs an interval inside the margin [`MATTERS`]. Otherwise more turns are needed.
//!
//! Rejected: bootstrap of the medians. With four turns its 95 % interval contains the true ratio in less than nine of ten studies.

use serde::{Deserialize, Serialize};

use crate::run::Interval;

/// Smallest relative difference that matters.
pub const MATTERS: f64 = 0.03;
/// Method of all conclusions, for tables and pages.
pub const METHOD: &str = "paired t-test of the logarithms of the ratios of turns, with intervals of 98 % for all comparisons of a list together (Bonferroni correction)";
/// Fewest turns for a conclusion: the deviation of two is random.
const TURNS_MIN: usize = 3;
/// Largest number of turns that is estimated.
const TURNS_MAX: usize = 10_000;
/// Probability of a wrong interval. Below 5 %, so that conclusions are right in 95 % of studies even if the noise is not normal.
const ERROR: f64 = 0.02;

/// Conclusion from a comparison.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The first variant has less.
    Less,
    /// The first variant has more.
    More,
    /// A difference that matters is excluded.
    Equal,
    /// More turns are needed: their estimated number, if it is below 10,000.
    Undecided(Option<u32>),
}

/// Comparison of two variants by the ratios of their turns.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Comparison {
    /// Geometric mean of the ratios, with its interval. Without two turns the interval is unlimited.
    pub ratio: Interval,
    /// Number of pairs of turns.
    pub turns: usize,
    /// Number of further pairs with a value of 0, which have no ratio.
    #[serde(default)]
    pub without_result: usize,
    /// Mean of the logarithms.
    mean: f64,
    /// Standard deviation of the logarithms.
    deviation: f64,
    /// Probability of a wrong interval.
    error: f64,
}

impl Comparison {
    /// Compares pairs of values of the same turn. Pairs with a value of 0 are only counted. In 98 % of studies with this number of
    /// comparisons all intervals contain the truth.
    /// Returns `None` without a pair of positive values.
    pub fn of(pairs: &[(f64, f64)], comparisons: usize) -> Option<Comparison> {
        let positive = pairs
            .iter()
            .filter(|(one, other)| *one > 0.0 && *other > 0.0);
        let logs: Vec<f64> = positive.map(|(one, other)| (one / other).ln()).collect();
        let turns = logs.len();
        if turns == 0 {
            return None;
        }
        let mean = logs.iter().sum::<f64>() / turns as f64;
        let squares: f64 = logs.iter().map(|log| (log - mean).powi(2)).sum();
        let mut comparison = Comparison {
            ratio: Interval {
                value: mean.exp(),
                low: 0.0,
                high: f64::INFINITY,
            },
            turns,
            without_result: pairs.len() - turns,
            mean,
            deviation: (squares / (turns.max(2) - 1) as f64).sqrt(),
            error: ERROR / comparisons.max(1) as f64,
        };
        if turns > 1 {
            (comparison.ratio.low, comparison.ratio.high) = comparison.range(turns);
        }
        Some(comparison)
    }

    /// Returns the interval after this number of turns, if mean and deviation stay as they are.
    fn range(&self, turns: usize) -> (f64, f64) {
        let half = t_quantile(self.error, turns - 1) * self.deviation / (turns as f64).sqrt();
        ((self.mean - half).exp(), (self.mean + half).exp())
    }

    /// Returns the conclusion.
    pub fn verdict(&self) -> Verdict {
        let Interval { low, high, .. } = self.ratio;
        if self.turns >= TURNS_MIN {
            if is_equal(low, high) {
                return Verdict::Equal;
            }
            if high < 1.0 {
                return Verdict::Less;
            }
            if low > 1.0 {
                return Verdict::More;
            }
        }
        let is_decided = |low, high| is_equal(low, high) || high < 1.0 || low > 1.0;
        Verdict::Undecided(self.more_turns(is_decided))
    }

    /// Estimates the number of further turns until the interval meets a condition, from the spread of the present ones.
    pub fn more_turns(&self, is_decided: impl Fn(f64, f64) -> bool) -> Option<u32> {
        if self.turns < TURNS_MIN {
            return Some((TURNS_MIN + 1 - self.turns) as u32);
        }
        let is_enough = |turns: usize| {
            let (low, high) = self.range(turns);
            is_decided(low, high)
        };
        if !is_enough(TURNS_MAX) {
            return None;
        }
        // The interval becomes smaller with each turn.
        let (mut few, mut enough) = (self.turns, TURNS_MAX);
        while enough - few > 1 {
            let middle = usize::midpoint(few, enough);
            match is_enough(middle) {
                true => enough = middle,
                false => few = middle,
            }
        }
        u32::try_from(enough - self.turns).ok()
    }

    /// Describes the conclusion about IOPS.
    pub fn describe(&self, one: &str, other: &str) -> String {
        let range = self.range_text();
        match self.verdict() {
            Verdict::Less => format!("{one} has {range} of the IOPS of {other}"),
            Verdict::More => format!("{one} has more IOPS than {other}: {range}"),
            Verdict::Equal => format!("{one} makes no difference that matters to {other}: {range}"),
            Verdict::Undecided(more) => {
                format!("{one} and {other}: {}: {range}", not_enough(more))
            }
        }
    }

    /// Formats the ratio with its interval.
    pub fn range_text(&self) -> String {
        let Interval { value, low, high } = self.ratio;
        let missing = match self.without_result {
            0 => String::new(),
            count => format!(" and {count} without a result"),
        };
        match self.turns {
            1 => format!("{value:.2} (1 turn{missing})"),
            turns => format!("{value:.2} ({low:.2} to {high:.2}, {turns} turns{missing})"),
        }
    }
}

/// Returns true if the whole interval is inside the margin.
fn is_equal(low: f64, high: f64) -> bool {
    low > 1.0 - MATTERS && high < 1.0 + MATTERS
}

/// Describes the number of missing turns.
pub fn not_enough(more: Option<u32>) -> String {
    match more {
        Some(more) => format!("not enough turns, about {more} more"),
        None => format!("not enough turns, more than {TURNS_MAX}"),
    }
}

/// Returns the mean of values, and the interval that contains a further value of the same kind in 95 % of cases; `None` with less than two values.
pub fn next_value(values: &[f64]) -> Option<Interval> {
    const OUTSIDE: f64 = 0.05;
    if values.len() < 2 {
        return None;
    }
    let count = values.len() as f64;
    let mean = values.iter().sum::<f64>() / count;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    let deviation = (squares / (count - 1.0)).sqrt();
    let half = t_quantile(OUTSIDE, values.len() - 1) * deviation * (1.0 + 1.0 / count).sqrt();
    Some(Interval {
        value: mean,
        low: mean - half,
        high: mean + half,
    })
}

/// Returns the value that the magnitude of Student's t exceeds with this probability.
fn t_quantile(probability: f64, freedom: usize) -> f64 {
    let (mut low, mut high) = (0.0, 1.0);
    while inside(high, freedom) < 1.0 - probability && high < 1e9 {
        high *= 2.0;
    }
    for _ in 0..30 {
        let middle = f64::midpoint(low, high);
        match inside(middle, freedom) < 1.0 - probability {
            true => low = middle,
            false => high = middle,
        }
    }
    high
}

/// Returns the probability of a magnitude of Student's t below `t`: Abramowitz and Stegun, 26.7.3 and 26.7.4. More than 30 degrees of
/// freedom count as 30, which makes intervals at most 6 % wider.
fn inside(t: f64, freedom: usize) -> f64 {
    let freedom = freedom.clamp(1, 30);
    let angle = (t / (freedom as f64).sqrt()).atan();
    let (sine, cosine) = angle.sin_cos();
    let is_odd = freedom % 2 == 1;
    // The factors are 2/3, 4/5, ... for odd numbers and 1/2, 3/4, ... for even ones.
    let (mut term, start) = if is_odd { (cosine, 3) } else { (1.0, 2) };
    let mut sum = if freedom == 1 { 0.0 } else { term };
    for step in (start..freedom.saturating_sub(1)).step_by(2) {
        term *= cosine * cosine * (step - 1) as f64 / step as f64;
        sum += term;
    }
    match is_odd {
        true => (angle + sine * sum) * std::f64::consts::FRAC_2_PI,
        false => sine * sum,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_tables() {
        for (freedom, wanted) in [
            (1, 12.706),
            (2, 4.303),
            (3, 3.182),
            (4, 2.776),
            (5, 2.571),
            (9, 2.262),
            (30, 2.042),
        ] {
            let found = t_quantile(0.05, freedom);
            assert!((found - wanted).abs() < 1e-3, "{freedom}: {found}");
        }
        assert!((t_quantile(0.01, 4) - 4.604).abs() < 1e-3);
    }

    #[test]
    fn a_further_value_is_expected_within_the_spread_of_the_others() {
        assert_eq!(next_value(&[5.0]), None);
        let found = next_value(&[98.0, 100.0, 102.0]).unwrap();
        // 4.303 deviations of 2, widened by the uncertainty of the mean.
        assert!((found.high - 109.94).abs() < 0.01, "{found:?}");
        assert!((found.low - 90.06).abs() < 0.01, "{found:?}");
        let mut random = fastrand::Rng::with_seed(62);
        let mut draw = || (0..12).map(|_| random.f64()).sum::<f64>() - 6.0;
        let is_inside = |_: &i32| {
            let found = next_value(&[draw(), draw(), draw()]).unwrap();
            (found.low..found.high).contains(&draw())
        };
        let inside = (0..2000).filter(is_inside).count();
        assert!((1860..1940).contains(&inside), "{inside}");
    }

    fn comparison(ratios: &[f64]) -> Comparison {
        let pairs: Vec<(f64, f64)> = ratios.iter().map(|ratio| (ratio * 7.0, 7.0)).collect();
        Comparison::of(&pairs, 1).unwrap()
    }

    #[test]
    fn the_verdict_follows_the_interval() {
        for (ratios, wanted) in [
            (&[0.80, 0.81, 0.79, 0.80][..], Verdict::Less),
            (&[1.20, 1.25, 1.18, 1.22][..], Verdict::More),
            (&[1.00, 1.005, 0.995, 1.00][..], Verdict::Equal),
            // The whole interval is above 1, but inside the margin.
            (&[1.01, 1.011, 1.009, 1.01][..], Verdict::Equal),
        ] {
            assert_eq!(comparison(ratios).verdict(), wanted, "{ratios:?}");
        }
        let wide = comparison(&[0.97, 0.64, 1.21, 1.05]);
        let text = wide.describe("scsi", "blk");
        assert!(text.contains("not enough turns, about"), "{text}");
        let pair = comparison(&[0.5, 0.5]);
        assert_eq!(pair.verdict(), Verdict::Undecided(Some(2)));
        assert_eq!(comparison(&[0.5]).range_text(), "0.50 (1 turn)");
        assert_eq!(Comparison::of(&[(1.0, 0.0)], 1), None);
        let partial = Comparison::of(&[(2.0, 1.0), (0.0, 1.0), (2.0, 1.0), (1.0, 0.0)], 1).unwrap();
        assert_eq!(
            partial.range_text(),
            "2.00 (2.00 to 2.00, 2 turns and 2 without a result)"
        );
        // Half as noisy needs about a quarter of the turns.
        let more = |noise: f64| {
            let ratios = [1.05 + noise, 1.05 - noise, 1.05 + noise, 1.05 - noise];
            match comparison(&ratios).verdict() {
                Verdict::Undecided(Some(more)) => more,
                other => panic!("{other:?}"),
            }
        };
        let (noisy, quiet) = (more(0.4), more(0.2));
        assert!((3..=5).contains(&(noisy / quiet)), "{noisy} {quiet}");
    }
}
