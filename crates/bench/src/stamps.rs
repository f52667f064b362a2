//! Cost of time stamps: the same load on a daemon with and one without stamps, in turns.
//!
//! Both are restarted for each round, because memory placement affects a rate more than stamps do. A round yields one value from its
//! short turns, which are paired (with, without, without, with) so that drift cancels. At depth one the difference of the mean times
//! counts, otherwise the ratio of rates. The interval is over the rounds.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, bail};
use latency::Clock;
use latency::table::time;
use serde::Serialize;

use crate::children::{Daemon, Scratch, Start};
use crate::driver::{DriverOptions, Subject};
use crate::job::{Job, apply};
use crate::report::{columns, rate};
use crate::run::{
    Interval, Plan, Progress, Repetition, SubjectResult, bootstrap_middle, middle_mean,
    run_until_interrupted, spread,
};

/// Options of the measurement.
#[derive(Clone, Debug)]
pub struct StampOptions {
    /// Program of the daemon: this one.
    pub program: PathBuf,
    /// CPU of the driver.
    pub driver_cpu: usize,
    /// CPU of the daemons.
    pub device_cpu: usize,
    /// Number of rounds, each with restarted daemons.
    pub rounds: u32,
    /// Turns of each daemon per round; at least two.
    pub repetitions: u32,
    /// Only cases with this text in their names.
    pub only: Option<String>,
    /// Measured time of one turn.
    pub turn: Duration,
}

/// Goals: a fraction of the rate, and nanoseconds per request at depth one.
const RATE_PART_MAX: f64 = 0.03;
const DEPTH_ONE_NS_MAX: f64 = 50.0;

struct Case {
    name: &'static str,
    transport: &'static str,
    depth: &'static str,
}

/// Unmeasured time before each turn.
const WARM_UP: Duration = Duration::from_millis(20);

const CASES: [Case; 6] = [
    Case {
        name: "blk QD1",
        transport: "blk",
        depth: "1",
    },
    Case {
        name: "blk QD32",
        transport: "blk",
        depth: "32",
    },
    Case {
        name: "blk QD128",
        transport: "blk",
        depth: "128",
    },
    Case {
        name: "scsi QD1",
        transport: "scsi",
        depth: "1",
    },
    Case {
        name: "scsi QD32",
        transport: "scsi",
        depth: "32",
    },
    Case {
        name: "scsi QD128",
        transport: "scsi",
        depth: "128",
    },
];

/// Result of one case.
#[derive(Clone, Debug, Serialize)]
pub struct StampCost {
    /// Name of the case.
    pub case: String,
    /// I/Os per second of each turn with stamps.
    pub with: Vec<f64>,
    /// I/Os per second of each turn without stamps.
    pub without: Vec<f64>,
    /// Mean nanoseconds per request of each turn with stamps.
    pub time_with: Vec<f64>,
    /// Mean nanoseconds per request of each turn without stamps.
    pub time_without: Vec<f64>,
    /// Cost of stamps per round: a fraction of the rate, or nanoseconds.
    pub rounds: Vec<f64>,
    /// Depth one: one request at a time.
    pub depth_one: bool,
}

impl StampCost {
    /// Returns the cost of stamps: a fraction of the rate, or at depth one nanoseconds per request.
    pub fn cost(&self) -> Option<Interval> {
        bootstrap_middle(&self.rounds)
    }
}

