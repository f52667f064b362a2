//! A job as data: all settings of a job file or of the command-line options.

use std::time::Duration;

/// Discards of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trims {
    /// Reads and writes only.
    No,
    /// Discards only.
    Only,
    /// Each block is discarded, then written.
    ThenWrite,
}

/// Order and mixture of reads and writes, or discards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pattern {
    /// Random order.
    pub random: bool,
    /// Percentage of reads.
    pub read_percent: u8,
    /// Discards; they exclude reads.
    pub trims: Trims,
}

impl Pattern {
    /// Creates a pattern of reads and writes.
    pub const fn new(random: bool, read_percent: u8) -> Pattern {
        Pattern {
            random,
            read_percent,
            trims: Trims::No,
        }
    }

    /// Creates a pattern with discards.
    pub const fn trimming(random: bool, trims: Trims) -> Pattern {
        Pattern {
            random,
            read_percent: 0,
            trims,
        }
    }

    /// Returns true if the pattern contains reads.
    pub const fn reads(self) -> bool {
        self.read_percent > 0
    }

    /// Returns true if the pattern contains writes.
    pub const fn writes(self) -> bool {
        self.read_percent < 100 && !matches!(self.trims, Trims::Only)
    }

    /// Returns true if the pattern contains discards.
    pub const fn trims(self) -> bool {
        !matches!(self.trims, Trims::No)
    }

    /// Returns fio's name of the pattern.
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
    /// One size.
    Fixed(u32),
    /// Any size from the first to the second, in steps of the first.
    Range(u32, u32),
    /// Sizes with percentages that sum to 100.
    Split(Vec<(u32, u8)>),
}

impl Sizes {
    /// Returns the smallest size.
    pub fn min(&self) -> u32 {
        match self {
            Sizes::Fixed(size) | Sizes::Range(size, _) => *size,
            Sizes::Split(parts) => parts.iter().map(|(size, _)| *size).min().unwrap_or(512),
        }
    }

    /// Returns the largest size.
    pub fn max(&self) -> u32 {
        match self {
            Sizes::Fixed(size) | Sizes::Range(_, size) => *size,
            Sizes::Split(parts) => parts.iter().map(|(size, _)| *size).max().unwrap_or(512),
        }
    }

    /// Returns every size in the specification.
    pub fn named(&self) -> Vec<u32> {
        match self {
            Sizes::Fixed(size) => vec![*size],
            Sizes::Range(min, max) => vec![*min, *max],
            Sizes::Split(parts) => parts.iter().map(|(size, _)| *size).collect(),
        }
    }
}

/// An amount of disk space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Amount {
    /// Number of bytes.
    Bytes(u64),
    /// Percentage of the disk.
    Percent(u8),
}

impl Amount {
    /// Returns the amount in bytes for a disk of `capacity`.
    pub fn of(self, capacity: u64) -> u64 {
        match self {
            Amount::Bytes(bytes) => bytes,
            Amount::Percent(percent) => (u128::from(capacity) * u128::from(percent) / 100) as u64,
        }
    }
}

/// A part of the disk with its own share of the requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Zone {
    /// Percentage of the requests.
    pub access: u8,
    /// Amount of the disk, after the previous zones.
    pub extent: Amount,
}

/// Distribution of random requests.
#[derive(Clone, Debug, PartialEq)]
pub enum Distribution {
    /// Uniform distribution.
    Uniform,
    /// Zipf with this theta.
    Zipf(f64),
    /// Pareto with this power.
    Pareto(f64),
    /// fio's normal distribution with this deviation in percent of the size.
    Normal(f64),
    /// Zones.
    Zoned(Vec<Zone>),
}

/// Checksum of a verified block.
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
    /// fio's names.
    pub const WORDS: [(&'static str, Checksum); 5] = [
        ("crc16", Checksum::Crc16),
        ("crc32", Checksum::Crc32),
        ("crc32c", Checksum::Crc32c),
        ("crc32c-intel", Checksum::Crc32c),
        ("crc64", Checksum::Crc64),
    ];
}

