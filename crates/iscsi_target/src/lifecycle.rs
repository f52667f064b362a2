//! Stages of a connection's login and end.

use std::sync::{Arc, mpsc};

use iscsi::session::ConnectionKey;
use scsi::{Nexus, TargetView};
use scsi_exec::{Hold, Registration, TaskOrder};

use crate::shared::InFlight;
use crate::target::IscsiTarget;

/// State of a connection that is logged in to a target.
pub(crate) struct Attached {
    pub target: Arc<IscsiTarget>,
    pub nexus: Arc<Nexus>,
    /// Order of the commands of all connections of the session.
    pub order: Arc<TaskOrder>,
    pub view: TargetView,
    pub read_only: bool,
}

/// Stage of the login.
pub(crate) enum LoginStage {
    /// Before the end of the login phase. Second of the accept.
    Before { accepted: u64 },
    /// In the full feature phase without a target: a discovery session.
    Discovery(ConnectionKey),
    /// In the full feature phase with a target.
    Target(ConnectionKey, Attached),
}

/// Login of a connection.
pub(crate) struct Login {
    pub stage: LoginStage,
    /// The login response and further input wait until replaced connections have nothing in flight.
    pub waits: bool,
    /// Error recovery level 2: the session outlives the connection, and takes over tasks of other connections.
    pub recovers: bool,
}

impl Login {
    /// Creates the login of a connection that was accepted in this second.
    pub fn new(accepted: u64) -> Login {
        Login {
            stage: LoginStage::Before { accepted },
            waits: false,
            recovers: false,
        }
    }

    /// Returns the identity of the connection, from the end of the login phase on.
    pub fn key(&self) -> Option<ConnectionKey> {
        match &self.stage {
            LoginStage::Before { .. } => None,
            LoginStage::Discovery(key) | LoginStage::Target(key, _) => Some(*key),
        }
    }

    /// Returns the session with a target.
    #[inline(always)]
    pub fn session(&self) -> Option<&Attached> {
        match &self.stage {
            LoginStage::Target(_, session) => Some(session),
            _ => None,
        }
    }

    /// Returns the session with a target.
    #[inline(always)]
    pub fn session_mut(&mut self) -> Option<&mut Attached> {
        match &mut self.stage {
            LoginStage::Target(_, session) => Some(session),
            _ => None,
        }
    }
}

/// Stage of a connection's life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    /// The initiator is served.
    Open,
    /// The initiator is served until it logs out as requested. It is dropped at this second.
    LogoutRequested { until: u64 },
    /// Queued output is sent, then the connection ends.
    Closing,
    /// Nothing more is received or sent. I/O in flight drains.
    Ended,
}

impl Lifecycle {
    #[inline(always)]
    pub fn is_ended(self) -> bool {
        matches!(self, Lifecycle::Ended)
    }

    #[inline(always)]
    pub fn is_closing(self) -> bool {
        matches!(self, Lifecycle::Closing)
    }

    /// Returns true if no more input is processed.
    #[inline(always)]
    pub fn is_over(self) -> bool {
        matches!(self, Lifecycle::Closing | Lifecycle::Ended)
    }

    /// Ends the connection when its queued output was sent.
    pub fn close(&mut self) {
        if !self.is_ended() {
            *self = Lifecycle::Closing;
        }
    }

    /// Ends the connection. Returns false if it had ended before.
    pub fn end(&mut self) -> bool {
        let ended = std::mem::replace(self, Lifecycle::Ended);
        !ended.is_ended()
    }
}

/// Objects that are released when the connection has nothing in flight any more.
#[derive(Default)]
pub(crate) struct Drain {
    pub holds: Vec<Hold>,
    /// Hold of later logins through the same ports.
    pub in_flight: Option<Arc<InFlight>>,
    /// Registration for task management, while the connection can run tasks.
    pub registration: Option<Registration>,
    /// Server that waits for the end of all connections.
    pub server: Option<mpsc::Sender<()>>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_ended_connection_neither_closes_nor_ends_again() {
        let mut lifecycle = Lifecycle::LogoutRequested { until: 1 };
        assert!(!lifecycle.is_over());
        lifecycle.close();
        assert!(lifecycle.is_over() && lifecycle.is_closing());
        assert!(lifecycle.end() && !lifecycle.end());
        lifecycle.close();
        assert!(lifecycle.is_ended() && lifecycle.is_over());
    }
}
