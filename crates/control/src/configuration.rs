//! Responses of `/v1/config`: all objects, changes made at run time, and the effect of a new configuration.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::objects::{Disk, Export};

/// All disks and exports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Objects {
    /// Disks.
    pub disks: Vec<Disk>,
    /// Exports with their logical units.
    pub exports: Vec<Export>,
}

/// Changes made at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Changes {
    /// The changes survive a restart.
    pub kept: bool,
    /// One line per change: `+`, `-` or `~`, and the object.
    pub changes: Vec<String>,
    /// Changes that replace a value of the file or remove an object of it.
    #[serde(default)]
    pub shadowed: Vec<String>,
}

/// A change that continues: it waits for clients or disks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Accepted {
    /// Objects that the change waits for, one line each.
    pub waits: Vec<String>,
}

/// Number of added, changed and removed objects.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Summary {
    /// Added disks.
    pub disks_added: usize,
    /// Removed disks.
    pub disks_removed: usize,
    /// Resized disks.
    pub disks_resized: usize,
    /// Disks with new limits.
    #[serde(default)]
    pub disks_limited: usize,
    /// Added exports.
    pub exports_added: usize,
    /// Removed exports.
    pub exports_removed: usize,
    /// Exports that were closed and opened again with a new configuration.
    pub exports_replaced: usize,
    /// Remaining iSCSI targets with new CHAP users.
    #[serde(default)]
    pub chap_users_changed: usize,
    /// 1 if discovery sessions have new CHAP users.
    #[serde(default)]
    pub discovery_users_changed: usize,
    /// 1 if new connections to the API and metrics over TCP or to NBD exports use another certificate or other authorities.
    #[serde(default)]
    pub certificates_changed: usize,
    /// Exports with a new placement on workers.
    #[serde(default)]
    pub exports_placed: usize,
    /// Exports with a new mode, owner or group of their sockets.
    #[serde(default)]
    pub socket_rights_changed: usize,
    /// Portal groups of targets with a new access state.
    #[serde(default)]
    pub access_states_changed: usize,
    /// Logical units added to existing exports.
    pub luns_added: usize,
    /// Logical units removed from remaining exports.
    pub luns_removed: usize,
    /// After a reload: values of the file that are not in effect because of a change at run time, one line each.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shadowed: Vec<String>,
}
