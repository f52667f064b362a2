//! The initiator's side of the login phase: requests and responses alternate until the full feature phase.

use zerocopy::big_endian::{U16, U32};

use crate::chap::{Algorithm, CHALLENGE_MAX, INITIATOR_CHALLENGES, OutstandingChallenge, Secret};
use crate::negotiation::{ConnectionParameters, Offer, Originator, SessionParameters};
use crate::pdu::{CONTINUE, FINAL, IMMEDIATE, LoginRequest, LoginResponse, LoginStatus, Stage};
use crate::text::{Collector, Pair, parse, parse_binary, parse_number, push_pair, to_hex};

/// CHAP credentials of an initiator.
#[derive(Clone, Debug)]
pub struct Credentials {
    /// CHAP_N
    pub name: String,
    /// The initiator's secret.
    pub secret: Secret,
    /// The target's name and secret; if set, the target must authenticate too.
    pub mutual: Option<(String, Secret)>,
    /// Accepted algorithms, best first.
    pub algorithms: Vec<Algorithm>,
}

/// Parameters of a login.
#[derive(Clone, Debug)]
pub struct LoginRequestSettings {
    /// InitiatorName
    pub initiator_name: String,
    /// TargetName; `None` for a discovery session.
    pub target_name: Option<String>,
    /// ISID
    pub isid: [u8; 6],
    /// 0 for a new session.
    pub tsih: u16,
    /// Connection identifier.
    pub cid: u16,
    /// Current CmdSN of the session.
    pub cmd_sn: u32,
    /// Proposed operational parameters.
    pub offer: Offer,
    /// CHAP credentials; `None` offers `AuthMethod=None`.
    pub credentials: Option<Credentials>,
}

/// Maximum number of responses in one login.
const RESPONSES_MAX: u32 = 128;

fn meaning(status: u16) -> String {
    match LoginStatus::from_wire(status) {
        Some(status) => status.to_string(),
        None => format!("status {status:#06x}"),
    }
}

/// Reason for a failed login.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LoginError {
    /// The target refused the login.
    #[error("login refused: {}", meaning(*status))]
    Refused {
        /// Status-Class and Status-Detail.
        status: u16,
        /// Target address of a redirection.
        address: Option<String>,
    },
    /// The target refused a login without a CHAP user.
    #[error(
        "login refused: {}; hint: the target may require CHAP: give a user in the address, iscsi://USER@HOST/..., and its secret with --chap-file (chap_file for a disk)",
        meaning(LoginStatus::AuthenticationFailure.wire())
    )]
    NoUser,
    /// The target violated the protocol.
    #[error("login response breaks the protocol: {0}")]
    Protocol(&'static str),
    /// The target's authentication failed.
    #[error("target failed to authenticate itself")]
    TargetNotAuthentic,
    /// The target sent one of this initiator's challenges back.
    #[error("target sent this initiator's own CHAP challenge (RFC 7143, 9.2.1)")]
    ReflectedChallenge,
    /// The credentials use the same secret in both directions.
    #[error("CHAP secrets of initiator and target are equal (RFC 7143, 9.2.1)")]
    EqualSecrets,
}

/// Progress of CHAP in a login.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ChapProgress {
    /// No algorithm was offered.
    NotOffered,
    /// Algorithms were offered; the target has not chosen yet.
    Offered,
    /// The challenge was answered with this algorithm.
    Answered(Algorithm),
    /// The security stage is complete.
    Passed,
}

/// Next action after a response.
#[derive(Debug)]
pub enum LoginProgress {
    /// Send this request.
    Send(LoginRequest, Vec<u8>),
    /// The full feature phase is reached.
    Done(Box<LoginResult>),
}

/// Result of a successful login.
#[derive(Clone, Debug)]
pub struct LoginResult {
    /// TSIH of the session.
    pub tsih: u16,
    /// Session parameters, negotiated on the leading connection.
    pub session: SessionParameters,
    /// Parameters of the connection.
    pub connection: ConnectionParameters,
    /// Next expected StatSN.
    pub exp_stat_sn: u32,
    /// ExpCmdSN of the target.
    pub exp_cmd_sn: u32,
    /// MaxCmdSN of the target.
    pub max_cmd_sn: u32,
    /// TargetPortalGroupTag, if the target sent it.
    pub portal_group_tag: Option<u16>,
}