/// Verification of data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verify {
    /// Checksum algorithm.
    pub checksum: Checksum,
    /// Read back and check written data.
    pub read_back: bool,
    /// Stop at the first difference.
    pub fatal: bool,
}

/// Maximum requests per second of one clone of the job; 0: unlimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// Reads.
    pub read: u32,
    /// Writes.
    pub write: u32,
    /// Discards.
    pub trim: u32,
}

/// Quantity of a log file.
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
    /// Include the offset of each request (`log_offset`).
    pub offset: bool,
    /// Interval per line; `None`: one line per request.
    pub average: Option<Duration>,
}

impl Logs {
    /// Returns true if any log is requested.
    pub fn any(&self) -> bool {
        self.bandwidth.is_some() || self.latency.is_some() || self.iops.is_some()
    }
}

/// A job.
#[derive(Clone, Debug, PartialEq)]
pub struct Job {
    /// Name of the section.
    pub name: String,
    /// Description.
    pub description: String,
    /// Files or devices; empty: those of the command line.
    pub filenames: Vec<String>,
    /// Order and mixture.
    pub pattern: Pattern,
    /// Number of sequential requests per random offset (`rw=randread:8`).
    pub burst: u32,
    /// Bytes skipped between two sequential requests (`rw=write:4k`).
    pub skip: u64,
    /// `rwmixread`, as given.
    pub mix_read: Option<u8>,
    /// `rwmixwrite`, as given.
    pub mix_write: Option<u8>,
    /// Sizes of reads, writes and discards.
    pub sizes: [Sizes; 3],
    /// Requests in flight per clone.
    pub iodepth: u16,
    /// Number of clones.
    pub numjobs: u16,
    /// Size of the part of the disk to use; `None`: to the end.
    pub size: Option<Amount>,
    /// Bytes to transfer per loop; `None`: `size`.
    pub io_size: Option<Amount>,
    /// Start of the part.
    pub offset: Amount,
    /// Additional start offset per clone.
    pub offset_increment: Amount,
    /// Maximum number of requests.
    pub ios_max: Option<u64>,
    /// Number of loops.
    pub loops: u32,
    /// Maximum run time.
    pub runtime: Option<Duration>,
    /// Do not end before `runtime`.
    pub time_based: bool,
    /// Time before the measurement starts.
    pub ramp_time: Duration,
    /// Rate limit.
    pub rate: Option<Rate>,
    /// Distribution of random requests.
    pub distribution: Distribution,
    /// Random requests may repeat a block before all blocks were accessed.
    pub no_random_map: bool,
    /// Random seed.
    pub seed: u64,
    /// Verification of content.
    pub verify: Option<Verify>,
    /// Number of writes per flush.
    pub flush_every: Option<u32>,
    /// Flush at the end.
    pub flush_at_end: bool,
    /// Wait for all previous jobs.
    pub stonewall: bool,
    /// O_DIRECT.
    pub direct: Option<bool>,
    /// fio's engine, as given.
    pub engine: Option<String>,
    /// CPUs; clones use them in turn.
    pub cpus: Vec<usize>,
    /// Writes contain zeroes.
    pub zero_buffers: bool,
    /// Log files.
    pub logs: Logs,
    /// Print percentiles of completion latencies.
    pub clat_percentiles: bool,
    /// Print percentiles of total latencies.
    pub lat_percentiles: bool,
    /// Percentiles to print.
    pub percentiles: Vec<f64>,
    /// Options as given, in their order.
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
    /// Returns the size of the largest request with data.
    pub fn largest(&self) -> u32 {
        let written = match self.pattern.trims {
            // A discarded range is written with one request.
            Trims::ThenWrite => self.sizes[2].max(),
            _ => self.sizes[1].max(),
        };
        self.sizes[0].max().max(written)
    }

    /// Returns the sizes of each direction that has its own requests. A write after a discard has the discard's size.
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

    /// Returns the size of the smallest request.
    pub fn smallest(&self) -> u32 {
        self.made().map(Sizes::min).min().unwrap_or(512)
    }

    /// Returns the size of the largest request, with or without data.
    pub fn longest(&self) -> u32 {
        self.made().map(Sizes::max).max().unwrap_or(512)
    }
}
