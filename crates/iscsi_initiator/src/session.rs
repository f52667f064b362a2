//! A session over sockets: login with redirection, commands on several connections, responses in any order.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

use iscsi::initiator::{
    CommandDone, Event, Initiator, InitiatorError, InitiatorSettings, NotReady, Request,
    TaskManagementRequestFields,
};
use iscsi::login::{ChapProgress, Credentials, LoginError};
use iscsi::negotiation::{Offer, SessionParameters};
use iscsi::pdu::{LoginStatus, LogoutReason, TaskFunction};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::chap_fallback::{ChapMemory, log_in_with};
use crate::installation::installation;
use crate::link::{Link, RECEIVE_BYTES};
use crate::recovery::Recovery;
use iscsi::address::Portal;

/// Maximum number of redirections in a login.
const REDIRECTIONS_MAX: usize = 4;
/// Target moved temporarily or permanently (RFC 7143, 11.13.5).
const MOVED: [u16; 2] = [0x0101, 0x0102];
/// Maximum length of a text response in bytes, enough for some thousand targets.
const TEXT_MAX: usize = 1 << 20;
/// Events of Asynchronous Messages (11.9.1): the target requests a logout, drops this connection, or all of them.
const ASYNC_LOGOUT: u8 = 1;
const ASYNC_DROPS: [u8; 2] = [2, 3];

/// Options of a login.
#[derive(Clone, Debug)]
pub struct SessionOptions {
    /// InitiatorName; `None` uses the name of this installation.
    pub initiator_name: Option<String>,
    /// The session's part of the initiator port name (10.4.1); `None` uses a random one, so that sessions do not displace
    /// each other.
    pub isid: Option<[u8; 6]>,
    /// CHAP credentials.
    pub credentials: Option<Credentials>,
    /// CHAP algorithms that targets accepted, shared by all clones.
    pub chap_memory: ChapMemory,
    /// Number of connections, 1 to 16, reduced to the target's limit.
    pub connections: u16,
    /// Proposed operational parameters.
    pub offer: Offer,
    /// Maximum silence of a target while a request is outstanding, and time limit for a connection attempt.
    pub timeout: Duration,
}

impl Default for SessionOptions {
    /// The name of this installation, one connection, and common values for immediate and unsolicited data.
    fn default() -> Self {
        SessionOptions {
            initiator_name: None,
            isid: None,
            credentials: None,
            chap_memory: ChapMemory::default(),
            connections: 1,
            offer: Offer::of_initiators(),
            timeout: Duration::from_secs(30),
        }
    }
}

/// Fills a buffer with random bytes. Returns false if the system provides none.
pub(crate) fn random_bytes(bytes: &mut [u8]) -> bool {
    getrandom::fill(bytes).is_ok()
}

/// Returns a random ISID, in the random format (RFC 7143, 11.12.5).
pub fn random_isid() -> [u8; 6] {
    let mut isid = [0; 6];
    // Fallback without entropy: process ID and time.
    if !random_bytes(&mut isid) {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        let nanos = now.map_or(0, |time| time.subsec_nanos());
        isid[1..5].copy_from_slice(&(nanos ^ std::process::id()).to_be_bytes());
    }
    isid[0] = 0x80;
    isid
}

fn connect_hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::ConnectionRefused => {
            "; hint: check that the iSCSI target runs and listens there"
        }
        _ => "",
    }
}

/// Returns a hint for a target name that the portal does not have, and for a target that does not admit this initiator.
fn login_hint(portal: &Portal, initiator: &str, error: &InitiatorError) -> String {
    let InitiatorError::Login(LoginError::Refused { status, .. }) = error else {
        return String::new();
    };
    match LoginStatus::from_wire(*status) {
        Some(LoginStatus::NotFound) => format!("; hint: lunette iscsi discover {portal}"),
        Some(LoginStatus::AuthorizationFailure) => {
            format!("; hint: add {initiator} to the initiators that the target admits")
        }
        _ => String::new(),
    }
}

