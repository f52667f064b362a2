//! Decisions of copy-before-write, without I/O: which ranges are copied, which copies are in flight, which writes wait, and where a reader
//! finds the data of the point in time.
//!
//! The disk is divided into units. A unit is *settled* when a write may change it: its old data are in the scratch device, no reader
//! needs them, or the point in time has failed. A settled unit never becomes unsettled.
//!
//! Readers take no lock against writes. A reader that has read a unit from the source asks [`Tracker::unsettled_until`] afterwards. If the
//! unit is still unsettled, no write to it had begun before the read ended. Otherwise the reader takes the unit from the scratch device.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use block::IoError;

/// Smallest unit in bytes.
const UNIT_MIN: u64 = 64 << 10;
/// Largest number of units: 8 MiB of bits per disk.
const UNITS_MAX: u64 = 1 << 26;
/// Largest copy in bytes. A longer write is preceded by several.
const COPY_MAX: u64 = 1 << 20;

/// Reason why a point in time is lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PointInTimeError {
    /// Old data could not be read before a write.
    Source(IoError),
    /// Old data could not be written to the scratch file.
    Scratch(IoError),
    /// The scratch file has reached its limit, in bytes.
    Full(u64),
    /// A copy took too long, and a client waited for it.
    TimedOut,
    /// The point in time is not needed any more.
    Ended,
}

impl fmt::Display for PointInTimeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            PointInTimeError::Source(error) => {
                write!(f, "cannot read old data before a write: {error}")
            }
            PointInTimeError::Scratch(error) => {
                write!(f, "cannot write to the scratch file: {error}; hint: name another scratch folder")
            }
            PointInTimeError::Full(limit) => write!(
                f,
                "the scratch file has reached its limit of {limit} bytes, because clients have overwritten more; hint: set a larger scratch limit"
            ),
            PointInTimeError::TimedOut => f.write_str(
                "copying old data to the scratch file timed out; hint: check the storage of the scratch folder",
            ),
            PointInTimeError::Ended => f.write_str("the backup has ended"),
        }
    }
}

impl std::error::Error for PointInTimeError {}

/// Settled units, which every write checks without a lock.
#[derive(Debug)]
pub(crate) struct SettledUnits {
    unit_bytes: u64,
    units: u64,
    bits: Box<[AtomicU64]>,
    /// The point in time has failed: all units are settled.
    failed: AtomicBool,
}

impl SettledUnits {
    fn new(disk_bytes: u64) -> SettledUnits {
        let unit_bytes = disk_bytes.div_ceil(UNITS_MAX).next_power_of_two();
        let unit_bytes = unit_bytes.max(UNIT_MIN);
        let units = disk_bytes.div_ceil(unit_bytes);
        let words = units.div_ceil(64) as usize;
        SettledUnits {
            unit_bytes,
            units,
            bits: (0..words).map(|_| AtomicU64::new(0)).collect(),
            failed: AtomicBool::new(false),
        }
    }

    /// Returns the units that a range of bytes touches. Bytes beyond the end of the point in time belong to none.
    fn units_of(&self, bytes: &Range<u64>) -> Range<u64> {
        let first = bytes.start / self.unit_bytes;
        let end = bytes.end.div_ceil(self.unit_bytes).min(self.units);
        first.min(end)..end
    }

    /// Returns true if a write to this range may start.
    pub fn covers(&self, bytes: &Range<u64>) -> bool {
        let units = self.units_of(bytes);
        self.failed.load(Ordering::Acquire) || self.next(units.clone(), false) == units.end
    }

    /// Returns the first unit that is settled, or not, or the end of the range.
    fn next(&self, units: Range<u64>, settled: bool) -> u64 {
        let mut unit = units.start;
        while unit < units.end {
            let word = self.bits[(unit / 64) as usize].load(Ordering::Acquire);
            let wanted = if settled { word } else { !word };
            let left = wanted >> (unit % 64);
            if left != 0 {
                return (unit + u64::from(left.trailing_zeros())).min(units.end);
            }
            unit = (unit / 64 + 1) * 64;
        }
        units.end
    }

