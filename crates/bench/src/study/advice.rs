//! Advice from a study: for each setting (transport, threads, queues, descriptors, polling) the value with the most IOPS, its advantage,
//! and the confidence interval.
//!
//! Two values of a setting are compared by pairs of variants that differ only in it, over all cases of a turn. The geometric mean of their
//! IOPS gives each case the same weight. The turns give the interval ([`Comparison`]).

use std::collections::BTreeSet;

use super::verdict::{Comparison, MATTERS, Verdict, not_enough};
use super::{Report, Run, Variant};

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
    fn compare(&self, setting: &str, one: &str, other: &str, number: usize) -> Option<Comparison> {
        let with_one = self
            .variants
            .iter()
            .filter(|variant| variant.setting(setting) == Some(one));
        let pairs = with_one
            .filter_map(|variant| Some((*variant, self.twin(variant, setting, other)?)))
            .unzip::<_, _, Vec<_>, Vec<_>>();
        self.compare_all(&pairs.0, &pairs.1, number)
    }

    /// Compares two lists of variants by the geometric means of each turn. `number` comparisons share the probability of an error.
    fn compare_all(
        &self,
        firsts: &[&Variant],
        seconds: &[&Variant],
        number: usize,
    ) -> Option<Comparison> {
        if firsts.is_empty() {
            return None;
        }
        let turns: BTreeSet<u32> = self.runs.iter().map(R::turn).collect();
        // An incomplete turn covers other cases. A complete one without means has a run without a result.
        let means = turns.into_iter().filter_map(|turn| {
            let iops = |run: &R| (run.turn() == turn).then(|| run.iops());
            let means = self.mean(firsts, iops).zip(self.mean(seconds, iops));
            let is_complete = || self.has_all(firsts, turn) && self.has_all(seconds, turn);
            means.or_else(|| is_complete().then_some((0.0, 0.0)))
        });
        Comparison::of(&means.collect::<Vec<_>>(), number)
    }

    /// Returns true if each of these variants has a run in each case of a turn.
    fn has_all(&self, variants: &[&Variant], turn: u32) -> bool {
        variants.iter().all(|variant| {
            let mut cases = self.cases.iter();
            cases.all(|case| {
                let runs = self.runs_of(&variant.name, case);
                runs.iter().any(|run| run.turn() == turn)
            })
        })
    }

    /// Returns the number of comparisons of an advice: each value of a setting with each other value, because the data select the value
    /// that the others are compared with, and each variant with the best one.
    fn comparisons(&self) -> usize {
        let settings = self.settings().into_iter();
        let counts = settings.map(|setting| self.values(setting).len());
        let counts: Vec<usize> = counts.filter(|count| *count > 1).collect();
        let pairs: usize = counts.iter().map(|count| count * (count - 1) / 2).sum();
        match counts.len() {
            // The values of a single setting are the variants.
            1 => pairs,
            _ => pairs + self.variants.len().saturating_sub(1),
        }
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

    /// Returns the variant with the most IOPS over all cases, and the others with their comparisons: the best with each of them.
    fn rivals(&self) -> Option<(&'a Variant, Vec<(&'a Variant, Comparison)>)> {
        let scored = self.variants.iter().filter_map(|variant| {
            let mean = self.mean(&[*variant], |run| Some(run.iops()))?;
            Some((*variant, mean))
        });
        let (best, _) = scored.max_by(|one, other| one.1.total_cmp(&other.1))?;
        let number = self.comparisons();
        let others = self.variants.iter().filter(|other| other.name != best.name);
        let others = others.filter_map(|other| {
            let comparison = self.compare_all(&[best], &[*other], number)?;
            Some((*other, comparison))
        });
        Some((best, others.collect()))
    }

    /// Recommends a variant, if the comparisons support one: the best, or an equal one with fewer threads, which is an earlier one.
    pub(super) fn recommend(&self) -> Option<String> {
        let (best, others) = self.rivals()?;
        if others.is_empty() {
            return None;
        }
        let (mut equal, mut unsure, mut more) = (Vec::new(), Vec::new(), Some(1));
        for (other, comparison) in &others {
            match comparison.verdict() {
                Verdict::More => {}
                Verdict::Equal => equal.push(*other),
                Verdict::Less => unsure.push(*other),
                Verdict::Undecided(turns) => {
                    unsure.push(*other);
                    more = more.zip(turns).map(|(one, other)| one.max(other));
                }
            }
        }
        let names = |variants: &[&Variant]| {
            let names = variants.iter().map(|variant| variant.name.as_str());
            names.collect::<Vec<_>>().join("; ")
        };
        if !unsure.is_empty() {
            return Some(format!(
                "no recommendation: the comparison of {} with {} over all cases has no conclusion: {}",
                best.name,
                names(&unsure),
                not_enough(more)
            ));
        }
        let is_as_good = |variant: &&&Variant| {
            variant.name == best.name || equal.iter().any(|equal| equal.name == variant.name)
        };
        let first = self.variants.iter().find(is_as_good)?;
        Some(match (equal.is_empty(), first.name == best.name) {
            (true, _) => format!("take: {}: it has the most IOPS over all cases", best.name),
            (false, true) => format!(
                "take: {}: no other has more IOPS over all cases, and less than {:.0} % fewer have {}",
                best.name,
                MATTERS * 100.0,
                names(&equal)
            ),
            (false, false) => format!(
                "take: {}: {} has less than {:.0} % more IOPS over all cases and needs more threads",
                first.name,
                best.name,
                MATTERS * 100.0
            ),
        })
    }
}