/// Reason for a failed or ended session.
#[derive(Debug, thiserror::Error)]
pub enum SessionError {
    /// No address of the portal accepts a connection.
    #[error("cannot connect to {portal}: {error}{}", connect_hint(error))]
    Connect {
        /// The portal.
        portal: Portal,
        /// Error of the system.
        error: io::Error,
    },
    /// The login failed.
    #[error(
        "cannot log in to {target} at {portal} as {initiator}: {error}{}",
        login_hint(portal, initiator, error)
    )]
    Login {
        /// The target; `discovery` for a discovery session.
        target: String,
        /// The portal.
        portal: Portal,
        /// InitiatorName of the login. Targets admit initiators by name.
        initiator: String,
        /// Reason.
        error: InitiatorError,
    },
    /// The connection is lost.
    #[error("connection {cid} to {portal} is lost: {error}")]
    Lost {
        /// CID of the connection.
        cid: u16,
        /// The portal.
        portal: Portal,
        /// Error of the system.
        error: io::Error,
    },
    /// The target violated the protocol.
    #[error("{portal}: {error}")]
    Broken {
        /// The portal.
        portal: Portal,
        /// The violation.
        error: InitiatorError,
    },
    /// The target was silent for too long.
    #[error("no response from {portal} for {} s", waited.as_secs())]
    Silent {
        /// The portal.
        portal: Portal,
        /// Duration of the silence.
        waited: Duration,
    },
    /// The target rejected a PDU.
    #[error("{portal} rejected a PDU (reason {reason:#04x} of RFC 7143, 11.17.1)")]
    Rejected {
        /// The portal.
        portal: Portal,
        /// Reason code.
        reason: u8,
    },
    /// The target requested the end of the session.
    #[error("{portal} requests a logout or drops the connection")]
    Dismissed {
        /// The portal.
        portal: Portal,
    },
    /// A connection was lost, and the target no longer has one of its commands.
    #[error("a command was lost with a connection to {portal}: its result is unknown")]
    NotRecovered {
        /// The portal.
        portal: Portal,
    },
    /// This installation has no initiator name.
    #[error("{0}")]
    Identity(String),
    /// The session has ended.
    #[error(transparent)]
    NotReady(#[from] NotReady),
}

type Result<T> = std::result::Result<T, SessionError>;

/// A session after login.
pub struct Session {
    pub(crate) initiator: Initiator,
    pub(crate) links: Vec<Link>,
    pub(crate) portal: Portal,
    target: Option<String>,
    initiator_name: String,
    portal_group: Option<u16>,
    pub(crate) timeout: Duration,
    /// Time of the last received bytes, or of the first request in flight.
    last_received: Instant,
    /// Commands in flight by ITT, with the CID of each.
    pub(crate) in_flight: HashMap<u32, u16>,
    pub(crate) done: VecDeque<CommandDone>,
    pub(crate) other: VecDeque<Event>,
    pub(crate) recovery: Recovery,
    /// The rejected command, with its write data.
    pub(crate) rejected: Option<(u32, Vec<u8>)>,
    buffer: Box<[u8]>,
}

impl Session {
    /// Logs in to `target` at `portal`, follows redirections, and opens all connections.
    ///
    /// # Errors
    /// The reason for the failure.
    pub fn login(portal: &Portal, target: &str, options: &SessionOptions) -> Result<Session> {
        let mut session = Session::leading(portal, Some(target), options)?;
        let allowed = session.initiator.parameters().max_connections;
        for _ in 1..options.connections.min(allowed) {
            session.add_connection()?;
        }
        Ok(session)
    }

    /// Opens a discovery session (RFC 7143, 4.3).
    ///
    /// # Errors
    /// The reason for the failure.
    pub fn discovery(portal: &Portal, options: &SessionOptions) -> Result<Session> {
        Session::leading(portal, None, options)
    }

    fn leading(portal: &Portal, target: Option<&str>, options: &SessionOptions) -> Result<Session> {
        let mut portal = portal.clone();
        for _ in 0..REDIRECTIONS_MAX {
            match Session::leading_at(&portal, target, options) {
                Err(SessionError::Login {
                    error:
                        InitiatorError::Login(LoginError::Refused {
                            status,
                            address: Some(address),
                        }),
                    ..
                }) if MOVED.contains(&status) && address.parse::<Portal>().is_ok() => {
                    portal = address.parse().unwrap_or(portal);
                }
                other => return other,
            }
        }
        Session::leading_at(&portal, target, options)
    }

