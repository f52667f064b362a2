//! Builds the programs that guests and daemons are started from, with the cargo that built this.

use crate::places::{guest_directory, workspace};
use anyhow::{Context, Result, bail};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// How `lunette` is compiled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// With overflow checks and debug assertions: what tests run.
    Dev,
    /// Optimised: what is demonstrated and measured.
    Release,
}

static CHOSEN: OnceLock<PathBuf> = OnceLock::new();

/// From now on this is the `lunette` program, with `lunette-lab` beside it.
pub fn use_lunette(program: PathBuf) {
    // The first one stays.
    CHOSEN.set(program).ok();
}

/// The path of the `lunette` program, with `lunette-lab` beside it: [`use_lunette`]'s, `$LUNETTE_BIN`, else what a build of this
/// source tree gives.
pub fn lunette_program(profile: Profile) -> Result<PathBuf> {
    if let Some(path) = CHOSEN.get() {
        return Ok(path.clone());
    }
    static PROGRAMS: [OnceLock<Result<PathBuf, String>>; 2] = [OnceLock::new(), OnceLock::new()];
    if let Some(path) = std::env::var_os("LUNETTE_BIN") {
        let path = PathBuf::from(path);
        return std::path::absolute(&path)
            .with_context(|| format!("LUNETTE_BIN is {}", path.display()));
    }
    once(&PROGRAMS[profile as usize], "lunette", || {
        let mut command = cargo(&["lunette", "lunette_lab"]);
        if profile == Profile::Release {
            command.arg("--release");
        }
        command
    })
}

/// A program for guests. All of them are linked statically, in a target directory of their own.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestProgram {
    /// What runs commands, and tests' workloads.
    Agent,
    /// The load generator of `lunette bench`.
    Bench,
}

impl GuestProgram {
    /// Its file's name.
    pub fn name(self) -> &'static str {
        match self {
            GuestProgram::Agent => "guest-agent",
            GuestProgram::Bench => "guest-bench",
        }
    }

    fn package(self) -> &'static str {
        match self {
            GuestProgram::Agent => "guest_agent",
            GuestProgram::Bench => "guest_bench",
        }
    }
}

/// The path of a program for guests, as a build of this source tree gives it.
pub fn guest_program(program: GuestProgram) -> Result<PathBuf> {
    static PROGRAMS: [OnceLock<Result<PathBuf, String>>; 2] = [OnceLock::new(), OnceLock::new()];
    once(&PROGRAMS[program as usize], program.name(), || {
        let mut command = cargo(&[program.package()]);
        command
            .args([
                "--release",
                "--target",
                "x86_64-unknown-linux-gnu",
                "--target-dir",
            ])
            // Each by itself: who needs the small one does not wait until the large one is there.
            .arg(guest_directory().join("target").join(program.name()))
            .env(
                "RUSTFLAGS",
                "-C target-feature=+crt-static -C strip=debuginfo",
            )
            .env_remove("CARGO_ENCODED_RUSTFLAGS");
        command
    })
}

fn cargo(packages: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(workspace()).args([
        "build",
        "--quiet",
        "--message-format=json-render-diagnostics",
    ]);
    for package in packages {
        command.args(["-p", package]);
    }
    command
}

fn once(
    cell: &OnceLock<Result<PathBuf, String>>,
    program: &str,
    command: impl FnOnce() -> Command,
) -> Result<PathBuf> {
    cell.get_or_init(|| build(command(), program).map_err(|error| format!("{error:#}")))
        .clone()
        .map_err(anyhow::Error::msg)
}

/// Runs cargo and gives the executable of this name that it reports.
fn build(mut command: Command, program: &str) -> Result<PathBuf> {
    let output = command
        .stderr(Stdio::inherit())
        .output()
        .context("cannot run cargo")?;
    if !output.status.success() {
        bail!("{command:?} failed: {}", output.status);
    }
    let stdout = String::from_utf8_lossy(&output.stdout);
    stdout
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok())
        .filter_map(|message| message.get("executable")?.as_str().map(PathBuf::from))
        .find(|path| path.file_name().is_some_and(|name| name == program))
        .with_context(|| format!("{command:?} built no {program}"))
}
