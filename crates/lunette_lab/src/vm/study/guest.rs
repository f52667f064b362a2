//! A guest of a study: start, end, and the names of its disks.

use std::io::Write;
use std::path::PathBuf;
use std::process::Command;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;
use vm::Process;
use vm::running::{AGENT_SOCKET, ExecInput, Phase, QMP_SOCKET, Registry, RuntimeFolder, State};

use super::{Files, Setup};
use crate::vm::bench::{Load, LoadEvent, generator, in_guest};
use crate::vm::copy::run_signalled_script;

const BOOT_LIMIT: Duration = Duration::from_secs(240);
const END_LIMIT: Duration = Duration::from_secs(20);

/// Maximum output of a script in bytes: enough for a trace of all CPUs, and a limit for the host's
/// memory.
const ANSWER_MAX: usize = 256 << 20;

/// Output with a size limit.
struct LimitedOutput(Vec<u8>);

impl Write for LimitedOutput {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if bytes.len() > ANSWER_MAX - self.0.len() {
            let text = format!("the guest's response exceeds {ANSWER_MAX} bytes");
            return Err(std::io::Error::other(text));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

pub struct StudyGuest {
    process: Process,
    place: RuntimeFolder,
    state: State,
    /// QEMU's version.
    qemu: String,
    /// Disks in the guest, for each way except the host.
    disks: Vec<Vec<String>>,
}

/// Output of `lunette vm plan` for a setup.
pub struct Planned {
    words: Vec<String>,
    plan: Value,
}

impl Planned {
    /// Plans the guest `name`.
    pub fn new(setup: &Setup, name: &str, more: &[String]) -> Result<Planned> {
        let ways = setup.ways.iter().filter_map(|way| way.words.clone());
        let mut words: Vec<String> = ways.collect();
        words.extend(more.iter().cloned());
        words.extend(["--name".to_owned(), name.to_owned()]);
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["vm", "plan", "--format", "json"])
            .args(&words);
        let planned = command.output().context("cannot plan a guest")?;
        let wrong = String::from_utf8_lossy(&planned.stderr);
        ensure!(planned.status.success(), "{}", wrong.trim());
        let plan = serde_json::from_slice(&planned.stdout).context("the plan is not JSON")?;
        Ok(Planned { words, plan })
    }

    /// Files of its disks, with their sizes.
    pub fn files(&self) -> Vec<(PathBuf, u64)> {
        let disks = self.plan["disks"].as_array().into_iter().flatten();
        let file = |disk: &Value| Some((disk["path"].as_str()?.into(), disk["size"].as_u64()?));
        disks.filter_map(file).collect()
    }

    /// Starts the guest and waits until it accepts commands.
    pub fn start(&self, setup: &Setup, name: &str, log: &std::path::Path) -> Result<StudyGuest> {
        let mut command = Command::new(std::env::current_exe()?);
        command
            .args(["vm", "run"])
            .args(&self.words)
            .args(&setup.options);
        let mut process = Process::start(name, &command, log)?;
        let registry = Registry::open()?;
        let is_up = || -> Option<Result<(RuntimeFolder, State)>> {
            if let Err(error) = process.check_running() {
                return Some(Err(error));
            }
            let found = registry.find(name).ok()?;
            (found.1.phase == Phase::Running).then_some(Ok(found))
        };
        let up = vm::wait_until(BOOT_LIMIT, is_up);
        let (place, state) = match up {
            Some(found) => found?,
            None if vm::interrupted() => bail!("interrupted"),
            None => bail!("guest {name} did not boot: {}", process.log_tail()),
        };
        let mut guest = StudyGuest {
            process,
            place,
            state,
            qemu: self.plan["qemu_version"]
                .as_str()
                .unwrap_or_default()
                .to_owned(),
            disks: Vec::new(),
        };
        guest.find_disks(setup, &self.plan)?;
        Ok(guest)
    }
}

impl StudyGuest {
    /// The disks of a plan are in the order of its words.
    fn find_disks(&mut self, setup: &Setup, plan: &Value) -> Result<()> {
        let mut planned = plan["disks"].as_array().into_iter().flatten();
        for way in setup.ways.iter().filter(|way| way.words.is_some()) {
            let mut names = Vec::new();
            for _ in 0..way.disks {
                let disk = planned
                    .next()
                    .context("the plan has fewer disks than its words")?;
                let guest = &disk["guest"];
                names.push(match guest["find"].as_str() {
                    Some(find) => format!("/dev/{}", self.ask(find)?),
                    None => guest["device"]
                        .as_str()
                        .context("a disk has no name")?
                        .to_owned(),
                });
            }
            self.disks.push(names);
        }
        Ok(())
    }

