//! One clone of a job on one thread: its next request, and all that is counted of it.

use std::sync::Arc;
use std::time::Duration;

use latency::{Clock, Histogram, SparseHistogram, Stamp};

use super::log::{LogEntry, Logger};
use crate::driver::Ask;
use crate::job::{Job, Trims};
use crate::verify::Record;
use crate::workload::{Direction, Generator, Io};

/// Counts of one direction (or of flushes).
#[derive(Clone, Debug, Default, serde::Serialize, serde::Deserialize)]
pub struct Tally {
    /// Requests.
    pub ios: u64,
    /// Bytes.
    pub bytes: u64,
    /// How long each took.
    pub latency: SparseHistogram,
}

/// Sums of the stamps of requests, modulo 2^64; those that do not count included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moments {
    /// Requests.
    pub count: u64,
    /// When they were published.
    pub published: u64,
    /// When their answers were seen.
    pub seen: u64,
}

impl Moments {
    /// One request more.
    #[inline]
    pub fn add(&mut self, published: Stamp, seen: Stamp) {
        self.merge(&Moments {
            count: 1,
            published: published.0,
            seen: seen.0,
        });
    }

    /// Others' requests too.
    #[inline]
    pub fn merge(&mut self, other: &Moments) {
        self.count += other.count;
        self.published = self.published.wrapping_add(other.published);
        self.seen = self.seen.wrapping_add(other.seen);
    }
}

/// What one clone found out.
#[derive(Clone, Debug, Default)]
pub struct StreamResult {
    /// Which job of the phase.
    pub job: usize,
    /// Reads, writes, flushes, discards.
    pub tallies: [Tally; 4],
    /// The same, of all requests.
    pub moments: [Moments; 4],
    /// The measured time.
    pub elapsed_ns: u64,
    /// Requests that failed.
    pub errors: u64,
    /// Differences found.
    pub differences: u64,
    /// Bytes that were read back and are right.
    pub verified_bytes: u64,
    /// The first of both, in words.
    pub complaints: Vec<String>,
    /// Which clone of it.
    pub clone: u32,
    /// For log files.
    pub log: Vec<LogEntry>,
}

/// More complaints than anyone reads.
const COMPLAINTS_MAX: usize = 10;

/// Keeps the rate of one direction.
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
    /// A request that the rate has not let pass yet.
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
    /// A clone of `job`, the phase's number `index`, with one generator for each of the thread's devices.
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

    /// Requests in flight.
    pub fn depth(&self) -> u16 {
        self.job.iodepth
    }

    /// The largest request.
    pub fn largest(&self) -> u32 {
        self.job.largest()
    }

    /// Counts from now on.
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

    /// Counts no more.
    pub fn end(&mut self, now: Stamp) {
        if !self.counting {
            return;
        }
        self.counting = false;
        // A stream that came to its end by itself has its own time.
        self.until = Some(if self.over { self.last } else { now });
    }

    /// Is the next request's time there? Without a rate it always is.
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

    /// Did [`Stream::may_start`] refuse because of the rate?
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
        // Files take turns; one that is done is passed over.
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

    /// The next request.
    #[inline]
    pub fn next_request(&mut self) -> Option<(Ask, Io)> {
        if let Some(every) = self.job.flush_every
            && self.writes_since_flush >= every
        {
            self.writes_since_flush = 0;
            let io = Io {
                direction: Direction::Write,
                offset: 0,
                length: 0,
            };
            return Some((Ask::Flush, io));
        }
        let mut io = match self.held.take() {
            Some(io) => io,
            None => self.generate()?,
        };
        if !self.records.is_empty() && io.direction == Direction::Write {
            // Two writes of one block at a time would leave either.
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
            Direction::Read => Ask::Read,
            Direction::Write => Ask::Write,
            Direction::Trim => Ask::Trim,
        };
        self.writes_since_flush += u32::from(ask == Ask::Write);
        Some((ask, io))
    }

    /// Is what was discarded written next?
    #[inline]
    pub fn writes_after_trims(&self) -> bool {
        self.job.pattern.trims == Trims::ThenWrite
    }

    /// Such a write is on its way.
    pub fn follow_up(&mut self) {
        self.writes_since_flush += 1;
    }

    /// Which of the thread's devices the last request is for.
    #[inline]
    pub fn device(&self) -> u16 {
        self.current_device
    }

    /// Counts a request that was answered.
    #[inline]
    pub fn count(&mut self, ask: Ask, offset: u64, length: u32, ticks: u64, now: Stamp) {
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

    /// Notes when a request was published and seen, whether it counts or not.
    #[inline]
    pub fn note(&mut self, ask: Ask, published: Stamp, seen: Stamp) {
        self.moments[ask as usize].add(published, seen);
    }

    /// A request failed: the stream ends, as fio's does.
    #[cold]
    pub fn failed(&mut self, ask: Ask, offset: u64, length: u32) {
        self.errors += 1;
        self.over = true;
        self.complain(format!("{ask:?} of {length} bytes at {offset} failed"));
    }

    fn complain(&mut self, what: String) {
        if self.complaints.len() < COMPLAINTS_MAX {
            self.complaints.push(what);
        }
    }

    /// Does it check content at all?
    #[inline]
    pub fn verifies(&self) -> bool {
        !self.records.is_empty()
    }

    /// A job that only reads checks what it reads; one that writes does so afterwards.
    pub fn checks_reads(&self) -> bool {
        self.checking || !self.job.pattern.writes()
    }

    /// Fills what is to be written.
    pub fn fill(&mut self, device: u16, offset: u64, data: &mut [u8]) {
        self.records[usize::from(device)].begin(offset, data);
    }

    /// A write has come back.
    pub fn written(&mut self, device: u16, offset: u64, length: u32) {
        self.records[usize::from(device)].end(offset, length);
    }

    /// Looks at what was read.
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

    /// Shall a flush end it?
    pub fn flushes_at_end(&self) -> bool {
        self.job.pattern.writes() && self.job.flush_at_end
    }

    /// Shall what it wrote be read back?
    pub fn reads_back(&self) -> bool {
        self.job.pattern.writes() && self.job.verify.is_some_and(|verify| verify.read_back)
    }

    /// What it wrote to a device.
    pub fn runs(&mut self, device: u16) -> Vec<(u64, u32)> {
        self.over = false;
        let largest = self.job.largest();
        self.records
            .get(usize::from(device))
            .map_or(Vec::new(), |record| record.written(largest).collect())
    }

    /// From here on reads are checked.
    pub fn begin_check(&mut self) {
        self.checking = true;
    }

    /// Until here.
    pub fn end_check(&mut self) {
        self.checking = false;
    }

    /// Did it come to its end?
    pub fn is_over(&self) -> bool {
        self.over
    }

    /// Requests and bytes that count.
    pub fn counted(&self) -> (u64, u64) {
        let each = self.measures.iter();
        each.fold((0, 0), |sum, one| (sum.0 + one.ios, sum.1 + one.bytes))
    }

    /// What it found out.
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

/// The unit that all sizes of a job are multiples of.
fn unit_of(job: &Job) -> u32 {
    fn divisor(a: u32, b: u32) -> u32 {
        if b == 0 { a } else { divisor(b, a % b) }
    }
    let sizes = job.sizes.iter().flat_map(|sizes| sizes.named());
    sizes.fold(0, divisor).max(512)
}
