//! The session: numbering, tasks, connections.

use std::collections::{BTreeSet, HashMap, VecDeque};

use super::events::InitiatorError;
use super::requests::{Request, Task, Waiting};
use crate::login::{ChapProgress, Credentials, InitiatorLogin, LoginRequestSettings, LoginResult};
use crate::negotiation::{Offer, SessionParameters};
use crate::pdu::{Decoder, Digests, IMMEDIATE, encode};
use crate::serial::before;

/// Settings of an initiator.
#[derive(Clone, Debug)]
pub struct InitiatorSettings {
    /// InitiatorName
    pub initiator_name: String,
    /// TargetName; `None` for a discovery session.
    pub target_name: Option<String>,
    /// ISID
    pub isid: [u8; 6],
    /// Proposed operational parameters.
    pub offer: Offer,
    /// CHAP credentials.
    pub credentials: Option<Credentials>,
    /// CmdSN of the first command.
    pub first_cmd_sn: u32,
    /// Maximum length of a text response in bytes.
    pub text_limit: usize,
}

/// The request is not possible in the current state.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("connection is not in the full feature phase")]
pub struct NotReady;

pub(super) enum Phase {
    Login(Box<InitiatorLogin>),
    Full,
    Over,
}

/// One connection of the session.
pub(super) struct Link {
    pub phase: Phase,
    pub decoder: Decoder,
    pub out: Vec<u8>,
    pub inline: Vec<u8>,
    pub digests: Digests,
    pub exp_stat_sn: u32,
    pub max_send: usize,
    pub login_itt: u32,
    /// CmdSNs that may have been lost with an earlier connection of this CID.
    pub gaps: Vec<u32>,
    /// The connection was lost and is being restored; its tasks are not attached yet.
    pub recovers: bool,
    /// Received StatSNs beyond `exp_stat_sn`, while an earlier response is requested again.
    pub ahead: BTreeSet<u32>,
    /// Number of response requests since the last received response.
    pub responses_asked: u32,
}

/// A session from the initiator's side.
pub struct Initiator {
    pub(super) settings: InitiatorSettings,
    pub(super) links: Vec<Link>,
    pub(super) parameters: SessionParameters,
    pub(super) tsih: u16,
    pub(super) cmd_sn: u32,
    pub(super) exp_cmd_sn: u32,
    pub(super) max_cmd_sn: u32,
    pub(super) next_itt: u32,
    pub(super) tasks: HashMap<u32, Task>,
    pub(super) waiting: VecDeque<Waiting>,
    /// Unsent parts of text requests.
    pub(super) unsent_text: HashMap<u32, Vec<u8>>,
}

impl std::fmt::Debug for Initiator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Initiator")
            .field("tsih", &self.tsih)
            .field("connections", &self.links.len())
            .field("tasks", &self.tasks.len())
            .finish_non_exhaustive()
    }
}

impl Initiator {
    /// Creates a session without connections.
    pub fn new(settings: InitiatorSettings) -> Self {
        let first = settings.first_cmd_sn;
        Initiator {
            settings,
            links: Vec::new(),
            parameters: SessionParameters::default(),
            tsih: 0,
            cmd_sn: first,
            exp_cmd_sn: first,
            max_cmd_sn: first.wrapping_sub(1),
            next_itt: 1,
            tasks: HashMap::new(),
            waiting: VecDeque::new(),
            unsent_text: HashMap::new(),
        }
    }

    /// Returns the progress of CHAP in the login of a connection.
    pub fn chap_progress(&self, cid: u16) -> ChapProgress {
        match self.links.get(usize::from(cid)).map(|link| &link.phase) {
            Some(Phase::Login(login)) => login.chap_progress(),
            Some(_) => ChapProgress::Passed,
            None => ChapProgress::NotOffered,
        }
    }

    /// Starts the login of a further connection and returns its CID. The leading connection must be logged in first.
    pub fn connect(&mut self) -> u16 {
        let cid = self.links.len() as u16;
        let link = self.login_link(cid);
        self.links.push(link);
        cid
    }

    /// Creates a connection that starts its login.
    pub(super) fn login_link(&mut self, cid: u16) -> Link {
        let mut login = InitiatorLogin::new(LoginRequestSettings {
            initiator_name: self.settings.initiator_name.clone(),
            target_name: self.settings.target_name.clone(),
            isid: self.settings.isid,
            tsih: self.tsih,
            cid,
            cmd_sn: self.cmd_sn,
            offer: self.settings.offer.clone(),
            credentials: self.settings.credentials.clone(),
        });
        let (mut request, text) = login.start();
        let login_itt = self.take_itt();
        request.itt.set(login_itt);
        let mut out = Vec::new();
        encode(&mut out, request.to_bhs(), &[], &text, Digests::default());
        Link {
            phase: Phase::Login(Box::new(login)),
            decoder: Decoder::new(0, 8192),
            out,
            inline: Vec::new(),
            digests: Digests::default(),
            exp_stat_sn: 0,
            max_send: 8192,
            login_itt,
            gaps: Vec::new(),
            recovers: false,
            ahead: BTreeSet::new(),
            responses_asked: 0,
        }
    }