    fn leading_at(
        portal: &Portal,
        target: Option<&str>,
        options: &SessionOptions,
    ) -> Result<Session> {
        let Some(credentials) = &options.credentials else {
            let session = Session::leading_with(portal, target, options, None);
            return session.map_err(|(error, _)| error);
        };
        let (allowed, memory) = (&credentials.algorithms, &options.chap_memory);
        log_in_with((portal, target), allowed, memory, |algorithms| {
            let credentials = Credentials {
                algorithms: algorithms.to_vec(),
                ..credentials.clone()
            };
            Session::leading_with(portal, target, options, Some(credentials))
        })
    }

    /// Makes one login attempt. An error includes the progress of CHAP.
    fn leading_with(
        portal: &Portal,
        target: Option<&str>,
        options: &SessionOptions,
        credentials: Option<Credentials>,
    ) -> std::result::Result<Session, (SessionError, ChapProgress)> {
        let isid = options.isid.unwrap_or_else(random_isid);
        let initiator_name = match &options.initiator_name {
            Some(name) => name.clone(),
            None => {
                let own = installation().map_err(SessionError::Identity);
                own.map_err(|error| (error, ChapProgress::NotOffered))?
                    .name
                    .clone()
            }
        };
        let mut offer = options.offer.clone();
        // At error recovery level 2 some targets count a lost connection until it is restored.
        let spare = u16::from(offer.session.error_recovery_level == 2);
        offer.session.max_connections = options.connections.max(1) + spare;
        // The larger value applies (13.15), so 0 lets the target choose the delay after a loss.
        offer.session.time_to_wait = 0;
        let mut session = Session {
            initiator: Initiator::new(InitiatorSettings {
                initiator_name: initiator_name.clone(),
                target_name: target.map(str::to_owned),
                isid,
                offer,
                credentials,
                first_cmd_sn: 1,
                text_limit: TEXT_MAX,
            }),
            links: Vec::new(),
            portal: portal.clone(),
            target: target.map(str::to_owned),
            initiator_name,
            portal_group: None,
            timeout: options.timeout,
            last_received: Instant::now(),
            in_flight: HashMap::new(),
            done: VecDeque::new(),
            other: VecDeque::new(),
            recovery: Recovery::default(),
            rejected: None,
            buffer: vec![0; RECEIVE_BYTES].into(),
        };
        match session.add_connection() {
            Ok(()) => Ok(session),
            Err(error) => Err((error, session.initiator.chap_progress(0))),
        }
    }

    fn add_connection(&mut self) -> Result<()> {
        let connected = Link::connect(&self.portal, self.timeout);
        let link = connected.map_err(|error| SessionError::Connect {
            portal: self.portal.clone(),
            error,
        })?;
        self.links.push(link);
        let cid = self.initiator.connect();
        let begun = Instant::now();
        self.last_received = begun;
        while !self.initiator.is_ready(cid) {
            self.move_bytes().map_err(|error| self.of_login(error))?;
            // A target that sends a byte occasionally cannot extend a login.
            if begun.elapsed() > self.timeout && !self.initiator.is_ready(cid) {
                return Err(SessionError::Silent {
                    portal: self.portal.clone(),
                    waited: begun.elapsed(),
                });
            }
        }
        Ok(())
    }

    fn of_login(&self, error: SessionError) -> SessionError {
        match error {
            SessionError::Broken { portal, error } => SessionError::Login {
                target: self
                    .target
                    .clone()
                    .unwrap_or_else(|| "discovery".to_owned()),
                portal,
                initiator: self.initiator_name.clone(),
                error,
            },
            other => other,
        }
    }

    /// Returns the number of connections.
    pub fn connections(&self) -> usize {
        self.links.len()
    }

    /// Returns the portal.
    pub fn portal(&self) -> &Portal {
        &self.portal
    }

