//! Objects as JSON, with the names of the configuration file. What GET gives may be PUT back.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::openapi::{ObjectBuilder, Ref, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::keys::Keys;

/// A disk: what is said of it, by the keys of the configuration file, and how it is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Its name: as in the address.
    #[serde(default)]
    pub name: String,
    /// The block device that does its I/O.
    pub backend: String,
    /// Its other keys.
    #[serde(flatten)]
    pub keys: Keys,
    /// What is so; not looked at in a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<DiskStatus>,
}

/// The daemon, which knows the keys, adds them to the schema.
impl PartialSchema for Disk {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .description(Some("A disk."))
            .property("status", Ref::from_schema_name(DiskStatus::name()))
            .into()
    }
}

impl ToSchema for Disk {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((DiskStatus::name().into_owned(), DiskStatus::schema()));
        DiskStatus::schemas(schemas);
    }
}

/// How a disk is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskStatus {
    /// Bytes that it has.
    pub size: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// A UUID, which stays with the disk whatever its name; serial number and `wwn` derive from it unless they are configured.
    /// Empty while the disk is unavailable, as may be these two.
    pub identity: String,
    /// What clients see as serial number.
    pub serial: String,
    /// What SCSI initiators see as NAA identifier, in 16 hexadecimal digits.
    pub wwn: String,
    /// What shows it: exports, and logical units as `EXPORT/TARGET:LUN`.
    pub used_by: Vec<String>,
    /// `ready`, `opening` or `unavailable`.
    #[schema(pattern = "^(ready|opening|unavailable)$")]
    pub state: String,
    /// Of an unavailable disk: why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Of an unavailable disk: seconds until it is tried again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_try_seconds: Option<u64>,
    /// I/Os that have failed and wait until the disk is resumed: see `on_error`.
    #[serde(default)]
    pub waiting: u64,
    /// Of a disk with such I/Os: how the last of them failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_reason: Option<String>,
    /// Reason why this daemon does not know the persistent reservations of the disk: other daemons share them and are not reached, or
    /// the saved state is damaged. SCSI reads, writes and reservations are answered BUSY meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reservations_unknown: Option<String>,
    /// While the disk is being removed or shrunk: seconds since that began. It waits for requests in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removing_seconds: Option<u64>,
    /// The kinds of its layers, from the top down to the device.
    pub stack: Vec<String>,
}

/// What a job does now, or how it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// It copies.
    Running,
    /// It waits until it is resumed.
    Paused,
    /// A mirror is complete, stays so, and waits until it is switched to.
    Ready,
    /// It is about to end.
    Finishing,
    /// It was cancelled, and an I/O or an open of its own has not ended yet. The disk is served.
    Cancelling,
    /// It has done what it was to do.
    Done,
    /// It has failed: the disk is as it was.
    Failed,
    /// It was cancelled: the disk is as it was.
    Cancelled,
}

impl JobState {
    /// The word for it.
    pub fn word(self) -> &'static str {
        match self {
            JobState::Running => "running",
            JobState::Paused => "paused",
            JobState::Ready => "ready",
            JobState::Finishing => "finishing",
            JobState::Cancelling => "cancelling",
            JobState::Done => "done",
            JobState::Failed => "failed",
            JobState::Cancelled => "cancelled",
        }
    }

    /// Is it over?
    pub fn has_ended(self) -> bool {
        matches!(
            self,
            JobState::Done | JobState::Failed | JobState::Cancelled
        )
    }
}

/// Long work on a disk. Each disk has one at most; the last one is shown until the next begins.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// The disk's name.
    pub disk: String,
    /// `mirror`, `backup`, `stream`, `commit`, or `snapshot` while one is taken.
    pub kind: String,
    /// Where a mirror, backup or commit goes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Of an incremental backup: its bitmap.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incremental: Option<String>,
    /// What it does, or how it has ended.
    pub state: JobState,
    /// Bytes of the disk that are done.
    pub done: u64,
    /// Bytes that were moved: not those of holes, nor those that an incremental backup has already.
    #[serde(default)]
    pub copied: u64,
    /// Bytes of the disk.
    pub total: u64,
    /// Bytes that it may copy in a second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
    /// Seconds since it began, or that it has taken.
    pub seconds: u64,
    /// Why it has failed, or why a switch has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A job that is to begin.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewJob {
    /// `mirror`, `backup`, `stream` or `commit`.
    #[schema(pattern = "^(mirror|backup|stream|commit)$")]
    pub kind: String,
    /// Where a mirror or backup goes: `backend` and its keys, as of a disk. What else is said of the disk stays.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub target: Option<Value>,
    /// Bytes that it may copy in a second; absent or 0: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
    /// A mirror is switched to as soon as it is complete.
    #[serde(default)]
    pub switch: bool,
    /// A backup copies what has changed since the last one of this name, a dirty bitmap of the disk: to where that went, or into a new image
    /// over it. The first one copies everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incremental: Option<String>,
}

