//! The `lunette` command: one file per subcommand, each a thin layer above the library.
//!
//! Exit codes: 0 success, 1 failure (with all reasons on stderr), 2 invalid command line.

#![forbid(unsafe_code)]

mod check;
mod cli;
mod daemon_flags;
mod failure;
mod help;
mod inherited_sockets;
mod lab;
mod latency;
mod log;
mod logging;
mod objects;
mod pages;
mod program;
mod rbd;
mod report;
mod serve;
mod take_over;
mod upgrade;

use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;

use cli::{Cli, Command};
use failure::Outcome;

/// Maximum wait for connections to Ceph clusters to close before the process exits.
const CLUSTERS_LIMIT: Duration = Duration::from_secs(3);

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().collect();
    if let Some(kind) = program::asked_for_capabilities(&arguments) {
        return failure::exit_code(program::print_capabilities(kind));
    }
    if arguments
        .iter()
        .any(|one| config::has_secret(&one.to_string_lossy()))
    {
        return failure::exit_code(Err(failure::Failure::mistake(config::SECRET_REFUSED)));
    }
    let cli = Cli::parse_from(help::with_help_flag(arguments));
    let code = failure::exit_code(run(cli));
    bdev::librbd::wait_until_closed(CLUSTERS_LIMIT);
    code
}

fn run(cli: Cli) -> Outcome {
    let levels = cli.log.start()?;
    match cli.command {
        Command::Serve(arguments) => serve::run(&arguments, logging::handle(levels)),
        Command::Bench(_)
        | Command::Conformance(_)
        | Command::Doctor(_)
        | Command::Image(_)
        | Command::Iscsi(_)
        | Command::Libvirt(_)
        | Command::Top(_)
        | Command::Vm(_) => lab::run(),
        Command::Check(arguments) => check::run(&arguments),
        Command::Upgrade(arguments) => upgrade::run(&arguments),
        Command::Status(arguments) => objects::status::run(&arguments),
        Command::Disk(command) => objects::disk::run(command),
        Command::Job(command) => objects::job::run(command),
        Command::Backup(command) => objects::backup::run(command),
        Command::Export(command) => objects::export::run(command),
        Command::Lun(command) => objects::lun::run(command),
        Command::Session(command) => objects::session::run(command),
        Command::Reservation(command) => objects::session::reservations(command),
        Command::State(command) => objects::saved_state::run(command),
        Command::Config(command) => objects::config::run(command),
        Command::Reload(arguments) => objects::config::reload(&arguments),
        Command::Rbd(command) => rbd::run(command),
        Command::Latency(arguments) => latency::run(&arguments),
        Command::Report(arguments) => report::run(&arguments),
        Command::Log(arguments) => log::run(&arguments),
        Command::Help(arguments) => help::run(&arguments),
        Command::Completion(arguments) => pages::pages().completion(&arguments),
        Command::Man(arguments) => pages::pages().man(&arguments),
        Command::VhostUserBlk(arguments) => program::run_blk(arguments),
        Command::VhostUserScsi(arguments) => program::run_scsi(arguments),
    }
}
