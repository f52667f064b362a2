//! Arbitrary bytes as a ring and its client's memory: the body of the fuzz target and of a property test.
//!
//! For any input, the device must neither panic nor loop endlessly, and accepted chains must be valid.

use std::sync::Arc;

use guest_memory::{GuestView, Mapping, MemoryTable, RegionSpec};

use crate::driver::RingLayout;
use crate::{Chain, DeviceQueue, PACKED_START, PopError, ResponseSpace};

/// Length of each memory region.
const HALF: usize = 1 << 15;
/// Initial segment capacity of a chain.
const ROOM: usize = 1 << 9;
/// Bytes of the input that configure the queue; the rest is the memory.
const CHOICES: usize = 8;

/// Runs two devices on copies of a ring made of `data`: one uses the fast path where possible, the other never does. Both must agree on
/// every chain and leave the same memory. Returns the number of accepted chains.
///
/// # Panics
/// If the device does something that no driver may cause.
pub fn ring_of_bytes(data: &[u8]) -> usize {
    let Some((choices, image)) = data.split_at_checked(CHOICES) else {
        return 0;
    };
    let packed = choices[0] & 1 != 0;
    let power = u32::from(choices[1] & 7);
    let layout = RingLayout::at(0, 1 << power, packed);
    let mut config = layout.device_config();
    config.event_idx = choices[0] & 2 != 0;
    if choices[0] & 8 != 0 {
        config.max_chain_bytes = u32::from(choices[2]) << 8;
        config.max_chain_descriptors = u16::from(choices[3]);
    }
    let base = u32::from_le_bytes([choices[4], choices[5], choices[6], choices[7]]);
    config.base = if choices[0] & 16 != 0 {
        PACKED_START
    } else {
        base
    };

    let (mut short, mut general) = (Memory::new(), Memory::new());
    let plausible = (choices[0] & 32 != 0).then_some(layout);
    for memory in [&mut short, &mut general] {
        memory.write_image(image, 0);
        if let Some(layout) = plausible {
            set_plausible_addresses(&memory.first, &layout);
        }
    }
    let queue = |memory: &Memory| DeviceQueue::new(config.clone(), &memory.table);
    let (Ok(short_queue), Ok(general_queue)) = (queue(&short), queue(&general)) else {
        return 0;
    };
    let mut sides = [
        Side::new(short, short_queue, true),
        Side::new(general, general_queue, false),
    ];
    let mut accepted = 0;
    for turn in 0..3 {
        accepted += run_round(&mut sides);
        let [short, general] = &mut sides;
        assert_eq!(short.memory.bytes(), general.memory.bytes());
        short.memory.write_image(image, turn);
        general.memory.write_image(image, turn);
    }
    accepted
}

/// Client memory of two adjacent regions, so that elements and tables can straddle them.
struct Memory {
    first: Arc<Mapping>,
    second: Arc<Mapping>,
    table: Arc<MemoryTable>,
}

impl Memory {
    fn new() -> Memory {
        let half = || Mapping::anonymous(HALF).expect("anonymous memory");
        let (first, second) = (half(), half());
        let region = |guest_address| RegionSpec {
            guest_address,
            size: HALF as u64,
            user_address: 0,
            file_offset: 0,
        };
        let table = MemoryTable::default()
            .with_mapping(region(0), first.clone())
            .and_then(|t| t.with_mapping(region(HALF as u64), second.clone()))
            .expect("regions that do not overlap");
        Memory {
            first,
            second,
            table: Arc::new(table),
        }
    }

    /// Writes the image, starting from third number `turn`.
    fn write_image(&mut self, image: &[u8], turn: usize) {
        let image = &image[image.len() / 3 * turn..];
        let (first, second) = image.split_at(image.len().min(HALF));
        self.first.write(0, first);
        self.second.write(0, &second[..second.len().min(HALF)]);
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; 2 * HALF];
        let (first, second) = bytes.split_at_mut(HALF);
        self.first.read(0, first);
        self.second.read(0, second);
        bytes
    }

    /// Returns guest address and length of each segment of a chain.
    fn segments(&self, chain: &Chain) -> Vec<(usize, usize)> {
        let guest_address = |base: usize| {
            let (first, second) = (self.first.base() as usize, self.second.base() as usize);
            if (first..first + HALF).contains(&base) {
                base - first
            } else {
                assert!((second..second + HALF).contains(&base), "the client's");
                base - second + HALF
            }
        };
        let segments = chain.buffer.segments().iter();
        segments
            .map(|s| (guest_address(s.base() as usize), s.len()))
            .collect()
    }
}

/// A device and its client's memory.
struct Side {
    memory: Memory,
    queue: DeviceQueue,
    view: GuestView,
    chain: Chain,
    /// The view has both regions cached and the chain has capacity, as the fast path requires.
    short: bool,
}

