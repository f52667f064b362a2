//! Request generation in the order that a job specifies.
//!
//! A [`Generator`] belongs to one clone of a job on one thread; `next` does not allocate. Random requests access every block once per
//! loop (`permutation`), except with `norandommap`, another distribution, or several sizes: then they are drawn with repetition. Pure.
//! Tests: here.

mod distribution;
mod permutation;

pub use distribution::Sampler;
pub use permutation::Permutation;

use fastrand::Rng;

use crate::job::{Amount, Distribution, Job, Sizes};

/// Direction of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Direction {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Discard, without data.
    Trim,
}

/// One request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Io {
    /// Direction.
    pub direction: Direction,
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u32,
}

/// Size of a disk as a job sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Capacity in bytes.
    pub capacity: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Number of disks or files that share a job size in bytes.
    pub shared_by: u64,
    /// The size is fixed: a larger job size is truncated, as fio does with devices.
    pub cuts: bool,
}

/// Reason why a job does not fit a disk.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobMismatch(pub String);

impl std::fmt::Display for JobMismatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for JobMismatch {}

/// Order of offsets.
enum OffsetOrder {
    Sequential,
    Once(Permutation),
    Drawn(Sampler),
}

/// Request generator of one clone.
pub struct Generator {
    random: Rng,
    read_percent: u8,
    trims: bool,
    sizes: [Sizes; 3],
    start: u64,
    length: u64,
    /// Alignment of random requests in bytes.
    unit: u64,
    places: OffsetOrder,
    /// Position of sequential requests, per direction.
    position: [u64; 3],
    /// Bytes skipped between two sequential requests.
    skip: u64,
    /// Sequential requests per random offset: total, remaining, and position.
    burst: u32,
    burst_left: u32,
    burst_at: u64,
    ios_left: u64,
    seed: u64,
    /// Bytes per loop, bytes done in this loop, and remaining loops.
    per_loop: u64,
    made: u64,
    loops_left: u32,
}

impl Generator {
    /// Creates the generator of clone number `clone` on a disk.
    pub fn new(job: &Job, clone: u32, disk: Extent) -> Result<Generator, JobMismatch> {
        let (start, length) = extent(job, clone, disk)?;
        let of = |amount: Amount| bytes_of(amount, disk);
        let unit = u64::from(job.smallest());
        let seed = job.seed ^ (u64::from(clone) << 32);
        Ok(Generator {
            random: Rng::with_seed(seed),
            read_percent: job.pattern.read_percent,
            trims: job.pattern.trims(),
            sizes: job.sizes.clone(),
            start,
            length,
            unit,
            places: places(job, length / unit, seed),
            position: [0; 3],
            skip: job.skip,
            burst: job.burst,
            burst_left: 0,
            burst_at: 0,
            ios_left: job
                .ios_max
                .map_or(u64::MAX, |ios| ios.div_ceil(disk.shared_by.max(1))),
            seed,
            per_loop: job.io_size.map_or(length, of),
            made: 0,
            loops_left: if job.time_based {
                u32::MAX
            } else {
                job.loops - 1
            },
        })
    }

    /// Returns the used part of the disk: offset and length in bytes.
    pub fn range(&self) -> (u64, u64) {
        (self.start, self.length)
    }

    /// Returns the total number of bytes.
    pub fn total(&self) -> u64 {
        self.per_loop.saturating_mul(u64::from(self.loops_left) + 1)
    }

    #[inline]
    fn size(&mut self, direction: usize) -> u32 {
        match &self.sizes[direction] {
            Sizes::Fixed(size) => *size,
            Sizes::Range(low, high) => {
                let steps = u64::from((high - low) / low) + 1;
                low * (1 + self.random.u64(..steps) as u32)
            }
            Sizes::Split(parts) => {
                let mut point = self.random.u8(..100);
                for (size, percent) in parts {
                    if point < *percent {
                        return *size;
                    }
                    point -= percent;
                }
                parts.last().map_or(512, |(size, _)| *size)
            }
        }
    }

