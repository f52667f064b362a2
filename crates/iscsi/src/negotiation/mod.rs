//! Negotiation of operational keys (RFC 7143, section 13): key table, responder, originator.
//!
//! The table `keys::TABLE` lists key, range, result function and scope in the order of the standard.

mod keys;
mod originator;
mod responder;

pub use keys::{Key, Rule, Scope};
pub use originator::{Originator, OriginatorError};
pub use responder::{Answer, Responder};

use crate::pdu::Digests;

/// The answer to an unknown key.
pub const NOT_UNDERSTOOD: &str = "NotUnderstood";
/// The answer to an inadmissible value.
pub const REJECT: &str = "Reject";
/// The answer to a key that does not apply to this session.
pub const IRRELEVANT: &str = "Irrelevant";

/// Task reporting semantics (13.23), in increasing strength.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum TaskReporting {
    /// RFC 3720 semantics.
    Rfc3720,
    /// Response fence
    ResponseFence,
    /// Fast abort
    FastAbort,
}

impl TaskReporting {
    /// Returns the text value.
    pub const fn name(self) -> &'static str {
        match self {
            TaskReporting::Rfc3720 => "RFC3720",
            TaskReporting::ResponseFence => "ResponseFence",
            TaskReporting::FastAbort => "FastAbort",
        }
    }
}

/// Digest algorithms that a side accepts, best first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DigestOffer {
    /// `None`
    None,
    /// `None,CRC32C`
    PreferNone,
    /// `CRC32C,None`
    PreferCrc32c,
    /// `CRC32C`
    Crc32c,
}

impl DigestOffer {
    /// Returns the list as text.
    pub const fn list(self) -> &'static str {
        match self {
            DigestOffer::None => "None",
            DigestOffer::PreferNone => "None,CRC32C",
            DigestOffer::PreferCrc32c => "CRC32C,None",
            DigestOffer::Crc32c => "CRC32C",
        }
    }

    /// Returns true if the list contains `value`.
    pub fn allows(self, value: &str) -> bool {
        self.list().split(',').any(|name| name == value)
    }
}

/// Proposed values of one side, which also limit its agreement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// HeaderDigest
    pub header_digest: DigestOffer,
    /// DataDigest
    pub data_digest: DigestOffer,
    /// MaxRecvDataSegmentLength of the offering side, in bytes.
    pub max_recv_data_segment_length: u32,
    /// Proposed session parameters.
    pub session: SessionParameters,
}

impl Offer {
    /// Returns the defaults of initiators: common values for immediate and unsolicited data.
    pub fn of_initiators() -> Offer {
        Offer {
            max_recv_data_segment_length: 262_144,
            session: SessionParameters {
                initial_r2t: false,
                immediate_data: true,
                max_burst_length: 1 << 20,
                first_burst_length: 262_144,
                ..SessionParameters::default()
            },
            ..Offer::default()
        }
    }
}

impl Default for Offer {
    /// The target's defaults: the largest supported values.
    fn default() -> Self {
        Offer {
            header_digest: DigestOffer::PreferNone,
            data_digest: DigestOffer::PreferNone,
            max_recv_data_segment_length: 256 * 1024,
            session: SessionParameters {
                max_connections: 16,
                initial_r2t: false,
                immediate_data: true,
                max_burst_length: 16 * 1024 * 1024 - 512,
                first_burst_length: 256 * 1024,
                time_to_wait: 0,
                time_to_retain: 20,
                max_outstanding_r2t: 8,
                data_pdu_in_order: false,
                data_sequence_in_order: false,
                error_recovery_level: 0,
                task_reporting: TaskReporting::Rfc3720,
                protocol_level: 2,
            },
        }
    }
}

/// Limits of a target for login negotiation, within the limits of the server.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LoginBounds {
    /// The target's values for the negotiation (RFC 7143, 13).
    pub offer: Offer,
    /// Maximum number of commands in progress per session; `None`: the server's limit.
    pub queue_depth: Option<u32>,
    /// Allowed CHAP algorithms; `None`: all.
    pub chap_algorithms: Option<Vec<crate::chap::Algorithm>>,
}

