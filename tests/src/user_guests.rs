//! `lunette vm` as a user runs it: installed programs, and a guest folder that belongs to this test only.

use crate::Scratch;
use anyhow::{Context, Result, bail, ensure};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;
use vm::running::{Registry, State, terminate};
use vm::{GuestProgram, Profile, guest_program, lunette_program, tool, wait_until};

/// Time limit for processes to end and folders to be removed. Usually this takes moments, but the machine may be busy.
const GONE_LIMIT: Duration = Duration::from_secs(60);

/// Installed programs and the folder that holds all guest folders. All its processes are killed on drop.
pub struct UserGuests {
    scratch: Scratch,
    programs: PathBuf,
    path: PathBuf,
}

impl UserGuests {
    /// Installs the programs like `make install`, without wrappers.
    pub fn new() -> Result<UserGuests> {
        let scratch = Scratch::new()?;
        let programs = scratch.file("bin");
        let libexec = scratch.file("libexec/lunette");
        let path = scratch.file("path");
        for folder in [&programs, &libexec, &path] {
            std::fs::create_dir_all(folder)?;
        }
        std::fs::DirBuilder::new()
            .mode(0o700)
            .create(scratch.socket("run"))?;
        let built = lunette_program(Profile::Dev)?;
        let lab = built.with_file_name("lunette-lab");
        link(&lab, &programs.join("lunette-lab"))?;
        link(&built, &programs.join("lunette"))?;
        let agent = GuestProgram::Agent;
        link(&guest_program(agent)?, &libexec.join(agent.name()))?;
        Ok(UserGuests {
            scratch,
            programs,
            path,
        })
    }

    /// Adds the load generator for guests, which takes a while to build.
    pub fn with_bench(self) -> Result<UserGuests> {
        let bench = GuestProgram::Bench;
        let place = self.scratch.file("libexec/lunette").join(bench.name());
        link(&guest_program(bench)?, &place)?;
        Ok(self)
    }

    /// Returns the path of a file in this test's folder.
    pub fn file(&self, name: &str) -> PathBuf {
        self.scratch.file(name)
    }

    /// Replaces `lunette` by a shell script. `$REAL` is the path of the program in it.
    pub fn wrap_daemon(&self, script: &str) -> Result<()> {
        let place = self.programs.join("lunette");
        std::fs::remove_file(&place)?;
        write_script(&place, &lunette_program(Profile::Dev)?, script)
    }

    /// Replaces QEMU by a shell script. `$REAL` is the path of the program in it.
    pub fn wrap_qemu(&self, script: &str) -> Result<()> {
        let name = "qemu-system-x86_64";
        write_script(&self.path.join(name), &tool(name)?, script)
    }

    /// Returns the command `lunette vm WORDS`.
    pub fn command(&self, words: &[&str]) -> Command {
        let search = std::env::var("PATH").unwrap_or_default();
        let runtime_folder = self.scratch.socket("run");
        // Daemons that `lunette vm` starts may create sockets in the folders of guests.
        let mut allowed = std::env::var_os("LUNETTE_SANDBOX_PATHS").unwrap_or_default();
        if !allowed.is_empty() {
            allowed.push(":");
        }
        allowed.push(&runtime_folder);
        let mut command = Command::new(self.programs.join("lunette-lab"));
        command
            .arg("vm")
            .args(words)
            .env("XDG_RUNTIME_DIR", &runtime_folder)
            .env("LUNETTE_SANDBOX_PATHS", allowed)
            .env("LUNETTE_GUEST_DIR", vm::guest_directory())
            .env("PATH", format!("{}:{search}", self.path.display()))
            .stdin(Stdio::null());
        command
    }

    /// Runs `lunette vm WORDS` with any exit code.
    pub fn vm(&self, words: &[&str]) -> Result<Output> {
        Ok(self.command(words).output()?)
    }

