//! Plan of a running daemon's exports: names, sockets and logical units are the daemon's.

use super::options::PlanOptions;
use super::pci::assign_addresses;
use super::plan::{Builder, DiskDevice, Medium, Plan};
use super::words::{Backing, Group, Shape, TopologyError, Via};
use std::path::PathBuf;

/// A vhost-user export of a running daemon.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownExport {
    /// Name of the export.
    pub name: String,
    /// Path of the vhost-user socket.
    pub socket: PathBuf,
    /// Maximum number of request queues; `None`: no limit.
    pub queues: Option<u32>,
    /// Disks of the export.
    pub shows: ExportContent,
}

/// Disks that an export presents to a guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportContent {
    /// One disk, by name.
    Disk(String),
    /// A controller with logical units.
    Units(Vec<KnownUnit>),
}

/// A logical unit of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownUnit {
    /// Target number.
    pub target: u32,
    /// Logical unit number.
    pub lun: u32,
    /// Name of the disk.
    pub disk: String,
}

impl KnownExport {
    /// Returns the equivalent group of a topology, for the plan builder.
    fn group(&self, cpus: u32) -> Group {
        let disks = match &self.shows {
            ExportContent::Disk(disk) => vec![disk.clone()],
            ExportContent::Units(units) => units.iter().map(|unit| unit.disk.clone()).collect(),
        };
        Group {
            word: self.name.clone(),
            shape: match &self.shows {
                ExportContent::Disk(_) => Shape::Blk { count: 1 },
                ExportContent::Units(units) => Shape::Scsi {
                    targets: units.len() as u32,
                    luns: 1,
                },
            },
            queues: self.queues.map(|queues| queues.min(cpus)),
            queue_size: None,
            cmd_per_lun: None,
            removable: 0,
            packed: false,
            indirect: true,
            via: Via::Lunette,
            backing: Backing::Daemon(disks),
            size: None,
            aio: None,
            ioeventfd: None,
            scsi_commands: None,
            vq_mapping: None,
            iothreads: None,
        }
    }
}

impl Plan {
    /// Creates the plan of a guest with these exports, in this order.
    ///
    /// # Errors
    /// The reason why the plan is impossible.
    pub fn of_exports(
        exports: &[KnownExport],
        options: PlanOptions,
    ) -> Result<Plan, TopologyError> {
        super::plan::check_options(&options)?;
        let mut words: Vec<(String, u32)> = Vec::new();
        if options.system.is_some() {
            words.push(("--system".to_owned(), 1));
        }
        words.extend(exports.iter().map(|export| (export.name.clone(), 1)));
        let layout = assign_addresses(options.machine, &words, options.reserved.len())?;
        let cpus = options.cpus;
        let mut builder = Builder::new(options, &layout);
        builder.add_system();
        for export in exports {
            if builder.has_device(&export.name) {
                return Err(TopologyError::new(
                    &export.name,
                    "two devices have this name",
                    "give each export once, and none with the name system if --system is given",
                ));
            }
            let group = export.group(cpus);
            let device = builder.device(export.name.clone(), &group, false);
            builder.set_socket(device, export.socket.clone());
            match &export.shows {
                ExportContent::Disk(disk) => {
                    let location = DiskDevice::Blk { device };
                    builder.disk(disk.clone(), Medium::Daemon, &group, location);
                }
                ExportContent::Units(units) => {
                    for unit in units {
                        let location = DiskDevice::Scsi {
                            device,
                            target: unit.target,
                            lun: unit.lun,
                        };
                        builder.disk(unit.disk.clone(), Medium::Daemon, &group, location);
                    }
                    builder.end_controller();
                }
            }
        }
        builder.finish(layout)
    }
}
