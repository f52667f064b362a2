//! What clients of exports hear when objects change: logical units that come and go, disks of another size.

use std::sync::Arc;

use bdev::Disk;
use virtio_scsi::Event as ScsiEvent;

use super::owner::Owner;
use super::servers::Transports;
use config::{ExportRef, LunConfig};

/// CAPACITY DATA HAS CHANGED.
const CAPACITY_CHANGED: ScsiEvent = ScsiEvent::Changed {
    code: 0x2a,
    qualifier: 0x09,
};

impl Owner {
    pub(super) fn add_luns(&self, export: &str, luns: &[LunConfig], transports: &Transports) {
        let found = luns.iter().filter_map(|lun| {
            let disk = self.disks.get(&lun.disk)?.clone();
            Some((lun.target, lun.lun, disk))
        });
        let found: Vec<(u8, u16, Arc<Disk>)> = found.collect();
        let added = match self.scsi.get(export) {
            Some(device) => device.add_luns(&found).map_err(|error| error.to_string()),
            None => {
                let luns: Vec<_> = found.into_iter().map(|(_, lun, d)| (lun, d)).collect();
                let added = transports.iscsi.add_luns(export, &luns);
                added.map_err(|error| error.to_string())
            }
        };
        if let Err(error) = added {
            // The configuration was checked: this is a defect of ours.
            tracing::error!("LUNs of {export} cannot be attached: {error}");
        }
    }

    /// Logical units are gone, which the driver of a virtio-scsi controller hears; iSCSI initiators find out.
    pub(super) fn tell_removed(&self, export: &str, luns: &[LunConfig]) {
        if let Some(device) = self.scsi.get(export) {
            for lun in luns {
                device.post(ScsiEvent::Removed, lun.target, lun.lun);
            }
        }
    }

    /// Tells every transport that a disk has another size.
    pub(super) fn resized(&self, name: &str, transports: &Transports) {
        let Some(disk) = self.disks.get(name) else {
            return;
        };
        if let Some(unit) = self.servers.units.known(disk) {
            unit.update((*disk.info()).clone());
        }
        for export in self.present.exports() {
            match export {
                ExportRef::VhostBlk(blk) if blk.disk == name => {
                    if let Some(device) = self.blk.get(&blk.name) {
                        device.resized();
                    }
                    transports.vhost.config_changed(&blk.name);
                }
                ExportRef::VhostScsi(scsi) => {
                    let Some(device) = self.scsi.get(&scsi.name) else {
                        continue;
                    };
                    for lun in scsi.luns.iter().filter(|lun| lun.disk == name) {
                        device.post(CAPACITY_CHANGED, lun.target, lun.lun);
                    }
                }
                ExportRef::VhostBlk(_) | ExportRef::Iscsi(_) => {}
            }
        }
    }
}
