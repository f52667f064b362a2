//! All sessions of a target or a daemon. Login creates, joins or reinstates a session; the end of a connection leaves it.

use std::sync::{Arc, Mutex, PoisonError};

use super::{Session, SessionIdentity};
use crate::negotiation::SessionParameters;
use crate::pdu::LoginStatus;

/// Identifies one connection, distinct from earlier connections with the same CID.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ConnectionKey {
    /// TSIH of the session.
    pub tsih: u16,
    /// CID in the session.
    pub cid: u16,
    /// Login counter.
    pub serial: u64,
}

/// Request of a login for a session.
#[derive(Clone, Debug)]
pub struct Claim {
    /// Initiator and target.
    pub identity: SessionIdentity,
    /// TSIH of the session to join; 0 for a new session.
    pub tsih: u16,
    /// Connection identifier.
    pub cid: u16,
    /// Negotiated parameters, used for a new session only.
    pub parameters: SessionParameters,
    /// CmdSN of the login.
    pub cmd_sn: u32,
    /// Maximum number of commands in progress if lower than the table's limit; used for a new session only.
    pub window: Option<u32>,
}

/// Result of joining or creating a session.
#[derive(Clone, Debug)]
pub struct Attachment {
    /// The session.
    pub session: Arc<Session>,
    /// Key of this connection in the session.
    pub connection: ConnectionKey,
    /// Connections displaced by session or connection reinstatement; they must be dropped.
    pub displaced: Vec<ConnectionKey>,
}

/// How a connection leaves its session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leaving {
    /// Logout. The session ends with its last connection.
    LoggedOut,
    /// Connection failure. At error recovery levels 0 and 1 the session ends too.
    Lost,
    /// Logout for recovery. Tasks wait for reassignment, even if the session has no connection.
    ForRecovery,
}

#[derive(Debug, Default)]
struct Inner {
    sessions: Vec<Arc<Session>>,
    last_tsih: u16,
    serial: u64,
}

/// Sessions, by TSIH and by identity.
#[derive(Debug)]
pub struct SessionTable {
    inner: Mutex<Inner>,
    max_sessions: usize,
    window: u32,
}

impl SessionTable {
    /// Creates an empty table for at most `max_sessions` sessions with `window` commands each.
    pub fn new(max_sessions: usize, window: u32) -> Self {
        SessionTable {
            inner: Mutex::new(Inner::default()),
            max_sessions,
            window,
        }
    }

    /// Returns the session with this TSIH.
    pub fn session(&self, tsih: u16) -> Option<Arc<Session>> {
        self.lock()
            .sessions
            .iter()
            .find(|session| session.tsih == tsih)
            .cloned()
    }

    /// Returns all sessions.
    pub fn sessions(&self) -> Vec<Arc<Session>> {
        self.lock().sessions.clone()
    }

    /// Joins, reinstates or creates a session.
    pub fn attach(&self, claim: Claim) -> Result<Attachment, LoginStatus> {
        let mut inner = self.lock();
        inner.serial += 1;
        let serial = inner.serial;
        if claim.tsih == 0 {
            self.open(&mut inner, claim, serial)
        } else {
            join(&inner, claim, serial)
        }
    }

    /// Removes a connection. Returns the connections that must be dropped because the session ends.
    pub fn detach(&self, key: ConnectionKey, leaving: Leaving) -> Vec<ConnectionKey> {
        let mut inner = self.lock();
        let Some(index) = inner
            .sessions
            .iter()
            .position(|session| session.tsih == key.tsih)
        else {
            return Vec::new();
        };
        let session = &inner.sessions[index];
        if !session.lock().contains(&key) {
            return Vec::new();
        }
        let is_last = session.remove(key) == 0;
        let ends = match leaving {
            Leaving::LoggedOut => is_last,
            Leaving::Lost => true,
            Leaving::ForRecovery => false,
        };
        if ends {
            let session = inner.sessions.swap_remove(index);
            return session.close();
        }
        Vec::new()
    }

    /// Ends a session that has no connection. Returns false if no such session exists.
    pub fn end_abandoned(&self, tsih: u16) -> bool {
        let mut inner = self.lock();
        let mut sessions = inner.sessions.iter();
        let is_it =
            |session: &Arc<Session>| session.tsih == tsih && session.connections().is_empty();
        let Some(index) = sessions.position(is_it) else {
            return false;
        };
        inner.sessions.swap_remove(index).close();
        true
    }

