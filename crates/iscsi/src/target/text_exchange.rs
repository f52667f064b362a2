//! Text in the full feature phase (RFC 7143, 11.10, 11.11, appendix C): SendTargets, and declarations that are still
//! allowed.
//!
//! One exchange at a time. Requests are bounded by [`crate::Limits::text_bytes`], and the response by the number of
//! targets.

use zerocopy::big_endian::U32;

use super::full_feature::{FullFeature, Io};
use crate::login::{SendTargets, is_iscsi_name};
use crate::negotiation::{Answer, NOT_UNDERSTOOD};
use crate::pdu::{CONTINUE, FINAL, NO_TAG, RejectReason, TextRequest, TextResponse};
use crate::session::SessionKind;
use crate::text::{Collector, Pair, parse, push_pair};

/// The exchange in progress.
#[derive(Debug)]
pub(super) struct TextExchange {
    tags: Option<(u32, u32)>,
    collector: Collector,
    answer: Vec<u8>,
    sent: usize,
}

impl TextExchange {
    pub fn new(limit: usize) -> Self {
        TextExchange {
            tags: None,
            collector: Collector::new(limit),
            answer: Vec::new(),
            sent: 0,
        }
    }

    fn reset(&mut self) {
        self.tags = None;
        self.collector.take();
        self.answer = Vec::new();
        self.sent = 0;
    }
}

/// A request that is rejected as a whole.
struct Refused(RejectReason);

impl FullFeature {
    /// Processes a Text Request.
    pub fn text_request(&mut self, io: &mut Io, request: &TextRequest, segment: &[u8]) {
        if let Err(Refused(reason)) = self.text_step(io, request, segment) {
            self.text.reset();
            self.reject(io, &request.to_bhs(), reason);
        }
    }

    fn text_step(
        &mut self,
        io: &mut Io,
        request: &TextRequest,
        segment: &[u8],
    ) -> Result<(), Refused> {
        let (itt, ttt) = (request.itt.get(), request.ttt.get());
        let continues = request.flags & CONTINUE != 0;
        let is_final = request.flags & FINAL != 0;
        if itt == NO_TAG || (continues && is_final) {
            return Err(Refused(RejectReason::InvalidPduField));
        }
        if ttt == NO_TAG {
            // A new exchange ends the old one (11.10.4).
            self.text.reset();
        } else if self.text.tags != Some((itt, ttt)) {
            return Err(Refused(RejectReason::ProtocolError));
        }
        if self.text.sent < self.text.answer.len() {
            if !segment.is_empty() {
                return Err(Refused(RejectReason::ProtocolError));
            }
            self.send_text(io, itt, is_final);
            return Ok(());
        }
        self.text
            .collector
            .push(segment)
            .map_err(|_| Refused(RejectReason::NegotiationReset))?;
        if continues {
            self.send_text(io, itt, false);
            return Ok(());
        }
        let text = self.text.collector.take();
        let pairs = parse(&text).map_err(|_| Refused(RejectReason::ProtocolError))?;
        self.text.answer = self.answer_text(&pairs)?;
        self.text.sent = 0;
        self.send_text(io, itt, is_final);
        Ok(())
    }

    fn answer_text(&mut self, pairs: &[Pair<'_>]) -> Result<Vec<u8>, Refused> {
        let mut out = Vec::new();
        let mut understood = pairs.is_empty();
        let mut told_targets = false;
        for pair in pairs {
            if pair.key == "SendTargets" {
                // SendTargets is answered once per request, so that the response stays bounded by the number of targets.
                if std::mem::replace(&mut told_targets, true) {
                    return Err(Refused(RejectReason::ProtocolError));
                }
                self.send_targets(pair.value, &mut out)?;
                understood = true;
                continue;
            }
            // May be declared at any time (13.7); has no effect.
            if pair.key == "InitiatorAlias" {
                understood = true;
                continue;
            }
            match self.responder.answer_in_full_feature_phase(*pair) {
                Answer::Send(value) => {
                    // Private keys are valid even if they are not understood.
                    understood |= value != NOT_UNDERSTOOD
                        || pair.key.starts_with("X-")
                        || pair.key.starts_with("X#");
                    push_pair(&mut out, pair.key, &value);
                }
                Answer::Nothing | Answer::Repeated => understood = true,
            }
        }
        // A request without any known key is a protocol error.
        if understood {
            Ok(out)
        } else {
            Err(Refused(RejectReason::ProtocolError))
        }
    }

    fn send_targets(&mut self, value: &str, out: &mut Vec<u8>) -> Result<(), Refused> {
        let own = self.session.identity.target_name.as_deref();
        let which = match (self.session.identity.kind, value) {
            (SessionKind::Discovery, "All") => SendTargets::All,
            // A normal session lists only its own target, even if the initiator asks for all (appendix C).
            (SessionKind::Normal, "All" | "") => SendTargets::Named(own.unwrap_or_default()),
            (_, name) if is_iscsi_name(name) => SendTargets::Named(name),
            _ => return Err(Refused(RejectReason::ProtocolError)),
        };
        for target in self.peer.policy.targets(&self.peer.visitor, which) {
            push_pair(out, "TargetName", &target.name);
            for address in &target.addresses {
                push_pair(out, "TargetAddress", address);
            }
        }
        Ok(())
    }

    /// Sends the next part of the answer. `is_final` means that the initiator has no further text.
    fn send_text(&mut self, io: &mut Io, itt: u32, is_final: bool) {
        let left = self.text.answer.len() - self.text.sent;
        let take = left.min(self.max_send());
        let ends = take == left && is_final;
        let ttt = if ends { NO_TAG } else { self.take_ttt() };
        self.text.tags = (!ends).then_some((itt, ttt));
        let (exp_cmd_sn, max_cmd_sn) = self.window();
        let header = TextResponse {
            flags: if ends { FINAL } else { 0 } | if take < left { CONTINUE } else { 0 },
            itt: U32::new(itt),
            ttt: U32::new(ttt),
            stat_sn: self.take_stat_sn(),
            exp_cmd_sn,
            max_cmd_sn,
            ..TextResponse::blank()
        };
        let piece = self.text.answer[self.text.sent..self.text.sent + take].to_vec();
        self.send_numbered(io, header.to_bhs(), &piece);
        self.text.sent += take;
        if self.text.sent == self.text.answer.len() {
            self.text.answer = Vec::new();
            self.text.sent = 0;
        }
    }
}
