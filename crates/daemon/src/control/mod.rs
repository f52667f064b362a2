//! The control socket: HTTP/JSON over a Unix socket, one file per resource.
//!
//! Served on a thread of its own, so that nobody who asks can delay a request of a guest. What is asked for is
//! behind the trait [`View`]; who may ask is for `access` to say.

mod access;
mod answers;
mod api;
mod client;
mod configuration;
mod disks;
mod events;
mod exports;
mod latency;
mod log;
mod lookers;
mod luns;
mod metrics;
mod problem;
mod server;
mod socket;
mod status;
mod tcp;
mod token;
mod version;

use std::path::PathBuf;

pub use api::{Api, openapi};
pub use client::{Client, ClientError, Method, escape, get};
pub use configuration::{Changes, Objects, Summary};
pub use latency::path_of as latency_path;
pub use log::Log;
pub use problem::{FieldProblem, Problem};
pub use server::Server;
pub use socket::{BindError, Bound, bind, bind_for_all};
pub use status::{DiskStatus, ExportStatus, LunStatus, Status};
pub use tcp::TcpServer;
pub use token::{Token, Tokens};
pub use version::Version;

/// What the control socket shows. Calls may block for as long as a worker's iteration takes.
pub trait View: Send + Sync + 'static {
    /// What every queue measured so far.
    fn snapshot(&self) -> ::latency::Snapshot;

    /// What is served, and to whom.
    fn status(&self) -> Status;

    /// What workers, disks and queues have counted.
    fn statistics(&self) -> crate::statistics::Statistics;

    /// What is logged, where that can be changed.
    fn log(&self) -> Option<crate::logs::LogHandle> {
        None
    }

    /// The same as Prometheus reads it.
    fn metrics(&self) -> String {
        crate::metrics::render(&self.status(), &self.statistics())
    }
}

/// The control socket of a daemon that runs as a service of the system.
pub const SYSTEM_SOCKET: &str = "/run/lunette/lunette.sock";

/// Where the control socket is when nothing is said: `/run/lunette/lunette.sock` for root,
/// `$XDG_RUNTIME_DIR/lunette.sock` for everybody else; `None` where that is not set.
pub fn default_socket() -> Option<PathBuf> {
    if rustix::process::geteuid().is_root() {
        return Some(PathBuf::from(SYSTEM_SOCKET));
    }
    let folder = std::env::var_os("XDG_RUNTIME_DIR").filter(|folder| !folder.is_empty())?;
    Some(PathBuf::from(folder).join("lunette.sock"))
}