/// Measures all cases.
///
/// # Errors
/// A daemon does not start, or a run fails.
pub fn stamp_cost(
    options: &StampOptions,
    interrupted: &Arc<AtomicBool>,
    progress: &Progress,
) -> Result<Vec<StampCost>> {
    let clock = Clock::new();
    let wanted = |case: &&Case| {
        let only = options.only.as_deref().unwrap_or_default();
        case.name.contains(only)
    };
    let cases: Vec<&Case> = CASES.iter().filter(wanted).collect();
    if cases.is_empty() {
        let names = CASES.map(|case| case.name).join(", ");
        let only = options.only.as_deref().unwrap_or_default();
        bail!("no case's name contains `{only}`; the cases: {names}");
    }
    let mut costs: Vec<StampCost> = cases
        .iter()
        .map(|case| StampCost {
            case: case.name.to_owned(),
            with: Vec::new(),
            without: Vec::new(),
            time_with: Vec::new(),
            time_without: Vec::new(),
            rounds: Vec::new(),
            depth_one: case.depth == "1",
        })
        .collect();
    for round in 0..options.rounds {
        let folder = Scratch::for_sockets("ls")?;
        let names = ["with stamps", "without"];
        let daemons = [false, true].map(|without| serve(options, folder.path(), without));
        let [_with, _without] = match daemons {
            [Ok(with), Ok(without)] => [with, without],
            [Err(error), _] | [_, Err(error)] => return Err(error),
        };
        for (case, cost) in cases.iter().zip(&mut costs) {
            if interrupted.load(Ordering::Relaxed) {
                return Ok(costs);
            }
            // The order alternates within a round, and the first daemon from round to round.
            let mut order = [false, true, true, false];
            if round % 2 == 1 {
                order = order.map(|without| !without);
            }
            let mut subjects = Vec::new();
            for without in order {
                let socket = folder.path().join(socket_name(case.transport, without));
                let (socket, name) = (socket.display(), names[usize::from(without)]);
                let text = format!(
                    "vhost-user-{}:{socket},name={} {name}",
                    case.transport, case.name
                );
                subjects.push(Subject::parse(&text)?);
            }
            let plan = plan(options, case, subjects)?;
            let outcome = run_until_interrupted(&plan, &clock, interrupted, progress)
                .with_context(|| case.name)?;
            let Some(outcome) = outcome else {
                return Ok(costs);
            };
            let mut pairs = Vec::new();
            for (results, order) in outcome.subjects.chunks(2).zip(order.chunks(2)) {
                let ([a, b], [swapped, _]) = (results, order) else {
                    continue;
                };
                let (with, without) = if *swapped { (b, a) } else { (a, b) };
                cost.add(with, without, &mut pairs);
            }
            if !pairs.is_empty() {
                cost.rounds.push(middle_mean(&pairs));
            }
        }
    }
    Ok(costs)
}

impl StampCost {
    /// Adds paired turns, and the cost of stamps in each pair.
    fn add(&mut self, with: &SubjectResult, without: &SubjectResult, pairs: &mut Vec<f64>) {
        for (with, without) in with.repetitions.iter().zip(&without.repetitions) {
            let rates = [with, without].map(Repetition::iops);
            let times = [with, without].map(|one| one.latency().mean_ns());
            self.with.push(rates[0]);
            self.without.push(rates[1]);
            self.time_with.push(times[0]);
            self.time_without.push(times[1]);
            if self.depth_one {
                pairs.push(times[0] - times[1]);
            } else if rates[1] > 0.0 {
                pairs.push(1.0 - rates[0] / rates[1]);
            }
        }
    }
}

fn socket_name(transport: &str, without: bool) -> String {
    format!("{transport}-{without}")
}

fn serve(options: &StampOptions, folder: &std::path::Path, without: bool) -> Result<Daemon> {
    let cpu = options.device_cpu.to_string();
    let [blk, scsi] = ["blk", "scsi"].map(|transport| folder.join(socket_name(transport, without)));
    let control = folder.join(format!("control-{without}"));
    let mut command = Start::new(&options.program, Some(options.device_cpu));
    command.args(["--log", "warn", "serve", "--cpus", &cpu]);
    command.arg("--control").arg(&control);
    command.args(["--disk", "null=null:64G"]);
    command
        .arg("--vhost-blk")
        .arg(format!("null:{}", blk.display()));
    command
        .arg("--vhost-scsi")
        .arg(format!("c0:{}", scsi.display()));
    command.args(["--lun", "c0/0:0=null"]);
    if without {
        command.arg("--without-stamps");
    }
    let log = folder.join(format!("log-{without}"));
    Daemon::start(command, &log, &[control, blk, scsi])
}

