//! Live migration of a guest to a second QEMU of its supervisor: `lunette vm migrate`.
//!
//! The daemon, or another one with the same disks, gets a second export of each disk for the new QEMU, which starts paused. When the old QEMU
//! reports that the migration is complete, the supervisor continues the guest in the new one, kills the old one and removes the old exports.
//! Until then the guest can run in the old QEMU only: if the migration fails or is cancelled, the new QEMU and exports are removed and the
//! guest continues. Rejected: a destination that starts the guest itself. It does so before it confirms this to the old QEMU, and a migration
//! that fails between the two has two guests.

use super::agent_port::accept;
use super::other_daemon;
use super::registry::RuntimeFolder;
use super::supervisor::{
    AGENT_PORT, COMMAND_SOCKET, CONSOLE_PORT, MONITOR_SOCKET, Program, QMP_SOCKET, START_LIMIT,
    Supervisor, qemu_value,
};
use crate::interrupt::interrupted;
use crate::process::{Process, wait_until};
use crate::qmp::Qmp;
use anyhow::{Context, Error, Result, bail, ensure};
use control::statistics::Statistics;
use control::{Client, ClientError, Method, escape};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Socket in a guest's folder. Each connection makes one migration: a line with [`MigrationOptions`], then lines with messages.
const MIGRATE_SOCKET: &str = "migrate.sock";
/// Sockets of the new QEMU until the switch.
const NEXT_QMP: &str = "next-qmp.sock";
const NEXT_COMMAND: &str = "next-command.sock";
const NEXT_MONITOR: &str = "next-monitor.sock";
/// Socket between the two QEMUs.
const STREAM_SOCKET: &str = "stream.sock";
/// Suffix of the exports and sockets of every second QEMU.
const SUFFIX: &str = ".2";
/// Time limit for a request to a daemon before the copy. During the switch it is [`REQUEST_LIMIT`], because the guest is stopped.
const CHECK_LIMIT: Duration = Duration::from_secs(10);
/// Time limit for a request on the socket.
const REQUEST_LIMIT: Duration = Duration::from_secs(2);
const PROGRESS_INTERVAL: Duration = Duration::from_millis(100);
/// Capability and state of a source that stops the guest and waits before the switch.
const PAUSE: &str = "pause-before-switchover";
const PAUSED: &str = "pre-switchover";
/// Capability of both sides: the destination confirms that it has loaded the guest. Without it, the migration is complete when all data are
/// sent, and a destination that fails to load them loses the guest.
const RETURN_PATH: &str = "return-path";
/// Capability of the source: it sends an event when the migration has another state. Between two of them the guest is stopped.
const EVENTS: &str = "events";
/// Longest time limit of a migration in seconds.
pub const SECONDS_MAX: u64 = 86_400;
/// Bandwidth in bytes per second: no limit in practice.
const BANDWIDTH: u64 = 4 << 30;

/// Options of a migration.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct MigrationOptions {
    /// Downtime in milliseconds that QEMU may plan.
    pub downtime_ms: u64,
    /// MiB per second that QEMU sends at most.
    #[serde(default)]
    pub bandwidth_mib: Option<u32>,
    /// Time until the migration is cancelled, in seconds, at most [`SECONDS_MAX`].
    pub seconds: u64,
    /// Control socket of the daemon that serves the guest afterwards. `None`: the present daemon.
    pub to_daemon: Option<PathBuf>,
}

impl MigrationOptions {
    /// Sets the options in the source, which waits before the switch, with a stopped guest.
    fn set(&self, source: &mut Qmp) -> Result<()> {
        let limit = self.bandwidth_mib;
        let bandwidth = limit.map_or(BANDWIDTH, |mib| u64::from(mib) << 20);
        let parameters = json!({ "max-bandwidth": bandwidth, "downtime-limit": self.downtime_ms });
        source.command("migrate-set-parameters", parameters)?;
        let capabilities = [(PAUSE, true), (RETURN_PATH, true), (EVENTS, true)];
        set_capabilities(source, &capabilities)
    }
}

fn set_capabilities(qemu: &mut Qmp, capabilities: &[(&str, bool)]) -> Result<()> {
    let capabilities = capabilities.iter();
    let all = capabilities.map(|(name, state)| json!({ "capability": name, "state": state }));
    let all: Vec<Value> = all.collect();
    qemu.command("migrate-set-capabilities", json!({ "capabilities": all }))?;
    Ok(())
}

