//! Runs the data path on a simulated clock, ring, disks and network, from one seed: `cargo run -p sim -- --seed 7`.
//!
//! Production code: worker loop, queues, connections, SCSI core with executor, disks and images. Simulated: the kernel's side of a ring,
//! the clock, and the thread of an image. Clients check all blocks against `model`: acknowledged writes persist, reads return permitted
//! values, all requests end, and images stay consistent. `uring::simulated::Files` lists the faults.

#![forbid(unsafe_code)]

mod clients;
mod files;
mod hostile;
mod life;
mod model;
mod random;
mod reservations;
mod run;
mod schedule;
mod world;

use std::ops::Range;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

/// Runs the data path on simulated clock, disks and network
#[derive(Parser)]
#[command(version, about, long_about = None)]
struct Arguments {
    /// Run one seed and print a trace of its events
    #[arg(long, value_name = "N", conflicts_with_all = ["seeds", "minutes"])]
    seed: Option<u64>,
    /// Run the seeds from A to B - 1 [default: 0..200]
    #[arg(long, value_name = "A..B", value_parser = range)]
    seeds: Option<Range<u64>>,
    /// Run new seeds for this number of minutes
    #[arg(long, value_name = "M")]
    minutes: Option<f64>,
    /// First seed of --minutes [default: derived from the clock]
    #[arg(long, value_name = "N", requires = "minutes")]
    first: Option<u64>,
    /// Number of steps per run
    #[arg(long, value_name = "N", default_value_t = 600)]
    steps: usize,
    /// Number of threads. Each thread runs other seeds
    #[arg(long, value_name = "N", default_value_t = 1)]
    jobs: u64,
    /// Do not search for a shorter schedule that fails too
    #[arg(long)]
    no_shrink: bool,
}

fn range(text: &str) -> Result<Range<u64>, String> {
    let parse = |part: &str| {
        part.parse()
            .map_err(|_| format!("{part:?} is not a number"))
    };
    let (from, to) = text.split_once("..").ok_or("two numbers, as in 0..100")?;
    Ok(parse(from)?..parse(to)?)
}

fn main() -> ExitCode {
    let arguments = Arguments::parse();
    run::quiet_panics();
    if let Some(seed) = arguments.seed {
        return run::one(seed, arguments.steps, !arguments.no_shrink);
    }
    let minutes = arguments.minutes;
    let limit = minutes.map(|minutes| Duration::from_secs_f64(minutes * 60.0));
    let seeds = match (&arguments.seeds, limit) {
        (Some(seeds), _) => seeds.clone(),
        (None, Some(_)) => {
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
            let by_time = now.map_or(0, |now| now.as_secs()) << 20;
            arguments.first.unwrap_or(by_time)..u64::MAX
        }
        (None, None) => 0..200,
    };
    run::many(
        seeds,
        limit,
        arguments.jobs,
        arguments.steps,
        !arguments.no_shrink,
    )
}
