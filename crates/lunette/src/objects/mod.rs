//! Commands for the objects of a running daemon. Each sends requests to the control socket and prints a table or JSON.

pub mod arguments;
pub mod backup;
mod bitmap;
pub mod config;
pub mod disk;
pub mod export;
pub mod job;
pub mod lun;
pub mod saved_state;
pub mod session;
pub mod status;
pub(crate) mod table;

use std::io::Write;

use ::config::{self as configuration, Config, Flags, Surroundings, render_size};
use control::{Accepted, Method};
use serde::Serialize;
use serde_json::Value;

use crate::failure::{self, Failure, Outcome};
use arguments::Ask;
use table::Table;

/// Status of a change that continues in the background (RFC 9110, 15.3.3).
const ACCEPTED: u16 = 202;

impl Ask {
    /// Sends a change. Prints the response as JSON if requested.
    fn change(&self, method: Method, path: &str, body: Option<&Value>) -> Outcome {
        let (status, answer) = self.daemon.client()?.change(method, path, body)?;
        match self.json && !answer.is_null() {
            true => print_json(&answer),
            false => print_waits(status, &answer),
        }
    }

    fn print<T: Serialize>(&self, objects: &[T], table: impl FnOnce(&[T]) -> Table) -> Outcome {
        if self.json {
            return print_json(&objects);
        }
        let text = table(objects).to_string();
        let mut stdout = cli_common::stdout();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
        Ok(())
    }
}

/// Text on pending conditions of a change in the background. `None` if the change is complete.
fn waits(status: u16, answer: &Value) -> Option<String> {
    if status != ACCEPTED {
        return None;
    }
    let accepted: Accepted = serde_json::from_value(answer.clone()).ok()?;
    let waits = accepted.waits.iter();
    let lines = waits.map(|line| format!("waiting: {line}\n"));
    let hint = "the change continues in the background; hint: see its progress with `lunette export list` and `lunette disk list`\n";
    Some(lines.chain([hint.to_owned()]).collect())
}

fn print_waits(status: u16, answer: &Value) -> Outcome {
    if let Some(text) = waits(status, answer) {
        write!(cli_common::stderr(), "{text}")?;
    }
    Ok(())
}

pub(crate) fn print_json(value: &impl Serialize) -> Outcome {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::because(format!("cannot print: {error}")))?;
    writeln!(cli_common::stdout(), "{text}")?;
    Ok(())
}

fn force(forced: bool) -> &'static str {
    match forced {
        true => "?force=true",
        false => "",
    }
}

/// Parses flags without checking relations, because a disk of an export may exist only in the daemon.
fn read_flags(flags: &Flags, stand_ins: &[&str]) -> Result<Config, Failure> {
    let mut flags = flags.clone();
    flags.disk.extend(stand_in_disks(stand_ins));
    let read = configuration::parse(None, &flags, &Surroundings::of_another_process());
    read.map_err(failure::mistaken)
}

/// Returns flags for disks with these names. Invalid names are skipped; the flag of the export reports them.
fn stand_in_disks(names: &[&str]) -> impl Iterator<Item = String> {
    let names = names.iter().filter(|name| !name.contains(['=', ',']));
    names.map(|name| format!("{name}=null:1M"))
}

fn yes(is: bool) -> String {
    match is {
        true => "yes",
        false => "no",
    }
    .to_owned()
}

pub(crate) fn size_text(bytes: u64) -> String {
    render_size(bytes)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn unknown_disk_gets_no_suggestion() {
        let disks: Vec<String> = stand_in_disks(&["d0", "b=d", "d,name=x"]).collect();
        assert_eq!(disks, ["d0=null:1M"]);
    }

    #[test]
    fn background_change_reports_its_wait() {
        let answer = json!({"waits": ["export vm0 is being removed: 3 requests in flight"]});
        let text = waits(202, &answer).unwrap();
        assert!(text.starts_with("waiting: export vm0 is being removed: 3 requests in flight\n"));
        assert_eq!(waits(200, &answer), None);
        assert_eq!(waits(204, &Value::Null), None);
    }
}
