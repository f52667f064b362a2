//! A block device for threads that may wait: one I/O after the other, on a ring of the thread's own. Owners of images read what their
//! image stands on with it; tools read and write disks.

use std::io;
use std::sync::Arc;

use block::{Extent, IoError, IoKind, IoRequest, STATUS_BYTES, decode_extents};
use guest_memory::IoBuffer;
use uring::{Owner, Ring, Wait};

use crate::{Attach, BlockDevice, Finished, IoChannel, Submission, Tag};

const RING_ENTRIES: u32 = 8;

/// A block device and one thread's way to it.
pub struct BlockingIo {
    ring: Ring,
    channel: Box<dyn IoChannel>,
    device: Arc<dyn BlockDevice>,
    /// [`block::DiskInfo::io_alignment`] of the device.
    alignment: u64,
}

impl BlockingIo {
    /// On the thread that will do the I/O.
    ///
    /// # Errors
    /// What the system says.
    pub fn new(device: Arc<dyn BlockDevice>) -> io::Result<BlockingIo> {
        let mut ring = Ring::new(RING_ENTRIES)?;
        let mut owners = (0..).map(Owner);
        let mut next_owner = || owners.next().unwrap_or(Owner(u32::MAX));
        let channel = device.attach(&mut Attach::new(&mut ring, &mut next_owner))?;
        Ok(BlockingIo {
            ring,
            channel,
            alignment: device.info().io_alignment.into(),
            device,
        })
    }

    /// Bytes that it has.
    pub fn bytes(&self) -> u64 {
        self.device.capacity().bytes()
    }

    fn run(&mut self, io: &IoRequest, mut buffer: IoBuffer) -> io::Result<IoBuffer> {
        let failed = |error: IoError| match error.errno {
            0 => io::Error::other(error.to_string()),
            errno => io::Error::from_raw_os_error(errno),
        };
        let submitted = self.channel.submit(&mut self.ring, io, &mut buffer, Tag(0));
        if let Submission::Done(outcome) = submitted {
            return outcome.map(|()| buffer).map_err(failed);
        }
        let (mut completions, mut finished) = (Vec::new(), Vec::<Finished>::new());
        loop {
            #[cfg(feature = "simulated")]
            if uring::simulated::Files::are_simulated() {
                crate::stepped::step_owners_of(&*self.device);
            }
            self.ring.enter(Wait::Until(None), &mut completions)?;
            for completion in completions.drain(..) {
                self.channel
                    .complete(&mut self.ring, completion, &mut finished);
            }
            if let Some(one) = finished.pop() {
                return one.outcome.map(|()| one.buffer).map_err(failed);
            }
        }
    }

    /// Fills `bytes` from any offset on; beyond the end are zeroes.
    ///
    /// # Errors
    /// What the device says.
    pub fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let (start, end) = self.whole_blocks(offset, bytes.len() as u64);
        let known = end.min(self.bytes()).saturating_sub(start);
        bytes.fill(0);
        if known > 0 {
            let buffer = IoBuffer::owned(known as usize);
            let buffer = self.run(&IoRequest::read(start, known), buffer)?;
            let skip = (offset - start) as usize;
            let wanted = bytes.len().min((known as usize).saturating_sub(skip));
            buffer.read_at(skip, &mut bytes[..wanted]);
        }
        Ok(())
    }

    /// Writes `bytes` at an offset within the device. Parts of the device's blocks are written by read-modify-write: the caller keeps
    /// others away from these blocks.
    ///
    /// # Errors
    /// What the device says.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let (start, end) = self.whole_blocks(offset, bytes.len() as u64);
        let buffer = IoBuffer::owned((end - start) as usize);
        let (first, last) = (start, end - self.alignment);
        let last_is_cut = offset + (bytes.len() as u64) < end;
        let edges = [(first, start < offset), (last, last_is_cut)];
        for (block, _) in edges.into_iter().filter(|(_, is_cut)| *is_cut) {
            let length = self.alignment;
            let edge = buffer.slice((block - start) as usize, length as usize);
            self.run(&IoRequest::read(block, length), edge)?;
        }
        buffer.write_at((offset - start) as usize, bytes);
        self.run(&IoRequest::write(start, end - start), buffer)
            .map(drop)
    }

    /// The whole blocks of the device that have a range.
    fn whole_blocks(&self, offset: u64, length: u64) -> (u64, u64) {
        let start = offset / self.alignment * self.alignment;
        (start, (offset + length).next_multiple_of(self.alignment))
    }

    /// An I/O without data: a flush, zeroes, a discard. Zeroes at the edges are written as by [`BlockingIo::write_at`], and edges are not
    /// discarded.
    ///
    /// # Errors
    /// What the device says.
    pub fn run_plain(&mut self, io: &IoRequest) -> io::Result<()> {
        let is_aligned = (io.offset | io.length).is_multiple_of(self.alignment);
        if is_aligned || !matches!(io.kind, IoKind::Discard | IoKind::WriteZeroes) {
            return self.run(io, IoBuffer::default()).map(drop);
        }
        let end = io.offset + io.length;
        let inner = io.offset.next_multiple_of(self.alignment).min(end);
        let inner_end = (end / self.alignment * self.alignment).max(inner);
        if io.kind == IoKind::WriteZeroes {
            for (from, to) in [(io.offset, inner), (inner_end, end)] {
                if from < to {
                    self.write_at(from, &vec![0; (to - from) as usize])?;
                }
            }
        }
        let whole = IoRequest {
            offset: inner,
            length: inner_end - inner,
            ..*io
        };
        match whole.length {
            0 => Ok(()),
            _ => self.run(&whole, IoBuffer::default()).map(drop),
        }
    }

    /// What stands behind whole blocks of the device, as many extents as it tells at once.
    ///
    /// # Errors
    /// What the device says.
    pub fn block_status(&mut self, offset: u64, length: u64) -> io::Result<Vec<Extent>> {
        let io = IoRequest::block_status(offset, length);
        let buffer = self.run(&io, IoBuffer::owned(STATUS_BYTES))?;
        let mut bytes = vec![0; STATUS_BYTES];
        buffer.read_at(0, &mut bytes);
        Ok(decode_extents(&bytes).collect())
    }
}

impl qcow2::Backing for BlockingIo {
    fn size(&self) -> u64 {
        self.bytes()
    }

    fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        BlockingIo::read_at(self, offset, bytes)
    }
}
