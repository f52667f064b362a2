//! `lunette vm run`.

use std::io::{BufRead, BufReader, Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use anyhow::{Context, Result, bail};
use clap::{Args, ValueEnum};
use cli_common::{Failure, Outcome, find_sibling, print_line};
use vm::running::{
    ConsoleEnd, GuestEnd, MONITOR_SOCKET, OwnDaemon, Phase, Program, Readiness, Recipe, Registry,
    RuntimeFolder, SECONDS_MAX, State, Supervisor, attach,
};
use vm::topology::Plan;
use vm::{Accelerator, tool};

use super::planned::{DeviceArguments, Ports, plan};
use super::{GuestArguments, failed, running_daemon, share};

/// `lunette vm run`
#[derive(Debug, Args)]
#[command(after_help = AFTER)]
pub struct RunArguments {
    #[command(flatten)]
    pub(super) guest: GuestArguments,
    /// Run the guest in the background. The command returns when the guest has booted
    #[arg(long, help_heading = "Run")]
    detach: bool,
    /// Append the output of the guest's console to this file
    #[arg(long, value_name = "FILE", help_heading = "Run")]
    serial: Option<PathBuf>,
    /// Connect the terminal to QEMU's monitor instead of the guest's console
    #[arg(long, value_enum, help_heading = "Run")]
    monitor: Option<MonitorWord>,
    #[command(flatten)]
    pub(super) devices: DeviceArguments,
    /// Additional argument for the guest's own daemon, such as --workers=2; may be given several times
    #[arg(
        long,
        value_name = "ARGUMENT",
        allow_hyphen_values = true,
        conflicts_with = "control",
        help_heading = "Run"
    )]
    daemon_arg: Vec<String>,
    /// Time limit for the boot of the guest, in seconds
    #[arg(
        long,
        value_name = "SECONDS",
        default_value_t = 240,
        value_parser = clap::value_parser!(u64).range(..=SECONDS_MAX),
        help_heading = "Run"
    )]
    boot_limit: u64,
}

/// Location of QEMU's monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum MonitorWord {
    /// This terminal
    Stdio,
}

const AFTER: &str = "\
The guest runs until it powers off, Ctrl-] is pressed, or this command receives a signal. With --detach it runs until it powers off or
`lunette vm stop`. The guest's daemon ends with the guest, and the files of both are removed. Without --system or --kernel the guest boots
the small system of `lunette vm setup`. The accelerator is KVM if a guest boots under it, otherwise TCG. LUNETTE_ACCEL=kvm or tcg
overrides this.

Examples:

  Four SCSI disks of memory, and a shell in the guest
    lunette vm run scsi:4x1 backing=ram:256M

  A guest in the background, and a command in it
    lunette vm run --detach --name guest1 blk:2,queues=2
    lunette vm exec guest1 'ls /sys/block'
    lunette vm stop guest1

  A disk of a running daemon
    lunette vm run blk:1,backing=daemon:d1 --control /run/lunette/lunette.sock

  A system disk of your own, and four disks of Lunette
    lunette vm run blk:4 --system disk.qcow2 --memory 4G

  A folder of this machine, at /share in the guest
    lunette vm run blk:1 --share ~/jobs";

/// Environment variable of the process that runs a guest in the background.
const BACKGROUND: &str = "LUNETTE_VM_BACKGROUND";
/// Printed by that process when the guest is up.
const READY: &str = "ready";

/// Runs a guest.
///
/// # Errors
/// When it cannot be started, or ends abnormally.
pub fn run(arguments: &RunArguments) -> Outcome {
    if std::env::var_os(BACKGROUND).is_some() {
        return run_in_background(arguments);
    }
    if arguments.detach {
        return detach(&arguments.guest.name);
    }
    vm::watch().map_err(failed)?;
    let mut claimed = claim(arguments)?;
    let ended = run_here(arguments, &mut claimed);
    let stopped = claimed.supervisor.stop();
    match ended.and_then(|end| stopped.map(|()| end)) {
        Ok(GuestEnd::PoweredOff) => Ok(()),
        Ok(GuestEnd::Interrupted) => Err(Failure::Interrupted),
        Err(_) if vm::interrupted() => Err(Failure::Interrupted),
        Err(error) => Err(failed(error)),
    }
}