#[derive(Clone)]
enum LoginStep {
    /// AuthMethod was offered.
    Method,
    /// CHAP_A was offered.
    Algorithm,
    /// CHAP_R was sent; `expected` is the challenge that the target must answer.
    Proof {
        algorithm: Algorithm,
        expected: Option<(u8, OutstandingChallenge)>,
    },
    /// All security keys are negotiated; the target has not left the security stage.
    Settled(ChapProgress),
    /// Operational keys were sent.
    Operational,
}

/// State of a login phase.
pub struct InitiatorLogin {
    settings: LoginRequestSettings,
    step: LoginStep,
    stage: Stage,
    originator: Originator,
    collector: Collector,
    exp_stat_sn: Option<u32>,
    portal_group_tag: Option<u16>,
    responses_left: u32,
    random: fn(&mut [u8]),
}

impl std::fmt::Debug for InitiatorLogin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InitiatorLogin")
            .field("stage", &self.stage)
            .finish_non_exhaustive()
    }
}

fn system_random(bytes: &mut [u8]) {
    getrandom::fill(bytes).expect("the system gives random numbers");
}

impl InitiatorLogin {
    /// Creates the state before the first request.
    pub fn new(settings: LoginRequestSettings) -> Self {
        InitiatorLogin {
            originator: Originator::new(settings.offer.clone()),
            settings,
            step: LoginStep::Method,
            stage: Stage::Security,
            collector: Collector::new(64 * 1024),
            exp_stat_sn: None,
            portal_group_tag: None,
            responses_left: RESPONSES_MAX,
            random: system_random,
        }
    }

    /// Returns the progress of CHAP.
    pub fn chap_progress(&self) -> ChapProgress {
        match self.step {
            LoginStep::Method => ChapProgress::NotOffered,
            LoginStep::Algorithm => ChapProgress::Offered,
            LoginStep::Proof { algorithm, .. } => ChapProgress::Answered(algorithm),
            LoginStep::Settled(progress) => progress,
            LoginStep::Operational => ChapProgress::Passed,
        }
    }

    /// Returns the first request.
    pub fn start(&mut self) -> (LoginRequest, Vec<u8>) {
        let mut text = Vec::new();
        push_pair(&mut text, "InitiatorName", &self.settings.initiator_name);
        match &self.settings.target_name {
            Some(name) => {
                push_pair(&mut text, "SessionType", "Normal");
                push_pair(&mut text, "TargetName", name);
            }
            None => push_pair(&mut text, "SessionType", "Discovery"),
        }
        let chap = self.settings.credentials.is_some();
        push_pair(&mut text, "AuthMethod", if chap { "CHAP" } else { "None" });
        (self.request((!chap).then_some(Stage::Operational)), text)
    }

    fn request(&self, next: Option<Stage>) -> LoginRequest {
        let mut header = LoginRequest::blank();
        header.opcode |= IMMEDIATE;
        header.flags = self.stage.wire() << 2 | next.map_or(0, |next| FINAL | next.wire());
        header.isid = self.settings.isid;
        header.tsih = U16::new(self.settings.tsih);
        header.cid = U16::new(self.settings.cid);
        header.cmd_sn = U32::new(self.settings.cmd_sn);
        header.exp_stat_sn = U32::new(self.exp_stat_sn.unwrap_or(0));
        header
    }

