//! `lunette config` and `lunette reload`.

use std::io::Write;

use control::{Changes, Method, Objects, Summary, counted};

use super::arguments::{ConfigAction, ConfigCommand, ReloadArguments};
use super::{ACCEPTED, force, print_json, print_waits};
use crate::failure::{Failure, Outcome};

pub fn run(command: ConfigCommand) -> Outcome {
    let client = command.ask.daemon.client()?;
    match command.action {
        ConfigAction::Show { effective: _ } if command.ask.json => {
            print_json(&client.get::<Objects>("/v1/config")?)
        }
        ConfigAction::Show { effective: _ } => {
            write!(cli_common::stdout(), "{}", client.text("/v1/config/file")?)?;
            Ok(())
        }
        ConfigAction::Diff => {
            let changes: Changes = client.get("/v1/config/changes")?;
            if command.ask.json {
                return print_json(&changes);
            }
            let mut stdout = cli_common::stdout();
            for line in &changes.changes {
                writeln!(stdout, "{}", cli_common::printable(line))?;
            }
            if !changes.kept && !changes.changes.is_empty() {
                writeln!(
                    cli_common::stderr(),
                    "these changes are lost when the daemon ends; hint: persist them with serve --state DIR"
                )?;
            }
            Ok(())
        }
    }
}

/// Reloads the daemon's configuration file and prints the changes.
pub fn reload(arguments: &ReloadArguments) -> Outcome {
    let client = arguments.ask.daemon.client()?;
    let path = format!("/v1/config/reload{}", force(arguments.force));
    let (status, answer) = client.change(Method::POST, &path, None)?;
    if arguments.ask.json {
        return print_json(&answer);
    }
    if status == ACCEPTED {
        return print_waits(status, &answer);
    }
    let summary: Summary = serde_json::from_value(answer)
        .map_err(|error| Failure::because(format!("malformed response: {error}")))?;
    let counts = [
        ("disk added", summary.disks_added),
        ("disk removed", summary.disks_removed),
        ("disk resized", summary.disks_resized),
        ("disk limited", summary.disks_limited),
        ("export added", summary.exports_added),
        ("export removed", summary.exports_removed),
        ("export replaced", summary.exports_replaced),
        ("export placed", summary.exports_placed),
        ("socket with changed rights", summary.socket_rights_changed),
        ("change of access states", summary.access_states_changed),
        ("target with changed CHAP users", summary.chap_users_changed),
        (
            "change of the CHAP users of discovery",
            summary.discovery_users_changed,
        ),
        ("change of certificates", summary.certificates_changed),
        ("LUN added", summary.luns_added),
        ("LUN removed", summary.luns_removed),
    ];
    let listed = counts.iter().filter(|(_, count)| *count > 0);
    let listed: Vec<String> = listed
        .map(|(noun, count)| counted(*count as u64, noun))
        .collect();
    let text = match listed.is_empty() {
        true => "no changes".to_owned(),
        false => listed.join(", "),
    };
    let mut stdout = cli_common::stdout();
    writeln!(stdout, "{text}")?;
    if !summary.shadowed.is_empty() {
        writeln!(
            stdout,
            "values of the file that are not in effect because of changes at run time:"
        )?;
        for line in &summary.shadowed {
            writeln!(stdout, "  {}", cli_common::printable(line))?;
        }
        writeln!(
            stdout,
            "hint: write the value at run time into the file to keep it; lunette disk limit, set, resize or mirror sets the value of the file"
        )?;
    }
    Ok(())
}
