//! Builds the programs for guests and daemons with the cargo that built this program.

use crate::places::{guest_directory, workspace};
use anyhow::{Context, Result, bail};
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::OnceLock;

/// Build profile of `lunette`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Profile {
    /// With overflow checks and debug assertions, for tests.
    Dev,
    /// Optimized, for demonstrations and measurements.
    Release,
}

static SELECTED: OnceLock<PathBuf> = OnceLock::new();

/// Sets the `lunette` program, with `lunette-lab` beside it.
pub fn use_lunette(program: PathBuf) {
    // The first call wins.
    SELECTED.set(program).ok();
}

/// Returns the path of the `lunette` program, with `lunette-lab` beside it: that of [`use_lunette`], `$LUNETTE_BIN`, or a build of this
/// source tree.
pub fn lunette_program(profile: Profile) -> Result<PathBuf> {
    if let Some(path) = SELECTED.get() {
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

/// A program for guests. All are linked statically and have their own target directory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestProgram {
    /// Runs commands and test workloads.
    Agent,
    /// Load generator of `lunette bench`.
    Bench,
}

impl GuestProgram {
    /// Returns the file name.
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

/// Builds a program for guests from this source tree and returns its path.
pub fn guest_program(program: GuestProgram) -> Result<PathBuf> {
    static PROGRAMS: [OnceLock<Result<PathBuf, String>>; 2] = [OnceLock::new(), OnceLock::new()];
    once(&PROGRAMS[program as usize], program.name(), || {
        // A first build takes minutes.
        let name = program.name();
        writeln!(std::io::stderr(), "cargo builds {name}").unwrap_or(());
        let mut command = cargo(&[program.package()]);
        command
            .args([
                "--release",
                "--target",
                "x86_64-unknown-linux-gnu",
                "--target-dir",
            ])
            // Separate target directories, so that a user of the small program does not wait for the large one.
            .arg(guest_directory().join("target").join(program.name()))
            .env(
                "RUSTFLAGS",
                "-C target-feature=+crt-static -C strip=debuginfo",
            )
            .env_remove("CARGO_ENCODED_RUSTFLAGS");
        command
    })
}

/// Returns a command that builds `packages`. It has no variables that `cargo test` sets for a package: build scripts such as that of ring
/// run again when these change, so the next build would compile most crates again.
fn cargo(packages: &[&str]) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    for (name, _) in std::env::vars_os() {
        let of_package = ["CARGO_PKG_", "CARGO_MANIFEST_"]
            .iter()
            .any(|start| name.as_encoded_bytes().starts_with(start.as_bytes()));
        if of_package || name == "OUT_DIR" {
            command.env_remove(name);
        }
    }
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

/// Runs cargo and returns the executable of this name from its messages.
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