    fn begin_loop(&mut self) -> bool {
        if self.loops_left == 0 {
            return false;
        }
        if self.loops_left != u32::MAX {
            self.loops_left -= 1;
        }
        self.made = 0;
        self.seed = self.seed.wrapping_add(0x9e37_79b9);
        if let OffsetOrder::Once(permutation) = &mut self.places {
            *permutation = Permutation::new(self.length / self.unit, self.seed);
        }
        true
    }
}

impl Iterator for Generator {
    type Item = Io;

    #[inline]
    fn next(&mut self) -> Option<Io> {
        let direction = match self.read_percent {
            _ if self.trims => Direction::Trim,
            100 => Direction::Read,
            0 => Direction::Write,
            percent if self.random.u8(..100) >= percent => Direction::Write,
            _ => Direction::Read,
        };
        let length = self.size(direction as usize);
        if self.ios_left == 0 {
            return None;
        }
        if self.per_loop.saturating_sub(self.made) < u64::from(length) && !self.begin_loop() {
            return None;
        }
        let bytes = u64::from(length);
        let at = match &mut self.places {
            OffsetOrder::Sequential => {
                let position = &mut self.position[direction as usize];
                if self.length.saturating_sub(*position) < bytes {
                    *position = 0;
                }
                let at = *position;
                *position += bytes + self.skip;
                // Skipped bytes count as transferred, so that a loop is one pass.
                self.made += self.skip;
                at
            }
            OffsetOrder::Once(permutation) => match permutation.next() {
                Some(index) => index * self.unit,
                // A loop that transfers more than the size of the disk starts another round.
                None => {
                    self.seed = self.seed.wrapping_add(0x9e37_79b9);
                    *permutation = Permutation::new(self.length / self.unit, self.seed);
                    permutation.next()? * self.unit
                }
            },
            OffsetOrder::Drawn(_)
                if self.burst_left > 0 && self.length - self.burst_at >= bytes =>
            {
                self.burst_left -= 1;
                let at = self.burst_at;
                self.burst_at += bytes;
                at
            }
            OffsetOrder::Drawn(sampler) => {
                let at = sampler.draw(&mut self.random) * self.unit;
                let at = at.min((self.length - bytes) / self.unit * self.unit);
                (self.burst_left, self.burst_at) = (self.burst - 1, at + bytes);
                at
            }
        };
        self.made += bytes;
        self.ios_left -= 1;
        Some(Io {
            direction,
            offset: self.start + at,
            length,
        })
    }
}

/// Converts an amount to bytes of this disk.
fn bytes_of(amount: Amount, disk: Extent) -> u64 {
    match amount {
        Amount::Bytes(bytes) => bytes / disk.shared_by.max(1),
        percent => percent.of(disk.capacity),
    }
}

/// Returns the part of the disk for a clone of the job: offset and length in bytes.
fn extent(job: &Job, clone: u32, disk: Extent) -> Result<(u64, u64), JobMismatch> {
    let (capacity, block_size) = (disk.capacity, disk.block_size);
    let largest = u64::from(job.longest());
    for size in job.sizes.iter().flat_map(Sizes::named) {
        if size % block_size != 0 {
            return Err(JobMismatch(format!(
                "bs: {size} bytes are not whole blocks of {block_size} bytes"
            )));
        }
    }
    let start = job
        .offset_increment
        .of(capacity)
        .checked_mul(u64::from(clone))
        .and_then(|more| more.checked_add(job.offset.of(capacity)))
        .filter(|start| *start < capacity)
        .ok_or_else(|| JobMismatch(format!("offset: it is beyond the end of {capacity} bytes")))?;
    let start = start - start % u64::from(block_size);
    let room = capacity - start;
    let mut length = job.size.map_or(room, |amount| bytes_of(amount, disk));
    if disk.cuts {
        length = length.min(room);
    }
    if length > room {
        return Err(JobMismatch(format!(
            "size: {length} bytes from {start} extend beyond the end of {capacity} bytes"
        )));
    }
    if length < largest {
        return Err(JobMismatch(format!(
            "size: {length} bytes are less than one request of {largest}"
        )));
    }
    Ok((start, length))
}

