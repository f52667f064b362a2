//! What a job says, as data: everything that a job file or the flags for the quick way can ask for.

use std::time::Duration;

/// Does a job discard what it comes to?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trims {
    /// It reads and writes.
    No,
    /// It does nothing else.
    Only,
    /// Each block is discarded, then written.
    ThenWrite,
}

/// Order and mixture of reads and writes, or discards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// In random order.
    pub random: bool,
    /// How many of 100 are reads.
    pub read_percent: u8,
    /// Discards, which leave no room for reads.
    pub trims: Trims,
}

impl Pattern {
    /// A pattern of reads and writes.
    pub const fn new(random: bool, read_percent: u8) -> Pattern {
        Pattern {
            random,
            read_percent,
            trims: Trims::No,
        }
    }

    /// A pattern that discards.
    pub const fn trimming(random: bool, trims: Trims) -> Pattern {
        Pattern {
            random,
            read_percent: 0,
            trims,
        }
    }

    /// Does it read at all?
    pub const fn reads(self) -> bool {
        self.read_percent > 0
    }

    /// Does it write at all?
    pub const fn writes(self) -> bool {
        self.read_percent < 100 && !matches!(self.trims, Trims::Only)
    }

    /// Does it discard at all?
    pub const fn trims(self) -> bool {
        !matches!(self.trims, Trims::No)
    }

    /// fio's word for it.
    pub fn word(self) -> &'static str {
        match (self.trims, self.random) {
            (Trims::Only, false) => return "trim",
            (Trims::Only, true) => return "randtrim",
            (Trims::ThenWrite, false) => return "trimwrite",
            (Trims::ThenWrite, true) => return "randtrimwrite",
            (Trims::No, _) => {}
        }
        match (self.random, self.read_percent) {
            (false, 100) => "read",
            (false, 0) => "write",
            (false, _) => "rw",
            (true, 100) => "randread",
            (true, 0) => "randwrite",
            (true, _) => "randrw",
        }
    }
}

/// Sizes of requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Sizes {
    /// All alike.
    Fixed(u32),
    /// Any from the first to the second, in steps of the first.
    Range(u32, u32),
    /// Size and percentage; the percentages make 100.
    Split(Vec<(u32, u8)>),
}

impl Sizes {
    /// The smallest.
    pub fn min(&self) -> u32 {
        match self {
            Sizes::Fixed(size) | Sizes::Range(size, _) => *size,
            Sizes::Split(parts) => parts.iter().map(|(size, _)| *size).min().unwrap_or(512),
        }
    }

    /// The largest.
    pub fn max(&self) -> u32 {
        match self {
            Sizes::Fixed(size) | Sizes::Range(_, size) => *size,
            Sizes::Split(parts) => parts.iter().map(|(size, _)| *size).max().unwrap_or(512),
        }
    }

    /// Every size that is named.
    pub fn named(&self) -> Vec<u32> {
        match self {
            Sizes::Fixed(size) => vec![*size],
            Sizes::Range(min, max) => vec![*min, *max],
            Sizes::Split(parts) => parts.iter().map(|(size, _)| *size).collect(),
        }
    }
}

/// An amount of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// So many bytes.
    Bytes(u64),
    /// So much of the whole.
    Percent(u8),
}

impl Amount {
    /// In bytes, of a disk of `capacity`.
    pub fn of(self, capacity: u64) -> u64 {
        match self {
            Amount::Bytes(bytes) => bytes,
            Amount::Percent(percent) => (u128::from(capacity) * u128::from(percent) / 100) as u64,
        }
    }
}

/// A part of the disk that gets its own share of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone {
    /// How many of 100 requests.
    pub access: u8,
    /// How much of the disk, after the zones before it.
    pub extent: Amount,
}

/// Where random requests go.
#[derive(Clone, Debug, PartialEq)]
pub enum Distribution {
    /// Everywhere alike.
    Uniform,
    /// Zipf, with this theta.
    Zipf(f64),
    /// Pareto, with this power.
    Pareto(f64),
    /// fio's normal distribution, with this deviation in percent of the size.
    Normal(f64),
    /// Zone by zone.
    Zoned(Vec<Zone>),
}

/// What a verified block carries a sum of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Checksum {
    /// CRC-16 (IBM 3740).
    Crc16,
    /// CRC-32 (ISO-HDLC).
    Crc32,
    /// CRC-32C (Castagnoli).
    Crc32c,
    /// CRC-64 (XZ).
    Crc64,
}

impl Checksum {
    /// fio's words.
    pub const WORDS: [(&'static str, Checksum); 5] = [
        ("crc16", Checksum::Crc16),
        ("crc32", Checksum::Crc32),
        ("crc32c", Checksum::Crc32c),
        ("crc32c-intel", Checksum::Crc32c),
        ("crc64", Checksum::Crc64),
    ];
}

/// Checking of what is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verify {
    /// How.
    pub checksum: Checksum,
    /// Read back and check what was written.
    pub read_back: bool,
    /// End at the first difference.
    pub fatal: bool,
}

/// Most requests per second, of one clone of the job; 0: as many as will go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Reads.
    pub read: u32,
    /// Writes.
    pub write: u32,
    /// Discards.
    pub trim: u32,
}

/// Which quantity a log file is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LogKind {
    /// Bandwidth.
    Bandwidth,
    /// Latency.
    Latency,
    /// Requests per second.
    Iops,
}

