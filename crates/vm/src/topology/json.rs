//! A plan as JSON, with the content of all other forms.

use super::plan::{DiskDevice, Plan, PlannedDevice, PlannedDisk};
use super::qemu::QEMU;
use super::words::Via;
use serde_json::{Value, json};

impl Plan {
    /// Returns the plan as one JSON object.
    pub fn json(&self) -> Value {
        let mut qemu = vec![QEMU.to_owned()];
        qemu.extend(self.qemu_arguments());
        let files = self.files_of_qemu().into_iter();
        let files = files.map(|(path, size)| json!({"path": path, "size": size}));
        json!({
            "name": self.options.name,
            "qemu_version": self.options.qemu.to_string(),
            "daemon_flags": self.daemon_flags(),
            "files": files.collect::<Vec<_>>(),
            "qemu": qemu,
            "devices": self.devices.iter().map(device).collect::<Vec<_>>(),
            "disks": self.disks.iter().map(|disk| self.disk(disk)).collect::<Vec<_>>(),
            "pci": {
                "slots": self.budget.slots,
                "used": self.budget.used,
                "free": self.budget.free(),
                "ports": self.budget.ports,
                "text": self.budget.to_string(),
            },
            "notes": self.notes,
        })
    }

    fn disk(&self, disk: &PlannedDisk) -> Value {
        let device = self.device_of(disk);
        let address = match disk.location {
            DiskDevice::Blk { .. } | DiskDevice::Ata { .. } => Value::Null,
            DiskDevice::Scsi { target, lun, .. } => json!({"target": target, "lun": lun}),
        };
        json!({
            "name": disk.name,
            "device": device.id,
            "size": disk.size,
            "path": disk.medium.path(),
            "serial": disk.serial,
            "wwn": disk.wwn.map(|wwn| format!("{wwn:016x}")),
            "removable": disk.removable,
            "scsi": address,
            "guest": {
                "device": disk.guest.device,
                "find": disk.guest.find,
                "scsi_address": disk.guest.scsi,
                "by_id": disk.guest.by_id,
                "by_path": disk.guest.by_path,
                "queues": disk.guest.queues,
            },
        })
    }
}

fn device(device: &PlannedDevice) -> Value {
    json!({
        "id": device.id,
        "kind": match (device.via, device.is_scsi) {
            (Via::Ide | Via::Ahci, _) => device.via.word(),
            (_, true) => "virtio-scsi",
            (_, false) => "virtio-blk",
        },
        "via": device.via.word(),
        "queues": device.queues,
        "pci": device.address.to_string(),
        "pci_is_certain": device.address.is_certain(),
        "socket": device.socket,
        "wwpn": device.wwpn,
        "aio": device.via.is_qemu().then(|| device.aio.word()),
        "iothreads": device.iothreads,
    })
}
