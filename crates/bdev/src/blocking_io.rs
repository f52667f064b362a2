//! Blocking access to a block device: one I/O at a time, on the thread's own ring. Image owners read backing images with it; tools use
//! disks.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use block::{Extent, IoError, IoKind, IoRequest, STATUS_BYTES, decode_extents};
use guest_memory::IoBuffer;
use latency::Clock;
use uring::{Owner, Ring, Wait};

use crate::{Attach, BlockDevice, Finished, IoChannel, Submission, Tag};

const RING_ENTRIES: u32 = 8;
/// Number and duration of the waits for the kernel to end watches.
const DETACH_TRIES: usize = 100;
const DETACH_PAUSE: Duration = Duration::from_millis(10);
/// Waits of [`DETACH_PAUSE`] for a channel to close: 30 s.
const CLOSE_TRIES: usize = 3000;
/// Bytes of the largest buffer that stays allocated between calls.
const BUFFER_BYTES: usize = 1 << 20;

/// Interval at which an I/O with a [`Patience`] checks whether it is wanted.
const PATIENCE_STEP: Duration = Duration::from_millis(50);

/// Limits of the wait for an I/O.
struct Patience {
    is_wanted: Box<dyn Fn() -> bool + Send>,
    limit: Option<Duration>,
}

/// A block device and one thread's channel. Dropping it waits for an abandoned I/O, which uses its memory until it ends.
pub struct BlockingIo {
    ring: Ring,
    /// `None` before a lazy one's first I/O, and after [`BlockingIo::detach`].
    channel: Option<Box<dyn IoChannel>>,
    /// First owner of the channel, and first unused owner. Completions of closed channels are dropped.
    first_owner: u32,
    next_owner: u32,
    device: Arc<dyn BlockDevice>,
    /// [`block::DiskInfo::io_alignment`] of the device.
    alignment: u64,
    /// Memory that reads and writes share.
    buffer: IoBuffer,
    patience: Option<Patience>,
    /// An I/O was abandoned; no other is submitted.
    is_hung: bool,
}

impl Drop for BlockingIo {
    fn drop(&mut self) {
        if !self.is_hung {
            return;
        }
        let Some(channel) = &mut self.channel else {
            return;
        };
        let (mut completions, mut finished) = (Vec::new(), Vec::new());
        while channel.in_flight() > 0 {
            if let Err(error) = self.ring.enter(Wait::Until(None), &mut completions) {
                tracing::error!("cannot wait for a cancelled I/O: {error}");
                return;
            }
            for completion in completions.drain(..) {
                if completion.owner.0 >= self.first_owner {
                    channel.complete(&mut self.ring, completion, &mut finished);
                }
            }
        }
    }
}

impl BlockingIo {
    /// Attaches to a device, on the thread that will do the I/O.
    ///
    /// # Errors
    /// The ring cannot be created, or the device not attached.
    pub fn new(device: Arc<dyn BlockDevice>) -> io::Result<BlockingIo> {
        let mut io = BlockingIo::lazy(device)?;
        io.attached()?;
        Ok(io)
    }

    /// As [`BlockingIo::new`], but attaches with the first I/O.
    ///
    /// # Errors
    /// The ring cannot be created.
    pub(crate) fn lazy(device: Arc<dyn BlockDevice>) -> io::Result<BlockingIo> {
        Ok(BlockingIo {
            ring: Ring::new(RING_ENTRIES)?,
            channel: None,
            first_owner: 0,
            next_owner: 0,
            alignment: device.info().io_alignment.into(),
            device,
            buffer: IoBuffer::default(),
            patience: None,
            is_hung: false,
        })
    }

    /// Abandons I/O that is not wanted any more or takes longer than `limit`. All later I/Os fail.
    #[must_use]
    pub fn while_wanted(
        mut self,
        is_wanted: impl Fn() -> bool + Send + 'static,
        limit: Option<Duration>,
    ) -> BlockingIo {
        let is_wanted = Box::new(is_wanted);
        self.patience = Some(Patience { is_wanted, limit });
        self
    }

    fn attached(&mut self) -> io::Result<(&mut Ring, &mut Box<dyn IoChannel>)> {
        if self.channel.is_none() {
            self.first_owner = self.next_owner;
            let next = &mut self.next_owner;
            let mut next_owner = || {
                *next = next.saturating_add(1);
                Owner(*next - 1)
            };
            let mut attach = Attach::new(&mut self.ring, &mut next_owner);
            self.channel = Some(self.device.attach(&mut attach)?);
        }
        let channel = self.channel.as_mut();
        let channel = channel.ok_or_else(|| io::Error::other("the channel is closed"))?;
        Ok((&mut self.ring, channel))
    }

