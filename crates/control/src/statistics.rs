//! What workers, disks and queues have counted, as data: the answer of `GET /v1/statistics`.
//!
//! Every number has grown since the start, so that the difference of two answers is what happened between them.

use std::collections::BTreeMap;

use block::IoKind;
use latency::Snapshot;
use serde::{Deserialize, Serialize};

use crate::objects::{Bitmap, Job};

/// All that was counted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Statistics {
    /// When it was read: nanoseconds since the daemon started.
    pub at_ns: u64,
    /// By worker, in order.
    pub workers: Vec<WorkerStatistics>,
    /// By disk, in order of their names. One that was never used has zeroes.
    pub disks: Vec<DiskStatistics>,
    /// The last job of each disk that has had one.
    #[serde(default)]
    pub jobs: Vec<Job>,
    /// The dirty bitmaps of disks.
    #[serde(default)]
    pub bitmaps: Vec<Bitmap>,
    /// By iSCSI target and initiator.
    #[serde(default)]
    pub initiators: Vec<InitiatorStatistics>,
    /// By queue, with latencies.
    #[serde(flatten)]
    pub latency: Snapshot,
}

/// What a worker counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkerStatistics {
    /// Its number.
    pub worker: u32,
    /// Iterations in which there was work.
    pub busy_iterations: u64,
    /// Iterations in which polling found nothing.
    pub empty_iterations: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Messages it ran.
    pub messages: u64,
}

/// What an iSCSI initiator did with a target, in all its sessions.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct InitiatorStatistics {
    /// The target's name.
    pub export: String,
    /// The initiator's name.
    pub initiator: String,
    /// Sessions that it has.
    pub sessions: usize,
    /// By operation, as queues name them; one that never happened is absent.
    pub operations: BTreeMap<String, RequestStatistics>,
}

/// Requests of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RequestStatistics {
    /// How many were answered.
    pub requests: u64,
    /// Bytes of data that they moved.
    pub bytes: u64,
    /// How many of them were answered with an error.
    pub errors: u64,
}

/// I/Os of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct IoStatistics {
    /// How many.
    pub requests: u64,
    /// Bytes that they were about.
    pub bytes: u64,
}

/// I/Os that a disk's limits have held back.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LimitedStatistics {
    /// How many have waited and gone on.
    pub requests: u64,
    /// How long, in nanoseconds in all. It is part of what requests take until they are reaped.
    pub wait_ns: u64,
}

impl LimitedStatistics {
    /// What happened after `earlier`.
    #[must_use]
    pub fn since(self, earlier: LimitedStatistics) -> LimitedStatistics {
        LimitedStatistics {
            requests: self.requests.saturating_sub(earlier.requests),
            wait_ns: self.wait_ns.saturating_sub(earlier.wait_ns),
        }
    }
}

/// What was asked of a disk, through all transports.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskStatistics {
    /// Its name.
    pub name: String,
    /// By kind: `read`, `write`, `flush`, `discard`, `write_zeroes`, `compare_and_write`.
    pub operations: BTreeMap<String, IoStatistics>,
    /// I/Os that the block device has and has not given back.
    pub in_flight: u64,
    /// Of these, I/Os that have failed and wait until the disk is resumed.
    #[serde(default)]
    pub waiting: u64,
    /// I/Os that failed, by class; a class that never happened is absent.
    pub errors: BTreeMap<String, u64>,
    /// I/Os that its limits have held back.
    #[serde(default)]
    pub limited: LimitedStatistics,
}

impl DiskStatistics {
    /// One kind's I/Os.
    pub fn of(&self, kind: IoKind) -> IoStatistics {
        self.operations
            .get(kind.word())
            .copied()
            .unwrap_or_default()
    }

    /// Errors of all classes.
    pub fn errors(&self) -> u64 {
        self.errors.values().sum()
    }
}
