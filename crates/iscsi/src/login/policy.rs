//! What the owner of a target decides: who may log in, with what proof, and what there is to be found.

use std::sync::Arc;

use crate::chap::{Algorithm, Secret};
use crate::negotiation::Offer;
use crate::pdu::LoginStatus;
use crate::session::{Attachment, Claim, ConnectionKey, Leaving, Session};

/// Who logs in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Visitor {
    /// InitiatorName; checked for form only, until authenticated.
    pub initiator_name: String,
    /// TargetName; none for discovery.
    pub target_name: Option<String>,
    /// The CHAP user, once proved.
    pub chap_user: Option<String>,
    /// The initiator's address, as the caller wrote it.
    pub address: String,
    /// The portal of ours that it came to, as the caller wrote it.
    pub portal: String,
}

/// A visitor may try to log in.
#[derive(Clone, Debug)]
pub struct Admission {
    /// CHAP algorithms with which it can authenticate, best first.
    pub chap: Vec<Algorithm>,
    /// It has to; else it does where it offers nothing but CHAP.
    pub must_authenticate: bool,
    /// TargetPortalGroupTag
    pub portal_group_tag: u16,
    /// TargetAlias
    pub target_alias: Option<String>,
    /// Bounds of the negotiation.
    pub offer: Offer,
}

/// A visitor may not, or not here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Why.
    pub status: LoginStatus,
    /// Where to go instead, with the moved statuses: `address[:port][,portal group]`.
    pub address: Option<String>,
}

impl From<LoginStatus> for Refusal {
    fn from(status: LoginStatus) -> Self {
        Refusal {
            status,
            address: None,
        }
    }
}

/// A user of CHAP.
#[derive(Clone, Debug)]
pub struct ChapUser {
    /// What the initiator has to prove it knows.
    pub secret: Secret,
    /// Name and secret with which the target proves itself, where it can.
    pub mutual: Option<(String, Secret)>,
}

impl ChapUser {
    /// Do both know the same?
    pub fn is(&self, other: &ChapUser) -> bool {
        let proofs = match (&self.mutual, &other.mutual) {
            (None, None) => true,
            (Some((name, secret)), Some((other, proof))) => name == other && secret.matches(proof),
            _ => false,
        };
        proofs && self.secret.matches(&other.secret)
    }
}

/// A target to be found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetRecord {
    /// TargetName
    pub name: String,
    /// TargetAddress values: `address:port,portal group`.
    pub addresses: Vec<String>,
}

/// Which targets are asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendTargets<'a> {
    /// All that the visitor may see.
    All,
    /// One.
    Named(&'a str),
}

/// The decisions. Called in the login phase and for text requests only; may lock, must not block for long.
pub trait TargetPolicy: Send + Sync {
    /// May this visitor try? Target known, ACL, demo mode.
    fn admit(&self, visitor: &Visitor) -> Result<Admission, Refusal>;

    /// The CHAP users of that name as which this visitor may log in; several where targets have users of one name.
    fn chap_users(&self, visitor: &Visitor, name: &str) -> Vec<ChapUser>;

    /// Returns true if a target of this process proves itself with this secret, for any user. An initiator that answers with
    /// such a secret fails (RFC 7143, 9.2.1).
    fn is_secret_of_target(&self, _secret: &Secret) -> bool {
        false
    }

    /// The session with this TSIH.
    fn session(&self, tsih: u16) -> Option<Arc<Session>>;

    /// Everything is settled: join or make the session. [`crate::session::SessionTable::attach`] does it.
    fn attach(&self, visitor: &Visitor, claim: Claim) -> Result<Attachment, LoginStatus>;

    /// A connection is over: [`crate::session::SessionTable::detach`].
    fn detach(&self, connection: ConnectionKey, leaving: Leaving) -> Vec<ConnectionKey>;

    /// The targets that this visitor may find.
    fn targets(&self, visitor: &Visitor, which: SendTargets<'_>) -> Vec<TargetRecord>;

    /// Random bytes for challenges and tags.
    fn random(&self, bytes: &mut [u8]) {
        // without random numbers there are no challenges: no login is better than a predictable one
        getrandom::fill(bytes).expect("the system gives random numbers");
    }
}
