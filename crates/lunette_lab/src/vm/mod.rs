//! `lunette vm`: guests whose disks come through Lunette, or through QEMU's own devices to compare with. One file for each
//! subcommand.

mod guest;
mod plan;

use clap::{Args, Subcommand};
use cli_common::Outcome;

pub use guest::GuestArguments;

/// `lunette vm`
#[derive(Debug, Args)]
#[command(arg_required_else_help = true, after_help = AFTER)]
pub struct VmCommand {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Print how to serve and start a guest with these disks, and what it will call them
    Plan(Box<plan::PlanArguments>),
}

const AFTER: &str = "\
Example:
    lunette vm plan scsi:4x1,queues=2 blk:1";

/// Runs a subcommand.
///
/// # Errors
/// Why it failed.
pub fn run(command: VmCommand) -> Outcome {
    match command.action {
        Action::Plan(arguments) => plan::run(&arguments),
    }
}
