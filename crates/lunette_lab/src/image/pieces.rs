//! Processes whole disks: cuts one or two disks into pieces by their block status and passes the pieces to threads in ascending
//! order.
//!
//! A range without data in any disk is one piece of any length, so the cost depends on the allocated data. Each thread has its own
//! I/O channels and buffers: [`THREADS`] times 2 disks times 2 buffers of [`PIECE_BYTES`].

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bdev::{BlockDevice, BlockingIo};
use block::{Allocation, Extent};
use cli_common::Failure;
use guest_memory::IoBuffer;

use crate::meter::Meter;

const THREADS: usize = 4;
/// Maximum bytes of a piece that is read.
pub const PIECE_BYTES: u64 = 1 << 20;
/// Maximum bytes of a piece that has data and is not read.
const UNREAD_BYTES: u64 = 256 << 20;
/// Bytes that [`is_zero`] examines together.
const LINE_BYTES: usize = 128;

/// A range of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub start: u64,
    /// End of the range (exclusive).
    pub end: u64,
    /// Disks that may have data there.
    pub has_data: [bool; 2],
}

impl Piece {
    /// Length in bytes of a piece with data.
    pub fn length(&self) -> usize {
        (self.end - self.start) as usize
    }
}

/// The block status of a disk, read in ascending order.
struct Cursor {
    disk: BlockingIo,
    extents: VecDeque<Extent>,
}

impl Cursor {
    fn new(device: &Arc<dyn BlockDevice>) -> io::Result<Cursor> {
        Ok(Cursor {
            disk: BlockingIo::new(device.clone())?,
            extents: VecDeque::new(),
        })
    }

    /// Returns the extent at an offset. A disk reads as zeroes beyond its end.
    fn extent(&mut self, at: u64) -> io::Result<Extent> {
        let size = self.disk.bytes();
        if at >= size {
            return Ok(Extent::hole(u64::MAX));
        }
        self.extents.retain(|extent| extent.end > at);
        if self.extents.is_empty() {
            let found = self.disk.block_status(at, size - at)?;
            self.extents = found.into_iter().filter(|extent| extent.end > at).collect();
        }
        let first = self.extents.front().copied();
        let extent = first.unwrap_or(Extent::data(size));
        Ok(Extent {
            end: extent.end.min(size),
            ..extent
        })
    }
}

/// Cuts disks into pieces.
struct Cutter {
    cursors: Vec<Cursor>,
    at: u64,
    end: u64,
    /// Alignment of piece borders in bytes, except for the end of the last piece.
    alignment: u64,
    /// Disks to read.
    is_read: [bool; 2],
}

impl Cutter {
    /// Returns the next piece. An error has the index of its disk.
    fn next(&mut self) -> Result<Option<Piece>, (usize, io::Error)> {
        if self.at >= self.end {
            return Ok(None);
        }
        let mut piece = self.extent(self.at)?;
        let aligned_end = piece.end - piece.end % self.alignment;
        if aligned_end > piece.start {
            piece.end = aligned_end;
        } else {
            self.fill_block(&mut piece)?;
        }
        let is_read = |index: usize| piece.has_data[index] && self.is_read[index];
        let bytes_max = match (is_read(0) || is_read(1), piece.has_data) {
            (true, _) => PIECE_BYTES - piece.start % PIECE_BYTES,
            (false, [false, false]) => u64::MAX,
            (false, _) => UNREAD_BYTES,
        };
        piece.end = piece.end.min(piece.start.saturating_add(bytes_max));
        self.at = piece.end;
        Ok(Some(piece))
    }

    /// Returns the range from `start` with constant status on all disks.
    fn extent(&mut self, start: u64) -> Result<Piece, (usize, io::Error)> {
        let mut piece = Piece {
            start,
            end: self.end,
            has_data: [false; 2],
        };
        let disks = self.cursors.iter_mut().zip(&mut piece.has_data);
        for (index, (cursor, has_data)) in disks.enumerate() {
            let extent = cursor.extent(start).map_err(|error| (index, error))?;
            *has_data = extent.allocation == Allocation::Data;
            piece.end = piece.end.min(extent.end);
        }
        Ok(piece)
    }

