//! An event of `GET /v1/events`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A change of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Number of the event since the start of the daemon, from 1.
    pub id: u64,
    /// Type: `disk.added`, `disk.removed`, `disk.resized`, `disk.limited`, `disk.on_error`, `disk.waiting` (an I/O has failed and waits),
    /// `disk.resumed` (none waits any more), `disk.unavailable` (a configured disk cannot be opened), `disk.snapshot`, `job.started`,
    /// `job.ready`, `job.done`, `job.failed`, `job.cancelled`, `export.added`, `export.removed`, `export.placed`, `export.access_state`,
    /// `export.removing`, `lun.added`, `lun.removed`, `lun.removing`, `disk.shrinking`, `session.opened`, `session.closed`,
    /// `portal.waiting` (a portal cannot be opened yet), `portal.opened` (it is open now), `listener.waiting` and `listener.opened`
    /// (likewise a vhost-user socket, or the listener of the API or of metrics), `state.reset`.
    pub event: String,
    /// Name of the disk, export or state file. For a LUN, session, portal or listener: name of its export. `api` or `metrics` for a
    /// listener without an export.
    pub name: String,
    /// Configured address of the portal.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub portal: Option<String>,
    /// Path of the listener's socket, or its configured address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listener: Option<String>,
    /// Error of the last attempt to open the disk, the portal or the listener.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Target of the LUN.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<u8>,
    /// Number of the LUN.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lun: Option<u16>,
    /// Disk of the LUN.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// New size of the disk in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// ID of the session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Initiator name of an iSCSI session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initiator: Option<String>,
}
