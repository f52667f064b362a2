//! The target's side of the login phase: one response per request, until the full feature phase or a refusal.
//!
//! Input is untrusted: requests and text are bounded, a key may occur once, stages only advance. Stage and status rules:
//! RFC 7143, 6.3, 11.12, 11.13.

use std::sync::Arc;

use smallvec::SmallVec;
use zerocopy::big_endian::{U16, U32};

use super::authenticate::{Authentication, ChapFailure};
use super::{Admission, Refusal, TargetPolicy, Visitor};
use crate::Limits;
use crate::negotiation::{Answer, ConnectionParameters, Offer, Responder, SessionParameters};
use crate::pdu::{CONTINUE, FINAL, LoginRequest, LoginResponse, LoginStatus, Stage};
use crate::session::{Claim, ConnectionKey, Session, SessionIdentity, SessionKind};
use crate::text::{Collector, Pair, parse, push_pair};

/// A connection in the full feature phase.
#[derive(Clone, Debug)]
pub struct LoggedIn {
    /// The session.
    pub session: Arc<Session>,
    /// Key of this connection in the session.
    pub connection: ConnectionKey,
    /// Connections displaced by this login; the caller drops them.
    pub displaced: Vec<ConnectionKey>,
    /// Negotiated connection parameters.
    pub parameters: ConnectionParameters,
    /// The initiator.
    pub visitor: Visitor,
    /// InitiatorAlias, if sent.
    pub initiator_alias: Option<String>,
    /// StatSN of the first response after the login phase.
    pub stat_sn: u32,
    /// MaxRecvDataSegmentLength of the target.
    pub max_recv: u32,
    /// The negotiation state, which is also used in the full feature phase.
    pub(crate) responder: Responder,
}

/// State of the login after a request.
#[derive(Clone, Debug)]
pub enum LoginOutcome {
    /// More requests are expected.
    Continues,
    /// The full feature phase is reached.
    Done(Box<LoggedIn>),
    /// The login failed; the connection must be dropped after the response is sent.
    Failed(LoginStatus),
}

/// A response to send.
#[derive(Debug)]
pub struct LoginReply {
    /// The header; its length fields are not set yet.
    pub header: LoginResponse,
    /// The data segment.
    pub text: Vec<u8>,
    /// State of the login after this response.
    pub outcome: LoginOutcome,
}

/// Fields of the first request that must not change during the login phase.
struct Opening {
    isid: [u8; 6],
    tsih: u16,
    cid: u16,
    itt: u32,
    cmd_sn: u32,
}

/// State of a login phase.
pub struct TargetLogin {
    policy: Arc<dyn TargetPolicy>,
    visitor: Visitor,
    kind: SessionKind,
    alias: Option<String>,
    opening: Option<Opening>,
    stage: Stage,
    stat_sn: u32,
    requests_left: u32,
    collector: Collector,
    admission: Option<Admission>,
    authentication: Authentication,
    responder: Responder,
    joins: Option<Arc<Session>>,
    declared: SmallVec<[(&'static str, String); 4]>,
    declared_max_recv: bool,
}

impl std::fmt::Debug for TargetLogin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TargetLogin")
            .field("visitor", &self.visitor)
            .field("stage", &self.stage)
            .field("authentication", &self.authentication)
            .finish_non_exhaustive()
    }
}

impl TargetLogin {
    /// Creates the state of a new connection. Only the addresses of `visitor` are used.
    pub fn new(policy: Arc<dyn TargetPolicy>, visitor: Visitor, limits: &Limits) -> Self {
        TargetLogin {
            policy,
            visitor: Visitor {
                initiator_name: String::new(),
                target_name: None,
                chap_user: None,
                ..visitor
            },
            kind: SessionKind::Normal,
            alias: None,
            opening: None,
            stage: Stage::Security,
            stat_sn: 0,
            requests_left: limits.login_requests,
            collector: Collector::new(limits.text_bytes),
            admission: None,
            authentication: Authentication::new(),
            responder: Responder::new(Offer::default()),
            joins: None,
            declared: SmallVec::new(),
            declared_max_recv: false,
        }
    }

