//! Results of subcommands, and their output and exit codes.

use std::fmt;
use std::io::{self, Write};
use std::process::ExitCode;

use control::ClientError;

use crate::terminal;

/// Reasons for the failure of a subcommand.
#[derive(Debug)]
pub enum Failure {
    /// Reasons to print, one per line.
    Reasons(Vec<String>),
    /// The reasons have been printed in the requested format.
    Reported,
    /// The command reported findings, which have been printed; the exit code describes them.
    Found(u8),
    /// The configuration or the command line is invalid, which has been printed. A retry will not help.
    Mistaken,
    /// The command was interrupted (Ctrl-C or similar); partial results have been printed.
    Interrupted,
    /// This signal ended the command; partial results have been printed.
    Signal(u8),
    /// The reader of the output has closed it, which is not an error.
    OutputClosed,
}

/// Exit code for an invalid command line or configuration, as with clap. A service manager need not retry.
const MISTAKEN: u8 = 2;

/// Exit code after a signal, as in a shell, without the number of the signal.
const SIGNALLED: u8 = 128;

/// Number of SIGINT.
const INTERRUPTED: u8 = 2;

/// Result of a subcommand.
pub type Outcome = Result<(), Failure>;

impl Failure {
    /// Prints a mistake in the command line.
    pub fn mistake(reason: impl fmt::Display) -> Failure {
        print_reason(&reason.to_string());
        Failure::Mistaken
    }

    /// Creates a failure with one reason.
    pub fn because(reason: impl Into<String>) -> Failure {
        Failure::Reasons(vec![reason.into()])
    }

    /// Returns a function that creates the failure of an operation with its error. `?` alone reports a failure to print.
    pub fn cannot(operation: &str) -> impl FnOnce(io::Error) -> Failure {
        move |error| Failure::because(format!("cannot {operation}: {error}"))
    }
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match &error {
            // Status 400: the daemon rejected an argument of the command line.
            ClientError::Problem { problem } if problem.status == 400 => Failure::mistake(error),
            _ => Failure::because(error.to_string()),
        }
    }
}

/// For errors of the output.
impl From<io::Error> for Failure {
    fn from(error: io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::BrokenPipe => Failure::OutputClosed,
            _ => Failure::because(format!("cannot print: {error}")),
        }
    }
}

/// Prints a line on stderr. A closed stderr is not an error.
pub fn print_line(line: &dyn fmt::Display) {
    writeln!(terminal::stderr(), "{line}").ok();
}

/// Prints a reason on stderr. Its further lines are indented, so that no text in it looks like a message of this program.
pub fn print_reason(reason: &str) {
    print_line(&format_args!("lunette: {}", reason.replace('\n', "\n  ")));
}

/// Prints the reasons. Returns the exit code.
pub fn exit_code(outcome: Outcome) -> ExitCode {
    match outcome {
        Ok(()) | Err(Failure::OutputClosed) => ExitCode::SUCCESS,
        Err(Failure::Reported) => ExitCode::FAILURE,
        Err(Failure::Found(code)) => ExitCode::from(code),
        Err(Failure::Mistaken) => ExitCode::from(MISTAKEN),
        Err(Failure::Interrupted) => ExitCode::from(SIGNALLED + INTERRUPTED),
        Err(Failure::Signal(number)) => ExitCode::from(SIGNALLED | number),
        Err(Failure::Reasons(reasons)) => {
            for reason in reasons {
                print_reason(&reason);
            }
            ExitCode::FAILURE
        }
    }
}