/// Runs in the foreground, with the console or the monitor on this terminal.
fn run_here(arguments: &RunArguments, claimed: &mut ReservedName) -> Result<GuestEnd> {
    claimed.start(arguments)?;
    let supervisor = &mut claimed.supervisor;
    let socket = match arguments.monitor {
        Some(MonitorWord::Stdio) => supervisor.runtime_folder()?.file(MONITOR_SOCKET),
        None => supervisor.console_socket()?,
    };
    print_line(&"Ctrl-] ends the guest");
    let has_left = Arc::new(AtomicBool::new(false));
    let left = Arc::clone(&has_left);
    let (sender, attached) = mpsc::channel();
    std::thread::spawn(move || {
        if let Ok(ConsoleEnd::Detached) = attach(&socket) {
            left.store(true, Ordering::Relaxed);
            vm::interrupt();
        }
        // The receiver may be gone.
        sender.send(()).unwrap_or(());
    });
    let ended = supervisor
        .wait_until_up()
        .and_then(|()| supervisor.wait_for_end());
    supervisor.close_console();
    // The thread restores the terminal when it ends; the wait has a limit, because it may block in a write.
    attached.recv_timeout(Duration::from_secs(2)).unwrap_or(());
    match ended {
        Ok(GuestEnd::Interrupted) if has_left.load(Ordering::Relaxed) => Ok(GuestEnd::PoweredOff),
        ended => ended,
    }
}

/// Operation in the error of a wait.
const WAIT: &str = "wait for the process of the guest";

fn own_program() -> Result<PathBuf, Failure> {
    std::env::current_exe().map_err(Failure::cannot("find this program"))
}

/// Starts this program again in the background and waits until the guest is up.
fn detach(name: &str) -> Outcome {
    vm::watch().map_err(failed)?;
    let mut child = Command::new(own_program()?)
        .args(std::env::args_os().skip(1))
        .env(BACKGROUND, "1")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        // For mistakes of the command line. The process closes it when it is ready.
        .stderr(Stdio::inherit())
        .spawn()
        .map_err(Failure::cannot("start the process of the guest"))?;
    // The child's stdin closes when this process ends. Until the guest is ready, the child then ends too.
    let life = child.stdin.take();
    let stdout = child.stdout.take();
    let (sender, lines) = mpsc::channel();
    std::thread::spawn(move || {
        let lines = stdout
            .into_iter()
            .flat_map(|stdout| BufReader::new(stdout).lines());
        for line in lines.map_while(Result::ok) {
            if sender.send(line).is_err() {
                return;
            }
        }
    });
    let mut messages = Vec::new();
    loop {
        match lines.recv_timeout(Duration::from_millis(100)) {
            Ok(line) if line == READY => {
                writeln!(cli_common::stdout(), "{name}")?;
                return Ok(());
            }
            Ok(line) => match line.strip_prefix("say ") {
                Some(line) => print_line(&line),
                None => messages.push(line),
            },
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => break,
        }
        if vm::interrupted() {
            drop(life);
            // The process ends without its stdin.
            child.wait().map_err(Failure::cannot(WAIT))?;
            return Err(Failure::Interrupted);
        }
    }
    let status = child.wait().map_err(Failure::cannot(WAIT))?;
    if messages.is_empty() {
        messages.push(format!("the process of guest {name} has ended, {status}"));
    }
    match status.code() {
        Some(2) => Err(Failure::Mistaken),
        _ => Err(Failure::because(messages.join("\n"))),
    }
}

