//! `lunette log`: shows or changes the log filter of a running daemon.

use std::io::Write;

use control::{ClientError, Log, Method};
use serde_json::json;

use crate::cli::LogArguments;
use crate::failure::{Failure, Outcome};

/// Sets the filter, if one is given, and prints it.
pub fn run(arguments: &LogArguments) -> Outcome {
    let client = arguments.daemon.client()?;
    if let Some(filter) = &arguments.filter {
        let set = client.change(Method::PUT, "/v1/log", Some(&json!({"filter": filter})));
        set.map_err(|error| match error {
            // The daemon rejects a filter that is malformed.
            ClientError::Problem { ref problem } if problem.status == 422 => {
                Failure::mistake(error)
            }
            _ => error.into(),
        })?;
    }
    let log: Log = client.get("/v1/log")?;
    writeln!(cli_common::stdout(), "{}", log.filter)?;
    Ok(())
}
