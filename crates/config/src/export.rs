//! Operations on exports and on the exports of a configuration.

use std::path::{Path, PathBuf};

use block::ExportPlacement;
use iscsi::access::DemoMode;
use scsi::AccessStates;

use super::model::{Config, ExportConfig, LunConfig, Transport};

impl ExportConfig {
    /// Returns the name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the disk of an export of one disk.
    pub fn disk(&self) -> Option<&str> {
        self.disk.as_deref()
    }

    /// Returns the path of the socket, if it has one.
    pub fn socket(&self) -> Option<&PathBuf> {
        self.socket.as_ref()
    }

    /// Returns the workers that serve it.
    pub fn placement(&self) -> &ExportPlacement {
        &self.placement
    }

    /// Returns true if other exports of its kind may have the same socket.
    pub fn shares_socket(&self) -> bool {
        self.transport == Transport::Nbd
    }

    /// Returns a warning if no client can use the export as configured, or if its clients over TCP need no certificate
    /// although `nbd_client_ca` is set.
    pub fn warning(&self, has_nbd_client_ca: bool) -> Option<String> {
        if let (true, false, Some(listen)) = (has_nbd_client_ca, self.nbd.tls, self.nbd.listen) {
            return Some(format!(
                "clients at {listen} need no certificate: `nbd_client_ca` is set, but the export has no `tls`; hint: set `tls = true` in [[nbd]]"
            ));
        }
        let target = &self.iscsi;
        let is_closed = target.demo_mode == DemoMode::None
            && target.acl.is_empty()
            && target.chap_users.is_none();
        (self.transport == Transport::Iscsi && is_closed).then(|| {
            "no initiator may log in; hint: add initiators with `acl`, set `chap_users`, or set `demo_mode` to ro or rw for all initiators"
                .to_owned()
        })
    }

    /// Returns true if it has a list of logical units instead of one disk.
    pub fn has_luns(&self) -> bool {
        matches!(self.transport, Transport::VhostScsi | Transport::Iscsi)
    }

    /// Returns the list of logical units; `None` for an export of one disk.
    pub fn luns(&self) -> Option<&[LunConfig]> {
        self.has_luns().then_some(&self.luns)
    }

    /// Returns the list of logical units for modification.
    pub fn luns_mut(&mut self) -> Option<&mut Vec<LunConfig>> {
        self.has_luns().then_some(&mut self.luns)
    }

    /// Returns the target number of all logical units, if it is fixed.
    pub fn only_target(&self) -> Option<u8> {
        (self.transport == Transport::Iscsi).then_some(0)
    }

    /// Returns the file of its CHAP users.
    pub fn chap_users(&self) -> Option<&Path> {
        self.iscsi.chap_users.as_deref()
    }

    /// Returns the access states of its portal groups; `None` for exports other than targets.
    pub fn access_states(&self) -> Option<&AccessStates> {
        (self.transport == Transport::Iscsi).then_some(&self.iscsi.access_states)
    }

    /// Returns the access states of its portal groups for modification.
    pub fn access_states_mut(&mut self) -> Option<&mut AccessStates> {
        (self.transport == Transport::Iscsi).then_some(&mut self.iscsi.access_states)
    }

    /// Returns true if the export has portals of this portal group.
    pub fn has_portal_group(&self, group: u16) -> bool {
        let mut portals = self.iscsi.portals.iter();
        portals.any(|portal| portal.group == group)
    }

    /// Returns the path of the socket; empty: it has none.
    pub fn socket_path(&self) -> &Path {
        self.socket.as_deref().unwrap_or(Path::new(""))
    }

    /// Returns the path for modification that a request may give relative to the client's folder.
    pub fn path_mut(&mut self) -> Option<&mut PathBuf> {
        match self.transport {
            Transport::Iscsi => self.iscsi.chap_users.as_mut(),
            _ => self.socket.as_mut(),
        }
    }

    /// Returns all its disks.
    pub fn disks(&self) -> impl Iterator<Item = &str> {
        let one = self.disk.as_deref().into_iter();
        one.chain(self.luns.iter().map(|lun| lun.disk.as_str()))
    }

