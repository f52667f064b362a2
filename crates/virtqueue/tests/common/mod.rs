//! Client memory with rings, for all tests.

#![allow(dead_code)]

use std::fs::File;
use std::sync::Arc;

use guest_memory::{GuestView, Mapping, MemoryTable, RegionSpec};
use virtqueue::driver::{DriverConfig, DriverQueue, IndirectTables, RawRing, RingLayout};
use virtqueue::{Chain, DeviceQueue, PopError, QueueConfig, QueueError, ResponseSpace};

/// Length of the memory; guest addresses are offsets in it.
pub const MEMORY: usize = 1 << 20;
/// Start of data, after the ring and the indirect tables.
pub const DATA: u64 = 0x8_0000;

pub struct Memory {
    pub mapping: Arc<Mapping>,
    pub file: File,
    pub table: MemoryTable,
    pub view: GuestView,
}

impl Memory {
    pub fn new() -> Memory {
        let (mapping, file) = Mapping::memfd("virtqueue-test", MEMORY).unwrap();
        let spec = RegionSpec {
            guest_address: 0,
            size: MEMORY as u64,
            user_address: 0x7f00_0000_0000,
            file_offset: 0,
        };
        let table = MemoryTable::default()
            .with_mapping(spec, mapping.clone())
            .unwrap();
        let view = GuestView::new(Arc::new(table.clone()));
        Memory {
            mapping,
            file,
            table,
            view,
        }
    }

    pub fn bytes(&self, offset: u64, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        self.mapping.read(offset as usize, &mut bytes);
        bytes
    }

    /// Returns guest address and length of each segment of a popped chain.
    pub fn elements(&self, chain: &Chain) -> Vec<(u64, u32)> {
        let base = self.mapping.base() as usize;
        let element =
            |s: &guest_memory::Segment| ((s.base() as usize - base) as u64, s.len() as u32);
        chain.buffer.segments().iter().map(element).collect()
    }
}

/// A ring with writable fields, and the device on it.
pub struct Bench {
    pub memory: Memory,
    pub raw: RawRing,
    pub device: DeviceQueue,
    pub layout: RingLayout,
    pub chain: Chain,
}

impl Bench {
    pub fn new(size: u16, packed: bool, change: impl FnOnce(&mut QueueConfig)) -> Bench {
        let memory = Memory::new();
        let layout = RingLayout::at(0, size, packed);
        let raw = RawRing::new(&layout, &memory.table).unwrap();
        let mut config = layout.device_config();
        change(&mut config);
        let device = DeviceQueue::new(config, &memory.table).unwrap();
        Bench {
            memory,
            raw,
            device,
            layout,
            chain: Chain::default(),
        }
    }

    pub fn split(size: u16) -> Bench {
        Bench::new(size, false, |_| {})
    }

    pub fn packed(size: u16) -> Bench {
        Bench::new(size, true, |_| {})
    }

    pub fn pop(&mut self) -> Result<bool, PopError> {
        self.device.pop(&self.memory.view, &mut self.chain)
    }

    /// Makes head 0 of a split ring available and expects the queue to break, once.
    pub fn refused(&mut self) -> QueueError {
        self.raw.set_available_entry(0, 0);
        self.raw.set_available_index(1);
        self.refused_as_is()
    }

    pub fn refused_as_is(&mut self) -> QueueError {
        let Err(PopError::Queue(error)) = self.pop() else {
            panic!("the queue has to end");
        };
        assert!(self.device.is_broken());
        assert_eq!(self.pop(), Ok(false), "reported once");
        assert_eq!(self.device.available(), 0);
        error
    }

    /// Makes head 0 of a split ring available and expects that only this request is refused.
    pub fn refused_alone(&mut self) -> (QueueError, ResponseSpace) {
        self.raw.set_available_entry(0, 0);
        self.raw.set_available_index(1);
        self.refused_alone_as_is()
    }

    pub fn refused_alone_as_is(&mut self) -> (QueueError, ResponseSpace) {
        let Err(PopError::Request(refusal)) = self.pop() else {
            panic!("the request has to be refused");
        };
        assert!(!self.device.is_broken());
        assert_eq!(self.pop(), Ok(false), "the device continues behind it");
        (refusal.error, refusal.space)
    }

    /// Returns index and lengths of a split ring's four used elements.
    pub fn used(&self) -> (u16, [u32; 4]) {
        let bytes = self.memory.bytes(self.layout.device_area, 4 + 4 * 8);
        let length = |i: usize| u32::from_le_bytes(bytes[8 + 8 * i..][..4].try_into().unwrap());
        let index = u16::from_le_bytes([bytes[2], bytes[3]]);
        (index, [0, 1, 2, 3].map(length))
    }

    /// Writes an indirect table of split descriptors (address, length, flags, next) to `at`.
    pub fn table(&self, at: u64, descriptors: &[(u64, u32, u16, u16)]) {
        for (i, &(address, length, flags, next)) in descriptors.iter().enumerate() {
            let mut bytes = Vec::new();
            bytes.extend(address.to_le_bytes());
            bytes.extend(length.to_le_bytes());
            bytes.extend(flags.to_le_bytes());
            bytes.extend(next.to_le_bytes());
            self.memory.mapping.write(at as usize + 16 * i, &bytes);
        }
    }
}

/// A correct driver and a device on one ring.
pub struct Pair {
    pub memory: Memory,
    pub driver: DriverQueue,
    pub device: DeviceQueue,
    pub layout: RingLayout,
}

pub const TABLE_DESCRIPTORS: u16 = 16;

impl Pair {
    pub fn new(size: u16, packed: bool, event_idx: bool, start: u16) -> Pair {
        let memory = Memory::new();
        let layout = RingLayout::at(0, size, packed);
        let tables = IndirectTables {
            address: layout.end,
            descriptors: TABLE_DESCRIPTORS,
        };
        assert!(tables.address + tables.bytes(size) <= DATA);
        let driver = DriverConfig {
            event_idx,
            tables: Some(tables),
            start,
            ..DriverConfig::new(layout)
        };
        let driver = DriverQueue::new(driver, &memory.table).unwrap();
        let mut config = layout.device_config();
        config.event_idx = event_idx;
        if !packed {
            config.base = u32::from(start);
        }
        let device = DeviceQueue::new(config, &memory.table).unwrap();
        Pair {
            memory,
            driver,
            device,
            layout,
        }
    }
}