    /// Returns the tag of the portal group, if the target sent it. With ISID and names it identifies the session.
    pub(crate) fn portal_group(&self) -> Option<u16> {
        self.portal_group
    }

    /// Returns the negotiated parameters.
    pub fn parameters(&self) -> &SessionParameters {
        self.initiator.parameters()
    }

    /// Returns the number of commands in flight.
    pub fn in_flight(&self) -> usize {
        self.in_flight.len()
    }

    /// Starts a command on the connection with the fewest in flight. Returns its ITT, which identifies its [`CommandDone`].
    ///
    /// # Errors
    /// If the session has ended.
    pub fn submit(&mut self, request: Request) -> Result<u32> {
        let (itt, cid) = self.enqueue(request)?;
        self.send(cid)?;
        Ok(itt)
    }

    /// As `submit`, without sending.
    pub(crate) fn enqueue(&mut self, request: Request) -> Result<(u32, u16)> {
        let links = (0u16..).zip(&self.links);
        let cid = links.min_by_key(|(cid, link)| (!self.initiator.is_ready(*cid), link.commands));
        let cid = cid.map_or(0, |(cid, _)| cid);
        if self.in_flight.is_empty() {
            self.last_received = Instant::now();
        }
        let itt = self.initiator.command(cid, request)?;
        self.in_flight.insert(itt, cid);
        if let Some(link) = self.links.get_mut(usize::from(cid)) {
            link.commands += 1;
        }
        Ok((itt, cid))
    }

    /// Waits for the next completed command.
    ///
    /// # Errors
    /// If the session has ended, or no command is in flight.
    pub fn wait(&mut self) -> Result<CommandDone> {
        loop {
            if let Some(done) = self.done.pop_front() {
                return Ok(done);
            }
            self.all_recovered()?;
            if self.in_flight.is_empty() {
                return Err(NotReady.into());
            }
            self.move_bytes()?;
        }
    }

    /// Returns the next completed command; waits up to `limit`.
    ///
    /// # Errors
    /// If the session has ended.
    pub fn poll(&mut self, limit: Duration) -> Result<Option<CommandDone>> {
        if self.done.is_empty() {
            let moved = self.move_bytes_until(None, limit)?;
            let waited = self.last_received.elapsed();
            if !moved && !self.in_flight.is_empty() && waited > self.timeout {
                return Err(SessionError::Silent {
                    portal: self.portal.clone(),
                    waited,
                });
            }
            self.other.clear();
            self.all_recovered()?;
        }
        Ok(self.done.pop_front())
    }

    /// Executes one command. Other commands that complete in the meantime are stored for [`Session::wait`].
    ///
    /// # Errors
    /// If the session has ended.
    pub fn run(&mut self, request: Request) -> Result<CommandDone> {
        let itt = self.submit(request)?;
        loop {
            if let Some(at) = self.done.iter().position(|done| done.itt == itt)
                && let Some(done) = self.done.remove(at)
            {
                return Ok(done);
            }
            self.all_recovered()?;
            self.move_bytes()?;
        }
    }

    /// Sends a NOP-Out with `data` on the connection `cid`, and returns the round-trip time.
    ///
    /// # Errors
    /// If the session has ended, or the echoed data differs.
    pub fn ping(&mut self, cid: u16, data: &[u8]) -> Result<Duration> {
        let begun = Instant::now();
        self.last_received = begun;
        let itt = self.initiator.nop_out(cid, data.to_vec(), true)?;
        let answer =
            self.wait_for(|event| matches!(event, Event::Nop { itt: of, .. } if *of == itt))?;
        match answer {
            Event::Nop { data: came, .. } if came == data => Ok(begun.elapsed()),
            _ => Err(SessionError::Broken {
                portal: self.portal.clone(),
                error: InitiatorError::Protocol("NOP-In with other data than the NOP-Out"),
            }),
        }
    }

