//! Comparison of a polling daemon with a non-polling one: a small part of the study, in turns.
//!
//! A pair consists of one turn of each daemon; the first one alternates between pairs. Only complete pairs count, so an interrupted
//! comparison uses equal cases. While one daemon is driven, the other is idle.

use super::MIXTURES;
use super::study::{Case, Configuration, PollRecord, StudyOptions, Variation};
use crate::run::spread;
use crate::study::{Comparison, MATTERS, Run as _, Verdict, not_enough};

/// Minimum number of pairs for a conclusion.
const PAIRS_MIN: u32 = 6;

/// One disk (true) or all, mixture, depth.
const CASES: [(bool, usize, u16); 4] = [(true, 0, 1), (false, 0, 1), (false, 2, 1), (false, 0, 8)];

pub(super) fn pairs(options: &StudyOptions) -> u32 {
    options.repetitions.max(PAIRS_MIN)
}

/// Returns the daemons and the cases of the comparison: virtio-blk with one queue and, if it is part of the study, one pinned worker.
/// Waiting behaves the same in other configurations.
pub(super) fn part(options: &StudyOptions) -> (Vec<Vec<Variation>>, Vec<Case>) {
    let workers = options.workers.iter().copied();
    let workers = workers.min_by_key(|workers| workers.abs_diff(1));
    let group = |workers| {
        let daemon = |polls| Variation {
            configuration: Configuration {
                transport: "blk".to_owned(),
                workers,
                queues: 1,
            },
            polls: Some(polls),
        };
        vec![daemon(false), daemon(true)]
    };
    let cases = CASES.iter().map(|(one_disk, mixture, depth)| Case {
        mixture: MIXTURES[*mixture],
        depth: *depth,
        disks: if *one_disk { 1 } else { options.disks },
    });
    let count = if options.disks > 1 { CASES.len() } else { 1 };
    (
        workers.map(group).into_iter().collect(),
        cases.take(count).collect(),
    )
}

/// Returns the number of runs of a complete comparison.
pub(super) fn planned(options: &StudyOptions) -> usize {
    let (groups, cases) = part(options);
    groups.iter().flatten().count() * cases.len() * pairs(options) as usize
}

/// Returns the complete pairs of each case, each with polling first.
fn cases(polls: &[PollRecord]) -> Vec<(String, Vec<[&PollRecord; 2]>)> {
    let mut cases: Vec<(String, Vec<[&PollRecord; 2]>)> = Vec::new();
    for with in polls.iter().filter(|record| record.polls) {
        let is_partner = |one: &&PollRecord| {
            !one.polls
                && (one.pair, &one.configuration) == (with.pair, &with.configuration)
                && one.case() == with.case()
        };
        let Some(without) = polls.iter().find(is_partner) else {
            continue;
        };
        let name = with.case();
        match cases.iter_mut().find(|(case, _)| *case == name) {
            Some((_, pairs)) => pairs.push([with, without]),
            None => cases.push((name.into_owned(), vec![[with, without]])),
        }
    }
    cases
}

/// Returns sentences: each case, then the conclusions.
pub(super) fn advice(polls: &[PollRecord]) -> Vec<String> {
    let cases = cases(polls);
    if cases.is_empty() {
        return vec![
            "Polling or not: not compared, because the study was interrupted; the same command continues it.".to_owned(),
        ];
    }
    // Rate and CPU time of each case share the probability of an error.
    let number = 2 * cases.len();
    let mut sentences = Vec::new();
    let (mut pays, mut costs, mut few) = (Vec::new(), Vec::new(), false);
    let mut unsure: Vec<u32> = Vec::new();
    for (case, pairs) in cases {
        let count = pairs.len();
        few |= count < 3;
        // Medians with and without polling, and their ratio.
        let compare = |value: &dyn Fn(&PollRecord) -> f64| {
            let values = pairs
                .iter()
                .map(|[with, without]| (value(with), value(without)));
            let values: Vec<(f64, f64)> = values.collect();
            let comparison = Comparison::of(&values, number)?;
            let (with, without): (Vec<f64>, Vec<f64>) = values.into_iter().unzip();
            Some((spread(&with).median, spread(&without).median, comparison))
        };
        let name = pairs[0][0].configuration.name();
        let Some((with, without, rate)) = compare(&|record| record.iops) else {
            sentences.push(format!(
                "Polling or not ({name}; {case}; {count} pairs of turns): no result."
            ));
            continue;
        };
        let mut text = format!(
            "Polling or not ({name}; {case}; {count} pairs of turns): {with:.0} against {without:.0} I/Os per second, {}",
            describe(&rate),
        );
        if rate.ratio.low > 1.0 + MATTERS {
            pays.push(case.clone());
        }
        unsure.extend(undecided(&rate));
        if let Some((with, without, cost)) = compare(&|record| record.device_cpu_us) {
            text += &format!(
                "; {with:.2} against {without:.2} us of CPU per I/O, {}",
                describe(&cost)
            );
            if cost.ratio.low > 1.0 + MATTERS {
                costs.push(case);
            }
            unsure.extend(undecided(&cost));
        }
        sentences.push(text + ".");
    }
    let list = |all: &[String]| all.join("; ");
    sentences.push(match (&pays[..], &costs[..]) {
        _ if few => {
            "Polling or not: too few pairs of turns for advice; the same command continues.".to_owned()
        }
        ([], []) if unsure.is_empty() => format!(
            "Polling or not: no gain of more than {:.0} %; keep the present setting.",
            MATTERS * 100.0
        ),
        ([], []) => {
            let more = unsure.iter().max().copied().filter(|more| *more < u32::MAX);
            format!("Polling or not: no advice: {}.", not_enough(more))
        }
        ([], costs) => format!(
            "Polling or not: no gain in rate is certain, but a higher CPU cost ({}): serve with --poll-us 0.",
            list(costs)
        ),
        (pays, []) => format!(
            "Polling or not: leave it on, it gains rate ({}) without significantly more CPU per I/O.",
            list(pays)
        ),
        (pays, costs) => format!(
            "Polling or not: leave it on if rate matters ({}); use --poll-us 0 if CPU time matters ({}).",
            list(pays),
            list(costs)
        ),
    });
    sentences
}

