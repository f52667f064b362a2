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
        before = now;
        if arguments.json || !std::io::stdout().is_terminal() {
            print(&reports, arguments.json)?;
            continue;
        }
        let rows = ratatui::crossterm::terminal::size().map_or(24, |(_, rows)| rows);
        let mut stdout = std::io::stdout().lock();
        // To the top left corner, and clear what was there.
        write!(
            stdout,
            "\x1b[H\x1b[J{}",
            fitted(&text(&reports), usize::from(rows))
        )?;
        stdout.flush()?;
    }
}

fn ask(client: &Client, selector: Option<&str>) -> Result<Snapshot, Failure> {
    Ok(client.get(&control::latency_path(selector, 0))?)
}

fn print(reports: &[QueueReport], as_json: bool) -> Outcome {
    let mut stdout = std::io::stdout().lock();
    if as_json {
        writeln!(stdout, "{}", json!({"reports": reports}))?;
    } else {
        write!(stdout, "{}", text(reports))?;
    }
    stdout.flush()?;
    Ok(())
}

fn text(reports: &[QueueReport]) -> String {
    if reports.is_empty() {
        return "no client has used any export yet\n".to_owned();
    }
    let each: Vec<String> = reports.iter().map(QueueReport::to_string).collect();
    each.join("\n")
}

/// As much as a window of so many rows shows: from the middle lines go, for rates and counters come last.
fn fitted(text: &str, rows: usize) -> String {
    const LAST: usize = 3;
    let lines: Vec<&str> = text.lines().collect();
    // The cursor has a row of its own.
    let room = rows.saturating_sub(1).max(LAST + 2);
    if lines.len() <= room {
        return text.to_owned();
    }
    let first = room - LAST - 1;
    let (shown, rest) = lines.split_at(first);
    let (hidden, last) = rest.split_at(rest.len() - LAST);
    let cut = format!("... {} lines do not fit in this window ...", hidden.len());
    let cut = [cut.as_str()];
    let all = shown.iter().chain(&cut).chain(last);
    all.map(|line| format!("{line}\n")).collect()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_goes_from_the_middle() {
        let text: String = (1..=40).map(|n| format!("{n}\n")).collect();
        assert_eq!(fitted(&text, 41), text);
        let cut = fitted(&text, 24);
        let lines: Vec<&str> = cut.lines().collect();
        assert_eq!(lines.len(), 23);
        assert_eq!((lines[0], lines[18]), ("1", "19"));
        assert_eq!(lines[19], "... 18 lines do not fit in this window ...");
        assert_eq!(lines[20..], ["38", "39", "40"]);
        assert_eq!(fitted(&text, 0).lines().count(), 5);
    }
}
