//! The responding side: answers each received pair and records the result (RFC 7143, 6.2).

use super::keys::{Row, Rule, Scope, Seen, find};
use super::{
    ConnectionParameters, DigestOffer, IRRELEVANT, Key, NOT_UNDERSTOOD, Offer, REJECT,
    SessionParameters, TaskReporting,
};
use crate::text::{Pair, parse_boolean, parse_list, parse_number};

/// Response to a pair.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Answer {
    /// Send `key=value`.
    Send(String),
    /// No answer is needed: the pair was a declaration, or an answer to our key.
    Nothing,
    /// The key was negotiated before, so the negotiation fails (6.3).
    Repeated,
}

/// State of a responder during one login phase.
#[derive(Clone, Debug)]
pub struct Responder {
    offer: Offer,
    seen: Seen,
    leading: bool,
    discovery: bool,
    /// Session parameters negotiated so far.
    pub session: SessionParameters,
    /// Connection parameters negotiated so far.
    pub connection: ConnectionParameters,
}

fn answer_with(value: impl Into<String>) -> Answer {
    Answer::Send(value.into())
}

impl Responder {
    /// Creates the responder of a leading connection. `offer` limits its agreement.
    pub fn new(offer: Offer) -> Self {
        Responder {
            offer,
            seen: Seen::default(),
            leading: true,
            discovery: false,
            session: SessionParameters::default(),
            connection: ConnectionParameters::default(),
        }
    }

    /// Switches to the rules of a discovery session.
    pub fn set_discovery(&mut self) {
        self.discovery = true;
    }

    /// Switches to the rules of a further connection in a session with these parameters.
    pub fn set_joining(&mut self, session: SessionParameters) {
        self.leading = false;
        self.session = session;
    }

    /// Returns MaxRecvDataSegmentLength of this side, in bytes.
    pub fn max_recv_data_segment_length(&self) -> u32 {
        self.offer.max_recv_data_segment_length
    }

    /// Answers a pair of the login phase.
    pub fn answer(&mut self, pair: Pair<'_>) -> Answer {
        if matches!(pair.value, NOT_UNDERSTOOD | REJECT | IRRELEVANT) {
            return Answer::Nothing;
        }
        let Some(row) = find(pair.key) else {
            return answer_with(NOT_UNDERSTOOD);
        };
        if !self.seen.mark(row.key) {
            return Answer::Repeated;
        }
        match row.scope {
            Scope::NormalSession if self.discovery => answer_with(IRRELEVANT),
            Scope::Session | Scope::NormalSession if !self.leading => answer_with(REJECT),
            _ => self.negotiate(row, pair.value),
        }
    }

    /// Answers a pair of the full feature phase, where only MaxRecvDataSegmentLength may change.
    pub fn answer_in_full_feature_phase(&mut self, pair: Pair<'_>) -> Answer {
        if matches!(pair.value, NOT_UNDERSTOOD | REJECT | IRRELEVANT) {
            return Answer::Nothing;
        }
        match find(pair.key) {
            None => answer_with(NOT_UNDERSTOOD),
            Some(row) if row.scope == Scope::ConnectionAnyTime => self.negotiate(row, pair.value),
            Some(_) => answer_with(REJECT),
        }
    }

    /// Ends the negotiation: FirstBurstLength must not exceed MaxBurstLength (13.14).
    pub fn finish(&mut self) {
        self.session.first_burst_length = self
            .session
            .first_burst_length
            .min(self.session.max_burst_length);
    }