    /// Returns the claimed CHAP user and the reason of a failed authentication.
    pub fn chap_failure(&self) -> Option<(Option<&str>, ChapFailure)> {
        self.authentication.failure()
    }

    /// Returns the initiator as identified so far.
    pub fn visitor(&self) -> &Visitor {
        &self.visitor
    }

    /// Processes a request and its data segment.
    pub fn handle(&mut self, request: &LoginRequest, segment: &[u8]) -> LoginReply {
        let mut text = Vec::new();
        if self.opening.is_none() {
            self.stat_sn = request.exp_stat_sn.get();
        }
        let result = self.step(request, segment, &mut text);
        let mut header = LoginResponse::blank();
        header.flags = request.flags & 0x0c;
        header.isid = request.isid;
        header.tsih = request.tsih;
        header.itt = request.itt;
        header.stat_sn = U32::new(self.stat_sn);
        self.stat_sn = self.stat_sn.wrapping_add(1);
        let (expected, maximum) = match &self.joins {
            Some(session) => (session.window.exp_cmd_sn(), session.window.max_cmd_sn()),
            None => (request.cmd_sn.get(), request.cmd_sn.get()),
        };
        header.exp_cmd_sn = U32::new(expected);
        header.max_cmd_sn = U32::new(maximum);
        let outcome = match result {
            Ok(None) => LoginOutcome::Continues,
            Ok(Some(next)) => {
                header.flags |= FINAL | next.wire();
                match self.enter(next) {
                    Ok(None) => LoginOutcome::Continues,
                    Ok(Some(logged_in)) => {
                        header.tsih = U16::new(logged_in.session.tsih);
                        header.exp_cmd_sn = U32::new(logged_in.session.window.exp_cmd_sn());
                        header.max_cmd_sn = U32::new(logged_in.session.window.max_cmd_sn());
                        LoginOutcome::Done(Box::new(logged_in))
                    }
                    Err(status) => refuse(&mut header, &mut text, status.into()),
                }
            }
            Err(refusal) => refuse(&mut header, &mut text, refusal),
        };
        LoginReply {
            header,
            text,
            outcome,
        }
    }

