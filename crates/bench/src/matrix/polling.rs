//! Comparison of a polling daemon with a non-polling one: a small part of the study, in turns.
//!
//! A pair consists of one turn of each daemon; the first one alternates between pairs. Only complete pairs count, so an interrupted
//! comparison uses equal cases. While one daemon is driven, the other is idle.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use anyhow::Result;
use latency::Clock;
use serde::{Deserialize, Serialize};

use super::advice::{MATTERS, sureness};
use super::study::{Configuration, Results, Rig, Study, StudyOptions};
use crate::run::{Interval, Progress, bootstrap_ratio, run_until_interrupted, spread};

/// Minimum number of pairs for a conclusion.
const PAIRS_MIN: u32 = 6;

/// One disk (true) or all, mixture, depth.
const CASES: [(bool, usize, u16); 4] = [(true, 0, 1), (false, 0, 1), (false, 2, 1), (false, 0, 8)];

/// One run of the comparison.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PollRecord {
    /// The daemon polls within its default limit; otherwise `--poll-us 0`.
    pub polls: bool,
    /// Transport, workers and queues.
    pub configuration: Configuration,
    /// Number of driven disks.
    pub disks: u16,
    /// Name of the mixture.
    pub mixture: String,
    /// Requests in flight per disk.
    pub depth: u16,
    /// Number of the pair, from 1.
    pub pair: u32,
    /// Requests per second of all disks.
    pub iops: f64,
    /// Device CPU time per request in microseconds.
    pub device_cpu_us: f64,
    /// Other load was present.
    pub disturbed: bool,
}

/// A line of the result file.
#[derive(Serialize, Deserialize)]
pub(super) struct PollLine {
    pub polling_comparison: PollRecord,
}

/// Returns virtio-blk with one queue and, if it is part of the study, one pinned worker. Waiting behaves the same in other
/// configurations.
fn configuration(options: &StudyOptions) -> Option<Configuration> {
    let workers = options.workers.iter().copied();
    Some(Configuration {
        transport: "blk".to_owned(),
        workers: workers.min_by_key(|workers| workers.abs_diff(1))?,
        queues: 1,
    })
}

fn pairs(options: &StudyOptions) -> u32 {
    options.repetitions.max(PAIRS_MIN)
}

/// Returns the number of runs of a complete comparison.
pub(super) fn planned(options: &StudyOptions) -> usize {
    let cases = if options.disks > 1 { CASES.len() } else { 1 };
    match configuration(options) {
        Some(_) => 2 * cases * pairs(options) as usize,
        None => 0,
    }
}

/// Runs the missing part of the comparison. Returns false if it was interrupted.
pub(super) fn compare(
    options: &StudyOptions,
    study: &mut Study,
    results: &mut Results,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<bool> {
    let Some(configuration) = configuration(options) else {
        return Ok(true);
    };
    let clock = Clock::new();
    let mut rigs: Option<[Rig; 2]> = None;
    for pair in 1..=pairs(options) {
        for (one_disk, mixture, depth) in CASES {
            let disks = if one_disk { 1 } else { options.disks };
            if !one_disk && disks == 1 {
                continue;
            }
            let (mixture, rw, reads) = super::MIXTURES[mixture];
            let mut order = [true, false];
            if pair % 2 == 0 {
                order.reverse();
            }
            for polls in order {
                let same = |one: &PollRecord| {
                    (one.polls, one.pair, one.disks, one.depth) == (polls, pair, disks, depth)
                        && one.mixture == mixture
                        && one.configuration == configuration
                };
                if study.polls.iter().any(same) {
                    continue;
                }
                if interrupted.load(Ordering::Relaxed) {
                    return Ok(false);
                }
                let rigs = match &rigs {
                    Some(rigs) => rigs,
                    None => rigs.insert([
                        Rig::start(options, &configuration, &["--poll-us", "0"])?,
                        Rig::start(options, &configuration, &[])?,
                    ]),
                };
                let rig = &rigs[usize::from(polls)];
                let mut plan = rig.plan(options, &configuration, mixture, rw, reads, depth)?;
                plan.jobs.truncate(usize::from(disks));
                let outcome = run_until_interrupted(&plan, &clock, interrupted, progress)?;
                let Some(outcome) = outcome else {
                    return Ok(false);
                };
                let one = outcome.subjects.first().and_then(|s| s.repetitions.first());
                let Some(one) = one else {
                    return Ok(false);
                };
                let record = PollRecord {
                    polls,
                    configuration: configuration.clone(),
                    disks,
                    mixture: mixture.to_owned(),
                    depth,
                    pair,
                    iops: one.iops(),
                    device_cpu_us: one.device_cpu_per_million.unwrap_or(0.0),
                    disturbed: one.disturbed,
                };
                let line = PollLine {
                    polling_comparison: record.clone(),
                };
                results.add(&line)?;
                study.polls.push(record);
            }
        }
        progress.say(&format!(
            "polling or not: {pair} of {} pairs",
            pairs(options)
        ));
    }
    Ok(true)
}

/// Results of one case, pair by pair: with polling at index 0, without polling at index 1.
struct Case<'a> {
    first: &'a PollRecord,
    iops: [Vec<f64>; 2],
    cpu: [Vec<f64>; 2],
}

