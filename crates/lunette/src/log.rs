//! `lunette log`: shows or changes the log filter of a running daemon.

use std::io::Write;

use control::{Log, Method};
use serde_json::json;

use crate::cli::LogArguments;
use crate::failure::Outcome;

/// Sets the filter, if one is given, and prints it.
pub fn run(arguments: &LogArguments) -> Outcome {
    let client = arguments.daemon.client()?;
    if let Some(filter) = &arguments.filter {
        client.change(Method::PUT, "/v1/log", Some(&json!({"filter": filter})))?;
    }
    let log: Log = client.get("/v1/log")?;
    writeln!(cli_common::stdout(), "{}", log.filter)?;
    Ok(())
}
