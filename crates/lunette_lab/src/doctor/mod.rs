//! `lunette doctor`: checks the host for settings that slow down disks of virtual machines.

mod measure;
mod profile;
mod subject;

use std::io::Write;
use std::path::PathBuf;

use clap::Args;
use cli_common::{Failure, Outcome};
use doctor::{Finding, Host, examine};
use serde_json::json;

use measure::Effect;

/// `lunette doctor`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct DoctorArguments {
    /// Files and block devices to check [default: all block devices of the host]
    #[arg(value_name = "PATH")]
    paths: Vec<PathBuf>,
    /// Check the disks of the daemon that has this control socket
    #[arg(
        long,
        visible_alias = "socket",
        value_name = "SOCKET",
        conflicts_with = "paths"
    )]
    control: Option<PathBuf>,
    /// Check this guest of `lunette vm run` instead of the host
    #[arg(long, value_name = "NAME", conflicts_with_all = ["paths", "control", "from"])]
    guest: Option<String>,
    /// Check a host that was recorded with --record
    #[arg(long, value_name = "FILE")]
    from: Option<PathBuf>,
    /// Write the contents of all checked files to this file, for --from on another host, and do not check them
    #[arg(long, value_name = "FILE", conflicts_with = "from")]
    record: Option<PathBuf>,
    /// Compare kernel parameters with a profile: iscsi-10g
    #[arg(long, value_name = "NAME", conflicts_with_all = ["paths", "control", "measure"])]
    profile: Option<String>,
    /// Set the profile's parameters, until the next boot
    #[arg(long, requires = "profile", conflicts_with_all = ["from", "guest"])]
    apply: bool,
    /// Measure the effect of each recommended change of a CPU or storage setting, in turns with and without the change, and undo it.
    /// Needs root
    #[arg(long, conflicts_with_all = ["from", "guest"])]
    measure: bool,
    /// Folder for the test file of --measure (64 MiB), on the storage to measure
    #[arg(long, value_name = "FOLDER", default_value = ".", requires = "measure")]
    folder: PathBuf,
    /// Print JSON
    #[arg(long)]
    json: bool,
}

const AFTER: &str = "\
Exit code 0: no advice, 1: advice or an error, 2: invalid command line.

Examples:
    lunette doctor
    lunette doctor /srv/vm1.raw /dev/nvme0n1
    lunette doctor --socket /run/lunette/lunette.sock --json
    lunette doctor --guest guest1
    sudo lunette doctor --measure --folder /srv
    lunette doctor --profile iscsi-10g
    sudo lunette doctor --profile iscsi-10g --apply";

/// Runs the command.
///
/// # Errors
/// When a change is recommended or a check fails.
pub fn run(arguments: &DoctorArguments) -> Outcome {
    let host = host(arguments)?;
    if let Some(file) = &arguments.record {
        let record = host.record();
        return std::fs::write(file, record).map_err(|error| {
            Failure::because(format!("cannot write {}: {error}", file.display()))
        });
    }
    if let Some(name) = &arguments.profile {
        return profile::run(name, &host, arguments.apply, arguments.json);
    }
    let question = subject::question(arguments)?;
    let mut findings: Vec<(Finding, Option<Effect>)> = examine(&host, &question)
        .into_iter()
        .map(|finding| (finding, None))
        .collect();
    if arguments.measure {
        measure::run(&mut findings, &arguments.folder)?;
    }
    match arguments.json {
        true => print_json(&findings)?,
        false => print(&findings)?,
    }
    match findings
        .iter()
        .any(|(finding, effect)| is_worth(finding, effect.as_ref()))
    {
        true => Err(Failure::Reported),
        false => Ok(()),
    }
}

fn host(arguments: &DoctorArguments) -> Result<Host, Failure> {
    if let Some(file) = &arguments.from {
        let text = std::fs::read_to_string(file).map_err(|error| {
            Failure::because(format!("cannot read {}: {error}", file.display()))
        })?;
        return Host::recorded(&text)
            .map_err(|error| Failure::because(format!("{}: {error}", file.display())));
    }
    match &arguments.guest {
        Some(guest) => subject::guest(guest),
        None => Ok(Host::at("/")),
    }
}

/// Returns true if a change is recommended. A change without a measured effect is not.
fn is_worth(finding: &Finding, effect: Option<&Effect>) -> bool {
    finding.is_worth_changing && effect.is_none_or(Effect::is_beyond_spread)
}

fn print(findings: &[(Finding, Option<Effect>)]) -> Outcome {
    let mut out = cli_common::stdout();
    let worth: Vec<_> = findings
        .iter()
        .filter(|(f, e)| is_worth(f, e.as_ref()))
        .collect();
    let known: Vec<_> = findings
        .iter()
        .filter(|(f, e)| !is_worth(f, e.as_ref()))
        .collect();
    for (heading, some) in [("Worth changing", &worth), ("Notes", &known)] {
        if some.is_empty() {
            continue;
        }
        writeln!(out, "{heading}")?;
        for (finding, effect) in some {
            writeln!(out, "  {}: {}", finding.area.word(), finding.found)?;
            writeln!(out, "      {}", finding.why)?;
            if let Some(command) = &finding.command {
                writeln!(out, "      $ {command}")?;
            }
            if let Some(effect) = effect {
                writeln!(out, "      {effect}")?;
            }
        }
        writeln!(out)?;
    }
    match worth.len() {
        0 => writeln!(out, "Nothing here is worth changing.")?,
        1 => writeln!(out, "One thing is worth changing.")?,
        count => writeln!(out, "{count} things are worth changing.")?,
    }
    Ok(())
}

fn print_json(findings: &[(Finding, Option<Effect>)]) -> Outcome {
    let bodies: Vec<_> = findings
        .iter()
        .map(|(finding, effect)| {
            let mut body = finding.to_json();
            body["worth_changing"] = is_worth(finding, effect.as_ref()).into();
            if let Some(effect) = effect {
                body["measured"] = effect.to_json();
            }
            body
        })
        .collect();
    writeln!(cli_common::stdout(), "{}", json!(bodies))?;
    Ok(())
}
