//! Self-describing block content: its offset, the write that created it, and a checksum.
//!
//! Layout, little endian: magic, seed, offset, sequence, checksum of the other words, then noise derived from all of these.

use crate::random::Random;

const MAGIC: u64 = 0x6c75_6e65_7474_6501;
const HEADER: usize = 40;

/// Identity of the write of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Origin {
    /// Seed of the run.
    pub seed: u64,
    /// Offset on the disk in bytes.
    pub offset: u64,
    /// Sequence number of the write in the run.
    pub sequence: u64,
}

impl Origin {
    /// Fills `block`, with at least 512 bytes and a multiple of 8.
    pub fn write(&self, block: &mut [u8]) {
        let mut noise =
            Random::new(self.seed ^ self.offset.rotate_left(20) ^ self.sequence.rotate_left(44));
        for chunk in block[HEADER..].chunks_mut(8) {
            let word = noise.next().to_le_bytes();
            chunk.copy_from_slice(&word[..chunk.len()]);
        }
        for (index, word) in [MAGIC, self.seed, self.offset, self.sequence]
            .into_iter()
            .enumerate()
        {
            block[index * 8..index * 8 + 8].copy_from_slice(&word.to_le_bytes());
        }
        let sum = checksum(block);
        block[32..40].copy_from_slice(&sum.to_le_bytes());
    }

    /// Describes the difference between `found` and the content of this write; `None` if they are equal. `scratch` has the same length.
    pub fn difference(&self, found: &[u8], scratch: &mut [u8]) -> Option<String> {
        self.write(scratch);
        if found == scratch {
            return None;
        }
        let expected = format!(
            "offset {}: expected write {} of seed {}",
            self.offset, self.sequence, self.seed
        );
        Some(if found.iter().all(|&byte| byte == 0) {
            format!("{expected}, found zeroes")
        } else if word(found, 0) != MAGIC || word(found, 4) != checksum(found) {
            let first = found
                .iter()
                .zip(scratch.iter())
                .position(|(a, b)| a != b)
                .unwrap_or(0);
            format!(
                "{expected}, found torn or foreign data, first difference at byte {first} of the block"
            )
        } else {
            let (seed, offset, sequence) = (word(found, 1), word(found, 2), word(found, 3));
            format!(
                "{expected}, found write {sequence} of seed {seed} that belongs to offset {offset}"
            )
        })
    }
}

fn word(block: &[u8], index: usize) -> u64 {
    block[index * 8..]
        .first_chunk()
        .map_or(0, |bytes| u64::from_le_bytes(*bytes))
}

/// Returns FNV-1a over 64-bit words, without the checksum's own word.
fn checksum(block: &[u8]) -> u64 {
    let mut sum = 0xcbf2_9ce4_8422_2325u64;
    for (index, chunk) in block.chunks_exact(8).enumerate() {
        if index != 4 {
            sum = (sum ^ word(chunk, 0))
                .wrapping_mul(0x0000_0100_0000_01b3)
                .rotate_left(29);
        }
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    const ORIGIN: Origin = Origin {
        seed: 7,
        offset: 8192,
        sequence: 3,
    };

    #[test]
    fn pattern_verifies_written_content() {
        let (mut block, mut scratch) = ([0; 4096], [0; 4096]);
        ORIGIN.write(&mut block);
        assert_eq!(ORIGIN.difference(&block, &mut scratch), None);
    }

    #[test]
    fn each_kind_of_damage_is_named() {
        let (mut block, mut scratch) = ([0; 4096], [0; 4096]);
        assert!(
            ORIGIN
                .difference(&block, &mut scratch)
                .unwrap()
                .ends_with("found zeroes")
        );
        Origin {
            sequence: 2,
            ..ORIGIN
        }
        .write(&mut block);
        assert!(
            ORIGIN
                .difference(&block, &mut scratch)
                .unwrap()
                .contains("found write 2 of seed 7")
        );
        Origin {
            offset: 0,
            ..ORIGIN
        }
        .write(&mut block);
        assert!(
            ORIGIN
                .difference(&block, &mut scratch)
                .unwrap()
                .contains("belongs to offset 0")
        );
        ORIGIN.write(&mut block);
        block[1000] ^= 1;
        assert!(
            ORIGIN
                .difference(&block, &mut scratch)
                .unwrap()
                .contains("torn or foreign data, first difference at byte 1000")
        );
    }
}
