//! The policy interface of a target: admission, authentication, discovery.

use std::sync::Arc;

use crate::chap::{Algorithm, Secret};
use crate::negotiation::Offer;
use crate::pdu::LoginStatus;
use crate::session::{Attachment, Claim, ConnectionKey, Leaving, Session};

/// An initiator that logs in.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Visitor {
    /// InitiatorName; before authentication only its syntax is checked.
    pub initiator_name: String,
    /// TargetName; `None` for discovery.
    pub target_name: Option<String>,
    /// The CHAP user, set after authentication.
    pub chap_user: Option<String>,
    /// The initiator's address, as passed by the caller.
    pub address: String,
    /// The local portal, as passed by the caller.
    pub portal: String,
}

/// Permission to attempt a login.
#[derive(Clone, Debug)]
pub struct Admission {
    /// CHAP algorithms available to the initiator, best first.
    pub chap: Vec<Algorithm>,
    /// Authentication is required. If false, it still takes place when the initiator offers only CHAP.
    pub must_authenticate: bool,
    /// TargetPortalGroupTag
    pub portal_group_tag: u16,
    /// TargetAlias
    pub target_alias: Option<String>,
    /// Limits of the negotiation.
    pub offer: Offer,
}

/// Refusal of a login.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Login status to send.
    pub status: LoginStatus,
    /// Address for the "moved" statuses: `address[:port][,portal group]`.
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

/// A CHAP user.
#[derive(Clone, Debug)]
pub struct ChapUser {
    /// The initiator's secret.
    pub secret: Secret,
    /// The target's name and secret for mutual CHAP, if configured.
    pub mutual: Option<(String, Secret)>,
}

impl ChapUser {
    /// Returns true if both users have the same secrets.
    pub fn is(&self, other: &ChapUser) -> bool {
        let proofs = match (&self.mutual, &other.mutual) {
            (None, None) => true,
            (Some((name, secret)), Some((other, proof))) => name == other && secret.matches(proof),
            _ => false,
        };
        proofs && self.secret.matches(&other.secret)
    }
}

/// A target in a SendTargets response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TargetRecord {
    /// TargetName
    pub name: String,
    /// TargetAddress values: `address:port,portal group`.
    pub addresses: Vec<String>,
}

/// The scope of a SendTargets request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SendTargets<'a> {
    /// All targets visible to the initiator.
    All,
    /// One named target.
    Named(&'a str),
}

/// Policy decisions. Called in the login phase and for Text Requests only. Implementations may lock but must not block for
/// long.
pub trait TargetPolicy: Send + Sync {
    /// Decides whether the initiator may attempt a login (existence of the target, ACL, demo mode).
    fn admit(&self, visitor: &Visitor) -> Result<Admission, Refusal>;

    /// Returns the CHAP users with this name that the initiator may use. The list has several entries if targets have users
    /// of the same name.
    fn chap_users(&self, visitor: &Visitor, name: &str) -> Vec<ChapUser>;

    /// Returns true if any target of this process authenticates with this secret. An initiator that answers with such a
    /// secret is refused (RFC 7143, 9.2.1).
    fn is_secret_of_target(&self, _secret: &Secret) -> bool {
        false
    }

    /// Returns the session with this TSIH.
    fn session(&self, tsih: u16) -> Option<Arc<Session>>;

    /// Joins or creates the session at the end of a login; see [`crate::session::SessionTable::attach`].
    fn attach(&self, visitor: &Visitor, claim: Claim) -> Result<Attachment, LoginStatus>;

    /// Removes a closed connection; see [`crate::session::SessionTable::detach`].
    fn detach(&self, connection: ConnectionKey, leaving: Leaving) -> Vec<ConnectionKey>;

    /// Returns the targets that the initiator may discover.
    fn targets(&self, visitor: &Visitor, which: SendTargets<'_>) -> Vec<TargetRecord>;

    /// Fills `bytes` with random data for challenges and tags.
    fn random(&self, bytes: &mut [u8]) {
        // Panics rather than send predictable challenges.
        getrandom::fill(bytes).expect("the system gives random numbers");
    }
}