    /// Returns true if the two exports cannot coexist. Initiators spell a name in several ways (RFC 7143, 4.2.7.1). Portals may be shared.
    pub fn excludes(&self, other: &ExportConfig) -> bool {
        let targets = [self, other].map(|export| export.transport == Transport::Iscsi);
        targets == [true, true] && iscsi_name::is_same(&self.name, &other.name)
    }

    /// Returns true if both exports are equal except for their logical units, access states and workers.
    pub fn is_same_endpoint(&self, other: &ExportConfig) -> bool {
        let bare = |export: &ExportConfig| {
            let mut export = export.clone();
            export.luns.clear();
            export.iscsi.access_states.clear();
            export.placement = ExportPlacement::Shared;
            export
        };
        bare(self) == bare(other)
    }

    /// Returns true if the export can change to `other` without disconnecting its clients: the endpoint is the same except for the
    /// rights of the socket.
    pub fn can_become(&self, other: &ExportConfig) -> bool {
        let rights = other.rights.clone();
        let changed = ExportConfig {
            rights,
            ..self.clone()
        };
        other.rights.covers(&self.rights) && changed.is_same_endpoint(other)
    }

    /// Returns the name for clients of an NBD export.
    pub fn export_name(&self) -> &str {
        self.nbd.export_name.as_deref().unwrap_or(&self.name)
    }

    /// Returns the reason why two NBD exports cannot share a listener, if they have one in common.
    pub fn conflict(&self, other: &ExportConfig) -> Option<String> {
        let same_socket = self.socket.is_some() && self.socket == other.socket;
        let same_address = self.nbd.listen.is_some() && self.nbd.listen == other.nbd.listen;
        let place = match (&self.socket, self.nbd.listen) {
            (Some(socket), _) if same_socket => socket.display().to_string(),
            (_, Some(address)) if same_address => address.to_string(),
            _ => return None,
        };
        let (name, owner) = (self.export_name(), &other.name);
        if name == other.export_name() {
            let reason = format!("listener {place} already has an export {name:?}, of {owner}");
            return Some(reason);
        }
        if self.nbd.tls != other.nbd.tls {
            return Some(format!(
                "export {owner} at {place} has another value of tls"
            ));
        }
        (same_socket && self.rights != other.rights).then(|| {
            format!("export {owner} gives the socket {place} another mode, owner or group")
        })
    }
}

impl Config {
    /// Returns all exports.
    pub fn exports(&self) -> impl Iterator<Item = &ExportConfig> {
        self.exports.iter()
    }

    /// Returns all exports with this transport.
    pub fn exports_over(&self, transport: Transport) -> impl Iterator<Item = &ExportConfig> {
        let exports = self.exports.iter();
        exports.filter(move |export| export.transport == transport)
    }

    /// Returns the export with this name.
    pub fn export(&self, name: &str) -> Option<&ExportConfig> {
        self.exports().find(|export| export.name == name)
    }

    /// Replaces the export with the same name, or appends it.
    pub fn put_export(&mut self, export: ExportConfig) {
        match self.export_mut(&export.name) {
            Some(known) if known.transport == export.transport => *known = export,
            _ => {
                self.remove_export(&export.name);
                self.add_export(export);
            }
        }
    }

    /// Appends an export to those of its kind, even if its name exists: a later check reports that.
    pub(super) fn add_export(&mut self, export: ExportConfig) {
        let exports = &mut self.exports;
        let end = exports.partition_point(|known| known.transport <= export.transport);
        exports.insert(end, export);
    }

    /// Removes an export. Returns false if there is none.
    pub fn remove_export(&mut self, name: &str) -> bool {
        self.retain_exports(|export| export.name != name)
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
        self.exports.iter_mut().find(|known| known.name == name)
    }

    /// Returns the logical units of all exports that have a list of them.
    pub fn all_luns_mut(&mut self) -> impl Iterator<Item = &mut Vec<LunConfig>> {
        self.exports
            .iter_mut()
            .filter_map(|export| export.luns_mut())
    }
}
