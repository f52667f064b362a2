//! Advice as text, derived from the study's records: transport, number of workers and queues, and confidence.

use std::collections::BTreeMap;

use super::study::{Configuration, Record, Study};
use crate::run::{Interval, bootstrap_ratio, spread};

/// Smaller relative differences are ignored.
pub(super) const MATTERS: f64 = 0.03;

/// Returns the geometric mean over all cases for each configuration and turn, so that all cases have equal weight.
fn scores(study: &Study, of: impl Fn(&Record) -> f64) -> BTreeMap<Configuration, Vec<f64>> {
    let mut logs: BTreeMap<(Configuration, u32), Vec<f64>> = BTreeMap::new();
    for record in &study.records {
        let value = of(record);
        if value > 0.0 {
            let key = (record.configuration.clone(), record.turn);
            logs.entry(key).or_default().push(value.ln());
        }
    }
    // An incomplete turn would be compared with a different set of cases.
    let whole = logs.values().map(Vec::len).max().unwrap_or(0);
    let mut scores: BTreeMap<Configuration, Vec<f64>> = BTreeMap::new();
    for ((configuration, _), values) in logs {
        if values.len() == whole {
            let mean = values.iter().sum::<f64>() / values.len() as f64;
            scores.entry(configuration).or_default().push(mean.exp());
        }
    }
    scores
}

/// Describes the confidence of a ratio from `turns` turns.
pub(super) fn sureness(turns: usize, ratio: Interval) -> &'static str {
    match turns {
        0..=2 => "too few turns to be sure",
        _ if ratio.low > 1.0 || ratio.high < 1.0 => "sure",
        _ => "not sure: the interval holds 1",
    }
}

/// Compares `a` with `b` as text: difference and confidence.
fn verdict(question: &str, a: (&str, &[f64]), b: (&str, &[f64])) -> Option<String> {
    let ratio = bootstrap_ratio(a.1, b.1)?;
    let percent = |value: f64| format!("{:.0} %", (value - 1.0).abs() * 100.0);
    let range = format!(
        "95 % interval of the ratio: {:.2} to {:.2}",
        ratio.low, ratio.high
    );
    let sure = sureness(a.1.len().min(b.1.len()), ratio);
    Some(if (ratio.value - 1.0).abs() < MATTERS {
        format!(
            "{question}: no significant difference between {} and {} ({range}).",
            a.0, b.0
        )
    } else if ratio.value > 1.0 {
        format!(
            "{question}: {}, {} above {} ({range}; {sure}).",
            a.0,
            percent(ratio.value),
            b.0
        )
    } else {
        format!(
            "{question}: {}, {} above {} ({range}; {sure}).",
            b.0,
            percent(1.0 / ratio.value),
            a.0
        )
    })
}

fn best(
    scores: &BTreeMap<Configuration, Vec<f64>>,
    wanted: impl Fn(&Configuration) -> bool,
) -> Option<(&Configuration, &Vec<f64>)> {
    let some = scores
        .iter()
        .filter(|(configuration, _)| wanted(configuration));
    some.max_by(|a, b| spread(a.1).median.total_cmp(&spread(b.1).median))
}