    fn settle(&self, units: Range<u64>) {
        let mut unit = units.start;
        while unit < units.end {
            let end = units.end.min((unit / 64 + 1) * 64);
            let ones = u64::MAX >> (64 - (end - unit)) << (unit % 64);
            self.bits[(unit / 64) as usize].fetch_or(ones, Ordering::AcqRel);
            unit = end;
        }
    }
}

/// Decision about a write.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Claim {
    /// The write may start.
    Settled,
    /// The caller copies this range of bytes, reports the end of the copy, and claims again.
    Copy(Range<u64>),
    /// Another write copies a part of the range. The waiter is returned at the end of that copy and claims again.
    Wait,
}

/// Location of a part of the point in time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Location {
    /// Unchanged on the source.
    Source,
    Scratch,
}

/// A copy in flight.
#[derive(Debug)]
struct CopyInFlight<W> {
    /// First unit after the copy.
    end: u64,
    /// Writes that continue after the copy.
    waiting: Vec<W>,
}

/// State of one point in time. `W` identifies a waiting write.
#[derive(Debug)]
pub(crate) struct Tracker<W> {
    disk_bytes: u64,
    settled: Arc<SettledUnits>,
    /// Copies in flight by their first unit.
    copying: BTreeMap<u64, CopyInFlight<W>>,
    scratch_limit: u64,
    scratch_used: u64,
    /// Bytes from the start of the disk that no reader needs any more.
    released: u64,
    failure: Option<PointInTimeError>,
}

impl<W> Tracker<W> {
    /// Creates the state at the point in time of a disk.
    pub fn new(disk_bytes: u64, scratch_limit: u64) -> Tracker<W> {
        Tracker {
            disk_bytes,
            settled: Arc::new(SettledUnits::new(disk_bytes)),
            copying: BTreeMap::new(),
            scratch_limit,
            scratch_used: 0,
            released: 0,
            failure: None,
        }
    }

    /// Returns the size of the disk at the point in time.
    pub fn disk_bytes(&self) -> u64 {
        self.disk_bytes
    }

    pub fn settled(&self) -> &Arc<SettledUnits> {
        &self.settled
    }

    pub fn failure(&self) -> Option<PointInTimeError> {
        self.failure
    }

    pub fn scratch_used(&self) -> u64 {
        self.scratch_used
    }

    fn bytes_of(&self, units: Range<u64>) -> Range<u64> {
        let unit_bytes = self.settled.unit_bytes;
        let end = units.end.saturating_mul(unit_bytes).min(self.disk_bytes);
        units.start * unit_bytes..end
    }

    /// Decides about a write to a range of bytes.
    pub fn claim(&mut self, bytes: &Range<u64>, waiter: impl FnOnce() -> W) -> Claim {
        if self.failure.is_some() {
            return Claim::Settled;
        }
        let units = self.settled.units_of(bytes);
        let first = self.settled.next(units.clone(), false);
        if first == units.end {
            return Claim::Settled;
        }
        if let Some((_, copy)) = self.copying.range_mut(..=first).next_back()
            && first < copy.end
        {
            copy.waiting.push(waiter());
            return Claim::Wait;
        }
        let most = (COPY_MAX / self.settled.unit_bytes).max(1);
        let mut end = self.settled.next(first..units.end.min(first + most), true);
        if let Some((next, _)) = self.copying.range(first..end).next() {
            end = *next;
        }
        let waiting = Vec::new();
        self.copying.insert(first, CopyInFlight { end, waiting });
        Claim::Copy(self.bytes_of(first..end))
    }

    /// Reserves space for a copy in the scratch device.
    ///
    /// # Errors
    /// The limit would be exceeded.
    pub fn reserve(&mut self, bytes: u64) -> Result<(), PointInTimeError> {
        if bytes > self.scratch_limit.saturating_sub(self.scratch_used) {
            return Err(PointInTimeError::Full(self.scratch_limit));
        }
        self.scratch_used += bytes;
        Ok(())
    }

    /// Records that the copy of a claimed range is in the scratch device. Returns the writes that waited for it.
    pub fn copied(&mut self, bytes: &Range<u64>) -> Vec<W> {
        let first = bytes.start / self.settled.unit_bytes;
        // The copies of a lost point in time were removed.
        let Some(copy) = self.copying.remove(&first) else {
            return Vec::new();
        };
        self.settled.settle(first..copy.end);
        copy.waiting
    }