/// A dirty bitmap: what has changed on a disk since a backup was complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bitmap {
    /// The disk's name.
    pub disk: String,
    /// The bitmap's name; empty for the unknown bitmaps of a disk whose record is damaged.
    pub name: String,
    /// Bytes that the next backup of this name copies.
    pub dirty: u64,
    /// Where the last backup went.
    pub target: String,
    /// When that was complete: seconds since 1970; 0 if that is unknown.
    pub at: u64,
    /// Why the bitmap cannot be relied on; the next backup copies everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// How a job is to go on. What is absent stays.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobSettings {
    /// It waits, or goes on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// Bytes that it may copy in a second; 0: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
}

/// A snapshot that is to be taken.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSnapshot {
    /// The disks, all at one moment.
    pub disks: Vec<SnapshotDisk>,
}

/// A disk of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotDisk {
    /// The disk's name.
    pub disk: String,
    /// The image that it goes on in, which is made; what it was until then is read from then on.
    pub path: String,
}

/// A logical unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Lun {
    /// Target, 0 to 255; 0 for iSCSI.
    pub target: u8,
    /// Logical unit number, 0 to 16383.
    #[schema(maximum = 16383)]
    pub lun: u16,
    /// The disk's name.
    pub disk: String,
}

/// Which disk a logical unit is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LunDisk {
    /// The disk's name.
    pub disk: String,
}

/// Bytes that a disk is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Size {
    /// Bytes; also a text such as "10G". Without it: as many as its file or block device has by now.
    #[schema(
        minimum = 512,
        maximum = 9_223_372_036_854_775_807_u64,
        format = "int64"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// What all clients of a disk together may do. What is not said is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    /// Most requests in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    pub iops: Option<u64>,
    /// Requests that may come at once after a pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    pub iops_burst: Option<u64>,
    /// Most bytes in a second; in a request also a text such as "10M".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub bandwidth: Option<u64>,
    /// Bytes that may come at once after a pause; in a request also a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub bandwidth_burst: Option<u64>,
}

/// What becomes of I/Os of a disk that fail or take too long. What is not said stays as it is. The daemon, which knows the
/// keys, adds them to the schema.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorPolicy {}

/// An export: what is said of it, by the keys of the configuration file, and how it is. Which keys it has is up to its kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    /// The word for its kind: `vhost-blk`, `vhost-scsi`, `iscsi`.
    pub kind: String,
    /// Its name: as in the address.
    #[serde(default)]
    pub name: String,
    /// Its other keys.
    #[serde(flatten)]
    pub keys: Keys,
    /// What is so; not looked at in a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<ExportState>,
}

/// The daemon, which knows kinds and their keys, adds them to the schema.
impl PartialSchema for Export {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .description(Some("An export: `kind` says which."))
            .into()
    }
}

impl ToSchema for Export {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((ExportState::name().into_owned(), ExportState::schema()));
        ExportState::schemas(schemas);
    }
}

/// How an export is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportState {
    /// Is a client connected?
    pub connected: bool,
    /// How many sessions it has.
    pub sessions: usize,
    /// Of a target: its open portals, as they are bound.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub portals: Vec<String>,
    /// Portals of a target that cannot be opened yet and are retried.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_portals: Vec<WaitingPortal>,
    /// Portal groups of a target, with their access states.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub port_groups: Vec<PortGroup>,
    /// The socket of a vhost-user export, if it cannot be opened yet and is retried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_socket: Option<WaitingListener>,
    /// What clients use of it now, and which worker serves it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served: Vec<Served>,
    /// Requests that are in flight.
    #[serde(default)]
    pub requests: u64,
    /// While the export or some of its logical units are being removed: seconds since that began. It waits for requests in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removing_seconds: Option<u64>,
}

/// A portal that is configured and not open yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WaitingPortal {
    /// The configured address.
    pub address: String,
    /// The error of the last attempt.
    pub reason: String,
    /// Seconds until the next attempt.
    pub next_try_seconds: u64,
}

/// A portal group of a target, which initiators see as a target port group (ALUA).
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct PortGroup {
    /// Target portal group tag.
    pub group: u16,
    /// Number of the target port group.
    pub target_port_group: u16,
    /// Access state that the administrator set: `active/optimized`, `active/non-optimized`, `standby` or `unavailable`.
    pub state: String,
    /// Logical units with another state in this group, set by initiators.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub changed_by_initiators: Vec<UnitAccessState>,
}

impl PortGroup {
    /// Access states other than active/optimized, such as `standby` or `standby, LUN 0 unavailable`; `None` if there are none.
    pub fn remarkable(&self) -> Option<String> {
        let is_default = self.state == "active/optimized";
        if is_default && self.changed_by_initiators.is_empty() {
            return None;
        }
        let units = self.changed_by_initiators.iter();
        let units = units.map(|unit| format!(", LUN {} {}", unit.lun, unit.state));
        Some(format!("{}{}", self.state, units.collect::<String>()))
    }
}