    /// Processes a response and its data segment.
    pub fn handle(
        &mut self,
        response: &LoginResponse,
        segment: &[u8],
    ) -> Result<LoginProgress, LoginError> {
        let status = response.status.get();
        if status != LoginStatus::Success.wire() {
            let address = parse(segment)
                .ok()
                .and_then(|pairs| value(&pairs, "TargetAddress").map(str::to_owned));
            let has_user = self.settings.credentials.is_some();
            if status == LoginStatus::AuthenticationFailure.wire() && !has_user {
                return Err(LoginError::NoUser);
            }
            return Err(LoginError::Refused { status, address });
        }
        if self
            .exp_stat_sn
            .is_some_and(|expected| expected != response.stat_sn.get())
        {
            return Err(LoginError::Protocol("StatSN out of order"));
        }
        self.exp_stat_sn = Some(response.stat_sn.get().wrapping_add(1));
        let Some(left) = self.responses_left.checked_sub(1) else {
            return Err(LoginError::Protocol("too many login responses"));
        };
        self.responses_left = left;
        self.collector
            .push(segment)
            .map_err(|_| LoginError::Protocol("text too long"))?;
        if response.flags & CONTINUE != 0 {
            return Ok(LoginProgress::Send(self.request(None), Vec::new()));
        }
        let text = self.collector.take();
        let pairs = parse(&text).map_err(|_| LoginError::Protocol("malformed text"))?;
        if let Some(tag) = value(&pairs, "TargetPortalGroupTag") {
            self.portal_group_tag = parse_number(tag).and_then(|n| u16::try_from(n).ok());
        }
        for pair in &pairs {
            self.originator
                .accept(*pair)
                .map_err(|_| LoginError::Protocol("inadmissible response"))?;
        }
        let moved = (response.flags & FINAL != 0).then_some(response.flags & 3);
        match self.step.clone() {
            LoginStep::Method => self.after_method(&pairs, moved),
            LoginStep::Algorithm => self.after_challenge(&pairs, moved),
            LoginStep::Proof {
                algorithm,
                expected,
            } => self.after_proof(&pairs, algorithm, expected, moved),
            LoginStep::Settled(progress) => self.request_transition(progress, moved),
            LoginStep::Operational => match moved {
                Some(3) => Ok(LoginProgress::Done(Box::new(self.result(response)))),
                Some(_) => Err(LoginError::Protocol(
                    "moved to a stage that was not requested",
                )),
                None => Ok(LoginProgress::Send(
                    self.request(Some(Stage::FullFeature)),
                    Vec::new(),
                )),
            },
        }
    }

