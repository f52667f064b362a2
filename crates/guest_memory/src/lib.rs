//! Client memory: mapped once, checked at the edge, and kept mapped until the last I/O on it ends.
//!
//! [`Mapping`] owns one mmap. [`MemoryTable`] is an immutable set of a client's regions. [`GuestView`] pins one
//! table for one worker. [`RingMemory`] is a checked range for ring structures. [`IoBuffer`] is the memory of one
//! I/O and keeps it mapped. [`DirtyLog`] records written pages for a live migration.
//!
//! This crate contains `unsafe` code; its exported API is safe. A client may change its memory at any time, so no
//! function returns `&[u8]` to it. A client that truncates its memory file raises SIGBUS: see [`sigbus`].

mod appender;
mod bits;
mod buffer;
pub mod copy;
mod dirty_log;
mod mapping;
mod registration;
mod ring_memory;
pub mod sigbus;
mod sync;
mod table;
mod used_pages;
mod volatile;

pub use appender::{Appender, Filler, TableFiller};
pub use bits::SharedBits;
pub use buffer::{IoBuffer, Segment};
pub use dirty_log::{DirtyLog, LogFault};
pub use mapping::{Mapping, MappingView};
pub use registration::{Registration, Vacated};
pub use ring_memory::{RingEntries, RingMemory};
pub use table::{GuestView, MemoryError, MemoryTable, RegionSpec};