    pub fn script(&self, script: &str) -> Result<String> {
        self.signalled_script(script, None)
    }

    /// Same as [`StudyGuest::script`], with the signals that its process receives.
    pub fn signalled_script(&self, script: &str, signals: Option<Receiver<u8>>) -> Result<String> {
        let mut output = LimitedOutput(Vec::new());
        let socket = self.place.file(AGENT_SOCKET);
        run_signalled_script(
            &socket,
            script,
            &[],
            ExecInput::Nothing,
            &mut output,
            signals,
        )?;
        Ok(String::from_utf8_lossy(&output.0).into_owned())
    }

    pub fn control(&self) -> Option<&std::path::Path> {
        self.state.control.as_deref()
    }

    fn ask(&self, script: &str) -> Result<String> {
        let text = self.script(script)?.trim().to_owned();
        let is_name = !text.is_empty() && text.chars().all(|c| c.is_ascii_alphanumeric());
        ensure!(
            is_name,
            "unexpected response {text:?} of the guest to {script}"
        );
        Ok(text)
    }

    /// Disks of the guest's ways, in their order.
    pub fn disks(&self) -> &[Vec<String>] {
        &self.disks
    }

    /// `KVM` or `TCG`.
    pub fn accelerator(&self) -> &str {
        &self.state.accelerator
    }

    /// Describes the guest: accelerator, QEMU's version and kernel.
    pub fn describe(&self) -> Result<String> {
        let kernel = self.script("cat /proc/sys/kernel/osrelease")?;
        let accelerator = match self.accelerator() {
            "TCG" => "TCG (emulated)",
            other => other,
        };
        let (qemu, kernel) = (&self.qemu, kernel.trim());
        Ok(format!("{accelerator}, QEMU {qemu}, guest Linux {kernel}"))
    }

    /// Path of the load generator in the guest.
    pub fn generator(&self) -> Result<String> {
        generator(&self.place.file(AGENT_SOCKET))
    }

    /// QMP socket of QEMU.
    pub fn monitor(&self) -> PathBuf {
        self.place.file(QMP_SOCKET)
    }

    /// Processes of QEMU and the daemon.
    pub fn processes(&self) -> Vec<u32> {
        let processes = [self.state.qemu, self.state.daemon];
        processes.into_iter().flatten().collect()
    }

    /// Creates an ext4 file system on a disk and runs a preset on its files.
    pub fn run_files(
        &self,
        disk: &str,
        files: &Files,
        milliseconds: u64,
        size: u64,
    ) -> Result<Value> {
        const FOLDER: &str = "/tmp/study";
        let barrier = u8::from(files.barriers);
        // Disables lazy initialisation, which would write during the measurement.
        let make = format!(
            "make=mke2fs; [ ! -x /tools/mke2fs ] || make=/tools/mke2fs\n\
             mkdir -p {FOLDER}; ! mountpoint -q {FOLDER} || umount {FOLDER}\n\
             $make -q -F -t ext4 -E lazy_itable_init=0,lazy_journal_init=0 {disk} && mount -t ext4 -o barrier={barrier} {disk} {FOLDER}"
        );
        self.script(&make)
            .context("no ext4 file system in the guest")?;
        let load = Load::files(&files.words(FOLDER, milliseconds, size));
        let measured = self.measured(&load, "");
        self.script(&format!("umount {FOLDER}"))?;
        measured
    }

    /// Runs the text of a job file. Returns the generator's result with the measurements around it.
    pub fn run(&self, job: &str) -> Result<Value> {
        self.measured(&Load::plain(), job)
    }

    /// Same as [`StudyGuest::run`]. The observers receive the events of the load.
    pub fn run_announced(&self, job: &str, observers: Vec<Sender<LoadEvent>>) -> Result<Value> {
        self.measured(&Load::announced(observers), job)
    }

    fn measured(&self, load: &Load, job: &str) -> Result<Value> {
        let measured = in_guest(load, &self.place, &self.state, job)?;
        // A partial measurement is no result of a study.
        ensure!(!measured.is_interrupted(), "interrupted");
        ensure!(
            measured.errors() == 0,
            "jobs ended with errors: {}",
            measured.json()
        );
        Ok(measured.json().clone())
    }

    /// Ends the guest and its daemon.
    pub fn end(mut self) -> Result<()> {
        self.process.signal(rustix::process::Signal::TERM)?;
        // Also waits after an interruption, so that the guest removes its files.
        let limit = Instant::now() + END_LIMIT;
        while self.process.ended()?.is_none() {
            if Instant::now() > limit {
                return self.process.kill();
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        Ok(())
    }
}
