//! Feeds arbitrary bytes as Login Requests of an initiator that must pass CHAP. Rule: no login succeeds without the secret.
//!
//! Format of a record: a flags byte, a length byte and text of that length.

use std::sync::Arc;

use iscsi::Limits;
use iscsi::chap::{Algorithm, Secret};
use iscsi::login::{
    Admission, ChapUser, LoginOutcome, Refusal, SendTargets, TargetLogin, TargetPolicy,
    TargetRecord, Visitor,
};
use iscsi::negotiation::Offer;
use iscsi::pdu::{LoginRequest, LoginStatus};
use iscsi::session::{Attachment, Claim, ConnectionKey, Leaving, Session, SessionTable};

struct Guarded(SessionTable);

impl TargetPolicy for Guarded {
    fn admit(&self, _: &Visitor) -> Result<Admission, Refusal> {
        let offer = Offer::default();
        Ok(Admission {
            chap: Algorithm::ALL.to_vec(),
            must_authenticate: true,
            portal_group_tag: 1,
            target_alias: None,
            offer,
        })
    }

    fn chap_users(&self, _: &Visitor, _: &str) -> Vec<ChapUser> {
        let mutual = Some((
            "target".to_owned(),
            Secret::new("another secret of the target"),
        ));
        vec![ChapUser {
            secret: Secret::new("a secret that no fuzzer finds"),
            mutual,
        }]
    }

    fn session(&self, tsih: u16) -> Option<Arc<Session>> {
        self.0.session(tsih)
    }

    fn attach(&self, _: &Visitor, claim: Claim) -> Result<Attachment, LoginStatus> {
        self.0.attach(claim)
    }

    fn detach(&self, connection: ConnectionKey, leaving: Leaving) -> Vec<ConnectionKey> {
        self.0.detach(connection, leaving)
    }

    fn targets(&self, _: &Visitor, _: SendTargets<'_>) -> Vec<TargetRecord> {
        Vec::new()
    }

    fn random(&self, bytes: &mut [u8]) {
        bytes.fill(0x5a);
    }
}

/// Feeds the records of `data` to a login.
pub fn run(data: &[u8]) {
    let policy = Arc::new(Guarded(SessionTable::new(4, 16)));
    let mut login = TargetLogin::new(policy, Visitor::default(), &Limits::default());
    let mut left = data;
    while let [flags, length, rest @ ..] = left {
        let (text, rest) = rest.split_at(rest.len().min(usize::from(*length)));
        left = rest;
        let mut request = LoginRequest::blank();
        request.opcode = 0x43;
        request.flags = *flags;
        match login.handle(&request, text).outcome {
            LoginOutcome::Continues => {}
            LoginOutcome::Failed(_) => return,
            LoginOutcome::Done(_) => panic!("logged in without the secret"),
        }
    }
}
