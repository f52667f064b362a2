//! Checks a host's configuration for fast virtual disks. Reads `/proc` and `/sys` and returns findings with a reason and the command that
//! fixes each.
//!
//! [`Host`] is this machine or a record: a text with the files that the checks read ([`FILES`]). [`examine`] returns the findings. They
//! depend only on the host, so each check is tested with recorded hosts (`hosts/`). [`Profile`] is a set of kernel parameters to compare
//! with those of the host.

#![forbid(unsafe_code)]

mod cpu;
mod finding;
mod host;
mod memory;
mod network;
mod profile;
mod storage;
mod virtualization;
mod workers;

pub use finding::{Area, Change, Finding};
pub use host::{FILES, Host};
pub use profile::{PROFILES, Parameter, Profile, Row};
pub use storage::DiskOf;
pub use workers::WorkerUse;

/// Scope of an examination.
#[derive(Clone, Debug, Default)]
pub struct Question {
    /// Served or planned disks; empty: all block devices of the host.
    pub disks: Vec<DiskOf>,
    /// The host is a guest under examination.
    pub is_guest: bool,
    /// Workers of a daemon.
    pub workers: Vec<WorkerUse>,
}

/// Returns all findings: first those worth fixing, then in the order of the areas.
pub fn examine(host: &Host, question: &Question) -> Vec<Finding> {
    let mut findings = Vec::new();
    cpu::examine(host, question, &mut findings);
    virtualization::examine(host, question, &mut findings);
    storage::examine(host, question, &mut findings);
    memory::examine(host, question, &mut findings);
    network::examine(host, &mut findings);
    workers::examine(question, &mut findings);
    findings.sort_by_key(|finding| !finding.is_worth_changing);
    findings
}
