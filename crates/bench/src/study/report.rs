//! Comparison of a study's runs.

use super::verdict::{Comparison, MATTERS, Verdict};
use super::{Run, Variant};
use crate::chart::{Chart, Point, Series};
use crate::run::{Spread, spread};

/// Runs of a study by variant and case.
pub struct Report<'a, R> {
    /// Runs in order of execution.
    pub runs: &'a [R],
    /// Variants in display order.
    pub variants: Vec<&'a Variant>,
    /// Names of the cases in display order.
    pub cases: Vec<String>,
    /// Conditions of the measurement, for each picture: load and its meaning, then [`crate::run::Environment::provenance`].
    pub notes: Vec<String>,
}

impl<R: Run> Report<'_, R> {
    /// Returns the runs of a variant in a case, in order of turns.
    pub fn runs_of(&self, variant: &str, case: &str) -> Vec<&R> {
        let runs = self.runs.iter();
        let runs = runs.filter(|run| run.variant() == variant && run.case() == case);
        let mut runs: Vec<&R> = runs.collect();
        runs.sort_by_key(|run| run.turn());
        runs
    }

    /// Returns median and range of a value over the turns.
    pub fn spread(&self, variant: &str, case: &str, value: impl Fn(&R) -> f64) -> Spread {
        let runs = self.runs_of(variant, case).into_iter();
        spread(&runs.map(value).collect::<Vec<f64>>())
    }

    /// Compares the IOPS of two variants in a case, from the turns that both have. `number` comparisons share the probability of an error.
    pub fn comparison(
        &self,
        variant: &str,
        base: &str,
        case: &str,
        number: usize,
    ) -> Option<Comparison> {
        let (of_variant, of_base) = (self.runs_of(variant, case), self.runs_of(base, case));
        let turns = of_variant.iter().filter_map(|run| {
            let other = of_base.iter().find(|other| other.turn() == run.turn())?;
            Some((run.iops(), other.iops()))
        });
        Comparison::of(&turns.collect::<Vec<_>>(), number)
    }

    /// Returns the number of comparisons of one variant with each of the others, in all cases.
    pub fn comparisons_with_one(&self) -> usize {
        self.variants.len().saturating_sub(1) * self.cases.len()
    }

    /// Compares the variant with the most IOPS in a case with each of the others. The comparisons of all cases share the probability of an
    /// error.
    pub(super) fn rivals_in(&self, case: &str) -> Option<(&Variant, Vec<(&Variant, Verdict)>)> {
        let median = |variant: &Variant| self.spread(&variant.name, case, R::iops).median;
        let variants = self.variants.iter().copied();
        let best = variants.max_by(|one, other| median(one).total_cmp(&median(other)))?;
        let number = self.comparisons_with_one();
        let others = self.variants.iter().filter(|other| other.name != best.name);
        let others = others.map(|other| {
            let found = self.comparison(&best.name, &other.name, case, number);
            let verdict = found.map_or(Verdict::Undecided(None), |found| found.verdict());
            (*other, verdict)
        });
        Some((best, others.collect()))
    }

    /// Describes the variant with the most IOPS in a case, if the comparisons support one, and the others: equal ones, and those without a conclusion.
    pub fn best(&self, case: &str) -> Option<String> {
        let (best, others) = self.rivals_in(case)?;
        let (mut equal, mut unsure) = (Vec::new(), Vec::new());
        for (other, verdict) in others {
            match verdict {
                Verdict::More => {}
                Verdict::Equal => equal.push(other.name.as_str()),
                Verdict::Less | Verdict::Undecided(_) => unsure.push(other.name.as_str()),
            }
        }
        let iops = self.spread(&best.name, case, R::iops).median;
        let also = match equal.as_slice() {
            [] => String::new(),
            equal => format!(
                "; equal within {:.0} %: {}",
                MATTERS * 100.0,
                equal.join("; ")
            ),
        };
        Some(match unsure.as_slice() {
            [] => format!("{case}: most IOPS ({iops:.0}) by {}{also}", best.name),
            unsure => format!(
                "{case}: no conclusion about {} ({iops:.0} IOPS) and {}{also}",
                best.name,
                unsure.join("; ")
            ),
        })
    }

    /// Returns bars of a value, grouped by case. Cases without the value are missing.
    pub fn chart(&self, title: &str, unit: &str, value: impl Fn(&R) -> f64) -> Chart {
        let series = self.variants.iter().map(|variant| {
            let points = self.cases.iter();
            Series {
                name: variant.name.clone(),
                points: points
                    .map(|case| self.point(&variant.name, case, &value))
                    .collect(),
            }
        });
        let series = series.filter(|series| series.points.iter().any(Option::is_some));
        Chart {
            title: title.to_owned(),
            unit: unit.to_owned(),
            notes: self.notes.clone(),
            groups: self
                .cases
                .iter()
                .map(|case| case.replace(", ", "\n"))
                .collect(),
            series: series.collect(),
            stacked: false,
            logarithmic: false,
        }
    }

    /// Prints the ratio of IOPS to `base` on the bars of the other variants of a chart.
    pub fn add_ratios(&self, chart: &mut Chart, base: &str) {
        for series in chart.series.iter_mut().filter(|one| one.name != base) {
            for (point, case) in series.points.iter_mut().zip(&self.cases) {
                let found = self.comparison(&series.name, base, case, 1);
                if let (Some(point), Some(found)) = (point.as_mut(), found) {
                    point.ratio = Some(found.ratio.value);
                }
            }
        }
    }

    /// Returns the bar of a value over the turns; `None` without a value.
    pub fn point(&self, variant: &str, case: &str, value: impl Fn(&R) -> f64) -> Option<Point> {
        let Spread { median, min, max } = self.spread(variant, case, value);
        (median > 0.0).then_some(Point {
            value: median,
            low: min,
            high: max,
            ratio: None,
        })
    }
}

/// Formats a ratio and its interval in per cent.
pub fn percent(comparison: &Comparison) -> String {
    let ratio = comparison.ratio;
    let [value, low, high] = [ratio.value, ratio.low, ratio.high].map(|part| part * 100.0);
    let missing = match comparison.without_result {
        0 => String::new(),
        1 => ", 1 turn without a result".to_owned(),
        count => format!(", {count} turns without a result"),
    };
    match comparison.turns {
        1 => format!("{value:.0} % (1 turn{missing})"),
        _ => format!("{value:.0} % ({low:.0} to {high:.0}{missing})"),
    }
}
