//! Failures of subcommands, and their output.

use config::Diagnostics;
use daemon::StartError;

pub use cli_common::{Failure, Outcome, exit_code, print_line};

/// Converts a failed start of the daemon.
pub fn not_started(error: StartError) -> Failure {
    Failure::Reasons(error.reasons)
}

/// Prints mistakes of a configuration or command line.
pub fn mistaken(mistakes: Diagnostics) -> Failure {
    print_line(&mistakes);
    Failure::Mistaken
}
