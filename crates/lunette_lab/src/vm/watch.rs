//! `lunette vm watch`, started only by `lunette vm run`: see `crates/vm/src/running/watcher.rs`.

use clap::Args;
use cli_common::Outcome;
use vm::running::{Registry, watch_parent};

use super::failed;

/// `lunette vm watch`
#[derive(Debug, Args)]
pub struct WatchArguments {
    /// Name of the guest
    name: String,
}

/// Cleans up after the process at the other end of stdin.
///
/// # Errors
/// When the guest's folder cannot be removed.
pub fn run(arguments: &WatchArguments) -> Outcome {
    let registry = Registry::open().map_err(failed)?;
    watch_parent(&registry, &arguments.name).map_err(failed)
}
