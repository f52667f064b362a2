//! Response of `GET /v1/history`: counters of a disk over the last hour or day.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Interval of a history.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum HistoryInterval {
    /// Seconds of the last hour.
    #[default]
    Second,
    /// Minutes of the last day.
    Minute,
}

/// History of a disk. Arrays have one element per interval with activity, oldest first. Values are exact within 8 %.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskHistory {
    /// Name of the disk.
    pub disk: String,
    /// Length of an interval.
    pub interval_seconds: u64,
    /// Start of the history, in seconds since 1970.
    pub from: u64,
    /// Present time, in seconds since 1970.
    pub to: u64,
    /// Ends of the intervals, in seconds since 1970.
    pub at: Vec<u64>,
    /// Reads per second.
    pub reads: Vec<u64>,
    /// Other I/Os per second.
    pub writes: Vec<u64>,
    /// Bytes per second.
    pub bytes: Vec<u64>,
    /// Median latency of requests in nanoseconds; 0 if no request completed.
    pub p50_ns: Vec<u64>,
    /// 99th percentile of latencies in nanoseconds.
    pub p99_ns: Vec<u64>,
    /// Number of failed I/Os in the interval.
    pub errors: Vec<u64>,
}