    /// Closes the channel and its descriptors. The next I/O attaches again.
    ///
    /// # Errors
    /// The ring fails, or the channel does not close in time. It is dropped in both cases.
    pub(crate) fn detach(&mut self) -> io::Result<()> {
        self.detach_within(CLOSE_TRIES)
    }

    fn detach_within(&mut self, tries: usize) -> io::Result<()> {
        let Some(mut channel) = self.channel.take() else {
            return Ok(());
        };
        channel.close(&mut self.ring);
        let (mut completions, mut finished) = (Vec::new(), Vec::new());
        let mut tries = 0..tries;
        while !channel.is_closed() {
            if tries.next().is_none() {
                return Err(self.not_closed());
            }
            self.ring
                .enter(Wait::Until(Some(DETACH_PAUSE)), &mut completions)?;
            for completion in completions.drain(..) {
                channel.complete(&mut self.ring, completion, &mut finished);
            }
        }
        drop(channel);
        // The ring holds descriptors until their watches have ended.
        for _ in 0..DETACH_TRIES {
            if self.ring.watches() == 0 {
                break;
            }
            self.ring
                .enter(Wait::Until(Some(DETACH_PAUSE)), &mut completions)?;
            completions.clear();
        }
        Ok(())
    }

    fn not_closed(&self) -> io::Error {
        let name = match self.device.medium() {
            Some(medium) => medium.key(),
            None => self.device.kind().to_owned(),
        };
        let error =
            format!("{name}: I/O timed out; hint: check the storage of the device, then try again");
        io::Error::new(io::ErrorKind::TimedOut, error)
    }

    /// Returns the size of the device in bytes.
    pub fn bytes(&self) -> u64 {
        self.device.capacity().bytes()
    }

    /// Returns the device.
    pub fn device(&self) -> &Arc<dyn BlockDevice> {
        &self.device
    }

    /// Returns `length` bytes of undefined content, allocated per call above [`BUFFER_BYTES`].
    fn memory(&mut self, length: usize) -> IoBuffer {
        if length > BUFFER_BYTES {
            return IoBuffer::owned(length);
        }
        if self.buffer.len() < length {
            self.buffer = IoBuffer::owned(length);
        }
        self.buffer.slice(0, length)
    }

    fn run(&mut self, io: &IoRequest, mut buffer: IoBuffer) -> io::Result<IoBuffer> {
        let failed = |error: IoError| match error.errno {
            0 => io::Error::other(error.to_string()),
            errno => io::Error::from_raw_os_error(errno),
        };
        if self.is_hung {
            return Err(io::Error::other("an earlier I/O is still in flight"));
        }
        let (ring, channel) = self.attached()?;
        let submitted = channel.submit(ring, io, &mut buffer, Tag(0));
        if let Submission::Done(outcome) = submitted {
            return outcome.map(|()| buffer).map_err(failed);
        }
        let (mut completions, mut finished) = (Vec::new(), Vec::<Finished>::new());
        // Simulated time passes without the clock. Completions of a device that connects again and again are no progress.
        let (began, mut waited) = (Clock::shared().elapsed(), Duration::ZERO);
        loop {
            #[cfg(feature = "simulated")]
            if uring::simulated::Files::are_simulated() {
                crate::stepped::step_owners_of(&*self.device);
            }
            let first_owner = self.first_owner;
            let step = self.patience.as_ref().map(|_| PATIENCE_STEP);
            let (ring, channel) = self.attached()?;
            ring.enter(Wait::Until(step), &mut completions)?;
            if completions.is_empty() {
                waited += PATIENCE_STEP;
            }
            for completion in completions.drain(..) {
                if completion.owner.0 >= first_owner {
                    channel.complete(ring, completion, &mut finished);
                }
            }
            if let Some(one) = finished.pop() {
                return one.outcome.map(|()| one.buffer).map_err(failed);
            }
            if let Some(patience) = &self.patience {
                let waited = waited.max(Clock::shared().elapsed().saturating_sub(began));
                let is_late = patience.limit.is_some_and(|limit| waited > limit);
                if is_late || !(patience.is_wanted)() {
                    self.is_hung = true;
                    let (ring, channel) = self.attached()?;
                    channel.abort(ring, Tag(0));
                    let reason = match is_late {
                        true => "the I/O timed out",
                        false => "the I/O was cancelled",
                    };
                    return Err(io::Error::new(io::ErrorKind::TimedOut, reason));
                }
            }
        }
    }

    /// Fills `bytes` from any offset, with zeroes beyond the end.
    ///
    /// # Errors
    /// The device fails.
    pub fn read_at(&mut self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let (start, end) = self.whole_blocks(offset, bytes.len() as u64);
        let known = end.min(self.bytes()).saturating_sub(start);
        if known == 0 {
            bytes.fill(0);
            return Ok(());
        }
        let buffer = self.memory(known as usize);
        let buffer = self.run(&IoRequest::read(start, known), buffer)?;
        let skip = (offset - start) as usize;
        let wanted = bytes.len().min((known as usize).saturating_sub(skip));
        buffer.read_at(skip, &mut bytes[..wanted]);
        bytes[wanted..].fill(0);
        Ok(())
    }

