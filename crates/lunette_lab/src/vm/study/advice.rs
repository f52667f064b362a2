//! Advice from a study: for each choice (transport, threads, queues, descriptors, polling) the value with the most IOPS, its advantage,
//! and the confidence interval.
//!
//! Two values of a choice are compared by pairs of ways that differ only in it, over all cases of a turn. The geometric mean of their IOPS
//! gives each case the same weight. The turns give the interval.

use std::collections::BTreeSet;

use bench::run::{Interval, bootstrap_ratio};

use super::report::{Report, sentence};
use super::{Run, Way};

/// Smallest relative difference that matters.
const MATTERS: f64 = 0.03;

/// Result of a comparison.
struct Verdict {
    ratio: Interval,
    turns: usize,
}

impl Verdict {
    /// Returns true if the difference exceeds the variation between turns and is large enough to matter.
    fn is_difference(&self) -> bool {
        (self.ratio.low > 1.0 || self.ratio.high < 1.0) && (self.ratio.value - 1.0).abs() >= MATTERS
    }

    fn words(&self, one: &str, other: &str) -> String {
        let Interval { value, low, high } = self.ratio;
        let range = format!("{value:.2} ({low:.2} to {high:.2}, {} turns)", self.turns);
        match (self.is_difference(), value < 1.0) {
            (true, true) => format!("{one} has {range} of the IOPS of {other}"),
            (true, false) => format!("{one} has more IOPS than {other}: {range}"),
            (false, _) if (value - 1.0).abs() < MATTERS => {
                format!("{one} and {other} differ insignificantly: {range}")
            }
            (false, _) => format!("{one} and {other} are statistically equal: {range}"),
        }
    }
}

/// Compares two values of a choice by the geometric means of each turn, over all pairs of ways that differ only in it.
fn compare(report: &Report<'_>, choice: &str, one: &str, other: &str) -> Option<Verdict> {
    let with = |value: &str| -> Vec<&Way> {
        let ways = report.ways.iter().copied();
        ways.filter(|way| way.choice(choice) == Some(value))
            .collect()
    };
    let mut pairs = Vec::new();
    for first in with(one) {
        let others = with(other);
        let is_twin = |way: &&&Way| way.is_but_for(first, choice);
        if let Some(second) = others.iter().find(is_twin) {
            pairs.push((first.name.as_str(), second.name.as_str()));
        }
    }
    let iops = |way: &str, case: &str, turn: u32| {
        let of = |run: &&Run| run.way == way && run.case == case && run.turn == turn;
        let run = report.runs.iter().find(of)?;
        (run.iops() > 0.0).then(|| run.iops().ln())
    };
    let turns: BTreeSet<u32> = report.runs.iter().map(|run| run.turn).collect();
    let (mut firsts, mut seconds) = (Vec::new(), Vec::new());
    for turn in turns {
        let cells = pairs
            .iter()
            .flat_map(|pair| report.cases.iter().map(move |case| (pair, case)));
        let cells = cells.map(|((first, second), case)| {
            Some((
                iops(first, &case.name, turn)?,
                iops(second, &case.name, turn)?,
            ))
        });
        // An incomplete turn covers other cases.
        let Some(cells) = cells.collect::<Option<Vec<(f64, f64)>>>() else {
            continue;
        };
        let count = cells.len().max(1) as f64;
        firsts.push((cells.iter().map(|cell| cell.0).sum::<f64>() / count).exp());
        seconds.push((cells.iter().map(|cell| cell.1).sum::<f64>() / count).exp());
    }
    if pairs.is_empty() {
        return None;
    }
    let ratio = bootstrap_ratio(&firsts, &seconds)?;
    let turns = firsts.len();
    Some(Verdict { ratio, turns })
}

/// Values of a choice in the order of the ways.
fn values<'a>(report: &Report<'a>, choice: &str) -> Vec<&'a str> {
    let mut values = Vec::new();
    for way in &report.ways {
        if let Some(value) = way.choice(choice)
            && !values.contains(&value)
        {
            values.push(value);
        }
    }
    values
}

/// Compares each value of a choice with the best one, in a sentence each. Ends with a recommendation.
pub fn advice(report: &Report<'_>) -> Vec<String> {
    let mut sentences = Vec::new();
    for choice in choices(report) {
        let values = values(report, choice);
        let Some((first, rest)) = values.split_first() else {
            continue;
        };
        // The first value is the default, which others must exceed.
        let mut best = *first;
        for value in rest {
            let verdict = compare(report, choice, value, best);
            if verdict.is_some_and(|verdict| verdict.is_difference() && verdict.ratio.value > 1.0) {
                best = value;
            }
        }
        for value in values.iter().filter(|value| **value != best) {
            if let Some(verdict) = compare(report, choice, value, best) {
                sentences.push(format!("{choice}: {}", verdict.words(value, best)));
            }
        }
    }
    sentences.extend(take(report));
    sentences
}

