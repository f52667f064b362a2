//! A logical unit whose session comes back by itself: a thread of its own keeps the session, and many others give it commands.
//!
//! When the session is lost the thread logs in again, with a pause that doubles. It uses the same ISID, so the target ends what was
//! left of the session before (RFC 7143, 6.3.5: session reinstatement), and only then sends the commands that were not answered once
//! more: a write that was lost cannot come after one that repeats it. A command that must not be done twice ends as lost. What may
//! pass by itself (unit attentions, BUSY, TASK SET FULL) is asked again here. After [`ReconnectSettings::replacement_timeout`] without a session commands
//! end as lost, until there is one.

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
use crate::{CommandError, SessionOptions, Unit, UnitAddress, UnitInfo};
use attendant::Attendant;

/// A target gets so long to answer the last logout.
const LOGOUT_TIMEOUT: Duration = Duration::from_secs(2);

/// Which unit, and how its session is kept.
#[derive(Clone, Debug)]
pub struct ReconnectSettings {
    /// Where the unit is.
    pub address: UnitAddress,
    /// Where else it is: used, one after the other, when there is no session the way before.
    pub paths: Vec<UnitAddress>,
    /// The administrator vouches that all paths lead to one unit, so that a unit without identity may have several.
    pub trusts_paths: bool,
    /// As whom to log in, with which keys. Without an ISID a random one is used for the life of the unit.
    pub session: SessionOptions,
    /// Commands in flight at the target, at most.
    pub queue_depth: usize,
    /// How long commands wait for a session that is lost; zero: for ever.
    pub replacement_timeout: Duration,
}

/// A command for the unit.
#[derive(Clone, Debug, Default)]
pub struct UnitCommand {
    /// The CDB, padded with zeroes.
    pub cdb: [u8; 16],
    /// Bytes of it; 0: as many as its operation code says.
    pub cdb_length: u8,
    /// Data to be written.
    pub out: Vec<u8>,
    /// Bytes to be read.
    pub read: u32,
    /// It may be done twice.
    pub repeatable: bool,
    /// Its answer is for whoever gave it, whatever it is: nothing is tried again here.
    pub as_is: bool,
}

impl UnitCommand {
    /// Is the unit another one for its users, once this command has been carried out? FORMAT UNIT and MODE SELECT change sizes, and
    /// whoever sends them gets no unit attention.
    pub fn changes_unit(&self) -> bool {
        self.as_is && matches!(self.cdb[0], 0x04 | 0x15 | 0x55)
    }
}

/// How a command has ended.
#[derive(Debug)]
pub enum Ended {
    /// The unit has answered.
    Done(CommandDone),
    /// It was aborted, by [`ReconnectingUnit::abort`].
    Cancelled,
    /// There is no session; whether it was done is not known.
    Lost,
}

/// Hears of commands that have ended. Called on the unit's thread; must be quick.
pub trait CommandSink: Send + Sync {
    /// The command with this token has ended.
    fn ended(&self, token: u64, ended: Ended);
}

/// What becomes of the unit.
#[derive(Debug)]
pub enum UnitEvent<'a> {
    /// There is a session, and the unit in it is the same one.
    Up(&'a UnitInfo),
    /// There is none. It is tried again.
    Down {
        /// Why.
        reason: &'a str,
        /// How soon.
        next_try: Duration,
    },
    /// The unit has another size, or other properties.
    Changed(&'a UnitInfo),
}

/// Hears of the unit, on its thread; must be quick.
pub type UnitObserver = Box<dyn Fn(UnitEvent<'_>) + Send>;

/// A unit whose session comes back by itself. When it is dropped the session is logged out.
pub struct ReconnectingUnit {
    shared: Arc<Shared>,
    /// Hangs up when the thread has ended.
    ended: Mutex<mpsc::Receiver<()>>,
}

/// What users and the thread share.
struct Shared {
    inbox: Mutex<Inbox>,
    /// The thread waits, and hears of the inbox only by `wake`.
    is_asleep: AtomicBool,
    wake: OwnedFd,
    /// There is a session.
    is_up: AtomicBool,
}

#[derive(Default)]
struct Inbox {
    commands: Vec<Task>,
    aborts: Vec<(Arc<dyn CommandSink>, u64)>,
    stop: bool,
}

/// A command on its way.
struct Task {
    /// Where its end goes; `None`: it is a command of the thread's own.
    sink: Option<Arc<dyn CommandSink>>,
    token: u64,
    command: UnitCommand,
    attempts: retry::Attempts,
    /// How many sessions were lost while it was in flight.
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

impl Shared {
    fn inbox(&self) -> MutexGuard<'_, Inbox> {
        self.inbox.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wake(&self) {
        if self.is_asleep.swap(false, Ordering::SeqCst) {
            // Only a counter at its maximum refuses, and then the thread is woken anyway.
            rustix::io::write(&self.wake, &1u64.to_ne_bytes()).ok();
        }
    }
}

impl ReconnectingUnit {
    /// Logs in and asks what the unit is; a thread keeps the session from then on.
    ///
    /// # Errors
    /// Why there is no session, or no such unit.
    pub fn open(
        mut settings: ReconnectSettings,
        observer: UnitObserver,
    ) -> Result<(ReconnectingUnit, UnitInfo), CommandError> {
        settings.session.isid.get_or_insert_with(random_isid);
        let (unit, path) = paths::open_any(&settings)?;
        let info = unit.info().clone();
        let started = ReconnectingUnit::start(settings, unit, path, observer);
        match started {
            Ok(unit) => Ok((unit, info)),
            Err(error) => Err(crate::unit::answer(
                "login",
                format!("no thread or descriptor is left: {error}"),
            )),
        }
    }

    fn start(
        settings: ReconnectSettings,
        unit: Unit,
        path: usize,
        observer: UnitObserver,
    ) -> io::Result<ReconnectingUnit> {
        let shared = Arc::new(Shared {
            inbox: Mutex::default(),
            is_asleep: AtomicBool::new(false),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            is_up: AtomicBool::new(true),
        });
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
        })
    }

    /// Gives the unit a command; `sink` hears of its end.
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

    /// Has a command aborted, which ends then, if it has not ended already. It ends only when the target has confirmed that, or has ended the session's tasks.
    pub fn abort(&self, sink: &Arc<dyn CommandSink>, token: u64) {
        self.shared.inbox().aborts.push((Arc::clone(sink), token));
        self.shared.wake();
    }
}

impl Drop for ReconnectingUnit {
    fn drop(&mut self) {
        self.shared.inbox().stop = true;
        self.shared.wake();
        // Where there is no session the thread may be logging in, which can take long, and nobody needs its end.
        if self.shared.is_up.load(Ordering::Acquire) {
            let ended = self.ended.get_mut().unwrap_or_else(PoisonError::into_inner);
            ended.recv_timeout(LOGOUT_TIMEOUT).ok();
        }
    }
}
