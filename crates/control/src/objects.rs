//! Objects as JSON, with the names of the configuration file. The response of GET is a valid body of PUT.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::{fmt, io};

use serde::{Deserialize, Serialize};
use serde_json::Value;
use utoipa::openapi::{ObjectBuilder, Ref, RefOr, Schema};
use utoipa::{PartialSchema, ToSchema};

use crate::keys::Keys;

/// A disk: its configuration, with the keys of the configuration file, and its state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Disk {
    /// Name, as in the path.
    #[serde(default)]
    pub name: String,
    /// Kind of the block device.
    pub backend: String,
    /// Other keys.
    #[serde(flatten)]
    pub keys: Keys,
    /// State; ignored in requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<DiskStatus>,
}

impl Disk {
    /// Creates the configuration of a disk.
    pub fn new(name: &str, backend: &str, keys: Vec<(String, Value)>) -> Disk {
        Disk {
            name: name.to_owned(),
            backend: backend.to_owned(),
            keys: Keys(keys),
            status: None,
        }
    }
}

/// The daemon adds the keys to the schema.
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

/// State of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskStatus {
    /// Size in bytes.
    pub size: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// UUID, which does not depend on the disk's name. The defaults of serial number and `wwn` derive from it. Empty while the disk is
    /// unavailable, when these two may also be empty.
    pub identity: String,
    /// Serial number that clients see.
    pub serial: String,
    /// NAA identifier that SCSI initiators see, in 16 hexadecimal digits.
    pub wwn: String,
    /// Clients cannot write: the key `read_only`, or storage that is read-only, such as a read-only export of an NBD server.
    #[serde(default)]
    pub read_only: bool,
    /// Users: exports, and logical units as `EXPORT/TARGET:LUN`.
    pub used_by: Vec<String>,
    /// `ready`, `opening` or `unavailable`.
    #[schema(pattern = "^(ready|opening|unavailable)$")]
    pub state: String,
    /// Reason why the disk is unavailable.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Seconds until the next attempt to open an unavailable disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_try_seconds: Option<u64>,
    /// Failed I/Os that wait until the disk is resumed: see `on_error`.
    #[serde(default)]
    pub waiting: u64,
    /// Error of the last failed I/O that waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_reason: Option<String>,
    /// Reason why the persistent reservations of the disk are unknown to this daemon: other daemons share them and cannot be reached, or
    /// the saved state is damaged. SCSI reads, writes and reservations are answered BUSY meanwhile.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reservations_unknown: Option<String>,
    /// Kinds of state that SCSI initiators have set and that another daemon with the disk does not have: `reservations`, `mode-pages`,
    /// `sanitize` for an unfinished SANITIZE or FORMAT UNIT, `ejected`. `writethrough`: a virtio-blk driver has disabled the write cache,
    /// which another export of the disk does not have.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub initiator_state: Vec<String>,
    /// Damage that was found in the image of the disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
    /// Seconds since the disk began to be removed or shrunk. It waits for requests in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removing_seconds: Option<u64>,
    /// Kinds of its layers, from the top down to the device.
    pub stack: Vec<String>,
}

/// State of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Copies data.
    Running,
    /// Paused until it is resumed.
    Paused,
    /// A mirror is complete and waits for its switch. It stays complete.
    Ready,
    /// About to end.
    Finishing,
    /// Cancelled, but an I/O or an open of the job has not ended yet. The disk is served.
    Cancelling,
    /// Ended with success.
    Done,
    /// Failed. The disk is unchanged.
    Failed,
    /// Cancelled. The disk is unchanged.
    Cancelled,
}

impl JobState {
    /// Returns the name in the API.
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

    /// Returns true for the states of ended jobs.
    pub fn has_ended(self) -> bool {
        matches!(
            self,
            JobState::Done | JobState::Failed | JobState::Cancelled
        )
    }
}

/// A long operation on a disk. Each disk has at most one; the last one is shown until the next starts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Job {
    /// Name of the disk.
    pub disk: String,
    /// `mirror`, `backup`, `stream`, `commit`, or `snapshot` while one is taken.
    pub kind: String,
    /// Target of a mirror, backup or commit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// Bitmap of an incremental backup.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incremental: Option<String>,
    /// Backup of one or more disks that the job belongs to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub backup: Option<String>,
    /// State of the job.
    pub state: JobState,
    /// Processed bytes of the disk.
    pub done: u64,
    /// Copied bytes, without holes and without unchanged data of an incremental backup.
    #[serde(default)]
    pub copied: u64,
    /// Size of the disk in bytes.
    pub total: u64,
    /// Speed limit in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
    /// Run time in seconds.
    pub seconds: u64,
    /// Reason of a failed job or switch.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A job to start.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewJob {
    /// `mirror`, `backup`, `stream` or `commit`.
    #[schema(pattern = "^(mirror|backup|stream|commit)$")]
    pub kind: String,
    /// Target of a mirror or backup: `backend` and its keys, as of a disk. Other settings of the disk stay.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub target: Option<Value>,
    /// Speed limit in bytes per second; absent or 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
    /// Switch a mirror as soon as it is complete.
    #[serde(default)]
    pub switch: bool,
    /// Point in time of a backup: `start` (default) or `end` of the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^(start|end)$")]
    pub at: Option<String>,
    /// Folder of the scratch file of a backup at its start, which stores the data that clients overwrite. Default: that of the disk's file, the state folder, or `/var/tmp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch: Option<String>,
    /// Most bytes in the scratch file. If clients overwrite more, the backup fails. Default: half of the free space of the folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch_limit: Option<u64>,
    /// Name of a dirty bitmap. The backup copies the changes since the last backup of this name, to the target of that backup or into a new
    /// image over it. The first one copies everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incremental: Option<String>,
}

