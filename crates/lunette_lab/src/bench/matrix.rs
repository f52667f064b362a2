//! `lunette bench matrix`: runs the study and writes its page.

use std::io::Write;
use std::time::Duration;

use bench::matrix::{StudyOptions, report, run as run_study};
use bench::run::Progress;

use super::arguments::MatrixArguments;
use super::{failed, interrupted, to_its_end, unless_interrupted};
use cli_common::{Failure, Outcome};

/// Default numbers of workers, limited by the machine's CPUs.
const WORKERS: [usize; 5] = [0, 1, 2, 4, 8];

/// Runs the missing parts of the study and writes the page of all results.
pub fn run(arguments: &MatrixArguments) -> Outcome {
    let cpus = std::thread::available_parallelism().map_or(1, usize::from);
    let mut workers = arguments.workers.clone();
    if workers.is_empty() {
        workers.extend(WORKERS);
    }
    match arguments.workers.iter().max() {
        Some(most) if *most > cpus => {
            let reason =
                format!("--workers {most}: each worker needs its own CPU, but there are {cpus}");
            return Err(Failure::because(reason));
        }
        _ => workers.retain(|count| *count <= cpus),
    }
    let place = &arguments.place;
    std::fs::create_dir_all(place)
        .map_err(|error| Failure::because(format!("cannot create {}: {error}", place.display())))?;
    let options = StudyOptions {
        program: cli_common::find_sibling("lunette")?,
        results: place.join("results.jsonl"),
        disks: arguments.disks,
        workers,
        queues: arguments.queues.clone(),
        repetitions: arguments.repetitions,
        until_sure: arguments.until_sure,
        turn: Duration::from_millis(arguments.turn_ms),
        polling: arguments.polling,
    };
    let progress = Progress::new(None);
    let interrupted = interrupted()?;
    let study = unless_interrupted(run_study(&options, &interrupted, &progress), &interrupted)?;
    drop(progress);
    for path in report(&study, &place.join("index.html")).map_err(failed)? {
        writeln!(cli_common::stdout(), "{}", path.display())?;
    }
    to_its_end(&interrupted)
}