/// Returns sentences, the most important first.
pub fn advice(study: &Study) -> Vec<String> {
    let rates = scores(study, Record::iops);
    let mut sentences = Vec::new();
    if study.records.len() < study.planned {
        sentences.push(format!(
            "The study was interrupted after {} of {} runs: the results are those of its complete turns. The same command continues it.",
            study.records.len(),
            study.planned
        ));
    }
    let Some((winner, _)) = best(&rates, |_| true) else {
        sentences.push("No complete turn yet: no results.".to_owned());
        return sentences;
    };
    sentences.push(format!(
        "Most I/Os per second over all fifteen cases with equal weight: {}.",
        winner.name()
    ));
    let transport = |name: &str| best(&rates, |c| c.transport == name);
    if let (Some(blk), Some(scsi)) = (transport("blk"), transport("scsi")) {
        let pair = (("virtio-blk", &blk.1[..]), ("virtio-scsi", &scsi.1[..]));
        sentences.extend(verdict(
            "Transport, each with its best settings",
            pair.0,
            pair.1,
        ));
    }
    let mut workers: Vec<usize> = rates.keys().map(|c| c.workers).collect();
    workers.sort_unstable();
    workers.dedup();
    for pair in workers.windows(2) {
        let of = |count: usize| best(&rates, |c| c.workers == count);
        if let (Some(a), Some(b)) = (of(pair[1]), of(pair[0])) {
            let words = |count: usize| match count {
                0 => "one shared worker".to_owned(),
                1 => "one worker with a CPU of its own".to_owned(),
                n => format!("{n} workers with a CPU each"),
            };
            let (more, fewer) = (words(pair[1]), words(pair[0]));
            sentences.extend(verdict("Workers", (&more, a.1), (&fewer, b.1)));
        }
    }
    let of = |single: bool| best(&rates, |c| (c.queues == 1) == single);
    if let (Some(one), Some(several)) = (of(true), of(false)) {
        let pair = (
            ("several queues per disk", &several.1[..]),
            ("one queue per disk", &one.1[..]),
        );
        sentences.extend(verdict("Queues", pair.0, pair.1));
    }
    let costs = scores(study, |record| record.device_cpu_us);
    let cheapest = costs
        .iter()
        .min_by(|a, b| spread(a.1).median.total_cmp(&spread(b.1).median));
    if let Some((configuration, values)) = cheapest {
        sentences.push(format!(
            "Least CPU per I/O: {}, {:.2} us.",
            configuration.name(),
            spread(values).median
        ));
    }
    sentences.extend(super::polling::advice(study));
    sentences.extend(outside(study));
    let runs = study.records.iter().map(|record| record.disturbed);
    let runs = runs.chain(study.polls.iter().map(|record| record.disturbed));
    let (all, disturbed) = (runs.clone().count(), runs.filter(|d| *d).count());
    if disturbed > 0 {
        sentences.push(format!(
            "{disturbed} of {all} runs were disturbed by other work on the machine: differences are less reliable."
        ));
    }
    sentences
}

/// Describes the part of the latency outside the device.
fn outside(study: &Study) -> Option<String> {
    let how = if study.polling {
        "polled"
    } else {
        "waited for interrupts"
    };
    // Per turn: total time of requests, and time inside the device.
    let mut turns: BTreeMap<u32, (f64, f64)> = BTreeMap::new();
    for record in study.records.iter().filter(|record| record.depth == 1) {
        let device: f64 = record.steps_ns.iter().map(|(_, ns)| ns).sum();
        if device > 0.0 {
            let turn = turns.entry(record.turn).or_default();
            turn.0 += record.latency_ns[0];
            turn.1 += device;
        }
    }
    let share = |(seen, inside): &(f64, f64)| 100.0 * (1.0 - (inside / seen).min(1.0));
    let shares: Vec<f64> = turns.values().filter(|t| t.0 > 0.0).map(share).collect();
    let over = spread(&shares);
    let sure = match shares.len() {
        0 => return None,
        1..=2 => "too few turns to be sure".to_owned(),
        count => format!("{:.0} to {:.0} % over {count} turns", over.min, over.max),
    };
    Some(format!(
        "The driver {how}: at depth 1, {:.0} % of a request's time passed outside of the device, in kicks, interrupts and waking up \
         ({sure}).",
        over.median
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_verdict_says_how_sure_it_is() {
        let a = [200.0, 210.0, 205.0];
        let b = [100.0, 104.0, 101.0];
        let text = verdict("Transport", ("x", &a), ("y", &b)).unwrap();
        assert!(
            text.starts_with("Transport: x, ") && text.ends_with("; sure)."),
            "{text}"
        );
        let text = verdict("Transport", ("y", &b), ("x", &a)).unwrap();
        assert!(text.starts_with("Transport: x, "), "{text}");
        let text = verdict("Transport", ("x", &b), ("y", &b)).unwrap();
        assert!(text.contains("no significant difference"), "{text}");
        let text = verdict("Transport", ("x", &a[..2]), ("y", &b[..2])).unwrap();
        assert!(text.contains("too few"), "{text}");
    }
}
