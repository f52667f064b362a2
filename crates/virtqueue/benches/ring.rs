//! Device-side cost of a chain: pop and push in batches, on a ring that the benchmark fills.
//!
//! `cargo bench -p virtqueue` prints the time per batch and the chains per second. Each chain is a virtio-blk request: 16 bytes, 4096
//! bytes, 1 byte. Only the device side is timed; the driver side is in `with_inputs`.

use std::cell::RefCell;
use std::sync::Arc;

use divan::counter::ItemsCount;
use divan::{Bencher, black_box};
use guest_memory::{GuestView, Mapping, MemoryTable, RegionSpec};
use virtqueue::driver::{DriverConfig, DriverQueue, IndirectTables, RingLayout};
use virtqueue::{Chain, DeviceQueue};

const BATCHES: [usize; 4] = [1, 8, 32, 128];
const SIZE: u16 = 512;
const MEMORY: usize = 1 << 24;

fn main() {
    divan::main();
}

struct Setup {
    view: GuestView,
    driver: DriverQueue,
    device: DeviceQueue,
    chains: Vec<Chain>,
    indirect: bool,
    data: u64,
}

impl Setup {
    fn new(packed: bool, indirect: bool, batch: usize) -> Setup {
        let spec = RegionSpec {
            guest_address: 0,
            size: MEMORY as u64,
            user_address: 0,
            file_offset: 0,
        };
        let mapping = Mapping::anonymous(MEMORY).unwrap();
        // A guest has written its headers, so their pages exist.
        mapping.fill(0, MEMORY, 0);
        let table = MemoryTable::default().with_mapping(spec, mapping).unwrap();
        let layout = RingLayout::at(0, SIZE, packed);
        let tables = IndirectTables {
            address: layout.end,
            descriptors: 4,
        };
        let driver = DriverConfig {
            event_idx: true,
            tables: Some(tables),
            ..DriverConfig::new(layout)
        };
        let driver = DriverQueue::new(driver, &table).unwrap();
        let mut config = layout.device_config();
        config.event_idx = true;
        let device = DeviceQueue::new(config, &table).unwrap();
        Setup {
            view: GuestView::new(Arc::new(table)),
            driver,
            device,
            chains: vec![Chain::default(); batch],
            indirect,
            data: layout.end + tables.bytes(SIZE),
        }
    }

    fn fill(&mut self) {
        while self.driver.pop_used().is_some() {}
        for i in 0..self.chains.len() as u64 {
            // As in Linux: headers in a slab, data in pages.
            let (header, data) = (self.data + i * 320, self.data + (1 << 18) + i * 4096);
            let (readable, writable) = ([(header, 16)], [(data, 4096), (header + 16, 1)]);
            let id = if self.indirect {
                self.driver.add_indirect(&readable, &writable, i)
            } else {
                self.driver.add(&readable, &writable, i)
            };
            id.expect("room in the ring");
        }
        self.driver.publish();
    }

    #[inline(never)]
    fn iterate(&mut self) -> bool {
        for chain in &mut self.chains {
            let got = self.device.pop(&self.view, chain);
            assert!(matches!(got, Ok(true)));
        }
        for chain in &self.chains {
            self.device
                .push(chain.id, chain.descriptors, black_box(chain).writable);
        }
        self.device.publish()
    }
}

fn run(bencher: Bencher, packed: bool, indirect: bool, batch: usize) {
    let setup = RefCell::new(Setup::new(packed, indirect, batch));
    bencher
        .counter(ItemsCount::new(batch))
        .with_inputs(|| setup.borrow_mut().fill())
        .bench_local_values(|()| setup.borrow_mut().iterate());
}

#[divan::bench(args = BATCHES, sample_size = 1, sample_count = 20_000)]
fn split_direct(bencher: Bencher, batch: usize) {
    run(bencher, false, false, batch);
}

#[divan::bench(args = BATCHES, sample_size = 1, sample_count = 20_000)]
fn split_indirect(bencher: Bencher, batch: usize) {
    run(bencher, false, true, batch);
}

#[divan::bench(args = BATCHES, sample_size = 1, sample_count = 20_000)]
fn packed_direct(bencher: Bencher, batch: usize) {
    run(bencher, true, false, batch);
}

#[divan::bench(args = BATCHES, sample_size = 1, sample_count = 20_000)]
fn packed_indirect(bencher: Bencher, batch: usize) {
    run(bencher, true, true, batch);
}
