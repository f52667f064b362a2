//! A plan as the daemon's configuration file.

use super::plan::{DiskDevice, Medium, Plan, PlannedDisk};
use std::fmt::Write;
use std::path::Path;

/// Formats a TOML basic string.
pub(crate) fn text(value: &str) -> String {
    let mut quoted = String::from("\"");
    for c in value.chars() {
        match c {
            '"' | '\\' => quoted.extend(['\\', c]),
            c if c.is_control() => quoted.push_str(&format!("\\u{:04X}", u32::from(c))),
            c => quoted.push(c),
        }
    }
    quoted.push('"');
    quoted
}

pub(crate) fn path_text(path: &Path) -> String {
    text(&path.display().to_string())
}

impl Plan {
    /// Returns the configuration file that serves the disks.
    pub fn toml(&self) -> String {
        if !self.needs_daemon() {
            return "# no disk is served by Lunette: no daemon is needed\n".to_owned();
        }
        let mut tables: Vec<String> = self
            .served()
            .filter_map(|(disk, _)| disk_table(disk))
            .collect();
        for (index, device) in self.devices.iter().enumerate() {
            let Some(socket) = &device.socket else {
                continue;
            };
            let socket = path_text(socket);
            if !device.is_scsi {
                tables.push(format!(
                    "[[vhost_blk]]\ndisk = {}\nsocket = {socket}\n",
                    text(&device.id)
                ));
                continue;
            }
            let luns = self.disks_of(index).map(|disk| {
                let DiskDevice::Scsi { target, lun, .. } = disk.location else {
                    return String::new();
                };
                format!(
                    "  {{ target = {target}, lun = {lun}, disk = {} }},\n",
                    text(&disk.name)
                )
            });
            let luns: String = luns.collect();
            tables.push(format!(
                "[[vhost_scsi]]\nname = {}\nsocket = {socket}\nlun = [\n{luns}]\n",
                text(&device.id)
            ));
        }
        tables.join("\n")
    }
}

fn disk_table(disk: &PlannedDisk) -> Option<String> {
    let mut table = format!("[[disk]]\nname = {}\n", text(&disk.name));
    // Writing to a String cannot fail.
    let mut line = |key: &str, value: String| writeln!(table, "{key} = {value}").unwrap_or(());
    match &disk.medium {
        Medium::Ram { size } => {
            line("backend", text("ram"));
            line("size", size.to_string());
        }
        Medium::File {
            path,
            size,
            is_tmpfs,
        } => {
            line("backend", text("file"));
            line("path", path_text(path));
            line("size", size.to_string());
            if *is_tmpfs {
                line("cache", text("writeback"));
            }
        }
        Medium::Block { path } | Medium::Existing { path, .. } => {
            line("backend", text(disk.medium.kind()));
            line("path", path_text(path));
        }
        Medium::System(system) => {
            line("backend", text(disk.medium.kind()));
            line("path", path_text(&system.path));
        }
        Medium::Daemon | Medium::KernelTarget => return None,
    }
    if disk.removable {
        line("removable", "true".to_owned());
    }
    if let Some(serial) = &disk.serial {
        line("serial", text(serial));
    }
    if let Some(wwn) = disk.wwn {
        line("wwn", text(&format!("{wwn:016x}")));
    }
    Some(table)
}
