//! An event of `GET /v1/events`.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// A change of an object.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Event {
    /// Number of the event since the start of the daemon, from 1.
    pub id: u64,
    /// Type: `disk.added`, `disk.removed`, `disk.resized`, `disk.limited`, `disk.on_error`, `disk.waiting` (an I/O has failed and waits),
    /// `disk.resumed` (none waits any more), `disk.lock_waiting` (I/O waits for locks that another process has), `disk.lock_timeout` (I/O does
    /// not wait for them any longer), `disk.lock_resumed` (the locks are held again), `disk.unavailable` (a configured disk cannot be opened), `disk.snapshot`, `job.started`,
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

/// Defines the types of events and their names in the API.
macro_rules! event_kinds {
    ($($(#[$doc:meta])* $kind:ident = $word:literal,)*) => {
        /// Type of an event.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum EventKind {
            $($(#[$doc])* $kind,)*
        }

        impl EventKind {
            /// All types.
            pub const ALL: &[EventKind] = &[$(EventKind::$kind,)*];

            /// Returns the name in the API.
            pub const fn word(self) -> &'static str {
                match self {
                    $(EventKind::$kind => $word,)*
                }
            }
        }
    };
}

event_kinds! {
    /// A disk was added.
    DiskAdded = "disk.added",
    /// A disk was removed.
    DiskRemoved = "disk.removed",
    /// A disk has another size.
    DiskResized = "disk.resized",
    /// Shrinking waits for requests in flight.
    DiskShrinking = "disk.shrinking",
    /// Limits of a disk were changed.
    DiskLimited = "disk.limited",
    /// The error policy of a disk was changed.
    DiskOnError = "disk.on_error",
    /// An I/O has failed and waits.
    DiskWaiting = "disk.waiting",
    /// No failed I/O waits any more.
    DiskResumed = "disk.resumed",
    /// I/O waits for locks that another process has.
    DiskLockWaiting = "disk.lock_waiting",
    /// I/O does not wait for the locks any longer and fails.
    DiskLockTimeout = "disk.lock_timeout",
    /// The locks are held again.
    DiskLockResumed = "disk.lock_resumed",
    /// A configured disk cannot be opened.
    DiskUnavailable = "disk.unavailable",
    /// A snapshot of a disk was made.
    DiskSnapshot = "disk.snapshot",
    /// A job was started.
    JobStarted = "job.started",
    /// A job has copied everything and can be completed.
    JobReady = "job.ready",
    /// A job was completed.
    JobDone = "job.done",
    /// A job has failed.
    JobFailed = "job.failed",
    /// A job was cancelled.
    JobCancelled = "job.cancelled",
    /// An export was added.
    ExportAdded = "export.added",
    /// An export was removed.
    ExportRemoved = "export.removed",
    /// The removal of an export waits for requests in flight.
    ExportRemoving = "export.removing",
    /// Queues of an export were moved to other workers.
    ExportPlaced = "export.placed",
    /// A port group has another access state.
    ExportAccessState = "export.access_state",
    /// A LUN was added.
    LunAdded = "lun.added",
    /// A LUN was removed.
    LunRemoved = "lun.removed",
    /// The removal of a LUN waits for requests in flight.
    LunRemoving = "lun.removing",
    /// A session was opened.
    SessionOpened = "session.opened",
    /// A session was closed.
    SessionClosed = "session.closed",
    /// A portal cannot be opened yet.
    PortalWaiting = "portal.waiting",
    /// A portal that waited is open.
    PortalOpened = "portal.opened",
    /// A vhost-user socket, or the listener of the API or of metrics, cannot be opened yet.
    ListenerWaiting = "listener.waiting",
    /// A listener that waited is open.
    ListenerOpened = "listener.opened",
    /// A damaged state file was replaced.
    StateReset = "state.reset",
}