    /// Processes the text and returns the next stage if the response changes the stage.
    fn step(
        &mut self,
        request: &LoginRequest,
        segment: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Option<Stage>, Refusal> {
        if self.requests_left == 0 {
            return Err(LoginStatus::InitiatorError.into());
        }
        self.requests_left -= 1;
        self.check_header(request)?;
        let next = self.wanted_stage(request)?;
        self.collector
            .push(segment)
            .map_err(|_| LoginStatus::InitiatorError)?;
        if request.flags & CONTINUE != 0 {
            return Ok(None);
        }
        let text = self.collector.take();
        let pairs = parse(&text).map_err(|_| LoginStatus::InitiatorError)?;
        if self.admission.is_none() {
            self.introduce(&pairs, out)?;
        }
        self.negotiate(&pairs, next, out)
    }

    fn check_header(&mut self, request: &LoginRequest) -> Result<(), LoginStatus> {
        if request.version_min != 0 {
            return Err(LoginStatus::UnsupportedVersion);
        }
        match &self.opening {
            None => {
                self.stage = match Stage::from_wire(request.current_stage()) {
                    Some(stage @ (Stage::Security | Stage::Operational)) => stage,
                    _ => return Err(LoginStatus::InvalidDuringLogin),
                };
                self.opening = Some(Opening {
                    isid: request.isid,
                    tsih: request.tsih.get(),
                    cid: request.cid.get(),
                    itt: request.itt.get(),
                    cmd_sn: request.cmd_sn.get(),
                });
                Ok(())
            }
            Some(opening) => {
                let same = opening.isid == request.isid
                    && opening.tsih == request.tsih.get()
                    && opening.cid == request.cid.get()
                    && opening.itt == request.itt.get()
                    && self.stage.wire() == request.current_stage();
                if same {
                    Ok(())
                } else {
                    Err(LoginStatus::InvalidDuringLogin)
                }
            }
        }
    }

    fn wanted_stage(&self, request: &LoginRequest) -> Result<Option<Stage>, LoginStatus> {
        if request.flags & FINAL == 0 {
            return Ok(None);
        }
        // The C bit together with the T bit is contradictory (11.12.2).
        if request.flags & CONTINUE != 0 {
            return Err(LoginStatus::InitiatorError);
        }
        match Stage::from_wire(request.next_stage()) {
            Some(next) if next.wire() > self.stage.wire() => Ok(Some(next)),
            _ => Err(LoginStatus::InvalidDuringLogin),
        }
    }

    /// Processes the names in the first complete request (6.3.1).
    fn introduce(&mut self, pairs: &[Pair<'_>], out: &mut Vec<u8>) -> Result<(), Refusal> {
        let value = |key: &str| {
            pairs
                .iter()
                .find(|pair| pair.key == key)
                .map(|pair| pair.value)
        };
        let name = value("InitiatorName").ok_or(LoginStatus::MissingParameter)?;
        // All state of an initiator is indexed by the normalised name.
        let name = iscsi_name::normalised(name).ok_or(LoginStatus::InitiatorError)?;
        self.visitor.initiator_name = name.into_owned();
        self.alias = value("InitiatorAlias").map(str::to_owned);
        self.kind = match value("SessionType") {
            None | Some("Normal") => SessionKind::Normal,
            Some("Discovery") => SessionKind::Discovery,
            Some(_) => return Err(LoginStatus::SessionTypeNotSupported.into()),
        };
        self.visitor.target_name = match (self.kind, value("TargetName")) {
            (SessionKind::Normal, None) => return Err(LoginStatus::MissingParameter.into()),
            // An invalid name is passed unchanged; the policy finds no such target.
            (SessionKind::Normal, Some(name)) => Some(
                iscsi_name::normalised(name).map_or_else(|| name.to_owned(), |n| n.into_owned()),
            ),
            (SessionKind::Discovery, _) => None,
        };
        let admission = self.policy.admit(&self.visitor)?;
        self.responder = Responder::new(admission.offer.clone());
        if self.kind == SessionKind::Discovery {
            self.responder.set_discovery();
        }
        let tsih = self.opening.as_ref().map_or(0, |opening| opening.tsih);
        if tsih != 0 {
            let session = self
                .policy
                .session(tsih)
                .ok_or(LoginStatus::SessionDoesNotExist)?;
            self.responder.set_joining(session.parameters.clone());
            self.joins = Some(session);
        }
        if self.kind == SessionKind::Normal {
            push_pair(
                out,
                "TargetPortalGroupTag",
                &admission.portal_group_tag.to_string(),
            );
            if let Some(alias) = &admission.target_alias {
                push_pair(out, "TargetAlias", alias);
            }
        }
        self.admission = Some(admission);
        Ok(())
    }

    fn negotiate(
        &mut self,
        pairs: &[Pair<'_>],
        next: Option<Stage>,
        out: &mut Vec<u8>,
    ) -> Result<Option<Stage>, Refusal> {
        let Some(admission) = self.admission.clone() else {
            return Err(LoginStatus::TargetError.into());
        };
        let security: SmallVec<[Pair<'_>; 8]> = pairs
            .iter()
            .copied()
            .filter(|pair| Authentication::owns(pair.key))
            .collect();
        if self.stage == Stage::Operational {
            if !security.is_empty() {
                return Err(LoginStatus::InitiatorError.into());
            }
            // The initiator skipped the security stage, which is allowed only if authentication is not required (6.3.2).
            self.authentication.pass_without(&admission)?;
        } else if !security.is_empty() {
            if has_repeated(&security) {
                return Err(LoginStatus::InitiatorError.into());
            }
            self.authentication
                .step(&security, &admission, &*self.policy, &self.visitor, out)?;
            self.visitor.chap_user = self.authentication.user().map(str::to_owned);
        } else if next.is_some() {
            self.authentication.pass_without(&admission)?;
        }
        for pair in pairs.iter().filter(|pair| !Authentication::owns(pair.key)) {
            self.answer(*pair, out)?;
        }
        let next = next.filter(|_| self.authentication.is_done());
        if !self.declared_max_recv
            && (self.stage == Stage::Operational || next == Some(Stage::FullFeature))
        {
            self.declared_max_recv = true;
            let bytes = self.responder.max_recv_data_segment_length();
            push_pair(out, "MaxRecvDataSegmentLength", &bytes.to_string());
        }
        Ok(next)
    }

    fn answer(&mut self, pair: Pair<'_>, out: &mut Vec<u8>) -> Result<(), LoginStatus> {
        const DECLARED: [&str; 4] = [
            "InitiatorName",
            "InitiatorAlias",
            "TargetName",
            "SessionType",
        ];
        if let Some(name) = DECLARED.into_iter().find(|name| *name == pair.key) {
            // Common initiators repeat their names in the next stage; identical values are accepted.
            match self.declared.iter().find(|(known, _)| *known == name) {
                Some((_, value)) if value == pair.value => {}
                Some((_, value))
                    if name.ends_with("Name") && iscsi_name::is_same(value, pair.value) => {}
                Some(_) => return Err(LoginStatus::InitiatorError),
                None => self.declared.push((name, pair.value.to_owned())),
            }
            return Ok(());
        }
        // Keys reserved for the target or the full feature phase.
        if matches!(
            pair.key,
            "TargetAlias" | "TargetAddress" | "TargetPortalGroupTag" | "SendTargets"
        ) {
            return Err(LoginStatus::InitiatorError);
        }
        match self.responder.answer(pair) {
            Answer::Send(value) => push_pair(out, pair.key, &value),
            Answer::Nothing => {}
            Answer::Repeated => return Err(LoginStatus::InitiatorError),
        }
        Ok(())
    }

    fn enter(&mut self, next: Stage) -> Result<Option<LoggedIn>, LoginStatus> {
        self.stage = next;
        if next != Stage::FullFeature {
            return Ok(None);
        }
        self.responder.finish();
        let (Some(opening), Some(admission)) = (&self.opening, &self.admission) else {
            return Err(LoginStatus::TargetError);
        };
        let mut parameters = self.responder.session.clone();
        if self.kind == SessionKind::Discovery {
            parameters = SessionParameters {
                max_connections: 1,
                ..parameters
            };
        }
        let claim = Claim {
            identity: SessionIdentity {
                initiator_name: self.visitor.initiator_name.clone(),
                isid: opening.isid,
                target_name: self.visitor.target_name.clone(),
                portal_group_tag: admission.portal_group_tag,
                kind: self.kind,
            },
            tsih: opening.tsih,
            cid: opening.cid,
            parameters,
            cmd_sn: opening.cmd_sn,
            window: None,
        };
        let attachment = self.policy.attach(&self.visitor, claim)?;
        Ok(Some(LoggedIn {
            session: attachment.session,
            connection: attachment.connection,
            displaced: attachment.displaced,
            parameters: self.responder.connection,
            visitor: self.visitor.clone(),
            initiator_alias: self.alias.take(),
            stat_sn: self.stat_sn,
            max_recv: self.responder.max_recv_data_segment_length(),
            responder: self.responder.clone(),
        }))
    }
}

fn has_repeated(pairs: &[Pair<'_>]) -> bool {
    pairs
        .iter()
        .enumerate()
        .any(|(place, pair)| pairs[..place].iter().any(|other| other.key == pair.key))
}

/// Builds a refusal: the status, and the new address if the target moved.
fn refuse(header: &mut LoginResponse, text: &mut Vec<u8>, refusal: Refusal) -> LoginOutcome {
    header.flags = 0;
    header.status = U16::new(refusal.status.wire());
    text.clear();
    if let Some(address) = &refusal.address {
        push_pair(text, "TargetAddress", address);
    }
    LoginOutcome::Failed(refusal.status)
}
