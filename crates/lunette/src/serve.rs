//! `lunette serve`: starts the configured objects, prints the ready ones, and serves until a signal ends it.

use std::io::Write;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use config::{Config, Surroundings};
use control::{Status, counted};
use daemon::notify::{self, Notifier};
use daemon::{
    DiskMemory, Ending, Endpoint, Handover, LogHandle, Reload, Reloader, Running, Signal, Signals,
    StartOptions,
};
use latency::{RULE, reports};

use crate::cli::ServeArguments;
use crate::failure::{self, Failure, Outcome};
use crate::inherited_sockets::{self, Descriptors};
use crate::take_over;

/// Maximum time of the shutdown. Sessions drain within milliseconds, a thousand of them on a busy machine within seconds; a disk
/// that does not respond must not block it.
const END_LIMIT: Duration = Duration::from_secs(10);
/// Maximum time of a shutdown with a handover. Clients of a disk that is still open afterwards lose their sessions.
const HANDOVER_LIMIT: Duration = Duration::from_secs(20);
/// Maximum number of waiting listeners in the status line for the service manager.
const LISTENERS_NAMED: usize = 4;
/// Poll interval of an inherited connection: short for users, with little load.
const CLIENT_INTERVAL: Duration = Duration::from_millis(100);

/// Serves the objects of the file and the flags.
pub fn run(arguments: &ServeArguments, log: LogHandle) -> Outcome {
    let configuration = &arguments.configuration;
    let (file, flags) = (configuration.config.clone(), configuration.flags());
    let surroundings = Surroundings::of_this_process();
    let config = config::load(file.as_deref(), &flags, &surroundings).map_err(failure::mistaken)?;
    let file_of_config = file.clone();
    // Relative paths of the configuration refer to the start folder, which the daemon does not leave.
    let reload: Option<Reload> = file.map(|file| {
        let read = move || config::load(Some(&file), &flags, &surroundings);
        Arc::new(read) as Reload
    });
    let control = control::default_socket();
    let signals = Signals::listen()
        .map_err(|error| Failure::because(format!("cannot handle signals: {error}")))?;
    // Checked before the running daemon ends; otherwise its clients would lose their disks.
    if let Some(equal) = daemon::equal_chap_secrets(&config) {
        let hint = daemon::EQUAL_SECRETS_HELP;
        return Err(Failure::because(format!("{equal}; hint: {hint}")));
    }
    let descriptors = match arguments.take_over {
        true => Descriptors {
            handover: take_over::take(&config, control.as_deref())?,
            ..Descriptors::default()
        },
        false => inherited_sockets::take(&config, control.as_deref())?,
    };
    let mut handover = descriptors.handover;
    let mut options = StartOptions {
        control,
        inherited: descriptors.exports,
        inherited_control: descriptors.control,
        log: Some(log),
        without_stamps: arguments.without_stamps,
        handover: Handover::default(),
        ending: Some(signals.ending()),
        reload,
    };
    daemon::confine(&config, &options, file_of_config.as_deref()).map_err(failure::not_started)?;
    let notifier = Notifier::from_environment().map(Arc::new);
    let context = ServiceContext {
        disks_with_memory: handover.disks_with_memory(),
        handed_over: handover.names(),
        memory: Some(DiskMemory::take_over(&mut handover, notifier.clone())),
        ending: options.ending.clone(),
        notifier,
    };
    options.handover = handover;
    serve(config, options, signals, context)
}

/// Surroundings of a daemon: service manager, previous and next daemon.
#[derive(Default)]
pub struct ServiceContext {
    /// The service manager, if there is one.
    pub notifier: Option<Arc<Notifier>>,
    /// Disks with memory from the previous daemon.
    disks_with_memory: Vec<String>,
    /// Names of the other descriptors from the previous daemon.
    handed_over: Vec<String>,
    /// Memory for the next daemon.
    memory: Option<DiskMemory>,
    /// Request of another daemon to end this one.
    ending: Option<Ending>,
}

impl ServiceContext {
    /// Socket of the daemon that takes over.
    fn receiver_path(&self) -> Option<PathBuf> {
        self.ending.as_ref().and_then(Ending::receiver)
    }
}

