//! The answer of `GET /v1/status`: what is served, and to whom.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::objects::{PortGroup, Served, WaitingListener, WaitingPortal};

/// What a daemon serves.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Status {
    /// The daemon's version.
    pub version: String,
    /// Its process id.
    pub pid: u32,
    /// Seconds since it started.
    pub uptime_seconds: u64,
    /// How many workers it has.
    pub workers: usize,
    /// `off`, `log` or `enforce`.
    #[serde(default)]
    pub sandbox: String,
    /// What of the sandbox the daemon's kernel lacks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sandbox_missing: Vec<String>,
    /// Whoever asked may change what is served; not only look.
    #[serde(default)]
    pub may_change: bool,
    /// Its disks.
    pub disks: Vec<DiskStatus>,
    /// Its exports.
    pub exports: Vec<ExportStatus>,
    /// Files of its state folder that cannot be used.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub damaged_state: Vec<DamagedState>,
    /// Listeners that cannot be opened yet and are retried.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_listeners: Vec<WaitingListener>,
}

/// A file of the state folder that cannot be used.
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
    /// Disk, export or socket that the file is about; empty if it is about none, or about one that is not configured.
    pub object: String,
    /// `good`, `unchecked` (without a checksum), `damaged` or `reset` (moved aside by a reset).
    #[schema(pattern = "^(good|unchecked|damaged|reset)$")]
    pub condition: String,
    /// Reason, for a damaged file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskStatus {
    /// Its name.
    pub name: String,
    /// The block device: `ram`, `file`, `null`.
    pub backend: String,
    /// Capacity in bytes.
    pub size: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Nothing may be written.
    pub read_only: bool,
    /// What clients see as serial number.
    pub serial: String,
    /// `ready`, `opening` or `unavailable`.
    #[schema(pattern = "^(ready|opening|unavailable)$")]
    pub state: String,
    /// Of an unavailable disk: why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// I/Os that have failed and wait until the disk is resumed.
    #[serde(default)]
    pub waiting: u64,
    /// Of a disk with such I/Os: how the last of them failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_reason: Option<String>,
    /// Of an unavailable disk: seconds until it is tried again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_try_seconds: Option<u64>,
    /// Reason why its persistent reservations are not known. SCSI reads, writes and reservations are answered BUSY meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reservations_unknown: Option<String>,
}

/// An export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportStatus {
    /// Its name.
    pub name: String,
    /// `vhost-blk`, `vhost-scsi` or `iscsi`.
    pub kind: String,
    /// Path of its socket; absent when the socket was handed over as a descriptor, and for iSCSI.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<String>)]
    pub socket: Option<PathBuf>,
    /// Most request queues that a client may use.
    pub queues: u16,
    /// Is a client connected?
    pub connected: bool,
    /// What clients use of it now, and which worker serves it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served: Vec<Served>,
    /// Portals of a target that cannot be opened yet and are retried.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_portals: Vec<WaitingPortal>,
    /// Portal groups of a target, with their access states.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub port_groups: Vec<PortGroup>,
    /// Its disks: one at target 0, LUN 0 for `vhost-blk`.
    pub luns: Vec<LunStatus>,
}

/// A logical unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LunStatus {
    /// Target.
    pub target: u8,
    /// Logical unit number.
    pub lun: u16,
    /// The disk's name.
    pub disk: String,
}
