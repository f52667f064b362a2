//! Starts a daemon and QEMU for one guest, waits for their ends, and cleans up.

use super::agent_port::{AgentPort, accept};
use super::console::Console;
use super::migration::Migrations;
use super::network::Tap;
use super::registry::{Claim, Phase, Registry, RuntimeFolder, State};
use super::watcher::Watcher;
use crate::interrupt::interrupted;
use crate::process::{Process, wait_until};
use anyhow::{Context, Result, bail};
use control::Client;
use rustix::process::Signal;
use std::fs::File;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Time limit for the start of QEMU or a daemon, which takes milliseconds on an idle machine.
pub(super) const START_LIMIT: Duration = Duration::from_secs(60);
/// Time limits for their ends. QEMU ends immediately, a daemon after flushing its disks.
const QEMU_END_LIMIT: Duration = Duration::from_secs(5);
const DAEMON_END_LIMIT: Duration = Duration::from_secs(30);
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// A program with its arguments.
#[derive(Clone, Debug)]
pub struct Program {
    /// Path of the program.
    pub path: PathBuf,
    /// Arguments.
    pub arguments: Vec<String>,
}

/// A daemon for one guest.
#[derive(Clone, Debug)]
pub struct Daemon {
    /// `lunette serve` with the guest's disks.
    pub program: Program,
    /// Sockets that it creates.
    pub sockets: Vec<PathBuf>,
}

/// Expectation about a guest's system.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Readiness {
    /// The agent greets within this time.
    Agent(Duration),
    /// No expectation, because the user provides the system.
    Nothing,
}

/// Programs and settings of a guest. Paths in the arguments are below the guest's folder ([`Registry::runtime_folder`]).
#[derive(Clone, Debug)]
pub struct Recipe {
    /// Initial state.
    pub state: State,
    /// Daemon of the guest, if it has its own.
    pub daemon: Option<Daemon>,
    /// Further programs for QEMU, with the sockets that they create.
    pub helpers: Vec<Daemon>,
    /// Tap with descriptors in QEMU's arguments.
    pub tap: Option<Arc<Tap>>,
    /// QEMU, with the ports and the monitor of [`ports`].
    pub qemu: Program,
    /// Expectation about the system.
    pub expect: Readiness,
    /// File for all console output.
    pub serial: Option<PathBuf>,
    /// Hint for an error during the start of the guest.
    pub hint: String,
}

/// Returns QEMU's arguments for the console, the agent's port and the monitors. `serial_bus` contains properties of the agent's
/// virtio-serial device, such as its address.
pub fn ports(runtime_folder: &RuntimeFolder, serial_bus: &str) -> Vec<String> {
    let file = |name: &str| qemu_value(&runtime_folder.file(name));
    let words = [
        "-display",
        "none",
        "-chardev",
        &format!("socket,id=console,path={}", file(CONSOLE_PORT)),
        "-serial",
        "chardev:console",
        "-device",
        &format!("virtio-serial-pci,id=agent-bus{serial_bus}"),
        "-chardev",
        &format!("socket,id=agent,path={}", file(AGENT_PORT)),
        "-device",
        "virtserialport,bus=agent-bus.0,chardev=agent,name=lunette.agent",
        "-qmp",
        &format!("unix:{},server=on,wait=off", file(QMP_SOCKET)),
        "-qmp",
        &format!("unix:{},server=on,wait=off", file(COMMAND_SOCKET)),
        "-chardev",
        &format!(
            "socket,id=monitor,path={},server=on,wait=off",
            file(MONITOR_SOCKET)
        ),
        "-mon",
        "chardev=monitor,mode=readline",
    ];
    words.map(str::to_owned).to_vec()
}

