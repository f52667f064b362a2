//! A queue in guest memory with its driver side. The device side is created from a front end's setup.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use guest_memory::{Mapping, MemoryTable, RegionSpec};
use latency::Labels;
use reactor::Worker;
use virtio_device::{QueueSetup, VirtioDevice};
use virtqueue::driver::{DriverConfig, DriverQueue, RawRing, RingLayout};
use virtqueue::{Inflight, PackedInflight};

/// Ring size.
const ENTRIES: u16 = 32;
/// Maximum number of requests in flight.
pub const SLOTS: usize = 6;
/// Memory per request, in bytes.
const SLOT_BYTES: u64 = 32 << 10;
const REQUESTS: u64 = 64 << 10;
const MEMORY: usize = REQUESTS as usize + SLOTS * SLOT_BYTES as usize;

/// Offsets in the memory of a request: header, response and data.
const HEADER: u64 = 0;
const ANSWER: u64 = 256;
const DATA: u64 = 512;

/// VIRTIO_F_VERSION_1 and VIRTIO_BLK_F_FLUSH.
const FEATURES: u64 = 1 << 32 | 1 << 9;

pub struct GuestQueue {
    pub driver: DriverQueue,
    index: u16,
    layout: RingLayout,
    table: Arc<MemoryTable>,
    memory: Arc<Mapping>,
    /// Offset of the in-flight region.
    inflight: u64,
    is_tracked: bool,
    /// Tokens of the requests in flight.
    slots: [Option<u64>; SLOTS],
    broken: Arc<AtomicBool>,
}

/// Index of a request's memory.
#[derive(Clone, Copy)]
pub struct RequestSlot(usize);

impl RequestSlot {
    fn at(self, offset: u64) -> u64 {
        REQUESTS + self.0 as u64 * SLOT_BYTES + offset
    }
}

impl GuestQueue {
    pub fn new(index: u16, packed: bool, is_tracked: bool) -> GuestQueue {
        let spec = RegionSpec {
            guest_address: 0,
            size: MEMORY as u64,
            user_address: 0,
            file_offset: 0,
        };
        let memory = Mapping::anonymous(MEMORY).expect("memory for a guest");
        let table = MemoryTable::default().with_mapping(spec, memory.clone());
        let table = Arc::new(table.expect("memory for a guest"));
        let layout = RingLayout::at(0, ENTRIES, packed);
        let driver = DriverQueue::new(DriverConfig::new(layout), &table);
        GuestQueue {
            driver: driver.expect("the ring is in guest memory"),
            index,
            layout,
            inflight: layout.end.next_multiple_of(4096),
            table,
            memory,
            is_tracked,
            slots: [None; SLOTS],
            broken: Arc::default(),
        }
    }

    /// Returns true if an in-flight region survives a kill.
    pub fn is_tracked(&self) -> bool {
        self.is_tracked
    }

    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Relaxed)
    }

    /// Returns unchecked access to the ring, for hostile drivers.
    pub fn raw(&self) -> RawRing {
        RawRing::new(&self.layout, &self.table).expect("the ring is in guest memory")
    }

    /// Attaches the device side to a worker.
    pub fn attach(&self, device: &dyn VirtioDevice, worker: &mut Worker) {
        let stride = match self.layout.packed {
            true => PackedInflight::stride(ENTRIES),
            false => Inflight::stride(ENTRIES),
        };
        let inflight = self.is_tracked.then(|| {
            let part = self.table.ring(self.inflight, stride as u64);
            part.expect("the region is in guest memory")
        });
        let mut config = self.layout.device_config();
        if inflight.is_some() && !self.layout.packed {
            // As a front end does after a crash of the daemon: the base is the used index, and the region lists the unanswered requests.
            config.base = self.raw().used_index().into();
        }
        let broken = self.broken.clone();
        let setup = QueueSetup {
            inflight,
            log: None,
            index: self.index,
            features: FEATURES,
            config,
            memory: self.table.clone(),
            kick: None,
            call: None,
            error: None,
            enabled: true,
            on_broken: Arc::new(move |_, _| broken.store(true, Ordering::Relaxed)),
            labels: Labels::default(),
        };
        let make = device.queue(setup, worker.handle());
        let mut built = None;
        let added = worker.add(|io, id| {
            make(io, id).map(|queue| {
                built = Some(id);
                queue.source
            })
        });
        let source = added.expect("the queue is valid");
        device.queue_placed(self.index, &worker.handle().clone(), source);
    }

    /// Takes a free slot for a request.
    pub fn take(&mut self, token: u64) -> Option<RequestSlot> {
        if self.is_broken() {
            return None;
        }
        let index = self.slots.iter().position(Option::is_none)?;
        self.slots[index] = Some(token);
        Some(RequestSlot(index))
    }

    /// Adds a request to the ring: header, data, and buffers for the response and for data. Data may be split over several descriptors.
    pub fn add(
        &mut self,
        slot: RequestSlot,
        header: &[u8],
        out: &[u8],
        answer: u32,
        into: usize,
        answer_first: bool,
    ) {
        self.memory.write(slot.at(HEADER) as usize, header);
        self.memory.write(slot.at(DATA) as usize, out);
        self.memory
            .fill(slot.at(ANSWER) as usize, answer as usize, 0xee);
        let pieces = |length: usize| -> Vec<(u64, u32)> {
            let first = length / 3;
            let (a, b) = (slot.at(DATA), slot.at(DATA) + first as u64);
            let both = [(a, first as u32), (b, (length - first) as u32)];
            both.into_iter().filter(|(_, length)| *length > 0).collect()
        };
        let mut readable = vec![(slot.at(HEADER), header.len() as u32)];
        readable.extend(pieces(out.len()));
        let mut writable = pieces(into);
        let answered = (slot.at(ANSWER), answer);
        match answer_first {
            true => writable.insert(0, answered),
            false => writable.push(answered),
        }
        let added = self.driver.add(&readable, &writable, slot.0 as u64);
        assert!(added.is_some(), "the ring has room for all slots");
        self.driver.publish();
    }

    /// Returns the next completed request: token, response and data read.
    pub fn answered(&mut self, answer: usize) -> Option<(u64, Vec<u8>, Vec<u8>)> {
        let used = self.driver.pop_used()?;
        let slot = RequestSlot(used.token as usize);
        let token = self.slots[slot.0]
            .take()
            .expect("each request completes once");
        let mut status = vec![0; answer];
        self.memory.read(slot.at(ANSWER) as usize, &mut status);
        let mut data = vec![0; 16 << 10];
        self.memory.read(slot.at(DATA) as usize, &mut data);
        Some((token, status, data))
    }

    /// Returns the tokens of the requests in flight.
    pub fn tokens(&self) -> Vec<u64> {
        self.slots.iter().copied().flatten().collect()
    }

    /// Removes all requests in flight and returns their tokens.
    pub fn forget(&mut self) -> Vec<u64> {
        self.slots.iter_mut().filter_map(Option::take).collect()
    }
}
