//! The control API for clients: types of requests and responses with their OpenAPI schemas, and a client.
//!
//! Used by the command line, the benchmark, tests, and the servers of the daemon (`daemon::control`), which respond with these types. The
//! names are those of the configuration file.

#![forbid(unsafe_code)]

mod client;
mod configuration;
mod event;
mod history;
mod keys;
mod log;
pub mod objects;
mod plural;
mod problem;
mod service;
pub mod statistics;
mod status;
mod status_problem;
mod token;
mod version;

use std::path::PathBuf;

pub use client::{Client, ClientError, Method, escape, get, latency_path};
pub use configuration::{Accepted, Changes, Objects, Summary};
pub use event::{Event, EventKind};
pub use history::{DiskHistory, HistoryInterval};
pub use keys::Keys;
pub use log::Log;
pub use plural::counted;
pub use problem::{FieldProblem, Problem};
pub use service::{restart_command, shell_word};
pub use status::{
    CertificateStatus, DISK_STATES, DamagedState, DiskFailures, DiskStatus, ExportStatus,
    FailureKind, LunStatus, OpenListener, QueueFailures, QueueStops, RefusedLogin, StateFile,
    Status,
};
pub use status_problem::{Severity, StatusProblem, status_problems};
pub use token::Token;
pub use version::{HANDOVER_VERSION, Upgrade, Version};

/// Control socket of a daemon that runs as a system service.
pub const SYSTEM_SOCKET: &str = "/run/lunette/lunette.sock";

/// Returns the default path of the control socket: `/run/lunette/lunette.sock` for root, `$XDG_RUNTIME_DIR/lunette.sock` for other users;
/// `None` if that variable is not set.
pub fn default_socket() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from(SYSTEM_SOCKET));
    }
    let folder = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty())?;
    Some(PathBuf::from(folder).join("lunette.sock"))
}
