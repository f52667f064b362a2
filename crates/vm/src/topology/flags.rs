//! A plan as the daemon's flags, or as commands for a running daemon.

use super::plan::{DiskDevice, Medium, Plan, PlannedDevice, PlannedDisk};
use super::text::{qemu_value, shell_command, shell_word};
use super::words::Via;
use std::path::Path;

/// Escapes a path: a comma is doubled, as in QEMU's options.
fn path_value(path: &Path) -> String {
    qemu_value(&path.display().to_string())
}

impl Plan {
    /// Returns the disks served by Lunette with their devices.
    pub(super) fn served(&self) -> impl Iterator<Item = (&PlannedDisk, &PlannedDevice)> {
        let disks = self.disks.iter();
        let disks = disks.map(|disk| (disk, self.device_of(disk)));
        disks.filter(|(_, device)| device.via == Via::Lunette)
    }

    /// Returns true if the plan uses a disk of a running daemon.
    pub fn uses_running_daemon(&self) -> bool {
        let mut disks = self.disks.iter();
        disks.any(|disk| disk.medium == Medium::Daemon)
    }

    /// Returns the arguments of `lunette serve`; empty without disks of Lunette. Disks of a running daemon are assumed to exist.
    pub fn daemon_flags(&self) -> Vec<String> {
        let mut flags = Vec::new();
        for (disk, _) in self.served() {
            if let Some(value) = disk_flag(disk) {
                flags.extend(["--disk".to_owned(), value]);
            }
        }
        for (index, device) in self.devices.iter().enumerate() {
            let Some(socket) = &device.socket else {
                continue;
            };
            let (option, name) = match device.is_scsi {
                true => ("--vhost-scsi", &device.id),
                false => ("--vhost-blk", &device.id),
            };
            flags.extend([option.to_owned(), format!("{name}:{}", path_value(socket))]);
            for disk in self.disks_of(index) {
                if let DiskDevice::Scsi { target, lun, .. } = disk.location {
                    let lun = format!("{}/{target}:{lun}={}", device.id, disk.name);
                    flags.extend(["--lun".to_owned(), lun]);
                }
            }
        }
        flags
    }

    /// Returns the command that serves the disks; for a running daemon, the commands that add the missing objects.
    pub fn flags_text(&self) -> String {
        if !self.needs_daemon() {
            return "# no disk is served by Lunette: no daemon is needed\n".to_owned();
        }
        if self.uses_running_daemon() {
            return self.commands();
        }
        let mut words = vec!["lunette".to_owned(), "serve".to_owned()];
        words.extend(self.daemon_flags());
        shell_command(&words)
    }

    fn commands(&self) -> String {
        let mut lines = Vec::new();
        let mut add = |words: &[&str]| {
            let words: Vec<String> = words.iter().map(|word| shell_word(word)).collect();
            lines.push(words.join(" "));
        };
        for (disk, _) in self.served() {
            if let Some(value) = disk_flag(disk) {
                add(&["lunette", "disk", "add", &value]);
            }
        }
        for (index, device) in self.devices.iter().enumerate() {
            let Some(socket) = &device.socket else {
                continue;
            };
            let kind = match device.is_scsi {
                true => "vhost-scsi",
                false => "vhost-blk",
            };
            let location = format!("{}:{}", device.id, path_value(socket));
            add(&["lunette", "export", "add", kind, &location]);
            for disk in self.disks_of(index) {
                if let DiskDevice::Scsi { target, lun, .. } = disk.location {
                    let address = format!("{target}:{lun}");
                    add(&["lunette", "lun", "add", &device.id, &address, &disk.name]);
                }
            }
        }
        lines.join("\n") + "\n"
    }
}

/// Returns `NAME=KIND:...` of a disk that the daemon creates.
fn disk_flag(disk: &PlannedDisk) -> Option<String> {
    let mut value = match &disk.medium {
        Medium::Ram { size } => format!("{}=ram:{size}", disk.name),
        Medium::File {
            path,
            size,
            is_tmpfs,
        } => {
            let cache = if *is_tmpfs { ",cache=writeback" } else { "" };
            format!("{}=file:{},size={size}{cache}", disk.name, path_value(path))
        }
        Medium::Block { path } | Medium::Existing { path, .. } => {
            format!("{}={}:{}", disk.name, disk.medium.kind(), path_value(path))
        }
        Medium::System(system) => {
            let kind = disk.medium.kind();
            format!("{}={kind}:{}", disk.name, path_value(&system.path))
        }
        Medium::Daemon | Medium::KernelTarget => return None,
    };
    if disk.removable {
        value.push_str(",removable");
    }
    if let Some(serial) = &disk.serial {
        value.push_str(&format!(",serial={serial}"));
    }
    if let Some(wwn) = disk.wwn {
        value.push_str(&format!(",wwn={wwn:016x}"));
    }
    Some(value)
}
