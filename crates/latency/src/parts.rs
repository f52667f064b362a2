//! Separate measurements per disk for a queue that serves several disks.
//!
//! A disk gets a part, which is a record of its own, with its first I/O on the queue. Every request is recorded in exactly
//! one part, and the queue's measurements are the sum. While all requests are for one disk, the separation costs a
//! comparison per request. The number of parts per process is limited, because the histograms of each operation take 86
//! KiB. Disks beyond the limit are recorded in the queue's own record, and the snapshot lists them.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::record::QueueRecord;
use crate::snapshot::Labels;
use crate::{Operation, QueueTimeline};

/// Limit on the parts of all queues of the process.
static PROCESS: PartLimit = PartLimit::new(1024);

/// The part of a queue's measurements to which a request belongs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Part(u16);

impl Part {
    /// The queue's own record: requests without a disk, or for a disk without a part.
    pub const REST: Part = Part(0);
}

/// A disk number, unique in the process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DiskNumber(pub u32);

impl DiskNumber {
    /// The request has no disk.
    pub const NONE: DiskNumber = DiskNumber(u32::MAX);
}

/// Limit on the number of parts.
#[derive(Debug)]
struct PartLimit {
    taken: AtomicUsize,
    most: usize,
}

impl PartLimit {
    const fn new(most: usize) -> PartLimit {
        PartLimit {
            taken: AtomicUsize::new(0),
            most,
        }
    }

    fn take(&'static self) -> Option<PartPermit> {
        let more = |taken: usize| (taken < self.most).then_some(taken + 1);
        let taken = self
            .taken
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more);
        taken.is_ok().then(|| PartPermit(self))
    }
}

/// Reserves room for one part until it is dropped.
#[derive(Debug)]
pub(crate) struct PartPermit(&'static PartLimit);

impl Drop for PartPermit {
    fn drop(&mut self) {
        self.0.taken.fetch_sub(1, Ordering::Relaxed);
    }
}

/// The parts of one queue, on the owner's side.
#[derive(Debug)]
pub(crate) struct Parts {
    /// Records by part, the queue's own first. The entry of the current part is empty.
    all: Vec<Option<Arc<QueueRecord>>>,
    written: Part,
    /// Known disks and their parts, sorted.
    numbers: Vec<(DiskNumber, Part)>,
    last: (DiskNumber, Part),
    room: &'static PartLimit,
}

impl Parts {
    pub fn new() -> Parts {
        Parts {
            all: vec![None],
            written: Part::REST,
            numbers: Vec::new(),
            last: (DiskNumber::NONE, Part::REST),
            room: &PROCESS,
        }
    }

    #[inline(always)]
    pub fn written(&self) -> Part {
        self.written
    }

    /// Puts the current record back and takes the one of `part`.
    fn exchange(&mut self, record: &mut Arc<QueueRecord>, part: Part) {
        let wanted = self.all.get_mut(usize::from(part.0)).and_then(Option::take);
        let Some(wanted) = wanted else { return };
        let before = std::mem::replace(record, wanted);
        if let Some(permit) = self.all.get_mut(usize::from(self.written.0)) {
            *permit = Some(before);
        }
        self.written = part;
    }

    fn find(
        &mut self,
        own: &QueueRecord,
        disk: DiskNumber,
        operation: Operation,
        name: impl FnOnce() -> Option<String>,
    ) -> Part {
        if disk == DiskNumber::NONE {
            return Part::REST;
        }
        let part = match self.numbers.binary_search_by_key(&disk, |known| known.0) {
            Ok(at) => self.numbers.get(at).map_or(Part::REST, |known| known.1),
            // Bus scans identify every disk; that does not justify a part.
            Err(_) if operation == Operation::Other => return Part::REST,
            Err(at) => {
                let Some(name) = name() else {
                    return Part::REST;
                };
                let part = self.make(own, name);
                self.numbers.insert(at, (disk, part));
                part
            }
        };
        self.last = (disk, part);
        part
    }

    #[cold]
    fn make(&mut self, own: &QueueRecord, name: String) -> Part {
        // A disk that was removed and added again has a new number and the same name.
        if let Some(at) = own.part_named(&name) {
            return Part(at);
        }
        let number = u16::try_from(self.all.len());
        let (Ok(number), Some(permit)) = (number, self.room.take()) else {
            own.add_unmeasured(name);
            return Part::REST;
        };
        let labels = Labels {
            disk: name,
            ..own.labels().clone()
        };
        let record = Arc::new(QueueRecord::part(labels, permit));
        own.add_part(record.clone());
        self.all.push(Some(record));
        Part(number)
    }
}

impl QueueTimeline {
    /// Returns the part of a request for this disk. The disk's first I/O creates the part, for which `name` is called.
    #[inline(always)]
    pub fn part_of(
        &mut self,
        disk: DiskNumber,
        operation: Operation,
        name: impl FnOnce() -> Option<String>,
    ) -> Part {
        if disk == self.parts.last.0 {
            return self.parts.last.1;
        }
        self.parts.find(&self.record, disk, operation, name)
    }

    /// Directs all further records to this part.
    #[inline(always)]
    pub fn select(&mut self, part: Part) {
        if part != self.parts.written {
            self.parts.exchange(&mut self.current, part);
        }
    }
}

/// Request counts of one batch and one part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartCounts {
    /// The part.
    pub part: Part,
    /// Synchronously completed requests, by operation.
    pub at_once: [u32; Operation::COUNT],
    /// Pending requests, by operation.
    pub pending: [u32; Operation::COUNT],
}