    /// Returns the output buffer of a connection, which the caller drains.
    ///
    /// # Panics
    /// If the connection never existed.
    pub fn outgoing(&mut self, cid: u16) -> &mut Vec<u8> {
        &mut self.links[usize::from(cid)].out
    }

    /// Returns true if the connection is in the full feature phase and has its tasks.
    pub fn is_ready(&self, cid: u16) -> bool {
        self.links
            .get(usize::from(cid))
            .is_some_and(|link| matches!(link.phase, Phase::Full) && !link.recovers)
    }

    /// Returns the negotiated session parameters.
    pub fn parameters(&self) -> &SessionParameters {
        &self.parameters
    }

    /// Returns the number of tasks in progress.
    pub fn tasks_len(&self) -> usize {
        self.tasks.len()
    }

    /// Returns the CmdSN of the next command.
    pub fn cmd_sn(&self) -> u32 {
        self.cmd_sn
    }

    /// Returns MaxCmdSN.
    pub fn max_cmd_sn(&self) -> u32 {
        self.max_cmd_sn
    }

    pub(super) fn take_itt(&mut self) -> u32 {
        loop {
            let itt = self.next_itt;
            self.next_itt = itt.wrapping_add(1);
            if itt != crate::pdu::NO_TAG && !self.tasks.contains_key(&itt) {
                return itt;
            }
        }
    }

    pub(super) fn link(&mut self, cid: u16) -> Result<&mut Link, InitiatorError> {
        self.links
            .get_mut(usize::from(cid))
            .ok_or(InitiatorError::NoConnection(cid))
    }

    pub(super) fn logged_in(
        &mut self,
        cid: u16,
        result: &LoginResult,
    ) -> Result<(), InitiatorError> {
        let max_recv = self.settings.offer.max_recv_data_segment_length;
        if self.tsih == 0 {
            self.parameters = result.session.clone();
            self.tsih = result.tsih;
        }
        self.moved(result.exp_cmd_sn, result.max_cmd_sn);
        let link = self.link(cid)?;
        link.phase = Phase::Full;
        link.digests = result.connection.digests;
        link.decoder.set_digests(link.digests);
        link.decoder.set_data_limit(max_recv);
        link.max_send = result.connection.peer_max_recv as usize;
        link.exp_stat_sn = result.exp_stat_sn;
        if link.recovers {
            self.probe(cid, cid);
            return Ok(());
        }
        self.fill_gaps(cid)
    }

    /// Updates the command window (4.2.2.1); both numbers only increase.
    pub(super) fn moved(&mut self, exp_cmd_sn: u32, max_cmd_sn: u32) {
        if before(max_cmd_sn, exp_cmd_sn.wrapping_sub(1)) {
            return;
        }
        if before(self.exp_cmd_sn, exp_cmd_sn) {
            self.exp_cmd_sn = exp_cmd_sn;
        }
        if before(self.max_cmd_sn, max_cmd_sn) {
            self.max_cmd_sn = max_cmd_sn;
        }
        self.send_waiting();
    }

    /// Sends waiting requests as far as the window allows, on another connection if their own is lost.
    pub(super) fn send_waiting(&mut self) {
        while !before(self.max_cmd_sn, self.cmd_sn) {
            let Some(first) = self.waiting.front() else {
                return;
            };
            let itt = first.header.itt.get();
            let cid = match self.is_ready(first.cid) {
                true => Some(first.cid),
                false => (0..self.links.len() as u16).find(|cid| self.is_ready(*cid)),
            };
            let Some(cid) = cid else { return };
            let Some(mut waiting) = self.waiting.pop_front() else {
                return;
            };
            waiting.cid = cid;
            if let Some(task) = self.tasks.get_mut(&itt) {
                task.cid = cid;
            }
            self.send(waiting);
        }
    }

    /// Sends a request now, or queues it until the window allows it.
    pub(super) fn submit(&mut self, waiting: Waiting) {
        let immediate = waiting.header.opcode & IMMEDIATE != 0;
        let may = self.waiting.is_empty() && !before(self.max_cmd_sn, self.cmd_sn);
        if immediate || (may && self.is_ready(waiting.cid)) {
            self.send(waiting);
        } else {
            self.waiting.push_back(waiting);
        }
    }

    /// Returns the number of requests that wait for the window.
    pub fn waiting_len(&self) -> usize {
        self.waiting.len()
    }

    /// Builds a read request for [`Initiator::command`].
    pub fn read(lun: u64, cdb: &[u8], expected: u32) -> Request {
        Request {
            lun: lun.to_be_bytes(),
            cdb: cdb.to_vec(),
            read_length: Some(expected),
            ..Request::default()
        }
    }

    /// As [`Initiator::read`], with write data.
    pub fn write(lun: u64, cdb: &[u8], data: Vec<u8>) -> Request {
        Request {
            lun: lun.to_be_bytes(),
            cdb: cdb.to_vec(),
            write: Some(data),
            ..Request::default()
        }
    }
}