/// Makes the destination wait for the guest at `uri`.
fn wait_for_guest(destination: &mut Qmp, uri: &Value) -> Result<()> {
    set_capabilities(destination, &[(RETURN_PATH, true)])?;
    destination.command("migrate-incoming", uri.clone())?;
    Ok(())
}

/// Progress of a migration.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MigrationProgress {
    /// Memory that was sent, in bytes.
    pub transferred: u64,
    /// Memory to be sent, in bytes.
    pub remaining: u64,
}

/// Stops of an export's virtqueues in the old QEMU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportStops {
    /// Name of the export.
    pub export: String,
    /// Duration of each stop in nanoseconds, ascending.
    pub stops_ns: Vec<u64>,
}

/// A completed migration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Migrated {
    /// Downtime of the guest in milliseconds: as measured by QEMU until the end of the migration, and until the new QEMU has continued it.
    pub downtime_ms: u64,
    /// Duration of the migration as measured by QEMU, in milliseconds.
    pub total_ms: u64,
    /// Memory that was sent, in bytes.
    pub transferred: u64,
    /// Stops of the virtqueues, as measured by the daemon.
    pub queues: Vec<ExportStops>,
}

impl Migrated {
    /// Returns the result of a migration, and the queue stops that the histograms have gained.
    fn new(
        switched: &Switched,
        exports: &[MovedExport],
        before: &Stops,
        after: &Stops,
    ) -> Migrated {
        let queues = exports.iter().map(|export| {
            let name = text(&export.from, "name").to_owned();
            ExportStops {
                stops_ns: new_values(before.get(&name), after.get(&name)),
                export: name,
            }
        });
        let status = &switched.status;
        let number = |value: &Value| value.as_u64().unwrap_or_default();
        let continuing = u64::try_from(switched.continuing.as_millis()).unwrap_or(u64::MAX);
        Migrated {
            downtime_ms: number(&status["downtime"]).saturating_add(continuing),
            total_ms: number(&status["total-time"]),
            transferred: number(&status["ram"]["transferred"]),
            queues: queues.collect(),
        }
    }
}

/// A guest that the new QEMU has.
struct Switched {
    /// Status of the migration in the old QEMU.
    status: Value,
    /// Time from the end of the migration until the new QEMU has continued the guest.
    continuing: Duration,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum MigrationMessage {
    Progress(MigrationProgress),
    Completed(Migrated),
    Failed(String),
}

/// Migrates a guest. The end of this process cancels the migration.
///
/// # Errors
/// If the migration is refused or fails. The guest continues.
pub fn migrate(
    folder: &RuntimeFolder,
    options: &MigrationOptions,
    mut progress: impl FnMut(MigrationProgress),
) -> Result<Migrated> {
    let mut stream = UnixStream::connect(folder.file(MIGRATE_SOCKET)).context(
        "the guest accepts no migrations; hint: start it again with this version of lunette vm run",
    )?;
    writeln!(stream, "{}", json!(options))?;
    for line in BufReader::new(stream).lines() {
        match serde_json::from_str(&line?)? {
            MigrationMessage::Progress(now) => progress(now),
            MigrationMessage::Completed(migrated) => return Ok(migrated),
            MigrationMessage::Failed(reason) => bail!("{reason}"),
        }
    }
    bail!("the guest has ended")
}

fn send(mut stream: &UnixStream, message: &MigrationMessage) -> Result<()> {
    let line = serde_json::to_string(message)?;
    writeln!(stream, "{line}").context("the command that started the migration has ended")
}

/// State of a supervisor for migrations.
#[derive(Debug, Default)]
pub(super) struct Migrations {
    listener: Option<UnixListener>,
    /// QEMU has a tap, whose descriptors cannot be used twice.
    pub has_tap: bool,
    /// Number of attempts.
    count: u32,
    /// Exports of daemons that did not respond when they were to be removed: control socket and export.
    left_over: Vec<(PathBuf, Value)>,
}

impl Migrations {
    pub fn listen(&mut self, folder: &RuntimeFolder) -> Result<()> {
        let listener = UnixListener::bind(folder.file(MIGRATE_SOCKET))?;
        listener.set_nonblocking(true)?;
        self.listener = Some(listener);
        Ok(())
    }
}

/// An export of the old QEMU, and its copy for the new one.
struct MovedExport {
    from: Value,
    to: Value,
}

impl MovedExport {
    fn new(from: Value) -> Result<MovedExport> {
        let mut to = from.clone();
        for key in ["name", "socket"] {
            let text = from[key].as_str().context("unexpected export")?;
            to[key] = json!(match text.strip_suffix(SUFFIX) {
                Some(text) => text.to_owned(),
                None => format!("{text}{SUFFIX}"),
            });
        }
        if let Some(keys) = to.as_object_mut() {
            keys.remove("status");
        }
        // The guest keeps its reservations.
        if from["kind"] == "vhost-scsi" && from["nexus"].is_null() {
            to["nexus"] = from["name"].clone();
        }
        Ok(MovedExport { from, to })
    }
}

fn text<'a>(export: &'a Value, key: &str) -> &'a str {
    export[key].as_str().unwrap_or_default()
}

