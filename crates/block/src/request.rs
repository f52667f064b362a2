//! One I/O for a backend: kind, byte range, flags. The originator is not included.

use crate::{STATUS_BYTES, ScsiCommand};

/// Kind of an I/O. Kinds that change nothing come first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum IoKind {
    /// Reads the range into the buffer.
    Read,
    /// Makes everything durable that completed before the submission of the flush. No range.
    Flush,
    /// Writes the known extents of the range into the buffer, as far as they fit; see
    /// [`encode_extents`](crate::encode_extents).
    BlockStatus,
    /// Writes the buffer to the range; with [`IoFlags::FUA`] it is durable on completion.
    Write,
    /// Discards the range; later reads may return any consistent data.
    Discard,
    /// Zeroes the range; with [`IoFlags::UNMAP`] its space may be freed.
    WriteZeroes,
    /// Writes the second half of the buffer if the range equals the first half, as one atomic operation; otherwise fails
    /// with [`IoErrorKind::Miscompare`](crate::IoErrorKind). Only for devices that execute it; see
    /// [`CompareAndWrite`](crate::CompareAndWrite).
    CompareAndWrite,
    /// Replaces the state that the device stores for all daemons that serve its content, if its version equals the version
    /// at the start of the buffer; otherwise fails with [`IoErrorKind::Miscompare`](crate::IoErrorKind). No range; `length`
    /// is the length of the buffer. Only for devices with such a state.
    ReplaceState,
    /// Executes a SCSI command; see [`ScsiCommand`]. No range; `length` is the length of the buffer.
    /// Only the issuer can determine whether it changes data. Only for devices with [`Passthrough`](crate::Passthrough).
    ScsiCommand,
}

impl IoKind {
    /// Number of kinds.
    pub const COUNT: usize = 9;

    /// All kinds, in order.
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

    /// Returns a machine-readable word.
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

/// Flags of an I/O. A hand-written bit set, because it must be `const` and one byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IoFlags(u8);

impl IoFlags {
    /// No flag.
    pub const NONE: IoFlags = IoFlags(0);
    /// Force unit access: durable on completion.
    pub const FUA: IoFlags = IoFlags(1);
    /// The space of zeroed blocks may be freed.
    pub const UNMAP: IoFlags = IoFlags(2);
    /// Issued by the holder of the range's lock.
    pub const HOLDER: IoFlags = IoFlags(4);
    /// Issued by the operation that closed the disk.
    pub const CLOSER: IoFlags = IoFlags(8);
    /// Atomic write, within the limits of [`AtomicWrites`](crate::AtomicWrites). The issuer holds the range.
    pub const ATOMIC: IoFlags = IoFlags(16);

    /// Returns the union of both sets.
    #[must_use]
    pub const fn with(self, other: IoFlags) -> IoFlags {
        IoFlags(self.0 | other.0)
    }

    /// Returns true if all flags of `other` are set.
    pub const fn has(self, other: IoFlags) -> bool {
        self.0 & other.0 == other.0
    }
}

/// One I/O. Its builder has checked the range against the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IoRequest {
    /// The kind.
    pub kind: IoKind,
    /// FUA, UNMAP.
    pub flags: IoFlags,
    /// First byte, a multiple of the disk's block size.
    pub offset: u64,
    /// Length in bytes, a multiple of the disk's block size; 0 for a flush.
    pub length: u64,
}

impl IoRequest {
    /// Creates a read of `length` bytes at `offset`.
    pub const fn read(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::Read,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// Creates a write of `length` bytes at `offset`.
    pub const fn write(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::Write,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// Creates a flush of the whole disk.
    pub const fn flush() -> Self {
        IoRequest {
            kind: IoKind::Flush,
            flags: IoFlags::NONE,
            offset: 0,
            length: 0,
        }
    }

    /// Creates a discard of `length` bytes at `offset`.
    pub const fn discard(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::Discard,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// Creates a write of zeroes of `length` bytes at `offset`.
    pub const fn write_zeroes(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::WriteZeroes,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// Creates a compare and write of `length` bytes at `offset`; the buffer is twice as long.
    pub const fn compare_and_write(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::CompareAndWrite,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// Creates a block status request for `length` bytes at `offset`; the buffer has [`STATUS_BYTES`] bytes.
    pub const fn block_status(offset: u64, length: u64) -> Self {
        IoRequest {
            kind: IoKind::BlockStatus,
            flags: IoFlags::NONE,
            offset,
            length,
        }
    }

    /// Creates a SCSI command request; the buffer holds the command and its data.
    pub const fn scsi_command(command: &ScsiCommand) -> Self {
        IoRequest {
            kind: IoKind::ScsiCommand,
            flags: IoFlags::NONE,
            offset: 0,
            length: command.buffer_length() as u64,
        }
    }

    /// Creates a replacement of the device's state; version and state have `length` bytes.
    pub const fn replace_state(length: u64) -> Self {
        IoRequest {
            kind: IoKind::ReplaceState,
            flags: IoFlags::NONE,
            offset: 0,
            length,
        }
    }

    /// Returns the same I/O with additional flags.
    #[must_use]
    pub const fn flagged(self, flags: IoFlags) -> Self {
        IoRequest {
            flags: self.flags.with(flags),
            ..self
        }
    }

    /// Returns true if the I/O may change the disk; always true for a SCSI command.
    #[inline(always)]
    pub const fn modifies(&self) -> bool {
        // One comparison, because it runs twice per I/O.
        self.kind as u8 > IoKind::BlockStatus as u8
    }

    /// Returns true if the I/O transfers a buffer of its length from or to the disk.
    pub const fn moves_data(&self) -> bool {
        matches!(self.kind, IoKind::Read | IoKind::Write)
    }

    /// Returns true if the I/O reads or changes disk content in a known range.
    #[inline(always)]
    pub const fn touches_data(&self) -> bool {
        !matches!(
            self.kind,
            IoKind::Flush | IoKind::BlockStatus | IoKind::ScsiCommand | IoKind::ReplaceState
        )
    }

    /// Returns the length of the buffer in bytes.
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
    fn only_reads_flushes_and_block_status_do_not_modify() {
        assert!(IoRequest::write(0, 512).modifies());
        assert!(IoRequest::discard(0, 512).modifies());
        assert!(IoRequest::write_zeroes(0, 512).modifies());
        assert!(IoRequest::compare_and_write(0, 512).modifies());
        assert!(!IoRequest::read(0, 512).modifies());
        assert!(!IoRequest::flush().modifies());
        assert!(!IoRequest::block_status(0, 512).modifies());
    }
}