    fn open(
        &self,
        inner: &mut Inner,
        claim: Claim,
        serial: u64,
    ) -> Result<Attachment, LoginStatus> {
        // Same initiator port and target port: the new session reinstates the old one (6.3.5).
        let displaced = match inner
            .sessions
            .iter()
            .position(|session| session.identity == claim.identity)
        {
            Some(index) => inner.sessions.swap_remove(index).close(),
            None if inner.sessions.len() >= self.max_sessions => {
                return Err(LoginStatus::OutOfResources);
            }
            None => Vec::new(),
        };
        let tsih = free_tsih(inner).ok_or(LoginStatus::OutOfResources)?;
        let session = Session::new(
            claim.identity,
            tsih,
            claim.parameters,
            claim.cmd_sn,
            claim.window.unwrap_or(self.window).min(self.window),
        );
        let session = Arc::new(session);
        let connection = ConnectionKey {
            tsih,
            cid: claim.cid,
            serial,
        };
        session.add(connection);
        inner.sessions.push(session.clone());
        Ok(Attachment {
            session,
            connection,
            displaced,
        })
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn join(inner: &Inner, claim: Claim, serial: u64) -> Result<Attachment, LoginStatus> {
    let session = inner
        .sessions
        .iter()
        .find(|session| session.tsih == claim.tsih);
    let session = session.ok_or(LoginStatus::SessionDoesNotExist)?.clone();
    if session.identity != claim.identity {
        return Err(LoginStatus::CannotIncludeInSession);
    }
    // Same CID: connection reinstatement (6.3.4) drops the old connection.
    let displaced: Vec<ConnectionKey> = session.connection(claim.cid).into_iter().collect();
    let left = session.connections().len() - displaced.len();
    if left >= usize::from(session.parameters.max_connections) {
        return Err(LoginStatus::TooManyConnections);
    }
    for old in &displaced {
        session.remove(*old);
    }
    let connection = ConnectionKey {
        tsih: claim.tsih,
        cid: claim.cid,
        serial,
    };
    session.add(connection);
    Ok(Attachment {
        session,
        connection,
        displaced,
    })
}

fn free_tsih(inner: &mut Inner) -> Option<u16> {
    for _ in 0..u16::MAX {
        inner.last_tsih = inner.last_tsih.checked_add(1).unwrap_or(1);
        if inner
            .sessions
            .iter()
            .all(|session| session.tsih != inner.last_tsih)
        {
            return Some(inner.last_tsih);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::super::SessionKind;
    use super::*;

    fn claim(name: &str, tsih: u16, cid: u16) -> Claim {
        Claim {
            identity: SessionIdentity {
                initiator_name: name.to_owned(),
                isid: [0x80, 0, 0, 0, 0, 1],
                target_name: Some("iqn.2026-11.org.example:t0".to_owned()),
                portal_group_tag: 1,
                kind: SessionKind::Normal,
            },
            tsih,
            cid,
            parameters: SessionParameters {
                max_connections: 2,
                ..SessionParameters::default()
            },
            cmd_sn: 1,
            window: None,
        }
    }

    #[test]
    fn same_isid_with_tsih_0_reinstates_the_session() {
        let table = SessionTable::new(8, 32);
        let old = table.attach(claim("iqn.a", 0, 0)).unwrap();
        let new = table.attach(claim("iqn.a", 0, 0)).unwrap();
        assert_eq!(new.displaced, [old.connection]);
        assert!(old.session.is_closed() && !new.session.is_closed());
        assert_eq!(
            table.detach(old.connection, Leaving::Lost),
            [],
            "the old connection's end does not touch the new session"
        );
        assert_eq!(table.sessions().len(), 1);
    }

    #[test]
    fn connections_join_by_tsih_up_to_max_connections() {
        let table = SessionTable::new(8, 32);
        let leading = table.attach(claim("iqn.a", 0, 0)).unwrap();
        let tsih = leading.session.tsih;
        assert!(!leading.session.is_shared());
        let second = table.attach(claim("iqn.a", tsih, 1)).unwrap();
        assert!(leading.session.is_shared());
        assert_eq!(
            table.attach(claim("iqn.a", tsih, 2)).unwrap_err(),
            LoginStatus::TooManyConnections
        );
        assert_eq!(
            table.attach(claim("iqn.b", tsih, 2)).unwrap_err(),
            LoginStatus::CannotIncludeInSession
        );
        assert_eq!(
            table.attach(claim("iqn.a", tsih + 1, 2)).unwrap_err(),
            LoginStatus::SessionDoesNotExist
        );
        let again = table.attach(claim("iqn.a", tsih, 1)).unwrap();
        assert_eq!(
            again.displaced,
            [second.connection],
            "connection reinstatement"
        );
        assert_eq!(table.detach(leading.connection, Leaving::LoggedOut), []);
        assert_eq!(table.detach(again.connection, Leaving::LoggedOut), []);
        assert!(
            table.sessions().is_empty(),
            "a session ends with its last connection"
        );
    }

    #[test]
    fn sessions_are_bounded() {
        let table = SessionTable::new(1, 32);
        table.attach(claim("iqn.a", 0, 0)).unwrap();
        assert_eq!(
            table.attach(claim("iqn.b", 0, 0)).unwrap_err(),
            LoginStatus::OutOfResources
        );
    }
}
