//! Exports one disk as virtio-blk to one front end.

use std::path::Path;
use std::sync::Arc;

use scsi_exec::{Hold, Units};
use virtio_blk::{BlkDevice, BlkOptions};

use super::vhost::listen;
use super::{Endpoint, ExportDevice, Opening};
use crate::objects::absolute;
use config::{ExportConfig, LunConfig};

/// Opens a virtio-blk export.
pub(super) fn open(
    export: &ExportConfig,
    opening: Opening<'_>,
) -> Result<(Arc<dyn ExportDevice>, Endpoint), String> {
    let device = blk_device(export, &opening)?;
    let server = Arc::clone(&opening.transports.vhost);
    let endpoint = listen(&server, device.clone(), export, opening.inherited)?;
    let name = export.name.clone();
    let open = OpenBlk {
        name,
        device,
        server,
    };
    Ok((Arc::new(open), endpoint))
}

struct OpenBlk {
    name: String,
    device: Arc<BlkDevice>,
    server: Arc<vhost_user::Server>,
}

impl ExportDevice for OpenBlk {
    fn close(&self) {
        self.server.remove(&self.name);
    }

    fn detach_luns(&self, _luns: &[LunConfig]) {}

    fn end_tasks(&self, _luns: &[LunConfig], _abort: bool, _hold: &Hold) {}

    fn notify_removed(&self, _luns: &[LunConfig]) {}

    fn notify_resized(&self, _luns: &[LunConfig]) {
        self.device.resized();
        self.server.config_changed(&self.name);
    }
}

fn blk_device(config: &ExportConfig, opening: &Opening<'_>) -> Result<Arc<BlkDevice>, String> {
    let units = opening.units;
    let options = BlkOptions {
        name: config.name.clone(),
        queues: config.queues,
    };
    let disk = opening.only_disk(config)?;
    // A guest that disabled write-back sends no flushes afterwards, so the choice must survive a restart.
    let key = format!("virtio-blk {} {}", config.name, disk.info().identity);
    let writethrough = b"writethrough".as_slice();
    // A damaged record selects writethrough, the durable mode.
    let kept = units.store().load(&key);
    let kept = kept.unwrap_or_else(|_| Some(writethrough.to_vec()));
    let keep = {
        let units = Arc::clone(units);
        move |writeback| {
            let choice = if writeback {
                b"writeback"
            } else {
                writethrough
            };
            // The store logs failed writes.
            units.store().save(&key, choice).ok();
        }
    };
    let device = BlkDevice::new(Arc::clone(disk), options);
    let device = device.with_choice(kept.as_deref() != Some(writethrough), keep);
    let device = remember_disk(device, config.socket_path(), units);
    // Creating the unit resumes a sanitize operation that a restart interrupted, on any transport.
    let unit = units.unit(disk);
    if disk.is_removable() {
        // virtio-blk cannot report a missing medium, so SCSI initiators must not eject it.
        let hold = unit.hold_medium();
        return Ok(Arc::new(device.holding(hold)));
    }
    Ok(Arc::new(device))
}

/// Persists the identity of the disk that the driver started with, under the socket path, the only name of an export that a front end has.
fn remember_disk(device: BlkDevice, socket: &Path, units: &Arc<Units>) -> BlkDevice {
    let key = format!("virtio-blk disk {}", absolute(socket).display());
    // A damaged identity matches no disk: a driver with queues in use is refused.
    let last = units.store().load(&key);
    let last = last.unwrap_or_else(|_| Some(b"unknown".to_vec()));
    let last = last.and_then(|last| String::from_utf8(last).ok());
    let units = Arc::clone(units);
    // The store logs failed writes.
    device.with_last_disk(last, move |identity| {
        units.store().save(&key, identity.as_bytes()).ok();
    })
}
