//! Common interface of all kinds of exports. A kind is a type that implements [`ExportObject`]. The enums here list the kinds; only this
//! file matches on them.

use std::path::{Path, PathBuf};

use block::ExportPlacement;
use scsi::AccessStates;

use super::key::KeyValue;
use super::model::{
    Config, IscsiConfig, LunConfig, NbdConfig, SocketRights, VhostBlkConfig, VhostScsiConfig,
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

/// An export of any kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportConfig {
    /// One disk as virtio-blk.
    VhostBlk(VhostBlkConfig),
    /// A virtio-scsi controller.
    VhostScsi(VhostScsiConfig),
    /// An iSCSI target.
    Iscsi(IscsiConfig),
    /// One disk over NBD.
    Nbd(NbdConfig),
}

impl ExportConfig {
    /// Returns a reference.
    pub fn as_ref(&self) -> ExportRef<'_> {
        match self {
            ExportConfig::VhostBlk(export) => ExportRef::VhostBlk(export),
            ExportConfig::VhostScsi(export) => ExportRef::VhostScsi(export),
            ExportConfig::Iscsi(export) => ExportRef::Iscsi(export),
            ExportConfig::Nbd(export) => ExportRef::Nbd(export),
        }
    }

    /// Returns the common interface for modification.
    pub fn object_mut(&mut self) -> &mut dyn ExportObject {
        match self {
            ExportConfig::VhostBlk(export) => export,
            ExportConfig::VhostScsi(export) => export,
            ExportConfig::Iscsi(export) => export,
            ExportConfig::Nbd(export) => export,
        }
    }
}

/// A reference to an export of any kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExportRef<'a> {
    /// One disk as virtio-blk.
    VhostBlk(&'a VhostBlkConfig),
    /// A virtio-scsi controller.
    VhostScsi(&'a VhostScsiConfig),
    /// An iSCSI target.
    Iscsi(&'a IscsiConfig),
    /// One disk over NBD.
    Nbd(&'a NbdConfig),
}

impl<'a> ExportRef<'a> {
    /// Returns the common interface.
    pub fn object(self) -> &'a dyn ExportObject {
        match self {
            ExportRef::VhostBlk(export) => export,
            ExportRef::VhostScsi(export) => export,
            ExportRef::Iscsi(export) => export,
            ExportRef::Nbd(export) => export,
        }
    }

    /// Returns a copy.
    pub fn to_owned(self) -> ExportConfig {
        match self {
            ExportRef::VhostBlk(export) => ExportConfig::VhostBlk(export.clone()),
            ExportRef::VhostScsi(export) => ExportConfig::VhostScsi(export.clone()),
            ExportRef::Iscsi(export) => ExportConfig::Iscsi(export.clone()),
            ExportRef::Nbd(export) => ExportConfig::Nbd(export.clone()),
        }
    }

    /// Returns the name.
    pub fn name(self) -> &'a str {
        self.object().name()
    }

    /// Returns the word of its kind.
    pub fn kind(self) -> &'static str {
        self.object().kind()
    }

    /// Returns the path of the socket, if it has one.
    pub fn socket(self) -> Option<&'a PathBuf> {
        self.object().socket()
    }

    /// Returns a warning if no client can use the export as configured.
    pub fn warning(self) -> Option<String> {
        self.object().warning()
    }

    /// Returns the maximum number of request queues per client; 0 if there are none.
    pub fn queues(self) -> u16 {
        self.object().queues()
    }

    /// Returns the list of logical units; `None` for an export of one disk.
    pub fn luns(self) -> Option<&'a [LunConfig]> {
        self.object().luns()
    }

    /// Returns the workers that serve it.
    pub fn placement(self) -> &'a ExportPlacement {
        self.object().placement()
    }

    /// Returns all its disks.
    pub fn disks(self) -> impl Iterator<Item = &'a str> {
        let luns = self.luns().unwrap_or_default().iter();
        let one = self.object().disk().into_iter();
        one.chain(luns.map(|lun| lun.disk.as_str()))
    }

    /// Returns true if the two exports cannot coexist.
    pub fn bars(self, other: ExportRef<'_>) -> bool {
        self.kind() == other.kind() && self.object().bars(other.name())
    }

    /// Returns true if both exports are equal except for their logical units, access states and workers.
    pub fn is_same_endpoint(self, other: ExportRef<'_>) -> bool {
        let bare = |export: ExportRef<'_>| {
            let mut export = export.to_owned();
            let object = export.object_mut();
            object.luns_mut().map(Vec::clear);
            object.access_states_mut().map(AccessStates::clear);
            *object.placement_mut() = ExportPlacement::Shared;
            export
        };
        bare(self) == bare(other)
    }

    /// Returns true if the export can change to `other` without disconnecting its clients: the endpoint is the same except for the
    /// rights of the socket.
    pub fn can_become(self, other: ExportRef<'_>) -> bool {
        let mut changed = self.to_owned();
        let object = changed.object_mut();
        if let (Some(rights), Some(next)) =
            (object.socket_rights_mut(), other.object().socket_rights())
        {
            if !next.covers(rights) {
                return false;
            }
            rights.clone_from(next);
        }
        changed.as_ref().is_same_endpoint(other)
    }
}