/// A backup to start: the state of disks at one moment.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewBackup {
    /// Name. Default: a new one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// Disks.
    pub disks: Vec<BackupDisk>,
    /// Address at which the disks are served over NBD: `unix:PATH` or `tcp:IP:PORT`. Without it, each disk needs a target.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull: Option<String>,
    /// Checkpoint that the backup creates or replaces.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Earlier checkpoint: the backup contains the changes since.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Speed limit of each copy in bytes per second; absent or 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
    /// Folder of the scratch files, which store the data that clients overwrite. Default: that of the disk's file, the state folder, or `/var/tmp`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch: Option<String>,
    /// Most bytes in the scratch file of each disk. If clients overwrite more, the backup fails. Default: half of the free space of the folder.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scratch_limit: Option<u64>,
}

/// A disk of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct BackupDisk {
    /// Name of the disk.
    pub disk: String,
    /// Target: `backend` and its keys, as of a disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schema(value_type = Option<Object>)]
    pub target: Option<Value>,
}

/// A backup of disks at one moment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Backup {
    /// Name.
    pub name: String,
    /// Address at which the disks are served over NBD.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pull: Option<String>,
    /// Checkpoint that the backup creates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<String>,
    /// Checkpoint before the changes that the backup contains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub since: Option<String>,
    /// Jobs of the disks.
    pub jobs: Vec<Job>,
}

/// A dirty bitmap: the changes of a disk since the point in time of a backup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Bitmap {
    /// Name of the disk.
    pub disk: String,
    /// Name of the bitmap; empty for the unknown bitmaps of a disk with a damaged record.
    pub name: String,
    /// Bytes that the next backup of this name copies.
    pub dirty: u64,
    /// Target of the last backup.
    pub target: String,
    /// End of that backup in seconds since 1970; 0 if unknown.
    pub at: u64,
    /// Reason why the bitmap is unusable. The next backup copies everything.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Settings of a running job. Absent ones stay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JobSettings {
    /// Pause or resume the job.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub paused: Option<bool>,
    /// Speed limit in bytes per second; 0 for none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<u64>,
}

/// A snapshot to take.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewSnapshot {
    /// Disks, which are snapshotted atomically.
    pub disks: Vec<SnapshotDisk>,
}

/// A disk of a snapshot.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct SnapshotDisk {
    /// Name of the disk.
    pub disk: String,
    /// Path of the image to create, in which the disk continues. The old contents are then only read.
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
    /// Name of the disk.
    pub disk: String,
}

/// Disk of a logical unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LunDisk {
    /// Name of the disk.
    pub disk: String,
}

/// New size of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Size {
    /// Bytes, or a string such as "10G". Without it: the present size of the file or block device.
    #[schema(
        minimum = 512,
        maximum = 9_223_372_036_854_775_807_u64,
        format = "int64"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// Limits of all clients of a disk together. Absent ones do not apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    /// Most requests per second.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    pub iops: Option<u64>,
    /// Requests that may arrive at once after a pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    pub iops_burst: Option<u64>,
    /// Most bytes per second; in a request also a string such as "10M".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub bandwidth: Option<u64>,
    /// Bytes that may arrive at once after a pause; in a request also a string.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub bandwidth_burst: Option<u64>,
}

/// Handling of I/Os that fail or take too long. Absent keys stay. The daemon adds the keys to the schema.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorPolicy {}

/// An export: its configuration, with the keys of the configuration file, and its state. The keys depend on its kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Export {
    /// Kind: `vhost-blk`, `vhost-scsi`, `iscsi`, `nbd`.
    pub kind: String,
    /// Name, as in the path.
    #[serde(default)]
    pub name: String,
    /// Other keys.
    #[serde(flatten)]
    pub keys: Keys,
    /// State; ignored in requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<ExportState>,
}

