//! Commands implemented by the program `lunette-lab`: benchmarks, guests and screens need drivers, plots and fonts, which the
//! daemon does not.
//!
//! `lunette bench ...` becomes `lunette-lab bench ...` by exec(2), so process, descriptors, signals and exit code are those of the
//! command.

use std::ffi::{OsStr, OsString};
use std::os::unix::process::CommandExt;
use std::process::Command;

use clap::Args;
use cli_common::{Failure, Outcome, find_sibling};

pub const PROGRAM: &str = "lunette-lab";

/// Commands of `lunette` that `lunette-lab` implements.
pub const COMMANDS: [&str; 8] = [
    "bench",
    "conformance",
    "doctor",
    "image",
    "iscsi",
    "libvirt",
    "top",
    "vm",
];

/// Arguments of a command of `lunette-lab`, passed on unparsed.
#[derive(Debug, Args)]
pub struct LabArguments {
    /// Arguments, see --help of the command
    #[arg(
        value_name = "ARGUMENT",
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub arguments: Vec<OsString>,
}

/// Executes `lunette-lab` with the same command line. Returns only on failure.
pub fn run() -> Outcome {
    // Unchanged arguments, including log options: both programs parse them alike.
    run_with(std::env::args_os().skip(1))
}

/// Executes `lunette-lab` with these arguments. Returns only on failure.
pub fn run_with(arguments: impl IntoIterator<Item = impl AsRef<OsStr>>) -> Outcome {
    let program = find_sibling(PROGRAM)?;
    let error = Command::new(&program).args(arguments).exec();
    Err(Failure::because(format!(
        "cannot run {}: {error}",
        program.display()
    )))
}
