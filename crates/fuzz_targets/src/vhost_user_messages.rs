//! Parses arbitrary bytes as a vhost-user message, and feeds them as the messages of a front end with memory, rings and descriptors.
//!
//! The body of the second part is shared with a test of `vhost_user` and lists the rules.

use std::os::fd::OwnedFd;
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

/// Parses a message and encodes it again. The first byte is the number of descriptors.
fn parse(data: &[u8]) {
    let Some((count, bytes)) = data.split_first() else {
        return;
    };
    let null = std::fs::File::open("/dev/null").expect("a descriptor");
    let clone = |_| null.try_clone().expect("a descriptor").into();
    let fds: Vec<OwnedFd> = (0..count % 34).map(clone).collect();
    if let Ok(message) = vhost_user_wire::parse(bytes, fds) {
        let (encoded, fds) = message.encode(0);
        let again = vhost_user_wire::parse(&encoded, fds).expect("a valid message");
        assert_eq!(again.encode(0).0, encoded);
    }
}

/// Parses a message from `data`, then runs a session with the messages in `data`.
pub fn run(data: &[u8]) {
    parse(data);
    let (pool, device) = &*SERVED;
    vhost_user::fuzzing::messages(device, pool, data);
}
