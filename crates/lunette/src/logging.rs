//! The log: to stderr, one line per event, as `--log` or else `RUST_LOG` says.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::failure::{Failure, Outcome};

/// What a filter may be, for messages.
const ALLOWED: &str = "a level (error, warn, info, debug, trace), or PART=LEVEL,...";

/// Starts logging.
pub fn start(filter: Option<&str>) -> Outcome {
    let said = match filter {
        Some(text) => ("--log", text.to_owned()),
        None => ("RUST_LOG", std::env::var("RUST_LOG").unwrap_or_default()),
    };
    let filter = match said {
        (_, text) if text.is_empty() => EnvFilter::new("info"),
        (by, text) => EnvFilter::try_new(&text)
            .map_err(|error| Failure::because(format!("{by} {text}: {error}; give {ALLOWED}")))?,
    };
    tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(std::io::stderr().is_terminal())
        .init();
    Ok(())
}
