//! Common parts of the command lines of `lunette` and `lunette-lab`: failures, logging, man pages and completions, the path of the other
//! program, and the daemon's address.

#![forbid(unsafe_code)]

mod daemon_address;
mod failure;
mod logging;
mod pages;
mod sibling;
mod terminal;

pub use daemon_address::DaemonAddress;
pub use failure::{Failure, Outcome, exit_code, print_line, print_reason};
pub use logging::{Levels, LogFormat, LogOptions};
pub use pages::{CompletionArguments, ManArguments, Pages};
pub use sibling::find as find_sibling;
pub use terminal::{Terminal, printable, stderr, stdout};