/// Log files, by the first part of their names.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Logs {
    /// `write_bw_log`.
    pub bandwidth: Option<String>,
    /// `write_lat_log`.
    pub latency: Option<String>,
    /// `write_iops_log`.
    pub iops: Option<String>,
    /// With each request's place (`log_offset`).
    pub offset: bool,
    /// One line for so long; `None`: one for each request.
    pub average: Option<Duration>,
}

impl Logs {
    /// Is there any?
    pub fn any(&self) -> bool {
        self.bandwidth.is_some() || self.latency.is_some() || self.iops.is_some()
    }
}

/// A job.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Its name: the section's.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// Files or devices; empty: what the command line names.
    pub filenames: Vec<String>,
    /// Order and mixture.
    pub pattern: Pattern,
    /// So many requests in sequence for each random place (`rw=randread:8`).
    pub burst: u32,
    /// Bytes left out between two requests in sequence (`rw=write:4k`).
    pub skip: u64,
    /// `rwmixread`, as given.
    pub mix_read: Option<u8>,
    /// `rwmixwrite`, as given.
    pub mix_write: Option<u8>,
    /// Sizes of reads, of writes, of discards.
    pub sizes: [Sizes; 3],
    /// Requests in flight, of each clone.
    pub iodepth: u16,
    /// Clones.
    pub numjobs: u16,
    /// The part of the disk that is used; `None`: to its end.
    pub size: Option<Amount>,
    /// Bytes to move in one loop; `None`: as many as `size`.
    pub io_size: Option<Amount>,
    /// Where that part begins.
    pub offset: Amount,
    /// By how much it begins later for each further clone.
    pub offset_increment: Amount,
    /// Ends after so many requests.
    pub ios_max: Option<u64>,
    /// How often.
    pub loops: u32,
    /// Ends then at the latest.
    pub runtime: Option<Duration>,
    /// Does not end before.
    pub time_based: bool,
    /// Runs so long before anything counts.
    pub ramp_time: Duration,
    /// Bound on the rate.
    pub rate: Option<Rate>,
    /// Where random requests go.
    pub distribution: Distribution,
    /// Random requests may hit a block again before all were hit.
    pub no_random_map: bool,
    /// Start of the random numbers.
    pub seed: u64,
    /// Checking.
    pub verify: Option<Verify>,
    /// A flush after so many writes.
    pub flush_every: Option<u32>,
    /// A flush at the end.
    pub flush_at_end: bool,
    /// Waits for all jobs before it.
    pub stonewall: bool,
    /// O_DIRECT.
    pub direct: Option<bool>,
    /// fio's engine, as given.
    pub engine: Option<String>,
    /// CPUs; clones take one each in turn.
    pub cpus: Vec<usize>,
    /// Writes carry zeroes.
    pub zero_buffers: bool,
    /// Log files.
    pub logs: Logs,
    /// Percentiles of completion latencies are printed.
    pub clat_percentiles: bool,
    /// Percentiles of whole latencies are printed.
    pub lat_percentiles: bool,
    /// Percentiles to be printed.
    pub percentiles: Vec<f64>,
    /// Options as they were given, in their order.
    pub given: Vec<(String, String)>,
}

impl Default for Job {
    fn default() -> Self {
        Job {
            name: "job".to_owned(),
            description: String::new(),
            filenames: Vec::new(),
            pattern: Pattern::new(false, 100),
            burst: 1,
            skip: 0,
            mix_read: None,
            mix_write: None,
            sizes: [const { Sizes::Fixed(4096) }; 3],
            iodepth: 1,
            numjobs: 1,
            size: None,
            io_size: None,
            offset: Amount::Bytes(0),
            offset_increment: Amount::Bytes(0),
            ios_max: None,
            loops: 1,
            runtime: None,
            time_based: false,
            ramp_time: Duration::ZERO,
            rate: None,
            distribution: Distribution::Uniform,
            no_random_map: false,
            seed: 0x6c75_6e65,
            verify: None,
            flush_every: None,
            flush_at_end: false,
            stonewall: false,
            direct: None,
            engine: None,
            cpus: Vec::new(),
            zero_buffers: false,
            logs: Logs::default(),
            clat_percentiles: true,
            lat_percentiles: false,
            percentiles: vec![
                1.0, 5.0, 10.0, 20.0, 30.0, 40.0, 50.0, 60.0, 70.0, 80.0, 90.0, 95.0, 99.0, 99.5,
                99.9, 99.95, 99.99,
            ],
            given: Vec::new(),
        }
    }
}

impl Job {
    /// The largest request that carries data.
    pub fn largest(&self) -> u32 {
        let written = match self.pattern.trims {
            // What was discarded is written as one.
            Trims::ThenWrite => self.sizes[2].max(),
            _ => self.sizes[1].max(),
        };
        self.sizes[0].max().max(written)
    }

    /// Sizes of each direction in which it makes requests of its own; a write after a discard has the discard's.
    pub fn made(&self) -> impl Iterator<Item = &Sizes> {
        let pattern = self.pattern;
        let made = [
            pattern.reads(),
            pattern.writes() && !pattern.trims(),
            pattern.trims(),
        ];
        let pairs = self.sizes.iter().zip(made);
        pairs.filter(|(_, made)| *made).map(|(sizes, _)| sizes)
    }

    /// The smallest request that it makes.
    pub fn smallest(&self) -> u32 {
        self.made().map(Sizes::min).min().unwrap_or(512)
    }

    /// The largest request that it makes, of data or not.
    pub fn longest(&self) -> u32 {
        self.made().map(Sizes::max).max().unwrap_or(512)
    }
}
