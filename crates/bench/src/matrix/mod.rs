//! The fifteen-case study: five mixtures at three depths, over both transports, with several numbers of workers and queues.
//!
//! Drives eight disks at once. Every run is appended to the result file when it ends, so that an interrupted study can continue
//! (`study`). [`report`] creates a self-contained page with charts ([`crate::chart`]), tables and advice (`advice`). A separate
//! comparison shows whether polling pays (`polling`).

mod advice;
mod page;
mod polling;
mod study;

pub use page::report;
pub use polling::PollRecord;
pub use study::{Configuration, Record, Study, StudyOptions, run};

/// Mixtures: name, pattern, percentage of reads.
pub const MIXTURES: [(&str, &str, u8); 5] = [
    ("randread", "randread", 100),
    ("75/25", "randrw", 75),
    ("50/50", "randrw", 50),
    ("25/75", "randrw", 25),
    ("randwrite", "randwrite", 0),
];
/// Requests in flight per disk and queue.
pub const DEPTHS: [u16; 3] = [1, 4, 8];