    /// Runs `lunette vm WORDS`, which must succeed, and returns its standard output.
    pub fn ok(&self, words: &[&str]) -> Result<String> {
        let output = self.vm(words)?;
        ensure!(
            output.status.success(),
            "lunette vm {}: {}\n{}",
            words.join(" "),
            output.status,
            String::from_utf8_lossy(&output.stderr)
        );
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// Runs `lunette vm WORDS`, which must fail, and returns its standard error.
    pub fn refused(&self, words: &[&str]) -> Result<String> {
        let output = self.vm(words)?;
        ensure!(
            !output.status.success(),
            "lunette vm {} succeeded",
            words.join(" ")
        );
        Ok(String::from_utf8_lossy(&output.stderr).into_owned())
    }

    /// Starts `lunette vm WORDS` in the background and discards its output.
    pub fn start(&self, words: &[&str]) -> Result<Child> {
        let mut command = self.command(words);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        Ok(child?)
    }

    /// Runs `lunette vm WORDS` with `input` on standard input.
    pub fn with_input(&self, words: &[&str], input: &[u8]) -> Result<Output> {
        let mut command = self.command(words);
        command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn()?;
        let mut stdin = child.stdin.take().context("no pipe")?;
        let input = input.to_vec();
        let writer = std::thread::spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output()?;
        writer
            .join()
            .map_err(|_| anyhow::anyhow!("the writer panicked"))??;
        Ok(output)
    }

    /// Returns the recorded state of a guest, if the guest exists.
    pub fn state(&self, name: &str) -> Option<State> {
        let registry = Registry::at(&self.root()).ok()?;
        registry.runtime_folder(name).ok()?.state().ok()
    }

    /// Waits until `wanted` returns a value for a guest's state.
    pub fn wait_for<T>(
        &self,
        name: &str,
        mut wanted: impl FnMut(&State) -> Option<T>,
    ) -> Result<T> {
        let found = wait_until(GONE_LIMIT, || wanted(&self.state(name)?));
        found.with_context(|| format!("guest {name} has not come so far: {:?}", self.state(name)))
    }

    /// A guest's folder.
    pub fn folder(&self, name: &str) -> PathBuf {
        self.root().join(name)
    }

    /// Waits until all processes of guests ended and all guest folders were removed.
    pub fn nothing_is_left(&self) -> Result<()> {
        let gone = wait_until(GONE_LIMIT, || {
            (self.processes().is_empty() && self.folders().is_empty()).then_some(())
        });
        if gone.is_none() {
            bail!(
                "left: processes {:?}, folders {:?}",
                self.processes(),
                self.folders()
            );
        }
        Ok(())
    }

    /// Returns the option that lets a daemon with the sandbox create sockets in the folders of guests.
    pub fn sandbox_path(&self) -> String {
        format!("--sandbox-path={}", self.scratch.socket("run").display())
    }

    fn root(&self) -> PathBuf {
        self.scratch.socket("run/lunette/vm")
    }

    /// Returns the names in the folder that holds all guest folders.
    pub fn folders(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.root())
            .into_iter()
            .flatten()
            .flatten();
        entries
            .map(|entry| entry.file_name().to_string_lossy().into_owned())
            .collect()
    }

    /// Returns the processes with this guest folder in their environment, without zombies. All processes started here inherit the
    /// environment.
    fn processes(&self) -> Vec<(u32, String)> {
        let place = format!("XDG_RUNTIME_DIR={}", self.scratch.socket("run").display());
        let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
        let numbers = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let found = numbers.filter_map(|pid| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).ok()?;
            let words = environment.split(|byte| *byte == 0);
            words
                .into_iter()
                .any(|word| word == place.as_bytes())
                .then_some(())?;
            let words = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
            let words = String::from_utf8_lossy(&words).replace('\0', " ");
            (!words.is_empty()).then_some((pid, words))
        });
        found.collect()
    }
}

impl Drop for UserGuests {
    fn drop(&mut self) {
        for (pid, _) in self.processes() {
            terminate(pid, true);
        }
    }
}

/// Kills a child with SIGKILL and waits for it.
pub fn kill_hard(child: &mut Child) -> Result<()> {
    child.kill()?;
    child.wait()?;
    Ok(())
}

fn link(from: &Path, to: &Path) -> Result<()> {
    if std::fs::hard_link(from, to).is_err() {
        std::fs::copy(from, to).with_context(|| format!("cannot copy {}", from.display()))?;
    }
    Ok(())
}

fn write_script(place: &Path, real: &Path, script: &str) -> Result<()> {
    let text = format!("#!/bin/sh\nREAL={}\n{script}\n", real.display());
    std::fs::write(place, text)?;
    std::fs::set_permissions(place, std::fs::Permissions::from_mode(0o755))?;
    Ok(())
}
