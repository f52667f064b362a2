//! Names of a disk in a Linux guest, as far as they are predictable.
//!
//! `vd` names follow the order of PCI devices. `sd` names are unpredictable, because Linux probes several SCSI disks at a time. Links
//! below `/dev/disk` follow systemd's udev rules; sg3-utils adds more.

use super::pci::PciAddress;

/// Names and addresses in a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuestNames {
    /// `/dev/vdc`, or `None` if unpredictable.
    pub device: Option<String>,
    /// Command that finds the device if `device` is `None`.
    pub find: Option<String>,
    /// Links below `/dev/disk/by-id`, which udev derives from the device's identification.
    pub by_id: Vec<String>,
    /// Links below `/dev/disk/by-path`.
    pub by_path: Vec<String>,
    /// `host:0:target:lun` of a SCSI disk. The host number counts only virtio-scsi controllers; other adapters of the guest shift it.
    pub scsi: Option<String>,
    /// Number of hardware queues, at most one per virtual CPU.
    pub queues: u32,
}

/// Returns Linux's number of a LUN: from 256 on, it includes the address method bits of flat space addressing (SAM-5, 4.7.7.3).
pub fn kernel_lun(lun: u32) -> u32 {
    if lun < 256 { lun } else { lun | 0x4000 }
}

/// Returns the name for an index: `vda` for 0, `vdz` for 25, `vdaa` for 26.
pub(super) fn disk_letters(prefix: &str, index: usize) -> String {
    let mut name = Vec::new();
    let mut rest = index + 1;
    while rest > 0 {
        name.push(b'a' + ((rest - 1) % 26) as u8);
        rest = (rest - 1) / 26;
    }
    name.reverse();
    format!("{prefix}{}", String::from_utf8_lossy(&name))
}

/// Returns the names of the virtio-blk disk with this index.
pub(crate) fn of_blk(
    index: usize,
    address: &PciAddress,
    serial: Option<&str>,
    queues: u32,
) -> GuestNames {
    let serial = serial.map(|serial| format!("virtio-{}", link_text(serial)));
    GuestNames {
        device: Some(format!("/dev/{}", disk_letters("vd", index))),
        find: None,
        by_id: serial.into_iter().collect(),
        by_path: vec![format!("pci-{address}"), format!("virtio-pci-{address}")],
        scsi: None,
        queues,
    }
}

/// A SCSI disk on the controller with index `host`.
pub(super) struct ScsiDiskLocation<'a> {
    pub host: usize,
    pub target: u32,
    pub lun: u32,
    pub address: &'a PciAddress,
    /// The disk is the guest's only SCSI disk, so its name is `sda`.
    pub is_alone: bool,
}

pub(super) fn of_scsi(
    location: &ScsiDiskLocation<'_>,
    wwn: Option<u64>,
    queues: u32,
) -> GuestNames {
    let (target, lun) = (location.target, kernel_lun(location.lun));
    let scsi = format!("{}:0:{target}:{lun}", location.host);
    let by_id = wwn
        .into_iter()
        .flat_map(|wwn| [format!("scsi-3{wwn:016x}"), format!("wwn-0x{wwn:016x}")]);
    GuestNames {
        device: location.is_alone.then(|| "/dev/sda".to_owned()),
        find: Some(format!("ls /sys/class/scsi_device/{scsi}/device/block")),
        by_id: by_id.collect(),
        by_path: vec![format!("pci-{}-scsi-0:0:{target}:{lun}", location.address)],
        scsi: Some(scsi),
        queues,
    }
}

/// Returns the names of the disk at this target and LUN of controller `host`, which may not be the only SCSI disk.
pub(crate) fn of_scsi_at(
    host: usize,
    (target, lun): (u32, u32),
    address: &PciAddress,
    wwn: Option<u64>,
    queues: u32,
) -> GuestNames {
    let location = ScsiDiskLocation {
        host,
        target,
        lun,
        address,
        is_alone: false,
    };
    of_scsi(&location, wwn, queues)
}

/// Returns the names of the ATA disk at this port and unit. The number of its SCSI host depends on the other adapters of the guest, so
/// the disk is found by the serial number in VPD page 80h.
pub(super) fn of_ata((port, unit): (u32, u32), address: &PciAddress, serial: &str) -> GuestNames {
    GuestNames {
        device: None,
        find: Some(format!(
            "grep -l {serial} /sys/block/sd*/device/vpd_pg80 | cut -d / -f 4"
        )),
        by_id: vec![format!("ata-QEMU_HARDDISK_{}", link_text(serial))],
        by_path: vec![format!("pci-{address}-ata-{}.{unit}", port + 1)],
        scsi: None,
        queues: 1,
    }
}

/// Replaces characters that udev does not permit in link names.
fn link_text(text: &str) -> String {
    let escaped = text.chars().map(|c| match c {
        c if c.is_ascii_alphanumeric() || "#+-.:=@_".contains(c) => c,
        _ => '_',
    });
    escaped.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_continue_after_z() {
        let names = [0, 25, 26, 51, 52, 701, 702].map(|index| disk_letters("vd", index));
        assert_eq!(
            names,
            ["vda", "vdz", "vdaa", "vdaz", "vdba", "vdzz", "vdaaa"]
        );
    }

    #[test]
    fn luns_from_256_on_have_the_bits_of_their_addressing_method() {
        assert_eq!([255, 256, 16383].map(kernel_lun), [255, 0x4100, 0x7fff]);
    }
}