fn export_path(export: &Value) -> String {
    format!("/v1/exports/{}", escape(text(export, "name")))
}

/// Returns QEMU's arguments with other paths of sockets.
fn with_sockets(arguments: &[String], sockets: &[(String, String)]) -> Vec<String> {
    let replaced = |field: &str| {
        let mut pairs = sockets.iter();
        let pair = pairs.find_map(|(from, to)| {
            let key = field.strip_suffix(from.as_str())?;
            matches!(key, "path=" | "unix:").then(|| format!("{key}{to}"))
        });
        pair.unwrap_or_else(|| field.to_owned())
    };
    let words = arguments.iter();
    let words = words.map(|word| word.split(',').map(replaced).collect::<Vec<_>>().join(","));
    words.collect()
}

/// Returns the arguments of a QEMU with other monitors that waits for a guest and does not run it before `cont`.
fn incoming_arguments(arguments: &[String], monitors: &[(String, String)]) -> Vec<String> {
    let mut arguments = with_sockets(arguments, monitors);
    arguments.extend(["-incoming", "defer", "-S"].map(str::to_owned));
    arguments
}

impl Supervisor {
    /// Makes the migration that a client requests, if there is one.
    pub(super) fn serve_migration(&mut self) {
        let accepted = self.migrations.listener.as_ref().map(UnixListener::accept);
        let Some(Ok((stream, _))) = accepted else {
            return;
        };
        let message = match self.migrate_for(&stream) {
            Ok(migrated) => MigrationMessage::Completed(migrated),
            Err(error) => MigrationMessage::Failed(format!("{error:#}")),
        };
        // The client may have ended.
        send(&stream, &message).unwrap_or(());
    }

    fn migrate_for(&mut self, stream: &UnixStream) -> Result<Migrated> {
        stream.set_nonblocking(false)?;
        stream.set_read_timeout(Some(REQUEST_LIMIT))?;
        stream.set_write_timeout(Some(REQUEST_LIMIT))?;
        let mut line = String::new();
        BufReader::new(stream).read_line(&mut line)?;
        let options: MigrationOptions = serde_json::from_str(&line)?;
        let control = self.check_movable()?;
        let to_daemon = options.to_daemon.as_ref();
        let to_daemon =
            to_daemon.filter(|to| to.canonicalize().ok() != control.canonicalize().ok());
        let to = to_daemon.unwrap_or(&control);
        self.remove_left_over();
        let exports = self.exports(&control, to)?;
        let check_disks = |patience| {
            let names: Vec<&str> = exports.iter().map(|one| text(&one.from, "name")).collect();
            match to_daemon {
                Some(to) => other_daemon::check(&control, to, &names, patience),
                None => other_daemon::check_within(&control, &names, patience),
            }
        };
        check_disks(CHECK_LIMIT)?;
        let check_again = || check_disks(REQUEST_LIMIT);
        let client = Client::new(&control);
        let before = queue_stops(&client)?;
        for (index, export) in exports.iter().enumerate() {
            if let Err(error) = self.add_export(to, &export.to) {
                let removed = self.remove_exports(to, exports[..index].iter().map(|one| &one.to));
                return Err(match removed {
                    Ok(()) => error,
                    Err(kept) => error.context(kept),
                });
            }
        }
        let qemu = self.state.qemu;
        let check = |patience| match to_daemon {
            Some(other) => check_connected(&Client::new(other).patient(patience), &exports),
            None => Ok(()),
        };
        let checks = Checks {
            connected: &check,
            // A guest that was running may have reserved a disk or disabled its write cache since the first check.
            disks: &check_again,
        };
        let moved = self.move_guest(&exports, &options, stream, &checks);
        // An error after the switch does not bring the guest back.
        let has_moved = self.state.qemu != qemu;
        if has_moved && to_daemon.is_some() {
            self.state.control = Some(to.clone());
        }
        let saved = match has_moved {
            true => self.save(),
            false => Ok(()),
        };
        let migrated = moved.map(|switched| {
            let after = queue_stops(&client).unwrap_or_default();
            Migrated::new(&switched, &exports, &before, &after)
        });
        let removed = match has_moved {
            true if to_daemon.is_some() && self.daemon.is_some() => self.end_daemon(),
            true => self.remove_exports(&control, exports.iter().map(|export| &export.from)),
            false => self.remove_exports(to, exports.iter().map(|export| &export.to)),
        };
        let migrated = migrated?;
        saved.and(removed).with_context(|| {
            let name = &self.state.name;
            format!("guest {name} runs in the new QEMU, but its old exports remain")
        })?;
        Ok(migrated)
    }