    /// Extends a piece to the end of its first block. A disk has data in it if any part of the block has data.
    fn fill_block(&mut self, piece: &mut Piece) -> Result<(), (usize, io::Error)> {
        let end = self.end.min(piece.start.saturating_add(self.alignment));
        while piece.end < end {
            let next = self.extent(piece.end)?;
            for (has_data, also) in piece.has_data.iter_mut().zip(next.has_data) {
                *has_data |= also;
            }
            piece.end = next.end.min(end);
        }
        Ok(())
    }
}

/// The disks and buffers of one thread.
pub struct Lane {
    /// Channels to the disks.
    pub disks: Vec<BlockingIo>,
    pub buffers: Vec<IoBuffer>,
}

impl Lane {
    fn new(devices: &[Arc<dyn BlockDevice>]) -> Result<Lane, (usize, io::Error)> {
        let mut disks = Vec::new();
        for (index, device) in devices.iter().enumerate() {
            disks.push(BlockingIo::new(device.clone()).map_err(|error| (index, error))?);
        }
        let buffers = devices
            .iter()
            .map(|_| IoBuffer::owned(PIECE_BYTES as usize));
        Ok(Lane {
            buffers: buffers.collect(),
            disks,
        })
    }

    /// Reads a piece of one disk into its buffer.
    pub fn read(&mut self, index: usize, piece: &Piece) -> Result<(), Stop> {
        let (disk, buffer) = (&mut self.disks[index], &self.buffers[index]);
        let read = disk.read_buffer(piece.start, piece.length(), buffer);
        read.map_err(|error| Stop::Failed(index, error))
    }

    /// Returns the first `length` bytes of both buffers. A lane with one disk has no second buffer.
    pub fn bytes(&mut self, length: usize) -> Result<[&[u8]; 2], Stop> {
        let mut both: [&[u8]; 2] = [&[], &[]];
        for (index, (buffer, bytes)) in self.buffers.iter_mut().zip(&mut both).enumerate() {
            let owned = buffer.owned_bytes().and_then(|all| all.get(..length));
            let shared = || Stop::Failed(index, io::Error::other("an I/O still has the buffer"));
            *bytes = owned.ok_or_else(shared)?;
        }
        Ok(both)
    }
}

/// Reasons to stop.
#[derive(Debug)]
pub enum Stop {
    Failed(usize, io::Error),
    /// The disks differ at this byte.
    Differs(u64),
}

/// Disks to cut into pieces, and disks to open in each thread.
pub struct PiecePlan {
    by: Vec<Arc<dyn BlockDevice>>,
    /// Disks of a [`Lane`]: first those that are cut.
    pub lanes: Vec<Arc<dyn BlockDevice>>,
    end: u64,
    /// Disks that `process` reads. Pieces without data to read may be longer than [`PIECE_BYTES`].
    pub is_read: [bool; 2],
}

impl PiecePlan {
    /// Cuts the first `end` bytes of at most two disks.
    pub fn of(devices: &[Arc<dyn BlockDevice>], end: u64) -> PiecePlan {
        PiecePlan {
            by: devices.to_vec(),
            lanes: devices.to_vec(),
            end,
            is_read: [true; 2],
        }
    }

    /// Calls `process` for each piece. Returns the stop with the lowest offset, as if one thread had processed the pieces in order.
    ///
    /// Pieces do not share a block of a disk, so threads never modify parts of the same block concurrently.
    pub fn process(
        &self,
        meter: &mut Meter,
        process: impl Fn(&mut Lane, &Piece) -> Result<(), Stop> + Sync,
    ) -> Result<(), Stop> {
        let failed = |(index, error)| Stop::Failed(index, error);
        let first_stop = FirstStop::default();
        let (sender, receiver) = sync_channel::<Piece>(THREADS);
        let receiver = Mutex::new(receiver);
        let work = || {
            let lane = Lane::new(&self.lanes).map_err(|error| first_stop.put(0, failed(error)));
            let mut lane = lane.ok();
            loop {
                let received = lock(&receiver).recv();
                let Ok(piece) = received else {
                    return;
                };
                // Receives pieces until the last one even after a stop, because the sender would block otherwise.
                let processed = match &mut lane {
                    Some(lane) if !first_stop.is_before(piece.start) => process(lane, &piece),
                    _ => Ok(()),
                };
                if let Err(stop) = processed {
                    first_stop.put(piece.start, stop);
                }
            }
        };
        std::thread::scope(|scope| {
            for _ in 0..THREADS {
                // A lane attaches each image of a chain below the one before.
                let thread = std::thread::Builder::new().stack_size(bdev::STACK_BYTES);
                if let Err(error) = thread.spawn_scoped(scope, work) {
                    first_stop.put(0, failed((0, error)));
                }
            }
            let mut at = 0;
            let cut = self.cut(|piece| {
                at = piece.end;
                meter.add(piece.end - piece.start);
                let is_empty = piece.has_data == [false; 2];
                is_empty || (!first_stop.is_before(piece.start) && sender.send(piece).is_ok())
            });
            drop(sender);
            if let Err(error) = cut {
                first_stop.put(at, failed(error));
            }
        });
        match first_stop.0.into_inner() {
            Ok(Some((_, stop))) => Err(stop),
            _ => Ok(()),
        }
    }

