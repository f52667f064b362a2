//! What the command lines of `lunette` and `lunette-lab` share: how they fail and log, their man pages and completions, and how
//! each finds the other.

#![forbid(unsafe_code)]

mod failure;
mod logging;
mod pages;
mod sibling;

pub use failure::{Failure, Outcome, exit_code, say};
pub use logging::{Levels, LogFormat, LogOptions};
pub use pages::{CompletionArguments, ManArguments, Pages};
pub use sibling::find as find_sibling;
