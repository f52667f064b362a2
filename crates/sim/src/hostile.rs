//! Drivers that violate the virtio specification. Invalid ring content may at most stop their own queue.

use crate::clients::guest::GuestQueue;
use crate::random::Random;

/// Corrupts the ring in a random way.
pub fn misbehave(queue: &mut GuestQueue, seed: u64) {
    let mut random = Random::new(seed);
    let raw = queue.raw();
    match random.below(4) {
        // More requests than the ring has entries.
        0 => raw.set_available_index(random.next() as u16),
        // A descriptor outside the memory, or one that refers to itself.
        1 => raw.set_descriptor(random.below(8) as u16, random.next(), u32::MAX, 1, 0),
        2 => {
            let index = random.below(8) as u16;
            raw.set_descriptor(index, 0, 16, 1, index);
        }
        // An invalid head index.
        _ => raw.set_available_entry(random.below(8) as u16, 0x7fff),
    }
}
