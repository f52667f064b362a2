//! Advice from a study: for each setting (transport, threads, queues, descriptors, polling) the value with the most IOPS, its advantage,
//! and the confidence interval.
//!
//! Two values of a setting are compared by pairs of variants that differ only in it, over all cases of a turn. The geometric mean of their
//! IOPS gives each case the same weight. The turns give the interval.

use std::collections::BTreeSet;

use super::{Report, Run, Variant};
use crate::run::{Interval, bootstrap_ratio};

/// Smallest relative difference that matters.
pub const MATTERS: f64 = 0.03;
/// Fewest turns for a conclusion.
const TURNS_MIN: usize = 3;

/// Result of a comparison.
struct Verdict {
    ratio: Interval,
    turns: usize,
}

impl Verdict {
    /// Returns true if the difference exceeds the variation between turns and is large enough to matter.
    fn is_difference(&self) -> bool {
        self.turns >= TURNS_MIN
            && (self.ratio.low > 1.0 || self.ratio.high < 1.0)
            && (self.ratio.value - 1.0).abs() >= MATTERS
    }

    fn describe(&self, one: &str, other: &str) -> String {
        let Interval { value, low, high } = self.ratio;
        let range = format!("{value:.2} ({low:.2} to {high:.2}, {} turns)", self.turns);
        match (self.is_difference(), value < 1.0) {
            (true, true) => format!("{one} has {range} of the IOPS of {other}"),
            (true, false) => format!("{one} has more IOPS than {other}: {range}"),
            _ if self.turns < TURNS_MIN => {
                format!("{one} and {other}: too few turns to be sure: {range}")
            }
            _ if (value - 1.0).abs() < MATTERS => {
                format!("{one} and {other} differ insignificantly: {range}")
            }
            _ => format!("{one} and {other} are statistically equal: {range}"),
        }
    }
}

impl<'a, R: Run> Report<'a, R> {
    /// Returns all settings in the order of the variants.
    fn settings(&self) -> Vec<&'static str> {
        let settings = self.variants.iter().flat_map(|variant| &variant.settings);
        distinct(settings.map(|(setting, _)| *setting))
    }

    /// Returns the values of a setting in the order of the variants.
    fn values(&self, setting: &str) -> Vec<&'a str> {
        let variants = self.variants.iter();
        distinct(variants.filter_map(|variant| variant.setting(setting)))
    }

    /// Returns the first variant with this value of a setting that differs from `variant` only in the setting.
    fn twin(&self, variant: &Variant, setting: &str, value: &str) -> Option<&'a Variant> {
        let mut variants = self.variants.iter().copied();
        variants.find(|other| {
            other.setting(setting) == Some(value) && other.differs_only_in(setting, variant)
        })
    }

    /// Compares two values of a setting by the geometric means of each turn, over all pairs of variants that differ only in it.
    fn compare(&self, setting: &str, one: &str, other: &str) -> Option<Verdict> {
        let with_one = self
            .variants
            .iter()
            .filter(|variant| variant.setting(setting) == Some(one));
        let pairs: Vec<(&Variant, &Variant)> = with_one
            .filter_map(|variant| Some((*variant, self.twin(variant, setting, other)?)))
            .collect();
        if pairs.is_empty() {
            return None;
        }
        let turns: BTreeSet<u32> = self.runs.iter().map(R::turn).collect();
        // An incomplete turn covers other cases.
        let means = turns.into_iter().filter_map(|turn| {
            let iops = |run: &R| (run.turn() == turn).then(|| run.iops());
            let mean = |variants: Vec<&Variant>| self.mean(&variants, iops);
            Some((
                mean(pairs.iter().map(|pair| pair.0).collect())?,
                mean(pairs.iter().map(|pair| pair.1).collect())?,
            ))
        });
        let (firsts, seconds): (Vec<f64>, Vec<f64>) = means.unzip();
        Some(Verdict {
            ratio: bootstrap_ratio(&firsts, &seconds)?,
            turns: firsts.len(),
        })
    }

    /// Returns the geometric mean of a value of these variants, with equal weight for each case; `None` if a case has no value.
    pub fn mean(&self, variants: &[&Variant], value: impl Fn(&R) -> Option<f64>) -> Option<f64> {
        let mut logs = Vec::new();
        for variant in variants {
            for case in &self.cases {
                let runs = self.runs_of(&variant.name, case).into_iter();
                let values: Vec<f64> = runs.filter_map(&value).collect();
                let sum: f64 = values.iter().sum();
                logs.push((sum > 0.0).then(|| (sum / values.len() as f64).ln())?);
            }
        }
        Some((logs.iter().sum::<f64>() / logs.len().max(1) as f64).exp())
    }

    /// Recommends the variant with the most IOPS over all cases. Among equally good variants, the first has the fewest threads.
    fn recommend(&self) -> Option<String> {
        let scored = self.variants.iter().filter_map(|variant| {
            let mean = self.mean(&[*variant], |run| Some(run.iops()))?;
            Some((variant.name.as_str(), mean))
        });
        let scored: Vec<(&str, f64)> = scored.collect();
        let (best, most) = scored
            .iter()
            .max_by(|one, other| one.1.total_cmp(&other.1))?;
        let (first, _) = scored
            .iter()
            .find(|(_, score)| *score >= most * (1.0 - MATTERS))?;
        Some(match first == best {
            true => format!("take: {best}: it has the most IOPS over all cases"),
            false => format!(
                "take: {first}: {best} has less than {:.0} % more IOPS over all cases and needs more threads",
                MATTERS * 100.0
            ),
        })
    }
}

