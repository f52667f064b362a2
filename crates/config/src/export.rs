//! Common interface of all kinds of exports. A kind is a type that implements [`ExportObject`]. `kinds!` lists them.

use std::ops::{Deref, DerefMut};
use std::path::{Path, PathBuf};

use block::ExportPlacement;
use scsi::AccessStates;
use serde_json::Value;

use super::key::KeyValue;
use super::model::{
    Config, ExportConfig, IscsiConfig, LunConfig, NbdConfig, SocketRights, VhostBlkConfig,
    VhostScsiConfig,
};

/// An export of any kind.
pub trait ExportObject {
    /// Returns the name.
    fn name(&self) -> &str;
    /// Returns the word of its kind.
    fn kind(&self) -> &'static str;
    /// Returns the workers that serve it.
    fn placement(&self) -> &ExportPlacement;
    /// Returns the workers for modification.
    fn placement_mut(&mut self) -> &mut ExportPlacement;

    /// Sets the values that a draft has with locations. Returns `None` if one is missing.
    fn fill(&mut self, name: String, disk: Option<String>, socket: Option<PathBuf>) -> Option<()>;

    /// Returns the configured values, in the order of the keys.
    fn values(&self) -> Vec<KeyValue>;

    /// Returns the values for a file.
    fn file_values(&self) -> Vec<KeyValue> {
        self.values()
    }

    /// Returns the path of the socket, if it has one.
    fn socket(&self) -> Option<&PathBuf> {
        None
    }

    /// Returns true if other exports of its kind may have the same socket.
    fn shares_socket(&self) -> bool {
        false
    }

    /// Returns the maximum number of request queues per client; 0 if there are none.
    fn queues(&self) -> u16 {
        0
    }

    /// Returns a warning if no client can use the export as configured.
    fn warning(&self) -> Option<String> {
        None
    }

    /// Returns the disk of an export of one disk.
    fn disk(&self) -> Option<&str> {
        None
    }

    /// Returns the list of logical units; `None` for an export of one disk.
    fn luns(&self) -> Option<&[LunConfig]> {
        None
    }

    /// Returns the logical units for modification.
    fn luns_mut(&mut self) -> Option<&mut Vec<LunConfig>> {
        None
    }

    /// Returns mode, owner and group of its socket; `None` for exports without a socket.
    fn socket_rights(&self) -> Option<&SocketRights> {
        None
    }

    /// Returns mode, owner and group of its socket for modification.
    fn socket_rights_mut(&mut self) -> Option<&mut SocketRights> {
        None
    }

    /// Returns the target number of all logical units, if it is fixed.
    fn only_target(&self) -> Option<u8> {
        None
    }

    /// Returns the file of its CHAP users.
    fn chap_users(&self) -> Option<&Path> {
        None
    }

    /// Returns the access states of its portal groups; `None` for exports other than targets.
    fn access_states(&self) -> Option<&AccessStates> {
        None
    }

    /// Returns the access states of its portal groups for modification.
    fn access_states_mut(&mut self) -> Option<&mut AccessStates> {
        None
    }

    /// Returns true if the export has portals of this portal group.
    fn has_portal_group(&self, _group: u16) -> bool {
        false
    }

    /// Returns the socket path for modification. In a request it may be relative to the client's folder.
    fn path_mut(&mut self) -> Option<&mut PathBuf> {
        None
    }

    /// Returns true if another export of this kind cannot have this name.
    fn bars(&self, name: &str) -> bool {
        // The caller compares names.
        let _ = name;
        false
    }
}

/// Declares the kinds of exports, each with its configuration and the function that returns all exports of the kind.
macro_rules! kinds {
    ($($kind:ident($config:ident), $all:ident;)+) => {
        impl Deref for ExportConfig {
            type Target = dyn ExportObject;

            fn deref(&self) -> &Self::Target {
                match self {
                    $(ExportConfig::$kind(export) => export,)+
                }
            }
        }

        impl DerefMut for ExportConfig {
            fn deref_mut(&mut self) -> &mut Self::Target {
                match self {
                    $(ExportConfig::$kind(export) => export,)+
                }
            }
        }

        impl Config {
            $(
                /// Returns all exports of this kind.
                pub fn $all(&self) -> impl Iterator<Item = &$config> {
                    self.exports.iter().filter_map(|export| match export {
                        ExportConfig::$kind(export) => Some(export),
                        _ => None,
                    })
                }
            )+
        }
    };
}

