//! Names: the stages of a request's way, the spans between them, and the kinds of operation.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A named point in a request's way; each leaves a stamp. In the order of the way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Stage {
    /// The worker saw that there is work: by a kick, or by polling.
    Noticed,
    /// The descriptor chain was taken from the ring (or the PDU from the connection).
    Popped,
    /// The request was read and checked.
    Parsed,
    /// The first of the write data that the client had to be asked for is there (iSCSI: R2T); elsewhere as parsed.
    Awaited,
    /// The last of it is there; elsewhere as parsed.
    Received,
    /// The backend was given the I/O.
    Submitted,
    /// The backend gave it back.
    Reaped,
    /// The status was written and the chain put into the used ring.
    Answered,
    /// The client was told, or it was decided that it need not be.
    Notified,
}

impl Stage {
    /// How many stages there are.
    pub const COUNT: usize = 9;

    /// Every stage, in order.
    pub const ALL: [Stage; Stage::COUNT] = [
        Stage::Noticed,
        Stage::Popped,
        Stage::Parsed,
        Stage::Awaited,
        Stage::Received,
        Stage::Submitted,
        Stage::Reaped,
        Stage::Answered,
        Stage::Notified,
    ];

    /// The name that documents, tables and JSON use.
    pub const fn name(self) -> &'static str {
        match self {
            Stage::Noticed => "noticed",
            Stage::Popped => "popped",
            Stage::Parsed => "parsed",
            Stage::Awaited => "awaited",
            Stage::Received => "received",
            Stage::Submitted => "submitted",
            Stage::Reaped => "reaped",
            Stage::Answered => "answered",
            Stage::Notified => "notified",
        }
    }
}

impl fmt::Display for Stage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The time between two stages that is kept in a histogram: one span per step, named after the stage in
/// which it ends, and the whole way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Span {
    /// Noticed to popped.
    Popped,
    /// Popped to parsed.
    Parsed,
    /// Parsed to awaited: waiting for the client to begin with data that it was asked for. Only of requests that did.
    Awaited,
    /// Awaited to received: that data on its way. Only of requests that waited for it.
    Received,
    /// Parsed, or received, to submitted.
    Submitted,
    /// Submitted to reaped: the backend's service time.
    Reaped,
    /// Reaped to answered.
    Answered,
    /// Answered to notified.
    Notified,
    /// Noticed to notified.
    Total,
}

impl Span {
    /// How many spans there are.
    pub const COUNT: usize = 9;

    /// Every span: the steps in order, then the whole.
    pub const ALL: [Span; Span::COUNT] = [
        Span::Popped,
        Span::Parsed,
        Span::Awaited,
        Span::Received,
        Span::Submitted,
        Span::Reaped,
        Span::Answered,
        Span::Notified,
        Span::Total,
    ];

    /// The spans that every request has.
    pub const COMMON: [Span; Span::COUNT - 2] = [
        Span::Popped,
        Span::Parsed,
        Span::Submitted,
        Span::Reaped,
        Span::Answered,
        Span::Notified,
        Span::Total,
    ];

    /// The steps, in order.
    pub const STEPS: [Span; Stage::COUNT - 1] = [
        Span::Popped,
        Span::Parsed,
        Span::Awaited,
        Span::Received,
        Span::Submitted,
        Span::Reaped,
        Span::Answered,
        Span::Notified,
    ];

    /// Where it begins.
    pub const fn from(self) -> Stage {
        match self {
            Span::Popped | Span::Total => Stage::Noticed,
            Span::Parsed => Stage::Popped,
            Span::Awaited => Stage::Parsed,
            Span::Received => Stage::Awaited,
            Span::Submitted => Stage::Received,
            Span::Reaped => Stage::Submitted,
            Span::Answered => Stage::Reaped,
            Span::Notified => Stage::Answered,
        }
    }

    /// Do only those requests have it whose data had to be asked for?
    pub const fn is_optional(self) -> bool {
        matches!(self, Span::Awaited | Span::Received)
    }

    /// Where it ends.
    pub const fn to(self) -> Stage {
        match self {
            Span::Popped => Stage::Popped,
            Span::Parsed => Stage::Parsed,
            Span::Awaited => Stage::Awaited,
            Span::Received => Stage::Received,
            Span::Submitted => Stage::Submitted,
            Span::Reaped => Stage::Reaped,
            Span::Answered => Stage::Answered,
            Span::Notified | Span::Total => Stage::Notified,
        }
    }

    /// The name that tables and JSON use.
    pub const fn name(self) -> &'static str {
        match self {
            Span::Total => "total",
            step => step.to().name(),
        }
    }

    /// Whether a step is time in the backend or time around it. The whole is both: it has none.
    pub const fn share(self) -> Option<Share> {
        match self {
            Span::Total => None,
            Span::Reaped => Some(Share::Service),
            _ => Some(Share::Queueing),
        }
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// What a step's time was spent on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Share {
    /// All else: waiting in or passing through this daemon, and waiting for the client's data.
    Queueing,
    /// Being served by the backend.
    Service,
}

/// The kind of a request, as far as latency is concerned.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Operation {
    /// Data from the disk.
    Read,
    /// Data to the disk.
    Write,
    /// Make durable.
    Flush,
    /// Discard and write-zeroes.
    Discard,
    /// All else: identification, mode pages, reservations.
    Other,
}

impl Operation {
    /// How many operations there are.
    pub const COUNT: usize = 5;

    /// Every operation, in the order of tables and of counts per operation.
    pub const ALL: [Operation; Operation::COUNT] = [
        Operation::Read,
        Operation::Write,
        Operation::Flush,
        Operation::Discard,
        Operation::Other,
    ];

    /// The name that tables and JSON use.
    pub const fn name(self) -> &'static str {
        match self {
            Operation::Read => "read",
            Operation::Write => "write",
            Operation::Flush => "flush",
            Operation::Discard => "discard",
            Operation::Other => "other",
        }
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn steps_follow_each_other_from_the_first_stage_to_the_last() {
        assert_eq!(Span::STEPS[0].from(), Stage::Noticed);
        for pair in Span::STEPS.windows(2) {
            assert_eq!(pair[0].to(), pair[1].from());
        }
        assert_eq!(Span::STEPS[7].to(), Stage::Notified);
        let common = Span::ALL.into_iter().filter(|span| !span.is_optional());
        assert!(common.eq(Span::COMMON));
        assert_eq!(
            (Span::Total.from(), Span::Total.to()),
            (Stage::Noticed, Stage::Notified)
        );
    }

    #[test]
    fn discriminants_are_indices_and_json_names_are_the_names() {
        for (index, stage) in Stage::ALL.into_iter().enumerate() {
            assert_eq!(stage as usize, index);
            assert_eq!(serde_json::to_value(stage).unwrap(), stage.name());
        }
        for (index, span) in Span::ALL.into_iter().enumerate() {
            assert_eq!(span as usize, index);
            assert_eq!(serde_json::to_value(span).unwrap(), span.name());
        }
        for (index, operation) in Operation::ALL.into_iter().enumerate() {
            assert_eq!(operation as usize, index);
            assert_eq!(serde_json::to_value(operation).unwrap(), operation.name());
        }
    }
}