/// Compares each value of a setting with the best one, in a sentence each. Ends with a recommendation.
pub fn advice<R: Run>(report: &Report<'_, R>) -> Vec<String> {
    let mut sentences = Vec::new();
    for setting in report.settings() {
        let values = report.values(setting);
        let Some((first, rest)) = values.split_first() else {
            continue;
        };
        // The first value is the default, which others must exceed.
        let mut best = *first;
        for value in rest {
            let verdict = report.compare(setting, value, best);
            if verdict.is_some_and(|verdict| verdict.is_difference() && verdict.ratio.value > 1.0) {
                best = value;
            }
        }
        for value in values.iter().filter(|value| **value != best) {
            if let Some(verdict) = report.compare(setting, value, best) {
                sentences.push(format!("{setting}: {}", verdict.describe(value, best)));
            }
        }
    }
    sentences.extend(report.recommend());
    sentences
}

/// Compares, for each case and setting, each variant with the one that differs from it only by the first value of the setting.
pub fn findings<R: Run>(report: &Report<'_, R>) -> Vec<String> {
    let mut lines = Vec::new();
    for case in &report.cases {
        for setting in report.settings() {
            let values = report.values(setting);
            let Some(first) = values.first() else {
                continue;
            };
            for variant in &report.variants {
                let other = variant.setting(setting).filter(|value| value != first);
                if let Some(twin) = other.and_then(|_| report.twin(variant, setting, first)) {
                    let ratio = report.ratio(&variant.name, &twin.name, case);
                    lines.push(finding(case, &variant.name, &twin.name, ratio));
                }
            }
        }
    }
    lines
}

/// Compares two variants in a case, with the significance of the difference.
fn finding(case: &str, one: &str, other: &str, ratio: Option<Interval>) -> String {
    match ratio {
        None => format!("{case}: {one} and {other} have no turn in common"),
        Some(Interval { value, low, high }) if low <= 1.0 && high >= 1.0 => format!(
            "{case}: {one} and {other} are statistically equal: {value:.2} ({low:.2} to {high:.2})"
        ),
        Some(Interval { value, low, high }) => {
            format!("{case}: {one} has {value:.2} ({low:.2} to {high:.2}) of the IOPS of {other}")
        }
    }
}

/// Returns the items without repetitions, in their order.
fn distinct<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut distinct = Vec::new();
    for item in items {
        if !distinct.contains(&item) {
            distinct.push(item);
        }
    }
    distinct
}

#[cfg(test)]
mod tests {
    use super::super::tests::{Plain, run};
    use super::*;

    fn variant(transport: &str, threads: &str) -> Variant {
        Variant {
            name: format!("{transport}, {threads}"),
            settings: vec![
                ("transport", transport.to_owned()),
                ("threads", threads.to_owned()),
            ],
        }
    }

    fn report<'a>(runs: &'a [Plain], variants: &'a [Variant], cases: &[&str]) -> Report<'a, Plain> {
        Report {
            runs,
            variants: variants.iter().collect(),
            cases: cases.iter().map(|case| (*case).to_owned()).collect(),
        }
    }

    /// Four variants in two cases.
    fn runs(variants: &[Variant], turns: u32) -> Vec<Plain> {
        let mut runs = Vec::new();
        for turn in 0..turns {
            let drift = 1.0 + f64::from(turn) * 0.1;
            for case in ["a", "b"] {
                for (variant, iops) in variants.iter().zip([1000.0, 800.0, 1010.0, 808.0]) {
                    let noise = 1.0 + f64::from((turn * 7) % 3) * 0.002;
                    runs.push(run(&variant.name, case, turn, iops * drift * noise));
                }
            }
        }
        runs
    }

    #[test]
    fn a_setting_is_judged_by_pairs_that_differ_in_nothing_else() {
        let variants = [
            variant("blk", "1"),
            variant("scsi", "1"),
            variant("blk", "2"),
            variant("scsi", "2"),
        ];
        let measured = runs(&variants, 5);
        let whole = report(&measured, &variants, &["a", "b"]);
        let text = advice(&whole);
        for (line, begin) in text.iter().zip([
            "transport: scsi has 0.80 (0.80 to 0.80, 5 turns)",
            "threads: 2 and 1 differ insignificantly",
            "take: blk, 1: blk, 2 has less than 3 %",
        ]) {
            assert!(line.starts_with(begin), "{text:?}");
        }
        assert_eq!(text.len(), 3);
        let found = findings(&whole);
        // Two sentences on transports and two on threads per case.
        assert_eq!(found.len(), 8, "{found:?}");
        assert!(found[0].starts_with("a: scsi, 1 has 0.80"), "{found:?}");

        let few = runs(&variants, 2);
        let text = advice(&report(&few, &variants, &["a", "b"]));
        assert!(text[0].contains("too few turns to be sure"), "{text:?}");
    }

    #[test]
    fn a_turn_without_all_of_its_cases_does_not_count() {
        let variants = [variant("blk", "1"), variant("scsi", "1")];
        let runs = [run("blk, 1", "a", 0, 100.0)];
        let report = report(&runs, &variants, &["a"]);
        assert!(report.compare("transport", "scsi", "blk").is_none());
    }

    #[test]
    fn findings_say_what_the_interval_says() {
        let interval = |value, low, high| Some(Interval { value, low, high });
        assert_eq!(
            finding(
                "randread, depth 1",
                "scsi",
                "blk",
                interval(0.91, 0.88, 0.94)
            ),
            "randread, depth 1: scsi has 0.91 (0.88 to 0.94) of the IOPS of blk"
        );
        let same = finding("x", "a", "b", interval(0.99, 0.95, 1.02));
        assert!(same.contains("statistically equal"), "{same}");
        assert!(finding("x", "a", "b", None).contains("no turn in common"));
    }
}
