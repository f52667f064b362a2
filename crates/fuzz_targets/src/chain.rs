//! Uses arbitrary bytes as a virtqueue in a client's memory: split and packed rings, chains, indirect tables.
//!
//! A property test of `virtqueue` has the same body and lists the rules.

/// Runs two devices on the ring in `data`.
pub fn run(data: &[u8]) {
    virtqueue::fuzzing::ring_of_bytes(data);
}
