//! The fifteen-case study: five mixtures at three depths, over both transports, with several numbers of workers and queues.
//!
//! Drives eight disks at once with the engine of [`crate::study`]. A separate comparison shows whether polling pays (`polling`). [`report`]
//! writes the page.

mod page;
mod polling;
mod rig;
mod study;

pub use page::report;
pub use study::{Configuration, Header, PollRecord, Record, Study, StudyOptions, run};

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

/// Returns the name of a case, here and in `lunette vm matrix`.
pub fn case_name(mixture: &str, depth: impl std::fmt::Display) -> String {
    format!("{mixture}, depth {depth}")
}
