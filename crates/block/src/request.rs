//! One I/O, as a backend sees it: kind, byte range, flags. Who asked is not in it.

use crate::{STATUS_BYTES, ScsiCommand};

/// What is asked of a disk. Those that change nothing come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum IoKind {
    /// Fill the buffer from the disk.
    Read,
    /// Everything answered before this was submitted is durable when this is answered. No range.
    Flush,
    /// Put the extents of the range into the buffer, as many as are known and fit: see [`encode_extents`](crate::encode_extents).
    BlockStatus,
    /// Put the buffer onto the disk; with [`IoFlags::FUA`] it is durable before it is answered.
    Write,
    /// The range's content is no longer needed; reads of it may return anything that is consistent.
    Discard,
    /// Reads of the range return zeroes; with [`IoFlags::UNMAP`] its space may be given back.
    WriteZeroes,
    /// Put the second half of the buffer onto the disk if the range holds the first half, as one atomic operation; else it fails
    /// with [`IoErrorKind::Miscompare`](crate::IoErrorKind). Only for devices that do it: see
    /// [`CompareAndWrite`](crate::CompareAndWrite).
    CompareAndWrite,
    /// Replace the state that the device keeps for all daemons that serve its content, if it is of the version that the buffer begins
    /// with; else it fails with [`IoErrorKind::Miscompare`](crate::IoErrorKind). No range; `length` is that of the buffer. Only for
    /// devices that keep such a state.
    ReplaceState,
    /// Carry out a SCSI command as it is: see [`ScsiCommand`](crate::ScsiCommand). No range; `length` is that of the buffer. Whether
    /// it changes anything is known to whoever issues it. Only for devices with [`Passthrough`](crate::Passthrough).
    ScsiCommand,
}

impl IoKind {
    /// How many there are.
    pub const COUNT: usize = 9;

    /// All, in order.
    pub const ALL: [IoKind; IoKind::COUNT] = [
        IoKind::Read,
        IoKind::Flush,
        IoKind::BlockStatus,
        IoKind::Write,
        IoKind::Discard,
        IoKind::WriteZeroes,
        IoKind::CompareAndWrite,
        IoKind::ReplaceState,
        IoKind::ScsiCommand,
    ];

    /// One word, for programs that read it.
    pub const fn word(self) -> &'static str {
        match self {
            IoKind::Read => "read",
            IoKind::Write => "write",
            IoKind::Flush => "flush",
            IoKind::Discard => "discard",
            IoKind::WriteZeroes => "write_zeroes",
            IoKind::CompareAndWrite => "compare_and_write",
            IoKind::BlockStatus => "block_status",
            IoKind::ScsiCommand => "scsi_command",
            IoKind::ReplaceState => "replace_state",
        }
    }
}

/// Flags of an I/O. A hand-made bit set, for it has to be `const` and one byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoFlags(u8);

impl IoFlags {
    /// No flag.
    pub const NONE: IoFlags = IoFlags(0);
    /// Force unit access: durable before it is answered.
    pub const FUA: IoFlags = IoFlags(1);
    /// The space of zeroed blocks may be given back.
    pub const UNMAP: IoFlags = IoFlags(2);
    /// Issued by whoever holds the range against all others.
    pub const HOLDER: IoFlags = IoFlags(4);
    /// Issued by what the disk is closed for to all others.
    pub const CLOSER: IoFlags = IoFlags(8);
    /// A write that is done as a whole or not at all, within what [`AtomicWrites`](crate::AtomicWrites) allows. Whoever issues it
    /// holds the range.
    pub const ATOMIC: IoFlags = IoFlags(16);

    /// Both sets of flags.
    #[must_use]
    pub const fn with(self, other: IoFlags) -> IoFlags {
        IoFlags(self.0 | other.0)
    }

    /// Are all flags of `other` set here?
    pub const fn has(self, other: IoFlags) -> bool {
        self.0 & other.0 == other.0
    }
}

/// One I/O. The range has been checked against the disk by whoever built it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoRequest {
    /// What to do.
    pub kind: IoKind,
    /// FUA, UNMAP.
    pub flags: IoFlags,
    /// First byte, a multiple of the disk's block size.
    pub offset: u64,
    /// Bytes, a multiple of the disk's block size; 0 for a flush.
    pub length: u64,
}

