//! Session state shared by its connections: identity, parameters, command window, list of connections.
//!
//! Workers share a [`Session`]. The data path uses only its [`CommandWindow`]. The [`SessionTable`] belongs to the control
//! plane: it finds, creates, joins and reinstates sessions at login (RFC 7143, 6.3.5, 4.4.1).

mod table;
mod window;

pub use table::{Attachment, Claim, ConnectionKey, Leaving, SessionTable};
pub use window::{CommandWindow, Turn, Wake};

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::negotiation::SessionParameters;
use crate::target::{Reassignable, ReassignableTasks};

/// The initiator's part of the session identifier.
pub type Isid = [u8; 6];

/// Session type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SessionKind {
    /// Normal session, for SCSI commands.
    Normal,
    /// Discovery session, for SendTargets only.
    Discovery,
}

/// Identity of a session.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SessionIdentity {
    /// InitiatorName
    pub initiator_name: String,
    /// ISID
    pub isid: Isid,
    /// TargetName; `None` in discovery sessions.
    pub target_name: Option<String>,
    /// TargetPortalGroupTag
    pub portal_group_tag: u16,
    /// Session type.
    pub kind: SessionKind,
}

/// A session.
#[derive(Debug)]
pub struct Session {
    /// Initiator and target.
    pub identity: SessionIdentity,
    /// TSIH, never 0.
    pub tsih: u16,
    /// Parameters negotiated on the leading connection.
    pub parameters: SessionParameters,
    /// Command numbering.
    pub window: CommandWindow,
    /// Tasks of lost connections.
    pub reassignable: ReassignableTasks,
    closed: AtomicBool,
    count: AtomicU32,
    connections: Mutex<Vec<ConnectionKey>>,
}

impl Session {
    /// Creates a session without connections. The first CmdSN is `first_cmd_sn`; at most `window` commands are in progress.
    pub fn new(
        identity: SessionIdentity,
        tsih: u16,
        parameters: SessionParameters,
        first_cmd_sn: u32,
        window: u32,
    ) -> Self {
        Session {
            identity,
            tsih,
            parameters,
            window: CommandWindow::new(first_cmd_sn, window),
            reassignable: ReassignableTasks::default(),
            closed: AtomicBool::new(false),
            count: AtomicU32::new(0),
            connections: Mutex::new(Vec::new()),
        }
    }

    /// Returns true if the session has ended. Its connections must then be dropped.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Adds a task of a lost connection.
    pub(crate) fn add_reassignable(&self, task: Reassignable) {
        if self.reassignable.add(task) {
            self.window.finished();
        }
    }

    /// Removes selected tasks without a connection and sends no response. `is_meant` selects by ITT and connection. Running
    /// tasks finish on their own.
    pub fn forget_reassignable(&self, is_meant: impl Fn(u32, ConnectionKey) -> bool) {
        for _ in 0..self.reassignable.forget(is_meant) {
            self.window.finished();
        }
    }

    /// Ends a task that kept running after its connection was lost. No response is sent.
    pub fn end_running(&self, itt: u32) {
        if self.reassignable.end_running(itt) {
            self.window.finished();
        }
    }

    /// Returns true if the session has more than one connection.
    pub fn is_shared(&self) -> bool {
        self.count.load(Ordering::Acquire) > 1
    }

    /// Returns the connections of the session.
    pub fn connections(&self) -> Vec<ConnectionKey> {
        self.lock().clone()
    }

    /// Returns the connection with this CID.
    pub fn connection(&self, cid: u16) -> Option<ConnectionKey> {
        self.lock().iter().copied().find(|key| key.cid == cid)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<ConnectionKey>> {
        self.connections
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    fn add(&self, key: ConnectionKey) {
        let mut connections = self.lock();
        connections.push(key);
        self.count
            .store(connections.len() as u32, Ordering::Release);
    }

    /// Removes a connection and returns the number of remaining ones.
    fn remove(&self, key: ConnectionKey) -> usize {
        let mut connections = self.lock();
        connections.retain(|other| *other != key);
        self.count
            .store(connections.len() as u32, Ordering::Release);
        connections.len()
    }

    fn close(&self) -> Vec<ConnectionKey> {
        self.closed.store(true, Ordering::Release);
        let mut connections = self.lock();
        self.count.store(0, Ordering::Release);
        std::mem::take(&mut *connections)
    }
}
