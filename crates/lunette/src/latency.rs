//! `lunette latency`: asks a daemon what its queues measured, and prints it.

use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use daemon::{QueueReport, SlowReport, control, reports, slowest};
use serde_json::json;
use timeline::Snapshot;

use crate::cli::LatencyArguments;
use crate::failure::{Failure, Outcome};

/// Longest interval of `--watch`: a day.
const INTERVAL_SECONDS_MAX: f64 = 86_400.0;

/// Asks once, or again and again.
pub fn run(arguments: &LatencyArguments) -> Outcome {
    let socket = control_socket(arguments.socket.as_ref())?;
    let selector = arguments.selector.as_deref();
    if let Some(count) = arguments.slowest {
        let path = control::latency_path(selector, count);
        let snapshot: Snapshot = control::get(&socket, &path)?;
        return print_slowest(&slowest(&snapshot, count), arguments.json);
    }
    let Some(seconds) = arguments.watch else {
        let snapshot = ask(&socket, selector)?;
        return print(&reports(&snapshot, selector), arguments.json);
    };
    if !(0.1..=INTERVAL_SECONDS_MAX).contains(&seconds) {
        return Err(Failure::because(format!(
            "--watch={seconds}: the interval must be 0.1 to {INTERVAL_SECONDS_MAX} seconds"
        )));
    }
    let mut before = (ask(&socket, selector)?, Instant::now());
    loop {
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let now = (ask(&socket, selector)?, Instant::now());
        let interval = now.1 - before.1;
        let reports = reports(&now.0.since(&before.0), selector).into_iter();
        let reports: Vec<QueueReport> = reports.map(|report| report.over(interval)).collect();
        if !arguments.json && std::io::stdout().is_terminal() {
            // To the top left corner, and clear what was there.
            write!(std::io::stdout(), "\x1b[H\x1b[J")?;
        }
        print(&reports, arguments.json)?;
        before = now;
    }
}

/// The control socket that was named, or else the usual one.
pub fn control_socket(named: Option<&PathBuf>) -> Result<PathBuf, Failure> {
    if let Some(named) = named {
        return Ok(named.clone());
    }
    match control::default_socket() {
        // A daemon of one's own comes first; else the system's, which may let one's group in.
        Some(own) if own.exists() => Ok(own),
        _ => Ok(PathBuf::from(control::SYSTEM_SOCKET)),
    }
}

fn ask(socket: &Path, selector: Option<&str>) -> Result<Snapshot, Failure> {
    Ok(control::get(socket, &control::latency_path(selector, 0))?)
}

fn print(reports: &[QueueReport], as_json: bool) -> Outcome {
    let mut stdout = std::io::stdout().lock();
    if as_json {
        writeln!(stdout, "{}", json!({"reports": reports}))?;
    } else if reports.is_empty() {
        writeln!(stdout, "no client has used any export yet")?;
    } else {
        for (index, report) in reports.iter().enumerate() {
            if index > 0 {
                writeln!(stdout)?;
            }
            write!(stdout, "{report}")?;
        }
    }
    stdout.flush()?;
    Ok(())
}

fn print_slowest(slowest: &[SlowReport], as_json: bool) -> Outcome {
    let mut stdout = std::io::stdout().lock();
    if as_json {
        writeln!(stdout, "{}", json!({"slowest": slowest}))?;
    } else if slowest.is_empty() {
        writeln!(stdout, "no request in the last minute")?;
    }
    for slow in slowest.iter().filter(|_| !as_json) {
        writeln!(stdout, "{slow}")?;
    }
    stdout.flush()?;
    Ok(())
}
