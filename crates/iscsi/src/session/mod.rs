//! What the connections of a session share: identity, parameters, the command window, who is connected.
//!
//! A [`Session`] is shared between workers; on the data path only its [`CommandWindow`] is touched. The [`SessionTable`] is
//! control plane: it finds, makes, joins and reinstates sessions at login (RFC 7143, 6.3.5, 4.4.1).

mod table;
mod window;

pub use table::{Attachment, Claim, ConnectionKey, Leaving, SessionTable};
pub use window::{CommandWindow, Turn, Wake};

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::negotiation::SessionParameters;
use crate::target::{Reassignable, ReassignableTasks};

/// Initiator's part of the session identifier.
pub type Isid = [u8; 6];

/// Normal or discovery.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SessionKind {
    /// With SCSI commands.
    Normal,
    /// For SendTargets only.
    Discovery,
}

/// What a session is known by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct SessionIdentity {
    /// InitiatorName
    pub initiator_name: String,
    /// ISID
    pub isid: Isid,
    /// TargetName; none in discovery sessions.
    pub target_name: Option<String>,
    /// TargetPortalGroupTag
    pub portal_group_tag: u16,
    /// Normal or discovery.
    pub kind: SessionKind,
}

/// A session.
#[derive(Debug)]
pub struct Session {
    /// Who, with what target.
    pub identity: SessionIdentity,
    /// TSIH, never 0.
    pub tsih: u16,
    /// What was negotiated by the leading connection.
    pub parameters: SessionParameters,
    /// Command numbering.
    pub window: CommandWindow,
    /// Tasks whose connection was lost.
    pub reassignable: ReassignableTasks,
    closed: AtomicBool,
    count: AtomicU32,
    connections: Mutex<Vec<ConnectionKey>>,
}

impl Session {
    /// A session without connections; commands are numbered from `first_cmd_sn`, `window` of them at a time.
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

    /// Has the session ended? Its connections then drop.
    pub fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// A task has lost its connection.
    pub(crate) fn add_reassignable(&self, task: Reassignable) {
        if self.reassignable.add(task) {
            self.window.finished();
        }
    }

    /// Ends tasks without a connection, picked by ITT and connection, without an answer; those that run end by themselves.
    pub fn forget_reassignable(&self, is_meant: impl Fn(u32, ConnectionKey) -> bool) {
        for _ in 0..self.reassignable.forget(is_meant) {
            self.window.finished();
        }
    }

    /// A task that went on without its connection ends without an answer.
    pub fn end_running(&self, itt: u32) {
        if self.reassignable.end_running(itt) {
            self.window.finished();
        }
    }

    /// More than one connection?
    pub fn is_shared(&self) -> bool {
        self.count.load(Ordering::Acquire) > 1
    }

    /// The connections of the session.
    pub fn connections(&self) -> Vec<ConnectionKey> {
        self.lock().clone()
    }

    /// The connection with this CID.
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

    /// Gives what is left.
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
