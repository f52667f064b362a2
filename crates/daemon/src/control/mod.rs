//! The control socket: HTTP/JSON over a Unix socket, one file per resource.
//!
//! Served on a thread of its own, so that nobody who asks can delay a request of a guest. What is asked for is
//! behind the trait [`View`]; who may ask is for `access` to say. The types of requests and answers, and the client, are in the
//! crate `control`.

mod access;
mod allowed_paths;
mod api;
mod browsers;
mod clients;
mod configuration;
mod disks;
mod error_responses;
mod events;
mod exports;
mod jobs;
mod latency;
mod log;
mod luns;
mod metrics;
mod page;
mod problem;
mod saved_state;
mod server;
mod socket;
mod status;
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
pub use socket::{Audience, BindError, Bound, Left, bind};
pub use tcp::TcpServer;
pub use token::Tokens;

/// What the control socket shows. Calls may block for as long as a worker's iteration takes.
pub trait View: Send + Sync + 'static {
    /// What every queue measured so far.
    fn snapshot(&self) -> ::latency::Snapshot;

    /// What is served, and to whom.
    fn status(&self) -> Status;

    /// What workers, disks and queues have counted.
    fn statistics(&self) -> Statistics;

    /// What is logged, where that can be changed.
    fn log(&self) -> Option<crate::logs::LogHandle> {
        None
    }

    /// The same as Prometheus reads it.
    fn metrics(&self) -> String {
        crate::metrics::render(&self.status(), &self.statistics())
    }
}
