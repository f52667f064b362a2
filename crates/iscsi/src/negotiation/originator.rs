//! The originating side: proposes key=value pairs and evaluates the answers.

use super::keys::{Rule, Scope, Seen, TABLE, find};
use super::{
    ConnectionParameters, IRRELEVANT, Key, NOT_UNDERSTOOD, Offer, REJECT, SessionParameters,
};
use crate::text::{Pair, parse_boolean, parse_number, push_pair};

/// An answer that violates the negotiation rules.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("response {key}={value} is not admissible")]
pub struct OriginatorError {
    /// The key.
    pub key: String,
    /// The value.
    pub value: String,
}

/// State of an originator during one login phase.
#[derive(Clone, Debug)]
pub struct Originator {
    offer: Offer,
    answered: Seen,
    /// Session parameters negotiated so far.
    pub session: SessionParameters,
    /// Connection parameters negotiated so far.
    pub connection: ConnectionParameters,
}

impl Originator {
    /// Creates an originator that proposes `offer`.
    pub fn new(offer: Offer) -> Self {
        Originator {
            offer,
            answered: Seen::default(),
            session: SessionParameters::default(),
            connection: ConnectionParameters::default(),
        }
    }

    /// Returns the pairs to send. `leading` includes the session-wide keys. `discovery` omits keys that are irrelevant in
    /// discovery sessions.
    pub fn propose(&mut self, leading: bool, discovery: bool) -> Vec<u8> {
        let mut text = Vec::new();
        for row in &TABLE {
            let fits = match row.scope {
                Scope::Session => leading,
                Scope::NormalSession => leading && !discovery,
                Scope::Connection | Scope::ConnectionAnyTime => true,
            };
            let value = self.value(row.key, &row.rule);
            if let (true, Some(value)) = (fits, value) {
                push_pair(&mut text, row.name, &value);
            }
        }
        text
    }

    fn value(&mut self, key: Key, rule: &Rule) -> Option<String> {
        match rule {
            Rule::And | Rule::Or => {
                let wish = self.offer.session.boolean(key)?;
                Some(if *wish { "Yes" } else { "No" }.to_owned())
            }
            Rule::Minimum(_) | Rule::Maximum(_) => {
                self.offer.session.number(key).map(|n| n.to_string())
            }
            Rule::Declared(_) => Some(self.offer.max_recv_data_segment_length.to_string()),
            Rule::List => Some(match key {
                Key::HeaderDigest => self.offer.header_digest.list().to_owned(),
                Key::DataDigest => self.offer.data_digest.list().to_owned(),
                _ => self.offer.session.task_reporting.name().to_owned(),
            }),
            Rule::ObsoleteBoolean | Rule::ObsoleteNumber => None,
        }
    }

    /// Processes an answer or a declaration of the peer. Returns `false` if the key is not in the table.
    pub fn accept(&mut self, pair: Pair<'_>) -> Result<bool, OriginatorError> {
        let Some(row) = find(pair.key) else {
            return Ok(false);
        };
        let bad = || OriginatorError {
            key: pair.key.to_owned(),
            value: pair.value.to_owned(),
        };
        if matches!(pair.value, NOT_UNDERSTOOD | REJECT | IRRELEVANT) {
            // The default applies.
            return Ok(true);
        }
        if !self.answered.mark(row.key) {
            return Err(bad());
        }
        match &row.rule {
            Rule::And | Rule::Or => {
                let answer = parse_boolean(pair.value).ok_or_else(bad)?;
                let wish = self
                    .offer
                    .session
                    .boolean(row.key)
                    .map(|b| *b)
                    .ok_or_else(bad)?;
                if answer != wish && answer != (row.rule == Rule::Or) {
                    return Err(bad());
                }
                if let Some(slot) = self.session.boolean(row.key) {
                    *slot = answer;
                }
            }
            Rule::Minimum(range) | Rule::Maximum(range) => {
                let answer = parse_number(pair.value)
                    .and_then(|n| u32::try_from(n).ok())
                    .ok_or_else(bad)?;
                let wish = self.offer.session.number(row.key).ok_or_else(bad)?;
                let right = if matches!(row.rule, Rule::Minimum(_)) {
                    answer <= wish
                } else {
                    answer >= wish
                };
                if !right || !range.contains(&answer) {
                    return Err(bad());
                }
                self.session.set_number(row.key, answer);
            }
            Rule::Declared(range) => {
                let value = parse_number(pair.value).and_then(|n| u32::try_from(n).ok());
                self.connection.peer_max_recv =
                    value.filter(|n| range.contains(n)).ok_or_else(bad)?;
            }
            Rule::List => match row.key {
                Key::HeaderDigest if self.offer.header_digest.allows(pair.value) => {
                    self.connection.digests.header = pair.value == "CRC32C";
                }
                Key::DataDigest if self.offer.data_digest.allows(pair.value) => {
                    self.connection.digests.data = pair.value == "CRC32C";
                }
                Key::TaskReporting if pair.value == self.offer.session.task_reporting.name() => {
                    self.session.task_reporting = self.offer.session.task_reporting;
                }
                _ => return Err(bad()),
            },
            Rule::ObsoleteBoolean | Rule::ObsoleteNumber => return Err(bad()),
        }
        Ok(true)
    }

    /// Ends the negotiation: FirstBurstLength must not exceed MaxBurstLength (13.14).
    pub fn finish(&mut self) {
        self.session.first_burst_length = self
            .session
            .first_burst_length
            .min(self.session.max_burst_length);
    }
}

#[cfg(test)]
mod tests {
    use super::super::Responder;
    use super::*;
    use crate::text::parse;

    #[test]
    fn originator_and_responder_agree_on_parameters() {
        let mut originator = Originator::new(Offer::default());
        let mut responder = Responder::new(Offer::default());
        let text = originator.propose(true, false);
        let mut answers = Vec::new();
        for pair in parse(&text).unwrap() {
            if let super::super::Answer::Send(value) = responder.answer(pair) {
                push_pair(&mut answers, pair.key, &value);
            }
        }
        for pair in parse(&answers).unwrap() {
            assert_eq!(originator.accept(pair), Ok(true));
        }
        originator.finish();
        responder.finish();
        assert_eq!(originator.session, responder.session);
        assert_eq!(originator.connection.digests, responder.connection.digests);
    }

    #[test]
    fn answers_outside_the_result_function_are_refused() {
        let mut originator = Originator::new(Offer::default());
        for (key, value) in [
            ("MaxBurstLength", "16777215"),
            ("ImmediateData", "maybe"),
            ("HeaderDigest", "MD5"),
        ] {
            assert!(
                originator.accept(Pair { key, value }).is_err(),
                "{key}={value}"
            );
        }
    }
}
