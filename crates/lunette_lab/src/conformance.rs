//! `lunette conformance`: tests of any vhost-user back end.

use std::io::Write;
use std::path::PathBuf;

use bench::driver::{Kind, Subject};
use clap::Args;
use cli_common::{Failure, Outcome};
use conformance::{Device, Report, Selection, Target, TestReport};
use control::counted;
use serde_json::json;

/// `lunette conformance`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct ConformanceArguments {
    /// Device: vhost-user-blk:SOCKET, vhost-user-scsi:SOCKET or vhost-user-scsi:SOCKET:TARGET:LUN
    #[arg(value_name = "DEVICE")]
    device: String,
    /// List the tests for the device type, and run none
    #[arg(long)]
    list: bool,
    /// Run the tests with this name or this beginning of the name, such as a group; may be given several times
    #[arg(long, value_name = "NAME")]
    test: Vec<String>,
    /// Also run the tests that write to the disk. They destroy its data
    #[arg(long)]
    destructive: bool,
    /// Require the responses of Lunette where the standards define none
    #[arg(long)]
    strict: bool,
    /// Print JSON
    #[arg(long)]
    json: bool,
    /// Write JUnit XML to this file
    #[arg(long, value_name = "FILE")]
    junit: Option<PathBuf>,
}

const AFTER: &str = "\
No other front end may use the device. After each test the command checks that the back end serves the next front end; if it does
not, the result is `died`, and the tests continue if a service manager restarts the back end within 5 s. Otherwise the summary lists
the tests that were not run.

Exit code 0: no test failed, 1: a test failed or the back end died, 2: invalid command line.

Examples:
    lunette conformance vhost-user-blk:/tmp/d0.sock
    lunette conformance vhost-user-blk:/tmp/d0.sock --destructive --junit results.xml
    lunette conformance vhost-user-scsi:/tmp/c0.sock --list
    lunette conformance vhost-user-scsi:/tmp/c0.sock:5:300 --test session --test rings.packed";

/// Runs the command.
///
/// # Errors
/// A test failed, the back end died, or the arguments are invalid.
pub fn run(arguments: &ConformanceArguments) -> Outcome {
    let target = target(arguments)?;
    let selection = Selection {
        names: arguments.test.clone(),
    };
    let selected: Vec<_> = conformance::tests(target.device)
        .filter(|test| selection.has(test))
        .collect();
    if selected.is_empty() {
        return Err(Failure::mistake(format!(
            "no test is named {}; hint: lunette conformance {} --list",
            arguments.test.join(" or "),
            arguments.device
        )));
    }
    if arguments.list {
        return list(&selected, arguments.json);
    }
    let mut printed = Ok(());
    let report = conformance::run(&target, &selection, |one: &TestReport| {
        if !arguments.json && printed.is_ok() {
            printed = writeln!(cli_common::stdout(), "{}", conformance::table(one));
        }
    });
    printed?;
    finish(arguments, &report)
}

fn target(arguments: &ConformanceArguments) -> Result<Target, Failure> {
    let subject = Subject::parse(&arguments.device).map_err(Failure::mistake)?;
    let device = match subject.kind {
        Kind::VhostBlk => Device::Blk,
        Kind::VhostScsi { target, lun } => Device::Scsi(target, lun),
        _ => {
            return Err(Failure::mistake(format!(
                "{}: not a vhost-user device; hint: vhost-user-blk:SOCKET or vhost-user-scsi:SOCKET",
                arguments.device
            )));
        }
    };
    let target = Target {
        is_destructive: arguments.destructive,
        is_strict: arguments.strict,
        ..Target::new(&subject.path, device)
    };
    if !arguments.list {
        target.check().map_err(|reason| {
            Failure::because(format!("cannot test {}: {reason}", arguments.device))
        })?;
    }
    Ok(target)
}

fn list(tests: &[&conformance::Test], as_json: bool) -> Outcome {
    let mut stdout = cli_common::stdout();
    if as_json {
        let tests: Vec<_> = tests
            .iter()
            .map(|test| json!({"name": test.name(), "clause": test.clause, "writes": test.writes}))
            .collect();
        return Ok(writeln!(stdout, "{:#}", json!(tests))?);
    }
    for test in tests {
        let writes = if test.writes { " (writes)" } else { "" };
        writeln!(stdout, "{:<64} {}{writes}", test.name(), test.clause)?;
    }
    Ok(())
}

/// Writes the tests that were skipped because the back end had died.
fn write_unreached(stdout: &mut impl Write, report: &Report) -> std::io::Result<()> {
    let unreached: Vec<&TestReport> = report.unreached().collect();
    let Some(first) = unreached.first() else {
        return Ok(());
    };
    writeln!(
        stdout,
        "{} not run: {} and was not started again; hint: start it under a service manager that restarts it, or start it again and select them with --test",
        counted(unreached.len() as u64, "test"),
        first.outcome.reason(),
    )?;
    let mut names = unreached.iter();
    names.try_for_each(|one| writeln!(stdout, "    {}", one.test.name()))
}

fn finish(arguments: &ConformanceArguments, report: &Report) -> Outcome {
    let mut stdout = cli_common::stdout();
    if arguments.json {
        writeln!(stdout, "{:#}", conformance::json(&arguments.device, report))?;
    } else {
        let count = |word| report.count(word);
        let (passed, failed) = (count("passed"), count("failed"));
        let (skipped, died) = (count("skipped"), count("died"));
        writeln!(
            stdout,
            "{passed} passed, {failed} failed, {skipped} skipped, {died} died"
        )?;
        write_unreached(&mut stdout, report)?;
    }
    if let Some(file) = &arguments.junit {
        let xml = conformance::junit(&arguments.device, report);
        std::fs::write(file, xml).map_err(|error| {
            Failure::because(format!("cannot write {}: {error}", file.display()))
        })?;
    }
    match report.is_good() {
        true => Ok(()),
        false => Err(Failure::Reported),
    }
}