/// Serves until SIGTERM, SIGINT or a takeover by another daemon. Notifies the service manager, if there is one.
pub fn serve(
    config: Config,
    options: StartOptions,
    mut signals: Signals,
    context: ServiceContext,
) -> Outcome {
    let notifier = context.notifier.clone();
    let running = daemon::start(config, options).map_err(failure::not_started)?;
    let no_thread =
        |purpose| move |error: std::io::Error| Failure::because(daemon::no_thread(purpose, &error));
    // Threads are started first, so that a daemon that is ready does not fail because it cannot start one.
    let reloads =
        reload_on_demand(running.reloader(), notifier.clone()).map_err(no_thread("for reloads"))?;
    let watchdog = match (&notifier, notify::watchdog_time()) {
        (Some(notifier), Some(time)) => {
            let watchdog = running.watchdog(notifier.clone(), time);
            Some(watchdog.map_err(no_thread("for the watchdog"))?)
        }
        _ => None,
    };
    announce(&running);
    let status = running.status();
    for disk in &context.disks_with_memory {
        if !status.disks.iter().any(|known| known.name == **disk) {
            tracing::warn!(
                disk,
                "the service manager holds memory of a RAM disk that is not configured; hint: add the disk with persist = \"memfd\", or release the memory with systemctl clean --what=fdstore"
            );
        }
    }
    if let Some(notifier) = &notifier {
        let (reloader, to) = (running.reloader(), notifier.clone());
        running.watch_listeners(move || to.status(&status_line(&reloader.status())));
        notifier.ready(&status_line(&running.status()));
        // Stored copies would keep connections open after a front end or this daemon closes them.
        notifier.remove_stored(context.handed_over.iter().map(String::as_str));
    }
    loop {
        match next_signal(&mut signals, &running) {
            Signal::End => break,
            Signal::Print => print_latency(&running),
            // Without a receiver the thread has panicked, which was reported.
            Signal::Reload => drop(reloads.send(())),
        }
    }
    if let Some(notifier) = &notifier {
        notifier.stopping();
    }
    drop(watchdog);
    end(running, &context);
    Ok(())
}

/// Receiver of this daemon's descriptors: the daemon that takes over, or the service manager at a restart.
fn receiver(context: &ServiceContext) -> Option<Notifier> {
    let name = match context.receiver_path() {
        Some(path) => path.into_os_string(),
        // A back-end program must not notify the service manager of its parent.
        None if context.notifier.is_none() => return None,
        None => std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty())?,
    };
    let receiver = Notifier::new(&name);
    receiver
        .inspect_err(|error| tracing::error!("cannot hand over to the next daemon: {error}"))
        .ok()
}

/// Text for `systemctl status`.
fn status_line(status: &Status) -> String {
    let mut line = format!(
        "serving {} through {}, on {}",
        counted(status.disks.len() as u64, "disk"),
        counted(status.exports.len() as u64, "export"),
        counted(status.workers as u64, "worker")
    );
    let waiting = &status.waiting_listeners;
    if !waiting.is_empty() {
        let names = waiting.iter().take(LISTENERS_NAMED);
        let names: Vec<String> = names.map(ToString::to_string).collect();
        line.push_str(&format!("; waiting: {}", names.join(", ")));
    }
    if waiting.len() > LISTENERS_NAMED {
        line.push_str(&format!(" and {} more", waiting.len() - LISTENERS_NAMED));
    }
    line
}

/// Starts the thread that reloads the file on SIGHUP. A reload may wait for clients, and the daemon must handle other signals
/// meanwhile. Several requests during one reload cause one more.
fn reload_on_demand(
    reloader: Reloader,
    notifier: Option<Arc<Notifier>>,
) -> std::io::Result<mpsc::Sender<()>> {
    let (asked, requests) = mpsc::channel();
    let reload_each = move || {
        while requests.recv().is_ok() {
            while requests.try_recv().is_ok() {}
            if let Some(notifier) = &notifier {
                notifier.reloading();
            }
            reload(&reloader);
            if let Some(notifier) = &notifier {
                notifier.ready(&status_line(&reloader.status()));
            }
        }
    };
    std::thread::Builder::new()
        .name("reload".to_owned())
        .spawn(reload_each)?;
    Ok(asked)
}

