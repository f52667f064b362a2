//! The control socket: HTTP/JSON over a Unix socket, one file per resource.
//!
//! Served on a thread of its own, so that API clients do not delay guest requests. [`View`] provides the data, `access` controls access.
//! The crate `control` has the types of requests and responses, and the client.

mod access;
mod allowed_paths;
mod api;
mod backups;
mod body_time;
mod browsers;
mod clients;
mod configuration;
mod disks;
mod error_responses;
mod events;
mod exports;
pub(crate) mod health;
mod history;
mod jobs;
mod latency;
mod log;
mod luns;
mod metrics;
mod page;
mod parameters;
mod problem;
mod saved_state;
mod server;
mod socket;
mod status;
mod strict_objects;
mod tcp;
mod token;
mod upgrade;
mod version;

use ::control::Status;
use ::control::statistics::Statistics;

pub use api::{Api, openapi};
pub use browsers::Names;
pub(crate) use browsers::has_one_host;
pub use configuration::summary;
pub use problem::ErrorResponse;
pub use server::Server;
pub use socket::{Audience, BindError, Bound, ControlSocket, bind};
pub use tcp::TcpServer;
pub use token::Tokens;
pub(crate) use upgrade::upgrade_command;

/// Data that the control socket shows. Calls may block for one iteration of a worker.
pub trait View: Send + Sync + 'static {
    /// Returns the measurements of all queues.
    fn snapshot(&self) -> ::latency::Snapshot;

    /// Returns the served objects and their clients.
    fn status(&self) -> Status;

    /// Returns the counters of workers, disks and queues.
    fn statistics(&self) -> Statistics;

    /// Returns true if all workers have run an iteration within a second.
    fn makes_progress(&self) -> bool {
        true
    }

    /// Returns the handle of the log filter, if it can be changed.
    fn log(&self) -> Option<crate::logs::LogHandle> {
        None
    }

    /// Returns the counters in Prometheus' text format.
    fn metrics(&self) -> String {
        crate::metrics::render(&self.status(), &self.statistics())
    }
}
