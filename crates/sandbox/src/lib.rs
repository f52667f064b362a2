//! Confines this process and its threads: Landlock allows folders, seccomp allows system calls.
//!
//! [`begin`] runs on the main thread before any other thread exists, so that all threads inherit its restrictions, including those of
//! libraries. [`confine`] further restricts the calling thread according to its kind; threads that it starts inherit this as well. Both are
//! irreversible. Before `begin`, or with [`Mode::Off`], `confine` does nothing. Trusts its caller; may block only in opening folders.
//! Tests: `crates/reactor/tests/confined.rs`.

#![forbid(unsafe_code)]

mod accounts;
mod calls;
mod denial;
mod filter;
mod folders;
mod service_unit;

pub use accounts::{account, user_name};
pub use denial::{refusal, unreadable};
pub use service_unit::{allow_in_profile, hidden_by_unit, make_writable, this_user};

use std::fmt;
use std::path::PathBuf;
use std::sync::OnceLock;

/// Confinement of the process and its threads. Each mode includes the restrictions of the one before, except [`Mode::Log`], which restricts
/// nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// No filters and no rules.
    Off,
    /// The kernel's audit log records violations. Calls are executed, and folders are not restricted.
    Log,
    /// Workers, sessions and device threads have allow lists of system calls and reach no path; a violation ends the process. Calls on the
    /// deny list of the process fail with EPERM. The process reaches all folders of its user.
    #[default]
    Threads,
    /// As [`Mode::Threads`]. In addition, the process reaches only its own folders, and a call on its deny list ends it.
    Enforce,
}

impl Mode {
    /// Modes by their configuration values.
    pub const WORDS: [(&'static str, Mode); 4] = [
        ("off", Mode::Off),
        ("log", Mode::Log),
        ("threads", Mode::Threads),
        ("enforce", Mode::Enforce),
    ];

    /// Returns true if the allow lists of threads are enforced.
    fn confines_threads(self) -> bool {
        matches!(self, Mode::Threads | Mode::Enforce)
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Mode::Off => "off",
            Mode::Log => "log",
            Mode::Threads => "threads",
            Mode::Enforce => "enforce",
        })
    }
}

/// Kinds of threads with restrictions beyond those of the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// A worker: uses its ring and its clients' memory and sockets, no paths.
    Worker,
    /// Accepts clients or serves one: has a worker's calls and calls on existing sockets.
    Session,
    /// A thread of a block device that works on open files.
    Device,
}

/// Files that the process may access; all others are denied. A folder includes everything below it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths {
    /// Paths that may be read.
    pub read: Vec<PathBuf>,
    /// Paths that may be read and written, including creation and removal of files.
    pub write: Vec<PathBuf>,
    /// Folders that allow the creation of Unix sockets only.
    pub make_sockets: Vec<PathBuf>,
    /// Connections to abstract Unix sockets of other processes are allowed.
    pub abstract_sockets: bool,
}

/// Restrictions in effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// Selected mode.
    pub mode: Mode,
    /// Parts that this kernel lacks, as text; empty if none.
    pub missing: Vec<String>,
}

/// Reason why a thread or the process could not be confined.
#[derive(Debug)]
pub struct Error(String);

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Error {}

impl From<Error> for std::io::Error {
    fn from(error: Error) -> Self {
        std::io::Error::other(error)
    }
}

static REPORT: OnceLock<Report> = OnceLock::new();

/// Confines the process. Later calls change nothing.
///
/// # Errors
/// The kernel refuses a filter that it should support. A kernel without seccomp or Landlock is not an error; it is listed in the report.
pub fn begin(mode: Mode, paths: &Paths) -> Result<&'static Report, Error> {
    if let Some(report) = REPORT.get() {
        return Ok(report);
    }
    let mut missing = Vec::new();
    if mode == Mode::Enforce {
        let restriction = folders::restrict(paths)?;
        if restriction.is_enforced {
            denial::record(paths);
        }
        missing.extend(restriction.missing);
    }
    if mode != Mode::Off {
        match has_seccomp() {
            true => filter::process(mode)?,
            false => missing.push("seccomp filters (CONFIG_SECCOMP_FILTER)".to_owned()),
        }
    }
    Ok(REPORT.get_or_init(|| Report { mode, missing }))
}

/// Restricts the calling thread, if [`begin`] has selected a mode that does.
///
/// # Errors
/// The kernel refuses a restriction. The thread must then end.
pub fn confine(thread: Thread) -> Result<(), Error> {
    let mode = REPORT.get().map_or(Mode::Off, |report| report.mode);
    if mode == Mode::Off || !has_seccomp() {
        return Ok(());
    }
    if mode.confines_threads() {
        folders::close_all()?;
    }
    filter::thread(mode, thread)
}

/// Returns the restrictions in effect; `None` before [`begin`].
pub fn report() -> Option<&'static Report> {
    REPORT.get()
}

/// Returns true if the kernel has seccomp, according to the thread's status file.
fn has_seccomp() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        std::fs::read_to_string("/proc/self/status")
            .map_or(true, |status| status.contains("\nSeccomp:"))
    })
}
