//! Counters of workers, disks and queues: the response of `GET /v1/statistics`.
//!
//! Counters grow from the start of the daemon, so the difference of two responses covers the time between them.

use std::collections::BTreeMap;

use block::IoKind;
use latency::{Snapshot, SparseHistogram};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::objects::{Bitmap, Job};

/// All counters.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct Statistics {
    /// Time of the response, in nanoseconds since the start of the daemon.
    pub at_ns: u64,
    /// Counters of workers, in order.
    pub workers: Vec<WorkerStatistics>,
    /// Counters of disks, ordered by name. Disks without I/O have zeroes.
    pub disks: Vec<DiskStatistics>,
    /// Last job of each disk.
    #[serde(default)]
    pub jobs: Vec<Job>,
    /// Dirty bitmaps of disks.
    #[serde(default)]
    pub bitmaps: Vec<Bitmap>,
    /// Counters by iSCSI target and initiator.
    #[serde(default)]
    pub initiators: Vec<InitiatorStatistics>,
    /// Durations of starts and stops of virtqueues, by vhost-user export.
    #[serde(default)]
    pub queue_times: Vec<QueueTimeStatistics>,
    /// Counters and latencies by queue.
    #[serde(flatten)]
    #[schema(value_type = LatencySnapshot)]
    pub latency: Snapshot,
}

/// Schema of [`Snapshot`], which has no dependency on the generator of schemas.
#[derive(ToSchema)]
pub struct LatencySnapshot {
    /// Counters and histograms by queue. A histogram lists its buckets that are not empty.
    #[schema(value_type = Vec<Object>)]
    #[allow(dead_code, reason = "only the schema is used")]
    queues: (),
}

/// Counters of a worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WorkerStatistics {
    /// Number of the worker.
    pub worker: u32,
    /// Iterations with work.
    pub busy_iterations: u64,
    /// Iterations without work.
    pub empty_iterations: u64,
    /// Number of sleeps.
    pub sleeps: u64,
    /// Number of executed messages.
    pub messages: u64,
    /// Time in iterations with work, in nanoseconds.
    #[serde(default)]
    pub work_ns: u64,
    /// Time of polling that found work, in nanoseconds.
    #[serde(default)]
    pub poll_found_ns: u64,
    /// Time of polling that found no work, in nanoseconds.
    #[serde(default)]
    pub poll_empty_ns: u64,
    /// Time asleep, in nanoseconds.
    #[serde(default)]
    pub sleep_ns: u64,
}

/// Counters of an iSCSI initiator at a target, over all its sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct InitiatorStatistics {
    /// Name of the target.
    pub export: String,
    /// Name of the initiator.
    pub initiator: String,
    /// Number of sessions.
    pub sessions: usize,
    /// Counters by operation, named as for queues. Operations without requests are absent.
    pub operations: BTreeMap<String, RequestStatistics>,
}

/// Durations of starts and stops of an export's virtqueues.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, ToSchema)]
pub struct QueueTimeStatistics {
    /// Name of the export.
    pub export: String,
    /// From the kick descriptor until a worker polls the queue.
    #[schema(value_type = Object)]
    pub start: SparseHistogram,
    /// Wait for requests in flight during a stop.
    #[schema(value_type = Object)]
    pub drain: SparseHistogram,
    /// Stops, with their drains.
    #[schema(value_type = Object)]
    pub stop: SparseHistogram,
    /// Stops without their drains.
    #[serde(default)]
    #[schema(value_type = Object)]
    pub rest: SparseHistogram,
}

/// Requests of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RequestStatistics {
    /// Answered requests.
    pub requests: u64,
    /// Transferred bytes.
    pub bytes: u64,
    /// Requests answered with an error.
    pub errors: u64,
}

/// I/Os of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct IoStatistics {
    /// Number of I/Os.
    pub requests: u64,
    /// Bytes.
    pub bytes: u64,
}

/// I/Os delayed by a disk's limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LimitedStatistics {
    /// Delayed I/Os that were submitted later.
    pub requests: u64,
    /// Total delay in nanoseconds. It is part of the time until requests are reaped.
    pub wait_ns: u64,
}

impl LimitedStatistics {
    /// Returns the difference to `earlier`.
    #[must_use]
    pub fn since(self, earlier: LimitedStatistics) -> LimitedStatistics {
        LimitedStatistics {
            requests: self.requests.saturating_sub(earlier.requests),
            wait_ns: self.wait_ns.saturating_sub(earlier.wait_ns),
        }
    }
}

/// Counters of a disk, over all transports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskStatistics {
    /// Name of the disk.
    pub name: String,
    /// Counters by kind: `read`, `write`, `flush`, `discard`, `write_zeroes`, `compare_and_write`.
    pub operations: BTreeMap<String, IoStatistics>,
    /// I/Os in flight at the block device, including waiting ones.
    pub in_flight: u64,
    /// Failed I/Os among these that wait until the disk is resumed.
    #[serde(default)]
    pub waiting: u64,
    /// Failed I/Os by class. Classes without failures are absent.
    pub errors: BTreeMap<String, u64>,
    /// I/Os delayed by the disk's limits.
    #[serde(default)]
    pub limited: LimitedStatistics,
}

impl DiskStatistics {
    /// Returns the counters of one kind.
    pub fn of(&self, kind: IoKind) -> IoStatistics {
        self.operations
            .get(kind.word())
            .copied()
            .unwrap_or_default()
    }

    /// Returns the number of errors of all classes.
    pub fn errors(&self) -> u64 {
        self.errors.values().sum()
    }
}
