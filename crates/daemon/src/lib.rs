//! The daemon: the objects that it serves, and the sockets of its API.
//!
//! This library depends on all crates below it. It is not on the request path: it has configuration, start and stop, and monitoring.

#![forbid(unsafe_code)]

mod bitmaps;
mod block_devices;
mod blocking_call;
mod certificates;
mod chap_users;
mod confinement;
mod connection_table;
pub mod control;
mod disks;
mod equal_secrets;
mod exports;
mod handover;
mod helper_threads;
mod history;
mod identities;
mod jobs;
mod limits;
mod logs;
pub mod metrics;
pub mod notify;
mod objects;
mod overview;
mod running;
#[cfg(test)]
mod samples;
mod service_thread;
mod signals;
mod start_checks;
pub mod state;
pub mod state_files;
mod state_thread;
pub mod statistics;
mod storage_space;
mod tcp_service;
mod tcp_stream;
mod uevents;
mod unit_records;
mod watchdog;
mod writing_ahead;

pub use blocking_call::no_thread;
pub use confinement::confine;
pub use disks::warnings;
pub use equal_secrets::{EQUAL_SECRETS_HELP, equal_chap_secrets};
pub use exports::{Endpoint, ReadyExport};
pub use handover::{DiskMemory, Ending, Handover};
pub use logs::{LogHandle, LogLevels};
pub use objects::Fault;
pub use running::{
    Inherited, InheritedControl, Reload, Reloader, Running, StartError, StartOptions, log_shadowed,
    start,
};
pub use signals::{Signal, Signals};
pub use start_checks::StartChecks;
pub use watchdog::Watchdog;
