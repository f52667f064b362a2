//! Commands that the program `lunette-lab` runs: benchmarks, guests and screens bring drivers, plots and fonts, which no daemon
//! needs.
//!
//! `lunette bench ...` becomes `lunette-lab bench ...` by exec(2): the process, its descriptors, its signals and its exit code are
//! those of the command.

use std::ffi::OsString;
use std::os::unix::process::CommandExt;
use std::process::Command;

use clap::Args;
use cli_common::{Failure, Outcome, find_sibling};

/// The program that runs them.
pub const PROGRAM: &str = "lunette-lab";

/// The commands that it runs.
pub const COMMANDS: [&str; 7] = ["bench", "doctor", "image", "iscsi", "libvirt", "top", "vm"];

/// The command's own arguments, which only `lunette-lab` knows.
#[derive(Debug, Args)]
pub struct LabArguments {
    /// As `--help` lists them
    #[arg(
        value_name = "ARGUMENT",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub arguments: Vec<OsString>,
}

/// Becomes `lunette-lab` with the same command line; returns only if that fails.
pub fn run() -> Outcome {
    let program = find_sibling(PROGRAM)?;
    // The arguments as they were given, options of the log included: both programs read them alike.
    let error = Command::new(&program)
        .args(std::env::args_os().skip(1))
        .exec();
    Err(Failure::because(format!(
        "cannot run {}: {error}",
        program.display()
    )))
}
