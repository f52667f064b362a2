//! Checks common to all block devices, so that an option means the same everywhere.
//!
//! Transports have already checked ranges; this second check costs two comparisons.

use std::sync::Arc;

use block::{
    Capacity, CompareAndWrite, DiskInfo, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest,
};
use guest_memory::IoBuffer;

/// Properties of a disk for the check, flat and small.
#[derive(Clone, Debug)]
pub(crate) struct Limits {
    capacity: Arc<Capacity>,
    io_mask: u64,
    read_only: bool,
    discard: bool,
    write_zeroes: bool,
    compare_and_write: Option<CompareAndWrite>,
}

impl Limits {
    pub(crate) fn of(info: &DiskInfo, capacity: &Arc<Capacity>) -> Limits {
        Limits {
            capacity: Arc::clone(capacity),
            io_mask: u64::from(info.io_alignment) - 1,
            read_only: info.read_only,
            discard: info.discard_granularity.is_some(),
            write_zeroes: info.write_zeroes,
            compare_and_write: info.compare_and_write,
        }
    }

    /// Returns the size of the disk in smallest I/Os.
    pub(crate) fn units(&self) -> u64 {
        self.capacity.bytes() / (self.io_mask + 1)
    }

    /// [`Limits::admit`] for a device without atomic writes. `Some`: the I/O is refused, or empty.
    ///
    /// # Panics
    /// The buffer's window differs from the I/O's length: a defect of the submitter.
    pub(crate) fn begin(&self, io: &IoRequest, buffer: &IoBuffer) -> Option<IoOutcome> {
        if let Err(refused) = self.admit(io) {
            return Some(Err(refused));
        }
        if io.flags.has(IoFlags::ATOMIC) {
            return Some(Err(IoErrorKind::Unsupported.into()));
        }
        if io.length == 0 && io.kind != IoKind::Flush {
            return Some(Ok(()));
        }
        let expected = io.buffer_length();
        assert!(
            expected == 0 || buffer.len() as u64 == expected,
            "window and I/O have different lengths"
        );
        None
    }

    /// Returns an error if the I/O must be refused.
    #[inline]
    pub(crate) fn admit(&self, io: &IoRequest) -> IoOutcome {
        let IoRequest { offset, length, .. } = *io;
        let capacity = self.capacity.bytes();
        if length > capacity || offset > capacity - length {
            return Err(IoErrorKind::OutOfRange.into());
        }
        if (offset | length) & self.io_mask != 0 && io.kind != IoKind::BlockStatus {
            return Err(IoErrorKind::OutOfRange.into());
        }
        if !io.modifies() {
            return Ok(());
        }
        match io.kind {
            // Devices with shared state or SCSI commands handle these earlier.
            IoKind::ReplaceState | IoKind::ScsiCommand => Err(IoErrorKind::Unsupported.into()),
            _ if self.read_only => Err(IoErrorKind::ReadOnly.into()),
            IoKind::Discard if !self.discard => Err(IoErrorKind::Unsupported.into()),
            IoKind::WriteZeroes if !self.write_zeroes => Err(IoErrorKind::Unsupported.into()),
            IoKind::CompareAndWrite if !self.compares_and_writes(io) => {
                Err(IoErrorKind::Unsupported.into())
            }
            IoKind::Read
            | IoKind::BlockStatus
            | IoKind::CompareAndWrite
            | IoKind::Flush
            | IoKind::Write
            | IoKind::Discard
            | IoKind::WriteZeroes => Ok(()),
        }
    }

    fn compares_and_writes(&self, io: &IoRequest) -> bool {
        let by = self.compare_and_write;
        by.is_some_and(|by| by.is_done_by_device(io.offset, io.length))
    }
}