/// Escapes a path for QEMU's option syntax, where a comma is doubled.
pub fn qemu_value(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

/// Client sockets in a guest's folder: agent, console, QEMU's machine protocol and monitor. QEMU serves one client of each of its sockets at a
/// time; a migration and the plug of a disk hold the one for QMP_SOCKET until they have ended.
pub const AGENT_SOCKET: &str = "agent.sock";
/// See [`AGENT_SOCKET`].
pub const CONSOLE_SOCKET: &str = "console.sock";
/// See [`AGENT_SOCKET`].
pub const QMP_SOCKET: &str = "qmp.sock";
/// See [`command_socket`].
pub(super) const COMMAND_SOCKET: &str = "command.sock";
/// See [`AGENT_SOCKET`].
pub const MONITOR_SOCKET: &str = "monitor.sock";
pub(super) const CONSOLE_PORT: &str = "console.port";
pub(super) const AGENT_PORT: &str = "agent.port";

/// Returns the socket of QEMU's machine protocol for single commands, also during a migration. Guests of versions before 0.10 have only
/// [`QMP_SOCKET`].
pub fn command_socket(folder: &RuntimeFolder) -> PathBuf {
    let socket = folder.file(COMMAND_SOCKET);
    match socket.exists() {
        true => socket,
        false => folder.file(QMP_SOCKET),
    }
}

/// A guest that is starting, running or stopping.
pub struct Supervisor {
    pub(super) recipe: Recipe,
    // Dropped in this order; each drop ends its processes.
    pub(super) qemu: Option<Process>,
    helpers: Vec<Process>,
    pub(super) daemon: Option<Process>,
    pub(super) console: Console,
    pub(super) agent: Option<AgentPort>,
    pub(super) state: State,
    claim: Option<Claim>,
    watcher: Option<Watcher>,
    pub(super) migrations: Migrations,
}

/// End of a guest.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestEnd {
    /// The guest powered off.
    PoweredOff,
    /// The supervisor was interrupted.
    Interrupted,
}

impl Supervisor {
    /// Claims the guest's name. `watch` is the command line of this program that calls [`super::watch_parent`].
    pub fn claim(registry: &Registry, recipe: Recipe, watch: Command) -> Result<Supervisor> {
        let serial = recipe.serial.as_ref().map(|path| {
            let file = File::options().create(true).append(true).open(path);
            file.with_context(|| format!("cannot write to {}", path.display()))
        });
        let serial = serial.transpose()?;
        let watcher = Watcher::start(watch)?;
        let mut state = recipe.state.clone();
        state.supervisor = std::process::id();
        state.group = watcher.group();
        let claimed = registry.claim(&state.name, watcher.group(), &state);
        let claim = match claimed {
            Ok(claim) => claim,
            Err(error) => {
                watcher.finish().context(error.to_string())?;
                return Err(error);
            }
        };
        Ok(Supervisor {
            recipe,
            qemu: None,
            helpers: Vec::new(),
            daemon: None,
            console: Console::new(serial),
            agent: None,
            state,
            claim: Some(claim),
            watcher: Some(watcher),
            migrations: Migrations::default(),
        })
    }

    /// Returns the watcher, to register further clean-up.
    pub fn watcher(&mut self) -> Result<&mut Watcher> {
        self.watcher.as_mut().context("the guest has ended")
    }

    /// Returns the console's socket, which exists as long as this supervisor.
    pub fn console_socket(&self) -> Result<PathBuf> {
        Ok(self.runtime_folder()?.file(CONSOLE_SOCKET))
    }

