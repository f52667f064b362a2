//! A device with fewer features than negotiated: the driver does not negotiate again, and is served as far as the disk allows. Features are
//! those of virtio 1.3, 5.2.3.

mod support;

use std::io;
use std::path::Path;
use std::sync::Arc;

use bdev::{Attach, BlockDevice, IoChannel, Layer};
use block::DiskInfo;
use support::{Rig, connect, eventually, ram, start_blk};
use vhost_frontend::{BlkQueue, Error, FrontEnd, Range, request, status};

const RO: u64 = 1 << 5;
const BLK_SIZE: u64 = 1 << 6;
const CONFIG_WCE: u64 = 1 << 11;
const MQ: u64 = 1 << 12;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;

/// A device with features changed by a function.
struct Changed(Arc<dyn BlockDevice>, fn(&mut DiskInfo));

impl Layer for Changed {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.0
    }

    fn layer_kind(&self) -> &'static str {
        "changed"
    }

    fn layer_info(&self, mut inner: DiskInfo) -> DiskInfo {
        (self.1)(&mut inner);
        inner
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        self.0.attach(attach)
    }
}

fn changed(change: fn(&mut DiskInfo)) -> Arc<dyn BlockDevice> {
    Arc::new(Changed(ram(1 << 20), change))
}

fn set_features(front_end: &FrontEnd, features: u64) -> Result<(), Error> {
    front_end.acknowledged(request::SET_FEATURES, &features.to_ne_bytes(), &[])
}

/// Connects with the features that the device offers and `lost`.
fn connect_with(socket: &Path, lost: u64) -> FrontEnd {
    let front_end = connect(socket);
    set_features(&front_end, front_end.features() | lost).unwrap();
    front_end
}

/// Returns the statuses of a read, a write, a flush, a discard and a write-zeroes request.
fn statuses(queue: &mut BlkQueue) -> [u8; 5] {
    let range = Range {
        sector: 0,
        sectors: 8,
        flags: 0,
    };
    [
        queue.read(0, &mut [0; 512]).unwrap(),
        queue.write(0, &[1; 512]).unwrap(),
        queue.flush().unwrap(),
        queue.discard(&[range]).unwrap(),
        queue.write_zeroes(&[range]).unwrap(),
    ]
}

#[test]
fn disk_without_an_earlier_ability_serves_the_rest() {
    let rig = Rig::new(1);
    let read_only = changed(|info| {
        info.read_only = true;
        info.discard_granularity = None;
        info.write_zeroes = false;
    });
    let plain = changed(|info| {
        info.discard_granularity = None;
        info.write_zeroes = false;
    });
    let lost = CONFIG_WCE | DISCARD | WRITE_ZEROES | MQ | RO;
    for (name, device, expected) in [
        ("ro", read_only, [0, 1, 0, 1, 1]),
        ("plain", plain, [0, 0, 0, 2, 2]),
    ] {
        let socket = rig.serve(name, device, 1);
        let mut front_end = connect_with(&socket, lost);
        let mut queue = start_blk(&mut front_end, 0);
        assert_eq!(statuses(&mut queue), expected, "{name}");
        // The driver may still write the cache mode, and read the configuration space.
        if front_end.offered() & CONFIG_WCE == 0 {
            front_end.write_config(32, &[0]).unwrap();
        }
        assert_eq!(front_end.config(0, 8).unwrap(), (1u64 << 11).to_le_bytes());
        assert!(rig.is_connected(name));
    }
}

#[test]
fn queues_that_are_not_offered_any_more_serve_a_driver_that_has_them() {
    let rig = Rig::new(1);
    let (four, one) = (rig.serve_ram("four", 4), rig.serve_ram("one", 1));
    let mut front_end = connect_with(&one, MQ);
    for index in [0, 3, 255] {
        let mut queue = start_blk(&mut front_end, index);
        assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK, "{index}");
    }
    front_end.reset_device().unwrap();
    drop(front_end);
    // The in-flight region was created for four queues.
    let region = connect(&four).new_inflight(4, 128).unwrap();
    eventually("the end of the first session", || !rig.is_connected("one"));
    let mut front_end = connect(&one);
    front_end.give_inflight(&region).unwrap();
    let mut queue = start_blk(&mut front_end, 3);
    assert_eq!(queue.write(0, &[1; 512]).unwrap(), status::OK);
    assert!(front_end.stop_queue(4).is_err());
}

#[test]
fn session_continues_in_a_process_whose_device_offers_less() {
    let servers = [Rig::new(1), Rig::new(1)];
    let socket = servers[0].serve("d", ram(1 << 20), 3);
    servers[1].serve("d", changed(|info| info.read_only = true), 1);
    let mut front_end = connect(&socket);
    let mut queues = [0, 2].map(|index| start_blk(&mut front_end, index));
    for queue in &mut queues {
        assert_eq!(statuses(queue), [0; 5]);
    }
    for session in servers[0].server.hand_over_sessions() {
        servers[1].server.take_over_session(session).unwrap();
    }
    for queue in &mut queues {
        assert_eq!(statuses(queue), [0, 1, 0, 1, 1]);
    }
    assert!(servers[1].is_connected("d"));
}

#[test]
fn undefined_feature_is_refused() {
    let rig = Rig::new(1);
    let socket = rig.serve_ram("d", 1);
    let front_end = connect(&socket);
    let features = front_end.features();
    // VIRTIO_BLK_F_ZONED, VIRTIO_F_IN_ORDER, and reserved bits.
    for bit in [1 << 17, 1 << 35, 1 << 23, 1 << 63] {
        let refused = set_features(&front_end, features | bit);
        assert!(
            matches!(refused, Err(Error::Refused(_))),
            "{bit:#x}: {refused:?}"
        );
    }
    set_features(&front_end, features & !BLK_SIZE | RO).unwrap();
}