impl Side {
    fn new(memory: Memory, queue: DeviceQueue, short: bool) -> Side {
        let view = GuestView::new(memory.table.clone());
        let mut side = Side {
            memory,
            queue,
            view,
            chain: Chain::default(),
            short,
        };
        if short {
            for address in (0..ROOM).map(|i| if i % 2 == 0 { 0 } else { HALF as u64 }) {
                let appended = side.view.append(address, 1, &mut side.chain.buffer);
                appended.expect("client memory");
            }
            side.chain.clear();
        }
        side
    }

    fn pop(&mut self) -> Result<bool, PopError> {
        if !self.short {
            self.view = GuestView::new(self.memory.table.clone());
            self.chain = Chain::default();
        }
        self.queue.pop(&self.view, &mut self.chain)
    }

    /// Returns the popped chain for comparison.
    fn popped(&self) -> Popped {
        let chain = &self.chain;
        assert_eq!(chain.buffer.len(), chain.buffer.total_len());
        let front = (chain.buffer.total_len() >= 4).then(|| chain.buffer.front::<4>());
        Popped {
            id: chain.id,
            descriptors: chain.descriptors,
            bytes: (chain.readable, chain.writable),
            total: chain.buffer.total_len(),
            segments: self.memory.segments(chain),
            front,
        }
    }

    /// Answers a refused chain in its response space.
    fn refuse(&mut self, space: &ResponseSpace) {
        let chain = &self.chain;
        let front = vec![0x5a; space.front as usize];
        chain.buffer.write_whole(0, &front);
        if space.last {
            chain.buffer.write_last(0xa5);
        }
        self.queue.push(chain.id, chain.descriptors, space.front);
    }

    /// Answers an accepted chain.
    fn answer(&mut self) {
        let chain = &self.chain;
        if chain.writable >= 2 {
            chain
                .buffer
                .write_second_half(chain.readable as usize, [0x5a; 2]);
        }
        if chain.writable > 0 {
            chain.buffer.write_last(0xa5);
        }
        self.queue.push(chain.id, chain.descriptors, chain.writable);
    }
}

#[derive(Debug, PartialEq)]
struct Popped {
    id: u16,
    descriptors: u16,
    bytes: (u32, u32),
    total: usize,
    segments: Vec<(usize, usize)>,
    /// First four bytes of the chain, if it has four.
    front: Option<[u8; 4]>,
}

/// Limits addresses and lengths of the first descriptors to the memory. Otherwise few inputs would get further.
fn set_plausible_addresses(memory: &Mapping, layout: &RingLayout) {
    for index in 0..usize::from(layout.size) {
        let mut descriptor = [0; 16];
        memory.read(16 * index, &mut descriptor);
        descriptor[2..8].fill(0);
        descriptor[9] &= 3;
        descriptor[10..12].fill(0);
        memory.write(16 * index, &descriptor);
    }
}

fn run_round(sides: &mut [Side; 2]) -> usize {
    let mut accepted = 0;
    let size = sides[0].queue.size();
    for side in sides.iter_mut() {
        side.queue.disable_notifications();
    }
    for _ in 0..2 * size {
        let [short, general] = sides;
        // The calls that precede a batch.
        for side in [&mut *short, &mut *general] {
            side.queue.prefetch_next(&side.view);
            let waiting = side.queue.waiting();
            assert_eq!(waiting > 0, side.queue.available() > 0);
            assert!(waiting <= size || !side.queue.config().packed);
        }
        assert_eq!(short.queue.waiting(), general.queue.waiting());
        let popped = short.pop();
        assert_eq!(popped, general.pop());
        match popped {
            Ok(true) => {}
            Ok(false) => break,
            Err(PopError::Request(refusal)) => {
                assert!(!refusal.error.to_string().is_empty());
                let refused = short.popped();
                assert_eq!(refused, general.popped());
                let (front, last) = (refusal.space.front, refusal.space.last);
                assert_eq!((refused.bytes, front <= 128), ((0, 0), true));
                assert!(refused.total >= front as usize + usize::from(last));
                for side in [short, general] {
                    assert!(!side.queue.is_broken());
                    side.refuse(&refusal.space);
                }
                continue;
            }
            Err(PopError::Queue(error)) => {
                assert!(!error.to_string().is_empty());
                for side in [short, general] {
                    assert!(side.queue.is_broken());
                    assert_eq!(side.pop(), Ok(false));
                    assert_eq!((side.queue.available(), side.queue.waiting()), (0, 0));
                }
                break;
            }
        }
        accepted += 1;
        let popped = short.popped();
        assert_eq!(popped, general.popped());
        let bytes = u64::from(popped.bytes.0) + u64::from(popped.bytes.1);
        assert_eq!(popped.total as u64, bytes);
        assert!(bytes <= u64::from(short.queue.config().max_chain_bytes));
        assert!(popped.id < size);
        assert!((1..=size).contains(&popped.descriptors));
        for side in [short, general] {
            side.answer();
            match accepted % 6 {
                0 => drop(side.queue.publish()),
                3 => {
                    side.queue.check_suppression();
                    side.queue.publish_unchecked();
                }
                _ => {}
            }
        }
    }
    for side in sides.iter_mut() {
        side.queue.publish();
        side.queue.enable_notifications();
    }
    accepted
}