impl Export {
    /// Creates the configuration of an export.
    pub fn new(kind: &str, name: &str, keys: Vec<(String, Value)>) -> Export {
        Export {
            kind: kind.to_owned(),
            name: name.to_owned(),
            keys: Keys(keys),
            status: None,
        }
    }
}

/// The daemon adds the kinds and their keys to the schema.
impl PartialSchema for Export {
    fn schema() -> RefOr<Schema> {
        ObjectBuilder::new()
            .description(Some("An export of the kind `kind`."))
            .into()
    }
}

impl ToSchema for Export {
    fn schemas(schemas: &mut Vec<(String, RefOr<Schema>)>) {
        schemas.push((ExportState::name().into_owned(), ExportState::schema()));
        ExportState::schemas(schemas);
    }
}

/// State of an export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportState {
    /// A client is connected.
    pub connected: bool,
    /// Number of sessions.
    pub sessions: usize,
    /// Open portals of a target, with their bound addresses.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub portals: Vec<String>,
    /// TCP addresses of an NBD export, as bound.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub addresses: Vec<String>,
    /// Portals of a target that cannot be opened yet and are retried.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting_portals: Vec<WaitingPortal>,
    /// Portal groups of a target, with their access states.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub port_groups: Vec<PortGroup>,
    /// The socket of a vhost-user export, if it cannot be opened yet and is retried.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub waiting_socket: Option<WaitingListener>,
    /// Queues or connections in use, with their workers.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served: Vec<Served>,
    /// Number of requests in flight.
    #[serde(default)]
    pub requests: u64,
    /// Seconds since the export or some of its logical units began to be removed. The removal waits for requests in flight.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub removing_seconds: Option<u64>,
}

impl ExportState {
    /// Returns true if no listener of the export is open and some are retried.
    pub fn is_waiting(&self) -> bool {
        let waits = self.waiting_socket.is_some() || !self.waiting_portals.is_empty();
        waits && self.portals.is_empty()
    }
}

/// A configured portal that is not open yet.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WaitingPortal {
    /// Configured address.
    pub address: String,
    /// Error of the last attempt.
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
    /// Returns access states other than active/optimized, such as `standby` or `standby, LUN 0 unavailable`; `None` if there are none.
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
    /// Access state.
    pub state: String,
}

/// Access state to set for a portal group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct NewAccessState {
    /// Access state.
    #[schema(pattern = "^(active/optimized|active/non-optimized|standby|unavailable)$")]
    pub state: String,
}

/// A configured listener that cannot be opened yet: a portal, a vhost-user socket, the socket or address of an NBD export, or the listener of
/// the API or of metrics.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct WaitingListener {
    /// `vhost-user`, `iscsi`, `nbd`, `api` or `metrics`.
    pub kind: String,
    /// Export of the portal or of the socket.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// Configured address, or the path of the socket.
    pub address: String,
    /// Error of the last attempt.
    pub reason: String,
    /// Seconds until the next attempt.
    pub next_try_seconds: u64,
}

impl WaitingListener {
    /// Compares kind, export and address, but not the state of the retries.
    pub fn is_same_listener(&self, other: &WaitingListener) -> bool {
        (&self.kind, &self.export, &self.address) == (&other.kind, &other.export, &other.address)
    }

    /// Returns the action that helps.
    pub fn hint(&self) -> String {
        let address = &self.address;
        let Ok(socket) = address.parse::<SocketAddr>() else {
            return format!(
                "create the folder of {address}, or end the process that listens there: ss -xlp"
            );
        };
        let is_missing = self.reason.contains(&no_such_address());
        match is_missing {
            true => format!(
                "add {} to an interface of this host (ip address), or correct the address in the configuration",
                socket.ip()
            ),
            false => format!(
                "end the process that listens on {address} (ss -tlnp), or choose another port"
            ),
        }
    }
}

/// Returns the system's text for an address that this host does not have.
fn no_such_address() -> String {
    io::Error::from(rustix::io::Errno::ADDRNOTAVAIL).to_string()
}

impl fmt::Display for WaitingListener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = &self.address;
        match (self.kind.as_str(), &self.export) {
            ("iscsi", Some(export)) => write!(f, "export {export}: portal {address}"),
            ("nbd", Some(export)) => write!(f, "export {export}: listener {address}"),
            (_, Some(export)) => write!(f, "export {export}: socket {address}"),
            (kind, None) => write!(f, "{kind} listener {address}"),
        }
    }
}

/// A queue or a connection of an export, and the worker that serves it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Served {
    /// Index of a vhost-user queue.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<u32>,
    /// ID of the iSCSI or NBD session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// ID of the iSCSI connection in its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connection: Option<u16>,
    /// Number of the worker.
    pub worker: u32,
}

impl Export {
    /// Returns the disk of an export of one disk.
    pub fn disk(&self) -> Option<&str> {
        self.keys.text("disk")
    }

