//! Devices in this process for driver tests.

#![allow(dead_code, reason = "each test program uses a part of it")]

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use bdev::{BlockDevice, Disk};
use bench::driver::{DriverOptions, Subject};
use bench::job::{Job, apply};
use bench::run::{Outcome, Plan, Progress, run};
use latency::Clock;
use reactor::{PollLimit, Pool, WorkerOptions};
use scsi::MemoryStore;
use scsi_exec::Units;
use vhost_user::Server;
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_device::VirtioDevice;
use virtio_scsi::{ScsiDevice, ScsiOptions};

/// A server with its workers and a folder for its sockets.
pub struct Rig {
    // Dropped in this order: sessions end before their workers.
    server: Server,
    _pool: Arc<Pool>,
    directory: tempfile::TempDir,
}

impl Rig {
    pub fn new() -> Rig {
        let options = WorkerOptions {
            count: 1,
            cpus: Vec::new(),
            poll: PollLimit::Micros(20).into(),
        };
        let pool = Arc::new(Pool::start(&options).unwrap());
        Rig {
            server: Server::start(pool.clone()).unwrap(),
            _pool: pool,
            directory: tempfile::tempdir().unwrap(),
        }
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// Serves a device on a socket of that name.
    pub fn listen(&self, name: &str, device: Arc<dyn VirtioDevice>) -> PathBuf {
        let socket = self.path(name);
        self.server.listen(&socket, device).unwrap();
        socket
    }

    /// Serves a block device as virtio-blk.
    pub fn blk(&self, device: Arc<dyn BlockDevice>, queues: u16) -> Subject {
        let disk = Arc::new(Disk::new("d0", None, device).unwrap());
        let options = BlkOptions {
            name: "d0".into(),
            queues,
        };
        let socket = self.listen("blk", Arc::new(BlkDevice::new(disk, options)));
        Subject::parse(&format!("vhost-user-blk:{}", socket.display())).unwrap()
    }

    /// Serves a block device as LUN 5 of target 3.
    pub fn scsi(&self, device: Arc<dyn BlockDevice>, queues: u16) -> Subject {
        let disk = Arc::new(Disk::new("d1", None, device).unwrap());
        let units = Units::new(Box::<MemoryStore>::default());
        let options = ScsiOptions {
            name: "c0".into(),
            queues,
        };
        let device = ScsiDevice::new(units, options);
        device.add_lun(3, 5, &disk).unwrap();
        let socket = self.listen("scsi", Arc::new(device));
        Subject::parse(&format!("vhost-user-scsi:{}:3:5", socket.display())).unwrap()
    }
}

/// Creates a job from options.
pub fn job(options: &[(&str, &str)]) -> Job {
    let mut job = Job::default();
    for (option, value) in options {
        apply(&mut job, option, Some(value)).unwrap_or_else(|e| panic!("{option}: {e}"));
    }
    job
}

/// Creates a plan with one turn per subject.
pub fn plan(subjects: Vec<Subject>, jobs: Vec<Job>, driver: DriverOptions) -> Plan {
    Plan {
        subjects,
        jobs,
        driver,
        ..Plan::default()
    }
}

pub fn outcome(plan: &Plan) -> Outcome {
    try_outcome(plan).unwrap_or_else(|e| panic!("{e:#}"))
}

pub fn try_outcome(plan: &Plan) -> anyhow::Result<Outcome> {
    let interrupted = Arc::new(AtomicBool::new(false));
    run(plan, &Clock::new(), &interrupted, &Progress::silent())
}
