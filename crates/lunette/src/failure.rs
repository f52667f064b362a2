//! How a subcommand fails, and what it prints.

use config::Diagnostics;
use daemon::StartError;

pub use cli_common::{Failure, Outcome, exit_code, say};

/// A daemon that could not start.
pub fn not_started(error: StartError) -> Failure {
    Failure::Reasons(error.reasons)
}

/// A configuration or a command line with mistakes, which are printed at once.
pub fn mistaken(mistakes: Diagnostics) -> Failure {
    say(&mistakes);
    Failure::Mistaken
}
