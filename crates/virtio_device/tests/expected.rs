//! Prefetch hints to a disk: for each I/O of the batch, sent before the I/O ahead of it is submitted.

#[path = "../../bdev/tests/common/listening.rs"]
mod listening;

use std::sync::Arc;

use bdev::{BlockDevice, Disk, Null, NullOptions, PREFETCH_DISTANCE};
use guest_memory::{IoBuffer, Mapping, MemoryTable, RegionSpec};
use latency::{Clock, Labels};
use listening::Announcement::{self, Later, Next, Now};
use listening::{Announcements, Recording};
use reactor::{SourceId, Worker};
use uring::Ring;
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_device::{QueueSetup, VirtioDevice};
use virtqueue::driver::{DriverConfig, DriverQueue, RingLayout};

const MEMORY: usize = 1 << 20;
const HEADERS: u64 = 64 << 10;
const DATA: u64 = 128 << 10;

/// A queue with one disk, on a worker.
struct Rig {
    driver: DriverQueue,
    memory: Arc<Mapping>,
    source: SourceId,
}

impl Rig {
    fn on(worker: &mut Worker, device: Arc<dyn BlockDevice>) -> Rig {
        let spec = RegionSpec {
            guest_address: 0,
            size: MEMORY as u64,
            user_address: 0,
            file_offset: 0,
        };
        let memory = Mapping::anonymous(MEMORY).unwrap();
        let table = MemoryTable::default().with_mapping(spec, memory.clone());
        let table = table.unwrap();
        let layout = RingLayout::at(0, 64, false);
        let driver = DriverQueue::new(DriverConfig::new(layout), &table).unwrap();
        let disk = Arc::new(Disk::new("d0", None, device).unwrap());
        let (name, queues) = ("d0".into(), 1);
        let device = BlkDevice::new(disk, BlkOptions { name, queues });
        let setup = QueueSetup {
            inflight: None,
            log: None,
            index: 0,
            features: device.features(),
            config: layout.device_config(),
            memory: Arc::new(table),
            kick: None,
            call: None,
            error: None,
            enabled: true,
            on_broken: Arc::new(|_, why| panic!("queue broke: {why}")),
            labels: Labels::default(),
        };
        let make = device.queue(setup, worker.handle());
        let source = worker.add(|io, id| make(io, id).map(|built| built.source));
        Rig {
            driver,
            memory,
            source: source.unwrap(),
        }
    }

    /// Submits reads of these sectors; `None` submits a request without I/O.
    fn check_suppression(&mut self, sectors: &[Option<u64>]) {
        for (i, sector) in (0..).zip(sectors) {
            let mut header = [0; 16];
            match sector {
                Some(sector) => header[8..].copy_from_slice(&sector.to_le_bytes()),
                // VIRTIO_BLK_T_GET_ID
                None => header[0] = 8,
            }
            let (at, data) = (HEADERS + i * 64, DATA + i * 1024);
            IoBuffer::of_mapping(&self.memory, at as usize, 16).write_at(0, &header);
            let added = self
                .driver
                .add(&[(at, 16)], &[(data, 512), (data + 512, 1)], i);
            added.expect("room in the ring");
        }
        self.driver.publish();
    }

    fn answers(&mut self) -> usize {
        std::iter::from_fn(|| self.driver.pop_used()).count()
    }
}

#[test]
fn prefetch_hint_of_each_io_precedes_the_io_before_it() {
    let announced = Announcements::default();
    let device = Arc::new(Recording {
        inner: Arc::new(Null::create(NullOptions::default()).unwrap()),
        announced: announced.clone(),
    });
    let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
    let mut rig = Rig::on(&mut worker, device);
    rig.check_suppression(&[Some(70), Some(8), Some(33)]);
    worker.iterate_once();
    assert_eq!(rig.answers(), 3);
    let all = [Next(8), Now(70), Next(33), Now(8), Now(33)];
    assert_eq!(std::mem::take(&mut *announced.lock().unwrap()), all);
    // With more requests, the first also triggers a hint for the request [`PREFETCH_DISTANCE`] places behind it.
    rig.check_suppression(&[Some(9), Some(2), Some(3), Some(4), Some(5)]);
    worker.iterate_once();
    assert_eq!(rig.answers(), 5);
    let all = [
        [Next(2), Later(4), Now(9)].as_slice(),
        &[Next(3), Later(5), Now(2)],
        &[Next(4), Now(3), Next(5), Now(4), Now(5)],
    ];
    assert_eq!(PREFETCH_DISTANCE, 3);
    assert_eq!(
        std::mem::take(&mut *announced.lock().unwrap()),
        all.concat()
    );
    // A single request has no successor.
    rig.check_suppression(&[Some(5)]);
    worker.iterate_once();
    assert_eq!(std::mem::take(&mut *announced.lock().unwrap()), [Now(5)]);
    assert_eq!(rig.answers(), 1);
    // A request without I/O is answered even if a hint was sent for the old job of its slot.
    rig.check_suppression(&[Some(1), None, Some(2)]);
    worker.iterate_once();
    assert_eq!(rig.answers(), 3);
    let submitted: Vec<Announcement> = std::mem::take(&mut *announced.lock().unwrap());
    let submitted: Vec<&Announcement> = submitted.iter().filter(|h| matches!(h, Now(_))).collect();
    assert_eq!(submitted, [&Now(1), &Now(2)]);
}

#[test]
fn disks_without_prefetch_hints_are_served_beside_others() {
    let announced = Announcements::default();
    let recording = Arc::new(Recording {
        inner: Arc::new(Null::create(NullOptions::default()).unwrap()),
        announced: announced.clone(),
    });
    let null = Arc::new(Null::create(NullOptions::default()).unwrap());
    let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
    let mut deaf = Rig::on(&mut worker, null);
    let mut rig = Rig::on(&mut worker, recording);
    assert!(worker.io().wants_prefetch());
    deaf.check_suppression(&[Some(1), Some(2)]);
    rig.check_suppression(&[Some(3), Some(4)]);
    worker.iterate_once();
    assert_eq!((deaf.answers(), rig.answers()), (2, 2));
    assert_eq!(*announced.lock().unwrap(), [Next(4), Now(3), Now(4)]);
    worker.stop(rig.source, |_, _| ());
    worker.iterate_once();
    assert!(!worker.io().wants_prefetch());
    deaf.check_suppression(&[Some(1), Some(2)]);
    worker.iterate_once();
    assert_eq!(deaf.answers(), 2);
}
