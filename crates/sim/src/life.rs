//! One life of the daemon: its workers, disks and exports, from start to stop or kill.

use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use bdev::{
    BlockDevice, CacheMode, Disk, FaultPlan, Faulty, File, FileOptions, Image, ImageOptions, Ram,
    RamOptions,
};
use iscsi_target::{DemoMode, Portal, ServerLimits, SimulatedServer, TargetOptions};
use latency::Clock;
use reactor::Worker;
use scsi_exec::Units;
use uring::Ring;
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_scsi::{ScsiDevice, ScsiOptions};

use crate::clients::initiator::TARGET;
use crate::random::Random;

pub const WORKERS: usize = 2;
/// Queues of a virtio-blk device: one per worker, and one with a hostile driver.
pub const BLK_QUEUES: u16 = WORKERS as u16 + 1;
const STATE_RAM_BLOCKS: u64 = 64;

/// Storage type of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lies {
    Ram,
    File,
    Image,
}

/// Configuration of a disk.
pub struct DiskPlan {
    pub lies: Lies,
    pub path: PathBuf,
    /// External data file of an image.
    pub data_file: Option<DataFile>,
    pub cache: CacheMode,
    /// Content of unallocated clusters of an image.
    pub below: Vec<u8>,
    /// Backing chain from external snapshots.
    pub lower: Vec<Lower>,
}

/// A former top image of a disk, now in its backing chain.
pub struct Lower {
    pub path: PathBuf,
    pub data_file: Option<DataFile>,
    pub is_image: bool,
}

pub struct DataFile {
    pub path: PathBuf,
    /// The data file is also a valid raw disk.
    pub is_raw: bool,
}

impl DiskPlan {
    pub fn files(&self) -> impl Iterator<Item = &Path> {
        let own = (self.lies != Lies::Ram).then_some(self.path.as_path());
        let lower = self.lower.iter();
        let data_files = lower.clone().map(|lower| &lower.data_file);
        let data_files = std::iter::once(&self.data_file).chain(data_files);
        own.into_iter()
            .chain(data_files.flatten().map(|file| file.path.as_path()))
            .chain(lower.map(|lower| lower.path.as_path()))
    }
}

pub struct Life {
    pub workers: Vec<Worker>,
    pub disks: Vec<Arc<Disk>>,
    pub blk: Vec<Arc<BlkDevice>>,
    pub scsi: Arc<ScsiDevice>,
    pub server: Rc<SimulatedServer>,
    units: Arc<Units>,
}

fn open(plan: &DiskPlan) -> Arc<dyn BlockDevice> {
    let path: &Path = &plan.path;
    match plan.lies {
        Lies::Ram => {
            let options = RamOptions {
                size: STATE_RAM_BLOCKS * crate::model::BLOCK as u64,
                huge_pages: false,
                ..RamOptions::default()
            };
            let ram = Ram::create(options).expect("memory for a disk");
            // Its blocks are larger than the disk's, so most writes are read-modify-writes.
            Arc::new(Faulty::new(Arc::new(ram), FaultPlan::default()).with_alignment(4096))
        }
        Lies::File => {
            let opened = File::open(FileOptions {
                cache: plan.cache,
                ..FileOptions::new(path)
            });
            Arc::new(opened.unwrap_or_else(|error| panic!("cannot open a raw file: {error}")))
        }
        Lies::Image => {
            let opened = Image::open(&ImageOptions {
                cache: plan.cache,
                trusts_name: true,
                named_files: bdev::NamedFiles::Any,
                ..ImageOptions::new(path)
            });
            Arc::new(opened.unwrap_or_else(|error| panic!("cannot open an image: {error}")))
        }
    }
}

impl Life {
    pub fn begin(plans: &[DiskPlan], clock: &Clock, random: &mut Random) -> Life {
        let worker = |_| {
            let by = clock.clone();
            let ring = Ring::simulated(random.next(), move || by.elapsed());
            Worker::standalone(ring, clock.clone()).expect("a worker without a kernel")
        };
        let workers: Vec<Worker> = (0..WORKERS).map(worker).collect();
        let disks: Vec<Arc<Disk>> = plans
            .iter()
            .enumerate()
            .map(|(number, plan)| {
                let disk = Disk::new(&format!("d{number}"), None, open(plan));
                Arc::new(disk.unwrap_or_else(|error| panic!("cannot create a disk: {error}")))
            })
            .collect();
        let units = Units::new(Box::<scsi::MemoryStore>::default());
        let blk = disks.iter().enumerate().map(|(number, disk)| {
            let options = BlkOptions {
                name: format!("b{number}"),
                queues: BLK_QUEUES,
            };
            Arc::new(BlkDevice::new(disk.clone(), options))
        });
        let blk = blk.collect();
        let options = ScsiOptions {
            name: "s0".to_owned(),
            queues: WORKERS as u16,
        };
        let scsi = Arc::new(ScsiDevice::new(units.clone(), options));
        for (number, disk) in disks.iter().enumerate() {
            let added = scsi.add_lun(number as u8, 0, disk);
            added.expect("a free slot");
        }
        let server = server(&units, &disks);
        Life {
            workers,
            disks,
            blk,
            scsi,
            server: Rc::new(server),
            units,
        }
    }

    /// Notifies every transport of a new size.
    pub fn notify_resized(&self, disk: &Arc<Disk>) {
        if let Some(unit) = self.units.known(disk) {
            unit.update((*disk.info()).clone());
        }
    }

    /// Stops the daemon in order: ends all exports, then closes the disks.
    pub fn stop(self, mut pass_time: impl FnMut(u64)) {
        let Life {
            mut workers,
            disks,
            blk,
            scsi,
            server,
            units,
        } = self;
        server.dismiss();
        for round in 0.. {
            assert!(
                round < 10_000,
                "the daemon does not stop: connections remain"
            );
            for worker in &mut workers {
                worker.iterate_once();
            }
            bdev::stepped::step_image_owners();
            pass_time(1_000_000);
            if server.connections() == 0 {
                break;
            }
        }
        for worker in &mut workers {
            for disk in &disks {
                worker.close_disk(disk);
            }
        }
        for _ in 0..200 {
            for worker in &mut workers {
                worker.iterate_once();
            }
            bdev::stepped::step_image_owners();
            // Stuck I/O has completed by then.
            pass_time(500_000_000);
        }
        for worker in &mut workers {
            let left = worker.io().ring().in_flight();
            assert_eq!(
                left, 0,
                "operations are in flight on a ring after the daemon's stop"
            );
        }
        drop((workers, blk, scsi, server, units, disks));
        for round in 0.. {
            bdev::stepped::step_image_owners();
            if bdev::stepped::image_owners() == 0 {
                break;
            }
            assert!(round < 100, "an image is not closed: it still has a user");
        }
    }

    /// Kills the daemon: nothing is closed.
    pub fn kill(self) {
        bdev::stepped::kill_image_owners();
        drop(self);
        bdev::stepped::kill_image_owners();
    }
}

fn server(units: &Arc<Units>, disks: &[Arc<Disk>]) -> SimulatedServer {
    let address = "127.0.0.1:3260".parse().expect("an address");
    let options = TargetOptions {
        name: TARGET.to_owned(),
        portals: vec![Portal { address, group: 1 }],
        demo_mode: DemoMode::ReadWrite,
        ..TargetOptions::default()
    };
    let luns: Vec<_> = disks
        .iter()
        .enumerate()
        .map(|(lun, disk)| (lun as u16, disk.clone()))
        .collect();
    let server = SimulatedServer::new(units.clone(), ServerLimits::default(), options, &luns);
    server.expect("a valid target")
}
