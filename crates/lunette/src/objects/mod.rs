//! Commands about the objects of a running daemon: each asks its control socket, and prints a table or JSON.

pub mod arguments;
pub mod config;
pub mod disk;
pub mod export;
pub mod lun;
pub mod session;
pub mod status;
pub(crate) mod table;

use std::io::Write;

use control::Method;
use daemon::config::{self as configuration, Config, Flags, Surroundings, render_size};
use serde::Serialize;
use serde_json::Value;

use crate::failure::{self, Failure, Outcome};
use arguments::Ask;
use table::Table;

impl Ask {
    /// Has a change made, and prints what is said of it if JSON was asked for.
    fn change(&self, method: Method, path: &str, body: Option<&Value>) -> Outcome {
        let (status, answer) = self.daemon.client()?.change(method, path, body)?;
        // Accepted: the change goes on by itself.
        if status == 202 && !self.json {
            for line in answer["waits"].as_array().into_iter().flatten() {
                eprintln!("waiting: {}", line.as_str().unwrap_or_default());
            }
            eprintln!(
                "The change goes on by itself; `lunette export list` and `lunette disk list` show it."
            );
        }
        match self.json && !answer.is_null() {
            true => print_json(&answer),
            false => Ok(()),
        }
    }

    /// Prints objects as JSON or as a table.
    fn print<T: Serialize>(&self, objects: &[T], table: impl FnOnce(&[T]) -> Table) -> Outcome {
        if self.json {
            return print_json(&objects);
        }
        let text = table(objects).to_string();
        let mut stdout = std::io::stdout().lock();
        stdout.write_all(text.as_bytes())?;
        stdout.flush()?;
        Ok(())
    }
}

pub(crate) fn print_json(value: &impl Serialize) -> Outcome {
    let text = serde_json::to_string_pretty(value)
        .map_err(|error| Failure::because(format!("cannot print: {error}")))?;
    writeln!(std::io::stdout(), "{text}")?;
    Ok(())
}

fn force(forced: bool) -> &'static str {
    match forced {
        true => "?force=true",
        false => "",
    }
}

/// What flags say, without the relations: a disk that an export is of may be with the daemon.
fn read_flags(flags: &Flags, stand_ins: &[&str]) -> Result<Config, Failure> {
    let mut flags = flags.clone();
    for name in stand_ins {
        flags.disk.push(format!("{name}=null:1M"));
    }
    let read = configuration::parse(None, &flags, &Surroundings::of_another_process());
    read.map_err(failure::mistaken)
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
