//! Names: the stages of a request, the spans between them, and the operations.

use serde::{Deserialize, Serialize};
use std::fmt;

/// A named point on the path of a request, in path order. Each leaves a stamp.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Stage {
    /// The worker detected work, by a kick or by polling.
    Noticed,
    /// The descriptor chain was taken from the ring, or the PDU from the connection.
    Popped,
    /// The request was read and validated.
    Parsed,
    /// The first solicited write data has arrived (iSCSI: R2T); otherwise as parsed.
    Awaited,
    /// The last solicited write data has arrived; otherwise as parsed.
    Received,
    /// The I/O was submitted to the backend.
    Submitted,
    /// The backend completed the I/O.
    Reaped,
    /// The status was written and the chain put into the used ring.
    Answered,
    /// The client was notified, or the notification was suppressed.
    Notified,
}

impl Stage {
    /// Number of stages.
    pub const COUNT: usize = 9;

    /// All stages, in order.
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

    /// Returns the name for documents, tables and JSON.
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

/// A time between two stages with a histogram: one span per step, named after its final stage, and the total.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Span {
    /// Noticed to popped.
    Popped,
    /// Popped to parsed.
    Parsed,
    /// Parsed to awaited: waiting for the first solicited data. Only for requests with solicited data.
    Awaited,
    /// Awaited to received: transfer of the solicited data. Only for requests that waited for it.
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
    /// Number of spans.
    pub const COUNT: usize = 9;

    /// All spans: the steps in order, then the total.
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

    /// The spans of every request.
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

    /// Returns the first stage.
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

    /// Returns true if only requests with solicited data have this span.
    pub const fn is_optional(self) -> bool {
        matches!(self, Span::Awaited | Span::Received)
    }

    /// Returns the last stage.
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

    /// Returns the name for tables and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Span::Total => "total",
            step => step.to().name(),
        }
    }

    /// Returns whether a step is time in the backend or outside it; `None` for the total, which is both.
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

/// Kind of time spent in a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Share {
    /// Time outside the block device: in this daemon, and waiting for the client's data.
    Queueing,
    /// Time in the block device.
    Service,
}

/// The kind of a request for latency measurements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[repr(u8)]
pub enum Operation {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Flush.
    Flush,
    /// Discard and write-zeroes.
    Discard,
    /// Other commands: identification, mode pages, reservations.
    Other,
}

impl Operation {
    /// Number of operations.
    pub const COUNT: usize = 5;

    /// All operations, in the order of tables and of counts per operation.
    pub const ALL: [Operation; Operation::COUNT] = [
        Operation::Read,
        Operation::Write,
        Operation::Flush,
        Operation::Discard,
        Operation::Other,
    ];

    /// Returns the name for tables and JSON.
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