    /// Returns the path of the socket, if there is one.
    pub fn socket(&self) -> Option<&str> {
        self.keys.text("socket")
    }

    /// Returns the largest number of request queues, if the export has queues.
    pub fn queues(&self) -> Option<u32> {
        u32::try_from(self.keys.number("queues")?).ok()
    }

    /// Returns the configured portals of a target.
    pub fn portals(&self) -> Vec<&str> {
        let portals = self.keys.get("portals").and_then(Value::as_array);
        let portals = portals.into_iter().flatten();
        portals.filter_map(Value::as_str).collect()
    }

    /// Returns the logical units; `None` for an export of one disk.
    pub fn luns(&self) -> Option<Vec<Lun>> {
        serde_json::from_value(self.keys.get("lun")?.clone()).ok()
    }

    /// Returns the workers of the export, and whether it has a dedicated worker.
    pub fn placement(&self) -> (Option<Vec<u32>>, bool) {
        let workers = self.keys.get("workers").cloned();
        let workers = workers.and_then(|workers| serde_json::from_value(workers).ok());
        (workers, self.keys.is_on("dedicated"))
    }

    /// Adds the state.
    #[must_use]
    pub fn with(mut self, state: ExportState) -> Export {
        self.status = Some(state);
        self
    }
}

/// A session: a client of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// ID, unique while the session exists.
    pub id: String,
    /// Name of the export.
    pub export: String,
    /// `vhost-user`, `iscsi` or `nbd`.
    pub kind: String,
    /// Initiator name of an iSCSI session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initiator: Option<String>,
    /// Address of the client of an NBD session. An iSCSI session has one for each of its connections.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub client: Option<String>,
    /// Process of a vhost-user session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub front_end: Option<FrontEnd>,
    /// Portal group of an iSCSI session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub portal_group: Option<u16>,
    /// Number of connections.
    pub connections: usize,
    /// Connections of an iSCSI session.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub each_connection: Vec<SessionConnection>,
    /// Answered commands of an iSCSI or NBD session. The commands of a virtual machine are counted by the queues of its export, in
    /// `/v1/statistics`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// Transferred bytes of an iSCSI or NBD session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Commands of an iSCSI or NBD session that were answered with an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errors: Option<u64>,
    /// Negotiated keys of an iSCSI session, named as in RFC 7143, and the command window. For NBD, the form of replies.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub negotiated: BTreeMap<String, String>,
}

/// The process that has connected to a vhost-user export.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FrontEnd {
    /// Process ID; absent for a process of another PID namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<u32>,
    /// Name of its user, or the number of a user without a name.
    pub user: String,
    /// Name of QEMU's guest (`-name`), if the daemon may read the command line of the process.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub guest: Option<String>,
}

/// Shown as `guest web1 (pid 4711, user libvirt-qemu)`.
impl fmt::Display for FrontEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let user = &self.user;
        match (&self.guest, self.pid) {
            (Some(guest), Some(pid)) => write!(f, "guest {guest} (pid {pid}, user {user})"),
            (Some(guest), None) => write!(f, "guest {guest} (user {user})"),
            (None, Some(pid)) => write!(f, "pid {pid}, user {user}"),
            (None, None) => write!(f, "user {user}"),
        }
    }
}

/// A connection of an iSCSI session.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct SessionConnection {
    /// Connection identifier (CID).
    pub id: u16,
    /// Address of the initiator.
    pub client: String,
    /// HeaderDigest, DataDigest, and MaxRecvDataSegmentLength of both sides in bytes, as of the end of the login.
    pub negotiated: BTreeMap<String, String>,
}

/// Registrations and reservation of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reservation {
    /// Name of the disk.
    pub disk: String,
    /// Reservation type, named as in SPC: `write exclusive`, ...; absent if there are only registrations.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Registrations and reservation survive a restart.
    pub persists: bool,
    /// PRGENERATION.
    pub generation: u32,
    /// Registrations.
    pub registrations: Vec<Registration>,
    /// Reason why registrations and reservation are unknown. The other fields are empty then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unknown: Option<String>,
}

/// A registration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Registration {
    /// Initiator port.
    pub initiator: String,
    /// Daemon that has the target port, if it is another daemon serving the same image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub daemon: Option<String>,
    /// Relative identifier of the target port in its daemon.
    pub port: u16,
    /// Reservation key, in hexadecimal.
    pub key: String,
    /// This registration holds the reservation.
    pub holder: bool,
}

/// A worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Worker {
    /// Number, from 0.
    pub index: usize,
    /// CPU that the worker is pinned to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<usize>,
    /// Export that the worker is dedicated to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
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
    /// Number of times that polling was suspended because another thread wanted the CPU.
    #[serde(default)]
    pub poll_suspensions: u64,
}
