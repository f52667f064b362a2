//! Self-verifying content: every unit of a written block contains its offset and the write that created it.
//!
//! Layout of a unit, little endian: magic, seed, offset, generation, checksum of all other bytes, then noise. A flipped bit breaks the
//! checksum, a misplaced write has a wrong offset, a lost write has a wrong generation (or no magic). Pure.

use crc_fast::{CrcAlgorithm, checksum};
use fastrand::Rng;

use crate::job::Checksum;

const MAGIC: u64 = 0x6c75_6e65_7474_6502;
const HEADER: usize = 40;
const SUM: usize = 32;

/// Identity of the write of a unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Seed of the run.
    pub seed: u64,
    /// Offset of the unit on the disk.
    pub offset: u64,
    /// Number of writes of the unit, including this one.
    pub generation: u64,
}

fn sum(algorithm: Checksum, unit: &[u8]) -> u64 {
    let algorithm = match algorithm {
        Checksum::Crc16 => CrcAlgorithm::Crc16Ibm3740,
        Checksum::Crc32 => CrcAlgorithm::Crc32IsoHdlc,
        Checksum::Crc32c => CrcAlgorithm::Crc32Iscsi,
        Checksum::Crc64 => CrcAlgorithm::Crc64Xz,
    };
    // The checksum field is excluded: both halves have fixed positions.
    let (head, rest) = unit.split_at(SUM);
    checksum(algorithm, head) ^ checksum(algorithm, &rest[8..]).rotate_left(1)
}

fn word(unit: &[u8], at: usize) -> u64 {
    unit.get(at..at + 8)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u64::from_le_bytes)
}

/// Fills a unit of at least 512 bytes.
pub fn fill(algorithm: Checksum, origin: Origin, unit: &mut [u8]) {
    let words = [MAGIC, origin.seed, origin.offset, origin.generation];
    for (chunk, word) in unit.chunks_exact_mut(8).zip(words) {
        chunk.copy_from_slice(&word.to_le_bytes());
    }
    let mut noise = Rng::with_seed(origin.seed ^ origin.offset ^ origin.generation.rotate_left(40));
    noise.fill(&mut unit[HEADER..]);
    let sum = sum(algorithm, unit);
    unit[SUM..HEADER].copy_from_slice(&sum.to_le_bytes());
}

/// Checks a unit and describes its fault. Without a generation, any write of the run is accepted.
pub fn check(
    algorithm: Checksum,
    seed: u64,
    offset: u64,
    generation: Option<u64>,
    unit: &[u8],
) -> Result<(), String> {
    if word(unit, 0) != MAGIC {
        let content = if unit.iter().all(|byte| *byte == 0) {
            "zeroes"
        } else {
            "not a block of this test"
        };
        return Err(format!("offset {offset}: {content}: a write was lost"));
    }
    let (stored, computed) = (word(unit, SUM), sum(algorithm, unit));
    if stored != computed {
        return Err(format!(
            "offset {offset}: checksum {computed:#x}, stored {stored:#x}: the data changed"
        ));
    }
    let (found_seed, found_offset, found) = (word(unit, 8), word(unit, 16), word(unit, 24));
    if found_seed != seed {
        return Err(format!(
            "offset {offset}: seed {found_seed}, expected {seed}: a write of this run was lost"
        ));
    }
    if found_offset != offset {
        return Err(format!(
            "offset {offset}: a block that belongs to offset {found_offset}: a write was misplaced"
        ));
    }
    match generation {
        Some(wanted) if wanted != found => Err(format!(
            "offset {offset}: write {found}, expected {wanted}: a write was lost"
        )),
        _ => Ok(()),
    }
}

/// Number of writes per unit by one clone.
pub struct Record {
    /// Checksum algorithm.
    pub checksum: Checksum,
    /// Seed of the run.
    pub seed: u64,
    unit: u32,
    start: u64,
    generations: Vec<u32>,
    busy: Vec<bool>,
}

impl Record {
    /// Creates a record of `length` bytes from `start`, in units of `unit` bytes.
    pub fn new(checksum: Checksum, seed: u64, start: u64, length: u64, unit: u32) -> Record {
        let units = length.div_ceil(u64::from(unit)) as usize;
        Record {
            checksum,
            seed,
            unit,
            start,
            generations: vec![0; units],
            busy: vec![false; units],
        }
    }

