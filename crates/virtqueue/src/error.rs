//! What can be wrong with a ring or a request in it: always the peer's fault.
//!
//! Whether a mistake ends the queue is decided where it is found: what the ring itself says wrongly does, what a request says
//! wrongly ends that request alone ([`crate::PopError`]).

/// A mistake of the driver or of the front end.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum QueueError {
    /// The queue's size is zero, too large, or, for a split ring, no power of two.
    #[error("queue size {size} is not {allowed}")]
    Size {
        /// Size asked for.
        size: u16,
        /// What would have been accepted.
        allowed: &'static str,
    },
    /// A part of the ring is not aligned.
    #[error("{part} at {address:#x} is not aligned to {alignment} bytes")]
    Unaligned {
        /// Which part.
        part: &'static str,
        /// Its guest-physical address.
        address: u64,
        /// What the standard demands.
        alignment: usize,
    },
    /// A part of the ring is not in one region of the client's memory.
    #[error("{part} at {address:#x} + {length} bytes is not in the client's memory")]
    RingNotMapped {
        /// Which part.
        part: &'static str,
        /// Its guest-physical address.
        address: u64,
        /// Its bytes.
        length: u64,
    },
    /// A packed ring would start beyond its end.
    #[error("ring base {base:#x} lies outside of a ring of {size} descriptors")]
    Base {
        /// Base asked for.
        base: u32,
        /// Descriptors in the ring.
        size: u16,
    },
    /// The front end's in-flight region is not one that a device of ours has written.
    #[error("the in-flight region cannot be used: {what}")]
    Inflight {
        /// What is wrong with it.
        what: &'static str,
    },
    /// The available index is further ahead than the ring is long.
    #[error("available index {index} is {ahead} ahead of {expected} in a queue of {size}")]
    AvailableIndex {
        /// What the driver wrote.
        index: u16,
        /// Where the device is.
        expected: u16,
        /// The difference.
        ahead: u16,
        /// Entries in the queue.
        size: u16,
    },
    /// The available ring names a descriptor outside of the table.
    #[error("head {head} is outside of a table of {size} descriptors")]
    Head {
        /// What the driver wrote.
        head: u16,
        /// Descriptors in the table.
        size: u16,
    },
    /// A packed buffer's ID is outside of the queue.
    #[error("buffer id {id} is outside of a queue of {size} descriptors")]
    BufferId {
        /// What the driver wrote.
        id: u16,
        /// Descriptors in the ring.
        size: u16,
    },
    /// A descriptor's `next` lies outside of its table.
    #[error("next descriptor {next} is outside of a table of {length} descriptors")]
    Next {
        /// What the driver wrote.
        next: u16,
        /// Descriptors in the table.
        length: u32,
    },
    /// The chain is a loop, or has more descriptors, or pieces in several regions of memory, than are allowed.
    #[error("chain of head {head} has a loop or more than {limit} descriptors")]
    TooManyDescriptors {
        /// Where the chain starts.
        head: u16,
        /// The most that are allowed.
        limit: u16,
    },
    /// A packed chain says that it goes on where no descriptor is available.
    #[error("chain that starts at descriptor {head} is not wholly available")]
    Incomplete {
        /// Where the chain starts.
        head: u16,
    },
    /// An indirect table names another one.
    #[error("indirect descriptor inside of an indirect table at {table:#x}")]
    IndirectInIndirect {
        /// Where the table is.
        table: u64,
    },
    /// An indirect descriptor in a chain where the standard forbids it.
    #[error("indirect descriptor for table {table:#x} is linked with other descriptors")]
    IndirectLinked {
        /// Where the table is.
        table: u64,
    },
    /// An indirect table's size is zero or no multiple of a descriptor's.
    #[error("indirect table at {table:#x} has {length} bytes, not a positive multiple of 16")]
    IndirectLength {
        /// Where the table is.
        table: u64,
        /// Its bytes.
        length: u32,
    },
    /// A device-readable element follows a device-writable one.
    #[error("readable element at {address:#x} after a writable one")]
    ReadableAfterWritable {
        /// The element.
        address: u64,
    },
    /// The chain has more bytes than are allowed.
    #[error("chain of {length} bytes is longer than {limit} bytes")]
    TooLong {
        /// Bytes so far.
        length: u64,
        /// The most that are allowed.
        limit: u32,
    },
    /// An element or an indirect table is not in the client's memory.
    #[error("address {address:#x} + {length} bytes is not in the client's memory")]
    NotMapped {
        /// First address.
        address: u64,
        /// Bytes.
        length: u64,
    },
}
