//! `lunette bench table`: what `make bench` runs.

use std::fs::OpenOptions;
use std::io::Write;
use std::path::Path;
use std::time::Duration;

use bench::run::Progress;
use bench::table::{TableOptions, table};

use super::arguments::TableArguments;
use super::interrupted;
use crate::failure::{Failure, Outcome};

/// Makes the table, prints it, and notes it where asked.
pub fn run(arguments: TableArguments) -> Outcome {
    let options = TableOptions {
        program: std::env::current_exe()?,
        place: arguments.place,
        driver_cpu: arguments.driver_cpu,
        device_cpu: arguments.device_cpu,
        repetitions: arguments.repetitions.max(1),
        turn: Duration::from_millis(arguments.turn_ms.max(10)),
        only: arguments.only,
    };
    let progress = Progress::new(None);
    let text = table(&options, &interrupted()?, &progress)?;
    drop(progress);
    write!(std::io::stdout(), "{text}")?;
    if let Some(folder) = arguments.notes {
        note(&folder, &text)?;
    }
    Ok(())
}

fn note(folder: &Path, text: &str) -> Outcome {
    let now = std::time::SystemTime::now();
    let seconds = now
        .duration_since(std::time::UNIX_EPOCH)
        .map_or(0, |time| time.as_secs());
    let path = folder.join(format!("{}.md", bench::report::date(seconds)));
    let failed = |error: std::io::Error| {
        Failure::because(format!("cannot write to {}: {error}", path.display()))
    };
    std::fs::create_dir_all(folder).map_err(failed)?;
    let mut options = OpenOptions::new();
    let mut file = options
        .create(true)
        .append(true)
        .open(&path)
        .map_err(failed)?;
    let clock = (seconds % 86_400 / 3600, seconds % 3600 / 60);
    write!(
        file,
        "## make bench, {:02}:{:02} UTC\n\n```\n{text}```\n\n",
        clock.0, clock.1
    )
    .map_err(failed)?;
    eprintln!("lunette: noted in {}", path.display());
    Ok(())
}