/// Access state of a logical unit in a portal group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct UnitAccessState {
    /// Logical unit number.
    pub lun: u16,
    /// Its state.
    pub state: String,
}

/// Access state that a portal group is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewAccessState {
    /// The state.
    #[schema(pattern = "^(active/optimized|active/non-optimized|standby|unavailable)$")]
    pub state: String,
}

/// A listener that is configured and cannot be opened yet: a portal, a vhost-user socket, or the listener of the API or of metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WaitingListener {
    /// `vhost-user`, `iscsi`, `api` or `metrics`.
    pub kind: String,
    /// Export of the portal or of the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// The configured address, or the path of the socket.
    pub address: String,
    /// The error of the last attempt.
    pub reason: String,
    /// Seconds until the next attempt.
    pub next_try_seconds: u64,
}

impl WaitingListener {
    /// Compares kind, export and address, but not the state of the retries.
    pub fn is_same_listener(&self, other: &WaitingListener) -> bool {
        (&self.kind, &self.export, &self.address) == (&other.kind, &other.export, &other.address)
    }
}

impl fmt::Display for WaitingListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = &self.address;
        match (self.kind.as_str(), &self.export) {
            ("iscsi", Some(export)) => write!(f, "export {export}: portal {address}"),
            (_, Some(export)) => write!(f, "export {export}: socket {address}"),
            (kind, None) => write!(f, "{kind} listener {address}"),
        }
    }
}

/// A queue or a connection of an export, and the worker that serves it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Served {
    /// Of vhost-user: the queue's index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<u32>,
    /// Of iSCSI: the session's id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Of iSCSI: the connection's identifier in its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connection: Option<u16>,
    /// The worker's number.
    pub worker: u32,
}

impl Export {
    /// The disk of an export of one disk.
    pub fn disk(&self) -> Option<&str> {
        self.keys.text("disk")
    }

    /// The path of its socket, if it has one.
    pub fn socket(&self) -> Option<&str> {
        self.keys.text("socket")
    }

    /// Most request queues that a client may use, if it has any.
    pub fn queues(&self) -> Option<u32> {
        u32::try_from(self.keys.number("queues")?).ok()
    }

    /// The portals of a target.
    pub fn portals(&self) -> Vec<&str> {
        let portals = self.keys.get("portals").and_then(Value::as_array);
        let portals = portals.into_iter().flatten();
        portals.filter_map(Value::as_str).collect()
    }

    /// Its logical units; `None` for an export of one disk.
    pub fn luns(&self) -> Option<Vec<Lun>> {
        serde_json::from_value(self.keys.get("lun")?.clone()).ok()
    }

    /// The workers that it is placed on, and whether it has one of its own.
    pub fn placement(&self) -> (Option<Vec<u32>>, bool) {
        let workers = self.keys.get("workers").cloned();
        let workers = workers.and_then(|workers| serde_json::from_value(workers).ok());
        (workers, self.keys.is_on("dedicated"))
    }

    /// Adds how it is.
    #[must_use]
    pub fn with(mut self, state: ExportState) -> Export {
        self.status = Some(state);
        self
    }
}

/// A session: a client of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// Names it as long as it lasts.
    pub id: String,
    /// The export's name.
    pub export: String,
    /// `vhost-user` or `iscsi`.
    pub kind: String,
    /// Of iSCSI: the initiator's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initiator: Option<String>,
    /// Of iSCSI: the portal group that it came in by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub portal_group: Option<u16>,
    /// How many connections it has.
    pub connections: usize,
    /// Of iSCSI: commands answered. A virtual machine's are those of its export's queues, in `/v1/statistics`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// Of iSCSI: bytes of data that they moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Of iSCSI: commands answered with an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errors: Option<u64>,
    /// Of iSCSI: what was negotiated, by the names of RFC 7143, and the command window.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub negotiated: BTreeMap<String, String>,
}

/// What initiators hold of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reservation {
    /// The disk's name.
    pub disk: String,
    /// What is reserved, in the words of SPC: `write exclusive`, ...; absent: there are registrations only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Registrations and reservation outlive a restart.
    pub persists: bool,
    /// PRGENERATION.
    pub generation: u32,
    /// Who has registered.
    pub registrations: Vec<Registration>,
}

/// A registration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Registration {
    /// The initiator port.
    pub initiator: String,
    /// Another daemon that serves the same image, whose target port it is; none: this daemon.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daemon: Option<String>,
    /// Relative identifier of the target port, among those of its daemon.
    pub port: u16,
    /// The reservation key, in hexadecimal.
    pub key: String,
    /// Does it hold the reservation?
    pub holder: bool,
}

/// A worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Worker {
    /// Its number, from 0.
    pub index: usize,
    /// The CPU that it is pinned to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<usize>,
    /// The export that it is dedicated to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// Iterations in which there was work.
    pub busy_iterations: u64,
    /// Iterations in which polling found nothing.
    pub empty_iterations: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Messages it ran.
    pub messages: u64,
}