    /// Calls `send` for each piece, until it returns false.
    fn cut(&self, mut send: impl FnMut(Piece) -> bool) -> Result<(), (usize, io::Error)> {
        let mut cursors = Vec::new();
        for (index, device) in self.by.iter().enumerate() {
            cursors.push(Cursor::new(device).map_err(|error| (index, error))?);
        }
        let alignments = self.lanes.iter().map(|disk| disk.info().io_alignment);
        let mut cutter = Cutter {
            cursors,
            at: 0,
            end: self.end,
            alignment: alignments.max().unwrap_or(1).into(),
            is_read: self.is_read,
        };
        while let Some(piece) = cutter.next()? {
            if !send(piece) {
                break;
            }
        }
        Ok(())
    }
}

#[derive(Default)]
struct FirstStop(Mutex<Option<(u64, Stop)>>);

impl FirstStop {
    fn put(&self, at: u64, stop: Stop) {
        let mut first = lock(&self.0);
        if first.as_ref().is_none_or(|(known, _)| *known > at) {
            *first = Some((at, stop));
        }
    }

    fn is_before(&self, at: u64) -> bool {
        lock(&self.0).as_ref().is_some_and(|(known, _)| *known < at)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Converts a stop to a failure with the path of the disk.
pub fn failure(stop: Stop, paths: [&std::path::Path; 2]) -> Failure {
    match stop {
        Stop::Failed(index, error) => {
            let path = paths.get(index).copied().unwrap_or(paths[0]);
            super::of(path)(&error)
        }
        Stop::Differs(at) => Failure::because(format!("the disks differ at byte {at}")),
    }
}

pub fn is_zero(bytes: &[u8]) -> bool {
    let (lines, rest) = bytes.as_chunks::<LINE_BYTES>();
    let is_zero = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte) == 0;
    lines.iter().all(|line| is_zero(line)) && is_zero(rest)
}

pub fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    if one == other {
        return None;
    }
    one.iter().zip(other).position(|(one, other)| one != other)
}

#[cfg(test)]
mod tests {
    use bdev::qcow2::{self, CreateOptions};
    use bdev::{CacheMode, FaultPlan, Faulty, File, FileOptions, Image, ImageOptions};
    use bdev::{Ram, RamOptions};

    use super::*;

    /// Clusters of 512 bytes: data and holes alternate within the blocks of the destination.
    fn alternating_source(path: &std::path::Path, size: u64) -> Arc<dyn BlockDevice> {
        let file = File::open(FileOptions {
            size: Some(512),
            cache: CacheMode::Writeback,
            is_container: true,
            ..FileOptions::new(path)
        });
        let container = file.unwrap().container().unwrap();
        let options = CreateOptions {
            cluster_bits: 9,
            ..CreateOptions::new(size)
        };
        qcow2::create(&container, &options).unwrap();
        drop(container);
        let image = Image::open(&ImageOptions {
            cache: CacheMode::Writeback,
            trusts_name: true,
            ..ImageOptions::new(path)
        });
        let image: Arc<dyn BlockDevice> = Arc::new(image.unwrap());
        let mut io = BlockingIo::new(image.clone()).unwrap();
        for at in (0..size).step_by(1024) {
            io.write_at(at, &[at.to_le_bytes()[1] | 1; 512]).unwrap();
        }
        image
    }

