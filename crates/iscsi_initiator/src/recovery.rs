//! Recovery of lost connections within a session: error recovery level 2 (RFC 7143, 7.1.5).
//!
//! If another connection exists, it takes over the commands of the lost one at once, and the lost one is reopened without
//! them. Otherwise it is reopened, and its commands continue there. If recovery takes too long, the session ends, and its
//! repeatable commands are sent again in a new one.

use std::io;
use std::time::{Duration, Instant};

use iscsi::initiator::InitiatorError;

use crate::link::Link;
use crate::session::{Session, SessionError};

/// Connect timeout while other connections wait, and while none does.
const CONNECT_TIMEOUT_SHORT: Duration = Duration::from_millis(250);
const CONNECT_ALONE: Duration = Duration::from_secs(2);
/// Pause before the second connection attempt; it doubles.
const PAUSE_FIRST: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_secs(5);
/// Maximum number of consecutive losses without a completed command.
const FRUITLESS_MAX: u32 = 64;

type Result<T> = std::result::Result<T, SessionError>;

/// Recovery state of a lost connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RecoveryStep {
    /// Another connection is taking over its commands.
    TakenOver,
    /// A new connection is to be opened.
    Connect,
    /// The connection logs in, and takes over its commands, if any.
    LogsIn,
}

#[derive(Debug)]
struct Lost {
    cid: u16,
    since: Instant,
    step: RecoveryStep,
    /// Time of the next or last connection attempt.
    next_try: Instant,
    tries: u32,
}

/// Lost connections and their lost commands.
#[derive(Debug, Default)]
pub(crate) struct Recovery {
    connections: Vec<Lost>,
    /// Commands that the target no longer has, with their write data.
    pub lost: Vec<(u32, Vec<u8>)>,
    /// Losses since the last query.
    pub losses: u32,
    fruitless: u32,
}

impl Recovery {
    /// Records a completed command.
    pub fn record_progress(&mut self) {
        self.fruitless = 0;
    }

    fn of(&mut self, cid: u16) -> Option<&mut Lost> {
        self.connections.iter_mut().find(|lost| lost.cid == cid)
    }
}

/// Returns true if the error ends one connection and not the session.
fn is_of_connection(error: &SessionError) -> bool {
    matches!(
        error,
        SessionError::Lost { .. }
            | SessionError::Silent { .. }
            | SessionError::Broken {
                error: InitiatorError::Format(_) | InitiatorError::DataDigest,
                ..
            }
    )
}

impl Session {
    /// Handles a connection's error: starts recovery if possible, otherwise returns the error.
    pub(crate) fn or_recover(&mut self, cid: u16, result: Result<()>) -> Result<()> {
        let Err(error) = result else { return Ok(()) };
        if !self.initiator.recovers() || !is_of_connection(&error) {
            return Err(error);
        }
        self.recovery.fruitless += 1;
        self.recovery.losses += 1;
        if self.recovery.fruitless > FRUITLESS_MAX {
            return Err(error);
        }
        let others = self.initiator.suspend(cid);
        self.lose(cid);
        others.into_iter().for_each(|other| self.lose(other));
        Ok(())
    }

    fn lose(&mut self, cid: u16) {
        let Some(link) = self.links.get_mut(usize::from(cid)) else {
            return;
        };
        link.is_lost = true;
        // Further data from the target is not trustworthy, and the target must detect the end.
        link.stream.shutdown(std::net::Shutdown::Both).ok();
        let now = Instant::now();
        let wait = Duration::from_secs(self.initiator.parameters().time_to_wait.into());
        match self.recovery.of(cid) {
            // The connection was already being recovered. Its time limit continues.
            Some(lost) => {
                lost.step = RecoveryStep::Connect;
                lost.next_try = now + wait + pause(lost.tries);
                lost.tries += 1;
            }
            None => self.recovery.connections.push(Lost {
                cid,
                since: now,
                step: RecoveryStep::Connect,
                next_try: now + wait,
                tries: 0,
            }),
        }
    }

    /// Returns true if commands wait for this connection, which limits its recovery time.
    fn has_commands(&self, cid: u16) -> bool {
        let link = self.links.get(usize::from(cid));
        link.is_some_and(|link| link.commands > 0)
    }

    /// Returns true if commands wait for a lost connection.
    pub(crate) fn is_recovering(&self) -> bool {
        let mut lost = self.recovery.connections.iter();
        lost.any(|lost| self.has_commands(lost.cid))
    }