    fn after_method(
        &mut self,
        pairs: &[Pair<'_>],
        moved: Option<u8>,
    ) -> Result<LoginProgress, LoginError> {
        let Some(credentials) = &self.settings.credentials else {
            return self.request_transition(ChapProgress::NotOffered, moved);
        };
        match value(pairs, "AuthMethod") {
            Some("CHAP") => {}
            None if moved.is_none() => {
                return Ok(LoginProgress::Send(self.request(None), Vec::new()));
            }
            _ => return Err(LoginError::Protocol("CHAP not accepted")),
        }
        let is_own = |(_, secret): &(String, Secret)| secret.matches(&credentials.secret);
        if credentials.mutual.as_ref().is_some_and(is_own) {
            return Err(LoginError::EqualSecrets);
        }
        let numbers: Vec<String> = credentials
            .algorithms
            .iter()
            .map(|a| a.number().to_string())
            .collect();
        let mut text = Vec::new();
        push_pair(&mut text, "CHAP_A", &numbers.join(","));
        self.step = LoginStep::Algorithm;
        Ok(LoginProgress::Send(self.request(None), text))
    }

    fn after_challenge(
        &mut self,
        pairs: &[Pair<'_>],
        moved: Option<u8>,
    ) -> Result<LoginProgress, LoginError> {
        if moved.is_none() && !has_any(pairs, &["CHAP_A", "CHAP_I", "CHAP_C"]) {
            return Ok(LoginProgress::Send(self.request(None), Vec::new()));
        }
        let broken = LoginError::Protocol("CHAP challenge incomplete");
        let Some(credentials) = self.settings.credentials.clone() else {
            return Err(broken);
        };
        let algorithm = value(pairs, "CHAP_A")
            .and_then(parse_number)
            .and_then(Algorithm::from_number);
        let algorithm = algorithm.filter(|algorithm| credentials.algorithms.contains(algorithm));
        let identifier = value(pairs, "CHAP_I")
            .and_then(parse_number)
            .and_then(|n| u8::try_from(n).ok());
        let challenge = value(pairs, "CHAP_C").and_then(|text| parse_binary(text, CHALLENGE_MAX));
        let (Some(algorithm), Some(identifier), Some(challenge)) =
            (algorithm, identifier, challenge)
        else {
            return Err(broken);
        };
        if INITIATOR_CHALLENGES.contains(&challenge) {
            return Err(LoginError::ReflectedChallenge);
        }
        let mut text = Vec::new();
        let response = algorithm.respond(identifier, &credentials.secret, &challenge);
        push_pair(&mut text, "CHAP_N", &credentials.name);
        push_pair(&mut text, "CHAP_R", &to_hex(&response));
        let expected = credentials.mutual.as_ref().map(|_| {
            let mut bytes = vec![0; algorithm.length() + 1];
            (self.random)(&mut bytes);
            let identifier = bytes.pop().unwrap_or_default();
            push_pair(&mut text, "CHAP_I", &identifier.to_string());
            push_pair(&mut text, "CHAP_C", &to_hex(&bytes));
            (identifier, INITIATOR_CHALLENGES.add(bytes))
        });
        self.step = LoginStep::Proof {
            algorithm,
            expected,
        };
        Ok(LoginProgress::Send(
            self.request(Some(Stage::Operational)),
            text,
        ))
    }

    fn after_proof(
        &mut self,
        pairs: &[Pair<'_>],
        algorithm: Algorithm,
        expected: Option<(u8, OutstandingChallenge)>,
        moved: Option<u8>,
    ) -> Result<LoginProgress, LoginError> {
        if expected.is_some() && moved.is_none() && !has_any(pairs, &["CHAP_N", "CHAP_R"]) {
            // The next response carries the target's CHAP_R. Without a correct one the login stays in the security stage.
            let next = self.request(Some(Stage::Operational));
            return Ok(LoginProgress::Send(next, Vec::new()));
        }
        let mutual = self
            .settings
            .credentials
            .as_ref()
            .and_then(|credentials| credentials.mutual.as_ref());
        if let (Some((identifier, challenge)), Some((name, secret))) = (expected, mutual) {
            let response =
                value(pairs, "CHAP_R").and_then(|text| parse_binary(text, algorithm.length()));
            let proved = response
                .is_some_and(|r| algorithm.verify(identifier, secret, challenge.bytes(), &r));
            if !proved || value(pairs, "CHAP_N") != Some(name) {
                return Err(LoginError::TargetNotAuthentic);
            }
        }
        self.request_transition(ChapProgress::Answered(algorithm), moved)
    }

    /// Starts the operational stage, or requests the transition again: a target may stay in a stage (RFC 7143, 6.3 and
    /// 11.13.4).
    fn request_transition(
        &mut self,
        progress: ChapProgress,
        moved: Option<u8>,
    ) -> Result<LoginProgress, LoginError> {
        match moved {
            Some(stage) if stage == Stage::Operational.wire() => {}
            Some(_) => {
                return Err(LoginError::Protocol(
                    "moved to a stage that was not requested",
                ));
            }
            None => {
                self.step = LoginStep::Settled(progress);
                let next = self.request(Some(Stage::Operational));
                return Ok(LoginProgress::Send(next, Vec::new()));
            }
        }
        self.stage = Stage::Operational;
        self.step = LoginStep::Operational;
        let text = self
            .originator
            .propose(self.settings.tsih == 0, self.settings.target_name.is_none());
        Ok(LoginProgress::Send(
            self.request(Some(Stage::FullFeature)),
            text,
        ))
    }

    fn result(&mut self, response: &LoginResponse) -> LoginResult {
        self.originator.finish();
        LoginResult {
            tsih: response.tsih.get(),
            session: self.originator.session.clone(),
            connection: self.originator.connection,
            exp_stat_sn: response.stat_sn.get().wrapping_add(1),
            exp_cmd_sn: response.exp_cmd_sn.get(),
            max_cmd_sn: response.max_cmd_sn.get(),
            portal_group_tag: self.portal_group_tag,
        }
    }
}

fn has_any(pairs: &[Pair<'_>], keys: &[&str]) -> bool {
    pairs.iter().any(|pair| keys.contains(&pair.key))
}

fn value<'a>(pairs: &[Pair<'a>], key: &str) -> Option<&'a str> {
    pairs
        .iter()
        .find(|pair| pair.key == key)
        .map(|pair| pair.value)
}
