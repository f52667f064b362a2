//! The login phase: stages, statuses, CHAP both ways, discovery, reinstatement.

mod common;

use std::sync::Arc;

use common::{INITIATOR, Messages, Pipes, Policy, TARGET, TargetEnd, settings, small_offer, user};
use iscsi::Limits;
use iscsi::chap::{Algorithm, Secret};
use iscsi::initiator::{Event, InitiatorError, InitiatorSettings};
use iscsi::login::{Credentials, LoginError, TargetRecord};
use iscsi::negotiation::Offer;
use iscsi::target::CloseReason;
use iscsi::text::{parse, push_pair};
use proptest::prelude::*;

/// A Login Request of 48 bytes with its text, as literals of RFC 7143, 11.12.
fn login_request(flags: u8, tsih: u16, cid: u16, text: &[u8]) -> Vec<u8> {
    let mut pdu = vec![0x43, flags, 0x00, 0x00, 0x00];
    pdu.extend_from_slice(&(text.len() as u32).to_be_bytes()[1..]);
    pdu.extend_from_slice(&[0x80, 0, 0, 0, 0, 1]);
    pdu.extend_from_slice(&tsih.to_be_bytes());
    pdu.extend_from_slice(&[0, 0, 0, 7]);
    pdu.extend_from_slice(&cid.to_be_bytes());
    pdu.extend_from_slice(&[0, 0]);
    pdu.extend_from_slice(&[0, 0, 0, 5]);
    pdu.extend_from_slice(&[0, 0, 0, 9]);
    pdu.extend_from_slice(&[0; 16]);
    pdu.extend_from_slice(text);
    pdu.resize(pdu.len().next_multiple_of(4), 0);
    pdu
}

fn text(pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut out = Vec::new();
    for (key, value) in pairs {
        push_pair(&mut out, key, value);
    }
    out
}

const NAMES: [(&str, &str); 2] = [("InitiatorName", INITIATOR), ("TargetName", TARGET)];

fn target_end(policy: Policy) -> TargetEnd {
    TargetEnd::new(Arc::new(policy), Limits::default())
}

struct Answer {
    flags: u8,
    status: u16,
    pdu: Vec<u8>,
    text: String,
}

fn ask(target_end: &mut TargetEnd, pdu: &[u8]) -> Answer {
    target_end.feed(pdu, &mut [], &mut Messages::default());
    let bytes = target_end.take_bytes();
    if bytes.is_empty() {
        return Answer {
            flags: 0,
            status: 0xffff,
            pdu: bytes,
            text: String::new(),
        };
    }
    assert_eq!(bytes[0], 0x23, "Login Response");
    let status = u16::from_be_bytes([bytes[36], bytes[37]]);
    let length = u32::from_be_bytes([0, bytes[5], bytes[6], bytes[7]]) as usize;
    let text = String::from_utf8(bytes[48..48 + length].to_vec())
        .unwrap()
        .replace('\0', ";");
    Answer {
        flags: bytes[1],
        status,
        pdu: bytes,
        text,
    }
}

#[test]
fn first_login_response_echoes_isid_and_itt_and_has_the_tpgt() {
    let mut target_end = target_end(Policy::open(small_offer()));
    let mut request = text(&NAMES);
    request.extend(text(&[("AuthMethod", "None")]));
    let answer = ask(&mut target_end, &login_request(0x81, 0, 3, &request));
    assert_eq!((answer.flags, answer.status), (0x81, 0));
    assert_eq!(
        answer.text,
        "TargetPortalGroupTag=1;TargetAlias=the disk;AuthMethod=None;"
    );
    assert_eq!(
        &answer.pdu[8..20],
        [0x80, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 7],
        "ISID, TSIH, ITT"
    );
    assert_eq!(
        &answer.pdu[24..32],
        [0, 0, 0, 9, 0, 0, 0, 5],
        "StatSN, ExpCmdSN"
    );
    let answer = ask(
        &mut target_end,
        &login_request(0x87, 0, 3, &text(&[("HeaderDigest", "None,CRC32C")])),
    );
    assert_eq!((answer.flags, answer.status), (0x87, 0));
    assert_eq!(
        answer.text,
        "HeaderDigest=None;MaxRecvDataSegmentLength=1024;"
    );
    assert_eq!(&answer.pdu[14..16], [0, 1], "TSIH");
    assert_eq!(
        &answer.pdu[24..36],
        [0, 0, 0, 10, 0, 0, 0, 5, 0, 0, 0, 0x84],
        "StatSN, ExpCmdSN, MaxCmdSN"
    );
    assert_eq!(target_end.connection.key().unwrap().cid, 3);
}