    /// Writes `bytes` within the device. Partial blocks are read, modified and written: the caller excludes other writes to them.
    ///
    /// # Errors
    /// The device fails.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        if bytes.is_empty() {
            return Ok(());
        }
        let (start, end) = self.whole_blocks(offset, bytes.len() as u64);
        let buffer = self.memory((end - start) as usize);
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

    /// Reads `length` bytes into the start of a buffer; whole blocks are not copied.
    ///
    /// # Errors
    /// The device fails.
    pub fn read_buffer(&mut self, offset: u64, length: usize, buffer: &IoBuffer) -> io::Result<()> {
        if self.has_whole_blocks(offset, length) {
            let io = IoRequest::read(offset, length as u64);
            return self.run(&io, buffer.slice(0, length)).map(drop);
        }
        let mut bytes = vec![0; length];
        self.read_at(offset, &mut bytes)?;
        buffer.write_at(0, &bytes);
        Ok(())
    }

    /// Writes a buffer, as [`BlockingIo::write_at`]; whole blocks are not copied.
    ///
    /// # Errors
    /// The device fails.
    pub fn write_buffer(&mut self, offset: u64, buffer: IoBuffer) -> io::Result<()> {
        let length = buffer.len();
        if self.has_whole_blocks(offset, length) {
            let io = IoRequest::write(offset, length as u64);
            return self.run(&io, buffer).map(drop);
        }
        let mut bytes = vec![0; length];
        buffer.read_at(0, &mut bytes);
        self.write_at(offset, &bytes)
    }

    fn has_whole_blocks(&self, offset: u64, length: usize) -> bool {
        let length = length as u64;
        let left = self.bytes().saturating_sub(offset);
        (offset | length).is_multiple_of(self.alignment) && (1..=left).contains(&length)
    }

    /// Returns the whole blocks that cover a range.
    fn whole_blocks(&self, offset: u64, length: u64) -> (u64, u64) {
        let start = offset / self.alignment * self.alignment;
        (start, (offset + length).next_multiple_of(self.alignment))
    }

    /// Runs an I/O without data: a flush, zeroes, a discard. Zeroes partial blocks as [`BlockingIo::write_at`]; does not discard them.
    ///
    /// # Errors
    /// The device fails.
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

    /// Returns the first extents of a range, rounded to whole blocks.
    ///
    /// # Errors
    /// The device fails.
    pub fn block_status(&mut self, offset: u64, length: u64) -> io::Result<Vec<Extent>> {
        let (start, end) = self.whole_blocks(offset, length);
        let io = IoRequest::block_status(start, end.min(self.bytes()).saturating_sub(start));
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

#[cfg(test)]
mod tests {
    use guest_memory::IoBuffer;
    use uring::Completion;

    use super::*;
    use crate::layer::Layer;
    use crate::{File, FileOptions};

    /// A device with channels that never close.
    struct Stuck(File);

    struct StuckChannel(Box<dyn IoChannel>);

    impl Layer for Stuck {
        fn inner(&self) -> &dyn BlockDevice {
            &self.0
        }

        fn layer_kind(&self) -> &'static str {
            "stuck"
        }

        fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
            Ok(Box::new(StuckChannel(self.0.attach(attach)?)))
        }
    }

    impl IoChannel for StuckChannel {
        fn submit(
            &mut self,
            ring: &mut Ring,
            io: &IoRequest,
            buffer: &mut IoBuffer,
            tag: Tag,
        ) -> Submission {
            self.0.submit(ring, io, buffer, tag)
        }

        fn complete(
            &mut self,
            ring: &mut Ring,
            completion: Completion,
            finished: &mut Vec<Finished>,
        ) {
            self.0.complete(ring, completion, finished);
        }

        fn is_closed(&self) -> bool {
            false
        }

        fn in_flight(&self) -> usize {
            self.0.in_flight()
        }
    }

    #[test]
    fn a_channel_that_does_not_close_ends_the_wait_with_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        let file = File::open(FileOptions {
            size: Some(1 << 20),
            cache: crate::CacheMode::Writeback,
            ..FileOptions::new(&path)
        });
        let mut io = BlockingIo::new(Arc::new(Stuck(file.unwrap()))).unwrap();
        io.write_at(512, &[7; 512]).unwrap();
        let error = io.detach_within(3).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        assert!(
            error.to_string().contains(path.to_str().unwrap()),
            "{error}"
        );
        // The next I/O attaches again.
        let mut bytes = [0; 512];
        io.read_at(512, &mut bytes).unwrap();
        assert_eq!(bytes, [7; 512]);
    }
}
