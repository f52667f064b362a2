//! A panic of a device ends the affected session only.

mod support;

use std::sync::Arc;

use bdev::Disk;
use reactor::{SourceId, WorkerHandle};
use support::{Rig, connect, eventually, start_blk};
use vhost_frontend::{Error, Verifier};
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_device::{ConfigError, QueueMaker, QueueSetup, VirtioDevice};

/// A device that panics on a write to its configuration space.
struct Defective(BlkDevice);

impl VirtioDevice for Defective {
    fn name(&self) -> &str {
        self.0.name()
    }

    fn features(&self) -> u64 {
        self.0.features()
    }

    fn queue_count(&self) -> u16 {
        self.0.queue_count()
    }

    fn config(&self) -> Vec<u8> {
        self.0.config()
    }

    fn write_config(&self, _offset: u32, _data: &[u8]) -> Result<(), ConfigError> {
        panic!("a defect, on purpose")
    }

    fn packed(&self) -> bool {
        self.0.packed()
    }

    fn reset(&self) {
        self.0.reset();
    }

    fn queue(&self, setup: QueueSetup, worker: &WorkerHandle) -> QueueMaker {
        self.0.queue(setup, worker)
    }

    fn queue_stopped(&self, index: u16) {
        self.0.queue_stopped(index);
    }

    fn wait_for_release(&self) {
        self.0.wait_for_release();
    }

    fn queue_placed(&self, index: u16, worker: &WorkerHandle, source: SourceId) {
        self.0.queue_placed(index, worker, source);
    }
}

#[test]
fn session_that_panics_is_over_and_the_next_front_end_is_served() {
    let rig = Rig::new(1);
    let disk = Arc::new(Disk::new("d", None, support::ram(1 << 20)).unwrap());
    let options = BlkOptions {
        name: "d".into(),
        queues: 1,
    };
    let socket = rig.socket("d");
    let device = Defective(BlkDevice::new(disk, options));
    rig.server.listen(&socket, Arc::new(device)).unwrap();
    for _ in 0..3 {
        let mut front_end = connect(&socket);
        let mut queue = start_blk(&mut front_end, 0);
        Verifier::new(0, 16, 1).round(&mut queue, 8).unwrap();
        let written = front_end.write_config(32, &[0]);
        assert!(matches!(written, Err(Error::Closed)), "{written:?}");
        eventually("its queue is gone", || rig.queues_running() == 0);
        eventually("there is room for the next", || !rig.is_connected("d"));
    }
}