    /// Sends text and returns the target's text.
    ///
    /// # Errors
    /// If the session has ended.
    pub fn text(&mut self, text: &[u8]) -> Result<Vec<u8>> {
        self.last_received = Instant::now();
        let itt = self.initiator.text(0, text)?;
        let answer =
            self.wait_for(|event| matches!(event, Event::Text { itt: of, .. } if *of == itt))?;
        match answer {
            Event::Text { text, .. } => Ok(text),
            _ => Ok(Vec::new()),
        }
    }

    /// Aborts all tasks of a logical unit from all initiators (LOGICAL UNIT RESET, 11.5). Returns the response code.
    ///
    /// # Errors
    /// If the session has ended.
    pub fn reset_unit(&mut self, lun: u64) -> Result<u8> {
        self.last_received = Instant::now();
        let fields = TaskManagementRequestFields {
            function: TaskFunction::LogicalUnitReset,
            lun: lun.to_be_bytes(),
            referenced: None,
        };
        let itt = self.initiator.task_management(0, fields)?;
        let answer = self
            .wait_for(|event| matches!(event, Event::TaskManagement { itt: of, .. } if *of == itt));
        match answer? {
            Event::TaskManagement { response, .. } => Ok(response),
            _ => Err(NotReady.into()),
        }
    }

    /// Logs the session out.
    ///
    /// # Errors
    /// If the session had already ended.
    pub fn logout(mut self) -> Result<()> {
        self.last_received = Instant::now();
        let itt = self.initiator.logout(0, LogoutReason::CloseSession, 0)?;
        let answer =
            self.wait_for(|event| matches!(event, Event::LoggedOut { itt: of, .. } if *of == itt));
        match answer {
            // The target closes all connections; the end of another one may be detected before the response.
            Ok(_) | Err(SessionError::Lost { .. }) => Ok(()),
            Err(error) => Err(error),
        }
    }

    fn wait_for(&mut self, is_meant: impl Fn(&Event) -> bool) -> Result<Event> {
        loop {
            if let Some(at) = self.other.iter().position(&is_meant)
                && let Some(event) = self.other.remove(at)
            {
                return Ok(event);
            }
            self.other.clear();
            self.move_bytes()?;
        }
    }

    pub(crate) fn send(&mut self, cid: u16) -> Result<()> {
        let Some(link) = self.links.get_mut(usize::from(cid)) else {
            return Ok(());
        };
        if link.is_lost {
            return Ok(());
        }
        let sent = link.send(self.initiator.outgoing(cid));
        sent.map_err(|error| self.lost(cid, error))
    }

    pub(crate) fn lost(&self, cid: u16, error: io::Error) -> SessionError {
        SessionError::Lost {
            cid,
            portal: self.portal.clone(),
            error,
        }
    }

    /// Sends pending data and processes received data on all connections.
    fn move_bytes(&mut self) -> Result<()> {
        let left = self.timeout.saturating_sub(self.last_received.elapsed());
        match self.move_bytes_until(None, left)? {
            true => Ok(()),
            false => Err(SessionError::Silent {
                portal: self.portal.clone(),
                waited: self.last_received.elapsed(),
            }),
        }
    }

    /// As `move_bytes`, until `limit` has passed or `wake` is readable. Returns false if nothing happened.
    pub(crate) fn move_bytes_until(
        &mut self,
        wake: Option<BorrowedFd<'_>>,
        limit: Duration,
    ) -> Result<bool> {
        self.recover()?;
        for cid in 0..self.links.len() as u16 {
            let sent = self.send(cid);
            self.or_recover(cid, sent)?;
        }
        let limit = limit.min(self.next_recovery());
        // A lost connection has no more useful events.
        let here: Vec<u16> = (0..self.links.len() as u16)
            .filter(|cid| !self.links[usize::from(*cid)].is_lost)
            .collect();
        let links = here.iter().map(|cid| {
            let link = &self.links[usize::from(*cid)];
            let mut events = PollFlags::empty();
            events.set(PollFlags::OUT, link.is_sending());
            events.set(PollFlags::IN, !link.is_full());
            PollFd::new(&link.stream, events)
        });
        let wake = wake.map(|wake| PollFd::from_borrowed_fd(wake, PollFlags::IN));
        let mut fds: Vec<PollFd<'_>> = links.chain(wake).collect();
        match poll(&mut fds, Timespec::try_from(limit).ok().as_ref()) {
            Ok(0) => return Ok(self.is_recovering()),
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(self.lost(0, errno.into())),
        }
        let ready = PollFlags::IN | PollFlags::HUP | PollFlags::ERR;
        let is_ready = |fd: &PollFd<'_>| fd.revents().intersects(ready);
        let readable: Vec<bool> = fds[..here.len()].iter().map(is_ready).collect();
        for (cid, _) in here.into_iter().zip(readable).filter(|(_, ready)| *ready) {
            let received = self.receive(cid);
            self.or_recover(cid, received)?;
        }
        Ok(true)
    }

