//! One clone of a job on one thread: creates its requests and counts them.

use std::sync::Arc;
use std::time::Duration;

use latency::{Clock, Histogram, SparseHistogram, Stamp};

use super::log::{LogEntry, Logger};
use crate::driver::IoKind;
use crate::job::{Job, Trims};
use crate::verify::Record;
use crate::workload::{Direction, Generator, Io};

/// Counts of one direction or of flushes.
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Tally {
    /// Number of requests.
    pub ios: u64,
    /// Number of bytes.
    pub bytes: u64,
    /// Latencies.
    pub latency: SparseHistogram,
}

/// Sums of request stamps, modulo 2^64, including requests that are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moments {
    /// Number of requests.
    pub count: u64,
    /// Sum of the stamps at publication.
    pub published: u64,
    /// Sum of the stamps at which responses were seen.
    pub seen: u64,
}

impl Moments {
    /// Adds a request.
    #[inline]
    pub fn add(&mut self, published: Stamp, seen: Stamp) {
        self.merge(&Moments {
            count: 1,
            published: published.0,
            seen: seen.0,
        });
    }

    /// Adds the sums of `other`.
    #[inline]
    pub fn merge(&mut self, other: &Moments) {
        self.count += other.count;
        self.published = self.published.wrapping_add(other.published);
        self.seen = self.seen.wrapping_add(other.seen);
    }
}

/// Results of one clone.
#[derive(Clone, Debug, Default)]
pub struct StreamResult {
    /// Index of the job in the phase.
    pub job: usize,
    /// Reads, writes, flushes, discards.
    pub tallies: [Tally; 4],
    /// Stamp sums of all requests, in the same order.
    pub moments: [Moments; 4],
    /// Measured time in nanoseconds.
    pub elapsed_ns: u64,
    /// Number of failed requests.
    pub errors: u64,
    /// Number of differences found by verification.
    pub differences: u64,
    /// Bytes verified as correct.
    pub verified_bytes: u64,
    /// First errors and differences, as text.
    pub complaints: Vec<String>,
    /// Index of the clone.
    pub clone: u32,
    /// Entries for log files.
    pub log: Vec<LogEntry>,
}

const COMPLAINTS_MAX: usize = 10;

/// Rate limiter of one direction.
struct Pace {
    gap: u64,
    due: u64,
}

struct Measures {
    histogram: Box<Histogram>,
    bytes: u64,
    ios: u64,
}

/// One clone of a job.
pub struct Stream {
    job: Arc<Job>,
    index: usize,
    clone: u32,
    generators: Vec<Generator>,
    next_device: usize,
    current_device: u16,
    records: Vec<Record>,
    pace: [Option<Pace>; 3],
    /// Request delayed by the rate.
    held: Option<Io>,
    waiting: bool,
    measures: [Measures; 4],
    moments: [Moments; 4],
    since: Stamp,
    until: Option<Stamp>,
    last: Stamp,
    counting: bool,
    checking: bool,
    writes_since_flush: u32,
    over: bool,
    errors: u64,
    differences: u64,
    verified_bytes: u64,
    complaints: Vec<String>,
    logger: Option<Box<Logger>>,
}

impl Stream {
    /// Creates a clone of `job`, number `index` of the phase, with one generator per device of the thread.
    pub fn new(
        job: Arc<Job>,
        index: usize,
        clone: u32,
        generators: Vec<Generator>,
        clock: &Clock,
    ) -> Stream {
        let second = clock.ticks(Duration::from_secs(1));
        let pace = |rate: Option<u32>| {
            rate.filter(|rate| *rate > 0).map(|rate| Pace {
                gap: second / u64::from(rate),
                due: 0,
            })
        };
        let records = job.verify.map_or(Vec::new(), |verify| {
            let unit = unit_of(&job);
            let seed = job.seed ^ (u64::from(clone) << 32);
            let record = |generator: &Generator| {
                let (start, length) = generator.range();
                Record::new(verify.checksum, seed, start, length, unit)
            };
            generators.iter().map(record).collect()
        });
        let measures = || Measures {
            histogram: Box::default(),
            bytes: 0,
            ios: 0,
        };
        Stream {
            index,
            clone,
            generators,
            next_device: 0,
            current_device: 0,
            records,
            pace: [
                pace(job.rate.map(|rate| rate.read)),
                pace(job.rate.map(|rate| rate.write)),
                pace(job.rate.map(|rate| rate.trim)),
            ],
            held: None,
            waiting: false,
            measures: std::array::from_fn(|_| measures()),
            moments: Default::default(),
            since: Stamp(0),
            until: None,
            last: Stamp(0),
            counting: true,
            checking: false,
            writes_since_flush: 0,
            over: false,
            errors: 0,
            differences: 0,
            verified_bytes: 0,
            complaints: Vec::new(),
            logger: job
                .logs
                .any()
                .then(|| Box::new(Logger::new(job.logs.average, clock))),
            job,
        }
    }