    /// Records the loss of the point in time: writes may start, reads fail. Returns all waiting writes.
    pub fn fail(&mut self, error: PointInTimeError) -> Vec<W> {
        self.failure.get_or_insert(error);
        self.settled.failed.store(true, Ordering::Release);
        let copying = std::mem::take(&mut self.copying);
        copying
            .into_values()
            .flat_map(|copy| copy.waiting)
            .collect()
    }

    /// Records that no reader needs the bytes before `end` any more. Only whole units are released: a reader may read whole blocks around
    /// its range.
    pub fn release(&mut self, end: u64) {
        let unit_bytes = self.settled.unit_bytes;
        let whole = |bytes: u64| match bytes >= self.disk_bytes {
            true => self.settled.units,
            false => bytes / unit_bytes,
        };
        let (before, now) = (whole(self.released), whole(end));
        self.released = self.released.max(self.bytes_of(0..now).end);
        self.settled.settle(before.min(now)..now);
    }

    /// Returns the location of the point in time at the start of a range, and the end of the part that has it.
    ///
    /// # Errors
    /// The point in time is lost, or the range was released.
    pub fn locate(&self, bytes: &Range<u64>) -> Result<(Location, u64), PointInTimeError> {
        self.check(bytes)?;
        let units = self.settled.units_of(bytes);
        let unsettled = self.settled.next(units.clone(), false);
        let (location, end) = match unsettled > units.start {
            true => (Location::Scratch, unsettled),
            false => (Location::Source, self.settled.next(units, true)),
        };
        Ok((location, self.bytes_of(0..end).end.min(bytes.end)))
    }

    /// Returns the end of the part of a range that was unsettled during the read that has just ended.
    ///
    /// # Errors
    /// As [`Tracker::locate`].
    pub fn unsettled_until(&self, bytes: &Range<u64>) -> Result<u64, PointInTimeError> {
        self.check(bytes)?;
        let units = self.settled.units_of(bytes);
        let end = self.settled.next(units.clone(), true);
        let end = self.bytes_of(0..end).end;
        Ok(end.clamp(bytes.start, bytes.end))
    }