/// Request counts of one batch with several parts. The memory is reused between batches.
#[derive(Debug, Default)]
pub struct MixedBatch(Vec<PartCounts>);

impl MixedBatch {
    /// Adds the counts of a part.
    #[cold]
    pub fn add(&mut self, more: &PartCounts) {
        let Some(counts) = self.0.iter_mut().find(|known| known.part == more.part) else {
            return self.0.push(*more);
        };
        for operation in 0..Operation::COUNT {
            counts.at_once[operation] += more.at_once[operation];
            counts.pending[operation] += more.pending[operation];
        }
    }

    /// Stores `counts` and starts new ones for `part`.
    #[inline(never)]
    pub fn turn_to(&mut self, counts: &mut PartCounts, part: Part) {
        let next = PartCounts {
            part,
            ..PartCounts::default()
        };
        self.add(&std::mem::replace(counts, next));
    }

    /// Returns true if the batch had only one part so far.
    #[inline(always)]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Removes and returns the counts of each part.
    pub fn drain(&mut self) -> impl Iterator<Item = PartCounts> {
        self.0.drain(..)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Clock, Span, Stamp, Stamps};

    static SMALL: PartLimit = PartLimit::new(2);

    fn timeline() -> QueueTimeline {
        QueueTimeline::new(Labels::default(), 8)
    }

    fn part(timeline: &mut QueueTimeline, number: u32, operation: Operation) -> Part {
        let name = || Some(format!("d{number}"));
        timeline.part_of(DiskNumber(number), operation, name)
    }

    fn read(timeline: &mut QueueTimeline, number: u32, ticks: u64) {
        let part = part(timeline, number, Operation::Read);
        timeline.select(part);
        timeline.count(Operation::Read, 512, true);
        let stamps = [0, 0, 0, 0, 0, 0, ticks, ticks, ticks].map(Stamp);
        timeline.record_iteration(&[1, 0, 0, 0, 0], &Stamps::from_array(stamps));
    }

    #[test]
    fn each_disk_has_its_own_times_and_the_queue_their_sum() {
        let mut timeline = timeline();
        for (number, ticks) in [(7, 100), (3, 2000), (7, 101), (3, 2001), (7, 102)] {
            read(&mut timeline, number, ticks);
        }
        timeline.select(Part::REST);
        timeline.count(Operation::Other, 0, true);
        timeline.counters().kicks.add(4);
        let snapshot = timeline.snapshot(&Clock::simulated().0);
        let counts = |name: &str| {
            let latencies = &snapshot.disks[name];
            let total = &latencies.operations[&Operation::Read].spans[&Span::Total];
            (latencies.counters.requests(), total.count, total.max_ns)
        };
        assert_eq!(counts("d7"), (3, 3, 102));
        assert_eq!(counts("d3"), (2, 2, 2001));
        let whole = &snapshot.latencies;
        assert_eq!((whole.counters.requests(), whole.counters.kicks), (6, 4));
        let total = &whole.operations[&Operation::Read].spans[&Span::Total];
        assert_eq!((total.count, total.max_ns), (5, 2001));
        assert_eq!(timeline.record().counters(), whole.counters);
        timeline.reset();
        let forgotten = timeline.snapshot(&Clock::simulated().0);
        assert_eq!(forgotten.latencies.counters.requests(), 0);
    }

