//! Response of `GET /v1/status`: served objects and their clients.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::objects::{PortGroup, Served, WaitingListener, WaitingPortal};
use crate::status_problem::StatusProblem;

/// Status of a daemon.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// Version of the daemon.
    pub version: String,
    /// Host name.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub host: String,
    /// Process ID.
    pub pid: u32,
    /// Seconds since the start.
    pub uptime_seconds: u64,
    /// Number of workers.
    pub workers: usize,
    /// Sandbox mode: `off`, `log`, `threads` or `enforce`.
    #[serde(default)]
    pub sandbox: String,
    /// Sandbox features that the kernel lacks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sandbox_missing: Vec<String>,
    /// Command that replaces the program of this daemon, to be run on its machine; absent without a control socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upgrade_command: Option<String>,
    /// The client may make changes.
    #[serde(default)]
    pub may_change: bool,
    /// Disks.
    pub disks: Vec<DiskStatus>,
    /// Exports.
    pub exports: Vec<ExportStatus>,
    /// Unusable files of the state folder.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub damaged_state: Vec<DamagedState>,
    /// Open listeners. Sockets inherited from a parent process have no address and are not listed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub open_listeners: Vec<OpenListener>,
    /// Listeners that cannot be opened yet and are retried.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_listeners: Vec<WaitingListener>,
    /// Logins of iSCSI initiators that were refused within the last hour, without a session since.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub refused_logins: Vec<RefusedLogin>,
    /// Failures at queues within the last hour.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<QueueFailures>,
    /// Certificates of the TLS servers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub certificates: Vec<CertificateStatus>,
    /// Conditions that need attention, errors first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub problems: Vec<StatusProblem>,
}

/// A listener that accepts clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct OpenListener {
    /// `vhost-user`, `iscsi`, `nbd`, `api` or `metrics`.
    pub kind: String,
    /// Export of the portal or of the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// Address, or the path of the socket.
    pub address: String,
}

/// A certificate, with those of intermediate authorities in its file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct CertificateStatus {
    /// File.
    pub file: String,
    /// Start of its validity, in seconds since 1970.
    pub not_before: i64,
    /// End of its validity, in seconds since 1970.
    pub not_after: i64,
    /// Reason why clients refuse it at present.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// Kind of failures at a queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum FailureKind {
    /// Data requests that were answered with an error.
    Request,
    /// Violations of the protocol by the driver or the front end.
    Protocol,
}

/// I/Os of a disk that its storage failed within the last hour, of one class.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskFailures {
    /// Class of the errors: `no_space`, `read_medium`, `write_medium`, `offline` or `timed_out`.
    pub class: String,
    /// Number of I/Os.
    pub count: u64,
    /// Seconds since the last one.
    pub seconds: u64,
}

/// Failures of one kind at a queue within the last hour.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueueFailures {
    /// Name of the export.
    pub export: String,
    /// Number of the queue or connection.
    pub queue: u32,
    /// Kind of the failures.
    pub kind: FailureKind,
    /// Number of failures.
    pub count: u64,
    /// Seconds since the last one.
    pub seconds: u64,
}

/// Refused logins of an iSCSI initiator at a target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RefusedLogin {
    /// Requested target; absent for a discovery session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// Initiator name as sent.
    pub initiator: String,
    /// Address of the last attempt.
    pub address: String,
    /// Reason of the last refusal.
    pub reason: String,
    /// Number of refused logins.
    pub count: u64,
    /// Seconds since the last attempt.
    pub seconds: u64,
}

/// An unusable file of the state folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DamagedState {
    /// Name, relative to the folder.
    pub file: String,
    /// Reason.
    pub reason: String,
}

/// A file of the state folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StateFile {
    /// Name, relative to the folder.
    pub file: String,
    /// Kind, such as `reservations`; empty for a file that is not Lunette's.
    pub kind: String,
    /// Disk, export or socket that the file describes; empty if it describes none, or one that is not configured.
    pub object: String,
    /// `good`, `unchecked` (without a checksum), `damaged` or `reset` (moved aside by a reset).
    #[schema(pattern = "^(good|unchecked|damaged|reset)$")]
    pub condition: String,
    /// Reason, for a damaged file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// States of a disk.
