//! Errors of a ring or of a request in it, always caused by the peer.
//!
//! The code that detects an error decides its effect. An error of the ring ends the queue; an error of a request ends that request only
//! ([`crate::PopError`]).

/// An error of the driver or the front end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The queue size is zero, too large, or not a power of two for a split ring.
    #[error("queue size {size} is not {allowed}")]
    Size {
        /// Requested size.
        size: u16,
        /// Valid sizes.
        allowed: &'static str,
    },
    /// A part of the ring is not aligned.
    #[error("{part} at {address:#x} is not aligned to {alignment} bytes")]
    Unaligned {
        /// Name of the part.
        part: &'static str,
        /// Guest-physical address.
        address: u64,
        /// Alignment required by the standard.
        alignment: usize,
    },
    /// A part of the ring is not in one region of the client's memory.
    #[error("{part} at {address:#x} + {length} bytes is not in the client's memory")]
    RingNotMapped {
        /// Name of the part.
        part: &'static str,
        /// Guest-physical address.
        address: u64,
        /// Length in bytes.
        length: u64,
    },
    /// The base of a packed ring is beyond its end.
    #[error("ring base {base:#x} is outside of a ring of {size} descriptors")]
    Base {
        /// Requested base.
        base: u32,
        /// Descriptors in the ring.
        size: u16,
    },
    /// The front end's in-flight region is invalid or too small.
    #[error("the in-flight region cannot be used: {reason}")]
    Inflight {
        /// Description of the error.
        reason: &'static str,
    },
    /// The available index is further ahead than the ring is long.
    #[error("available index {index} is {ahead} ahead of {expected} in a queue of {size}")]
    AvailableIndex {
        /// Index written by the driver.
        index: u16,
        /// Index of the device.
        expected: u16,
        /// The difference.
        ahead: u16,
        /// Entries in the queue.
        size: u16,
    },
    /// The available ring names a descriptor outside of the table.
    #[error("head {head} is outside of a table of {size} descriptors")]
    Head {
        /// Head written by the driver.
        head: u16,
        /// Descriptors in the table.
        size: u16,
    },
    /// A packed buffer ID is outside of the queue.
    #[error("buffer id {id} is outside of a queue of {size} descriptors")]
    BufferId {
        /// ID written by the driver.
        id: u16,
        /// Descriptors in the ring.
        size: u16,
    },
    /// A descriptor's `next` is outside of its table.
    #[error("next descriptor {next} is outside of a table of {length} descriptors")]
    Next {
        /// Index written by the driver.
        next: u16,
        /// Descriptors in the table.
        length: u32,
    },
    /// The chain is a loop, or has too many descriptors or pieces in different memory regions.
    #[error("chain of head {head} has a loop or more than {limit} descriptors")]
    TooManyDescriptors {
        /// First descriptor of the chain.
        head: u16,
        /// Maximum number.
        limit: u16,
    },
    /// A packed chain continues at a descriptor that is not available.
    #[error("chain at descriptor {head} is not completely available")]
    Incomplete {
        /// First descriptor of the chain.
        head: u16,
    },
    /// An indirect table refers to another one.
    #[error("indirect descriptor inside of an indirect table at {table:#x}")]
    IndirectInIndirect {
        /// Address of the table.
        table: u64,
    },
    /// An indirect descriptor in a chain where the standard forbids it.
    #[error("indirect descriptor for table {table:#x} is linked with other descriptors")]
    IndirectLinked {
        /// Address of the table.
        table: u64,
    },
    /// The length of an indirect table is zero or not a multiple of the descriptor size.
    #[error("indirect table at {table:#x} has {length} bytes, not a positive multiple of 16")]
    IndirectLength {
        /// Address of the table.
        table: u64,
        /// Length in bytes.
        length: u32,
    },
    /// A device-readable element follows a device-writable one.
    #[error("readable element at {address:#x} after a writable one")]
    ReadableAfterWritable {
        /// Address of the element.
        address: u64,
    },
    /// The chain has too many bytes.
    #[error("chain of {length} bytes is longer than {limit} bytes")]
    TooLong {
        /// Bytes so far.
        length: u64,
        /// Maximum number of bytes.
        limit: u32,
    },
    /// An element or an indirect table is not in the client's memory.
    #[error("address {address:#x} + {length} bytes is not in the client's memory")]
    NotMapped {
        /// First address.
        address: u64,
        /// Length in bytes.
        length: u64,
    },
}