kinds! {
    VhostBlk(VhostBlkConfig), vhost_blk;
    VhostScsi(VhostScsiConfig), vhost_scsi;
    Iscsi(IscsiConfig), iscsi;
    Nbd(NbdConfig), nbd;
}

impl ExportConfig {
    /// Returns its rank among the kinds: a configuration has its exports in this order.
    fn rank(&self) -> u8 {
        match self {
            ExportConfig::VhostBlk(_) => 0,
            ExportConfig::VhostScsi(_) => 1,
            ExportConfig::Iscsi(_) => 2,
            ExportConfig::Nbd(_) => 3,
        }
    }

    /// Returns the values for the body of a request, which has a field of its own for the name. Logical units are sorted as an initiator
    /// lists them.
    pub fn body_values(&self) -> Vec<(String, Value)> {
        let values = self.values().into_iter();
        let values = values.filter(|one| one.name != "name");
        let value = |mut one: KeyValue| {
            if let ("lun", Some(luns)) = (one.name, one.value.as_array_mut()) {
                luns.sort_by_key(|lun| (lun["target"].as_u64(), lun["lun"].as_u64()));
            }
            (one.name.to_owned(), one.value)
        };
        values.map(value).collect()
    }

    /// Returns all its disks.
    pub fn disks(&self) -> impl Iterator<Item = &str> {
        let luns = self.luns().unwrap_or_default().iter();
        let one = self.disk().into_iter();
        one.chain(luns.map(|lun| lun.disk.as_str()))
    }

    /// Returns true if the two exports cannot coexist.
    pub fn excludes(&self, other: &ExportConfig) -> bool {
        self.kind() == other.kind() && self.bars(other.name())
    }

    /// Returns true if both exports are equal except for their logical units, access states and workers.
    pub fn is_same_endpoint(&self, other: &ExportConfig) -> bool {
        let bare = |export: &ExportConfig| {
            let mut export = export.clone();
            export.luns_mut().map(Vec::clear);
            export.access_states_mut().map(AccessStates::clear);
            *export.placement_mut() = ExportPlacement::Shared;
            export
        };
        bare(self) == bare(other)
    }

    /// Returns true if the export can change to `other` without disconnecting its clients: the endpoint is the same except for the
    /// rights of the socket.
    pub fn can_become(&self, other: &ExportConfig) -> bool {
        let mut changed = self.clone();
        if let (Some(rights), Some(next)) = (changed.socket_rights_mut(), other.socket_rights()) {
            if !next.covers(rights) {
                return false;
            }
            rights.clone_from(next);
        }
        changed.is_same_endpoint(other)
    }
}

impl Config {
    /// Returns all exports.
    pub fn exports(&self) -> impl Iterator<Item = &ExportConfig> {
        self.exports.iter()
    }

    /// Returns the export with this name.
    pub fn export(&self, name: &str) -> Option<&ExportConfig> {
        self.exports().find(|export| export.name() == name)
    }

    /// Replaces the export with the same name, or appends it.
    pub fn put_export(&mut self, export: ExportConfig) {
        match self.export_mut(export.name()) {
            Some(known) if known.kind() == export.kind() => *known = export,
            _ => {
                self.remove_export(export.name());
                self.add_export(export);
            }
        }
    }

    /// Appends an export to those of its kind, even if its name exists: a later check reports that.
    pub(super) fn add_export(&mut self, export: ExportConfig) {
        let exports = &mut self.exports;
        let end = exports.partition_point(|known| known.rank() <= export.rank());
        exports.insert(end, export);
    }

    /// Removes an export. Returns false if there is none.
    pub fn remove_export(&mut self, name: &str) -> bool {
        self.retain_exports(|export| export.name() != name)
    }

    /// Removes all exports except those that `is_meant`. Returns false if none was removed.
    pub fn retain_exports(&mut self, is_meant: impl Fn(&ExportConfig) -> bool) -> bool {
        let before = self.exports.len();
        self.exports.retain(is_meant);
        before != self.exports.len()
    }

    /// Returns the logical units of an export that has a list of them.
    pub fn luns_mut(&mut self, export: &str) -> Option<&mut Vec<LunConfig>> {
        self.export_mut(export)?.luns_mut()
    }

    /// Returns an export for modification.
    pub fn export_mut(&mut self, name: &str) -> Option<&mut ExportConfig> {
        self.exports.iter_mut().find(|known| known.name() == name)
    }

    /// Returns the logical units of all exports that have a list of them.
    pub fn all_luns_mut(&mut self) -> impl Iterator<Item = &mut Vec<LunConfig>> {
        self.exports
            .iter_mut()
            .filter_map(|export| export.luns_mut())
    }
}
