//! The `lunette-lab` command: tools to measure and test daemons. `lunette bench ...` executes it.
//!
//! Exit codes: 0 success, 1 failure (with all reasons on stderr), 2 invalid command line, 130 interrupted, 128 + N after
//! signal N.

#![forbid(unsafe_code)]

mod bench;
mod cli;
mod conformance;
mod doctor;
mod idle_poll;
mod image;
mod iscsi;
mod libvirt;
mod meter;
mod same_file;
mod top;
mod vm;

use std::process::ExitCode;
use std::time::Duration;

use clap::{CommandFactory, Parser};
use cli_common::{Failure, Outcome, Pages, exit_code};

use cli::{Cli, Command};

/// Maximum wait for connections to Ceph clusters to close before the process exits.
const CLUSTERS_LIMIT: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    let mut arguments = std::env::args_os();
    if arguments.any(|one| ::iscsi::address::has_secret(&one.to_string_lossy())) {
        let refused = Failure::mistake(::iscsi::address::SECRET_REFUSED);
        return exit_code(Err(refused));
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            error.print().ok();
            let arguments: Vec<_> = std::env::args_os().collect();
            if let Some(hint) = image::usage_hint(&arguments) {
                cli_common::print_reason(hint);
            }
            return match error.use_stderr() {
                true => image::usage_exit_code(&arguments).into(),
                false => ExitCode::SUCCESS,
            };
        }
    };
    let code = exit_code(run(cli));
    bdev::librbd::wait_until_closed(CLUSTERS_LIMIT);
    code
}

fn run(cli: Cli) -> Outcome {
    // Kept until the end; the log's filter does not change.
    let _levels = cli.log.start()?;
    match cli.command {
        Command::Bench(arguments) => bench::run(*arguments),
        Command::Conformance(arguments) => conformance::run(&arguments),
        Command::Doctor(arguments) => doctor::run(&arguments),
        Command::Image(arguments) => image::run(&arguments),
        Command::Iscsi(arguments) => iscsi::run(*arguments),
        Command::Libvirt(command) => libvirt::run(command),
        Command::Top(arguments) => top::run(&arguments),
        Command::Vm(command) => vm::run(command),
        Command::Completion(arguments) => pages().completion(&arguments),
        Command::Man(arguments) => pages().man(&arguments),
    }
}

/// Pages of this program. Those of its commands have the names that users type.
fn pages() -> Pages {
    Pages {
        command: Cli::command(),
        program: "lunette-lab",
        typed: "lunette",
        // lunette has its own page for this.
        elsewhere: &["completion"],
        others: Vec::new(),
    }
}