    /// Returns the daemon of a guest that can migrate.
    fn check_movable(&self) -> Result<PathBuf> {
        let name = &self.state.name;
        let has = |option: &str| self.recipe.qemu.arguments.iter().any(|word| word == option);
        ensure!(
            !has("-blockdev") && !has("-drive"),
            "guest {name} has disks of QEMU, which lunette vm migrate does not support; hint: start it with disks of Lunette only"
        );
        let mut words = self.recipe.qemu.arguments.iter();
        ensure!(
            !words.any(|word| word.starts_with("vhost-scsi-pci,")),
            "guest {name} has disks of a target in the kernel, which QEMU cannot migrate; hint: start it without via=vhost-scsi"
        );
        ensure!(
            !self.migrations.has_tap,
            "guest {name} has a tap, which QEMU cannot open twice; hint: lunette vm run --net user"
        );
        ensure!(
            self.recipe.helpers.is_empty(),
            "guest {name} has a shared folder, which QEMU cannot migrate; hint: lunette vm run without --share"
        );
        let plugged = self.runtime_folder()?.state()?.plugged;
        if let Some(disk) = plugged.first() {
            bail!(
                "guest {name} has the plugged disk {0}, which lunette vm migrate does not support; hint: lunette vm unplug {name} {0}",
                disk.disk
            );
        }
        self.state.control.clone().with_context(|| {
            format!("guest {name} has no disks of Lunette; hint: lunette vm run blk:1")
        })
    }

    /// Returns the exports of the daemon at `control` that QEMU is connected to, and their copies for the daemon at `to`.
    fn exports(&self, control: &Path, to: &Path) -> Result<Vec<MovedExport>> {
        let all: Vec<Value> = Client::new(control).get("/v1/exports")?;
        let words = self.recipe.qemu.arguments.iter();
        let fields: Vec<&str> = words.flat_map(|word| word.split(',')).collect();
        let is_used = |export: &Value| {
            let socket = export["socket"].as_str();
            socket.is_some_and(|socket| fields.contains(&format!("path={socket}").as_str()))
        };
        let used = all.into_iter().filter(is_used);
        let exports = used.map(MovedExport::new).collect::<Result<Vec<_>>>()?;
        let names: Vec<String> = exports.iter().map(|one| export_path(&one.to)).collect();
        for path in names {
            ensure!(
                Client::new(to).get::<Value>(&path).is_err(),
                "the daemon at {} already has {path}; hint: remove it with lunette export remove",
                to.display()
            );
        }
        Ok(exports)
    }

    fn add_export(&mut self, control: &Path, export: &Value) -> Result<()> {
        let path = export_path(export);
        self.watcher()?.delete_at_end(control, &path)?;
        let added = Client::new(control).change(Method::PUT, &path, Some(export));
        if let Err(ClientError::Problem { .. }) = added {
            // Another export may get this name later.
            self.watcher()?.forget(control, &path)?;
        }
        added?;
        // The new QEMU uses this export. An earlier one of this name is not left over any more.
        let is_other = |(other, earlier): &(PathBuf, Value)| {
            other != control || text(earlier, "name") != text(export, "name")
        };
        self.migrations.left_over.retain(is_other);
        Ok(())
    }

