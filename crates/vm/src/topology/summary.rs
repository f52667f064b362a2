//! A plan for users: every form under a heading, and the view of the guest.

use super::plan::{Medium, Plan, PlannedDisk};
use std::fmt::Write;

impl Plan {
    /// Returns all forms, as comments and commands for a shell.
    pub fn text(&self) -> String {
        let mut text = String::new();
        // Writing to a String cannot fail.
        let mut section = |title: &str, body: &str| {
            writeln!(text, "# --- {title} ---\n{body}").unwrap_or(());
        };
        if self.needs_daemon() {
            let title = match self.uses_running_daemon() {
                true => "for the running daemon",
                false => "the daemon",
            };
            section(title, &self.flags_text());
        }
        section("QEMU", &self.qemu_text());
        section("disks in the guest", &self.guest_text());
        section(
            "the same in other forms",
            "#   --format toml   the daemon's configuration file\n#   --format xml    libvirt's domain\n#   --format json   everything, machine-readable\n",
        );
        text
    }

    /// Returns names of the disks in the guest, use of PCI slots, and notes, as comments.
    pub fn guest_text(&self) -> String {
        let mut text = String::new();
        for disk in &self.disks {
            write!(text, "{}", self.disk_text(disk)).unwrap_or(());
        }
        writeln!(text, "# PCI: {}", self.budget).unwrap_or(());
        for note in &self.notes {
            writeln!(text, "# note: {note}").unwrap_or(());
        }
        text
    }

    fn disk_text(&self, disk: &PlannedDisk) -> String {
        let device = self.device_of(disk);
        let guest = &disk.guest;
        let name = guest.device.clone();
        let name = name.unwrap_or_else(|| "/dev/sd?".to_owned());
        let size = match disk.size {
            Some(size) => format!("{} MiB", size >> 20),
            None => "existing".to_owned(),
        };
        let location = match &guest.scsi {
            Some(address) => format!("SCSI {address} at PCI {}", device.address),
            None => format!("PCI {}", device.address),
        };
        let removable = if disk.removable { ", removable" } else { "" };
        let queues = guest.queues;
        let plural = if queues == 1 { "" } else { "s" };
        let mut text = format!(
            "# {:8} {name:10} {size}{removable}, {queues} queue{plural}, {location}\n",
            disk.name
        );
        let by_id = guest.by_id.iter().map(|link| format!("by-id/{link}"));
        let by_path = guest.by_path.iter().map(|link| format!("by-path/{link}"));
        for link in by_id.chain(by_path) {
            writeln!(text, "#          /dev/disk/{link}").unwrap_or(());
        }
        if guest.by_id.is_empty() && disk.medium != Medium::KernelTarget {
            let hint = format!("lunette disk identity {}", disk.name);
            writeln!(text, "#          /dev/disk/by-id: see `{hint}`").unwrap_or(());
        }
        if let (None, Some(find)) = (&guest.device, &guest.find) {
            writeln!(text, "#          find it with: {find}").unwrap_or(());
        }
        text
    }
}
