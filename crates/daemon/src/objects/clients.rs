//! Notifies clients of exports of added and removed logical units and of resized disks.

use super::owner::Owner;
use config::{ExportRef, LunConfig};

impl Owner {
    pub(super) fn add_luns(&self, export: &str, luns: &[LunConfig]) {
        let found = luns.iter();
        let found = found.filter_map(|lun| Some((lun.clone(), self.disks.get(&lun.disk)?.clone())));
        let Some(device) = self.exports.get(export) else {
            return;
        };
        if let Err(error) = device.add_luns(&found.collect::<Vec<_>>()) {
            // The configuration was checked, so this is a defect of the daemon.
            tracing::error!(export, "cannot attach LUNs: {error}");
        }
    }

    pub(super) fn tell_removed(&self, export: &str, luns: &[LunConfig]) {
        if let Some(device) = self.exports.get(export) {
            device.tell_removed(luns);
        }
    }

    /// Notifies the clients of all exports that a disk was resized.
    pub(super) fn resized(&self, name: &str) {
        let Some(disk) = self.disks.get(name) else {
            return;
        };
        if let Some(unit) = self.servers.units.known(disk) {
            unit.update((*disk.info()).clone());
        }
        let shows = |export: &ExportRef<'_>| export.disks().any(|disk| disk == name);
        for export in self.present.exports().filter(shows) {
            let luns = export.luns().unwrap_or_default().iter();
            let luns: Vec<LunConfig> = luns.filter(|lun| lun.disk == name).cloned().collect();
            if let Some(device) = self.exports.get(export.name()) {
                device.tell_resized(&luns);
            }
        }
    }
}
