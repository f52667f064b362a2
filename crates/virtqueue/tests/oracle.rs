//! Compares this crate with rust-vmm's `virtio-queue` under the same ring operations on the same memory: same chains, same bytes in the
//! used ring, same notifications.

mod common;

use std::sync::atomic::Ordering;

use common::{DATA, Pair, TABLE_DESCRIPTORS};
use proptest::prelude::*;
use virtio_queue::{Queue, QueueT};
use virtqueue::Chain;
use virtqueue::driver::RawRing;
use virtqueue::layout::used_ring_size;
use vm_memory::{FileOffset, GuestAddress, GuestMemoryMmap, GuestRegionMmap, MmapRegion};

#[derive(Clone, Debug)]
enum Op {
    /// Lengths of readable and writable elements; whether to use a table.
    Add(Vec<u32>, Vec<u32>, bool),
    Kick,
    Pop(u8),
    /// Number of the request in flight, bytes written.
    Complete(prop::sample::Index, u32),
    Publish,
    Collect(u8),
    DeviceNotifications(bool),
    DriverInterrupts(bool),
    /// Sets `used_event` relative to the used index, like drivers that want one notification for several chains.
    UsedEvent(i8),
}

fn op() -> impl Strategy<Value = Op> {
    let lengths = |most| prop::collection::vec(1u32..9000, 0..most);
    prop_oneof![
        6 => (lengths(4), lengths(4), any::<bool>()).prop_map(|(r, w, t)| Op::Add(r, w, t)),
        3 => Just(Op::Kick),
        4 => (1u8..6).prop_map(Op::Pop),
        6 => (any::<prop::sample::Index>(), 0u32..100_000).prop_map(|(i, w)| Op::Complete(i, w)),
        3 => Just(Op::Publish),
        3 => (1u8..9).prop_map(Op::Collect),
        1 => any::<bool>().prop_map(Op::DeviceNotifications),
        2 => any::<bool>().prop_map(Op::DriverInterrupts),
        2 => (-3i8..6).prop_map(Op::UsedEvent),
    ]
}

/// Address, length, writable.
type Element = (u64, u32, bool);

struct Comparison {
    pair: Pair,
    raw: RawRing,
    reference: Queue,
    reference_memory: GuestMemoryMmap,
    event_idx: bool,
    chain: Chain,
    /// Heads.
    in_flight: Vec<u16>,
    completed: Vec<(u16, u32)>,
    published_before: bool,
    next_data: u64,
}

impl Comparison {
    fn new(size: u16, event_idx: bool, start: u16) -> Comparison {
        let pair = Pair::new(size, false, event_idx, start);
        let file = pair.memory.file.try_clone().unwrap();
        let region = MmapRegion::from_file(FileOffset::new(file, 0), common::MEMORY).unwrap();
        let region = GuestRegionMmap::new(region, GuestAddress(0)).unwrap();
        let reference_memory = GuestMemoryMmap::from_regions(vec![region]).unwrap();
        let mut reference = Queue::new(size).unwrap();
        reference.set_size(size);
        let layout = pair.layout;
        reference
            .try_set_desc_table_address(GuestAddress(layout.descriptor_area))
            .unwrap();
        reference
            .try_set_avail_ring_address(GuestAddress(layout.driver_area))
            .unwrap();
        reference
            .try_set_used_ring_address(GuestAddress(layout.device_area))
            .unwrap();
        reference.set_event_idx(event_idx);
        reference.set_next_avail(start);
        reference.set_next_used(start);
        reference.set_ready(true);
        assert!(reference.is_valid(&reference_memory));
        let raw = RawRing::new(&layout, &pair.memory.table).unwrap();
        Comparison {
            pair,
            raw,
            reference,
            reference_memory,
            event_idx,
            chain: Chain::default(),
            in_flight: Vec::new(),
            completed: Vec::new(),
            published_before: false,
            next_data: DATA,
        }
    }

    fn used_ring(&self) -> Vec<u8> {
        let length = used_ring_size(self.pair.layout.size);
        self.pair.memory.bytes(self.pair.layout.device_area, length)
    }

    fn restore(&self, used: &[u8]) {
        let at = self.pair.layout.device_area as usize;
        self.pair.memory.mapping.write(at, used);
    }

    fn allocate(&mut self, lengths: &[u32]) -> Vec<(u64, u32)> {
        let allocate = |&length: &u32| {
            if self.next_data + u64::from(length) > common::MEMORY as u64 {
                self.next_data = DATA;
            }
            let at = self.next_data;
            self.next_data += u64::from(length);
            (at, length)
        };
        lengths.iter().map(allocate).collect()
    }

