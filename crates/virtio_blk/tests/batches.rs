//! How many requests a turn takes: all that wait, or half of many that came at once after polling had found none.

use std::sync::Arc;

use backend::{Disk, Null, NullOptions};
use guest_memory::{IoBuffer, Mapping, MemoryTable, RegionSpec};
use reactor::Worker;
use timeline::Labels;
use virtio::{QueueSetup, VirtioDevice};
use virtio_blk::{BlkDevice, BlkOptions};
use virtqueue::driver::{DriverConfig, DriverQueue, RingLayout};

const MEMORY: usize = 1 << 20;
/// Where the one header lies that all requests use, and where data and statuses go.
const HEADER: u64 = 64 << 10;
const DATA: u64 = 128 << 10;

struct Rig {
    worker: Worker,
    driver: DriverQueue,
}

impl Rig {
    fn new() -> Rig {
        let spec = RegionSpec {
            guest_address: 0,
            size: MEMORY as u64,
            user_address: 0,
            file_offset: 0,
        };
        let memory = Mapping::anonymous(MEMORY).unwrap();
        // VIRTIO_BLK_T_IN, sector 0: zeroes.
        IoBuffer::of_mapping(&memory, HEADER as usize, 16).write_at(0, &[0; 16]);
        let table = MemoryTable::default().with_mapping(spec, memory).unwrap();
        let layout = RingLayout::at(0, 256, false);
        let driver = DriverQueue::new(DriverConfig::new(layout), &table).unwrap();
        let engine = Arc::new(Null::create(NullOptions::default()).unwrap());
        let disk = Arc::new(Disk::new("d0", None, engine).unwrap());
        let options = BlkOptions {
            name: "d0".into(),
            queues: 1,
        };
        let device = BlkDevice::new(disk, options);
        let setup = QueueSetup {
            inflight: None,
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
        let mut worker = Worker::standalone().unwrap();
        let make = device.queue(setup, worker.handle());
        worker
            .add(|io, id| make(io, id).map(|built| built.source))
            .unwrap();
        Rig { worker, driver }
    }

    fn ask(&mut self, requests: u64) {
        for i in 0..requests {
            let writable = [(DATA + i * 1024, 512), (DATA + i * 1024 + 512, 1)];
            let added = self.driver.add(&[(HEADER, 16)], &writable, i);
            added.expect("room in the ring");
        }
        self.driver.publish();
    }

    /// Answers of one turn.
    fn turn(&mut self) -> usize {
        self.worker.turn_now();
        std::iter::from_fn(|| self.driver.pop_used()).count()
    }
}

#[test]
fn many_at_once_after_a_wait_are_taken_by_halves() {
    let mut rig = Rig::new();
    assert_eq!(rig.turn(), 0);
    rig.ask(40);
    assert_eq!(rig.turn(), 20);
    // Those that come meanwhile wait behind the other half.
    rig.ask(20);
    assert_eq!(rig.turn(), 20);
    assert_eq!(rig.turn(), 20);
    assert_eq!(rig.turn(), 0);
}

#[test]
fn few_at_once_are_taken_at_once() {
    let mut rig = Rig::new();
    assert_eq!(rig.turn(), 0);
    rig.ask(31);
    assert_eq!(rig.turn(), 31);
}

#[test]
fn nothing_is_halved_while_there_is_always_something() {
    let mut rig = Rig::new();
    assert_eq!(rig.turn(), 0);
    rig.ask(8);
    assert_eq!(rig.turn(), 8);
    rig.ask(40);
    assert_eq!(rig.turn(), 40);
}

#[test]
fn a_half_that_comes_alone_is_not_halved_again() {
    let mut rig = Rig::new();
    assert_eq!(rig.turn(), 0);
    rig.ask(80);
    assert_eq!(rig.turn(), 40);
    assert_eq!(rig.turn(), 40);
    for _ in 0..3 {
        assert_eq!(rig.turn(), 0);
        rig.ask(40);
        assert_eq!(rig.turn(), 40);
    }
    // Both halves at once: they are told apart again.
    assert_eq!(rig.turn(), 0);
    rig.ask(80);
    assert_eq!(rig.turn(), 40);
    assert_eq!(rig.turn(), 40);
}

#[test]
fn a_driver_that_has_fewer_in_flight_now_is_served_by_halves_of_those() {
    let mut rig = Rig::new();
    assert_eq!(rig.turn(), 0);
    rig.ask(80);
    assert_eq!(rig.turn() + rig.turn(), 80);
    let mut turns = 0;
    loop {
        assert_eq!(rig.turn(), 0);
        rig.ask(36);
        turns += 1;
        if rig.turn() < 36 {
            break;
        }
        assert!(turns < 3000, "80 are never forgotten");
    }
    assert_eq!(rig.turn(), 36 - 57 / 2);
}
