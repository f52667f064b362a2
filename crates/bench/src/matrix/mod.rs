//! The fifteen-case study: five mixtures at three depths, over both transports, with several numbers of workers and queues.
//!
//! On eight disks at once. Every run is a line of the result file as soon as it is over, so that a study that was ended goes
//! on where it stopped (`study`). [`report`] makes a page of it that needs nothing from outside, with pictures ([`crate::chart`]),
//! tables, and advice in words (`advice`); whether polling pays is found by a comparison of its own (`polling`).

mod advice;
mod page;
mod polling;
mod study;

pub use page::report;
pub use polling::PollRecord;
pub use study::{Configuration, Record, Study, StudyOptions, run};

/// What is asked: name, pattern, reads of 100.
pub const MIXTURES: [(&str, &str, u8); 5] = [
    ("randread", "randread", 100),
    ("75/25", "randrw", 75),
    ("50/50", "randrw", 50),
    ("25/75", "randrw", 25),
    ("randwrite", "randwrite", 0),
];
/// Requests in flight, of each disk and queue.
pub const DEPTHS: [u16; 3] = [1, 4, 8];
