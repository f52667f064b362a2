//! `lunette latency`: prints the measurements of a daemon's queues.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use control::Client;
use control::statistics::{LimitedStatistics, Statistics};
use latency::{QueueReport, SlowReport, Snapshot, reports, slowest};
use serde_json::json;

use crate::cli::LatencyArguments;
use crate::failure::{Failure, Outcome};

/// Maximum interval of `--watch` in seconds: one day.
const INTERVAL_SECONDS_MAX: f64 = 86_400.0;

pub fn run(arguments: &LatencyArguments) -> Outcome {
    let client = arguments.daemon.client()?;
    let selector = arguments.selector.as_deref();
    if let Some(count) = arguments.slowest {
        let path = control::latency_path(selector, count);
        let snapshot: Snapshot = client.get(&path)?;
        return print_slowest(&slowest(&snapshot, count), arguments.json);
    }
    let Some(seconds) = arguments.watch else {
        let (snapshot, held) = ask(&client, selector)?;
        return print(&reports(&snapshot, selector), &held, arguments.json);
    };
    if !(0.1..=INTERVAL_SECONDS_MAX).contains(&seconds) {
        return Err(Failure::mistake(format!(
            "--watch={seconds}: the interval must be 0.1 to {INTERVAL_SECONDS_MAX} seconds"
        )));
    }
    let mut before = (ask(&client, selector)?, Instant::now());
    loop {
        std::thread::sleep(Duration::from_secs_f64(seconds));
        let now = (ask(&client, selector)?, Instant::now());
        let interval = now.1 - before.1;
        let ((snapshot, held), (old_snapshot, old_held)) = (&now.0, &before.0);
        let reports = reports(&snapshot.since(old_snapshot), selector).into_iter();
        let reports: Vec<QueueReport> = reports.map(|report| report.over(interval)).collect();
        let held = held_since(held, old_held);
        before = now;
        if arguments.json || !std::io::stdout().is_terminal() {
            print(&reports, &held, arguments.json)?;
            continue;
        }
        let rows = rustix::termios::tcgetwinsize(std::io::stdout()).map_or(24, |size| size.ws_row);
        let mut stdout = cli_common::stdout();
        // Moves the cursor to the top left corner and clears the screen.
        stdout.control("\x1b[H\x1b[J")?;
        write!(
            stdout,
            "{}",
            fitted(&text(&reports, &held), usize::from(rows), held.len())
        )?;
        stdout.flush()?;
    }
}

/// I/Os delayed by limits, by disk.
type Held = BTreeMap<String, LimitedStatistics>;

fn ask(client: &Client, selector: Option<&str>) -> Result<(Snapshot, Held), Failure> {
    let snapshot = client.get(&control::latency_path(selector, 0))?;
    Ok((snapshot, held(&client.get("/v1/statistics")?, selector)))
}

/// Delays by limits of the selected disks, or of the disks that the selected queues served.
fn held(statistics: &Statistics, selector: Option<&str>) -> Held {
    let is_meant = |disk: &str| {
        let Some(selector) = selector else {
            return true;
        };
        let mut queues = statistics.latency.queues.iter();
        let serves = queues.any(|queue| {
            let known = queue.labels.disk == disk || queue.disks.contains_key(disk);
            known && queue.labels.is_of(selector)
        });
        serves || selector == disk
    };
    let disks = statistics.disks.iter();
    disks
        .filter(|disk| disk.limited.requests > 0 && is_meant(&disk.name))
        .map(|disk| (disk.name.clone(), disk.limited))
        .collect()
}

fn held_since(now: &Held, before: &Held) -> Held {
    let each = now.iter().map(|(disk, limited)| {
        let earlier = before.get(disk).copied().unwrap_or_default();
        (disk.clone(), limited.since(earlier))
    });
    each.filter(|(_, limited)| limited.requests > 0).collect()
}

fn print(reports: &[QueueReport], held: &Held, as_json: bool) -> Outcome {
    let mut stdout = cli_common::stdout();
    if as_json {
        writeln!(stdout, "{}", json!({"reports": reports, "limited": held}))?;
    } else {
        write!(stdout, "{}", text(reports, held))?;
    }
    stdout.flush()?;
    Ok(())
}