    fn negotiate(&mut self, row: &Row, value: &str) -> Answer {
        let admissible = |range: &std::ops::RangeInclusive<u32>| {
            parse_number(value)
                .and_then(|n| u32::try_from(n).ok())
                .filter(|n| range.contains(n))
        };
        match &row.rule {
            Rule::And | Rule::Or => self.negotiate_boolean(row, value),
            Rule::Minimum(range) | Rule::Maximum(range) => {
                let (Some(theirs), Some(ours)) =
                    (admissible(range), self.offer.session.number(row.key))
                else {
                    return answer_with(REJECT);
                };
                let mut result = if matches!(row.rule, Rule::Minimum(_)) {
                    theirs.min(ours)
                } else {
                    theirs.max(ours)
                };
                if row.key == Key::FirstBurstLength && self.seen.has(Key::MaxBurstLength) {
                    result = result.min(self.session.max_burst_length);
                }
                self.session.set_number(row.key, result);
                answer_with(result.to_string())
            }
            Rule::Declared(range) => {
                let Some(theirs) = admissible(range) else {
                    return answer_with(REJECT);
                };
                self.connection.peer_max_recv = theirs;
                Answer::Nothing
            }
            Rule::List => self.negotiate_list(row.key, value),
            Rule::ObsoleteBoolean if parse_boolean(value).is_some() => answer_with("No"),
            Rule::ObsoleteBoolean | Rule::ObsoleteNumber => answer_with(REJECT),
        }
    }

    fn negotiate_boolean(&mut self, row: &Row, value: &str) -> Answer {
        let ours = self.offer.session.boolean(row.key).map(|b| *b);
        let (Some(theirs), Some(ours)) = (parse_boolean(value), ours) else {
            return answer_with(REJECT);
        };
        let result = if row.rule == Rule::And {
            theirs && ours
        } else {
            theirs || ours
        };
        if let Some(slot) = self.session.boolean(row.key) {
            *slot = result;
        }
        answer_with(if result { "Yes" } else { "No" })
    }

    fn negotiate_list(&mut self, key: Key, value: &str) -> Answer {
        let Some(names) = parse_list(value) else {
            return answer_with(REJECT);
        };
        let chosen = match key {
            Key::HeaderDigest => choose_digest(&names, self.offer.header_digest).inspect(|crc| {
                self.connection.digests.header = *crc;
            }),
            Key::DataDigest => choose_digest(&names, self.offer.data_digest).inspect(|crc| {
                self.connection.digests.data = *crc;
            }),
            _ => return self.negotiate_task_reporting(&names),
        };
        match chosen {
            Some(true) => answer_with("CRC32C"),
            Some(false) => answer_with("None"),
            None => answer_with(REJECT),
        }
    }

    fn negotiate_task_reporting(&mut self, names: &[&str]) -> Answer {
        let known = [
            TaskReporting::Rfc3720,
            TaskReporting::ResponseFence,
            TaskReporting::FastAbort,
        ];
        let ours = self.offer.session.task_reporting;
        let taken = |name: &&str| {
            known
                .into_iter()
                .find(|known| known.name() == *name && *known <= ours)
        };
        let chosen = names.iter().find_map(taken);
        match chosen {
            Some(reporting) => {
                self.session.task_reporting = reporting;
                answer_with(reporting.name())
            }
            None => answer_with(REJECT),
        }
    }
}

