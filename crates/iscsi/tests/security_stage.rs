//! The initiator's security stage against targets that stay in it, and targets that try to pass without the secret. The
//! target's bytes are literals (RFC 7143, 11.13 and 12.1).
#![forbid(unsafe_code)]

use iscsi::chap::{Algorithm, Secret};
use iscsi::initiator::{Initiator, InitiatorError, InitiatorSettings};
use iscsi::login::{ChapProgress, Credentials, LoginError};
use iscsi::negotiation::Offer;
use iscsi::text::{parse, parse_binary};

const OWN: &str = "secret of host 1";
const TARGETS: &str = "secret of target";

/// Login Response flags: T, and CSG and NSG.
const STAYS: u8 = 0x00;
const LEAVES: u8 = 0x81;

/// A login of one connection, driven with raw bytes.
struct Login {
    initiator: Initiator,
    stat_sn: u8,
}

/// A Login Request: flags and text.
struct Request {
    flags: u8,
    text: Vec<u8>,
}

impl Request {
    fn value(&self, key: &str) -> Option<&str> {
        let pairs = parse(&self.text).expect("pairs of key and value");
        let found = pairs.iter().find(|pair| pair.key == key);
        found.map(|pair| pair.value)
    }
}

impl Login {
    fn begin(credentials: Option<Credentials>) -> (Login, Request) {
        let mut initiator = Initiator::new(InitiatorSettings {
            initiator_name: "iqn.2026-11.org.example:i".to_owned(),
            target_name: Some("iqn.2026-11.org.example:t".to_owned()),
            isid: [0x80, 0, 0, 0, 0, 1],
            offer: Offer::default(),
            credentials,
            first_cmd_sn: 1,
            text_limit: 1 << 16,
        });
        initiator.connect();
        let mut login = Login {
            initiator,
            stat_sn: 0,
        };
        let first = login.request();
        (login, first)
    }

    fn request(&mut self) -> Request {
        let bytes = std::mem::take(self.initiator.outgoing(0));
        assert_eq!(bytes[0], 0x43, "an immediate Login Request");
        let length = usize::from(bytes[6]) << 8 | usize::from(bytes[7]);
        Request {
            flags: bytes[1],
            text: bytes[48..48 + length].to_vec(),
        }
    }

    /// Answers a request and returns the next one.
    fn answer(&mut self, flags: u8, pairs: &[(&str, &str)]) -> Result<Request, InitiatorError> {
        let mut text = Vec::new();
        for (key, value) in pairs {
            text.extend_from_slice(format!("{key}={value}\0").as_bytes());
        }
        let mut bytes = vec![0; 48];
        (bytes[0], bytes[1]) = (0x23, flags);
        (bytes[6], bytes[7]) = ((text.len() >> 8) as u8, text.len() as u8);
        bytes[8] = 0x80;
        (bytes[13], bytes[15]) = (1, 1);
        bytes[19] = 1;
        bytes[27] = self.stat_sn;
        (bytes[31], bytes[35]) = (1, 64);
        text.resize(text.len().next_multiple_of(4), 0);
        bytes.extend_from_slice(&text);
        self.stat_sn += 1;
        self.initiator.receive(0, &bytes)?;
        Ok(self.request())
    }

    /// Runs a login up to the target's challenge and returns the initiator's reaction.
    fn challenged(
        credentials: Credentials,
        challenge: &str,
    ) -> (Login, Result<Request, InitiatorError>) {
        let (mut login, _) = Login::begin(Some(credentials));
        login.answer(STAYS, &[("AuthMethod", "CHAP")]).unwrap();
        let asked = [("CHAP_A", "5"), ("CHAP_I", "7"), ("CHAP_C", challenge)];
        let answer = login.answer(STAYS, &asked);
        (login, answer)
    }
}

fn credentials(secret: &str, mutual: Option<&str>) -> Credentials {
    Credentials {
        name: "host".to_owned(),
        secret: Secret::new(secret),
        mutual: mutual.map(|secret| ("target".to_owned(), Secret::new(secret))),
        algorithms: vec![Algorithm::Md5],
    }
}

fn login_error<T>(result: Result<T, InitiatorError>) -> Option<LoginError> {
    match result {
        Err(InitiatorError::Login(error)) => Some(error),
        _ => None,
    }
}

/// Computes the response of a target that has `secret`, as text.
fn proof(request: &Request, secret: &str) -> String {
    let identifier = request.value("CHAP_I").unwrap().parse().unwrap();
    let challenge = parse_binary(request.value("CHAP_C").unwrap(), 1024).unwrap();
    let response = Algorithm::Md5.respond(identifier, &Secret::new(secret), &challenge);
    let digits: String = response.iter().map(|byte| format!("{byte:02x}")).collect();
    format!("0x{digits}")
}

#[test]
fn target_may_stay_in_the_security_stage() {
    let (mut login, first) = Login::begin(None);
    assert_eq!(first.flags, 0x81, "T, CSG security, NSG operational");
    let mut request = login
        .answer(
            STAYS,
            &[("AuthMethod", "None"), ("TargetPortalGroupTag", "1")],
        )
        .unwrap();
    for _ in 0..3 {
        assert_eq!((request.flags, request.text.as_slice()), (0x81, &b""[..]));
        request = login.answer(STAYS, &[]).unwrap();
    }
    let operational = login.answer(LEAVES, &[]).unwrap();
    assert_eq!(
        operational.flags, 0x87,
        "T, CSG operational, NSG full feature"
    );
    assert!(operational.value("MaxBurstLength").is_some());
}

