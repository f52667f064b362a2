//! Samples of one disk at a fixed interval, compressed, in bounded memory.
//!
//! Values are rounded to levels, five per power of two, which is exact within 8 %. A block has 60 samples. A complete block is stored
//! column by column: the difference of each level to the one before, in 2, 4 or 8 bits, whichever needs the least memory. Blocks and
//! samples without activity are not stored.

use std::collections::VecDeque;

/// Number of values of a sample.
pub(super) const COLUMNS: usize = 6;
/// Number of samples of a block.
pub(super) const BLOCK: usize = 60;
/// Levels per power of two.
const LEVELS: f64 = 5.0;
/// Widths of differences in bits. The last one stores levels instead.
const WIDTHS: [u32; 3] = [2, 4, 8];

/// Values of one interval: reads, writes and bytes per second, p50 and p99 in nanoseconds, and the number of errors.
pub(super) type Sample = [u64; COLUMNS];

type Levels = [u8; COLUMNS];

fn level_of(value: u64) -> u8 {
    match value {
        0 => 0,
        // Saturates at 2^51.
        value => ((LEVELS * (value as f64).log2()).round() as u8).saturating_add(1),
    }
}

fn value_of(level: u8) -> u64 {
    match level {
        0 => 0,
        level => (f64::from(level - 1) / LEVELS).exp2().round() as u64,
    }
}

/// Block that still receives samples.
#[derive(Debug)]
struct OpenBlock {
    number: u64,
    samples: [Levels; BLOCK],
}

/// Samples of one disk, the newest in an open block.
#[derive(Debug)]
pub(super) struct Series {
    blocks_max: u64,
    open: Option<Box<OpenBlock>>,
    /// Complete blocks by number, ascending.
    complete: VecDeque<(u64, Box<[u8]>)>,
}

impl Series {
    pub(super) const fn new(blocks_max: u64) -> Series {
        Series {
            blocks_max,
            open: None,
            complete: VecDeque::new(),
        }
    }

    /// Adds the sample of an interval, numbered from the start of the daemon. Intervals must not decrease.
    pub(super) fn add(&mut self, interval: u64, sample: &Sample) {
        if *sample == [0; COLUMNS] {
            return;
        }
        let number = interval / BLOCK as u64;
        if let Some(open) = self.open.take_if(|open| open.number != number) {
            self.complete
                .push_back((open.number, compress(&open.samples)));
        }
        self.expire(interval);
        let open = self.open.get_or_insert_with(|| {
            Box::new(OpenBlock {
                number,
                samples: [[0; COLUMNS]; BLOCK],
            })
        });
        if let Some(place) = open.samples.get_mut((interval % BLOCK as u64) as usize) {
            *place = sample.map(level_of);
        }
    }

    /// Drops blocks that have become too old.
    pub(super) fn expire(&mut self, interval: u64) {
        let oldest = (interval / BLOCK as u64 + 1).saturating_sub(self.blocks_max);
        while self.complete.front().is_some_and(|(at, _)| *at < oldest) {
            self.complete.pop_front();
        }
        self.open.take_if(|open| open.number < oldest);
    }

    /// Returns all samples with activity and their intervals, oldest first.
    pub(super) fn samples(&self) -> Vec<(u64, Sample)> {
        self.since(0)
    }

    /// Returns the samples with activity from an interval on, oldest first. Does not read older blocks.
    pub(super) fn since(&self, first: u64) -> Vec<(u64, Sample)> {
        let is_recent = |number: &u64| *number >= first / BLOCK as u64;
        let complete = self.complete.iter();
        let complete = complete.filter(|(number, _)| is_recent(number));
        let complete = complete.map(|(number, bytes)| (*number, decompress(bytes)));
        let open = self.open.iter().filter(|open| is_recent(&open.number));
        let open = open.map(|open| (open.number, open.samples));
        let mut all = Vec::new();
        for (number, samples) in complete.chain(open) {
            for (at, levels) in (number * BLOCK as u64..).zip(samples) {
                if levels != [0; COLUMNS] && at >= first {
                    all.push((at, levels.map(value_of)));
                }
            }
        }
        all
    }

    /// Returns the memory of all blocks in bytes.
    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let complete: usize = self
            .complete
            .iter()
            .map(|(_, block)| block.len() + 24)
            .sum();
        complete + self.open.as_ref().map_or(0, |_| size_of::<OpenBlock>())
    }
}

/// Writes numbers of a few bits.
#[derive(Default)]
struct Bits {
    bytes: Vec<u8>,
    free: u32,
}

impl Bits {
    /// Writes the low `width` bits of `value`; at most 8.
    fn push(&mut self, value: u8, width: u32) {
        for bit in (0..width).rev() {
            if self.free == 0 {
                self.bytes.push(0);
                self.free = 8;
            }
            self.free -= 1;
            if let Some(last) = self.bytes.last_mut() {
                *last |= (value >> bit & 1) << self.free;
            }
        }
    }
}

