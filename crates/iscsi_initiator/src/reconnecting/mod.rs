//! A logical unit with a self-restoring session: a dedicated thread owns the session, and any thread can submit commands.
//!
//! After the loss of the session the thread logs in again, with exponential backoff. It uses the same ISID, so the target
//! ends the tasks of the previous session (RFC 7143, 6.3.5: session reinstatement). Only then are unanswered commands sent
//! again, so a lost write cannot take effect after its repetition. A command that must not be executed twice ends as lost.
//! Temporary conditions (unit attentions, BUSY, TASK SET FULL) are retried here. After
//! [`ReconnectSettings::replacement_timeout`] without a session, commands end as lost until there is a session.

mod attendant;
mod paths;
mod retry;
mod takeovers;

pub use retry::{carry_out, is_change};

use std::io;
use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use iscsi::initiator::CommandDone;
use rustix::event::{EventfdFlags, eventfd};

use crate::session::random_isid;
use crate::{CommandError, KnownUnits, SessionOptions, Unit, UnitAddress, UnitInfo};
use attendant::Attendant;

/// Time limit for the response to the last logout.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(2);

/// Settings of a unit and its session.
#[derive(Clone, Debug)]
pub struct ReconnectSettings {
    /// Address of the unit.
    pub address: UnitAddress,
    /// Further paths to the unit, tried in turn when the previous path has no session.
    pub paths: Vec<UnitAddress>,
    /// The administrator guarantees that all paths lead to one unit, so a unit without identity may have several.
    pub trusts_paths: bool,
    /// Units that earlier sessions of the disk have used. A path to another unit is refused.
    pub known: KnownUnits,
    /// Login identity and keys. Without an ISID a random one is used for the lifetime of the unit.
    pub session: SessionOptions,
    /// Maximum number of commands in flight at the target.
    pub queue_depth: usize,
    /// Time that commands wait for a lost session; zero means unlimited.
    pub replacement_timeout: Duration,
}

/// A command for the unit.
#[derive(Clone, Debug, Default)]
pub struct UnitCommand {
    /// The CDB, padded with zeroes.
    pub cdb: [u8; 16],
    /// Length of the CDB in bytes; 0 means the length implied by the operation code.
    pub cdb_length: u8,
    /// Write data.
    pub out: Vec<u8>,
    /// Maximum read length in bytes.
    pub read: u32,
    /// The command may be executed twice.
    pub repeatable: bool,
    /// Every response is returned to the caller; nothing is retried here.
    pub as_is: bool,
}

impl UnitCommand {
    /// Returns true if the command may change the unit's properties. FORMAT UNIT and MODE SELECT change sizes without a
    /// unit attention for their sender.
    pub fn changes_unit(&self) -> bool {
        self.as_is && matches!(self.cdb[0], 0x04 | 0x15 | 0x55)
    }
}

/// Outcome of a command.
#[derive(Debug)]
pub enum Ended {
    /// The unit has responded.
    Done(CommandDone),
    /// The command was aborted by [`ReconnectingUnit::abort`].
    Cancelled,
    /// There is no session; the effect of the command is unknown.
    Lost,
}

/// Receives completed commands. Called on the unit's thread; must not block.
pub trait CommandSink: Send + Sync {
    /// Reports the end of the command with this token.
    fn ended(&self, token: u64, ended: Ended);
}