    fn check(&self, bytes: &Range<u64>) -> Result<(), PointInTimeError> {
        match self.failure {
            Some(error) => Err(error),
            None if bytes.start < self.released => Err(PointInTimeError::Ended),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use block::IoErrorKind;
    use proptest::prelude::*;

    const UNIT: u64 = UNIT_MIN;
    /// Granularity of the model in bytes.
    const BLOCK: u64 = UNIT / 2;
    const BLOCKS: u64 = 41;
    /// The last unit is not whole.
    const SIZE: u64 = BLOCKS * BLOCK;

    #[test]
    fn overlapping_write_waits_for_the_copy_of_the_first() {
        let mut tracker = Tracker::new(SIZE, u64::MAX);
        let never = || -> u32 { panic!("it does not wait") };
        assert_eq!(
            tracker.claim(&(UNIT + 512..2 * UNIT + 512), never),
            Claim::Copy(UNIT..3 * UNIT)
        );
        assert_eq!(tracker.claim(&(0..2 * UNIT), never), Claim::Copy(0..UNIT));
        assert_eq!(tracker.claim(&(2 * UNIT..4 * UNIT), || 7), Claim::Wait);
        assert!(!tracker.settled().covers(&(UNIT..UNIT + 1)));
        assert_eq!(tracker.copied(&(UNIT..3 * UNIT)), [7]);
        assert!(tracker.settled().covers(&(UNIT..3 * UNIT)));
        assert!(!tracker.settled().covers(&(0..3 * UNIT)));
        assert_eq!(
            tracker.claim(&(2 * UNIT..4 * UNIT), never),
            Claim::Copy(3 * UNIT..4 * UNIT)
        );
        assert_eq!(
            tracker.claim(&(SIZE - 1..SIZE + UNIT), never),
            Claim::Copy(20 * UNIT..SIZE)
        );
        // The point in time does not contain bytes beyond its end.
        assert_eq!(
            tracker.claim(&(22 * UNIT..23 * UNIT), never),
            Claim::Settled
        );
    }

    #[test]
    fn failure_and_limit_end_the_point_and_no_write() {
        let mut tracker = Tracker::new(SIZE, UNIT);
        assert_eq!(tracker.claim(&(0..UNIT), || 1), Claim::Copy(0..UNIT));
        assert_eq!(tracker.claim(&(0..UNIT), || 2), Claim::Wait);
        assert_eq!(tracker.reserve(UNIT), Ok(()));
        assert_eq!(tracker.reserve(1), Err(PointInTimeError::Full(UNIT)));
        assert_eq!(tracker.fail(PointInTimeError::Full(UNIT)), [2]);
        assert_eq!(tracker.claim(&(0..SIZE), || 3), Claim::Settled);
        assert!(tracker.settled().covers(&(0..SIZE)));
        assert!(tracker.copied(&(0..UNIT)).is_empty());
        let lost = Err(PointInTimeError::Full(UNIT));
        assert_eq!(tracker.locate(&(0..UNIT)), lost);
        let error = IoErrorKind::Offline.into();
        tracker.fail(PointInTimeError::Source(error));
        assert_eq!(
            tracker.unsettled_until(&(0..UNIT)),
            Err(PointInTimeError::Full(UNIT))
        );
    }

    #[test]
    fn only_whole_units_are_released() {
        let mut tracker = Tracker::<()>::new(SIZE, 0);
        tracker.release(2 * UNIT + 1024);
        assert_eq!(
            tracker.locate(&(2 * UNIT..SIZE)),
            Ok((Location::Source, SIZE))
        );
        let released = Err(PointInTimeError::Ended);
        assert_eq!(tracker.locate(&(2 * UNIT - 512..SIZE)), released);
        assert!(tracker.settled().covers(&(0..2 * UNIT)));
        assert!(!tracker.settled().covers(&(2 * UNIT..2 * UNIT + 512)));
        tracker.release(SIZE);
        assert!(tracker.settled().covers(&(0..SIZE)));
    }

    #[test]
    fn units_grow_with_the_disk() {
        let tracker = Tracker::<()>::new(64 << 40, 0);
        assert_eq!(tracker.settled().unit_bytes, 1 << 20);
        let tracker = Tracker::<()>::new(4 << 40, 0);
        assert_eq!(tracker.settled().unit_bytes, UNIT_MIN);
        assert!(Tracker::<()>::new(0, 0).settled().covers(&(0..u64::MAX)));
    }

    /// A client's write in the model: blocks, new value, and its progress.
    #[derive(Clone, Debug)]
    struct Write {
        blocks: Range<u64>,
        value: u32,
        stage: Stage,
    }

    #[derive(Clone, Debug, PartialEq)]
    enum Stage {
        Waiting,
        /// The old data were read, or will be with the next step.
        Copying(Range<u64>, Option<Vec<u32>>),
        Writing,
        Done,
    }

    /// A reader's progress over the whole disk.
    #[derive(Debug, Default)]
    struct Reader {
        at: u64,
        found: Vec<u32>,
        /// Part that was read from the source and not yet confirmed.
        unconfirmed: Option<(u64, Vec<u32>)>,
    }

    #[derive(Debug)]
    struct Model {
        tracker: Tracker<usize>,
        source: Vec<u32>,
        scratch: Vec<Option<u32>>,
        writes: Vec<Write>,
        reader: Reader,
        releases: bool,
    }

    fn blocks_of(bytes: &Range<u64>) -> Range<usize> {
        (bytes.start / BLOCK) as usize..(bytes.end / BLOCK) as usize
    }

    impl Model {
        fn claim(&mut self, index: usize) {
            let blocks = self.writes[index].blocks.clone();
            let bytes = blocks.start * BLOCK..blocks.end * BLOCK;
            self.writes[index].stage = match self.tracker.claim(&bytes, || index) {
                Claim::Settled => Stage::Writing,
                Claim::Wait => Stage::Waiting,
                Claim::Copy(range) => Stage::Copying(range, None),
            };
        }

        /// Completes the next I/O of a write.
        fn step_write(&mut self, index: usize) {
            let write = self.writes[index].clone();
            match write.stage {
                Stage::Waiting | Stage::Done => {}
                Stage::Copying(range, None) => {
                    let old = self.source[blocks_of(&range)].to_vec();
                    self.writes[index].stage = Stage::Copying(range, Some(old));
                }
                Stage::Copying(range, Some(old)) => {
                    for (block, value) in blocks_of(&range).zip(old) {
                        self.scratch[block] = Some(value);
                    }
                    for waiting in self.tracker.copied(&range) {
                        self.claim(waiting);
                    }
                    self.claim(index);
                }
                Stage::Writing => {
                    for block in write.blocks.clone() {
                        self.source[block as usize] = write.value;
                    }
                    self.writes[index].stage = Stage::Done;
                }
            }
        }

        /// Completes the next I/O of the reader. Returns false at the end or after a failure.
        fn step_reader(&mut self, length: u64) -> bool {
            if let Some((start, values)) = self.reader.unconfirmed.take() {
                let end = start + values.len() as u64 * BLOCK;
                let Ok(valid) = self.tracker.unsettled_until(&(start..end)) else {
                    return false;
                };
                let valid_blocks = ((valid - start) / BLOCK) as usize;
                self.reader.found.extend(&values[..valid_blocks]);
                self.reader.at = valid;
            } else {
                let wanted = self.reader.at..SIZE.min(self.reader.at + length);
                if wanted.is_empty() {
                    return false;
                }
                let Ok((location, end)) = self.tracker.locate(&wanted) else {
                    return false;
                };
                assert!(end > wanted.start && end <= wanted.end);
                let blocks = blocks_of(&(wanted.start..end));
                match location {
                    Location::Source => {
                        let values = self.source[blocks].to_vec();
                        self.reader.unconfirmed = Some((wanted.start, values));
                    }
                    Location::Scratch => {
                        // A hole of the scratch device would be a lost copy.
                        let values = self.scratch[blocks].iter().map(|value| value.unwrap());
                        self.reader.found.extend(values);
                        self.reader.at = end;
                    }
                }
            }
            if self.releases {
                self.tracker.release(self.reader.at);
            }
            true
        }
    }

    #[derive(Clone, Debug)]
    enum Event {
        Write(u64, u64),
        Step(prop::sample::Index),
        Read(u64),
        Fail,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            30 => (0..BLOCKS, 1..12u64).prop_map(|(at, n)| Event::Write(at, n.min(BLOCKS - at))),
            80 => any::<prop::sample::Index>().prop_map(Event::Step),
            25 => (1..9u64).prop_map(|blocks| Event::Read(blocks * BLOCK)),
            1 => Just(Event::Fail),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

        /// Copies and writes complete in any order. Each read of the point in time has the values of its start.
        #[test]
        fn every_read_has_the_values_of_the_start(
            events in prop::collection::vec(event(), 1..400),
            releases in any::<bool>(),
        ) {
            let start: Vec<u32> = (0..BLOCKS as u32).map(|block| 1000 + block).collect();
            let mut model = Model {
                tracker: Tracker::new(SIZE, u64::MAX),
                source: start.clone(),
                scratch: vec![None; BLOCKS as usize],
                writes: Vec::new(),
                reader: Reader::default(),
                releases,
            };
            let mut values = 0..;
            for event in events {
                match event {
                    Event::Write(at, n) => {
                        let value = values.next().unwrap();
                        let stage = Stage::Waiting;
                        model.writes.push(Write { blocks: at..at + n, value, stage });
                        model.claim(model.writes.len() - 1);
                    }
                    Event::Step(index) if !model.writes.is_empty() => {
                        model.step_write(index.index(model.writes.len()));
                    }
                    Event::Step(_) => {}
                    Event::Read(length) => { model.step_reader(length); }
                    Event::Fail => {
                        for waiting in model.tracker.fail(PointInTimeError::TimedOut) {
                            model.claim(waiting);
                        }
                    }
                }
            }
            // No write waits forever.
            for _ in 0..BLOCKS * 4 {
                for index in 0..model.writes.len() {
                    model.step_write(index);
                }
            }
            prop_assert!(model.writes.iter().all(|write| write.stage == Stage::Done));
            while model.step_reader(4 * BLOCK) {}
            if model.tracker.failure().is_none() {
                prop_assert_eq!(model.reader.at, SIZE);
            }
            let read = model.reader.found.len();
            prop_assert_eq!(&model.reader.found[..], &start[..read]);
        }
    }
}
