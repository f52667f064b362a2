//! One disk as virtio-blk, to one front end.

use std::path::Path;
use std::sync::Arc;

use scsi_exec::{Hold, Units};
use virtio_blk::{BlkDevice, BlkOptions};

use super::vhost::listen;
use super::{Endpoint, ExportDevice, Openable, Opening};
use crate::objects::absolute;
use config::{LunConfig, VhostBlkConfig};

impl Openable for VhostBlkConfig {
    fn open(&self, opening: Opening<'_>) -> Result<(Arc<dyn ExportDevice>, Endpoint), String> {
        let device = blk_device(self, &opening)?;
        let server = Arc::clone(&opening.transports.vhost);
        let (socket, rights) = (&self.socket, &self.rights);
        let endpoint = listen(&server, device.clone(), socket, rights, opening.inherited)?;
        let name = self.name.clone();
        let open = OpenBlk {
            name,
            device,
            server,
        };
        Ok((Arc::new(open), endpoint))
    }
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

    fn tell_removed(&self, _luns: &[LunConfig]) {}

    fn tell_resized(&self, _luns: &[LunConfig]) {
        self.device.resized();
        self.server.config_changed(&self.name);
    }
}

fn blk_device(config: &VhostBlkConfig, opening: &Opening<'_>) -> Result<Arc<BlkDevice>, String> {
    let units = opening.units;
    let options = BlkOptions {
        name: config.name.clone(),
        queues: config.queues,
    };
    let disk = opening.disk(&config.disk)?;
    // A guest that has turned write-back off sends no flushes from then on, whatever happens to the daemon.
    let key = format!("virtio-blk {} {}", config.name, disk.info().identity);
    let writethrough = b"writethrough".as_slice();
    // A damaged choice means the durable mode.
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
            // The store says what it cannot keep.
            units.store().save(&key, choice).ok();
        }
    };
    let device = BlkDevice::new(Arc::clone(disk), options);
    let device = device.with_choice(kept.as_deref() != Some(writethrough), keep);
    let device = remember_disk(device, &config.socket, units);
    // A sanitize operation that a restart interrupted goes on, whichever transport its disk has.
    let unit = units.unit(disk);
    if disk.is_removable() {
        // virtio-blk has no word for a medium that is gone: SCSI initiators cannot eject it meanwhile.
        let hold = unit.hold_medium();
        return Ok(Arc::new(device.holding(hold)));
    }
    Ok(Arc::new(device))
}

/// A front end knows an export by its socket only: the disk that its driver started with is persisted under that.
fn remember_disk(device: BlkDevice, socket: &Path, units: &Arc<Units>) -> BlkDevice {
    let key = format!("virtio-blk disk {}", absolute(socket).display());
    // A damaged identity matches no disk: a driver with queues in use is refused until it starts them anew.
    let last = units.store().load(&key);
    let last = last.unwrap_or_else(|_| Some(b"unknown".to_vec()));
    let last = last.and_then(|last| String::from_utf8(last).ok());
    let units = Arc::clone(units);
    // The store says what it cannot persist.
    device.with_last_disk(last, move |identity| {
        units.store().save(&key, identity.as_bytes()).ok();
    })
}
