//! Stage stamps and latency histograms: the time that requests spend in each stage.
//!
//! Each queue has one [`QueueTimeline`], written only by the worker that owns the queue: no locked instruction, no lock, no
//! allocation per request. A stamp is read once per batch and hop; histograms take weighted records in clock ticks.
//! Observers read the queue's [`QueueRecord`] and get a [`QueueSnapshot`] in nanoseconds, which can be merged, subtracted
//! and sent as JSON. [`Report`] and [`table`] format it for programs and people. No I/O. Tests: at the end of each module.

#![forbid(unsafe_code)]

mod clock;
mod histogram;
mod parts;
mod queue;
mod queue_report;
mod record;
mod report;
mod slow;
mod snapshot;
mod sparse;
mod stage;
mod sync;
pub mod table;
mod word;

pub use clock::{Clock, SimulatedTime, Stamp};
pub use histogram::Histogram;
pub use parts::{DiskNumber, MixedBatch, Part, PartCounts};
pub use queue::{Counters, OperationCounters, QueueTimeline, Stamps};
pub use queue_report::{QueueReport, RULE, SlowReport, reports, slowest};
pub use record::{CounterWords, QueueRecord};
pub use report::{Ends, Layer, OperationReport, Report, Row};
pub use slow::{SlowLog, SlowRequest, SlowRequestSnapshot, UnitAddress};
pub use snapshot::{Labels, Latencies, OperationLatencies, QueueSnapshot, Snapshot};
pub use sparse::SparseHistogram;
pub use stage::{Operation, Share, Span, Stage};
pub use word::Word;