#[test]
#[allow(clippy::too_many_lines, reason = "a table of cases")]
fn refusals_carry_the_status_of_table_11_13() {
    let names = text(&NAMES);
    let only = |key: &str, value: &str| text(&[(key, value)]);
    let with = |key: &str, value: &str| [text(&NAMES), text(&[(key, value)])].concat();
    let mut newer = login_request(0x87, 0, 0, &names);
    newer[3] = 1;
    for (case, pdu, status) in [
        ("version-min 1", newer, 0x0205),
        (
            "no InitiatorName",
            login_request(0x87, 0, 0, &only("TargetName", TARGET)),
            0x0207,
        ),
        (
            "no TargetName",
            login_request(0x87, 0, 0, &only("InitiatorName", INITIATOR)),
            0x0207,
        ),
        (
            "malformed name",
            login_request(0x87, 0, 0, &text(&[("InitiatorName", "me"), NAMES[1]])),
            0x0200,
        ),
        (
            "name with a prohibited character (RFC 3722, 6)",
            login_request(
                0x87,
                0,
                0,
                &text(&[("InitiatorName", "iqn.x:a\u{fffd}"), NAMES[1]]),
            ),
            0x0200,
        ),
        (
            "malformed target name",
            login_request(0x87, 0, 0, &text(&[NAMES[0], ("TargetName", "you")])),
            0x0203,
        ),
        (
            "unknown target",
            login_request(0x87, 0, 0, &text(&[NAMES[0], ("TargetName", "iqn.x:none")])),
            0x0203,
        ),
        (
            "not allowed",
            login_request(
                0x87,
                0,
                0,
                &text(&[("InitiatorName", "iqn.x:stranger"), NAMES[1]]),
            ),
            0x0202,
        ),
        (
            "odd session type",
            login_request(0x87, 0, 0, &with("SessionType", "Odd")),
            0x0209,
        ),
        ("unknown TSIH", login_request(0x87, 9, 0, &names), 0x020a),
        (
            "full feature at once",
            login_request(0x8f, 0, 0, &names),
            0x020b,
        ),
        ("reserved stage", login_request(0x82, 0, 0, &names), 0x020b),
        ("backwards", login_request(0x84, 0, 0, &names), 0x020b),
        ("T and C", login_request(0xc7, 0, 0, &names), 0x0200),
        ("no pairs", login_request(0x87, 0, 0, b"garbage\0"), 0x0200),
        (
            "key twice",
            login_request(
                0x87,
                0,
                0,
                &[with("InitialR2T", "No"), only("InitialR2T", "No")].concat(),
            ),
            0x0200,
        ),
        (
            "security key later",
            login_request(0x87, 0, 0, &with("AuthMethod", "None")),
            0x0200,
        ),
        (
            "target's key",
            login_request(0x87, 0, 0, &with("TargetAlias", "me")),
            0x0200,
        ),
        (
            "no common method",
            login_request(0x81, 0, 0, &with("AuthMethod", "KRB5")),
            0x0201,
        ),
    ] {
        let mut target_end = target_end(Policy::open(small_offer()));
        let answer = ask(&mut target_end, &pdu);
        assert_eq!(answer.status, status, "{case}");
        assert_eq!(answer.flags & 0x83, 0, "{case}: no transit");
        assert!(
            matches!(target_end.closed, Some(CloseReason::LoginFailed(_))),
            "{case}"
        );
    }
}

#[test]
fn moved_target_returns_its_address() {
    let mut target_end = target_end(Policy::open(small_offer()));
    let names = text(&[NAMES[0], ("TargetName", "iqn.2026-11.org.example:moved")]);
    let answer = ask(&mut target_end, &login_request(0x87, 0, 0, &names));
    assert_eq!(
        (answer.status, answer.text.as_str()),
        (0x0101, "TargetAddress=192.0.2.9:3260;")
    );
}

