//! Comparison of a study's runs.

use super::{Run, Variant};
use crate::chart::{Chart, Point, Series};
use crate::run::{Interval, Spread, bootstrap_ratio, spread};

/// Runs of a study by variant and case.
pub struct Report<'a, R> {
    /// Runs in order of execution.
    pub runs: &'a [R],
    /// Variants in display order.
    pub variants: Vec<&'a Variant>,
    /// Names of the cases in display order.
    pub cases: Vec<String>,
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

    /// Returns the ratio of the IOPS of two variants, from the turns that both have.
    pub fn ratio(&self, variant: &str, base: &str, case: &str) -> Option<Interval> {
        let (of_variant, of_base) = (self.runs_of(variant, case), self.runs_of(base, case));
        let turns = of_variant.iter().filter_map(|run| {
            let other = of_base.iter().find(|other| other.turn() == run.turn())?;
            Some((run.iops(), other.iops()))
        });
        let (a, b): (Vec<f64>, Vec<f64>) = turns.unzip();
        bootstrap_ratio(&a, &b)
    }

    /// Describes the variant with the most IOPS in a case, and those without a significant difference from it.
    pub fn best(&self, case: &str) -> Option<String> {
        let median = |variant: &&&Variant| self.spread(&variant.name, case, R::iops).median;
        let variants = self.variants.iter();
        let best = variants.max_by(|one, other| median(one).total_cmp(&median(other)))?;
        let is_as_good = |variant: &&&Variant| {
            let ratio = self.ratio(&variant.name, &best.name, case);
            variant.name != best.name && ratio.is_some_and(|ratio| ratio.high >= 1.0)
        };
        let equals = self.variants.iter().filter(is_as_good);
        let equals: Vec<&str> = equals.map(|variant| variant.name.as_str()).collect();
        let also = match equals.as_slice() {
            [] => String::new(),
            equals => format!("; statistically equal: {}", equals.join("; ")),
        };
        let iops = median(&best);
        Some(format!(
            "{case}: most IOPS ({iops:.0}) by {}{also}",
            best.name
        ))
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

    /// Returns the bar of a value over the turns; `None` without a value.
    pub fn point(&self, variant: &str, case: &str, value: impl Fn(&R) -> f64) -> Option<Point> {
        let Spread { median, min, max } = self.spread(variant, case, value);
        (median > 0.0).then_some(Point {
            value: median,
            low: min,
            high: max,
        })
    }
}

/// Formats a ratio and its interval in per cent.
pub fn percent(ratio: Interval) -> String {
    let [value, low, high] = [ratio.value, ratio.low, ratio.high].map(|part| part * 100.0);
    format!("{value:.0} % ({low:.0} to {high:.0})")
}