    /// Returns the number of requests in flight.
    pub fn depth(&self) -> u16 {
        self.job.iodepth
    }

    /// Returns the size of the largest request.
    pub fn largest(&self) -> u32 {
        self.job.largest()
    }

    /// Starts counting.
    pub fn begin(&mut self, now: Stamp) {
        for measures in &mut self.measures {
            measures.histogram.clear();
            (measures.bytes, measures.ios) = (0, 0);
        }
        for pace in self.pace.iter_mut().flatten() {
            pace.due = now.0;
        }
        if let Some(logger) = &mut self.logger {
            logger.begin(now);
        }
        (self.since, self.last) = (now, now);
    }

    /// Stops counting.
    pub fn end(&mut self, now: Stamp) {
        if !self.counting {
            return;
        }
        self.counting = false;
        // A stream that ended by itself uses its own end time.
        self.until = Some(if self.over { self.last } else { now });
    }

    /// Returns true if the rate permits the next request now.
    #[inline]
    pub fn may_start(&mut self, now: Stamp) -> bool {
        self.waiting = false;
        if self.over {
            return false;
        }
        if self.job.rate.is_none() {
            return true;
        }
        if self.held.is_none() {
            self.held = self.generate();
        }
        let Some(io) = self.held else { return false };
        match &mut self.pace[io.direction as usize] {
            Some(pace) if pace.due > now.0 => {
                self.waiting = true;
                false
            }
            Some(pace) => {
                pace.due += pace.gap;
                true
            }
            None => true,
        }
    }

    /// Returns true if [`Stream::may_start`] refused because of the rate.
    pub fn is_waiting(&self) -> bool {
        self.waiting
    }

    #[inline]
    fn generate(&mut self) -> Option<Io> {
        if let [only] = &mut self.generators[..] {
            let io = only.next();
            self.over |= io.is_none();
            return io;
        }
        // Files are used in turn; finished ones are skipped.
        for _ in 0..self.generators.len() {
            let device = self.next_device;
            self.next_device = (device + 1) % self.generators.len();
            if let Some(io) = self.generators[device].next() {
                self.current_device = device as u16;
                return Some(io);
            }
        }
        self.over = true;
        None
    }

    /// Returns the next request.
    #[inline]
    pub fn next_request(&mut self) -> Option<(IoKind, Io)> {
        if let Some(every) = self.job.flush_every
            && self.writes_since_flush >= every
        {
            self.writes_since_flush = 0;
            let io = Io {
                direction: Direction::Write,
                offset: 0,
                length: 0,
            };
            return Some((IoKind::Flush, io));
        }
        let mut io = match self.held.take() {
            Some(io) => io,
            None => self.generate()?,
        };
        if !self.records.is_empty() && io.direction == Direction::Write {
            // Two concurrent writes to a block would leave an undefined result.
            let mut tries = 0;
            while self.records[usize::from(self.current_device)].is_busy(io.offset, io.length) {
                tries += 1;
                if tries > 1000 {
                    return None;
                }
                io = self.generate()?;
                if io.direction != Direction::Write {
                    break;
                }
            }
        }
        let ask = match io.direction {
            Direction::Read => IoKind::Read,
            Direction::Write => IoKind::Write,
            Direction::Trim => IoKind::Trim,
        };
        self.writes_since_flush += u32::from(ask == IoKind::Write);
        Some((ask, io))
    }

    /// Returns true if discarded blocks are written next.
    #[inline]
    pub fn writes_after_trims(&self) -> bool {
        self.job.pattern.trims == Trims::ThenWrite
    }

    /// Counts the write after a discard.
    pub fn follow_up(&mut self) {
        self.writes_since_flush += 1;
    }

    /// Returns the index of the device for the last request.
    #[inline]
    pub fn device(&self) -> u16 {
        self.current_device
    }