#[test]
fn keys_may_be_cut_over_pdus_with_the_c_bit() {
    let mut target_end = target_end(Policy::open(small_offer()));
    let whole = [text(&NAMES), text(&[("ErrorRecoveryLevel", "2")])].concat();
    let (first, second) = whole.split_at(29);
    let answer = ask(&mut target_end, &login_request(0x44, 0, 0, first));
    assert_eq!(
        (answer.flags, answer.status, answer.text.as_str()),
        (0x04, 0, "")
    );
    let answer = ask(&mut target_end, &login_request(0x87, 0, 0, second));
    assert_eq!((answer.flags, answer.status), (0x87, 0));
    assert!(
        answer.text.contains("ErrorRecoveryLevel=0;"),
        "{}",
        answer.text
    );
}

#[test]
fn names_may_be_repeated_but_not_changed() {
    for (name, status) in [
        (INITIATOR, 0),
        ("IQN.2026-11.ORG.EXAMPLE:I0", 0),
        ("iqn.2026-11.org.example:other", 0x0200),
    ] {
        let mut target_end = target_end(Policy::open(small_offer()));
        let hello = [text(&NAMES), text(&[("AuthMethod", "None")])].concat();
        ask(&mut target_end, &login_request(0x81, 0, 0, &hello));
        let again = text(&[("InitiatorName", name), NAMES[1], ("SessionType", "Normal")]);
        assert_eq!(
            ask(&mut target_end, &login_request(0x87, 0, 0, &again)).status,
            status
        );
    }
}

#[test]
fn endless_login_with_the_c_bit_is_ended() {
    let mut target_end = target_end(Policy::open(small_offer()));
    let mut requests = 0;
    while target_end.closed.is_none() {
        ask(&mut target_end, &login_request(0x44, 0, 0, &[b'a'; 1000]));
        requests += 1;
        assert!(requests < 100);
    }
    let mut target_end = self::target_end(Policy::open(small_offer()));
    ask(&mut target_end, &login_request(0x04, 0, 0, &text(&NAMES)));
    while target_end.closed.is_none() {
        ask(&mut target_end, &login_request(0x04, 0, 0, b""));
        requests += 1;
        assert!(requests < 300);
    }
}

#[test]
fn other_pdus_before_login_end_the_connection_without_an_answer() {
    for opcode in [0x00, 0x01, 0x04, 0x05, 0x06, 0x23, 0x3f, 0x1f] {
        let mut target_end = target_end(Policy::open(small_offer()));
        let mut pdu = [0; 48];
        pdu[0] = opcode;
        assert!(ask(&mut target_end, &pdu).pdu.is_empty());
        assert_eq!(
            target_end.closed,
            Some(CloseReason::NotLoggedIn),
            "opcode {opcode:#x}"
        );
    }
}

fn chap_policy(mutual: Option<(&str, &str)>) -> Policy {
    let mut policy = Policy::open(small_offer());
    policy.chap = Algorithm::ALL.to_vec();
    policy
        .users
        .insert("joe".to_owned(), user("twelve bytes and more", mutual));
    // Names that look like numbers are valid (12.1.3).
    policy
        .users
        .insert("0x1234".to_owned(), user("another long secret", None));
    policy
}

fn chap_settings(
    name: &str,
    secret: &str,
    mutual: Option<(&str, &str)>,
    algorithms: &[Algorithm],
) -> InitiatorSettings {
    let credentials = Credentials {
        name: name.to_owned(),
        secret: Secret::new(secret),
        mutual: mutual.map(|(name, secret)| (name.to_owned(), Secret::new(secret))),
        algorithms: algorithms.to_vec(),
    };
    InitiatorSettings {
        credentials: Some(credentials),
        ..settings(small_offer())
    }
}

fn log_in(policy: Policy, settings: InitiatorSettings) -> Result<(), InitiatorError> {
    let mut pipes = Pipes::new(policy, settings, 5);
    let cid = pipes.connect();
    match pipes.error.take() {
        None if pipes.initiator.is_ready(cid) => Ok(()),
        None => panic!(
            "login neither done nor failed: {:?}",
            pipes.target_ends[0].closed
        ),
        Some(error) => Err(error),
    }
}