/// State change of the unit.
#[derive(Debug)]
pub enum UnitEvent<'a> {
    /// A session to the same unit exists.
    Up(&'a UnitInfo),
    /// There is no session; logins are retried.
    Down {
        /// Reason.
        reason: &'a str,
        /// Time until the next attempt.
        next_try: Duration,
    },
    /// Size or other properties of the unit have changed.
    Changed(&'a UnitInfo),
}

/// Receives state changes on the unit's thread; must not block.
pub type UnitObserver = Box<dyn Fn(UnitEvent<'_>) + Send>;

/// A unit with a self-restoring session. Dropping it logs the session out.
pub struct ReconnectingUnit {
    shared: Arc<SharedSession>,
    /// Disconnects when the thread has ended.
    ended: Mutex<mpsc::Receiver<()>>,
    known: KnownUnits,
}

/// State shared by users and the thread.
struct SharedSession {
    inbox: Mutex<Inbox>,
    /// The thread sleeps and must be woken with `wake`.
    is_asleep: AtomicBool,
    wake: OwnedFd,
    /// A session exists.
    is_up: AtomicBool,
}

#[derive(Default)]
struct Inbox {
    commands: Vec<Task>,
    aborts: Vec<(Arc<dyn CommandSink>, u64)>,
    stop: bool,
}

struct Task {
    /// Receiver of the outcome; `None` for a command of the thread itself.
    sink: Option<Arc<dyn CommandSink>>,
    token: u64,
    command: UnitCommand,
    attempts: retry::Attempts,
    /// Number of sessions lost while the command was in flight.
    losses: u32,
    is_aborted: bool,
}

impl Task {
    fn end(self, ended: Ended) {
        if let Some(sink) = self.sink {
            sink.ended(self.token, ended);
        }
    }
}

impl SharedSession {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            // The write fails only at the counter's maximum; then the thread is woken anyway.
            rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok();
        }
    }
}

impl ReconnectingUnit {
    /// Logs in, reads the unit's properties, and starts the thread.
    ///
    /// # Errors
    /// The reason for the missing session or unit.
    pub fn open(
        mut settings: ReconnectSettings,
        observer: UnitObserver,
    ) -> Result<(ReconnectingUnit, UnitInfo), CommandError> {
        settings.session.isid.get_or_insert_with(random_isid);
        let (unit, path) = paths::open_any(&settings)?;
        let info = unit.info().clone();
        let target = settings.path_address(path).target.clone();
        settings.known.add(&target, &info.identity);
        let started = ReconnectingUnit::start(settings, unit, path, observer);
        match started {
            Ok(unit) => Ok((unit, info)),
            Err(error) => Err(crate::unit::answer(
                "login",
                format!("cannot start a thread or open a descriptor: {error}"),
            )),
        }
    }

    fn start(
        settings: ReconnectSettings,
        unit: Unit,
        path: usize,
        observer: UnitObserver,
    ) -> io::Result<ReconnectingUnit> {
        let shared = Arc::new(SharedSession {
            inbox: Mutex::default(),
            is_asleep: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            is_up: AtomicBool::new(true),
        });
        let known = settings.known.clone();
        let attendant = Attendant::new(Arc::clone(&shared), settings, (unit, path), observer);
        let thread = std::thread::Builder::new().name("iscsi-session".to_owned());
        let (running, ended) = mpsc::channel();
        thread.spawn(move || {
            attendant.run();
            drop(running);
        })?;
        Ok(ReconnectingUnit {
            shared,
            ended: Mutex::new(ended),
            known,
        })
    }

    /// Returns the known units, including the present one.
    pub fn known(&self) -> &KnownUnits {
        &self.known
    }

    /// Submits a command; `sink` receives the outcome.
    pub fn submit(&self, command: UnitCommand, sink: Arc<dyn CommandSink>, token: u64) {
        let task = Task {
            sink: Some(sink),
            token,
            command,
            attempts: retry::Attempts::default(),
            losses: 0,
            is_aborted: false,
        };
        self.shared.inbox().commands.push(task);
        self.shared.wake();
    }

    /// Aborts a command that has not ended. It ends only when the target has confirmed the abort, or has ended the
    /// session's tasks.
    pub fn abort(&self, sink: &Arc<dyn CommandSink>, token: u64) {
        self.shared.inbox().aborts.push((Arc::clone(sink), token));
        self.shared.wake();
    }
}

impl Drop for ReconnectingUnit {
    fn drop(&mut self) {
        self.shared.inbox().stop = true;
        self.shared.wake();
        // Without a session the thread may be in a long login attempt; its end need not be awaited.
        if self.shared.is_up.load(Ordering::Acquire) {
            let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
            ended.recv_timeout(LOGOUT_TIMEOUT).ok();
        }
    }
}