    /// Starts the helpers, the daemon and QEMU. The guest is booting on return.
    pub fn start(&mut self) -> Result<()> {
        let runtime_folder = self.runtime_folder()?.clone();
        // Ports are bound before QEMU starts, so that no output is lost. Client sockets are created when they are served.
        let console_port =
            UnixListener::bind(runtime_folder.file(CONSOLE_PORT)).with_context(|| {
                format!(
                    "cannot create a socket in {}",
                    runtime_folder.folder().display()
                )
            })?;
        let agent_port = UnixListener::bind(runtime_folder.file(AGENT_PORT))?;
        self.console
            .serve(UnixListener::bind(runtime_folder.file(CONSOLE_SOCKET))?);
        if let Some(daemon) = self.recipe.daemon.clone() {
            self.start_daemon(&runtime_folder, &daemon)?;
        }
        for (index, helper) in self.recipe.helpers.clone().iter().enumerate() {
            let log = runtime_folder.file(&format!("helper{index}.log"));
            let mut process = self.spawn("a helper of QEMU", &helper.program, &log)?;
            wait_for(&helper.sockets, &mut process, || true)?;
            self.helpers.push(process);
        }
        self.migrations.has_tap = self.recipe.tap.is_some();
        self.migrations.listen(&runtime_folder)?;
        // QEMU alone owns the tap from now on, so that it ends with QEMU.
        let tap = self.recipe.tap.take();
        if let Some(tap) = &tap {
            tap.set_inherited(true)?;
        }
        let qemu = self.spawn("QEMU", &self.recipe.qemu, &runtime_folder.file("qemu.log"))?;
        drop(tap);
        self.state.qemu = Some(qemu.id());
        let qemu = self.qemu.insert(qemu);
        let console = accept(&console_port, START_LIMIT, || qemu.check_running())?;
        let agent = accept(&agent_port, START_LIMIT, || qemu.check_running())?;
        self.console.connect(console)?;
        let agent = self.agent.insert(AgentPort::start(agent)?);
        agent.serve(UnixListener::bind(runtime_folder.file(AGENT_SOCKET))?);
        self.enter(match self.recipe.expect {
            Readiness::Agent(_) => Phase::Booting,
            Readiness::Nothing => Phase::Running,
        })
    }

    /// Waits until the guest meets the expectation.
    pub fn wait_until_up(&mut self) -> Result<()> {
        let Readiness::Agent(limit) = self.recipe.expect else {
            return Ok(());
        };
        let end = Instant::now() + limit;
        loop {
            if let Some(agent) = &self.agent
                && agent.wait(POLL_INTERVAL) > 0
            {
                self.state.boots = agent.boots();
                return self.enter(Phase::Running);
            }
            self.check_running()
                .with_context(|| self.console.tail(&self.state.name))?;
            if interrupted() {
                bail!("interrupted during the guest's boot");
            }
            if Instant::now() >= end {
                bail!(
                    "guest {} did not boot within {} s, {}\n{}\nhint: {}",
                    self.state.name,
                    limit.as_secs(),
                    self.state.accelerator,
                    self.console.tail(&self.state.name),
                    self.recipe.hint
                );
            }
        }
    }

    /// Waits for the guest's end.
    pub fn wait_for_end(&mut self) -> Result<GuestEnd> {
        loop {
            if interrupted() {
                return Ok(GuestEnd::Interrupted);
            }
            if let Some(qemu) = &mut self.qemu
                && let Some(status) = qemu.ended()?
            {
                if !status.success() {
                    bail!("QEMU has ended, {status}\n{}", qemu.log_tail());
                }
                return Ok(GuestEnd::PoweredOff);
            }
            if let Some(daemon) = &mut self.daemon {
                // The disks of the guest would hang from now on, so the guest is ended with a reason.
                daemon
                    .check_running()
                    .context("the guest's daemon has ended")?;
            }
            self.serve_migration();
            let boots = self
                .agent
                .as_ref()
                .map_or(0, |agent| agent.wait(POLL_INTERVAL));
            if boots != self.state.boots {
                self.state.boots = boots;
                self.save()?;
            }
        }
    }

    /// Returns the end of the console output.
    pub fn console_tail(&self) -> String {
        self.console.tail(&self.state.name)
    }

    /// Disconnects all watchers of the console.
    pub fn close_console(&self) {
        self.console.close();
    }

    /// Ends all processes and removes the folder.
    pub fn stop(mut self) -> Result<()> {
        self.end()
    }

