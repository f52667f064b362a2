//! Batch sizes: all waiting chains, half of many that arrive at once after an idle poll, or a few for a sleeping driver. Also interrupts
//! for a driver that has stopped polling.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use bdev::{Disk, Null, NullOptions};
use guest_memory::{IoBuffer, Mapping, MemoryTable, RegionSpec};
use latency::{Clock, Labels};
use reactor::{SourceId, Worker};
use rustix::event::{EventfdFlags, eventfd};
use scsi::MemoryStore;
use scsi_exec::Units;
use uring::Ring;
use virtio_blk::{BlkDevice, BlkOptions};
use virtio_device::{QueueSetup, VirtioDevice};
use virtio_scsi::{ScsiDevice, ScsiOptions};
use virtqueue::QueueConfig;
use virtqueue::driver::{DriverConfig, DriverQueue, RingLayout};

const MEMORY: usize = 1 << 20;
/// Address of the header that all requests share, and of data and statuses.
const HEADER: u64 = 64 << 10;
const DATA: u64 = 128 << 10;

/// Device type, with its request format.
#[derive(Clone, Copy, PartialEq)]
enum Transport {
    Blk,
    Scsi,
}

impl Transport {
    /// Creates a device with one disk. Returns it with the index of its first request queue.
    fn device(self, disk: Arc<Disk>) -> (Box<dyn VirtioDevice>, u16) {
        let queues = 1;
        if self == Transport::Blk {
            let name = "d0".into();
            return (
                Box::new(BlkDevice::new(disk, BlkOptions { name, queues })),
                0,
            );
        }
        let units = Units::new(Box::<MemoryStore>::default());
        let name = "c0".into();
        let device = ScsiDevice::new(units, ScsiOptions { name, queues });
        device.add_lun(0, 0, &disk).unwrap();
        (Box::new(device), 2)
    }

