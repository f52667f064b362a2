//! Fast path for a READ or WRITE of 10 or 16 bytes with the usual field values and a buffer as long as the transfer.
//!
//! The plan is created here, in one place in memory. All other commands take the general path, which alone reports errors; a test checks
//! that both paths agree.

use block::{Geometry, IoFlags, IoRequest};

use super::read_write::TRANSFER_MAX;
use crate::command::{Cdb, opcode::*};
use crate::logical_unit::Word;
use crate::plan::PlainIo;

const FUA: u8 = 0x08;
const DPO: u8 = 0x10;
/// Bits of the byte before the last, above GROUP NUMBER; none is honoured.
const NO_GROUP: u64 = 0xc0;

/// Snapshot of a unit's parameters for plain commands, which are planned without access to the unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainParameters {
    /// Capacity in blocks, and log2 of the block size in bytes.
    capacity: u64,
    block_shift: u32,
    /// Maximum number of blocks of a command, at most the capacity.
    most: u64,
    word: Word,
    /// Copied from the word; nearly all its other bits concern writes only.
    descriptor_sense: bool,
}

impl PlainParameters {
    /// A value that matches no command.
    pub const CLOSED: PlainParameters = PlainParameters {
        capacity: 0,
        block_shift: 9,
        most: 0,
        word: Word(0),
        descriptor_sense: false,
    };

    #[inline(always)]
    pub(super) fn new(geometry: Geometry, word: Word) -> PlainParameters {
        let (capacity, block_shift) = (geometry.capacity().0, geometry.block_shift());
        PlainParameters {
            capacity,
            block_shift,
            most: capacity.min(TRANSFER_MAX >> block_shift),
            word,
            descriptor_sense: word.has(Word::DESCRIPTOR_SENSE),
        }
    }

    /// Returns true if the unit still has these parameters. The block size of a unit never changes.
    #[inline(always)]
    pub(crate) fn is_of(&self, geometry: Geometry, word: Word) -> bool {
        self.capacity == geometry.capacity().0 && self.word == word
    }

    /// Returns the I/O of a plain command; `None` for all others. `data_in` and `data_out` are the initiator's lengths in bytes.
    #[inline(always)]
    pub fn begin(&self, cdb: &Cdb, data_in: u64, data_out: u64) -> Option<PlainIo> {
        /// Difference between the operation codes of WRITE and READ, for 10 and 16 bytes.
        const WRITE: u8 = WRITE_10 ^ READ_10;
        const { assert!(WRITE == WRITE_16 ^ READ_16) };
        /// Bits of operation code and flags that may differ between plain commands.
        const ANY: u16 = u16::from_le_bytes([WRITE, FUA | DPO]);
        const TEN: u16 = READ_10 as u16;
        const SIXTEEN: u16 = READ_16 as u16;
        // Read as two words: a byte at a time costs a register for each.
        let (head, tail) = halves(cdb);
        let middle = (head >> 16 | tail << 48).swap_bytes();
        let (lba, blocks) = match head as u16 & !ANY {
            // LBA in bytes 2 to 5, group in 6, blocks in 7 and 8, control in 9.
            TEN if middle & (NO_GROUP << 24 | 0xff) == 0 => (middle >> 32, middle >> 8 & 0xffff),
            // LBA in bytes 2 to 9, group in 14, blocks in 10 to 13, control in 15: the two reserved bits and the control byte are above bit
            // 53.
            SIXTEEN if tail >> 54 == 0 => (middle, ((tail >> 16) as u32).swap_bytes().into()),
            _ => return None,
        };
        // Zero blocks wrap to too many, and any other number can be subtracted from the capacity.
        if blocks.wrapping_sub(1) >= self.most || lba > self.capacity - blocks {
            return None;
        }
        // Below the capacity in bytes, so no bits are shifted out.
        let (offset, length) = (lba << self.block_shift, blocks << self.block_shift);
        let request = if head as u8 & WRITE == 0 {
            if length != data_in {
                return None;
            }
            IoRequest::read(offset, length)
        } else {
            if length != data_out || self.word.has(Word::WRITE_PROTECTED) {
                return None;
            }
            let through = (head >> 8) as u8 & FUA != 0 || self.word.has(Word::WRITE_THROUGH);
            let flags = if through { IoFlags::FUA } else { IoFlags::NONE };
            IoRequest::write(offset, length).flagged(flags)
        };
        Some(PlainIo::new(request, self.descriptor_sense))
    }
}

/// Returns the first and second eight bytes of the CDB, the first byte of each in the lowest bits.
#[inline(always)]
fn halves(cdb: &Cdb) -> (u64, u64) {
    let whole = u128::from_le_bytes(*cdb);
    (whole as u64, (whole >> 64) as u64)
}