fn cases(study: &Study) -> Vec<Case<'_>> {
    let mut cases: Vec<Case<'_>> = Vec::new();
    for with in study.polls.iter().filter(|record| record.polls) {
        let without = study.polls.iter().find(|one| {
            let with = PollRecord {
                polls: false,
                iops: one.iops,
                device_cpu_us: one.device_cpu_us,
                disturbed: one.disturbed,
                ..with.clone()
            };
            **one == with
        });
        let Some(without) = without else { continue };
        let same = |case: &Case<'_>| {
            let first = case.first;
            (first.disks, first.depth, &first.mixture) == (with.disks, with.depth, &with.mixture)
                && first.configuration == with.configuration
        };
        let at = match cases.iter().position(same) {
            Some(at) => at,
            None => {
                cases.push(Case {
                    first: with,
                    iops: Default::default(),
                    cpu: Default::default(),
                });
                cases.len() - 1
            }
        };
        for (side, one) in [with, without].into_iter().enumerate() {
            cases[at].iops[side].push(one.iops);
            cases[at].cpu[side].push(one.device_cpu_us);
        }
    }
    cases
}

/// Returns sentences: each case, then the conclusions.
pub(super) fn advice(study: &Study) -> Vec<String> {
    let cases = cases(study);
    if cases.is_empty() {
        return vec![
            "Polling or not: not compared, because the study was interrupted; the same command continues it.".to_owned(),
        ];
    }
    let mut sentences = Vec::new();
    let (mut pays, mut costs, mut few) = (Vec::new(), Vec::new(), false);
    for case in &cases {
        let Some(rate) = bootstrap_ratio(&case.iops[0], &case.iops[1]) else {
            continue;
        };
        let PollRecord {
            disks,
            mixture,
            depth,
            configuration,
            ..
        } = case.first;
        let disks = match disks {
            1 => "one disk".to_owned(),
            count => format!("{count} disks"),
        };
        let what = format!("{disks}, {mixture}, QD{depth}");
        let count = case.iops[0].len();
        few |= count < 3;
        let [with, without] = case.iops.each_ref().map(|iops| spread(iops).median);
        let mut text = format!(
            "Polling or not ({}; {what}; {count} pairs of turns): {with:.0} against {without:.0} I/Os per second, {} ({})",
            configuration.name(),
            ratio(rate),
            sureness(count, rate),
        );
        if rate.low > 1.0 + MATTERS {
            pays.push(what.clone());
        }
        if let Some(cpu) = bootstrap_ratio(&case.cpu[0], &case.cpu[1]) {
            let [with, without] = case.cpu.each_ref().map(|cpu| spread(cpu).median);
            text.push_str(&format!(
                "; {with:.2} against {without:.2} us of CPU per I/O, {} ({})",
                ratio(cpu),
                sureness(count, cpu)
            ));
            if cpu.low > 1.0 + MATTERS {
                costs.push(what);
            }
        }
        text.push('.');
        sentences.push(text);
    }
    let list = |all: &[String]| all.join("; ");
    let conclusion = if few {
        "Polling or not: too few pairs of turns for advice; the same command continues.".to_owned()
    } else {
        match (&pays[..], &costs[..]) {
            ([], []) => {
                "Polling or not: no significant difference; keep the present setting.".to_owned()
            }
            ([], costs) => format!(
                "Polling or not: no significant gain in rate, but a higher CPU cost ({}): serve with --poll-us 0.",
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
        }
    };
    sentences.push(conclusion);
    sentences
}

fn ratio(of: Interval) -> String {
    format!(
        "ratio {:.2}, 95 % interval {:.2} to {:.2}",
        of.value, of.low, of.high
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::run::Environment;

    fn study(rates: [f64; 2], costs: [f64; 2], pairs: u32) -> Study {
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
        Study {
            environment: Environment::default(),
            disks: 1,
            turn_ms: 10,
            polling: false,
            records: Vec::new(),
            polls: (1..=pairs)
                .flat_map(|pair| [record(true, pair), record(false, pair)])
                .collect(),
            planned: 0,
        }
    }

    #[test]
    fn the_advice_follows_from_both_the_rate_and_the_cost() {
        for (rates, costs, word) in [
            (
                [200e3, 100e3],
                [5.0, 3.0],
                "--poll-us 0 if CPU time matters (one disk, randread, QD1)",
            ),
            ([200e3, 100e3], [3.0, 3.0], "leave it on, it gains rate"),
            ([100e3, 100e3], [5.0, 3.0], "serve with --poll-us 0"),
            ([100e3, 100e3], [3.0, 3.0], "no significant difference"),
        ] {
            let text = advice(&study(rates, costs, 6)).join("\n");
            assert!(text.contains(word), "{text}");
        }
        let text = advice(&study([200e3, 100e3], [5.0, 3.0], 6)).remove(0);
        assert!(
            text.contains("200004 against 100004 I/Os per second, ratio 2.00"),
            "{text}"
        );
        assert!(
            text.contains("5.00 against 3.00 us of CPU per I/O"),
            "{text}"
        );
        assert!(
            text.contains("(sure)") && text.contains("6 pairs"),
            "{text}"
        );
    }

    #[test]
    fn what_was_cut_short_is_not_judged() {
        assert!(advice(&study([2.0, 1.0], [1.0, 1.0], 0))[0].contains("not compared"));
        let few = advice(&study([200e3, 100e3], [5.0, 3.0], 2)).join("\n");
        assert!(few.contains("too few pairs of turns for advice"), "{few}");
        // A turn without its partner is ignored.
        let mut odd = study([200e3, 100e3], [5.0, 3.0], 6);
        odd.polls.pop();
        assert!(advice(&odd)[0].contains("5 pairs of turns"));
    }
}