/// Reads numbers of a few bits. The end is followed by zeroes.
struct BitReader<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl BitReader<'_> {
    fn take(&mut self, width: u32) -> u8 {
        let mut value = 0;
        for _ in 0..width {
            let byte = self.bytes.get(self.at / 8).copied().unwrap_or(0);
            value = value << 1 | (byte >> (7 - self.at % 8) & 1);
            self.at += 1;
        }
        value
    }
}

/// Code after which a whole level follows.
const fn escape(width: u32) -> u8 {
    (1 << width) - 1
}

/// Code of no change.
const fn middle(width: u32) -> i16 {
    (1 << (width - 1)) - 1
}

fn compress_column(column: &[u8; BLOCK], width: u32) -> Bits {
    let mut bits = Bits::default();
    let mut before = 0;
    for level in column {
        if width == 8 {
            bits.push(*level, 8);
            continue;
        }
        let code = i16::from(*level) - before + middle(width);
        match u8::try_from(code).ok().filter(|code| *code < escape(width)) {
            Some(code) => bits.push(code, width),
            None => {
                bits.push(escape(width), width);
                bits.push(*level, 8);
            }
        }
        before = i16::from(*level);
    }
    bits
}

/// A byte of zero is a column without values; otherwise it is the width of the column that follows.
fn compress(samples: &[Levels; BLOCK]) -> Box<[u8]> {
    let mut bytes = Vec::new();
    for index in 0..COLUMNS {
        let column = samples.map(|levels| levels[index]);
        if column == [0; BLOCK] {
            bytes.push(0);
            continue;
        }
        let each = WIDTHS.map(|width| (width, compress_column(&column, width)));
        let least = each.into_iter().min_by_key(|(_, bits)| bits.bytes.len());
        if let Some((width, bits)) = least {
            bytes.push(width as u8);
            bytes.extend(bits.bytes);
        }
    }
    bytes.into()
}

fn decompress(bytes: &[u8]) -> [Levels; BLOCK] {
    let mut samples = [[0; COLUMNS]; BLOCK];
    let mut rest = bytes;
    for index in 0..COLUMNS {
        let Some((width, column)) = rest.split_first() else {
            break;
        };
        let width = u32::from(*width);
        rest = column;
        if width == 0 {
            continue;
        }
        let mut reader = BitReader {
            bytes: column,
            at: 0,
        };
        let mut before = 0i16;
        for levels in &mut samples {
            let code = reader.take(width);
            let level = match () {
                () if width == 8 => code,
                () if code == escape(width) => reader.take(8),
                () => u8::try_from(before + i16::from(code) - middle(width)).unwrap_or(0),
            };
            before = i16::from(level);
            levels[index] = level;
        }
        rest = column.get(reader.at.div_ceil(8)..).unwrap_or_default();
    }
    samples
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn levels_are_exact_within_eight_percent() {
        for value in (1..2000).chain([1 << 20, 3 << 30, 60_000_000_000]) {
            let shown = value_of(level_of(value)) as f64;
            let value = value as f64;
            // Small numbers are rounded to a whole one.
            assert!(
                (shown - value).abs() <= value * 0.08 + 0.5,
                "{value} {shown}"
            );
        }
        for value in [0, 1, 2] {
            assert_eq!(value_of(level_of(value)), value);
        }
        assert!(value_of(level_of(u64::MAX)) > 1 << 49);
    }

    fn levels() -> impl Strategy<Value = u8> {
        prop_oneof![Just(0u8), 100..104u8, 95..110u8, any::<u8>()]
    }

    proptest! {
        #[test]
        fn blocks_are_restored(samples in proptest::collection::vec(proptest::array::uniform6(levels()), BLOCK)) {
            let samples: [Levels; BLOCK] = samples.try_into().unwrap();
            let bytes = compress(&samples);
            prop_assert!(bytes.len() <= COLUMNS * (BLOCK + 1));
            prop_assert_eq!(decompress(&bytes), samples);
        }
    }

    #[test]
    fn old_blocks_are_dropped_and_idle_ones_not_stored() {
        let mut series = Series::new(2);
        for at in [0, 59, 61, 200, 201] {
            series.add(at, &[1, 0, 0, 0, 0, 0]);
        }
        series.add(202, &[0; COLUMNS]);
        let at: Vec<u64> = series.samples().iter().map(|(at, _)| *at).collect();
        assert_eq!(at, [200, 201]);
        series.expire(1000);
        assert!(series.samples().is_empty() && series.bytes() == 0);
    }

    /// A disk with a varying load for a day. A hundred such disks take about 1 MB.
    #[test]
    fn busy_disk_takes_little_memory() {
        let (mut seconds, mut minutes) = (Series::new(60), Series::new(24));
        let mut random = 1u64;
        let mut near = |value: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            value * (90 + (random >> 33) % 21) / 100
        };
        for at in 0..86_400 {
            let sample = [
                near(20_000),
                near(9000),
                near(120_000_000),
                near(80_000),
                near(400_000),
                0,
            ];
            seconds.add(at, &sample);
            if at % 60 == 0 {
                minutes.add(at / 60, &sample);
            }
        }
        assert_eq!(minutes.samples().len(), 1440);
        assert!(seconds.samples().len() >= 3540);
        let bytes = seconds.bytes() + minutes.bytes();
        assert!(bytes < 12_000, "{bytes}");
    }
}