    /// Counts a completed request.
    #[inline]
    pub fn count(&mut self, ask: IoKind, offset: u64, length: u32, ticks: u64, now: Stamp) {
        if !self.counting {
            return;
        }
        let measures = &mut self.measures[ask as usize];
        measures.histogram.record(ticks, 1);
        measures.bytes += u64::from(length);
        measures.ios += 1;
        self.last = now;
        if let Some(logger) = &mut self.logger {
            logger.record(now, ask, offset, length, ticks);
        }
    }

    /// Records the stamps of a request, whether it is counted or not.
    #[inline]
    pub fn note(&mut self, ask: IoKind, published: Stamp, seen: Stamp) {
        self.moments[ask as usize].add(published, seen);
    }

    /// Records a failed request and ends the stream, as fio does.
    #[cold]
    pub fn failed(&mut self, ask: IoKind, offset: u64, length: u32) {
        self.errors += 1;
        self.over = true;
        self.complain(format!("{ask:?} of {length} bytes at {offset} failed"));
    }

    fn complain(&mut self, what: String) {
        if self.complaints.len() < COMPLAINTS_MAX {
            self.complaints.push(what);
        }
    }

    /// Returns true if the stream verifies content.
    #[inline]
    pub fn verifies(&self) -> bool {
        !self.records.is_empty()
    }

    /// Returns true if reads are verified: during the final check, and always in a read-only job.
    pub fn checks_reads(&self) -> bool {
        self.checking || !self.job.pattern.writes()
    }

    /// Fills data to be written.
    pub fn fill(&mut self, device: u16, offset: u64, data: &mut [u8]) {
        self.records[usize::from(device)].begin(offset, data);
    }

    /// Records the completion of a write.
    pub fn written(&mut self, device: u16, offset: u64, length: u32) {
        self.records[usize::from(device)].end(offset, length);
    }

    /// Verifies data that was read.
    pub fn check(&mut self, device: u16, offset: u64, data: &[u8]) {
        match self.records[usize::from(device)].check(offset, data) {
            Ok(()) => self.verified_bytes += data.len() as u64,
            Err(what) => {
                self.differences += 1;
                self.complain(what);
                if self.job.verify.is_some_and(|verify| verify.fatal) {
                    self.over = true;
                }
            }
        }
    }

    /// Returns true if the stream ends with a flush.
    pub fn flushes_at_end(&self) -> bool {
        self.job.pattern.writes() && self.job.flush_at_end
    }

    /// Returns true if written data is read back.
    pub fn reads_back(&self) -> bool {
        self.job.pattern.writes() && self.job.verify.is_some_and(|verify| verify.read_back)
    }

    /// Returns the ranges written to a device.
    pub fn runs(&mut self, device: u16) -> Vec<(u64, u32)> {
        self.over = false;
        let largest = self.job.largest();
        self.records
            .get(usize::from(device))
            .map_or(Vec::new(), |record| record.written(largest).collect())
    }

    /// Starts verification of reads.
    pub fn begin_check(&mut self) {
        self.checking = true;
    }

    /// Ends verification of reads.
    pub fn end_check(&mut self) {
        self.checking = false;
    }

    /// Returns true if the stream has ended.
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Returns the counted requests and bytes.
    pub fn counted(&self) -> (u64, u64) {
        let each = self.measures.iter();
        each.fold((0, 0), |sum, one| (sum.0 + one.ios, sum.1 + one.bytes))
    }

    /// Returns the results.
    pub fn result(self, clock: &Clock) -> StreamResult {
        let until = self.until.unwrap_or(self.last);
        let tallies = self.measures.map(|measures| Tally {
            ios: measures.ios,
            bytes: measures.bytes,
            latency: SparseHistogram::from_ticks(&measures.histogram, clock),
        });
        StreamResult {
            job: self.index,
            clone: self.clone,
            tallies,
            moments: self.moments,
            elapsed_ns: clock.nanos(until.since(self.since)).max(1),
            errors: self.errors,
            differences: self.differences,
            verified_bytes: self.verified_bytes,
            complaints: self.complaints,
            log: self.logger.map_or(Vec::new(), |logger| logger.finish()),
        }
    }
}

/// Returns the greatest common divisor of all sizes of a job, at least 512.
fn unit_of(job: &Job) -> u32 {
    fn divisor(a: u32, b: u32) -> u32 {
        if b == 0 { a } else { divisor(b, a % b) }
    }
    let sizes = job.sizes.iter().flat_map(|sizes| sizes.named());
    sizes.fold(0, divisor).max(512)
}