    #[test]
    fn pending_request_is_recorded_under_its_disk() {
        let mut timeline = timeline();
        for (number, submitted) in [(1, 10), (2, 10), (1, 10), (2, 11)] {
            let part = part(&mut timeline, number, Operation::Write);
            timeline.select(part);
            timeline.note_reaped(Operation::Write, Stamp(5), Stamp(submitted));
        }
        timeline.record_answered(Stamp(100), Stamp(101));
        let part = part(&mut timeline, 1, Operation::Write);
        timeline.select(part);
        timeline.record_notified(Stamp(105));
        let snapshot = timeline.snapshot(&Clock::simulated().0);
        for name in ["d1", "d2"] {
            let spans = &snapshot.disks[name].operations[&Operation::Write].spans;
            assert_eq!(
                (spans[&Span::Reaped].count, spans[&Span::Total].count),
                (2, 2)
            );
        }
        assert_eq!(
            snapshot.disks["d1"].operations[&Operation::Write].spans[&Span::Reaped].sum_ns,
            180.0
        );
        assert_eq!(
            snapshot.disks["d2"].operations[&Operation::Write].spans[&Span::Reaped].sum_ns,
            179.0
        );
    }

    #[test]
    fn excess_partitions_are_recorded_together_and_reported() {
        let mut full = timeline();
        full.parts.room = &SMALL;
        for number in 0..4 {
            read(&mut full, number, 100);
        }
        let snapshot = full.snapshot(&Clock::simulated().0);
        assert_eq!(snapshot.disks.keys().collect::<Vec<_>>(), ["d0", "d1"]);
        assert_eq!(snapshot.unmeasured.iter().collect::<Vec<_>>(), ["d2", "d3"]);
        assert_eq!(snapshot.latencies.counters.requests(), 4);
        drop(full);
        let mut next = timeline();
        next.parts.room = &SMALL;
        read(&mut next, 9, 100);
        assert!(
            next.snapshot(&Clock::simulated().0)
                .disks
                .contains_key("d9")
        );
    }

    #[test]
    fn only_an_io_makes_a_part() {
        let mut timeline = timeline();
        assert_eq!(part(&mut timeline, 1, Operation::Other), Part::REST);
        let one = part(&mut timeline, 1, Operation::Read);
        assert_ne!(one, Part::REST);
        assert_eq!(part(&mut timeline, 1, Operation::Other), one);
        let none = timeline.part_of(DiskNumber::NONE, Operation::Read, || unreachable!());
        assert_eq!(none, Part::REST);
    }

    #[test]
    fn disk_of_the_same_name_continues_the_partition() {
        let mut timeline = timeline();
        let first = timeline.part_of(DiskNumber(1), Operation::Read, || Some("a".to_owned()));
        let second = timeline.part_of(DiskNumber(2), Operation::Read, || Some("a".to_owned()));
        for part in [first, second] {
            timeline.select(part);
            timeline.count(Operation::Read, 512, true);
        }
        let snapshot = timeline.snapshot(&Clock::simulated().0);
        assert_eq!(snapshot.disks["a"].counters.requests(), 2);
    }

    #[test]
    fn a_mixed_batch_is_counted_by_part() {
        let mut batch = MixedBatch::default();
        for part in [1, 2, 1] {
            batch.add(&PartCounts {
                part: Part(part),
                at_once: [1, 0, 0, 0, 0],
                pending: [0, 2, 0, 0, 0],
            });
        }
        let counts: Vec<PartCounts> = batch.drain().collect();
        assert_eq!((counts[0].at_once[0], counts[0].pending[1]), (2, 4));
        assert_eq!((counts[1].at_once[0], counts[1].pending[1]), (1, 2));
        assert!(batch.is_empty());
    }
}
