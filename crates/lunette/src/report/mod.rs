//! `lunette report`: writes some seconds of the browser page's data into one file, to attach to a question.

mod redact;

use std::fs::OpenOptions;
use std::io::{IsTerminal, Write};
use std::path::Path;
use std::time::{Duration, SystemTime};

use control::Client;
use serde_json::{Value, json};

use crate::cli::ReportArguments;
use crate::failure::{Failure, Outcome};
use redact::Names;

/// Number of columns of the page's heat map.
const SECONDS_MAX: u64 = 240;
const SLOWEST: usize = 5;

/// Samples a daemon for some seconds and writes the file.
pub fn run(arguments: &ReportArguments) -> Outcome {
    if !(1..=SECONDS_MAX).contains(&arguments.seconds) {
        let seconds = arguments.seconds;
        return Err(Failure::mistake(format!(
            "--seconds={seconds}: must be 1 to {SECONDS_MAX} seconds"
        )));
    }
    let client = arguments.daemon.client()?;
    let shown = arguments.out.display();
    let not_written = |error: std::io::Error| {
        Failure::because(format!(
            "cannot write {shown}: {error}; hint: give another path with --out"
        ))
    };
    // Fails before the measurement. An existing file keeps its content until the report is complete.
    if arguments.out != Path::new("-") {
        let mut options = OpenOptions::new();
        options.append(true).create(true);
        options.open(&arguments.out).map_err(not_written)?;
    }
    let shows = std::io::stderr().is_terminal();
    let mut samples = vec![sample(&client)?];
    for left in (1..=arguments.seconds).rev() {
        if shows {
            let mut stderr = cli_common::stderr();
            stderr.control("\r")?;
            write!(stderr, "recording, {left} s left ")?;
            stderr.control("\x1b[K")?;
        }
        std::thread::sleep(Duration::from_secs(1));
        samples.push(sample(&client)?);
    }
    if shows {
        cli_common::stderr().control("\r\x1b[K")?;
    }
    let mut moment = moment(&client, samples)?;
    if arguments.redact {
        Names::of(&moment).replace(&mut moment);
    }
    moment["answers"] = answers(&mut moment);
    let html = html_of(&moment)?;
    if arguments.out == Path::new("-") {
        // Standard output to a program must not be escaped.
        match std::io::stdout().is_terminal() {
            true => cli_common::stdout().write_all(html.as_bytes())?,
            false => std::io::stdout().write_all(html.as_bytes())?,
        }
        return Ok(());
    }
    std::fs::write(&arguments.out, html).map_err(not_written)?;
    Ok(writeln!(cli_common::stdout(), "{shown}")?)
}

#[cfg(feature = "page")]
fn html_of(moment: &Value) -> Result<String, Failure> {
    Ok(page::of(moment))
}

#[cfg(not(feature = "page"))]
fn html_of(_: &Value) -> Result<String, Failure> {
    Err(Failure::because(
        "cannot write a report: this program was built without the web page (cargo feature `page`)",
    ))
}

fn sample(client: &Client) -> Result<Value, Failure> {
    let (status, statistics): (Value, Value) =
        (client.get("/v1/status")?, client.get("/v1/statistics")?);
    Ok(json!({ "status": status, "statistics": statistics }))
}

/// Contents of a report: samples, one per second, and data that are requested once.
fn moment(client: &Client, samples: Vec<Value>) -> Result<Value, Failure> {
    let last = samples.last().map_or(&Value::Null, |last| &last["status"]);
    let mut slowest = Vec::new();
    for disk in last["disks"].as_array().into_iter().flatten() {
        let name = disk["name"].as_str().unwrap_or_default();
        let found: Value = client.get(&control::latency_path(Some(name), SLOWEST))?;
        slowest.push(json!({ "disk": name, "found": found }));
    }
    let sessions: Value = client.get("/v1/sessions")?;
    let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    Ok(json!({
        "seconds": now.map_or(0, |now| now.as_secs()),
        "samples": samples,
        "sessions": sessions,
        "slowest": slowest,
    }))
}

/// Responses by request path, with redacted names.
fn answers(moment: &mut Value) -> Value {
    let mut answers = serde_json::Map::new();
    answers.insert("/v1/sessions".to_owned(), moment["sessions"].take());
    if let Value::Array(slowest) = moment["slowest"].take() {
        for mut one in slowest {
            let name = one["disk"].as_str().unwrap_or_default();
            let path = control::latency_path(Some(name), SLOWEST);
            answers.insert(path, one["found"].take());
        }
    }
    Value::Object(answers)
}
