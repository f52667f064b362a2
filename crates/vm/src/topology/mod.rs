//! A guest's disks, described in words: `scsi:4x1,queues=2 blk:4 via=qemu`.
//!
//! [`Topology::parse`] parses the words and [`Plan::new`] resolves them. A plan can be written as the daemon's flags or TOML, QEMU's
//! command line, libvirt's XML, or JSON. All functions are pure: nothing is opened, created or started.

mod exports;
mod flags;
mod json;
mod libvirt;
mod names;
mod options;
mod parse;
mod pci;
mod plan;
mod qemu;
mod summary;
mod text;
mod toml;
mod words;

pub use exports::{ExportContent, KnownExport, KnownUnit};
pub use names::{GuestNames, kernel_lun};
pub(crate) use names::{of_blk as blk_names, of_scsi_at as scsi_names};
pub use options::{Kernel as GuestKernel, KnownDisk, PlanOptions, QemuVersion, SystemDisk};
pub use pci::{Budget, MachineType, PciAddress, Port, PortKind};
pub(crate) use plan::PORTAL_GROUP;
pub use plan::{DiskDevice, Medium, NodeSettings, Plan, PlannedDevice, PlannedDisk};
pub use qemu::QEMU;
pub use text::{qemu_value, shell_command, shell_word};
pub use words::{Aio, Backing, Group, Shape, Topology, TopologyError, Via};