    fn receive(&mut self, cid: u16) -> Result<()> {
        let Some(link) = self.links.get_mut(usize::from(cid)) else {
            return Ok(());
        };
        let came = match link.receive(&mut self.buffer) {
            Ok(Some(0)) => Err(io::Error::new(
                io::ErrorKind::UnexpectedEof,
                "the target closed the connection",
            )),
            Ok(Some(bytes)) => Ok(bytes),
            Ok(None) => return Ok(()),
            Err(error) => Err(error),
        };
        let bytes = came.map_err(|error| self.lost(cid, error))?;
        self.last_received = Instant::now();
        let mut events = Vec::new();
        let received = self
            .initiator
            .receive_into(cid, &self.buffer[..bytes], &mut events);
        // All events are processed, so that commands completed before a protocol error are not lost.
        let mut taken = Ok(());
        for event in events {
            taken = taken.and(self.take(event));
        }
        taken?;
        received.map_err(|error| SessionError::Broken {
            portal: self.portal.clone(),
            error,
        })
    }

    fn take(&mut self, event: Event) -> Result<()> {
        match event {
            Event::Command(done) => {
                let cid = self.in_flight.remove(&done.itt);
                let link = cid.and_then(|cid| self.links.get_mut(usize::from(cid)));
                if let Some(link) = link {
                    link.commands -= 1;
                }
                self.done.push_back(done);
                self.recovery.record_progress();
            }
            Event::Recovered { cid, to } => self.complete_recovery(cid, to),
            Event::Lost { itt, written } => self.recovery.lost.push((itt, written)),
            Event::Rejected {
                reason,
                header,
                written,
            } => {
                let itt = header.map(|header| header.itt.get());
                self.rejected = itt.map(|itt| (itt, written));
                return Err(SessionError::Rejected {
                    portal: self.portal.clone(),
                    reason,
                });
            }
            Event::Async { event, .. } if event == ASYNC_LOGOUT || ASYNC_DROPS.contains(&event) => {
                return Err(SessionError::Dismissed {
                    portal: self.portal.clone(),
                });
            }
            Event::LoggedIn(result) => {
                self.portal_group = self.portal_group.or(result.portal_group_tag);
            }
            Event::Async { .. } => {}
            other => self.other.push_back(other),
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_login_names_the_initiator_and_its_remedy() {
        let refused = |status| SessionError::Login {
            target: "iqn.2026-11.org.example:t1".to_owned(),
            portal: "192.0.2.1:3261".parse().unwrap(),
            initiator: "iqn.2026-11.org.example:host1".to_owned(),
            error: LoginError::Refused {
                status,
                address: None,
            }
            .into(),
        };
        // Target Not Found (RFC 7143, 11.13.5)
        let text = refused(0x0203).to_string();
        assert!(
            text.ends_with("; hint: lunette iscsi discover 192.0.2.1:3261"),
            "{text}"
        );
        // Authorization failure: the target's access list does not have this initiator.
        let text = refused(0x0202).to_string();
        assert!(
            text.ends_with(
                "; hint: add iqn.2026-11.org.example:host1 to the initiators that the target admits"
            ),
            "{text}"
        );
        for status in [0x0201, 0x0202, 0x0203, 0x0300] {
            let text = refused(status).to_string();
            assert!(
                text.contains(" as iqn.2026-11.org.example:host1: "),
                "{text}"
            );
        }
        assert!(!refused(0x0300).to_string().contains("hint"));
    }
}
