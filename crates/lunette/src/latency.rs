//! `lunette latency`: asks a daemon what its queues measured, and prints it.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use daemon::control::Client;
use daemon::{QueueReport, SlowReport, control, reports, slowest};
use serde_json::json;
use timeline::Snapshot;

use crate::cli::LatencyArguments;
use crate::failure::{Failure, Outcome};

/// Longest interval of `--watch`: a day.
const INTERVAL_SECONDS_MAX: f64 = 86_400.0;

/// Asks once, or again and again.
pub fn run(arguments: &LatencyArguments) -> Outcome {
    let client = arguments.whom.client()?;
    let selector = arguments.selector.as_deref();
    if let Some(count) = arguments.slowest {
        let path = control::latency_path(selector, count);
        let snapshot: Snapshot = client.get(&path)?;
        return print_slowest(&slowest(&snapshot, count), arguments.json);
    }
    let Some(seconds) = arguments.watch else {
        let snapshot = ask(&client, selector)?;
        return print(&reports(&snapshot, selector), arguments.json);
    };
    if !(0.1..=INTERVAL_SECONDS_MAX).contains(&seconds) {
        return Err(Failure::because(format!(
            "--watch={seconds}: the interval must be 0.1 to {INTERVAL_SECONDS_MAX} seconds"
        )));
    }
    let mut before = (ask(&client, selector)?, Instant::now());
    loop {
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let now = (ask(&client, selector)?, Instant::now());
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

fn ask(client: &Client, selector: Option<&str>) -> Result<Snapshot, Failure> {
    Ok(client.get(&control::latency_path(selector, 0))?)
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