fn choose_digest(names: &[&str], offer: DigestOffer) -> Option<bool> {
    names
        .iter()
        .find(|name| offer.allows(name))
        .map(|name| *name == "CRC32C")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn answer(responder: &mut Responder, key: &str, value: &str) -> String {
        match responder.answer(Pair { key, value }) {
            Answer::Send(value) => value,
            other => format!("{other:?}"),
        }
    }

    fn fresh() -> Responder {
        Responder::new(Offer::default())
    }

    #[test]
    fn results_follow_the_functions_of_section_13() {
        let mut r = fresh();
        for (key, value, expected) in [
            ("HeaderDigest", "CRC32C,None", "CRC32C"),
            ("DataDigest", "None,CRC32C", "None"),
            ("MaxConnections", "4", "4"),
            ("InitialR2T", "No", "No"),
            ("ImmediateData", "Yes", "Yes"),
            ("MaxBurstLength", "0x40000", "262144"),
            ("FirstBurstLength", "16776192", "262144"),
            ("DefaultTime2Wait", "2", "2"),
            ("DefaultTime2Retain", "0", "0"),
            ("MaxOutstandingR2T", "65535", "8"),
            ("DataPDUInOrder", "Yes", "Yes"),
            ("DataSequenceInOrder", "No", "No"),
            ("ErrorRecoveryLevel", "2", "0"),
            (
                "TaskReporting",
                "FastAbort,ResponseFence,RFC3720",
                "RFC3720",
            ),
            ("iSCSIProtocolLevel", "31", "2"),
        ] {
            assert_eq!(answer(&mut r, key, value), expected, "{key}={value}");
        }
        assert!(r.connection.digests.header && !r.connection.digests.data);
    }

    #[test]
    fn or_with_yes_on_one_side_is_yes_and_and_with_no_is_no() {
        let mut r = fresh();
        assert_eq!(answer(&mut r, "InitialR2T", "Yes"), "Yes");
        assert_eq!(answer(&mut r, "ImmediateData", "No"), "No");
        assert!(r.session.initial_r2t && !r.session.immediate_data);
    }

    #[test]
    fn inadmissible_values_are_answered_reject() {
        for (key, value) in [
            ("MaxConnections", "0"),
            ("MaxConnections", "65536"),
            ("MaxBurstLength", "511"),
            ("MaxBurstLength", "16777216"),
            ("MaxRecvDataSegmentLength", "511"),
            ("DefaultTime2Wait", "3601"),
            ("ErrorRecoveryLevel", "3"),
            ("InitialR2T", "yes"),
            ("HeaderDigest", "MD5"),
            ("HeaderDigest", ""),
            ("TaskReporting", "Quick"),
            ("IFMarkInt", "2048~8192"),
            ("IFMarker", "maybe"),
        ] {
            assert_eq!(answer(&mut fresh(), key, value), "Reject", "{key}={value}");
        }
    }

    #[test]
    fn obsolete_markers_are_never_not_understood() {
        assert_eq!(answer(&mut fresh(), "IFMarker", "Yes"), "No");
        assert_eq!(answer(&mut fresh(), "OFMarker", "No"), "No");
        assert_eq!(answer(&mut fresh(), "OFMarkInt", "1~2"), "Reject");
    }

    #[test]
    fn unknown_keys_are_not_understood_and_case_matters() {
        assert_eq!(
            answer(&mut fresh(), "X-org.example.speed", "9"),
            "NotUnderstood"
        );
        assert_eq!(
            answer(&mut fresh(), "maxburstlength", "512"),
            "NotUnderstood"
        );
    }

    #[test]
    fn declaration_is_taken_without_an_answer() {
        let mut r = fresh();
        assert_eq!(
            r.answer(Pair {
                key: "MaxRecvDataSegmentLength",
                value: "65536"
            }),
            Answer::Nothing
        );
        assert_eq!(r.connection.peer_max_recv, 65536);
        let again = Pair {
            key: "MaxRecvDataSegmentLength",
            value: "512",
        };
        assert_eq!(r.answer(again), Answer::Repeated);
        assert_eq!(r.answer_in_full_feature_phase(again), Answer::Nothing);
        assert_eq!(r.connection.peer_max_recv, 512);
    }

    #[test]
    fn discovery_session_finds_data_keys_irrelevant() {
        let mut r = fresh();
        r.set_discovery();
        assert_eq!(answer(&mut r, "InitialR2T", "Yes"), "Irrelevant");
        assert_eq!(answer(&mut r, "MaxBurstLength", "4096"), "Irrelevant");
        assert_eq!(answer(&mut r, "DefaultTime2Wait", "5"), "5");
        assert_eq!(answer(&mut r, "HeaderDigest", "None"), "None");
    }

    #[test]
    fn joining_connection_cannot_change_the_session() {
        let mut r = fresh();
        r.set_joining(SessionParameters {
            max_burst_length: 8192,
            ..SessionParameters::default()
        });
        assert_eq!(answer(&mut r, "MaxBurstLength", "4096"), "Reject");
        assert_eq!(r.session.max_burst_length, 8192);
        assert_eq!(answer(&mut r, "DataDigest", "CRC32C"), "CRC32C");
    }
}