/// Runs the process behind `--detach`. It reports progress on stdout until the guest is up.
fn run_in_background(arguments: &RunArguments) -> Outcome {
    vm::watch().map_err(failed)?;
    // Detaches from the terminal's signals.
    rustix::process::setsid().map_err(|error| failed(error.into()))?;
    let is_ready = Arc::new(AtomicBool::new(false));
    let ready = Arc::clone(&is_ready);
    std::thread::spawn(move || {
        let mut nothing = Vec::new();
        std::io::stdin()
            .read_to_end(&mut nothing)
            .unwrap_or_default();
        if !ready.load(Ordering::Relaxed) {
            vm::interrupt();
        }
    });
    let outcome = claim(arguments).and_then(|mut claimed| {
        let ended = run_alone(arguments, &mut claimed, &is_ready);
        let stopped = claimed.supervisor.stop();
        ended.and(stopped).map_err(failed)
    });
    let Err(Failure::Reasons(reasons)) = &outcome else {
        return outcome;
    };
    let mut stdout = cli_common::stdout();
    for reason in reasons {
        // Ignored when the guest was up, because there is no reader then.
        writeln!(stdout, "{reason}").unwrap_or(());
    }
    // The waiting process prints the reasons.
    Err(Failure::Reported)
}

fn run_alone(
    arguments: &RunArguments,
    claimed: &mut ReservedName,
    is_ready: &AtomicBool,
) -> Result<()> {
    claimed.start(arguments)?;
    let supervisor = &mut claimed.supervisor;
    supervisor.wait_until_up()?;
    let nowhere = std::fs::File::options().write(true).open("/dev/null")?;
    rustix::stdio::dup2_stderr(nowhere)?;
    is_ready.store(true, Ordering::Relaxed);
    // Without a waiting process the guest is not wanted.
    let written = writeln!(cli_common::stdout(), "{READY}");
    written.context("the command that started the guest has ended")?;
    supervisor.wait_for_end().map(drop)
}

/// A claimed guest name, and the flags of its daemon.
struct ReservedName {
    supervisor: Supervisor,
    flags: Vec<String>,
}

impl ReservedName {
    /// Starts the guest, after adding its objects to a running daemon.
    fn start(&mut self, arguments: &RunArguments) -> Result<()> {
        if let Some(control) = &arguments.guest.control {
            let control = std::path::absolute(control)?;
            running_daemon::add(&mut self.supervisor, &control, &self.flags)?;
        }
        self.supervisor.start()
    }
}

/// Plans the guest and claims its name.
fn claim(arguments: &RunArguments) -> Result<ReservedName, Failure> {
    let registry = Registry::open().map_err(failed)?;
    let name = &arguments.guest.name;
    let place = registry.runtime_folder(name).map_err(failed)?;
    let (tap, without) = arguments.devices.net.tap().map_err(failed)?;
    let accelerator = Accelerator::detect().map_err(failed)?;
    let ports = Ports::Supervisor {
        folder: &place,
        tap: tap.as_ref(),
        accelerator,
    };
    let plan = plan(&arguments.guest, &arguments.devices, ports)?;
    vm::vhost_scsi::check(&plan).map_err(failed)?;
    let mut recipe = recipe(arguments, &place, &plan, accelerator)?;
    recipe.tap = tap.map(Arc::new);
    let state = &recipe.state;
    let line = format!(
        "guest {name}: {}, {} CPUs, {} MiB, {}",
        state.accelerator, state.cpus, state.memory_mib, state.topology
    );
    let loader = boot_loader(&plan, accelerator).map(str::to_owned);
    for line in without.into_iter().chain([line]).chain(loader) {
        match std::env::var_os(BACKGROUND) {
            Some(_) => writeln!(cli_common::stdout(), "say {line}").unwrap_or(()),
            None => print_line(&line),
        }
    }
    if let Some(system) = &plan.options.system {
        std::fs::File::open(&system.path).map_err(|error| {
            let path = system.path.display();
            Failure::because(format!("--system {path}: cannot open it: {error}"))
        })?;
    }
    let mut watch = Command::new(own_program()?);
    watch.args(["vm", "watch", name]).env_remove(BACKGROUND);
    Ok(ReservedName {
        supervisor: Supervisor::claim(&registry, recipe, watch).map_err(failed)?,
        flags: plan.daemon_flags(),
    })
}