#[test]
fn chap_with_each_algorithm_and_both_ways() {
    let target = Some(("target", "the target's own secret"));
    for algorithm in Algorithm::ALL {
        let settings = chap_settings("joe", "twelve bytes and more", target, &[algorithm]);
        assert_eq!(
            log_in(chap_policy(target), settings),
            Ok(()),
            "{algorithm:?}"
        );
    }
    let settings = chap_settings("0x1234", "another long secret", None, &Algorithm::ALL);
    assert_eq!(log_in(chap_policy(None), settings), Ok(()));
}

#[test]
fn discovery_needs_chap_with_each_algorithm_and_both_ways() {
    for algorithm in Algorithm::ALL {
        for target in [None, Some(("target", "the target's own secret"))] {
            let settings = InitiatorSettings {
                target_name: None,
                ..chap_settings("joe", "twelve bytes and more", target, &[algorithm])
            };
            let mut pipes = Pipes::new(chap_policy(target), settings, 5);
            let cid = pipes.connect();
            assert_eq!(pipes.error, None, "{algorithm:?}");
            assert!(pipes.initiator.is_ready(cid), "{algorithm:?}");
            pipes.initiator.text(cid, b"SendTargets=All\0").unwrap();
            pipes.run();
            let listed = pipes.events.iter().any(|(_, event)| {
                matches!(event, Event::Text { text, .. } if text.starts_with(b"TargetName="))
            });
            assert!(listed, "{algorithm:?}: {:?}", pipes.events);
        }
    }
    let wrong = InitiatorSettings {
        target_name: None,
        ..chap_settings("joe", "not the secret", None, &Algorithm::ALL)
    };
    assert!(log_in(chap_policy(None), wrong).is_err());
    let none = InitiatorSettings {
        target_name: None,
        ..settings(small_offer())
    };
    assert!(log_in(chap_policy(None), none).is_err());
}

#[test]
fn chap_only_offer_is_authenticated_without_users() {
    let optional = || Policy {
        chap_is_optional: true,
        ..chap_policy(None)
    };
    for (offered, flags, taken) in [
        ("None", 0x81, "AuthMethod=None;"),
        ("None,CHAP", 0x81, "AuthMethod=None;"),
        ("CHAP,None", 0x81, "AuthMethod=None;"),
        ("CHAP", 0x00, "AuthMethod=CHAP;"),
        ("KRB5,CHAP", 0x00, "AuthMethod=CHAP;"),
    ] {
        let mut target_end = target_end(optional());
        let hello = text(&[
            NAMES[0],
            ("SessionType", "Discovery"),
            ("AuthMethod", offered),
        ]);
        let answer = ask(&mut target_end, &login_request(0x81, 0, 0, &hello));
        assert_eq!((answer.flags, answer.status), (flags, 0), "{offered}");
        assert_eq!(answer.text, taken, "{offered}");
    }
    let discovery = |secret| InitiatorSettings {
        target_name: None,
        ..chap_settings("joe", secret, None, &Algorithm::ALL)
    };
    assert_eq!(
        log_in(optional(), discovery("twelve bytes and more")),
        Ok(())
    );
    assert!(log_in(optional(), discovery("not the secret")).is_err());
    // Once CHAP has begun, the initiator cannot omit the response.
    let mut target_end = target_end(optional());
    let hello = [text(&NAMES), text(&[("AuthMethod", "CHAP")])].concat();
    ask(&mut target_end, &login_request(0x81, 0, 0, &hello));
    let answer = ask(&mut target_end, &login_request(0x81, 0, 0, b""));
    assert_eq!(answer.status, 0x0201);
}