/// Compares, for each case and choice, each way with the one that differs from it only by the first value of the choice.
pub fn findings(report: &Report<'_>) -> Vec<String> {
    let mut lines = Vec::new();
    for case in report.cases {
        for choice in choices(report) {
            let values = values(report, choice);
            let Some(first) = values.first() else {
                continue;
            };
            let is_first = |way: &&&Way| way.choice(choice) == Some(first);
            let others = report.ways.iter().filter(|way| !is_first(way));
            for way in others.filter(|way| way.choice(choice).is_some()) {
                let mut firsts = report.ways.iter().filter(is_first);
                if let Some(twin) = firsts.find(|twin| twin.is_but_for(way, choice)) {
                    let ratio = report.ratio(&way.name, &twin.name, &case.name);
                    lines.push(sentence(&case.name, &way.name, &twin.name, ratio));
                }
            }
        }
    }
    lines
}

/// All choices in the order of the ways.
fn choices(report: &Report<'_>) -> Vec<&'static str> {
    let mut choices = Vec::new();
    for (choice, _) in report.ways.iter().flat_map(|way| &way.choices) {
        if !choices.contains(choice) {
            choices.push(*choice);
        }
    }
    choices
}

/// Recommends the way with the most IOPS over all cases. Among equally good ways, the first has the fewest threads.
fn take(report: &Report<'_>) -> Option<String> {
    let mean = |way: &Way| {
        let logs = report.cases.iter().map(|case| {
            let runs = report.runs.iter();
            let of = runs.filter(|run| run.way == way.name && run.case == case.name);
            let all: Vec<f64> = of.map(Run::iops).collect();
            let sum: f64 = all.iter().sum();
            (sum > 0.0).then(|| (sum / all.len() as f64).ln())
        });
        let logs: Option<Vec<f64>> = logs.collect();
        logs.map(|logs| (logs.iter().sum::<f64>() / logs.len().max(1) as f64).exp())
    };
    let scored: Vec<(&Way, f64)> = report
        .ways
        .iter()
        .filter_map(|way| Some((*way, mean(way)?)))
        .collect();
    let (best, most) = scored
        .iter()
        .max_by(|one, other| one.1.total_cmp(&other.1))?;
    let (first, _) = scored
        .iter()
        .find(|(_, score)| *score >= most * (1.0 - MATTERS))?;
    Some(match first.name == best.name {
        true => format!("take: {}: it has the most IOPS over all cases", best.name),
        false => format!(
            "take: {}: {} has less than {:.0} % more IOPS over all cases and needs more threads",
            first.name,
            best.name,
            MATTERS * 100.0
        ),
    })
}

#[cfg(test)]
mod tests {
    use super::super::Case;
    use super::*;

    fn way(transport: &str, threads: &str) -> Way {
        Way {
            name: format!("{transport}, {threads}"),
            words: Some(String::new()),
            disks: 1,
            choices: vec![
                ("transport", transport.to_owned()),
                ("threads", threads.to_owned()),
            ],
        }
    }

    fn run(way: &str, case: &str, turn: u32, iops: f64) -> Run {
        Run {
            way: way.to_owned(),
            case: case.to_owned(),
            turn,
            read_iops: iops,
            ..Run::default()
        }
    }

    #[test]
    fn a_choice_is_judged_by_pairs_that_differ_in_nothing_else() {
        let ways = [
            way("blk", "1"),
            way("scsi", "1"),
            way("blk", "2"),
            way("scsi", "2"),
        ];
        let cases: Vec<Case> = ["a", "b"]
            .iter()
            .map(|name| Case {
                name: (*name).to_owned(),
                ..Case::default()
            })
            .collect();
        let mut runs = Vec::new();
        for turn in 0..5 {
            let drift = 1.0 + f64::from(turn) * 0.1;
            for case in &cases {
                for (way, iops) in ways.iter().zip([1000.0, 800.0, 1010.0, 808.0]) {
                    let noise = 1.0 + f64::from((turn * 7) % 3) * 0.002;
                    runs.push(run(&way.name, &case.name, turn, iops * drift * noise));
                }
            }
        }
        let report = Report {
            runs: &runs,
            ways: ways.iter().collect(),
            cases: &cases,
        };
        let said = advice(&report);
        assert!(
            said[0].starts_with("transport: scsi has 0.80 (0.80 to 0.80, 5 turns)"),
            "{said:?}"
        );
        assert!(
            said[1].starts_with("threads: 2 and 1 differ insignificantly"),
            "{said:?}"
        );
        assert!(
            said[2].starts_with("take: blk, 1: blk, 2 has less than 3 %"),
            "{said:?}"
        );
        assert_eq!(said.len(), 3);
        let found = findings(&report);
        // Two sentences on transports and two on threads per case.
        assert_eq!(found.len(), 8, "{found:?}");
        assert!(found[0].starts_with("a: scsi, 1 has 0.80"), "{found:?}");
    }

    #[test]
    fn a_turn_without_all_of_its_cases_does_not_count() {
        let ways = [way("blk", "1"), way("scsi", "1")];
        let cases = vec![Case {
            name: "a".to_owned(),
            ..Case::default()
        }];
        let runs = vec![run("blk, 1", "a", 0, 100.0)];
        let report = Report {
            runs: &runs,
            ways: ways.iter().collect(),
            cases: &cases,
        };
        assert!(compare(&report, "transport", "scsi", "blk").is_none());
    }
}
