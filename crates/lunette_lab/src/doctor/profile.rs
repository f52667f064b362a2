//! `lunette doctor --profile NAME`: compares kernel parameters with a profile and sets them.

use std::io::Write;

use cli_common::{Failure, Outcome};
use doctor::{Host, PROFILES, Profile, Row};
use serde_json::json;

/// Shows the host's values beside a profile. `apply` sets the values that differ.
pub fn run(name: &str, host: &Host, apply: bool, is_json: bool) -> Outcome {
    let Some(profile) = Profile::named(name) else {
        let known: Vec<&str> = PROFILES.iter().map(|profile| profile.name).collect();
        return Err(Failure::mistake(format!(
            "no profile {name:?}; hint: {}",
            known.join(", ")
        )));
    };
    let rows = profile.rows(host);
    let differing: Vec<&Row> = rows.iter().filter(|row| row.differs()).collect();
    if apply {
        return set(&differing);
    }
    let mut out = cli_common::stdout();
    if is_json {
        let body = |row: &Row| json!({"name": row.name, "is": row.is, "wanted": row.wanted, "differs": row.differs(), "why": row.why});
        let bodies: Vec<_> = rows.iter().map(body).collect();
        writeln!(out, "{}", json!(bodies))?;
    } else {
        writeln!(out, "{}: {}\n", profile.name, profile.about)?;
        for row in &rows {
            let is = row.is.as_deref().unwrap_or("-");
            match row.differs() {
                true => {
                    writeln!(out, "- {} = {is}", row.name)?;
                    writeln!(out, "+ {} = {}   # {}", row.name, row.wanted, row.why)?;
                }
                false => writeln!(out, "  {} = {is}", row.name)?,
            }
        }
        match differing.len() {
            0 => writeln!(out, "\nThe host already has these settings.")?,
            _ => writeln!(
                out,
                "\nSet them until the next boot: lunette doctor --profile {} --apply\n\
                 Permanently: write the lines with + to /etc/sysctl.d/90-{}.conf",
                profile.name, profile.name
            )?,
        }
    }
    match differing.is_empty() {
        true => Ok(()),
        false => Err(Failure::Reported),
    }
}

fn set(rows: &[&Row]) -> Outcome {
    let mut failed = Vec::new();
    for row in rows {
        let is = row.is.as_deref().unwrap_or("-");
        match std::fs::write(row.file(), row.wanted) {
            Ok(()) => writeln!(
                cli_common::stdout(),
                "{} = {}   # it was {is}",
                row.name,
                row.wanted
            )?,
            Err(error) => failed.push(format!(
                "cannot set {} to {:?}: {error}; hint: run as root",
                row.name, row.wanted
            )),
        }
    }
    match failed.is_empty() {
        true => Ok(()),
        false => Err(Failure::Reasons(failed)),
    }
}
