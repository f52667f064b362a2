//! A driver that changes rings, descriptors and indirect tables while the device reads them.
//!
//! A device that checks one load of a field and uses another (double fetch) accepts chains outside of the memory, with wrong lengths or
//! with invalid IDs. The driver writes valid and invalid values at random, as fast as it can.

mod common;

use std::sync::atomic::{AtomicBool, AtomicU16, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use common::{DATA, MEMORY, Memory};
use guest_memory::{Mapping, MemoryTable, RingMemory};
use virtqueue::driver::{RawRing, RingLayout};
use virtqueue::{Chain, DeviceQueue, Inflight, PackedInflight, PopError};

const SIZE: u16 = 4;
/// Address of an indirect table.
const TABLE: u64 = 0x4_0000;
const TABLE_ENTRIES: u64 = 4;
const TIME: Duration = Duration::from_millis(700);
/// Chains to accept at least, also on a loaded machine.
const ACCEPTED_MIN: u64 = 500;
const PATIENCE: Duration = Duration::from_secs(60);

const NEXT: u16 = 1;
const INDIRECT: u16 = 4;

struct Random(fastrand::Rng);

impl Random {
    fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    fn pick<T: Copy>(&mut self, values: &[T]) -> T {
        values[self.0.usize(..values.len())]
    }

    fn address(&mut self) -> u64 {
        let end = MEMORY as u64;
        self.pick(&[
            DATA,
            DATA,
            DATA + 64,
            end - 8,
            end,
            TABLE,
            TABLE,
            u64::MAX - 3,
        ])
    }

    fn length(&mut self) -> u32 {
        self.pick(&[8, 8, 16, 16, 32, 48, 64, 0, 4096, 0x8000_0000, u32::MAX])
    }

    /// NEXT, which makes loops, in one of four descriptors.
    fn flags(&mut self) -> u16 {
        const WRITE: u16 = 2;
        self.pick(&[0, WRITE, INDIRECT, INDIRECT, NEXT, WRITE, WRITE | NEXT, 0])
    }

    /// A descriptor's index, a valid one in 31 of 32.
    fn index(&mut self) -> u16 {
        match self.next() % 32 {
            0 => self.pick(&[SIZE, 0xffff]),
            _ => self.next() as u16 % SIZE,
        }
    }

    /// AVAIL and USED of a packed ring, as the driver sets them at the device's place, in 31 of 32.
    fn available(&mut self, wraps: bool) -> u16 {
        match (self.next() % 32, wraps) {
            (0, _) => self.pick(&[0, 0x8080]),
            (_, true) => 0x80,
            (_, false) => 0x8000,
        }
    }
}

/// The memory that both sides share.
struct Shared {
    mapping: Arc<Mapping>,
    table: MemoryTable,
    layout: RingLayout,
    inflight: Arc<Mapping>,
    /// Next position of the device: the available index of a split ring, or the position in a packed ring with its wrap counter.
    space: AtomicU16,
    done: AtomicBool,
}

impl Shared {
    /// Writes to the ring, the table and the region until the device is done.
    fn attack(&self) {
        let raw = RawRing::new(&self.layout, &self.table).unwrap();
        let region = RingMemory::new(self.inflight.clone(), 0, 4096);
        let mut random = Random(fastrand::Rng::with_seed(0x9e37_79b9_7f4a_7c15));
        while !self.done.load(Ordering::Relaxed) {
            let at = random.index();
            let position = self.space.load(Ordering::Relaxed);
            if self.layout.packed {
                let flags = random.flags() | random.available(position & 0x8000 != 0);
                raw.set_packed(at, random.address(), random.length(), random.index(), flags);
            } else {
                let flags = random.flags();
                raw.set_descriptor(at, random.address(), random.length(), flags, random.index());
                raw.set_available_entry(at, random.index());
                let ahead = match random.next() % 64 {
                    0 => random.pick(&[SIZE + 1, 0x8000, 0xffff]),
                    _ => random.pick(&[1, 2, 3, SIZE]),
                };
                raw.set_available_index(position.wrapping_add(ahead));
            }
            self.change_table(&mut random);
            // Not the first bytes: their version and size are checked when a device starts.
            if random.next().is_multiple_of(16) {
                let byte = 64 + random.next() as usize % 128;
                region.write(byte, random.next() as u8);
            }
        }
    }

    /// Writes a descriptor of the indirect table.
    fn change_table(&self, random: &mut Random) {
        let mut bytes = random.address().to_le_bytes().to_vec();
        bytes.extend(random.length().to_le_bytes());
        // A table in a table is an error, and hides the others.
        let flags = random.flags()
            & if random.next().is_multiple_of(8) {
                7
            } else {
                !INDIRECT
            };
        // In packed rings the flags are where split rings have `next`.
        let halves = if self.layout.packed {
            [0, flags & !NEXT]
        } else {
            [flags, random.index()]
        };
        for half in halves {
            bytes.extend(half.to_le_bytes());
        }
        let entry = random.next() % TABLE_ENTRIES;
        self.mapping.write((TABLE + 16 * entry) as usize, &bytes);
    }

    fn device(&self, tracked: bool) -> DeviceQueue {
        let mut config = self.layout.device_config();
        if !self.layout.packed {
            let raw = RawRing::new(&self.layout, &self.table).unwrap();
            config.base = u32::from(raw.used_index());
        }
        self.space.store(config.base as u16, Ordering::Relaxed);
        let mut device = DeviceQueue::new(config, &self.table).unwrap();
        if tracked {
            let bytes = match self.layout.packed {
                true => PackedInflight::stride(SIZE),
                false => Inflight::stride(SIZE),
            };
            let part = RingMemory::new(self.inflight.clone(), 0, bytes);
            part.clear(0, bytes);
            // Refused if the driver has damaged the region.
            device.track(part).ok();
        }
        device
    }

    /// Panics if the device has accepted a chain that breaks a rule.
    fn check(&self, chain: &Chain) {
        assert!(chain.id < SIZE, "ID {}", chain.id);
        assert!((1..=SIZE).contains(&chain.descriptors), "{chain:?}");
        let base = self.mapping.base() as usize;
        let mut bytes = 0;
        for segment in chain.buffer.segments() {
            let start = (segment.base() as usize).wrapping_sub(base);
            assert!(
                segment.len() <= MEMORY && start <= MEMORY - segment.len(),
                "{} bytes at {start:#x}",
                segment.len()
            );
            bytes += segment.len();
        }
        let total = chain.readable as usize + chain.writable as usize;
        assert_eq!([bytes, chain.buffer.len()], [total; 2]);
    }
}

fn device_uses_what_it_has_checked(packed: bool, tracked: bool) {
    // Driver and device need a processor each.
    static ALONE: Mutex<()> = Mutex::new(());
    let _alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    let memory = Memory::new();
    let shared = Shared {
        mapping: memory.mapping,
        table: memory.table,
        layout: RingLayout::at(0, SIZE, packed),
        inflight: Mapping::anonymous(4096).unwrap(),
        space: AtomicU16::new(0),
        done: AtomicBool::new(false),
    };
    let shared = &shared;
    let (mut accepted, mut refused, mut broken) = (0u64, 0u64, 0u64);
    std::thread::scope(|scope| {
        scope.spawn(move || shared.attack());
        // Ends the driver also if a check fails.
        let _end = End(&shared.done);
        let mut device = shared.device(tracked);
        let mut chain = Chain::default();
        let begun = Instant::now();
        while begun.elapsed() < TIME || (accepted < ACCEPTED_MIN && begun.elapsed() < PATIENCE) {
            match device.pop(&memory.view, &mut chain) {
                Ok(false) => {}
                Ok(true) => {
                    shared.check(&chain);
                    let mut read = vec![0; chain.readable as usize];
                    chain.buffer.read_whole(0, &mut read);
                    device.push(chain.id, chain.descriptors, chain.writable);
                    accepted += 1;
                }
                Err(PopError::Request(refusal)) => {
                    assert!(chain.id < SIZE, "ID {}", chain.id);
                    assert!((1..=SIZE).contains(&chain.descriptors), "{chain:?}");
                    assert!(refusal.space.front as usize <= MEMORY);
                    device.push(chain.id, chain.descriptors, 0);
                    refused += 1;
                }
                Err(PopError::Queue(_)) => {
                    broken += 1;
                    device = shared.device(tracked);
                }
            }
            shared.space.store(device.base() as u16, Ordering::Relaxed);
            device.publish();
            device.enable_notifications();
            device.disable_notifications();
        }
    });
    assert!(
        accepted >= ACCEPTED_MIN && refused > 0 && broken > 0,
        "{accepted} accepted, {refused} refused, {broken} broken"
    );
    println!("{accepted} accepted, {refused} refused, {broken} broken");
}

struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn split_ring_that_changes_while_it_is_read_gives_checked_chains() {
    device_uses_what_it_has_checked(false, false);
}

#[test]
fn packed_ring_that_changes_while_it_is_read_gives_checked_chains() {
    device_uses_what_it_has_checked(true, false);
}

#[test]
fn split_ring_and_region_that_change_give_checked_chains() {
    device_uses_what_it_has_checked(false, true);
}

#[test]
fn packed_ring_and_region_that_change_give_checked_chains() {
    device_uses_what_it_has_checked(true, true);
}
