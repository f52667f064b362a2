//! Confines this process and its threads: Landlock allows folders, seccomp allows system calls.
//!
//! [`begin`] runs on the main thread before any other thread exists, so that every thread inherits what it sets, also those that a
//! library starts. [`confine`] then narrows the calling thread to what its kind needs; a thread that it starts inherits that as well.
//! Both are one-way. Until `begin` has run, or with [`Mode::Off`], `confine` does nothing. Trusts its caller; may block only in
//! opening folders. Tests: `crates/reactor/tests/confined.rs`.

#![forbid(unsafe_code)]

mod calls;
mod denial;
mod filter;
mod folders;

pub use denial::refusal;

use std::fmt;
use std::path::PathBuf;
use std::sync::OnceLock;

/// How strictly the process and its threads are confined. Each mode includes the restrictions of the one before, except [`Mode::Log`],
/// which restricts nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// No filters and no rules.
    Off,
    /// The kernel's audit log records violations. The calls are carried out, and folders are not restricted.
    Log,
    /// Workers, sessions and device threads have closed lists of system calls and reach no path; a violation ends the process. Calls
    /// on the deny list of the process fail with EPERM. The process reaches all folders of its user.
    #[default]
    Threads,
    /// As [`Mode::Threads`]. In addition, the process reaches only its own folders, and a call on its deny list ends it.
    Enforce,
}

impl Mode {
    /// The modes by their words.
    pub const WORDS: [(&'static str, Mode); 4] = [
        ("off", Mode::Off),
        ("log", Mode::Log),
        ("threads", Mode::Threads),
        ("enforce", Mode::Enforce),
    ];

    /// True if the closed lists of threads are enforced.
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

/// Kinds of threads that are narrowed further than the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Thread {
    /// A worker: its ring, its clients' memory and sockets, nothing with a name.
    Worker,
    /// Accepts clients or talks to one: a worker's calls, and those of sockets that exist already.
    Session,
    /// A thread of a block device that works on open files.
    Device,
}

/// Files that the process may use; all others are closed to it. Folders count with all that is below them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Paths {
    /// To read.
    pub read: Vec<PathBuf>,
    /// To read, write, make and remove.
    pub write: Vec<PathBuf>,
    /// To make Unix sockets and nothing else.
    pub make_sockets: Vec<PathBuf>,
    /// Abstract Unix sockets of other processes are reached as well.
    pub abstract_sockets: bool,
}

/// What is in effect.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Report {
    /// The mode that was chosen.
    pub mode: Mode,
    /// What of it this kernel lacks, in words; empty: nothing.
    pub missing: Vec<String>,
}

/// Why a thread or the process could not be confined.
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

/// Confines the process, once: other calls change nothing.
///
/// # Errors
/// When the kernel refuses a filter that it should take. A kernel without seccomp or Landlock is not an error: the report says so.
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

/// Narrows the calling thread, if [`begin`] has chosen a mode that does.
///
/// # Errors
/// When the kernel refuses: the thread must not go on.
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

/// What is in effect; `None` before [`begin`].
pub fn report() -> Option<&'static Report> {
    REPORT.get()
}

/// Every thread's status file tells it, where the kernel has seccomp at all.
fn has_seccomp() -> bool {
    static HAS: OnceLock<bool> = OnceLock::new();
    *HAS.get_or_init(|| {
        std::fs::read_to_string("/proc/self/status")
            .map_or(true, |status| status.contains("\nSeccomp:"))
    })
}
