//! The control API from the outside: the types of requests and answers, with their OpenAPI schemas, and a client.
//!
//! Whoever talks to a daemon links this: the command line, the benchmark, tests, and the daemon itself, whose servers
//! (`daemon::control`) answer with these types. The names are those of the configuration file.

#![forbid(unsafe_code)]

mod client;
mod configuration;
mod event;
mod keys;
mod log;
pub mod objects;
mod problem;
pub mod statistics;
mod status;
mod token;
mod version;

use std::path::PathBuf;

pub use client::{Client, ClientError, Method, escape, get, latency_path};
pub use configuration::{Accepted, Changes, Objects, Summary};
pub use event::Event;
pub use keys::Keys;
pub use log::Log;
pub use problem::{FieldProblem, Problem};
pub use status::{DamagedState, DiskStatus, ExportStatus, LunStatus, StateFile, Status};
pub use token::Token;
pub use version::{HANDOVER_VERSION, Upgrade, Version};

/// The control socket of a daemon that runs as a service of the system.
pub const SYSTEM_SOCKET: &str = "/run/lunette/lunette.sock";

/// The default path of the control socket: `/run/lunette/lunette.sock` for root,
/// `$XDG_RUNTIME_DIR/lunette.sock` for everybody else; `None` where that is not set.
pub fn default_socket() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from(SYSTEM_SOCKET));
    }
    let folder = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty())?;
    Some(PathBuf::from(folder).join("lunette.sock"))
}