#[test]
fn chap_fails_with_a_wrong_secret_name_or_one_way_only() {
    let refused = |result: Result<(), InitiatorError>| {
        matches!(
            result,
            Err(InitiatorError::Login(LoginError::Refused {
                status: 0x0201,
                ..
            }))
        )
    };
    let all = &Algorithm::ALL;
    assert!(refused(log_in(
        chap_policy(None),
        chap_settings("joe", "wrong", None, all)
    )));
    assert!(refused(log_in(
        chap_policy(None),
        chap_settings("jim", "twelve bytes and more", None, all)
    )));
    let without = log_in(chap_policy(None), settings(small_offer()));
    assert_eq!(without, Err(InitiatorError::Login(LoginError::NoUser)));
    let wants = Some(("target", "x"));
    assert!(refused(log_in(
        chap_policy(None),
        chap_settings("joe", "twelve bytes and more", wants, all)
    )));
    let same = Some(("target", "twelve bytes and more"));
    let result = log_in(
        chap_policy(same),
        chap_settings("joe", "twelve bytes and more", same, all),
    );
    let equal = Err(InitiatorError::Login(LoginError::EqualSecrets));
    assert_eq!(result, equal);
    let result = log_in(
        chap_policy(same),
        chap_settings("joe", "twelve bytes and more", None, all),
    );
    assert!(refused(result), "one secret for both ways");
    let wrong = Some(("target", "not the target's secret"));
    let right = Some(("target", "the target's own secret"));
    let result = log_in(
        chap_policy(right),
        chap_settings("joe", "twelve bytes and more", wrong, all),
    );
    assert_eq!(
        result,
        Err(InitiatorError::Login(LoginError::TargetNotAuthentic))
    );
}

/// Runs a login up to the challenge and returns it.
fn challenged(target_end: &mut TargetEnd, algorithms: &str) -> Answer {
    let hello = [text(&NAMES), text(&[("AuthMethod", "CHAP,None")])].concat();
    let answer = ask(target_end, &login_request(0x81, 0, 0, &hello));
    assert_eq!(
        (answer.flags, answer.status),
        (0, 0),
        "no transit before the proof"
    );
    assert!(answer.text.ends_with("AuthMethod=CHAP;"));
    ask(
        target_end,
        &login_request(0x00, 0, 0, &text(&[("CHAP_A", algorithms)])),
    )
}

#[test]
fn first_known_algorithm_is_taken_and_unknown_ones_fail() {
    let answer = challenged(&mut target_end(chap_policy(None)), "5,6,7,8");
    assert!(
        answer.text.starts_with("CHAP_A=5;CHAP_I="),
        "{}",
        answer.text
    );
    let answer = challenged(&mut target_end(chap_policy(None)), "9,7,5");
    assert!(
        answer.text.starts_with("CHAP_A=7;CHAP_I="),
        "{}",
        answer.text
    );
    for bad in ["56", "", "5x", "0", "-5"] {
        assert_eq!(
            challenged(&mut target_end(chap_policy(None)), bad).status,
            0x0201,
            "CHAP_A={bad}"
        );
    }
}

#[test]
fn reflected_challenge_is_refused() {
    let mut target_end = target_end(chap_policy(Some(("target", "the target's own secret"))));
    let answer = challenged(&mut target_end, "5");
    let pairs = answer.text.replace(';', "\0");
    let pairs = parse(pairs.as_bytes()).unwrap();
    let challenge = iscsi::text::parse_binary(pairs[2].value, 1024).unwrap();
    let identifier: u8 = pairs[1].value.parse().unwrap();
    let response = Algorithm::Md5.respond(
        identifier,
        &Secret::new("twelve bytes and more"),
        &challenge,
    );
    let proof = text(&[
        ("CHAP_N", "joe"),
        ("CHAP_R", &iscsi::text::to_base64(&response)),
        ("CHAP_I", pairs[1].value),
        ("CHAP_C", pairs[2].value),
    ]);
    assert_eq!(
        ask(&mut target_end, &login_request(0x81, 0, 0, &proof)).status,
        0x0201
    );
}

/// Returns CHAP_I and CHAP_C of a challenge.
fn challenge_of(answer: &Answer) -> (String, String) {
    let value = |key: &str| {
        let mut pairs = answer.text.split(';');
        let found = pairs.find_map(|pair| pair.strip_prefix(key)).unwrap();
        found.trim_start_matches('=').to_owned()
    };
    (value("CHAP_I"), value("CHAP_C"))
}

/// Builds CHAP_N and CHAP_R of a user with `secret`, and further pairs.
fn md5_proof(answer: &Answer, name: &str, secret: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let (identifier, challenge) = challenge_of(answer);
    let challenge = iscsi::text::parse_binary(&challenge, 1024).unwrap();
    let secret = Secret::new(secret);
    let response = Algorithm::Md5.respond(identifier.parse().unwrap(), &secret, &challenge);
    let response = iscsi::text::to_hex(&response);
    let proof = [("CHAP_N", name), ("CHAP_R", response.as_str())];
    text(&[&proof, more].concat())
}