fn plan(options: &StampOptions, case: &Case, subjects: Vec<Subject>) -> Result<Plan> {
    let mut job = Job {
        name: case.name.to_owned(),
        no_random_map: true,
        time_based: true,
        runtime: Some(options.turn),
        ..Job::default()
    };
    for (option, value) in [("rw", "randread"), ("iodepth", case.depth)] {
        apply(&mut job, option, Some(value)).map_err(anyhow::Error::msg)?;
    }
    Ok(Plan {
        subjects,
        jobs: vec![job],
        driver: DriverOptions::default(),
        repetitions: options.repetitions.div_ceil(2),
        warm_up: WARM_UP,
        cpus: vec![options.driver_cpu],
        retries: 1,
        disturbance_max: 0.1,
        ..Plan::default()
    })
}

/// Formats the table.
pub fn render(costs: &[StampCost]) -> String {
    let head = ["cost of stamps", "with", "without", "cost", "95 %", "goal"];
    let mut lines = vec![head.map(str::to_owned).to_vec()];
    for cost in costs.iter().filter(|cost| !cost.with.is_empty()) {
        let Some(interval) = cost.cost() else {
            continue;
        };
        let show = |value: f64| match cost.depth_one {
            true => format!("{value:.0} ns"),
            false => format!("{:.1} %", value * 100.0),
        };
        let middle = |rates: &[f64], times: &[f64]| match cost.depth_one {
            true => time(spread(times).median),
            false => rate(spread(rates).median),
        };
        let (limit, goal) = match cost.depth_one {
            true => (DEPTH_ONE_NS_MAX, "below 50 ns"),
            false => (RATE_PART_MAX, "below 3 %"),
        };
        let verdict = match interval {
            i if i.high < limit => "met",
            i if i.low >= limit => "missed",
            i if i.value < limit => "met, not significant",
            _ => "missed, not significant",
        };
        lines.push(vec![
            cost.case.clone(),
            middle(&cost.with, &cost.time_with),
            middle(&cost.without, &cost.time_without),
            show(interval.value),
            format!("{} to {}", show(interval.low), show(interval.high)),
            format!("{goal}: {verdict}"),
        ]);
    }
    columns(&lines)
}

#[cfg(test)]
mod tests {
    use latency::SparseHistogram;

    use super::*;
    use crate::drive::Tally;
    use crate::run::JobResult;

    fn cost(depth_one: bool, with: [f64; 4], without: [f64; 4]) -> StampCost {
        let mut cost = StampCost {
            case: "c".to_owned(),
            with: Vec::new(),
            without: Vec::new(),
            time_with: Vec::new(),
            time_without: Vec::new(),
            rounds: Vec::new(),
            depth_one,
        };
        let turn = |value: f64| {
            let job = JobResult {
                tallies: std::array::from_fn(|at| Tally {
                    ios: if at == 0 { value as u64 } else { 0 },
                    latency: SparseHistogram::from_nanos((at == 0).then_some(value as u64)),
                    ..Tally::default()
                }),
                elapsed_ns: 1_000_000_000,
                ..JobResult::default()
            };
            SubjectResult {
                name: String::new(),
                repetitions: vec![Repetition {
                    jobs: vec![job],
                    ..Repetition::default()
                }],
            }
        };
        for (with, without) in with.into_iter().zip(without) {
            let mut pairs = Vec::new();
            cost.add(&turn(with), &turn(without), &mut pairs);
            cost.rounds.push(middle_mean(&pairs));
        }
        cost
    }

    #[test]
    fn cost_is_in_nanoseconds_at_depth_1_and_a_share_elsewhere() {
        let one = cost(
            true,
            [1040.0, 1140.0, 990.0, 1000.0],
            [1000.0, 1100.0, 950.0, 960.0],
        );
        assert_eq!(one.cost().unwrap().value, 40.0);
        let many = cost(false, [9500.0; 4], [10_000.0; 4]);
        assert!((many.cost().unwrap().value - 0.05).abs() < 1e-9);
        let text = render(&[one, many]);
        assert!(
            text.contains("40 ns") && text.contains("below 50 ns: met\n"),
            "{text}"
        );
        assert!(
            text.contains("5.0 %") && text.contains("below 3 %: missed\n"),
            "{text}"
        );
    }
}