/// Returns the access order of a clone of the job for `units` blocks of its smallest size.
fn places(job: &Job, units: u64, seed: u64) -> OffsetOrder {
    let smallest = job.smallest();
    let fixed = |sizes: &Sizes| matches!(sizes, Sizes::Fixed(size) if *size == smallest);
    let alike = job.made().all(fixed);
    if !job.pattern.random {
        OffsetOrder::Sequential
    } else if job.distribution != Distribution::Uniform
        || job.no_random_map
        || job.burst > 1
        || !alike
    {
        OffsetOrder::Drawn(Sampler::new(&job.distribution, units, u64::from(smallest)))
    } else {
        OffsetOrder::Once(Permutation::new(units, seed))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::job::{Pattern, apply};

    fn job(options: &[(&str, &str)]) -> Job {
        let mut job = Job::default();
        for (option, value) in options {
            apply(&mut job, option, Some(value)).unwrap_or_else(|e| panic!("{option}: {e}"));
        }
        job
    }

    fn disk(capacity: u64) -> Extent {
        Extent {
            capacity,
            block_size: 512,
            shared_by: 1,
            cuts: false,
        }
    }

    fn ios(options: &[(&str, &str)]) -> Vec<Io> {
        Generator::new(&job(options), 0, disk(1 << 20))
            .unwrap()
            .collect()
    }

    #[test]
    fn sequential_requests_follow_each_other_to_the_end() {
        let ios = ios(&[("rw", "write"), ("bs", "64k")]);
        assert_eq!(ios.len(), 16);
        for (io, index) in ios.iter().zip(0u64..) {
            let expected = (Direction::Write, index << 16, 65536);
            assert_eq!((io.direction, io.offset, io.length), expected);
        }
    }

    #[test]
    fn random_requests_hit_every_block_once_per_loop() {
        let ios = ios(&[
            ("rw", "randread"),
            ("loops", "2"),
            ("offset", "256k"),
            ("size", "300k"),
        ]);
        assert_eq!(ios.len(), 150);
        for half in ios.chunks(75) {
            let places: HashSet<u64> = half.iter().map(|io| io.offset).collect();
            assert_eq!(places.len(), 75);
            assert!(places.iter().all(|at| (256 << 10..556 << 10).contains(at)));
        }
        assert_ne!(ios[..75], ios[75..]);
    }

    #[test]
    fn mixtures_and_sizes_come_as_often_as_asked() {
        let mut job = job(&[
            ("rw", "randrw"),
            ("rwmixread", "75"),
            ("bssplit", "4k/90:64k/10"),
        ]);
        job.time_based = true;
        let ios: Vec<Io> = Generator::new(&job, 0, disk(1 << 30))
            .unwrap()
            .take(20_000)
            .collect();
        let reads = ios
            .iter()
            .filter(|io| io.direction == Direction::Read)
            .count();
        assert!((14_500..15_500).contains(&reads), "{reads}");
        let large = ios.iter().filter(|io| io.length == 65536).count();
        assert!((1_700..2_300).contains(&large), "{large}");
        assert!(
            ios.iter()
                .all(|io| io.offset + u64::from(io.length) <= 1 << 30)
        );
    }

    #[test]
    fn distributions_stay_on_the_disk_and_favour_what_they_should() {
        for (name, hot_share) in [("zipf:1.2", 0.5), ("pareto:0.1", 0.5), ("normal:10", 0.6)] {
            let mut job = job(&[("rw", "randread"), ("random_distribution", name)]);
            job.time_based = true;
            let ios: Vec<Io> = Generator::new(&job, 0, disk(400 << 12))
                .unwrap()
                .take(10_000)
                .collect();
            assert!(
                ios.iter()
                    .all(|io| io.offset < 400 << 12 && io.offset % 4096 == 0),
                "{name}"
            );
            let mut counts = vec![0u32; 400];
            ios.iter()
                .for_each(|io| counts[(io.offset / 4096) as usize] += 1);
            counts.sort_unstable();
            let hottest: u32 = counts.iter().rev().take(100).sum();
            assert!(
                f64::from(hottest) > hot_share * 10_000.0,
                "{name}: {hottest}"
            );
        }
    }

    #[test]
    fn what_does_not_fit_is_told() {
        let blocks = Extent {
            block_size: 4096,
            ..disk(1 << 20)
        };
        let misfit = |job: &Job| Generator::new(job, 1, blocks).err().unwrap().0;
        assert!(misfit(&job(&[("bs", "512")])).contains("blocks of 4096"));
        assert!(misfit(&job(&[("size", "2m")])).contains("beyond the end"));
        assert!(misfit(&job(&[("offset_increment", "1m")])).contains("offset"));
        let mut small = job(&[]);
        small.size = Some(Amount::Bytes(100));
        assert!(misfit(&small).contains("less than one request"));
        small.pattern = Pattern::new(true, 100);
        assert!(misfit(&small).contains("less than one request"));
    }

    /// As in fio with `filename=a:b` and `size=8m`: four for each.
    #[test]
    fn a_size_in_bytes_is_for_all_files_and_a_device_cuts_it() {
        let of = |size: &str, disk: Extent| {
            let generator = Generator::new(&job(&[("size", size)]), 0, disk).unwrap();
            generator.map(|io| u64::from(io.length)).sum::<u64>()
        };
        let two = Extent {
            shared_by: 2,
            ..disk(1 << 20)
        };
        assert_eq!(of("512k", two), 256 << 10);
        assert_eq!(of("50%", two), 512 << 10);
        let device = Extent {
            cuts: true,
            ..disk(1 << 20)
        };
        assert_eq!(of("8m", device), 1 << 20);
    }

    #[test]
    fn bytes_are_left_out_between_requests_in_sequence() {
        let places = |options: &[(&str, &str)]| -> Vec<u64> {
            ios(options).iter().map(|io| io.offset >> 12).collect()
        };
        let some = places(&[("rw", "read:8k"), ("size", "64k")]);
        assert_eq!(some, [0, 3, 6, 9, 12, 15]);
        assert_eq!(places(&[("rw", "write:0"), ("size", "8k")]), [0, 1]);
        assert_eq!(places(&[("rw", "read"), ("number_ios", "3")]), [0, 1, 2]);
    }

    #[test]
    fn a_random_place_is_followed_by_as_many_as_asked() {
        let ios = ios(&[("rw", "randrw:8"), ("loops", "4")]);
        assert_eq!(ios.len(), 1024);
        let jumps = ios
            .windows(2)
            .filter(|pair| pair[1].offset != pair[0].offset + 4096)
            .count();
        // 128 bursts; a few end at the end of the range, a few are sequential by chance.
        assert!((110..160).contains(&jumps), "{jumps}");
    }

    #[test]
    fn zones_get_the_share_that_was_asked_for() {
        for zones in ["zoned:60/10:30/20:10/50", "zoned_abs:60/10m:30/20m:10/50m"] {
            let mut job = job(&[("rw", "randread"), ("random_distribution", zones)]);
            job.time_based = true;
            let ios = Generator::new(&job, 0, disk(100 << 20)).unwrap();
            let mut counts = [0u32; 4];
            for io in ios.take(10_000) {
                let zone = match io.offset >> 20 {
                    0..10 => 0,
                    10..30 => 1,
                    30..80 => 2,
                    _ => 3,
                };
                counts[zone] += 1;
            }
            assert!(counts[0].abs_diff(6000) < 300, "{zones}: {counts:?}");
            assert!(counts[1].abs_diff(3000) < 300, "{zones}: {counts:?}");
            assert_eq!(counts[3], 0, "{zones}");
        }
    }
}