    fn end(&mut self) -> Result<()> {
        let Some(claim) = self.claim.take() else {
            return Ok(());
        };
        self.state = claim.runtime_folder.state().unwrap_or(self.state.clone());
        self.state.phase = Phase::Stopping;
        // A full disk must not prevent the rest of the clean-up.
        claim.runtime_folder.set_state(&self.state).unwrap_or(());
        if let Some(qemu) = self.qemu.take() {
            end_process(qemu, QEMU_END_LIMIT);
        }
        if let Some(agent) = self.agent.take() {
            agent.close("the guest has ended");
        }
        self.helpers.clear();
        if let Some(daemon) = self.daemon.take() {
            end_process(daemon, DAEMON_END_LIMIT);
        }
        self.console.close();
        // The name is taken while the folder exists. The watcher removes it, and the objects in other daemons.
        match self.watcher.take() {
            Some(watcher) => watcher.finish(),
            None => Ok(()),
        }
    }

    fn start_daemon(&mut self, runtime_folder: &RuntimeFolder, daemon: &Daemon) -> Result<()> {
        let mut process = self.spawn(
            "lunette serve",
            &daemon.program,
            &runtime_folder.file("daemon.log"),
        )?;
        self.state.daemon = Some(process.id());
        self.save()?;
        let control = self
            .state
            .control
            .clone()
            .context("the guest's daemon has no control socket")?;
        let client = Client::new(&control);
        wait_for(&daemon.sockets, &mut process, || {
            client.text("/v1/version").is_ok()
        })?;
        self.daemon = Some(process);
        Ok(())
    }

    /// Ends the guest's own daemon, which the guest no longer uses.
    pub(super) fn end_daemon(&mut self) -> Result<()> {
        if let Some(daemon) = self.daemon.take() {
            end_process(daemon, DAEMON_END_LIMIT);
        }
        self.state.daemon = None;
        self.save()
    }

    pub(super) fn spawn(&self, name: &str, program: &Program, log: &Path) -> Result<Process> {
        let mut command = Command::new(&program.path);
        command.args(&program.arguments);
        Process::start_in_group(name, command, log, self.state.group)
    }

    fn check_running(&mut self) -> Result<()> {
        let processes = self.qemu.iter_mut().chain(&mut self.daemon);
        processes.into_iter().try_for_each(Process::check_running)
    }

    fn enter(&mut self, phase: Phase) -> Result<()> {
        self.state.phase = phase;
        self.save()
    }

    /// Stores the state. Fields that other processes change are preserved.
    pub(super) fn save(&mut self) -> Result<()> {
        let runtime_folder = self.runtime_folder()?.clone();
        runtime_folder.change(|state| {
            let (plugs, plugged) = (state.plugs, std::mem::take(&mut state.plugged));
            *state = self.state.clone();
            (state.plugs, state.plugged) = (plugs, plugged);
        })
    }

    /// Returns the guest's folder.
    pub fn runtime_folder(&self) -> Result<&RuntimeFolder> {
        let claim = self.claim.as_ref();
        Ok(&claim.context("the guest has ended")?.runtime_folder)
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        // The error that led here is the one to report.
        self.end().unwrap_or(());
    }
}

/// Waits until the sockets exist and `is_ready` returns true.
fn wait_for(sockets: &[PathBuf], process: &mut Process, is_ready: impl Fn() -> bool) -> Result<()> {
    let ready = wait_until(START_LIMIT, || match process.check_running() {
        Err(error) => Some(Err(error)),
        Ok(()) => (sockets.iter().all(|socket| socket.exists()) && is_ready()).then_some(Ok(())),
    });
    ready.unwrap_or_else(|| {
        if interrupted() {
            bail!("interrupted while {} was started", process.name());
        }
        bail!(
            "{} is not ready after {START_LIMIT:?}\n{}",
            process.name(),
            process.log_tail()
        )
    })
}

/// Sends SIGTERM, then kills the process after the limit.
fn end_process(mut process: Process, limit: Duration) {
    if process.signal(Signal::TERM).is_ok() {
        let end = Instant::now() + limit;
        while matches!(process.ended(), Ok(None)) && Instant::now() < end {
            std::thread::sleep(POLL_INTERVAL);
        }
    }
    // The drop kills the process if it still runs.
}