fn recipe(
    arguments: &RunArguments,
    place: &RuntimeFolder,
    plan: &Plan,
    accelerator: Accelerator,
) -> Result<Recipe, Failure> {
    for (path, size) in plan.files_of_qemu() {
        create(path, size).map_err(failed)?;
    }
    let control = match &arguments.guest.control {
        Some(control) => {
            let control = std::path::absolute(control);
            control.map_err(Failure::cannot("resolve the path of --control"))?
        }
        None => place.file("control.sock"),
    };
    let daemon = match (plan.needs_daemon(), &arguments.guest.control) {
        (true, None) => Some(daemon(plan, place, &control, &arguments.daemon_arg)?),
        _ => None,
    };
    let now = SystemTime::now().duration_since(UNIX_EPOCH);
    let options = &plan.options;
    let has_agent = arguments.guest.system.is_none() && arguments.guest.initrd.is_none();
    Ok(Recipe {
        state: State {
            name: options.name.clone(),
            phase: Phase::Starting,
            supervisor: 0,
            group: 0,
            qemu: None,
            daemon: None,
            control: plan.needs_daemon().then_some(control),
            accelerator: accelerator.word().to_owned(),
            machine: options.machine.word().to_owned(),
            cpus: options.cpus,
            memory_mib: options.memory_mib,
            topology: arguments.guest.topology.join(" "),
            started: now.map_or(0, |now| now.as_secs()),
            boots: 0,
            plugs: 0,
            plugged: Vec::new(),
        },
        daemon,
        helpers: helpers(arguments, place).map_err(failed)?,
        tap: None,
        qemu: Program {
            path: tool(vm::topology::QEMU).map_err(failed)?,
            arguments: plan.qemu_arguments(),
        },
        expect: match has_agent {
            true => Readiness::Agent(Duration::from_secs(arguments.boot_limit)),
            false => Readiness::Nothing,
        },
        serial: arguments.serial.clone(),
        hint: boot_hint(arguments, accelerator),
    })
}

/// Returns a warning about boot loaders: TCG does not notice that another process has written the next stage to memory from which it
/// executed the previous one.
fn boot_loader(plan: &Plan, accelerator: Accelerator) -> Option<&'static str> {
    let options = &plan.options;
    let is_read_by_lunette = options
        .system
        .as_ref()
        .is_some_and(|system| system.by_lunette);
    let is_stale =
        accelerator == Accelerator::Tcg && is_read_by_lunette && options.kernel.is_none();
    is_stale.then_some(
        "multi-stage boot loaders do not start under TCG from a disk of another process; hint: --system FILE,by=qemu or --kernel",
    )
}

/// Programs that QEMU needs besides the daemon.
fn helpers(arguments: &RunArguments, place: &RuntimeFolder) -> Result<Vec<OwnDaemon>> {
    let share = arguments.devices.share.as_deref();
    let share = share.map(|folder| share::daemon(folder, place));
    Ok(share.transpose()?.into_iter().collect())
}

fn boot_hint(arguments: &RunArguments, accelerator: Accelerator) -> String {
    let again = match accelerator {
        Accelerator::Kvm => "disable KVM with LUNETTE_ACCEL=tcg",
        Accelerator::Tcg => "set a longer --boot-limit on a busy machine",
    };
    match arguments.guest.kernel {
        Some(_) => format!(
            "--kernel alone needs built-in virtio drivers, or an --initrd with the modules; {again}"
        ),
        None => format!("{again}; save the whole console output with --serial FILE"),
    }
}

fn daemon(
    plan: &Plan,
    place: &RuntimeFolder,
    control: &Path,
    more: &[String],
) -> Result<OwnDaemon, Failure> {
    let text = |path: &Path| path.display().to_string();
    let mut arguments = vec![
        "serve".to_owned(),
        "--control".to_owned(),
        text(control),
        "--state".to_owned(),
        text(&place.file("state")),
    ];
    arguments.extend(plan.daemon_flags());
    arguments.extend(more.iter().cloned());
    let sockets = plan
        .devices
        .iter()
        .filter_map(|device| device.socket.clone());
    Ok(OwnDaemon {
        program: Program {
            path: find_sibling("lunette")?,
            arguments,
        },
        sockets: sockets.collect(),
    })
}

/// Creates the file of a disk that QEMU opens itself.
fn create(path: &Path, size: u64) -> Result<()> {
    match std::fs::File::create_new(path) {
        Ok(file) => file
            .set_len(size)
            .with_context(|| format!("cannot set the size of {} to {size} bytes", path.display())),
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => Ok(()),
        Err(error) => bail!("cannot create {}: {error}", path.display()),
    }
}
