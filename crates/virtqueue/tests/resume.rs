//! A new queue continues at its predecessor's position. A ring in moved memory is found again; truncated memory is detected.

mod common;

use std::sync::Arc;

use common::{DATA, MEMORY, Pair};
use guest_memory::{GuestView, Mapping, MemoryTable, RegionSpec};
use virtqueue::{Chain, DeviceQueue, QueueConfig};

/// Adds one chain per token and lets the device answer. Returns the tokens of the answered chains.
fn run(p: &mut Pair, tokens: std::ops::Range<u64>) -> Vec<u64> {
    let mut chain = Chain::default();
    let mut answered = Vec::new();
    for token in tokens {
        let elements = [(DATA, 16), (DATA + 16, 16)];
        p.driver.add(&elements, &[(DATA + 64, 1)], token).unwrap();
        p.driver.publish();
        while p.device.pop(&p.memory.view, &mut chain).unwrap() {
            p.device.push(chain.id, chain.descriptors, 1);
        }
        p.device.publish();
        while let Some(used) = p.driver.pop_used() {
            answered.push(used.token);
        }
    }
    answered
}

#[test]
fn queue_made_with_the_old_ones_base_goes_on() {
    for packed in [false, true] {
        for event_idx in [false, true] {
            let mut p = Pair::new(8, packed, event_idx, 65530 * u16::from(!packed));
            for round in 0..40 {
                let tokens = round * 3..round * 3 + 3;
                assert_eq!(run(&mut p, tokens.clone()), tokens.collect::<Vec<_>>());
                let config = QueueConfig {
                    base: p.device.base(),
                    ..p.device.config().clone()
                };
                p.device = DeviceQueue::new(config, &p.memory.table).unwrap();
            }
        }
    }
}

#[test]
fn first_answer_of_a_resumed_queue_notifies_for_the_old_one() {
    for packed in [false, true] {
        let mut p = Pair::new(8, packed, true, 0);
        p.driver.enable_interrupts();
        run(&mut p, 0..3);
        // The driver's event is in the past, as if the old device had been killed before it could notify.
        let config = QueueConfig {
            base: p.device.base(),
            ..p.device.config().clone()
        };
        p.device = DeviceQueue::new(config, &p.memory.table).unwrap();
        let mut chain = Chain::default();
        for first in [true, false] {
            p.driver.add(&[(DATA, 1)], &[], 0).unwrap();
            p.driver.publish();
            assert_eq!(p.device.pop(&p.memory.view, &mut chain), Ok(true));
            p.device.push(chain.id, chain.descriptors, 0);
            assert_eq!(p.device.publish(), first, "packed {packed}");
        }
    }
}

#[test]
fn ring_is_found_again_when_the_memory_is_mapped_anew() {
    for packed in [false, true] {
        let mut p = Pair::new(8, packed, false, 0);
        run(&mut p, 0..5);
        // The same file at another host address; the old mapping is removed.
        let spec = RegionSpec {
            guest_address: 0,
            size: MEMORY as u64,
            user_address: 0,
            file_offset: 0,
        };
        let file = std::os::fd::AsFd::as_fd(&p.memory.file);
        let table = MemoryTable::default().with_region(spec, file).unwrap();
        p.device.set_memory(&table).unwrap();
        p.memory.view = GuestView::new(Arc::new(table));
        assert_eq!(run(&mut p, 5..9), [5, 6, 7, 8]);
    }
}

#[test]
fn truncated_ring_is_noticed_and_harms_nobody() {
    guest_memory::sigbus::install().unwrap();
    for packed in [false, true] {
        let (mapping, file) = Mapping::memfd("virtqueue-test", MEMORY).unwrap();
        let spec = RegionSpec {
            guest_address: 0,
            size: MEMORY as u64,
            user_address: 0,
            file_offset: 0,
        };
        let table = MemoryTable::default().with_mapping(spec, mapping).unwrap();
        let layout = virtqueue::driver::RingLayout::at(0x8000, 8, packed);
        let mut device = DeviceQueue::new(layout.device_config(), &table).unwrap();
        let view = GuestView::new(Arc::new(table));
        assert!(!device.is_poisoned());
        file.set_len(4096).unwrap();
        assert_eq!(device.pop(&view, &mut Chain::default()), Ok(false));
        device.push(0, 1, 0);
        device.publish();
        assert!(device.is_poisoned());
    }
}
