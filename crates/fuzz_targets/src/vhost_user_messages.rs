//! Feeds arbitrary bytes as the messages of a vhost-user front end with memory, rings and descriptors.
//!
//! The body is shared with a test of `vhost_user` and lists the rules.

use std::sync::{Arc, LazyLock};

use bdev::{Disk, Ram, RamOptions};
use reactor::{PollLimit, Pool, WorkerOptions};
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_device::VirtioDevice;

/// One worker and one device serve all inputs, because a session leaves no state.
static SERVED: LazyLock<(Arc<Pool>, Arc<dyn VirtioDevice>)> = LazyLock::new(|| {
    guest_memory::sigbus::install().expect("a handler");
    let options = WorkerOptions {
        count: 1,
        cpus: Vec::new(),
        poll: PollLimit::Never.into(),
    };
    let ram = RamOptions {
        size: 1 << 20,
        huge_pages: false,
        ..RamOptions::default()
    };
    let engine = Arc::new(Ram::create(ram).expect("a RAM disk"));
    let disk = Arc::new(Disk::new("d", None, engine).expect("a disk"));
    let options_blk = BlkOptions {
        name: "d".into(),
        queues: 2,
    };
    (
        Arc::new(Pool::start(&options).expect("a worker")),
        Arc::new(BlkDevice::new(disk, options_blk)),
    )
});

/// Runs a session with the messages in `data`.
pub fn run(data: &[u8]) {
    let (pool, device) = &*SERVED;
    vhost_user::fuzzing::messages(device, pool, data);
}