/// Session-wide parameters.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SessionParameters {
    /// MaxConnections
    pub max_connections: u16,
    /// InitialR2T
    pub initial_r2t: bool,
    /// ImmediateData
    pub immediate_data: bool,
    /// MaxBurstLength in bytes
    pub max_burst_length: u32,
    /// FirstBurstLength in bytes
    pub first_burst_length: u32,
    /// DefaultTime2Wait in seconds
    pub time_to_wait: u16,
    /// DefaultTime2Retain in seconds
    pub time_to_retain: u16,
    /// MaxOutstandingR2T
    pub max_outstanding_r2t: u16,
    /// DataPDUInOrder
    pub data_pdu_in_order: bool,
    /// DataSequenceInOrder
    pub data_sequence_in_order: bool,
    /// ErrorRecoveryLevel
    pub error_recovery_level: u8,
    /// TaskReporting
    pub task_reporting: TaskReporting,
    /// iSCSIProtocolLevel
    pub protocol_level: u8,
}

impl Default for SessionParameters {
    /// The defaults of section 13 for keys that are not negotiated.
    fn default() -> Self {
        SessionParameters {
            max_connections: 1,
            initial_r2t: true,
            immediate_data: true,
            max_burst_length: 262_144,
            first_burst_length: 65_536,
            time_to_wait: 2,
            time_to_retain: 20,
            max_outstanding_r2t: 1,
            data_pdu_in_order: true,
            data_sequence_in_order: true,
            error_recovery_level: 0,
            task_reporting: TaskReporting::Rfc3720,
            protocol_level: 1,
        }
    }
}

impl SessionParameters {
    pub(crate) fn boolean(&mut self, key: Key) -> Option<&mut bool> {
        match key {
            Key::InitialR2T => Some(&mut self.initial_r2t),
            Key::ImmediateData => Some(&mut self.immediate_data),
            Key::DataPduInOrder => Some(&mut self.data_pdu_in_order),
            Key::DataSequenceInOrder => Some(&mut self.data_sequence_in_order),
            _ => None,
        }
    }

    pub(crate) fn number(&self, key: Key) -> Option<u32> {
        Some(match key {
            Key::MaxConnections => self.max_connections.into(),
            Key::MaxBurstLength => self.max_burst_length,
            Key::FirstBurstLength => self.first_burst_length,
            Key::DefaultTime2Wait => self.time_to_wait.into(),
            Key::DefaultTime2Retain => self.time_to_retain.into(),
            Key::MaxOutstandingR2T => self.max_outstanding_r2t.into(),
            Key::ErrorRecoveryLevel => self.error_recovery_level.into(),
            Key::IscsiProtocolLevel => self.protocol_level.into(),
            _ => return None,
        })
    }

    /// Sets a numeric parameter. The caller has checked the value against the key's range, so the casts are lossless.
    pub(crate) fn set_number(&mut self, key: Key, value: u32) {
        match key {
            Key::MaxConnections => self.max_connections = value as u16,
            Key::MaxBurstLength => self.max_burst_length = value,
            Key::FirstBurstLength => self.first_burst_length = value,
            Key::DefaultTime2Wait => self.time_to_wait = value as u16,
            Key::DefaultTime2Retain => self.time_to_retain = value as u16,
            Key::MaxOutstandingR2T => self.max_outstanding_r2t = value as u16,
            Key::ErrorRecoveryLevel => self.error_recovery_level = value as u8,
            Key::IscsiProtocolLevel => self.protocol_level = value as u8,
            _ => {}
        }
    }
}

/// Parameters of one connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ConnectionParameters {
    /// Digests in the full feature phase.
    pub digests: Digests,
    /// MaxRecvDataSegmentLength of the peer, in bytes.
    pub peer_max_recv: u32,
}

impl Default for ConnectionParameters {
    fn default() -> Self {
        ConnectionParameters {
            digests: Digests::default(),
            peer_max_recv: 8192,
        }
    }
}