    /// Returns the time until the next recovery step.
    pub(crate) fn next_recovery(&self) -> Duration {
        let now = Instant::now();
        let lost = self.recovery.connections.iter();
        let next = lost.map(|lost| match lost.step {
            RecoveryStep::Connect => lost.next_try.saturating_duration_since(now),
            // Checked periodically for its time limit.
            RecoveryStep::TakenOver | RecoveryStep::LogsIn => Duration::from_millis(250),
        });
        next.min().unwrap_or(Duration::MAX)
    }

    /// Takes all recovery steps that are due.
    pub(crate) fn recover(&mut self) -> Result<()> {
        if self.recovery.connections.is_empty() {
            return Ok(());
        }
        let now = Instant::now();
        let parameters = self.initiator.parameters();
        let kept = u64::from(parameters.time_to_wait) + u64::from(parameters.time_to_retain);
        let most = self.timeout.min(Duration::from_secs(kept));
        for at in 0..self.recovery.connections.len() {
            let lost = &self.recovery.connections[at];
            let (cid, waited) = (lost.cid, now.duration_since(lost.since));
            if waited > most && self.has_commands(cid) {
                let late = io::Error::new(
                    io::ErrorKind::TimedOut,
                    format!("connection recovery took more than {} s", most.as_secs()),
                );
                return Err(self.lost(cid, late));
            }
            if lost.step == RecoveryStep::Connect && lost.next_try <= now {
                self.begin_again(at);
            } else if lost.step == RecoveryStep::LogsIn && now > lost.next_try + self.timeout {
                let others = self.initiator.suspend(cid);
                self.lose(cid);
                others.into_iter().for_each(|other| self.lose(other));
            }
        }
        Ok(())
    }

    /// Moves the commands to another connection, or reopens the lost one.
    fn begin_again(&mut self, at: usize) {
        let lost = &self.recovery.connections[at];
        let cid = lost.cid;
        let has_commands = self.has_commands(cid);
        let links = 0..self.links.len() as u16;
        let mut ready = links.filter(|other| self.initiator.is_ready(*other));
        let beside = ready.next();
        if let (true, Some(other)) = (has_commands, beside)
            && self.initiator.reassign(cid, other).is_ok()
        {
            self.recovery.connections[at].step = RecoveryStep::TakenOver;
            return;
        }
        let limit = match beside {
            Some(_) => CONNECT_TIMEOUT_SHORT,
            None => CONNECT_ALONE,
        };
        let connected = Link::connect(&self.portal, limit.min(self.timeout));
        let lost = &mut self.recovery.connections[at];
        match connected {
            Ok(link) => {
                let old = std::mem::replace(&mut self.links[usize::from(cid)], link);
                self.links[usize::from(cid)].commands = old.commands;
                self.initiator.recover(cid);
                (lost.step, lost.next_try) = (RecoveryStep::LogsIn, Instant::now());
            }
            Err(error) => {
                lost.next_try = Instant::now() + pause(lost.tries);
                lost.tries += 1;
                tracing::debug!(portal = %self.portal, connection = cid, %error, "connection recovery failed");
            }
        }
    }

    /// Completes the recovery of a connection's commands.
    pub(crate) fn complete_recovery(&mut self, cid: u16, to: u16) {
        if cid == to {
            return self.recovery.connections.retain(|lost| lost.cid != cid);
        }
        let mut moved = 0;
        for of in self.in_flight.values_mut().filter(|of| **of == cid) {
            *of = to;
            moved += 1;
        }
        for (cid, less, more) in [(cid, moved, 0), (to, 0, moved)] {
            if let Some(link) = self.links.get_mut(usize::from(cid)) {
                link.commands = link.commands - less + more;
            }
        }
        if let Some(lost) = self.recovery.of(cid) {
            (lost.step, lost.next_try) = (RecoveryStep::Connect, Instant::now());
        }
    }

    /// Returns the commands that could not be recovered.
    pub(crate) fn take_lost(&mut self) -> Vec<(u32, Vec<u8>)> {
        let lost = std::mem::take(&mut self.recovery.lost);
        for (itt, _) in &lost {
            self.forget(*itt);
        }
        lost
    }

    /// Returns the number of connections lost since the last query.
    pub(crate) fn take_losses(&mut self) -> u32 {
        std::mem::take(&mut self.recovery.losses)
    }

    /// Returns an error if commands were lost; for callers that do not repeat commands.
    pub(crate) fn all_recovered(&self) -> Result<()> {
        match self.recovery.lost.is_empty() {
            true => Ok(()),
            false => Err(SessionError::NotRecovered {
                portal: self.portal.clone(),
            }),
        }
    }
}

fn pause(tries: u32) -> Duration {
    match tries {
        0 => Duration::ZERO,
        tries => (PAUSE_FIRST * (1 << tries.min(9))).min(PAUSE_MAX),
    }
}
