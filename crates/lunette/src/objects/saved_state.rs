//! `lunette state`: files of the daemon's state folder.

use std::io::{IsTerminal, Write};

use control::{Method, StateFile, escape};

use super::arguments::{StateAction, StateCommand};
use super::table::Table;
use crate::failure::{Failure, Outcome};

pub fn run(command: StateCommand) -> Outcome {
    let ask = &command.ask;
    match command.action {
        StateAction::List => {
            let files: Vec<StateFile> = ask.daemon.client()?.get("/v1/state")?;
            ask.print(&files, table)
        }
        StateAction::Reset { file, yes } => {
            if !yes {
                confirm(&file)?;
            }
            let path = format!("/v1/state/{}", escape(&file));
            ask.change(Method::DELETE, &path, None)?;
            let files: Vec<StateFile> = ask.daemon.client()?.get("/v1/state")?;
            if !ask.json && files.iter().any(|one| one.file == file) {
                let mut stdout = cli_common::stdout();
                writeln!(
                    stdout,
                    "{file} moved aside and saved again from the daemon's memory"
                )?;
                stdout.flush()?;
            }
            Ok(())
        }
    }
}

fn table(files: &[StateFile]) -> Table {
    let head = Table::new(&["FILE", "KIND", "OBJECT", "CONDITION"]);
    files.iter().fold(head, |table, file| {
        let condition = match &file.reason {
            Some(reason) => format!("{}: {reason}", file.condition),
            None => file.condition.clone(),
        };
        let or_none = |text: &str| if text.is_empty() { "-" } else { text }.to_owned();
        table.row([
            file.file.clone(),
            or_none(&file.kind),
            or_none(&file.object),
            condition,
        ])
    })
}

fn confirm(file: &str) -> Outcome {
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        return Err(Failure::because(
            "a reset needs a confirmation, and the input is not a terminal; hint: --yes",
        ));
    }
    let mut stderr = cli_common::stderr();
    write!(
        stderr,
        "Reset {file}? Its reservations, identity or other state are lost, unless the daemon has them in memory. [y/N] "
    )?;
    stderr.flush()?;
    let mut answer = String::new();
    stdin.read_line(&mut answer)?;
    match answer.trim() {
        "y" | "Y" | "yes" => Ok(()),
        _ => Err(Failure::because("nothing was reset")),
    }
}
