//! Answers of `/v1/config`: all objects, what of them was changed at run time, and what a new configuration did.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::objects::{Disk, Export};

/// All disks and exports.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Objects {
    /// The disks.
    pub disks: Vec<Disk>,
    /// The exports, with their logical units.
    pub exports: Vec<Export>,
}

/// What was changed at run time.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Changes {
    /// Do they survive a restart?
    pub kept: bool,
    /// A line for each, `+` or `-` and the object.
    pub changes: Vec<String>,
}

/// A change that goes on by itself: what it removes waits for clients.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Accepted {
    /// What is waited for, a line for each object.
    pub waits: Vec<String>,
}

/// How many objects came, changed and went.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Summary {
    /// Disks that came.
    pub disks_added: usize,
    /// Disks that went.
    pub disks_removed: usize,
    /// Disks that have another size.
    pub disks_resized: usize,
    /// Disks whose clients may do more or less.
    #[serde(default)]
    pub disks_limited: usize,
    /// Exports that came.
    pub exports_added: usize,
    /// Exports that went.
    pub exports_removed: usize,
    /// Exports that came anew in another form.
    pub exports_replaced: usize,
    /// iSCSI targets that stay and whose CHAP users are others.
    #[serde(default)]
    pub chap_users_changed: usize,
    /// 1 where discovery sessions have other CHAP users.
    #[serde(default)]
    pub discovery_users_changed: usize,
    /// Exports that other workers serve from now on.
    #[serde(default)]
    pub exports_placed: usize,
    /// Exports with other mode, owner or group of their sockets.
    #[serde(default)]
    pub socket_rights_changed: usize,
    /// Portal groups of targets with another access state.
    #[serde(default)]
    pub access_states_changed: usize,
    /// Logical units that came to exports that were there.
    pub luns_added: usize,
    /// Logical units that went from exports that stay.
    pub luns_removed: usize,
}
