//! The table of operational keys (RFC 7143, 13.1 to 13.25).

use std::ops::RangeInclusive;

/// Operational keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs, reason = "the names are the standard's")]
pub enum Key {
    HeaderDigest,
    DataDigest,
    MaxConnections,
    InitialR2T,
    ImmediateData,
    MaxRecvDataSegmentLength,
    MaxBurstLength,
    FirstBurstLength,
    DefaultTime2Wait,
    DefaultTime2Retain,
    MaxOutstandingR2T,
    DataPduInOrder,
    DataSequenceInOrder,
    ErrorRecoveryLevel,
    TaskReporting,
    IscsiProtocolLevel,
    IfMarker,
    OfMarker,
    IfMarkInt,
    OfMarkInt,
}

/// The result function of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Boolean AND.
    And,
    /// Boolean OR.
    Or,
    /// The smaller number.
    Minimum(RangeInclusive<u32>),
    /// The larger number.
    Maximum(RangeInclusive<u32>),
    /// The first value of the originator's list that the responder accepts.
    List,
    /// Declared, not negotiated.
    Declared(RangeInclusive<u32>),
    /// Obsolete (13.25): a boolean, answered `No`.
    ObsoleteBoolean,
    /// Obsolete (13.25): answered `Reject`.
    ObsoleteNumber,
}

/// The scope of a key and the phase that allows its negotiation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// One connection, in its login phase (IO).
    Connection,
    /// One connection, at any time (ALL).
    ConnectionAnyTime,
    /// The session, in the login phase of its leading connection (LO).
    Session,
    /// As `Session`; irrelevant in discovery sessions.
    NormalSession,
}

/// One row of the table.
pub struct Row {
    /// The key.
    pub key: Key,
    /// Name of the key on the wire.
    pub name: &'static str,
    /// Result function and range of the key.
    pub rule: Rule,
    /// Scope of the key.
    pub scope: Scope,
}

const fn row(key: Key, name: &'static str, rule: Rule, scope: Scope) -> Row {
    Row {
        key,
        name,
        rule,
        scope,
    }
}

/// All operational keys.
pub static TABLE: [Row; 20] = [
    row(
        Key::HeaderDigest,
        "HeaderDigest",
        Rule::List,
        Scope::Connection,
    ),
    row(Key::DataDigest, "DataDigest", Rule::List, Scope::Connection),
    row(
        Key::MaxConnections,
        "MaxConnections",
        Rule::Minimum(1..=65_535),
        Scope::NormalSession,
    ),
    row(
        Key::InitialR2T,
        "InitialR2T",
        Rule::Or,
        Scope::NormalSession,
    ),
    row(
        Key::ImmediateData,
        "ImmediateData",
        Rule::And,
        Scope::NormalSession,
    ),
    row(
        Key::MaxRecvDataSegmentLength,
        "MaxRecvDataSegmentLength",
        Rule::Declared(512..=16_777_215),
        Scope::ConnectionAnyTime,
    ),
    row(
        Key::MaxBurstLength,
        "MaxBurstLength",
        Rule::Minimum(512..=16_777_215),
        Scope::NormalSession,
    ),
    row(
        Key::FirstBurstLength,
        "FirstBurstLength",
        Rule::Minimum(512..=16_777_215),
        Scope::NormalSession,
    ),
    row(
        Key::DefaultTime2Wait,
        "DefaultTime2Wait",
        Rule::Maximum(0..=3600),
        Scope::Session,
    ),
    row(
        Key::DefaultTime2Retain,
        "DefaultTime2Retain",
        Rule::Minimum(0..=3600),
        Scope::Session,
    ),
    row(
        Key::MaxOutstandingR2T,
        "MaxOutstandingR2T",
        Rule::Minimum(1..=65_535),
        Scope::NormalSession,
    ),
    row(
        Key::DataPduInOrder,
        "DataPDUInOrder",
        Rule::Or,
        Scope::NormalSession,
    ),
    row(
        Key::DataSequenceInOrder,
        "DataSequenceInOrder",
        Rule::Or,
        Scope::NormalSession,
    ),
    row(
        Key::ErrorRecoveryLevel,
        "ErrorRecoveryLevel",
        Rule::Minimum(0..=2),
        Scope::Session,
    ),
    row(
        Key::TaskReporting,
        "TaskReporting",
        Rule::List,
        Scope::NormalSession,
    ),
    row(
        Key::IscsiProtocolLevel,
        "iSCSIProtocolLevel",
        Rule::Minimum(0..=31),
        Scope::NormalSession,
    ),
    row(
        Key::IfMarker,
        "IFMarker",
        Rule::ObsoleteBoolean,
        Scope::Connection,
    ),
    row(
        Key::OfMarker,
        "OFMarker",
        Rule::ObsoleteBoolean,
        Scope::Connection,
    ),
    row(
        Key::IfMarkInt,
        "IFMarkInt",
        Rule::ObsoleteNumber,
        Scope::Connection,
    ),
    row(
        Key::OfMarkInt,
        "OFMarkInt",
        Rule::ObsoleteNumber,
        Scope::Connection,
    ),
];

/// Returns the row of the key with this name.
pub fn find(name: &str) -> Option<&'static Row> {
    TABLE.iter().find(|row| row.name == name)
}

/// Set of seen keys, one bit per key.
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen(u32);

impl Seen {
    /// Marks a key as seen. Returns true if it was not seen before.
    pub fn mark(&mut self, key: Key) -> bool {
        let bit = 1 << key as u32;
        let new = self.0 & bit == 0;
        self.0 |= bit;
        new
    }

    /// Returns true if the key was seen.
    pub fn has(self, key: Key) -> bool {
        self.0 & (1 << key as u32) != 0
    }
}
