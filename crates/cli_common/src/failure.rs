//! How a subcommand fails, and what it prints.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use control::ClientError;

use crate::terminal;

/// Why a subcommand did not do what was asked.
#[derive(Debug)]
pub enum Failure {
    /// With these reasons, one a line.
    Reasons(Vec<String>),
    /// The reasons have been printed already, in the form that was asked for.
    Told,
    /// What was looked for is not as it should be; that has been printed, and the command's exit code says what it is.
    Found(u8),
    /// The configuration, or the command line, has mistakes, which have been printed: trying again will not help.
    Mistaken,
    /// Ctrl-C, or its like, came before the end; what there was has been printed.
    Interrupted,
    /// Nobody reads what is printed: that is no failure.
    NobodyReads,
}

/// The exit code for a command line or a configuration with mistakes, the same as clap's: a service manager need not try again.
const MISTAKEN: u8 = 2;

/// As a shell tells of a command that SIGINT has ended.
const INTERRUPTED: u8 = 128 + 2;

/// What a subcommand gives back.
pub type Outcome = Result<(), Failure>;

impl Failure {
    /// A mistake in the command line, which is told at once.
    pub fn mistake(reason: impl fmt::Display) -> Failure {
        say_reason(&reason.to_string());
        Failure::Mistaken
    }

    /// One reason.
    pub fn because(reason: impl Into<String>) -> Failure {
        Failure::Reasons(vec![reason.into()])
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match &error {
            // The daemon could not read what was asked: the words of the command line are in it.
            ClientError::Problem { problem } if problem.status == 400 => Failure::mistake(error),
            _ => Failure::because(error.to_string()),
        }
    }
}

impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::NobodyReads,
            _ => Failure::because(format!("cannot print: {error}")),
        }
    }
}

/// A line on stderr, which nobody may read any more: that is no failure either.
pub fn say(line: &dyn fmt::Display) {
    writeln!(terminal::stderr(), "{line}").ok();
}

/// Prints a reason on stderr. Its further lines are indented, so that no text in it looks like a message of this program.
pub fn say_reason(reason: &str) {
    say(&format_args!("lunette: {}", reason.replace('\n', "\n  ")));
}

/// Prints what is to be said, and gives the exit code.
pub fn exit_code(outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(()) | Err(Failure::NobodyReads) => ExitCode::SUCCESS,
        Err(Failure::Told) => ExitCode::FAILURE,
        Err(Failure::Found(code)) => ExitCode::from(code),
        Err(Failure::Mistaken) => ExitCode::from(MISTAKEN),
        Err(Failure::Interrupted) => ExitCode::from(INTERRUPTED),
        Err(Failure::Reasons(reasons)) => {
            for reason in reasons {
                say_reason(&reason);
            }
            ExitCode::FAILURE
        }
    }
}
