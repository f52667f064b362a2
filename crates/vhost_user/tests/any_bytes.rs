//! For any bytes on the socket, a session neither panics nor waits endlessly nor leaves a queue behind.

mod support;

use std::sync::Arc;

use bdev::Disk;
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_device::VirtioDevice;

/// Start of a valid session: memory, size, addresses, interrupt, kick, enable, each for queue 0.
const SOUND: &[u8] = &[
    2, 0, 4, 5, 0, 7, 0, 16, 0, 9, 0, 0, 0, 0x00, 2, 0x00, 1, 16, 0, 13, 0, 21, 0, 12, 0,
];

#[test]
fn any_bytes_as_messages() {
    let rig = support::Rig::new(1);
    let disk = Arc::new(Disk::new("d", None, support::ram(1 << 20)).unwrap());
    let options = BlkOptions {
        name: "d".into(),
        queues: 2,
    };
    let device: Arc<dyn VirtioDevice> = Arc::new(BlkDevice::new(disk, options));
    let mut random = fastrand::Rng::with_seed(0x5eed);
    for round in 0..300 {
        let mut data = if round % 2 == 0 {
            SOUND.to_vec()
        } else {
            Vec::new()
        };
        data.extend((0..64).map(|_| random.u8(..)));
        vhost_user::fuzzing::messages(&device, &rig.pool, &data);
    }
}