fn text(reports: &[QueueReport], held: &Held) -> String {
    if reports.is_empty() {
        return "no client has connected to an export yet\n".to_owned();
    }
    let each: Vec<String> = reports.iter().map(QueueReport::to_string).collect();
    let mut text = each.join("\n");
    if !held.is_empty() {
        text.push('\n');
    }
    for (disk, limited) in held {
        let (requests, wait) = (limited.requests, limited.wait_ns);
        text.push_str(&format!(
            "limits of disk {disk} delayed {} by {} each, included in `reaped`\n",
            control::counted(requests, "I/O"),
            latency::table::time(wait as f64 / requests.max(1) as f64)
        ));
    }
    text
}

/// Shortens the text to `rows` rows. Removes lines from the middle, because the last lines have the rates and counters and, after a
/// blank line, the delays by limits of `held` disks.
fn fitted(text: &str, rows: usize, held: usize) -> String {
    let last = match held {
        0 => 3,
        disks => 4 + disks,
    };
    let lines: Vec<&str> = text.lines().collect();
    // The last row is for the cursor.
    let room = rows.saturating_sub(1).max(last + 2);
    if lines.len() <= room {
        return text.to_owned();
    }
    let first = room - last - 1;
    let (shown, rest) = lines.split_at(first);
    let (hidden, last) = rest.split_at(rest.len() - last);
    let cut = format!("... {} more lines ...", hidden.len());
    let cut = [cut.as_str()];
    let all = shown.iter().chain(&cut).chain(last);
    all.map(|line| format!("{line}\n")).collect()
}

fn print_slowest(slowest: &[SlowReport], as_json: bool) -> Outcome {
    let mut stdout = cli_common::stdout();
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
    fn long_text_is_cut_in_the_middle() {
        let text: String = (1..=40).map(|n| format!("{n}\n")).collect();
        assert_eq!(fitted(&text, 41, 0), text);
        let cut = fitted(&text, 24, 0);
        let lines: Vec<&str> = cut.lines().collect();
        assert_eq!(lines.len(), 23);
        assert_eq!((lines[0], lines[18]), ("1", "19"));
        assert_eq!(lines[19], "... 18 more lines ...");
        assert_eq!(lines[20..], ["38", "39", "40"]);
        assert_eq!(fitted(&text, 0, 0).lines().count(), 5);
        let limits: Vec<String> = fitted(&text, 24, 1).lines().map(str::to_owned).collect();
        assert_eq!(
            (limits.len(), limits[18..].join(" ")),
            (23, "36 37 38 39 40".to_owned())
        );
    }

    #[test]
    fn limits_are_shown_for_the_selected_disks() {
        use control::statistics::DiskStatistics;
        use latency::{Labels, QueueSnapshot};
        let disk = |name: &str, requests| DiskStatistics {
            limited: LimitedStatistics {
                requests,
                wait_ns: requests * 3_860_000,
            },
            ..daemon::statistics::disk(name, None)
        };
        let labels = Labels {
            export: "e".to_owned(),
            disk: "d0".to_owned(),
            ..Labels::default()
        };
        let queue = QueueSnapshot {
            labels,
            ..QueueSnapshot::default()
        };
        let statistics = Statistics {
            disks: vec![disk("d0", 6_679), disk("d1", 2), disk("free", 0)],
            latency: Snapshot {
                queues: vec![queue],
            },
            ..Statistics::default()
        };
        let of = |selector| -> Vec<String> { held(&statistics, selector).into_keys().collect() };
        assert_eq!(of(None), ["d0", "d1"]);
        assert_eq!(of(Some("d1")), ["d1"]);
        assert_eq!(of(Some("e")), ["d0"]);
        assert_eq!(of(Some("e/0")), ["d0"]);
        let all = held(&statistics, None);
        assert_eq!(held_since(&all, &all), Held::new());
        let reports = reports(&statistics.latency, None);
        assert!(text(&reports, &held(&statistics, Some("e"))).ends_with(
            "\n\nlimits of disk d0 delayed 6679 I/Os by 3.86 ms each, included in `reaped`\n"
        ));
    }
}
