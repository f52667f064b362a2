//! `null`: every I/O completes synchronously. For measuring the code around a backend.
//!
//! Writes are discarded. Reads leave the buffer as it was, without data of others. Allocates nothing, never blocks.

use std::io;
use std::sync::Arc;

use block::{
    Capacity, CompareAndWrite, DiskInfo, Extent, Geometry, Identity, IoKind, IoRequest,
    encode_extents,
};
use guest_memory::IoBuffer;
use uring::{Completion, Ring};

use crate::admit::Limits;
use crate::blocking::answer_at_once;
use crate::error::{check_block_size, check_size};
use crate::{Attach, BlockDevice, Capabilities, Finished, IoChannel, OpenError, Submission, Tag};

/// Options of a `null` disk.
#[derive(Clone, Copy, Debug)]
pub struct NullOptions {
    /// Reported size in bytes.
    pub size: u64,
    /// Bytes per logical block.
    pub block_size: u32,
    /// Refuse writes.
    pub read_only: bool,
}

impl Default for NullOptions {
    fn default() -> Self {
        NullOptions {
            size: 1 << 30,
            block_size: 512,
            read_only: false,
        }
    }
}

/// The block device `null`.
#[derive(Debug)]
pub struct Null {
    info: DiskInfo,
    capacity: Arc<Capacity>,
}

impl Null {
    /// Creates a `null` disk.
    ///
    /// # Errors
    /// The size or the block size is invalid.
    pub fn create(options: NullOptions) -> Result<Null, OpenError> {
        let block_size = check_block_size(options.block_size)?;
        let size = check_size(options.size, block_size)?;
        Ok(Null {
            capacity: Arc::new(Capacity::new(size)),
            info: DiskInfo {
                geometry: Geometry::new(block_size, size),
                physical_block_size: 4096,
                io_alignment: block::SECTOR_BYTES,
                optimal_io_size: 0,
                read_only: options.read_only,
                write_cache: false,
                discard_granularity: Some(block_size),
                discard_zeroes: false,
                write_zeroes: true,
                anchors: false,
                // No data is stored, therefore no write is atomic.
                atomic_writes: None,
                compare_and_write: Some(CompareAndWrite::Emulated),
                shared: false,
                rotational: false,
                passthrough: None,
                identity: Identity::UNSET,
                serial: String::new(),
                naa: 0,
            },
        })
    }
}

impl BlockDevice for Null {
    fn info(&self) -> DiskInfo {
        self.info.resized(self.capacity.bytes())
    }

    fn capacity(&self) -> &Arc<Capacity> {
        &self.capacity
    }

    fn set_size(&self, _bytes: u64) -> io::Result<()> {
        Ok(())
    }

    fn kind(&self) -> &'static str {
        "null"
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities::NONE
    }

    fn attach(&self, _attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        Ok(Box::new(NullChannel {
            limits: Limits::of(&self.info, &self.capacity),
        }))
    }
}

struct NullChannel {
    limits: Limits,
}

impl IoChannel for NullChannel {
    #[inline]
    fn submit(
        &mut self,
        _ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        _tag: Tag,
    ) -> Submission {
        let admitted = self.limits.admit(io);
        if io.kind == IoKind::BlockStatus && admitted.is_ok() {
            let range = io.offset..io.offset + io.length;
            let all = encode_extents(range, |_| Extent::UNKNOWN);
            return Submission::Done(answer_at_once(buffer, &all));
        }
        Submission::Done(admitted)
    }

    fn complete(
        &mut self,
        _ring: &mut Ring,
        _completion: Completion,
        _finished: &mut Vec<Finished>,
    ) {
    }

    fn in_flight(&self) -> usize {
        0
    }
}