impl Config {
    /// Returns all exports.
    pub fn exports(&self) -> impl Iterator<Item = ExportRef<'_>> {
        let blk = self.vhost_blk.iter().map(ExportRef::VhostBlk);
        let scsi = self.vhost_scsi.iter().map(ExportRef::VhostScsi);
        let iscsi = self.iscsi.iter().map(ExportRef::Iscsi);
        let nbd = self.nbd.iter().map(ExportRef::Nbd);
        blk.chain(scsi).chain(iscsi).chain(nbd)
    }

    /// Returns all exports for modification.
    fn exports_mut(&mut self) -> impl Iterator<Item = &mut dyn ExportObject> {
        let vhost = objects_mut(&mut self.vhost_blk).chain(objects_mut(&mut self.vhost_scsi));
        vhost
            .chain(objects_mut(&mut self.iscsi))
            .chain(objects_mut(&mut self.nbd))
    }

    /// Returns the export with this name.
    pub fn export(&self, name: &str) -> Option<ExportRef<'_>> {
        self.exports().find(|export| export.name() == name)
    }

    /// Replaces the export with the same name, or appends it.
    pub fn put_export(&mut self, export: ExportConfig) {
        let location = self.export(export.as_ref().name());
        let same_kind = location.is_some_and(|location| location.kind() == export.as_ref().kind());
        if !same_kind {
            let name = export.as_ref().name().to_owned();
            self.remove_export(&name);
        }
        match export {
            ExportConfig::VhostBlk(export) => put(&mut self.vhost_blk, export),
            ExportConfig::VhostScsi(export) => put(&mut self.vhost_scsi, export),
            ExportConfig::Iscsi(export) => put(&mut self.iscsi, export),
            ExportConfig::Nbd(export) => put(&mut self.nbd, export),
        }
    }

    /// Appends an export, even if its name exists: a later check reports that.
    pub(super) fn add_export(&mut self, export: ExportConfig) {
        match export {
            ExportConfig::VhostBlk(export) => self.vhost_blk.push(export),
            ExportConfig::VhostScsi(export) => self.vhost_scsi.push(export),
            ExportConfig::Iscsi(export) => self.iscsi.push(export),
            ExportConfig::Nbd(export) => self.nbd.push(export),
        }
    }

    /// Removes an export. Returns false if there is none.
    pub fn remove_export(&mut self, name: &str) -> bool {
        self.retain_exports(|export| export.name() != name)
    }

    /// Removes all exports except those that `is_meant`. Returns false if none was removed.
    pub fn retain_exports(&mut self, is_meant: impl Fn(&dyn ExportObject) -> bool) -> bool {
        let before = self.exports().count();
        self.vhost_blk.retain(|export| is_meant(export));
        self.vhost_scsi.retain(|export| is_meant(export));
        self.iscsi.retain(|export| is_meant(export));
        self.nbd.retain(|export| is_meant(export));
        before != self.exports().count()
    }

    /// Returns the logical units of an export that has a list of them.
    pub fn luns_mut(&mut self, export: &str) -> Option<&mut Vec<LunConfig>> {
        self.export_mut(export)?.luns_mut()
    }

    /// Returns an export for modification.
    pub fn export_mut(&mut self, name: &str) -> Option<&mut dyn ExportObject> {
        self.exports_mut().find(|known| known.name() == name)
    }

    /// Returns the logical units of all exports that have a list of them.
    pub fn all_luns_mut(&mut self) -> impl Iterator<Item = &mut Vec<LunConfig>> {
        self.exports_mut().filter_map(ExportObject::luns_mut)
    }
}

fn objects_mut<T: ExportObject>(exports: &mut [T]) -> impl Iterator<Item = &mut dyn ExportObject> {
    let objects = exports.iter_mut();
    objects.map(|export| export as &mut dyn ExportObject)
}

/// Replaces the export of the same name, or adds it.
fn put<T: ExportObject>(exports: &mut Vec<T>, export: T) {
    let location = exports
        .iter_mut()
        .find(|known| known.name() == export.name());
    match location {
        Some(known) => *known = export,
        None => exports.push(export),
    }
}
