//! Any bytes as a ring and its client's memory: the body of the fuzz target and of a property test.
//!
//! Whatever the bytes say, the device must neither panic nor run on, and what it accepts must keep its word.

use std::sync::Arc;

use guest_memory::{GuestView, Mapping, MemoryTable, RegionSpec};

use crate::driver::RingLayout;
use crate::{Chain, DeviceQueue, PACKED_START};

const MEMORY: usize = 1 << 16;
/// Bytes of the input that choose the queue; the others are the memory.
const CHOICES: usize = 8;

/// Runs a device on a ring made of `data`. Gives the number of chains that it accepted.
///
/// # Panics
/// When the device does what no driver may bring it to.
pub fn ring_of_bytes(data: &[u8]) -> usize {
    let Some((choices, image)) = data.split_at_checked(CHOICES) else {
        return 0;
    };
    let memory = Mapping::anonymous(MEMORY).expect("anonymous memory");
    let half = MEMORY as u64 / 2;
    // Two regions that touch, so that elements and tables can straddle them.
    let region = |guest_address| RegionSpec {
        guest_address,
        size: half,
        user_address: 0,
        file_offset: 0,
    };
    let other = Mapping::anonymous(MEMORY / 2).expect("anonymous memory");
    let table = MemoryTable::default()
        .with_mapping(region(0), memory.clone())
        .and_then(|t| t.with_mapping(region(half), other.clone()))
        .expect("regions that do not overlap");

    let packed = choices[0] & 1 != 0;
    let power = u32::from(choices[1] & 7);
    let layout = RingLayout::at(0, 1 << power, packed);
    let mut config = layout.device_config();
    config.event_idx = choices[0] & 2 != 0;
    config.indirect = choices[0] & 4 != 0;
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

    let write_image = |turn: usize| {
        let from = image.len() / 3 * turn;
        let image = &image[from..];
        let first = image.len().min(MEMORY / 2);
        memory.write(0, &image[..first]);
        let second = &image[first..];
        other.write(0, &second[..second.len().min(MEMORY / 2)]);
    };
    write_image(0);
    if choices[0] & 32 != 0 {
        tame_addresses(&memory, &layout);
    }
    let Ok(mut queue) = DeviceQueue::new(config, &table) else {
        return 0;
    };
    let view = GuestView::new(Arc::new(table));
    let mut accepted = 0;
    for turn in 0..3 {
        accepted += turn_of(&mut queue, &view);
        write_image(turn);
    }
    accepted
}

/// Puts the first descriptors' addresses and lengths inside of the memory, or the bytes would rarely get further.
fn tame_addresses(memory: &Mapping, layout: &RingLayout) {
    for index in 0..usize::from(layout.size) {
        let mut descriptor = [0; 16];
        memory.read(16 * index, &mut descriptor);
        descriptor[2..8].fill(0);
        descriptor[9] &= 3;
        descriptor[10..12].fill(0);
        memory.write(16 * index, &descriptor);
    }
}

fn turn_of(queue: &mut DeviceQueue, view: &GuestView) -> usize {
    let mut chain = Chain::default();
    let mut accepted = 0;
    let size = queue.size();
    queue.disable_notifications();
    for _ in 0..2 * size {
        // What a turn looks at before it takes its share.
        queue.guess(view);
        let waiting = queue.waiting();
        assert_eq!(waiting > 0, queue.available() > 0);
        assert!(waiting <= size || !queue.config().packed);
        match queue.pop(view, &mut chain) {
            Ok(true) => {}
            Ok(false) => break,
            Err(error) => {
                assert!(queue.is_broken() && !error.to_string().is_empty());
                assert_eq!(queue.pop(view, &mut chain), Ok(false));
                assert_eq!((queue.available(), queue.waiting()), (0, 0));
                break;
            }
        }
        accepted += 1;
        let bytes = u64::from(chain.readable) + u64::from(chain.writable);
        assert_eq!(chain.buffer.total_len() as u64, bytes);
        assert!(bytes > 0 && bytes <= u64::from(queue.config().max_chain_bytes));
        assert!(chain.id < size);
        assert!((1..=size).contains(&chain.descriptors));
        queue.push(chain.id, chain.descriptors, chain.writable);
        if accepted % 3 == 0 {
            queue.publish();
        }
    }
    queue.publish();
    queue.enable_notifications();
    accepted
}
