//! Exports a virtio-scsi controller to one front end.

use std::sync::Arc;

use bdev::Disk;
use scsi_exec::Hold;
use virtio_scsi::{Event, ScsiDevice, ScsiOptions};

use super::vhost::listen;
use super::{Endpoint, ExportDevice, Opening};
use config::{ExportConfig, LunConfig, Transport};
use control::ExportStatus;

/// Additional sense code CAPACITY DATA HAS CHANGED (2Ah/09h).
const CAPACITY_CHANGED: Event = Event::Changed {
    code: 0x2a,
    qualifier: 0x09,
};

/// Warns of controllers that serve one disk to two front ends at the same time with one nexus. A guest that migrates never uses both.
pub(crate) fn warn_of_shared_nexuses<'a>(
    configs: impl Iterator<Item = &'a ExportConfig>,
    exports: &mut [ExportStatus],
) {
    let nexus = |config: &'a ExportConfig| config.nexus.as_ref().unwrap_or(&config.name);
    let pairs = configs.zip(exports.iter()).enumerate();
    let used: Vec<_> = pairs
        .filter(|(_, (config, status))| {
            config.transport == Transport::VhostScsi && !status.served.is_empty()
        })
        .map(|(index, (config, status))| (index, nexus(config), status.clone()))
        .collect();
    for (index, name, one) in &used {
        let disk = |other: &ExportStatus| {
            let mut disks = other.luns.iter().map(|lun| &lun.disk);
            disks
                .find(|disk| one.luns.iter().any(|lun| lun.disk == **disk))
                .cloned()
        };
        let mut others = used
            .iter()
            .filter(|other| other.0 != *index && other.1 == *name);
        let shared = others.find_map(|(_, _, other)| Some((&other.name, disk(other)?)));
        if let (Some((other, disk)), Some(status)) = (shared, exports.get_mut(*index)) {
            status.warning = Some(format!(
                "export {other} serves disk {disk} to another front end with the same nexus {name}: if these are two guests, they share their persistent reservations; hint: set another nexus for one of them"
            ));
        }
    }
}

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

#[cfg(test)]
mod tests {
    use super::*;
    use config::{Config, Flags, Surroundings, parse};
    use serde_json::json;

    fn parse_config(text: &str) -> Config {
        let surroundings = Surroundings::of_this_process();
        let parsed = parse(
            Some(("lunette.toml", text)),
            &Flags::default(),
            &surroundings,
        );
        parsed.unwrap_or_else(|error| panic!("{error}"))
    }

    /// Returns the exports with warnings, of controllers as nexus, disk and use.
    fn warned(controllers: &[(&str, &str, bool)]) -> Vec<String> {
        let names = (0..).map(|number| format!("c{number}"));
        let text = names.clone().zip(controllers).map(|(name, (nexus, disk, _))| {
            format!(
                "[[vhost_scsi]]\nname = \"{name}\"\nsocket = \"/run/{name}\"\nnexus = \"{nexus}\"\n[[vhost_scsi.lun]]\ntarget = 0\nlun = 0\ndisk = \"{disk}\"\n"
            )
        });
        let disks = ["d", "e"]
            .map(|disk| format!("[[disk]]\nname = \"{disk}\"\nbackend = \"ram\"\nsize = \"1M\"\n"));
        let text = disks.into_iter().chain(text).collect::<String>();
        let config = parse_config(&text);
        let status = names.zip(controllers).map(|(name, (_, disk, is_used))| {
            let served = match is_used {
                true => json!([{ "queue": 2, "worker": 0 }]),
                false => json!([]),
            };
            let status = json!({
                "name": name, "kind": "vhost-scsi", "queues": 1, "connected": true, "served": served,
                "luns": [{ "target": 0, "lun": 0, "disk": disk }]
            });
            serde_json::from_value(status).unwrap()
        });
        let mut exports: Vec<ExportStatus> = status.collect();
        warn_of_shared_nexuses(config.exports(), &mut exports);
        let warned = exports
            .into_iter()
            .filter(|export| export.warning.is_some());
        warned.map(|export| export.name).collect()
    }

    #[test]
    fn two_guests_with_one_nexus_and_one_disk_are_warned_of() {
        let none: [&str; 0] = [];
        assert_eq!(warned(&[("g", "d", true), ("g", "d", true)]), ["c0", "c1"]);
        // Both sides of a migration, and two controllers of one guest.
        assert_eq!(warned(&[("g", "d", true), ("g", "d", false)]), none);
        assert_eq!(warned(&[("g", "d", true), ("g", "e", true)]), none);
        assert_eq!(warned(&[("g", "d", true), ("h", "d", true)]), none);
        let mixed = [("g", "d", true), ("c9", "d", true), ("g", "d", true)];
        assert_eq!(warned(&mixed), ["c0", "c2"]);
    }
}
