//! Handover of sockets and sessions to another process.
//!
//! A session moves between two messages. Its thread is first paused there, while the rings of all sessions run: a front end that sends half
//! a message, or a descriptor that cannot be closed at once, delays no other front end. Then the rings of the paused sessions stop together.

use std::collections::BTreeSet;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::sync::atomic::Ordering;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use reactor::file_at;

use super::{Export, Listening, Server, State, lock, start_session};
use crate::front_end::{PausedSession, SessionHandle, TakenOverSession};
use crate::record::SessionHandover;

/// Maximum wait for the end of a session's current message before a handover. The rings of all sessions run meanwhile.
const PAUSE_WAIT_MAX: Duration = Duration::from_secs(1);

/// Maximum time for the requests of paused sessions in a handover. Other front ends wait meanwhile.
const HANDOVER_WAIT_MAX: Duration = Duration::from_secs(5);

impl Export {
    /// Removes the socket from the export but leaves its file.
    fn hand_over_socket(&mut self) -> Option<UnixListener> {
        if self.listening.retry().is_some() {
            self.listening = Listening::Absent;
        }
        let path = self.path.as_deref()?;
        // Another process may have its own socket at the path.
        if self.file.is_none() || file_at(path) != self.file {
            return None;
        }
        let handed_over = self.listening.listener()?.try_clone().ok()?;
        (self.path, self.file) = (None, None);
        self.listening = Listening::Absent;
        Some(handed_over)
    }
}

impl State {
    /// Pauses sessions at the end of a message and passes each to `on_paused`. The rings of all sessions run. Returns the exports of sessions
    /// that do not reach the end of a message within `limit`.
    fn pause_sessions(
        &self,
        limit: Duration,
        mut on_paused: impl FnMut(PausedSession),
    ) -> BTreeSet<String> {
        let until = Instant::now() + limit;
        let (to, sessions) = mpsc::channel::<PausedSession>();
        for export in lock(&self.exports).iter() {
            if let Some(session) = &*lock(&export.session) {
                session.pause(to.clone());
            }
        }
        // A session that ends drops its own sender.
        drop(to);
        let left = || until.saturating_duration_since(Instant::now());
        while let Ok(session) = sessions.recv_timeout(left()) {
            on_paused(session);
        }
        // Sessions that ended or began meanwhile have no request.
        let exports = lock(&self.exports);
        let is_busy = |export: &&Export| {
            let session = lock(&export.session);
            session.as_ref().is_some_and(SessionHandle::withdraw_pause)
        };
        let busy = exports.iter().filter(is_busy);
        let busy = busy.map(|export| export.device.name().to_owned()).collect();
        drop(exports);
        sessions.try_iter().for_each(on_paused);
        busy
    }
}

impl Server {
    /// Stops accepting and returns the sockets for another process. Their files stay at their paths; new front ends wait in their backlogs.
    pub fn hand_over_sockets(&self) -> Vec<OwnedFd> {
        let mut exports = lock(&self.state.exports);
        let handed_over = exports.iter_mut().filter_map(Export::hand_over_socket);
        let handed_over = handed_over.map(OwnedFd::from).collect();
        drop(exports);
        self.state.accepting.wake();
        handed_over
    }

    /// Returns the exports of sessions that do not reach the end of a message within `limit`. Front ends are served meanwhile.
    pub fn unresponsive_sessions(&self, limit: Duration) -> Vec<String> {
        let busy = self.state.pause_sessions(limit, drop);
        busy.into_iter().collect()
    }

    /// Hands the connected front ends over to another process. Requests in flight are answered first; later messages are read by the other
    /// process. A session ends with this process if it does not reach the end of a message in time, or if its requests take too long.
    pub fn hand_over_sessions(&self) -> Vec<SessionHandover> {
        let mut paused = Vec::new();
        let busy = self
            .state
            .pause_sessions(PAUSE_WAIT_MAX, |session| paused.push(session));
        self.state.is_handed_over.store(true, Ordering::Relaxed);
        for export in lock(&self.state.exports).iter() {
            let name = export.device.name();
            if busy.contains(name)
                && let Some(session) = &*lock(&export.session)
            {
                tracing::warn!(
                    export = name,
                    "session not handed over, its front end must reconnect: a message is not complete"
                );
                session.end();
            }
        }
        let (to, handover_state) = mpsc::channel();
        for session in paused {
            session.hand_over(to.clone());
        }
        // A session that ends drops its own sender.
        drop(to);
        let until = Instant::now() + HANDOVER_WAIT_MAX;
        let mut all = Vec::new();
        while let Ok(one) =
            handover_state.recv_timeout(until.saturating_duration_since(Instant::now()))
        {
            all.push(one);
        }
        all
    }

    /// Accepts no front end until [`Server::accept`]: the exports belong to sessions that another process has handed over. New front ends
    /// wait in the backlogs. Must precede the first export.
    pub fn hold_accepting(&self) {
        self.state.holds_accepting.store(true, Ordering::Release);
    }

    /// Accepts front ends again, after the last [`Server::take_over_session`].
    pub fn accept(&self) {
        self.state.holds_accepting.store(false, Ordering::Release);
        self.state.accepting.wake();
    }

    /// Serves a front end that another process has handed over.
    ///
    /// # Errors
    /// Fails if there is no such export, or if the state is invalid; the front end then reconnects.
    pub fn take_over_session(&self, handover_state: SessionHandover) -> io::Result<()> {
        let name = handover_state.export.clone();
        let (stream, taken_over) = TakenOverSession::parse(handover_state)?;
        let mut exports = lock(&self.state.exports);
        let mut exports = exports.iter_mut();
        let Some(export) = exports.find(|export| export.device.name() == name) else {
            return Err(io::ErrorKind::NotFound.into());
        };
        start_session(export, stream, &self.state, true, Some(taken_over))
    }
}