    fn remove_exports<'a>(
        &mut self,
        control: &Path,
        exports: impl Iterator<Item = &'a Value>,
    ) -> Result<()> {
        let mut removed = Ok(());
        for export in exports {
            let path = export_path(export);
            let forced = format!("{path}?force=true");
            match Client::new(control).change(Method::DELETE, &forced, None) {
                Ok(_) => self.watcher()?.forget(control, &path)?,
                // Removed by a user, by an earlier attempt or at the end of a daemon without state.
                Err(ClientError::Problem { problem }) if problem.status == 404 => {
                    self.watcher()?.forget(control, &path)?;
                }
                // Tried again before the next migration, and by the watcher at the end of the guest.
                Err(error) => {
                    let left_over = (control.to_owned(), export.clone());
                    self.migrations.left_over.push(left_over);
                    removed = Err(error.into());
                }
            }
        }
        removed
    }

    /// Removes exports of earlier migrations. A daemon that was started again has them, and their sockets.
    fn remove_left_over(&mut self) {
        for (control, export) in std::mem::take(&mut self.migrations.left_over) {
            // A daemon that still does not respond keeps its exports until the next migration.
            self.remove_exports(&control, std::iter::once(&export))
                .unwrap_or(());
        }
    }

    /// Moves the guest to a new QEMU, while the checks succeed.
    fn move_guest(
        &mut self,
        exports: &[MovedExport],
        options: &MigrationOptions,
        stream: &UnixStream,
        checks: &Checks<'_>,
    ) -> Result<Switched> {
        let folder = self.runtime_folder()?.clone();
        let file = |name: &str| qemu_value(&folder.file(name));
        let sockets = exports.iter().map(|export| {
            let socket = |export: &Value| text(export, "socket").to_owned();
            (socket(&export.from), socket(&export.to))
        });
        let qemu = Program {
            path: self.recipe.qemu.path.clone(),
            arguments: with_sockets(&self.recipe.qemu.arguments, &sockets.collect::<Vec<_>>()),
        };
        let monitors = [
            (file(QMP_SOCKET), file(NEXT_QMP)),
            (file(COMMAND_SOCKET), file(NEXT_COMMAND)),
            (file(MONITOR_SOCKET), file(NEXT_MONITOR)),
        ];
        let mut incoming = qemu.clone();
        incoming.arguments = incoming_arguments(&qemu.arguments, &monitors);

        let (mut to, console, agent) = self.start_destination(&folder, &incoming)?;
        let uri = json!({ "uri": format!("unix:{}", folder.file(STREAM_SOCKET).display()) });
        let mut destination = connect(&folder.file(NEXT_QMP), &mut to)?;
        wait_for_guest(&mut destination, &uri)?;
        let old = self.qemu.as_mut().context("the guest has no QEMU")?;
        let mut source = connect(&folder.file(QMP_SOCKET), old)?;
        options.set(&mut source)?;
        let mut continues = continues(&mut source)?.unwrap_or_default();
        let port = self.agent.clone();
        if let Some(port) = &port {
            port.pause();
        }
        let until = Instant::now() + Duration::from_secs(options.seconds.min(SECONDS_MAX));
        let begun = source.command("migrate", uri);
        let ended =
            begun.and_then(|_| wait_for_switch(&mut source, until, stream, checks, &mut continues));
        std::fs::remove_file(folder.file(STREAM_SOCKET)).unwrap_or(());
        let status = match ended {
            Ok(status) => status,
            Err(error) => return Err(self.stay(&mut source, &mut to, continues, error)),
        };
        let completed = Instant::now();
        let continued = continue_guest(&mut destination, continues);
        let (continuing, is_continued) = (completed.elapsed(), continued.is_ok());
        self.state.qemu = Some(to.id());
        let old = self.qemu.replace(to);
        self.recipe.qemu = qemu;
        let moved = port.map_or(Ok(()), |port| port.move_to(agent));
        let connected = self.console.connect(console);
        self.end_switch(&folder, old)
            .and(continued)
            .and(moved)
            .and(connected)
            .and_then(|()| wait_until_running(&mut destination, continues))
            .and_then(|()| (checks.connected)(START_LIMIT))
            .with_context(|| incomplete(&self.state.name, is_continued))?;
        Ok(Switched { status, continuing })
    }

    /// Continues in the old QEMU after a failed migration. Returns its error.
    fn stay(&self, source: &mut Qmp, to: &mut Process, continues: bool, error: Error) -> Error {
        to.kill().unwrap_or(());
        if let Some(port) = &self.agent {
            port.resume();
        }
        if let Err(stopped) = wait_until_running(source, continues) {
            return stopped.context(error.to_string());
        }
        error.context(format!(
            "the migration failed, guest {} continues\n{}",
            self.state.name,
            to.log_tail()
        ))
    }

    /// Starts a QEMU that waits for the guest. Returns it with its connections for the console and the agent.
    fn start_destination(
        &mut self,
        folder: &RuntimeFolder,
        incoming: &Program,
    ) -> Result<(Process, UnixStream, UnixStream)> {
        let ports = [CONSOLE_PORT, AGENT_PORT].map(|name| {
            let path = folder.file(name);
            // The old QEMU is connected and does not need the path.
            std::fs::remove_file(&path).unwrap_or(());
            UnixListener::bind(path)
        });
        let [console_port, agent_port] = ports;
        self.migrations.count += 1;
        let log = folder.file(&format!("qemu{}.log", self.migrations.count));
        let mut to = self.spawn("the destination QEMU", incoming, &log)?;
        let console = accept(&console_port?, START_LIMIT, || to.check_running())?;
        let agent = accept(&agent_port?, START_LIMIT, || to.check_running())?;
        Ok((to, console, agent))
    }

    /// Ends the old QEMU and gives its sockets' paths to the new one.
    fn end_switch(&mut self, folder: &RuntimeFolder, old: Option<Process>) -> Result<()> {
        // Killed, because at a normal end QEMU would remove sockets that the new one uses.
        let killed = old.map_or(Ok(()), |mut old| old.kill());
        let paths = [
            (NEXT_QMP, QMP_SOCKET),
            (NEXT_COMMAND, COMMAND_SOCKET),
            (NEXT_MONITOR, MONITOR_SOCKET),
        ];
        let renamed = paths.map(|(new, name)| std::fs::rename(folder.file(new), folder.file(name)));
        self.save()?;
        killed?;
        renamed.into_iter().collect::<Result<(), _>>()?;
        Ok(())
    }
}