    /// Returns the header of a read of sector 0.
    fn header(self) -> Vec<u8> {
        if self == Transport::Blk {
            // VIRTIO_BLK_T_IN, sector 0: zeroes.
            return vec![0; 16];
        }
        let mut header = vec![0; 51];
        header[..4].copy_from_slice(&[1, 0, 0x40, 0]);
        // READ(10) of one block.
        header[19..29].copy_from_slice(&[0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        header
    }

    /// Returns the device-writable descriptors in the 1 KiB at `at`. A SCSI response precedes the data (virtio 1.3, 5.6.6.1).
    fn writable(self, at: u64) -> [(u64, u32); 2] {
        match self {
            Transport::Blk => [(at, 512), (at + 512, 1)],
            Transport::Scsi => [(at, 108), (at + 512, 512)],
        }
    }
}

struct Rig {
    transport: Transport,
    worker: Worker,
    source: SourceId,
    driver: DriverQueue,
    call: OwnedFd,
}

impl Rig {
    /// Creates a virtio-blk driver that polls.
    fn new() -> Rig {
        Rig::with(Transport::Blk, false, false, false)
    }

    /// Creates a virtio-blk driver that sleeps until it is interrupted.
    fn sleeping(packed: bool) -> Rig {
        Rig::with(Transport::Blk, packed, true, false)
    }

    fn with(transport: Transport, packed: bool, sleeps: bool, event_idx: bool) -> Rig {
        let call = eventfd(0, EventfdFlags::NONBLOCK).unwrap();
        let spec = RegionSpec {
            guest_address: 0,
            size: MEMORY as u64,
            user_address: 0,
            file_offset: 0,
        };
        let memory = Mapping::anonymous(MEMORY).unwrap();
        let header = transport.header();
        IoBuffer::of_mapping(&memory, HEADER as usize, header.len()).write_at(0, &header);
        let table = MemoryTable::default().with_mapping(spec, memory).unwrap();
        let layout = RingLayout::at(0, 256, packed);
        let driver = DriverConfig {
            event_idx,
            ..DriverConfig::new(layout)
        };
        let driver = DriverQueue::new(driver, &table).unwrap();
        let device = Arc::new(Null::create(NullOptions::default()).unwrap());
        let disk = Arc::new(Disk::new("d0", None, device).unwrap());
        let (device, index) = transport.device(disk);
        let setup = QueueSetup {
            inflight: None,
            log: None,
            index,
            features: device.features(),
            config: QueueConfig {
                event_idx,
                ..layout.device_config()
            },
            memory: Arc::new(table),
            kick: None,
            call: sleeps.then(|| call.try_clone().unwrap()),
            error: None,
            enabled: true,
            on_broken: Arc::new(|_, why| panic!("queue broke: {why}")),
            labels: Labels::default(),
        };
        let mut worker = Worker::standalone(Ring::new(64).unwrap(), Clock::new()).unwrap();
        let make = device.queue(setup, worker.handle());
        let source = worker
            .add(|io, id| make(io, id).map(|built| built.source))
            .unwrap();
        Rig {
            transport,
            worker,
            source,
            driver,
            call,
        }
    }

    fn check_suppression(&mut self, requests: u64) {
        for i in 0..requests {
            let readable = [(HEADER, self.transport.header().len() as u32)];
            let writable = self.transport.writable(DATA + i * 1024);
            let added = self.driver.add(&readable, &writable, i);
            added.expect("room in the ring");
        }
        self.driver.publish();
    }

    /// Runs one iteration and returns the number of answers.
    fn iterate(&mut self) -> usize {
        self.worker.iterate_once();
        std::iter::from_fn(|| self.driver.pop_used()).count()
    }

    /// Returns the number of interrupts since the last call.
    fn interrupts(&mut self) -> u64 {
        let mut count = [0; 8];
        match rustix::io::read(&self.call, &mut count) {
            Ok(_) => u64::from_ne_bytes(count),
            Err(_) => 0,
        }
    }
}

#[test]
fn many_at_once_after_a_wait_are_taken_by_halves() {
    let mut rig = Rig::new();
    assert_eq!(rig.iterate(), 0);
    rig.check_suppression(40);
    assert_eq!(rig.iterate(), 20);
    // Newly arrived chains wait behind the other half.
    rig.check_suppression(20);
    assert_eq!(rig.iterate(), 20);
    assert_eq!(rig.iterate(), 20);
    assert_eq!(rig.iterate(), 0);
}

#[test]
fn few_at_once_are_taken_at_once() {
    for (transport, packed) in [
        (Transport::Blk, false),
        (Transport::Scsi, false),
        (Transport::Blk, true),
    ] {
        let mut rig = Rig::with(transport, packed, false, false);
        // Consumes the unit attentions of a new unit and other one-time responses.
        rig.check_suppression(1);
        assert_eq!(rig.iterate(), 1);
        assert_eq!(rig.iterate(), 0);
        rig.check_suppression(7);
        assert_eq!(rig.iterate(), 7);
        assert_eq!(rig.iterate(), 0);
        rig.check_suppression(8);
        assert_eq!((rig.iterate(), rig.iterate()), (4, 4));
    }
}

#[test]
fn growing_depth_is_not_served_by_the_old_batch_size() {
    let mut rig = Rig::new();
    assert_eq!(rig.iterate(), 0);
    rig.check_suppression(16);
    assert_eq!(rig.iterate(), 8);
    // Arrives before the next idle poll: only the other half keeps the old batch size.
    rig.check_suppression(60);
    assert_eq!((rig.iterate(), rig.iterate()), (8, 60));
    assert_eq!(rig.iterate(), 0);
    rig.check_suppression(60);
    assert_eq!((rig.iterate(), rig.iterate()), (30, 30));
}

#[test]
fn nothing_is_halved_while_there_is_always_something() {
    let mut rig = Rig::new();
    assert_eq!(rig.iterate(), 0);
    rig.check_suppression(7);
    assert_eq!(rig.iterate(), 7);
    rig.check_suppression(40);
    assert_eq!(rig.iterate(), 40);
}

#[test]
fn a_half_that_comes_alone_is_not_halved_again() {
    let mut rig = Rig::new();
    assert_eq!(rig.iterate(), 0);
    rig.check_suppression(80);
    assert_eq!(rig.iterate(), 40);
    assert_eq!(rig.iterate(), 40);
    for _ in 0..3 {
        assert_eq!(rig.iterate(), 0);
        rig.check_suppression(40);
        assert_eq!(rig.iterate(), 40);
    }
    // Both halves at once: they are split again.
    assert_eq!(rig.iterate(), 0);
    rig.check_suppression(80);
    assert_eq!(rig.iterate(), 40);
    assert_eq!(rig.iterate(), 40);
}

#[test]
fn a_driver_that_has_fewer_in_flight_now_is_served_by_halves_of_those() {
    let mut rig = Rig::new();
    assert_eq!(rig.iterate(), 0);
    rig.check_suppression(80);
    assert_eq!(rig.iterate() + rig.iterate(), 80);
    let mut iterations = 0;
    loop {
        assert_eq!(rig.iterate(), 0);
        rig.check_suppression(36);
        iterations += 1;
        if rig.iterate() < 36 {
            break;
        }
        assert!(iterations < 3000, "80 are never forgotten");
    }
    assert_eq!(rig.iterate(), 36 - 57 / 2);
}

#[test]
fn sleeping_driver_is_woken_by_the_first_answers() {
    for packed in [false, true] {
        let mut rig = Rig::sleeping(packed);
        assert_eq!(rig.iterate(), 0);
        rig.check_suppression(7);
        assert_eq!(rig.iterate(), 7, "nothing is known of it");
        assert_eq!(rig.interrupts(), 1);
        for _ in 0..3 {
            assert_eq!(rig.iterate(), 0);
            rig.driver.enable_interrupts();
            rig.check_suppression(7);
            assert_eq!(rig.iterate(), 2);
            assert_eq!(rig.interrupts(), 1);
            rig.driver.disable_interrupts();
            assert_eq!(rig.iterate(), 5);
            assert_eq!(rig.interrupts(), 0);
        }
    }
}

#[test]
fn a_driver_that_has_begun_to_poll_is_given_all_at_once() {
    let mut rig = Rig::sleeping(false);
    assert_eq!(rig.iterate(), 0);
    rig.check_suppression(7);
    assert_eq!((rig.iterate(), rig.interrupts()), (7, 1));
    rig.driver.disable_interrupts();
    assert_eq!(rig.iterate(), 0);
    rig.check_suppression(7);
    assert_eq!((rig.iterate(), rig.iterate(), rig.interrupts()), (2, 5, 0));
    assert_eq!(rig.iterate(), 0);
    rig.check_suppression(7);
    assert_eq!((rig.iterate(), rig.interrupts()), (7, 0));
}

/// Creates a driver that has polled long enough for deferred suppression checks. It has one request in flight.
fn polled_for_long(transport: Transport, packed: bool) -> Rig {
    // With VIRTIO_F_EVENT_IDX, only answers after the driver's request for an interrupt cause one.
    let mut rig = Rig::with(transport, packed, true, true);
    rig.driver.disable_interrupts();
    for _ in 0..200 {
        rig.check_suppression(1);
        assert_eq!(rig.iterate(), 1);
        rig.iterate();
    }
    rig.interrupts();
    rig.check_suppression(1);
    rig
}

/// Each transport with each ring layout.
const RINGS: [(Transport, bool); 4] = [
    (Transport::Blk, false),
    (Transport::Blk, true),
    (Transport::Scsi, false),
    (Transport::Scsi, true),
];

#[test]
fn driver_that_stops_polling_is_interrupted_on_an_idle_queue() {
    for (transport, packed) in RINGS {
        let mut rig = polled_for_long(transport, packed);
        assert!(!rig.driver.enable_interrupts());
        let mut iterate = || {
            rig.worker.iterate_once();
            rig.interrupts()
        };
        let interrupted = (0..1_000_000)
            .map(|_| iterate())
            .find(|interrupted| *interrupted > 0);
        assert_eq!(interrupted, Some(1));
        assert_eq!(rig.iterate(), 1);
        // From now on the check is immediate.
        rig.driver.enable_interrupts();
        rig.check_suppression(1);
        assert_eq!((rig.iterate(), rig.interrupts()), (1, 1));
    }
}

#[test]
fn a_driver_that_goes_to_sleep_is_interrupted_while_others_poll() {
    for (transport, packed) in RINGS {
        let mut rig = polled_for_long(transport, packed);
        assert!(!rig.driver.enable_interrupts());
        // Takes the answers without asking for an interrupt. The earlier request for one stays valid.
        let mut iterate = || {
            rig.worker.iterate_once();
            while rig.driver.pop_used().is_some() {}
            rig.check_suppression(1);
            rig.interrupts()
        };
        let interrupted = (0..1_000)
            .map(|_| iterate())
            .find(|interrupted| *interrupted > 0);
        assert_eq!(interrupted, Some(1));
    }
}

#[test]
fn driver_that_stops_polling_is_interrupted_at_queue_end() {
    for (transport, packed) in RINGS {
        let mut rig = polled_for_long(transport, packed);
        assert!(!rig.driver.enable_interrupts());
        // The first iteration processes the request and publishes the answer. The next one stops the queue.
        rig.worker.iterate_once();
        let (interrupted, ends) = (rig.interrupts(), std::rc::Rc::new(std::cell::Cell::new(0)));
        let ended = ends.clone();
        rig.worker
            .stop(rig.source, move |_, _| ended.set(ended.get() + 1));
        rig.worker.iterate_once();
        assert_eq!((ends.get(), interrupted + rig.interrupts()), (1, 1));
    }
}