    fn content(device: &Arc<dyn BlockDevice>, size: u64) -> Vec<u8> {
        let mut bytes = vec![0; size as usize];
        let mut io = BlockingIo::new(device.clone()).unwrap();
        io.read_at(0, &mut bytes).unwrap();
        bytes
    }

    /// Concurrent read-modify-write of one block by two threads would lose a change.
    #[test]
    fn pieces_share_no_block_of_a_destination_with_larger_blocks() {
        const SIZE: u64 = (1 << 20) + 7 * 512;
        let folder = tempfile::tempdir().unwrap();
        let source = alternating_source(&folder.path().join("source"), SIZE);
        let ram = Ram::create(RamOptions {
            size: 2 << 20,
            ..RamOptions::default()
        });
        let faulty = Faulty::new(Arc::new(ram.unwrap()), FaultPlan::default());
        let destination: Arc<dyn BlockDevice> = Arc::new(faulty.with_alignment(4096));
        let mut io = BlockingIo::new(destination.clone()).unwrap();
        io.write_at(0, &vec![0xee; 2 << 20]).unwrap();
        let mut cut = PiecePlan::of(std::slice::from_ref(&source), SIZE);
        cut.lanes.push(destination.clone());
        let pieces = Mutex::new(Vec::new());
        let mut meter = Meter::new(None, true);
        let done = cut.process(&mut meter, |lane, piece| {
            lock(&pieces).push(*piece);
            lane.read(0, piece)?;
            let data = lane.buffers[0].slice(0, piece.length());
            let written = lane.disks[1].write_buffer(piece.start, data);
            written.map_err(|error| Stop::Failed(1, error))
        });
        assert!(done.is_ok());
        for piece in lock(&pieces).iter() {
            let is_aligned = piece.end.is_multiple_of(4096) || piece.end == SIZE;
            assert!(
                piece.start.is_multiple_of(4096) && is_aligned,
                "{piece:?} shares a block"
            );
        }
        assert!(content(&destination, SIZE) == content(&source, SIZE));
        let after = content(&destination, 2 << 20).split_off(SIZE as usize);
        assert!(
            after.iter().all(|byte| *byte == 0xee),
            "bytes behind the end have changed"
        );
    }

    #[test]
    fn only_data_that_are_read_limit_a_piece() {
        let ram = |size| -> Arc<dyn BlockDevice> {
            let ram = Ram::create(RamOptions {
                size,
                ..RamOptions::default()
            });
            Arc::new(ram.unwrap())
        };
        let folder = tempfile::tempdir().unwrap();
        let empty = folder.path().join("empty");
        std::fs::File::create(&empty)
            .and_then(|file| file.set_len(64 << 20))
            .unwrap();
        let empty = File::open(FileOptions {
            cache: CacheMode::Writeback,
            ..FileOptions::new(empty)
        });
        let full = ram(64 << 20);
        let mut io = BlockingIo::new(full.clone()).unwrap();
        for at in (0..64 << 20).step_by(1 << 20) {
            io.write_at(at, &[1; 1 << 20]).unwrap();
        }
        let mut cut = PiecePlan::of(&[Arc::new(empty.unwrap()), full], 64 << 20);
        for (is_read, count) in [([true, true], 64), ([true, false], 1)] {
            cut.is_read = is_read;
            let mut pieces = 0;
            let cut = cut.cut(|_| {
                pieces += 1;
                true
            });
            assert!(cut.is_ok());
            assert_eq!(pieces, count, "{is_read:?}");
        }
    }

    #[test]
    fn a_byte_anywhere_is_not_zero() {
        for length in [0, 1, 127, 128, 129, 4096] {
            let mut bytes = vec![0; length];
            assert!(is_zero(&bytes));
            for at in 0..length {
                bytes[at] = 0x80;
                assert!(!is_zero(&bytes), "{at} of {length}");
                bytes[at] = 0;
            }
        }
    }

    #[test]
    fn the_first_difference_is_found() {
        let mut other = vec![7; 1000];
        assert_eq!(first_difference(&[7; 1000], &other), None);
        other[999] = 8;
        assert_eq!(first_difference(&[7; 1000], &other), Some(999));
        other[3] = 8;
        assert_eq!(first_difference(&[7; 1000], &other), Some(3));
    }
}