#[test]
fn target_may_stay_in_the_security_stage_during_chap() {
    let (mut login, first) = Login::begin(Some(credentials(OWN, Some(TARGETS))));
    assert_eq!(first.flags, 0x00);
    // An empty response precedes each answer.
    let empty = login
        .answer(STAYS, &[("TargetPortalGroupTag", "1")])
        .unwrap();
    assert_eq!((empty.flags, empty.text.as_slice()), (0x00, &b""[..]));
    let offer = login.answer(STAYS, &[("AuthMethod", "CHAP")]).unwrap();
    assert_eq!(offer.value("CHAP_A"), Some("5"));
    login.answer(STAYS, &[]).unwrap();
    let challenge = [
        ("CHAP_A", "5"),
        ("CHAP_I", "7"),
        ("CHAP_C", "0x0102030405060708"),
    ];
    let answer = login.answer(STAYS, &challenge).unwrap();
    assert_eq!(answer.flags, 0x81);
    let empty = login.answer(STAYS, &[]).unwrap();
    assert_eq!((empty.flags, empty.text.as_slice()), (0x81, &b""[..]));
    let proved = proof(&answer, TARGETS);
    let empty = login
        .answer(STAYS, &[("CHAP_N", "target"), ("CHAP_R", &proved)])
        .unwrap();
    assert_eq!((empty.flags, empty.text.as_slice()), (0x81, &b""[..]));
    assert_eq!(
        login.initiator.chap_progress(0),
        ChapProgress::Answered(Algorithm::Md5)
    );
    let operational = login.answer(LEAVES, &[]).unwrap();
    assert_eq!(operational.flags, 0x87);
}

#[test]
fn target_that_never_leaves_the_security_stage_ends_the_login() {
    let (mut login, _) = Login::begin(None);
    let mut answers = (0..1000).map(|_| login.answer(STAYS, &[]));
    let error = answers.find_map(login_error);
    assert_eq!(
        error,
        Some(LoginError::Protocol("too many login responses"))
    );
}

#[test]
fn target_that_leaves_the_stage_without_its_proof_is_not_authentic() {
    let wrong = proof_of_nothing();
    for pairs in [
        &[][..],
        &[("CHAP_N", "target")],
        &[("CHAP_R", "0x00112233445566778899aabbccddeeff")],
        &[("CHAP_N", "target"), ("CHAP_R", &wrong)],
        &[("CHAP_N", "target"), ("CHAP_R", "0x")],
    ] {
        let (mut login, answer) = Login::challenged(credentials(OWN, Some(TARGETS)), "0x0102");
        answer.unwrap();
        let error = login_error(login.answer(LEAVES, pairs));
        assert_eq!(error, Some(LoginError::TargetNotAuthentic), "{pairs:?}");
    }
}

fn proof_of_nothing() -> String {
    format!("0x{}", "00".repeat(1025))
}

#[test]
fn target_with_the_initiators_own_name_is_not_authentic() {
    let (mut login, answer) = Login::challenged(credentials(OWN, Some(TARGETS)), "0x0102");
    let proved = proof(&answer.unwrap(), TARGETS);
    let error = login_error(login.answer(LEAVES, &[("CHAP_N", "host"), ("CHAP_R", &proved)]));
    assert_eq!(error, Some(LoginError::TargetNotAuthentic));
}

#[test]
fn challenge_that_is_empty_or_too_long_ends_the_login() {
    let longest = format!("0x{}", "5a".repeat(1024));
    let (_, answer) = Login::challenged(credentials(OWN, None), &longest);
    assert!(answer.is_ok());
    let too_long = format!("0x{}", "5a".repeat(1025));
    for challenge in ["", "0x", "0b", "5", "0xzz", &too_long] {
        let (_, answer) = Login::challenged(credentials(OWN, None), challenge);
        let error = login_error(answer);
        assert_eq!(
            error,
            Some(LoginError::Protocol("CHAP challenge incomplete"))
        );
    }
}

#[test]
fn equal_secrets_of_both_directions_end_the_login_before_any_response() {
    let (mut login, _) = Login::begin(Some(credentials(OWN, Some(OWN))));
    let answer = login.answer(STAYS, &[("AuthMethod", "CHAP")]);
    assert_eq!(login_error(answer), Some(LoginError::EqualSecrets));
}

#[test]
fn challenge_of_another_login_of_this_initiator_is_not_answered() {
    let (mut first, answer) = Login::challenged(credentials(OWN, Some(TARGETS)), "0x0102");
    let answer = answer.unwrap();
    let own = answer.value("CHAP_C").unwrap();
    // Each attempt fails: another secret, another spelling, a user without mutual CHAP.
    for (secret, mutual, challenge) in [
        (OWN, Some(TARGETS), own.to_owned()),
        (TARGETS, None, own.to_owned()),
        (OWN, None, own.to_uppercase().replace("0X", "0x")),
    ] {
        let (_, reflected) = Login::challenged(credentials(secret, mutual), &challenge);
        let error = login_error(reflected);
        assert_eq!(error, Some(LoginError::ReflectedChallenge));
    }
    let proved = proof(&answer, TARGETS);
    let left = first.answer(LEAVES, &[("CHAP_N", "target"), ("CHAP_R", &proved)]);
    assert_eq!(left.unwrap().flags, 0x87);
    // The login of the challenge has ended, so a response to it is useless.
    let (_, answer) = Login::challenged(credentials(OWN, None), own);
    assert!(answer.is_ok());
}
