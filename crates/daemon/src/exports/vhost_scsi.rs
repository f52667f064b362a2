//! Exports a virtio-scsi controller to one front end.

use std::sync::Arc;

use bdev::Disk;
use scsi_exec::Hold;
use virtio_scsi::{Event, ScsiDevice, ScsiOptions};

use super::vhost::listen;
use super::{Endpoint, ExportDevice, Opening};
use config::{ExportConfig, LunConfig};

/// Additional sense code CAPACITY DATA HAS CHANGED (2Ah/09h).
const CAPACITY_CHANGED: Event = Event::Changed {
    code: 0x2a,
    qualifier: 0x09,
};

/// Opens a controller.
pub(super) fn open(
    export: &ExportConfig,
    opening: Opening<'_>,
) -> Result<(Arc<dyn ExportDevice>, Endpoint), String> {
    let options = ScsiOptions {
        name: export.name.clone(),
        queues: export.queues,
    };
    let nexus = export.nexus.as_ref().unwrap_or(&export.name);
    let device = ScsiDevice::with_nexus(Arc::clone(opening.units), options, nexus.clone());
    let device = Arc::new(device);
    let server = Arc::clone(&opening.transports.vhost);
    let open = OpenScsi {
        name: export.name.clone(),
        device: Arc::clone(&device),
        server: Arc::clone(&server),
    };
    open.add_luns(&opening.luns(&export.luns)?)?;
    let endpoint = listen(&server, device, export, opening.inherited)?;
    Ok((Arc::new(open), endpoint))
}

struct OpenScsi {
    name: String,
    device: Arc<ScsiDevice>,
    server: Arc<vhost_user::Server>,
}

impl ExportDevice for OpenScsi {
    fn close(&self) {
        self.server.remove(&self.name);
    }

    fn add_luns(&self, luns: &[(LunConfig, Arc<Disk>)]) -> Result<(), String> {
        let luns = luns.iter();
        let luns = luns.map(|(lun, disk)| (lun.target, lun.lun, Arc::clone(disk)));
        let added = self.device.add_luns(&luns.collect::<Vec<_>>());
        added.map_err(|error| error.to_string())
    }

    fn detach_luns(&self, luns: &[LunConfig]) {
        for lun in luns {
            self.device.detach_lun(lun.target, lun.lun);
        }
    }

    fn end_tasks(&self, luns: &[LunConfig], abort: bool, hold: &Hold) {
        let at: Vec<(u8, u16)> = luns.iter().map(|lun| (lun.target, lun.lun)).collect();
        self.device.end_tasks(&at, abort, hold);
    }

    fn notify_removed(&self, luns: &[LunConfig]) {
        for lun in luns {
            self.device.post(Event::Removed, lun.target, lun.lun);
        }
    }

    fn notify_resized(&self, luns: &[LunConfig]) {
        for lun in luns {
            self.device.post(CAPACITY_CHANGED, lun.target, lun.lun);
        }
    }
}