#[test]
fn challenge_of_another_unfinished_login_is_refused() {
    let policy = || chap_policy(Some(("target", "the target's own secret")));
    let mut other = target_end(policy());
    let reflected = challenge_of(&challenged(&mut other, "5")).1;
    let status = |challenge: &str| {
        let mut target_end = target_end(policy());
        let answer = challenged(&mut target_end, "5");
        let more = [("CHAP_I", "9"), ("CHAP_C", challenge)];
        let proof = md5_proof(&answer, "joe", "twelve bytes and more", &more);
        ask(&mut target_end, &login_request(0x81, 0, 0, &proof)).status
    };
    assert_eq!(status(&reflected), 0x0201);
    drop(other);
    assert_eq!(status(&reflected), 0);
}

#[test]
fn secret_of_the_target_proves_no_user_of_it() {
    let proves = |secret: &str, mutual: Option<(&str, &str)>| {
        let mut policy = chap_policy(mutual);
        policy.users.insert("eve".to_owned(), user(secret, None));
        let mut target_end = target_end(policy);
        let answer = challenged(&mut target_end, "5");
        let proof = md5_proof(&answer, "eve", secret, &[]);
        ask(&mut target_end, &login_request(0x81, 0, 0, &proof)).status
    };
    // The target authenticates to joe with eve's secret.
    assert_eq!(proves("target's secret", None), 0);
    assert_eq!(
        proves("target's secret", Some(("target", "target's secret"))),
        0x0201
    );
}

#[test]
fn mutual_chap_needs_a_user_and_a_challenge_of_1_to_1024_bytes() {
    let status = |name: &str, identifier: &str, challenge: &str| {
        let mut target_end = target_end(chap_policy(Some(("target", "the target's own secret"))));
        let answer = challenged(&mut target_end, "5");
        let more = [("CHAP_I", identifier), ("CHAP_C", challenge)];
        let proof = md5_proof(&answer, name, "twelve bytes and more", &more);
        ask(&mut target_end, &login_request(0x81, 0, 0, &proof)).status
    };
    assert_eq!(status("joe", "0", "0x5a"), 0);
    assert_eq!(status("joe", "255", &format!("0x{:02048}", 1)), 0);
    for challenge in ["", "0x", "0b", "5a", &format!("0x{:02050}", 1)] {
        assert_eq!(status("joe", "0", challenge), 0x0201, "{challenge:?}");
    }
    assert_eq!(
        status("target", "0", "0x5a"),
        0x0201,
        "the target's own name"
    );
}

#[test]
fn proof_is_needed_before_any_other_stage() {
    let names = text(&NAMES);
    assert_eq!(
        ask(
            &mut target_end(chap_policy(None)),
            &login_request(0x87, 0, 0, &names)
        )
        .status,
        0x0201
    );
    assert_eq!(
        ask(
            &mut target_end(chap_policy(None)),
            &login_request(0x83, 0, 0, &names)
        )
        .status,
        0x0201
    );
    let none = [names, text(&[("AuthMethod", "None")])].concat();
    assert_eq!(
        ask(
            &mut target_end(chap_policy(None)),
            &login_request(0x83, 0, 0, &none)
        )
        .status,
        0x0201
    );
    let mut target_end = target_end(chap_policy(None));
    challenged(&mut target_end, "5");
    assert_eq!(
        ask(&mut target_end, &login_request(0x83, 0, 0, b"")).status,
        0x0201
    );
}

#[test]
fn secrets_are_not_in_debug_output() {
    let settings = chap_settings(
        "joe",
        "very hidden secret",
        Some(("t", "hidden too")),
        &[Algorithm::Md5],
    );
    let shown = format!(
        "{settings:?} {:?}",
        user("hidden as well", Some(("t", "hidden again")))
    );
    assert!(!shown.contains("hidden"), "{shown}");
}

