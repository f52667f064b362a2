//! Classifies commands for timelines and counters, independent of the transport.

use block::{IoKind, IoRequest};
use latency::Operation;

/// Returns the operation that a command counts as: by the kind of its I/O if it is one I/O, otherwise by its operation code.
#[inline]
pub fn operation_of(opcode: u8, direct: Option<&IoRequest>) -> Operation {
    match direct.map(|request| request.kind) {
        Some(IoKind::Read) => Operation::Read,
        Some(IoKind::Write | IoKind::CompareAndWrite) => Operation::Write,
        Some(IoKind::BlockStatus) => Operation::Other,
        Some(IoKind::Flush) => Operation::Flush,
        Some(IoKind::Discard | IoKind::WriteZeroes) => Operation::Discard,
        // UNMAP and WRITE SAME in several steps.
        None if matches!(opcode, 0x42 | 0x41 | 0x93) => Operation::Discard,
        Some(IoKind::ReplaceState | IoKind::ScsiCommand) | None => Operation::Other,
    }
}