/// Comparisons of each value of a setting with the best one: setting, value, best value.
pub(super) fn compared<'a, R: Run>(
    report: &Report<'a, R>,
) -> Vec<(&'static str, &'a str, &'a str, Comparison)> {
    let number = report.comparisons();
    let mut found = Vec::new();
    for setting in report.settings() {
        let values = report.values(setting);
        let Some((first, rest)) = values.split_first() else {
            continue;
        };
        // The first value is the default, which others must exceed.
        let mut best = *first;
        for value in rest {
            let comparison = report.compare(setting, value, best, number);
            if comparison.is_some_and(|comparison| comparison.verdict() == Verdict::More) {
                best = value;
            }
        }
        for value in values.iter().filter(|value| **value != best) {
            if let Some(comparison) = report.compare(setting, value, best, number) {
                found.push((setting, *value, best, comparison));
            }
        }
    }
    found
}

/// Compares each value of a setting with the best one, in a sentence each. Ends with a recommendation.
pub fn advice<R: Run>(report: &Report<'_, R>) -> Vec<String> {
    let compared = compared(report).into_iter();
    let sentences = compared.map(|(setting, value, best, comparison)| {
        format!("{setting}: {}", comparison.describe(value, best))
    });
    sentences.chain(report.recommend()).collect()
}

/// Returns the estimated number of turns that the advice lacks; `None` if every comparison is decided.
pub fn missing_turns<R: Run>(report: &Report<'_, R>) -> Option<u32> {
    let compared = compared(report).into_iter();
    let settings = compared.map(|(.., comparison)| comparison);
    let rivals = report.rivals().into_iter();
    let rivals = rivals
        .flat_map(|(_, others)| others)
        .map(|(_, comparison)| comparison);
    let undecided = settings
        .chain(rivals)
        .filter_map(|comparison| match comparison.verdict() {
            Verdict::Undecided(more) => Some(more.unwrap_or(u32::MAX)),
            _ => None,
        });
    undecided.max()
}

/// Compares, for each case and setting, each variant with the one that differs from it only by the first value of the setting.
pub fn findings<R: Run>(report: &Report<'_, R>) -> Vec<String> {
    let found = compared_in_cases(report).into_iter();
    found
        .map(|(case, one, other, found)| finding(case, one, other, found))
        .collect()
}

/// Comparison of two variants in a case: case, variant, other variant; `None` if no turn has results of both.
pub(super) type Compared<'a> = (&'a str, &'a str, &'a str, Option<Comparison>);

/// Comparisons of the [`findings`], which share the probability of an error.
pub(super) fn compared_in_cases<'a, R: Run>(report: &'a Report<'_, R>) -> Vec<Compared<'a>> {
    let mut pairs = Vec::new();
    for case in &report.cases {
        for setting in report.settings() {
            let values = report.values(setting);
            let Some(first) = values.first() else {
                continue;
            };
            for variant in &report.variants {
                let other = variant.setting(setting).filter(|value| value != first);
                if let Some(twin) = other.and_then(|_| report.twin(variant, setting, first)) {
                    pairs.push((case.as_str(), variant.name.as_str(), twin.name.as_str()));
                }
            }
        }
    }
    let number = pairs.len();
    let compared = pairs.into_iter().map(|(case, one, other)| {
        let found = report.comparison(one, other, case, number);
        (case, one, other, found)
    });
    compared.collect()
}

/// Compares two variants in a case.
fn finding(case: &str, one: &str, other: &str, found: Option<Comparison>) -> String {
    match found {
        None => {
            format!("{case}: {one} and {other} have no turn in common that has results of both")
        }
        Some(comparison) => format!("{case}: {}", comparison.describe(one, other)),
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
    use super::super::cautions;
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
            notes: Vec::new(),
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
            "threads: 2 makes no difference that matters to 1",
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
        assert!(
            text[0].contains("not enough turns, about 2 more"),
            "{text:?}"
        );
    }

    #[test]
    fn a_turn_without_all_of_its_cases_does_not_count() {
        let variants = [variant("blk", "1"), variant("scsi", "1")];
        let runs = [run("blk, 1", "a", 0, 100.0)];
        let report = report(&runs, &variants, &["a"]);
        assert!(report.compare("transport", "scsi", "blk", 1).is_none());
    }

    #[test]
    fn a_turn_without_a_result_is_counted_in_the_advice() {
        let variants = [variant("blk", "1"), variant("scsi", "1")];
        let mut runs = Vec::new();
        for turn in 0..4 {
            for case in ["a", "b"] {
                let slow = if (turn, case) == (2, "b") { 0.0 } else { 50.0 };
                runs.push(run("blk, 1", case, turn, 100.0));
                runs.push(run("scsi, 1", case, turn, slow));
            }
        }
        let report = report(&runs, &variants, &["a", "b"]);
        let found = report.compare("transport", "scsi", "blk", 1).unwrap();
        let text = "0.50 (0.50 to 0.50, 3 turns and 1 without a result)";
        assert_eq!(found.range_text(), text);
        let sentences = findings(&report);
        assert!(sentences[1].contains(text), "{sentences:?}");
        assert!(!sentences[0].contains("without a result"), "{sentences:?}");
        let all = runs.iter().map(|run| run as &dyn Run);
        assert_eq!(
            cautions(all),
            [
                "no result (0 IOPS) in 1 of 16 runs, which the comparisons leave out: scsi, 1, b, turn 2."
            ]
        );
    }

    #[test]
    fn a_finding_without_a_common_turn_has_no_ratio() {
        assert!(finding("x", "a", "b", None).contains("no turn in common"));
    }
}
