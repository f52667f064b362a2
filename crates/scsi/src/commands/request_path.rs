//! The short way for a READ or WRITE of 10 or 16 bytes of which nothing is remarkable.
//!
//! Every field is as it mostly is, the buffer is as long as the transfer: then the plan is made here, in
//! one place in memory. Whatever is otherwise goes the general way, which alone knows how to refuse; a test
//! holds that the two agree.

use block::{Geometry, IoFlags, IoRequest};

use super::read_write::TRANSFER_MAX;
use crate::command::{Cdb, opcode::*};
use crate::logical_unit::Word;
use crate::plan::PlainIo;

const FUA: u8 = 0x08;
const DPO: u8 = 0x10;
/// In the last byte but one, above GROUP NUMBER: nothing that is honoured.
const NO_GROUP: u64 = 0xc0;

/// What a unit has plain commands do, as it was when it was asked: they are planned from this without another look at it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlainWay {
    /// The unit's blocks, and log2 of the bytes of one.
    capacity: u64,
    block_shift: u32,
    /// Most blocks of a command: no more than there are.
    most: u64,
    word: Word,
    /// Of the word; nearly all else in it is of writes only.
    descriptor_sense: bool,
}

impl PlainWay {
    /// The way of a unit to which no command is plain.
    pub const CLOSED: PlainWay = PlainWay {
        capacity: 0,
        block_shift: 9,
        most: 0,
        word: Word(0),
        descriptor_sense: false,
    };

    #[inline(always)]
    pub(super) fn new(geometry: Geometry, word: Word) -> PlainWay {
        let (capacity, block_shift) = (geometry.capacity().0, geometry.block_shift());
        PlainWay {
            capacity,
            block_shift,
            most: capacity.min(TRANSFER_MAX >> block_shift),
            word,
            descriptor_sense: word.has(Word::DESCRIPTOR_SENSE),
        }
    }

    /// Is it that of such a unit? Its blocks have one size all its life.
    #[inline(always)]
    pub(crate) fn is_of(&self, geometry: Geometry, word: Word) -> bool {
        self.capacity == geometry.capacity().0 && self.word == word
    }

    /// The plan's I/O, if the command is that plain. `data_in` and `data_out` are what the initiator offers.
    #[inline(always)]
    pub fn begin(&self, cdb: &Cdb, data_in: u64, data_out: u64) -> Option<PlainIo> {
        /// What tells a WRITE from a READ, of 10 and of 16 bytes.
        const WRITE: u8 = WRITE_10 ^ READ_10;
        const { assert!(WRITE == WRITE_16 ^ READ_16) };
        /// Bits of the first two bytes, operation code and flags, in which plain commands may differ.
        const ANY: u16 = u16::from_le_bytes([WRITE, FUA | DPO]);
        const TEN: u16 = READ_10 as u16;
        const SIXTEEN: u16 = READ_16 as u16;
        // Read as two words: a byte at a time costs a register for each.
        let (head, tail) = halves(cdb);
        let middle = (head >> 16 | tail << 48).swap_bytes();
        let (lba, blocks) = match head as u16 & !ANY {
            // The LBA in bytes 2 to 5, group in 6, blocks in 7 and 8, control in 9.
            TEN if middle & (NO_GROUP << 24 | 0xff) == 0 => (middle >> 32, middle >> 8 & 0xffff),
            // In bytes 2 to 9, 14, 10 to 13, 15: the two bits and the byte above bit 53.
            SIXTEEN if tail >> 54 == 0 => (middle, ((tail >> 16) as u32).swap_bytes().into()),
            _ => return None,
        };
        // None is as much too many, and no more than the capacity can be taken from it.
        if blocks.wrapping_sub(1) >= self.most || lba > self.capacity - blocks {
            return None;
        }
        // Below the capacity in bytes, so nothing is shifted out.
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

/// The CDB's first and second eight bytes, the first of each in the lowest bits.
#[inline(always)]
fn halves(cdb: &Cdb) -> (u64, u64) {
    let whole = u128::from_le_bytes(*cdb);
    (whole as u64, (whole >> 64) as u64)
}
