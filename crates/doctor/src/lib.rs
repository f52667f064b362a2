//! Is a host set up for fast disks of virtual machines? Looks at `/proc` and `/sys`, and says what it found, why it matters, and the
//! command that changes it.
//!
//! [`Host`] is this machine, or one that was recorded: a text with the files that the checks read ([`FILES`]). [`examine`] makes the findings;
//! they depend on nothing else, so each check is tested on recorded hosts (`hosts/`). [`Profile`] is a set of kernel parameters that are
//! compared with those of the host.

#![forbid(unsafe_code)]

mod cpu;
mod finding;
mod host;
mod memory;
mod network;
mod profile;
mod storage;
mod virtualization;

pub use finding::{Area, Change, Finding};
pub use host::{FILES, Host};
pub use profile::{PROFILES, Parameter, Profile, Row};
pub use storage::DiskOf;

/// What to look at, besides the host itself.
#[derive(Clone, Debug, Default)]
pub struct Question {
    /// Disks that are served, or will be; none: all block devices of the host.
    pub disks: Vec<DiskOf>,
    /// The host is a guest that was looked into.
    pub is_guest: bool,
}

/// All findings, those worth a change first, else in the order of the areas.
pub fn examine(host: &Host, question: &Question) -> Vec<Finding> {
    let mut findings = Vec::new();
    cpu::examine(host, question, &mut findings);
    virtualization::examine(host, question, &mut findings);
    storage::examine(host, question, &mut findings);
    memory::examine(host, question, &mut findings);
    network::examine(host, &mut findings);
    findings.sort_by_key(|finding| !finding.is_worth_changing);
    findings
}