#[test]
fn second_login_with_the_same_isid_reinstates_the_session() {
    let mut pipes = Pipes::ready(Policy::open(small_offer()), settings(small_offer()), 1, 1);
    let old = pipes.target_ends[0].connection.key().unwrap();
    pipes.initiator = iscsi::initiator::Initiator::new(settings(small_offer()));
    let cid = pipes.initiator.connect();
    let bytes = std::mem::take(pipes.initiator.outgoing(cid));
    let mut fresh = TargetEnd::new(pipes.policy.clone(), Limits::default());
    let mut messages = Messages::default();
    fresh.feed(&bytes, &mut [], &mut messages);
    while !pipes.initiator.is_ready(cid) {
        pipes.initiator.receive(cid, &fresh.take_bytes()).unwrap();
        let bytes = std::mem::take(pipes.initiator.outgoing(cid));
        fresh.feed(&bytes, &mut [], &mut messages);
    }
    assert_eq!(messages.drop, [old]);
    pipes.target_ends[0].feed(&[], &mut [], &mut messages);
    assert_eq!(pipes.target_ends[0].closed, Some(CloseReason::SessionEnded));
    assert_eq!(
        pipes.target_ends[0].connection.close().drop,
        [],
        "the new session stays"
    );
    assert_eq!(pipes.policy.table.sessions().len(), 1);
}

#[test]
fn discovery_session_finds_all_targets_and_runs_no_commands() {
    let settings = InitiatorSettings {
        target_name: None,
        ..settings(small_offer())
    };
    let mut pipes = Pipes::ready(Policy::open(small_offer()), settings, 1, 9);
    pipes.initiator.text(0, b"SendTargets=All\0").unwrap();
    pipes.run();
    let Some((_, Event::Text { text, .. })) = pipes.events.pop() else {
        panic!("no text")
    };
    let expected = format!(
        "TargetName={TARGET}\0TargetAddress=192.0.2.1:3260,1\0TargetAddress=[2001:db8::1]:3260,1\0"
    );
    assert_eq!(String::from_utf8(text).unwrap(), expected);
    pipes
        .initiator
        .command(0, iscsi::initiator::Initiator::read(0, &[0; 6], 0))
        .unwrap();
    pipes.run();
    assert!(matches!(
        pipes.events[0].1,
        Event::Rejected { reason: 0x04, .. }
    ));
}

#[test]
fn many_targets_come_in_several_text_responses() {
    let mut policy = Policy::open(small_offer());
    let address = || vec!["192.0.2.1:3260,1".to_owned()];
    policy.targets = (0..100)
        .map(|n| TargetRecord {
            name: format!("iqn.2026-11.org.example:t{n}"),
            addresses: address(),
        })
        .collect();
    let offer = Offer {
        max_recv_data_segment_length: 512,
        ..small_offer()
    };
    let settings = InitiatorSettings {
        target_name: None,
        ..settings(offer)
    };
    let mut pipes = Pipes::ready(policy, settings, 1, 4);
    pipes.initiator.text(0, b"SendTargets=All\0").unwrap();
    pipes.run();
    assert_eq!(pipes.error, None);
    let Some((_, Event::Text { text, .. })) = pipes.events.pop() else {
        panic!("no text")
    };
    let names = parse(&text)
        .unwrap()
        .iter()
        .filter(|pair| pair.key == "TargetName")
        .count();
    assert_eq!((names, pipes.initiator.tasks_len()), (100, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn arbitrary_login_text_never_panics(
        requests in prop::collection::vec((any::<u8>(), prop::collection::vec(any::<u8>(), 0..200)), 1..6),
    ) {
        let mut target_end = target_end(chap_policy(None));
        for (flags, text) in requests {
            target_end.feed(&login_request(flags, 0, 0, &text), &mut [], &mut Messages::default());
            target_end.take_bytes();
        }
    }

    #[test]
    fn arbitrary_keys_and_values_never_panic(
        pairs in prop::collection::vec(("[A-Z][A-Za-z0-9]{0,8}|CHAP_[ANRIC]|AuthMethod|MaxBurstLength|InitiatorName|TargetName|SessionType", "[ -~]{0,20}"), 0..12),
        flags in any::<u8>(),
    ) {
        let mut target_end = target_end(chap_policy(None));
        let mut text = text(&NAMES);
        for (key, value) in &pairs {
            push_pair(&mut text, key, value);
        }
        target_end.feed(&login_request(flags & 0x87, 0, 0, &text), &mut [], &mut Messages::default());
        target_end.feed(&login_request(flags & 0x87, 0, 0, &text), &mut [], &mut Messages::default());
    }
}
