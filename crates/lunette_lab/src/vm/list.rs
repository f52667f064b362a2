//! `lunette vm list`.

use std::io::Write;
use std::time::{SystemTime, UNIX_EPOCH};

use clap::Args;
use cli_common::Outcome;
use serde_json::json;
use vm::running::{Registry, State};

use super::failed;

/// `lunette vm list`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct ListArguments {
    /// Print a JSON list with one object per guest
    #[arg(long)]
    json: bool,
}

const AFTER: &str = "\
A guest's folder contains its sockets and logs: $XDG_RUNTIME_DIR/lunette/vm/NAME, or /tmp/lunette-UID/vm/NAME. A guest in the state
dead was killed together with its cleanup processes: `lunette vm kill NAME` removes its files, and so does
the next guest with that name.

Example:
    lunette vm list --json";

/// Prints all guests.
///
/// # Errors
/// When the folder of guests cannot be read.
pub fn run(arguments: &ListArguments) -> Outcome {
    let registry = Registry::open().map_err(failed)?;
    let mut guests = Vec::new();
    for name in registry.names().map_err(failed)? {
        let place = registry.runtime_folder(&name).map_err(failed)?;
        // A guest may end at any time.
        if let Ok(state) = place.state() {
            guests.push((place.is_held(), state));
        }
    }
    let mut stdout = cli_common::stdout();
    if arguments.json {
        let guests: Vec<_> = guests
            .iter()
            .map(|(lives, state)| body(*lives, state))
            .collect();
        writeln!(stdout, "{}", json!(guests))?;
        return Ok(());
    }
    let mut rows =
        vec![["NAME", "STATE", "UP", "CPUS", "MEMORY", "WITH", "DISKS"].map(str::to_owned)];
    rows.extend(guests.iter().map(|(lives, state)| row(*lives, state)));
    let widths: Vec<usize> = (0..rows[0].len())
        .map(|column| rows.iter().map(|row| row[column].len()).max().unwrap_or(0))
        .collect();
    for row in rows {
        let cells = row
            .iter()
            .zip(&widths)
            .map(|(cell, width)| format!("{cell:width$}"));
        let line = cells.collect::<Vec<_>>().join("  ");
        writeln!(stdout, "{}", line.trim_end())?;
    }
    Ok(())
}

fn word(lives: bool, state: &State) -> &'static str {
    if lives { state.phase.word() } else { "dead" }
}

fn row(lives: bool, state: &State) -> [String; 7] {
    let plugged = state
        .plugged
        .iter()
        .map(|disk| format!(" +{}:{}", disk.kind, disk.disk));
    [
        state.name.clone(),
        word(lives, state).to_owned(),
        uptime(seconds_up(state)),
        state.cpus.to_string(),
        format!("{} MiB", state.memory_mib),
        state.accelerator.clone(),
        format!("{}{}", state.topology, plugged.collect::<String>()),
    ]
}

fn body(lives: bool, state: &State) -> serde_json::Value {
    let mut body = json!(state);
    body["phase"] = json!(word(lives, state));
    body
}

fn seconds_up(state: &State) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    now.map_or(0, |now| now.as_secs().saturating_sub(state.started))
}

fn uptime(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min", seconds / 60),
        _ => format!("{} h {} min", seconds / 3600, seconds / 60 % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_one_or_two_units() {
        let shown = [0, 59, 60, 3599, 3600, 90_000].map(uptime);
        assert_eq!(
            shown,
            ["0 s", "59 s", "1 min", "59 min", "1 h 0 min", "25 h 0 min"]
        );
    }
}