    fn step(&mut self, op: &Op) -> Result<(), TestCaseError> {
        match op {
            Op::Add(readable, writable, through_table) => {
                let (readable, writable) = (self.allocate(readable), self.allocate(writable));
                let count = readable.len() + writable.len();
                if count == 0 || count > usize::from(TABLE_DESCRIPTORS) {
                    return Ok(());
                }
                let driver = &mut self.pair.driver;
                if *through_table {
                    driver.add_indirect(&readable, &writable, 0);
                } else {
                    driver.add(&readable, &writable, 0);
                }
            }
            Op::Kick => {
                self.pair.driver.publish();
            }
            Op::Pop(most) => {
                for _ in 0..*most {
                    if !self.pop()? {
                        break;
                    }
                }
            }
            Op::Complete(which, written) => {
                if !self.in_flight.is_empty() {
                    let head = self.in_flight.remove(which.index(self.in_flight.len()));
                    self.completed.push((head, *written));
                }
            }
            Op::Publish => self.publish()?,
            Op::Collect(most) => {
                for _ in 0..*most {
                    self.pair.driver.pop_used();
                }
            }
            Op::DeviceNotifications(on) => self.notifications(*on)?,
            Op::DriverInterrupts(true) => {
                self.pair.driver.enable_interrupts();
            }
            Op::DriverInterrupts(false) => self.pair.driver.disable_interrupts(),
            Op::UsedEvent(distance) => {
                let event = self
                    .raw
                    .used_index()
                    .wrapping_add_signed(i16::from(*distance));
                self.raw.set_used_event(event);
            }
        }
        let index = self
            .reference
            .avail_idx(&self.reference_memory, Ordering::Acquire)
            .unwrap();
        let waiting = index.0.wrapping_sub(self.reference.next_avail());
        // This crate may report fewer chains than exist until it has popped them.
        let known = self.pair.device.available();
        prop_assert!(known <= waiting && (known == 0) == (waiting == 0));
        prop_assert_eq!(
            self.pair.device.base(),
            u32::from(self.reference.next_avail())
        );
        Ok(())
    }

    fn pop(&mut self) -> Result<bool, TestCaseError> {
        let memory = &self.pair.memory;
        let actual = self.pair.device.pop(&memory.view, &mut self.chain);
        // `virtio-queue` also loads the index only when it creates its iterator, that is, each time.
        let reference = self.reference.pop_descriptor_chain(&self.reference_memory);
        prop_assert_eq!(&actual, &Ok(reference.is_some()));
        let Some(reference) = reference else {
            return Ok(false);
        };
        prop_assert_eq!(self.chain.id, reference.head_index());
        let want: Vec<Element> = reference
            .map(|d| (d.addr().0, d.len(), d.is_write_only()))
            .collect();
        let mut readable = self.chain.readable;
        let got: Vec<Element> = memory
            .elements(&self.chain)
            .into_iter()
            .map(|(address, length)| {
                let writable = readable == 0;
                readable -= if writable { 0 } else { length };
                (address, length, writable)
            })
            .collect();
        prop_assert_eq!(got, want);
        self.in_flight.push(self.chain.id);
        Ok(true)
    }

    fn publish(&mut self) -> Result<(), TestCaseError> {
        let before = self.used_ring();
        for &(head, written) in &self.completed {
            self.pair.device.push(head, 1, written);
        }
        let notify = self.pair.device.publish();
        let actual = self.used_ring();
        self.restore(&before);
        for &(head, written) in &self.completed {
            self.reference
                .add_used(&self.reference_memory, head, written)
                .unwrap();
        }
        prop_assert_eq!(actual, self.used_ring());
        if self.completed.is_empty() {
            prop_assert!(!notify);
            return Ok(());
        }
        self.completed.clear();
        // `virtio-queue` leaves the flags of the available ring to its caller.
        let flags = self.pair.memory.bytes(self.pair.layout.driver_area, 2);
        let wanted = self
            .reference
            .needs_notification(&self.reference_memory)
            .unwrap();
        let first = self.event_idx && !self.published_before;
        let wanted = first || wanted && (self.event_idx || flags[0] & 1 == 0);
        self.published_before = true;
        prop_assert_eq!(notify, wanted);
        Ok(())
    }

    fn notifications(&mut self, on: bool) -> Result<(), TestCaseError> {
        let before = self.used_ring();
        let mut more = false;
        if on {
            more = self.pair.device.enable_notifications();
        } else {
            self.pair.device.disable_notifications();
        }
        let actual = self.used_ring();
        self.restore(&before);
        if on {
            let reference = self
                .reference
                .enable_notification(&self.reference_memory)
                .unwrap();
            prop_assert_eq!(more, reference);
        } else {
            self.reference
                .disable_notification(&self.reference_memory)
                .unwrap();
        }
        if on || !self.event_idx {
            prop_assert_eq!(actual, self.used_ring());
        } else {
            // `virtio-queue` leaves avail_event unchanged, this crate moves it behind the last popped entry.
            let offset = before.len() - 2;
            let behind = self.reference.next_avail().wrapping_sub(1).to_le_bytes();
            prop_assert_eq!(&actual[offset..], &behind);
            prop_assert_eq!(&actual[..offset], &before[..offset]);
        }
        prop_assert_eq!(
            self.raw.used_index(),
            self.reference.next_used(),
            "published and no further"
        );
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]
    #[test]
    fn split_ring_behaves_as_virtio_queue_does(
        power in 0u32..7,
        event_idx in any::<bool>(),
        start in prop_oneof![Just(0u16), 65_500u16..=65_535, any::<u16>()],
        ops in prop::collection::vec(op(), 1..150)
    ) {
        let mut both = Comparison::new(1 << power, event_idx, start);
        for op in &ops {
            both.step(op)?;
        }
    }
}