/// Returns true if a QEMU runs the guest, also one in the ACPI state S3, and false if the guest is paused. `None`: a migration has stopped it.
fn continues(qemu: &mut Qmp) -> Result<Option<bool>> {
    let state = qemu.command("query-status", json!({}))?;
    Ok(match state["status"].as_str() {
        Some("finish-migrate" | "postmigrate") => None,
        status => Some(state["running"] == true || status == Some("suspended")),
    })
}

/// Continues the guest in a destination that has started paused. A guest that was paused stays paused.
fn continue_guest(destination: &mut Qmp, continues: bool) -> Result<()> {
    if continues {
        destination.command("cont", json!({}))?;
    }
    Ok(())
}

/// Returns the context of an error after the switch.
fn incomplete(guest: &str, is_continued: bool) -> String {
    match is_continued {
        true => format!("guest {guest} runs in the new QEMU, but the migration is incomplete"),
        false => format!(
            "guest {guest} is in the new QEMU, which has not continued it; hint: lunette vm monitor {guest} cont"
        ),
    }
}

/// Waits until a guest runs again. A guest that was paused stays paused.
fn wait_until_running(qemu: &mut Qmp, was_running: bool) -> Result<()> {
    if !was_running {
        return Ok(());
    }
    let runs = wait_until(START_LIMIT, || match continues(qemu) {
        Ok(state) => (state == Some(true)).then_some(Ok(())),
        Err(error) => Some(Err(error)),
    });
    runs.context("the guest does not run")?
}

/// Connects to the monitor of a QEMU that may be starting.
fn connect(socket: &Path, qemu: &mut Process) -> Result<Qmp> {
    let connected = wait_until(START_LIMIT, || match Qmp::connect(socket) {
        Ok(qmp) => Some(Ok(qmp)),
        Err(_) => qemu.check_running().err().map(Err),
    });
    connected.with_context(|| format!("no monitor at {}", socket.display()))?
}

/// Returns an error if the destination's daemon has ended; a busy one may answer late. The guest would wait for its disks after the switch.
fn check_connected(daemon: &Client, exports: &[MovedExport]) -> Result<()> {
    for export in exports.iter().map(|export| &export.to) {
        let state = daemon.get::<Value>(&export_path(export));
        let state = state.context("the destination's daemon does not respond")?;
        ensure!(
            state["status"]["connected"] == true,
            "the destination's daemon has lost the connection of export {0}",
            text(export, "name")
        );
    }
    Ok(())
}