    fn units(&self, offset: u64, length: u32) -> std::ops::Range<usize> {
        let first = (offset.saturating_sub(self.start) / u64::from(self.unit)) as usize;
        let last = first + (length / self.unit) as usize;
        first.min(self.generations.len())..last.min(self.generations.len())
    }

    /// Returns true if a write to any of these bytes is in flight. The order of concurrent writes would be undefined.
    pub fn is_busy(&self, offset: u64, length: u32) -> bool {
        self.busy[self.units(offset, length)].contains(&true)
    }

    /// Fills data to be written and records the write.
    pub fn begin(&mut self, offset: u64, data: &mut [u8]) {
        let range = self.units(offset, data.len() as u32);
        let unit = self.unit as usize;
        for ((index, data), at) in range.zip(data.chunks_exact_mut(unit)).zip(0u64..) {
            self.generations[index] += 1;
            self.busy[index] = true;
            let origin = Origin {
                seed: self.seed,
                offset: offset + at * u64::from(self.unit),
                generation: u64::from(self.generations[index]),
            };
            fill(self.checksum, origin, data);
        }
    }

    /// Records the completion of a write.
    pub fn end(&mut self, offset: u64, length: u32) {
        let range = self.units(offset, length);
        self.busy[range].fill(false);
    }

    /// Checks data that was read and describes the first fault.
    pub fn check(&self, offset: u64, data: &[u8]) -> Result<(), String> {
        let range = self.units(offset, data.len() as u32);
        for ((index, data), at) in range.zip(data.chunks_exact(self.unit as usize)).zip(0u64..) {
            let generation = match self.generations[index] {
                0 => None,
                count => Some(u64::from(count)),
            };
            let offset = offset + at * u64::from(self.unit);
            check(self.checksum, self.seed, offset, generation, data)?;
        }
        Ok(())
    }

    /// Returns runs of written units, at most `most` bytes each, for verification: offset and length.
    pub fn written(&self, most: u32) -> impl Iterator<Item = (u64, u32)> + '_ {
        let per_run = (most / self.unit).max(1) as usize;
        let mut at = 0;
        std::iter::from_fn(move || {
            while at < self.generations.len() && self.generations[at] == 0 {
                at += 1;
            }
            let run = self.generations[at..]
                .iter()
                .take(per_run)
                .take_while(|count| **count > 0)
                .count();
            let first = at as u64 * u64::from(self.unit);
            at += run;
            (run > 0).then(|| (self.start + first, run as u32 * self.unit))
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SUMS: [Checksum; 4] = [
        Checksum::Crc16,
        Checksum::Crc32,
        Checksum::Crc32c,
        Checksum::Crc64,
    ];

    #[test]
    fn one_flipped_bit_anywhere_is_found() {
        for algorithm in SUMS {
            let origin = Origin {
                seed: 7,
                offset: 4096,
                generation: 1,
            };
            let mut unit = vec![0; 512];
            fill(algorithm, origin, &mut unit);
            assert_eq!(check(algorithm, 7, 4096, Some(1), &unit), Ok(()));
            for bit in 0..512 * 8 {
                unit[bit / 8] ^= 1 << (bit % 8);
                assert!(
                    check(algorithm, 7, 4096, Some(1), &unit).is_err(),
                    "{algorithm:?} {bit}"
                );
                unit[bit / 8] ^= 1 << (bit % 8);
            }
        }
    }

    #[test]
    fn lost_and_misplaced_writes_are_told_apart() {
        let mut record = Record::new(Checksum::Crc32c, 9, 0, 1 << 20, 512);
        let (mut old, mut new) = (vec![0; 1024], vec![0; 1024]);
        record.begin(4096, &mut old);
        assert!(record.is_busy(4608, 512) && !record.is_busy(5120, 512));
        record.end(4096, 1024);
        record.begin(4096, &mut new);
        record.end(4096, 1024);
        assert_eq!(record.check(4096, &new), Ok(()));
        assert!(record.check(4096, &old).unwrap_err().contains("was lost"));
        assert!(
            record
                .check(4096, &[0; 1024])
                .unwrap_err()
                .contains("zeroes")
        );
        assert!(record.check(8192, &new).unwrap_err().contains("misplaced"));
        let runs: Vec<_> = record.written(512).collect();
        assert_eq!(runs, [(4096, 512), (4608, 512)]);
        assert_eq!(record.written(1 << 20).collect::<Vec<_>>(), [(4096, 1024)]);
    }
}