/// Returns the number of missing pairs, if neither a gain above the margin nor its absence is certain.
fn undecided(comparison: &Comparison) -> Option<u32> {
    let most = 1.0 + MATTERS;
    let is_decided = |low: f64, high: f64| low > most || high < most;
    let ratio = comparison.ratio;
    let more = comparison.more_turns(is_decided).unwrap_or(u32::MAX);
    (!is_decided(ratio.low, ratio.high)).then_some(more)
}

/// Describes a ratio and its confidence.
fn describe(comparison: &Comparison) -> String {
    let confidence = match comparison.verdict() {
        Verdict::More | Verdict::Less => "sure".to_owned(),
        Verdict::Equal => format!("equal within {:.0} %", MATTERS * 100.0),
        Verdict::Undecided(more) => not_enough(more),
    };
    format!("ratio {}, {confidence}", comparison.range_text())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn polls(rates: [f64; 2], costs: [f64; 2], pairs: u32) -> Vec<PollRecord> {
        let record = |polls: bool, pair: u32| PollRecord {
            polls,
            configuration: Configuration {
                transport: "blk".to_owned(),
                workers: 1,
                queues: 1,
            },
            disks: 1,
            mixture: "randread".to_owned(),
            depth: 1,
            pair,
            iops: rates[usize::from(!polls)] + f64::from(pair),
            device_cpu_us: costs[usize::from(!polls)] + 0.001 * f64::from(pair),
            disturbed: false,
        };
        (1..=pairs)
            .flat_map(|pair| [record(true, pair), record(false, pair)])
            .collect()
    }

    #[test]
    fn the_advice_follows_from_both_the_rate_and_the_cost() {
        for (rates, costs, word) in [
            (
                [200e3, 100e3],
                [5.0, 3.0],
                "--poll-us 0 if CPU time matters (1 disk, randread, depth 1)",
            ),
            ([200e3, 100e3], [3.0, 3.0], "leave it on, it gains rate"),
            ([100e3, 100e3], [5.0, 3.0], "serve with --poll-us 0"),
            ([100e3, 100e3], [3.0, 3.0], "no gain of more than 3 %"),
        ] {
            let text = advice(&polls(rates, costs, 6)).join("\n");
            assert!(text.contains(word), "{text}");
        }
        let text = advice(&polls([200e3, 100e3], [5.0, 3.0], 6)).remove(0);
        assert!(
            text.contains("200004 against 100004 I/Os per second, ratio 2.00"),
            "{text}"
        );
        assert!(
            text.contains("5.00 against 3.00 us of CPU per I/O"),
            "{text}"
        );
        assert!(
            text.contains(", sure") && text.contains("6 pairs"),
            "{text}"
        );
    }

    #[test]
    fn what_was_cut_short_is_not_judged() {
        assert!(advice(&polls([2.0, 1.0], [1.0, 1.0], 0))[0].contains("not compared"));
        let few = advice(&polls([200e3, 100e3], [5.0, 3.0], 2)).join("\n");
        assert!(few.contains("too few pairs of turns for advice"), "{few}");
        // A turn without its partner is ignored.
        let mut odd = polls([200e3, 100e3], [5.0, 3.0], 6);
        odd.pop();
        assert!(advice(&odd)[0].contains("5 pairs of turns"));
    }
}