/// Checks during a migration.
struct Checks<'a> {
    /// The destination's daemon has the connections of the new QEMU. Argument: time limit of a request.
    connected: &'a dyn Fn(Duration) -> Result<()>,
    /// The disks can move. Checked while the guest is stopped.
    disks: &'a dyn Fn() -> Result<()>,
}

/// Waits for the end of a migration and reports its progress. Cancels it at `until`, at an interrupt, at the end of the client and if a check
/// fails. Then the guest continues in the source, because the destination has started paused. `continues`: the guest is not paused; a user
/// may change this until the switch.
fn wait_for_switch(
    source: &mut Qmp,
    until: Instant,
    stream: &UnixStream,
    checks: &Checks<'_>,
    continues: &mut bool,
) -> Result<Value> {
    let mut cancelled: Option<String> = None;
    let mut pauses = true;
    let mut patience = START_LIMIT;
    let mut next_report = Instant::now();
    loop {
        let status = source.command("query-migrate", json!({}))?;
        let mut reason = None;
        match status["status"].as_str().unwrap_or_default() {
            // Also when it was cancelled too late: the source has ended, and the destination has not begun.
            "completed" => return Ok(status),
            "failed" | "cancelled" => {
                let reason = cancelled.or(status["error-desc"].as_str().map(str::to_owned));
                bail!(reason.unwrap_or_else(|| "QEMU has reported no reason".to_owned()))
            }
            PAUSED if pauses && cancelled.is_none() => {
                pauses = false;
                let state = json!({ "state": PAUSED });
                let continued =
                    (checks.disks)().and_then(|()| source.command("migrate-continue", state));
                reason = continued.err().map(|error| format!("{error:#}"));
                // The guest is stopped. Requests to a busy daemon would delay it.
                (patience, next_report) = (REQUEST_LIMIT, Instant::now() + PROGRESS_INTERVAL);
            }
            _ => *continues = self::continues(source)?.unwrap_or(*continues),
        }
        if reason.is_none() && Instant::now() >= next_report {
            next_report = Instant::now() + PROGRESS_INTERVAL;
            reason = report(&status, until, stream)
                .and_then(|()| (checks.connected)(patience))
                .err()
                .map(|error| format!("{error:#}"));
        }
        if let (Some(reason), None) = (reason, &cancelled) {
            source.command("migrate_cancel", json!({}))?;
            cancelled = Some(reason);
        }
        source.wait_for_change(PROGRESS_INTERVAL)?;
    }
}

/// Reports the progress of a migration. Returns the reason to cancel it as an error.
fn report(status: &Value, until: Instant, stream: &UnixStream) -> Result<()> {
    let number = |key: &str| status["ram"][key].as_u64().unwrap_or_default();
    let progress = MigrationProgress {
        transferred: number("transferred"),
        remaining: number("remaining"),
    };
    send(stream, &MigrationMessage::Progress(progress))?;
    ensure!(!interrupted(), "the guest is being ended");
    ensure!(
        Instant::now() <= until,
        "the time limit is exceeded; hint: set a longer --within or a longer --downtime-limit"
    );
    Ok(())
}

type Buckets = Vec<(u64, u64)>;
/// Buckets of each export.
type Stops = BTreeMap<String, Buckets>;

/// Returns the durations of the stops of each export: pairs of nanoseconds and count.
fn queue_stops(client: &Client) -> Result<Stops> {
    let statistics: Statistics = client.get("/v1/statistics")?;
    let times = statistics.queue_times.into_iter();
    Ok(times
        .map(|times| (times.export, times.stop.buckets))
        .collect())
}

/// Returns the values that a histogram has gained, ascending.
fn new_values(before: Option<&Buckets>, after: Option<&Buckets>) -> Vec<u64> {
    let before: BTreeMap<u64, u64> = before.into_iter().flatten().copied().collect();
    let after = after.into_iter().flatten();
    let new = after.flat_map(|(value, count)| {
        let known = before.get(value).copied().unwrap_or(0);
        std::iter::repeat_n(*value, count.saturating_sub(known) as usize)
    });
    new.collect()
}

#[cfg(test)]
mod tests;
