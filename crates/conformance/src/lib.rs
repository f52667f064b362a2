//! Tests of vhost-user back ends: `lunette conformance` runs them against any program, `crates/vhost_user/tests` against this project's
//! server.
//!
//! ```text
//! runner ──▶ Test { name, clause, run } ──▶ Target: socket, device ──▶ vhost_frontend ──▶ back end
//!    │                                        session, config, rings, requests, memory,
//!                                             inflight, dirty_log, scsi, control, hostile
//!    └─────▶ Report: table, JSON, JUnit
//! ```
//!
//! A test opens its own session and checks one clause of virtio 1.3 or of the vhost-user specification. After each test the runner checks
//! that the back end serves the next front end. Tests run one after the other on the calling thread.

#![forbid(unsafe_code)]

mod config;
mod control;
pub mod dirty_log;
pub mod hostile;
mod inflight;
mod io;
mod memory;
mod report;
mod requests;
mod rings;
mod runner;
mod scsi;
mod session;
mod target;

pub use report::{json, junit, table};
pub use runner::{Outcome, Report, Selection, TestReport, run, tests};
pub use target::{Device, Target};

use std::fmt::Debug;

/// Reason why a test did not pass.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Flaw {
    /// The back end violates the clause. The text has the expected and the actual behaviour.
    Failed(String),
    /// The back end or the disk lacks a feature that the test needs.
    Skipped(String),
}

impl From<vhost_frontend::Error> for Flaw {
    fn from(error: vhost_frontend::Error) -> Flaw {
        Flaw::Failed(error.to_string())
    }
}

impl From<std::io::Error> for Flaw {
    fn from(error: std::io::Error) -> Flaw {
        Flaw::Failed(error.to_string())
    }
}

impl From<rustix::io::Errno> for Flaw {
    fn from(errno: rustix::io::Errno) -> Flaw {
        std::io::Error::from(errno).into()
    }
}

/// Result of a test's body.
pub type Verdict<T = ()> = Result<T, Flaw>;

/// Device types that a test applies to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// virtio-blk only.
    Blk,
    /// virtio-scsi only.
    Scsi,
    /// virtio-blk and virtio-scsi.
    Any,
}

/// One test.
#[derive(Clone, Copy)]
pub struct Test {
    /// Group, the first part of the name.
    pub group: &'static str,
    /// Behaviour that the test checks, in words.
    pub title: &'static str,
    /// Clause of the specification.
    pub clause: &'static str,
    /// Device types.
    pub devices: Devices,
    /// The test writes to the disk.
    pub writes: bool,
    /// The test waits for a time limit of the back end.
    pub is_slow: bool,
    run: fn(&Target) -> Verdict,
}

impl Test {
    const fn new(
        group: &'static str,
        devices: Devices,
        title: &'static str,
        clause: &'static str,
        run: fn(&Target) -> Verdict,
    ) -> Test {
        Test {
            group,
            title,
            clause,
            devices,
            writes: false,
            is_slow: false,
            run,
        }
    }

    const fn writing(self) -> Test {
        Test {
            writes: true,
            ..self
        }
    }

    /// Returns the name on the command line: group and title, without spaces.
    pub fn name(&self) -> String {
        let title = self.title.replace('\'', "");
        let is_word = |c: char| c.is_alphanumeric() || matches!(c, '_' | '^');
        let words = title.split(|c| !is_word(c)).filter(|word| !word.is_empty());
        format!("{}.{}", self.group, words.collect::<Vec<_>>().join("-"))
    }

    /// Runs the test, without a check of the back end afterwards.
    ///
    /// # Errors
    /// The test failed or was skipped.
    pub fn run(&self, target: &Target) -> Verdict {
        // Tests that truncate a file also truncate their own mapping.
        guest_memory::sigbus::install()?;
        (self.run)(target)
    }
}

/// Fails unless `actual` is `expected`.
fn equal<T: PartialEq + Debug>(object: &str, actual: T, expected: T) -> Verdict {
    match actual == expected {
        true => Ok(()),
        false => failed(format!("{object}: expected {expected:?}, got {actual:?}")),
    }
}

fn failed<T>(reason: impl Into<String>) -> Verdict<T> {
    Err(Flaw::Failed(reason.into()))
}

fn skipped<T>(reason: impl Into<String>) -> Verdict<T> {
    Err(Flaw::Skipped(reason.into()))
}

/// Skips the test unless the back end has a feature.
fn needs(is_offered: bool, feature: &str) -> Verdict {
    match is_offered {
        true => Ok(()),
        false => skipped(format!("{feature} is not offered")),
    }
}
