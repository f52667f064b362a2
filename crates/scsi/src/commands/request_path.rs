//! The short way for a READ or WRITE of 10 or 16 bytes of which nothing is remarkable.
//!
//! Every field is as it mostly is, the buffer is as long as the transfer: then the plan is made here, in
//! one place in memory. Whatever is otherwise goes the general way, which alone knows how to refuse; a test
//! holds that the two agree.

use disk::{Blocks, IoFlags, IoKind, IoRequest, Lba};

use super::read_write::TRANSFER_MAX;
use crate::command::{Cdb, be16, be32, be64, opcode::*};
use crate::logical_unit::{LogicalUnit, Word};
use crate::plan::PlainIo;

const FUA: u8 = 0x08;
const DPO: u8 = 0x10;

/// The plan's I/O, if the command is that plain. `data_in` and `data_out` are what the initiator offers.
#[inline(always)]
pub(super) fn begin(
    unit: &LogicalUnit,
    word: Word,
    cdb: &Cdb,
    data_in: u64,
    data_out: u64,
) -> Option<PlainIo> {
    /// What tells a WRITE from a READ, of 10 and of 16 bytes.
    const WRITE: u8 = WRITE_10 ^ READ_10;
    const { assert!(WRITE == WRITE_16 ^ READ_16) };
    let (lba, blocks, control) = match cdb[0] & !WRITE {
        READ_10 => (be32(cdb, 2).into(), be16(cdb, 7).into(), cdb[9]),
        READ_16 => (be64(cdb, 2), be32(cdb, 10).into(), cdb[15]),
        _ => return None,
    };
    let (kind, offered) = match cdb[0] & WRITE {
        0 => (IoKind::Read, data_in),
        _ => (IoKind::Write, data_out),
    };
    let (offset, length) = unit.geometry().check(Lba(lba), Blocks(blocks)).ok()?;
    let plain = cdb[1] & !(FUA | DPO) == 0 && control & 0x04 == 0;
    if !plain || length != offered || length == 0 || length > TRANSFER_MAX {
        return None;
    }
    let mut flags = IoFlags::NONE;
    if kind == IoKind::Write {
        if word.has(Word::WRITE_PROTECTED) {
            return None;
        }
        if cdb[1] & FUA != 0 || word.has(Word::WRITE_THROUGH) {
            flags = IoFlags::FUA;
        }
    }
    let request = IoRequest {
        kind,
        flags,
        offset,
        length,
    };
    Some(PlainIo::new(request, word.has(Word::DESCRIPTOR_SENSE)))
}