impl IoRequest {
    /// A read of `length` bytes at `offset`.
    pub const fn read(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::Read,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// A write of `length` bytes at `offset`.
    pub const fn write(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::Write,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// A flush of the whole disk.
    pub const fn flush() -> Self {
        IoRequest {
            kind: IoKind::Flush,
            flags: IoFlags::NONE,
            offset: 0,
            length: 0,
        }
    }

    /// A discard of `length` bytes at `offset`.
    pub const fn discard(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::Discard,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// A write of zeroes of `length` bytes at `offset`.
    pub const fn write_zeroes(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::WriteZeroes,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// A compare and write of `length` bytes at `offset`: the buffer holds twice as many.
    pub const fn compare_and_write(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::CompareAndWrite,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// The block status of `length` bytes at `offset`: the buffer holds [`STATUS_BYTES`].
    pub const fn block_status(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::BlockStatus,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// A SCSI command, which the buffer holds with its data.
    pub const fn scsi_command(command: &ScsiCommand) -> Self {
        IoRequest {
            kind: IoKind::ScsiCommand,
            flags: IoFlags::NONE,
            offset: 0,
            length: command.buffer_length() as u64,
        }
    }

    /// A replacement of the state that the device keeps: version and state are `length` bytes.
    pub const fn replace_state(length: u64) -> Self {
        IoRequest {
            kind: IoKind::ReplaceState,
            flags: IoFlags::NONE,
            offset: 0,
            length,
        }
    }

    /// The same I/O with more flags.
    #[must_use]
    pub const fn flagged(self, flags: IoFlags) -> Self {
        IoRequest {
            flags: self.flags.with(flags),
            ..self
        }
    }

    /// Does it change the disk? A SCSI command may.
    #[inline(always)]
    pub const fn modifies(&self) -> bool {
        // Asked twice for each I/O, and so one test.
        self.kind as u8 > IoKind::BlockStatus as u8
    }

    /// Does it fill a buffer of its length from the disk, or put one onto it?
    pub const fn moves_data(&self) -> bool {
        matches!(self.kind, IoKind::Read | IoKind::Write)
    }

    /// Does it read or change what the disk holds, at a range that is known here?
    #[inline(always)]
    pub const fn touches_data(&self) -> bool {
        !matches!(
            self.kind,
            IoKind::Flush | IoKind::BlockStatus | IoKind::ScsiCommand | IoKind::ReplaceState
        )
    }

    /// Bytes of the buffer that it reads or fills.
    pub const fn buffer_length(&self) -> u64 {
        match self.kind {
            IoKind::Read | IoKind::Write | IoKind::ScsiCommand | IoKind::ReplaceState => {
                self.length
            }
            IoKind::CompareAndWrite => 2 * self.length,
            IoKind::BlockStatus => STATUS_BYTES as u64,
            IoKind::Flush | IoKind::Discard | IoKind::WriteZeroes => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_are_a_set() {
        let both = IoFlags::FUA.with(IoFlags::UNMAP);
        assert!(both.has(IoFlags::FUA) && both.has(IoFlags::UNMAP));
        assert!(!IoFlags::FUA.has(both));
        assert!(IoFlags::FUA.has(IoFlags::NONE));
    }

    #[test]
    fn kinds_are_in_the_order_of_their_numbers() {
        assert!(
            IoKind::ALL
                .iter()
                .map(|kind| *kind as usize)
                .eq(0..IoKind::COUNT)
        );
    }

    #[test]
    fn all_but_reads_flushes_and_block_status_modify() {
        assert!(IoRequest::write(0, 512).modifies());
        assert!(IoRequest::discard(0, 512).modifies());
        assert!(IoRequest::write_zeroes(0, 512).modifies());
        assert!(IoRequest::compare_and_write(0, 512).modifies());
        assert!(!IoRequest::read(0, 512).modifies());
        assert!(!IoRequest::flush().modifies());
        assert!(!IoRequest::block_status(0, 512).modifies());
    }
}
