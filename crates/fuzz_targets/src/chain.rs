//! Uses arbitrary bytes as a virtqueue in a client's memory: split and packed rings, chains, indirect tables.
//!
//! The body is shared with a property test of `virtqueue`, which lists the rules.

/// Runs two devices on the ring in `data`.
pub fn run(data: &[u8]) {
    virtqueue::fuzzing::ring_of_bytes(data);
}
