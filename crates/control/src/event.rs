//! An event of `GET /v1/events`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Something has changed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Counts the daemon's events, from 1.
    pub id: u64,
    /// What: `disk.added`, `disk.removed`, `disk.resized`, `disk.limited`, `disk.on_error`,
    /// `disk.waiting` (an I/O has failed and waits), `disk.resumed` (none waits any more),
    /// `disk.snapshot`, `job.started`, `job.ready`, `job.done`, `job.failed`, `job.cancelled`,
    /// `export.added`, `export.removed`, `export.placed`, `export.access_state`, `export.removing`, `lun.added`, `lun.removed`, `lun.removing`, `disk.shrinking`,
    /// `session.opened`, `session.closed`, `portal.waiting` (a portal cannot be opened yet), `portal.opened` (it is open now),
    /// `listener.waiting` and `listener.opened` (likewise a vhost-user socket, or the listener of the API or of metrics),
    /// `state.reset`.
    pub event: String,
    /// The disk, the export, the state file, or the export that the LUN, the session, the portal or the listener is of. `api` or `metrics` for a
    /// listener without an export.
    pub name: String,
    /// Of a portal: its configured address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub portal: Option<String>,
    /// Path of the listener's socket, or its configured address.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listener: Option<String>,
    /// Error of the last attempt to open the portal or the listener.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Of a LUN: its target.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<u8>,
    /// Of a LUN: its number.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lun: Option<u16>,
    /// Of a LUN: its disk.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub disk: Option<String>,
    /// Of a resized disk: its bytes now.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// Of a session: its id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Of a session over iSCSI: the initiator's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initiator: Option<String>,
}