pub const DISK_STATES: [&str; 3] = ["ready", "opening", "unavailable"];

/// A disk in the status of the daemon.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
// `DiskStatus` in the API is the state of a disk in `/v1/disks`.
#[schema(as = DiskSummary)]
pub struct DiskStatus {
    /// Name of the disk.
    pub name: String,
    /// Kind of the block device, such as `ram`, `file`, `image`.
    pub backend: String,
    /// Storage of the disk: a path, an RBD image or a remote unit; absent for disks in memory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Capacity in bytes.
    pub size: u64,
    /// Bytes that the files of the disk occupy, without backing images; absent for other disks, and while the file system does not answer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allocated: Option<u64>,
    /// Free bytes of the file system that holds the files of the disk; absent as `allocated`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub free: Option<u64>,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// The disk may not be written.
    pub read_only: bool,
    /// Serial number that clients see.
    pub serial: String,
    /// `ready`, `opening` or `unavailable`.
    #[schema(pattern = "^(ready|opening|unavailable)$")]
    pub state: String,
    /// Reason why the disk is unavailable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Failed I/Os that wait until the disk is resumed.
    #[serde(default)]
    pub waiting: u64,
    /// Error of the last failed I/O that waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_reason: Option<String>,
    /// Seconds until the next attempt to open an unavailable disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_try_seconds: Option<u64>,
    /// Reason why the persistent reservations are unknown. SCSI reads, writes and reservations are answered BUSY meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reservations_unknown: Option<String>,
    /// Condition that an administrator should correct although the disk is served.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
    /// Only for a slow disk: the lowest 99th percentile of its requests in the last seconds with requests, in nanoseconds, rounded down to
    /// 500 ms times a power of two.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub slow_ns: Option<u64>,
    /// Damage that was found in the image of the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
    /// I/Os that the storage failed within the last hour, by class.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failures: Vec<DiskFailures>,
}

/// An export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportStatus {
    /// Name of the export.
    pub name: String,
    /// `vhost-blk`, `vhost-scsi`, `iscsi` or `nbd`.
    pub kind: String,
    /// Path of the socket; absent for an inherited socket, for iSCSI, and for NBD over TCP only.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
    /// TCP addresses of an NBD export, as bound.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Largest number of request queues.
    pub queues: u16,
    /// A client is connected.
    pub connected: bool,
    /// Queues or connections in use, with their workers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served: Vec<Served>,
    /// Portals of a target that cannot be opened yet and are retried.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_portals: Vec<WaitingPortal>,
    /// Portal groups of a target, with their access states.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub port_groups: Vec<PortGroup>,
    /// Logical units; `vhost-blk` has one, at target 0, LUN 0.
    pub luns: Vec<LunStatus>,
    /// Durations of the stops of virtqueues since the start of the daemon; absent before the first one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_stops: Option<QueueStops>,
    /// Reason why no client can use the export as configured, or another condition that an administrator should correct.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub warning: Option<String>,
}

/// Durations of the stops of an export's virtqueues. A stop waits for the requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct QueueStops {
    /// Number of stops.
    pub count: u64,
    /// Median in nanoseconds.
    pub p50_ns: u64,
    /// 99th percentile in nanoseconds.
    pub p99_ns: u64,
    /// Maximum in nanoseconds.
    pub max_ns: u64,
    /// 99th percentile of the wait for requests in flight, in nanoseconds.
    pub drain_p99_ns: u64,
    /// 99th percentile of the stops without this wait, in nanoseconds.
    #[serde(default)]
    pub rest_p99_ns: u64,
}

/// A logical unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LunStatus {
    /// Target.
    pub target: u8,
    /// Logical unit number.
    pub lun: u16,
    /// Name of the disk.
    pub disk: String,
}