/// Reloads the file and logs the result.
fn reload(reloader: &Reloader) {
    match reloader.reload() {
        Ok(made) => {
            match made.plan.is_empty() {
                true => tracing::info!("configuration reloaded: no changes"),
                false => {
                    let summary = daemon::control::summary(&made.plan);
                    let summary = serde_json::to_string(&summary).unwrap_or_default();
                    tracing::info!("configuration reloaded: {summary}");
                }
            }
            daemon::log_shadowed(&made.shadowed);
        }
        Err(reasons) => {
            for reason in reasons {
                tracing::error!("reload failed: {reason}");
            }
        }
    }
}

/// Waits for a signal. The end of the only possible client counts as one.
fn next_signal(signals: &mut Signals, running: &Running) -> Signal {
    if !running.has_one_client() {
        return signals.wait();
    }
    loop {
        match signals.poll() {
            Some(signal) => return signal,
            None if running.is_left() => return Signal::End,
            None => std::thread::sleep(CLIENT_INTERVAL),
        }
    }
}

/// Prints the exports that accept connections.
pub fn announce(running: &Running) {
    let mut text = String::new();
    let ready = running.ready().iter();
    for export in ready.filter(|one| one.endpoint != Endpoint::Waiting) {
        text.push_str(&format!("{export}\n"));
    }
    let mut stdout = cli_common::stdout();
    // A closed stdout is not an error.
    let _unread = stdout
        .write_all(text.as_bytes())
        .and_then(|()| stdout.flush());
    if running.ready().is_empty() {
        match running.status().exports.len() {
            0 => tracing::warn!("no exports, clients cannot connect; hint: lunette serve --help"),
            1 => tracing::warn!("the export waits for its disk; hint: lunette status"),
            exports => {
                tracing::warn!("{exports} exports wait for their disks; hint: lunette status")
            }
        }
    }
    match running.control() {
        Some(path) => tracing::info!(control = %path.display(), "serving"),
        None => tracing::info!("serving without a control socket"),
    }
}

/// Prints the latency tables to stderr.
pub fn print_latency(running: &Running) {
    let mut text = format!("{RULE}\n");
    for report in reports(&running.snapshot(), None) {
        text.push_str(&format!("\n{report}"));
    }
    // A closed stderr cannot be reported.
    let _unread = cli_common::stderr().write_all(text.as_bytes());
}

/// Hands over to the receiver, if there is one. Ends all other sessions, workers and sockets in bounded time.
fn end(mut running: Running, context: &ServiceContext) {
    tracing::info!("daemon stopping");
    let is_daemon = context.receiver_path().is_some();
    let limit = match is_daemon {
        true => HANDOVER_LIMIT,
        false => END_LIMIT,
    };
    // The next daemon, while it has all descriptors and waits for the disks.
    let waiting = Arc::<Mutex<Option<Notifier>>>::default();
    let waiting_at_limit = Arc::clone(&waiting);
    let thread = std::thread::Builder::new().name("end-limit".to_owned());
    let limited = thread.spawn(move || {
        std::thread::sleep(limit);
        tracing::error!(
            "requests are still in flight or disks still open after {} s, exiting anyway",
            limit.as_secs()
        );
        if let Some(next) = lock(&waiting_at_limit).take() {
            next.exiting();
        }
        std::process::exit(1);
    });
    if let Err(error) = limited {
        tracing::warn!(%error, "cannot start the thread that limits the time of the shutdown");
    }
    if let Some(receiver) = receiver(context) {
        // The service manager already stores the memory of RAM disks.
        let memory = context.memory.as_ref().filter(|_| is_daemon);
        // The rest of the time is for the disks and their dirty bitmaps.
        running.hand_over(&receiver, memory, limit / 2);
        if is_daemon {
            *lock(&waiting) = Some(receiver);
            let is_released = running.release();
            // If a disk may be open, the next daemon waits for the end of this process.
            if let Some(next) = lock(&waiting).take().filter(|_| is_released) {
                next.released();
            }
        }
    }
    drop(running);
    tracing::debug!("daemon stopped");
}

fn lock(next: &Mutex<Option<Notifier>>) -> MutexGuard<'_, Option<Notifier>> {
    next.lock().unwrap_or_else(PoisonError::into_inner)
}
