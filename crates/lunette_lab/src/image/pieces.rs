//! Work on whole disks: cuts one or two disks into pieces by their block status, and hands the pieces to threads in ascending order.
//!
//! A range without data in any disk is one piece of any length: the cost follows the allocated data. Each thread has its
//! own I/O channels and buffers: [`THREADS`] times 2 disks times 2 buffers of [`PIECE_BYTES`].

use std::collections::VecDeque;
use std::io;
use std::sync::mpsc::sync_channel;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bdev::{BlockDevice, BlockingIo};
use block::{Allocation, Extent};
use cli_common::Failure;

use crate::meter::Meter;

/// Threads that process pieces.
const THREADS: usize = 4;
/// Most bytes of a piece with data.
pub const PIECE_BYTES: u64 = 1 << 20;
/// Bytes that [`is_zero`] examines together.
const LINE_BYTES: usize = 128;

/// A range of the disks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// First byte.
    pub start: u64,
    /// First byte after the range.
    pub end: u64,
    /// Which of the disks may have data there.
    pub has_data: [bool; 2],
}

impl Piece {
    /// Returns its length in bytes, of a piece with data.
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

    /// Returns the extent of an offset. A disk reads as zeroes beyond its end.
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
}

impl Cutter {
    /// Returns the next piece. An error has the index of its disk.
    fn next(&mut self) -> Result<Option<Piece>, (usize, io::Error)> {
        if self.at >= self.end {
            return Ok(None);
        }
        let (start, mut end) = (self.at, self.end);
        let mut has_data = [false; 2];
        for (index, (cursor, has_data)) in self.cursors.iter_mut().zip(&mut has_data).enumerate() {
            let extent = cursor.extent(start).map_err(|error| (index, error))?;
            *has_data = extent.allocation == Allocation::Data;
            end = end.min(extent.end);
        }
        if has_data.contains(&true) {
            end = end.min(start - start % PIECE_BYTES + PIECE_BYTES);
        }
        self.at = end;
        Ok(Some(Piece {
            start,
            end,
            has_data,
        }))
    }
}

/// The disks and buffers of one thread.
pub struct Lane {
    /// Channels to the disks.
    pub disks: Vec<BlockingIo>,
    /// One buffer for each disk.
    pub buffers: Vec<Vec<u8>>,
}

impl Lane {
    fn new(devices: &[Arc<dyn BlockDevice>]) -> Result<Lane, (usize, io::Error)> {
        let mut disks = Vec::new();
        for (index, device) in devices.iter().enumerate() {
            disks.push(BlockingIo::new(device.clone()).map_err(|error| (index, error))?);
        }
        let buffers = devices.iter().map(|_| vec![0; PIECE_BYTES as usize]);
        Ok(Lane {
            buffers: buffers.collect(),
            disks,
        })
    }

    /// Reads a piece of one disk into its buffer.
    pub fn read(&mut self, index: usize, piece: &Piece) -> io::Result<&[u8]> {
        let bytes = &mut self.buffers[index][..(piece.end - piece.start) as usize];
        self.disks[index].read_at(piece.start, bytes)?;
        Ok(bytes)
    }
}

/// Why a piece ends the work.
#[derive(Debug)]
pub enum Stop {
    /// The I/O of a disk failed.
    Failed(usize, io::Error),
    /// The disks differ at this byte.
    Differs(u64),
}

/// Disks that are cut into pieces, and disks that each thread opens.
pub struct Cut {
    by: Vec<Arc<dyn BlockDevice>>,
    /// Disks of a [`Lane`]: those that are cut come first.
    pub lanes: Vec<Arc<dyn BlockDevice>>,
    end: u64,
}

impl Cut {
    /// Cuts the first `end` bytes of at most two disks.
    pub fn of(devices: &[Arc<dyn BlockDevice>], end: u64) -> Cut {
        Cut {
            by: devices.to_vec(),
            lanes: devices.to_vec(),
            end,
        }
    }

    /// Calls `process` for each piece. The first stop by offset ends the work, as if one thread had processed the pieces in order.
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
                // The thread receives pieces until the last one. The sender would block otherwise.
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
                scope.spawn(work);
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
        let mut cutter = Cutter {
            cursors,
            at: 0,
            end: self.end,
        };
        while let Some(piece) = cutter.next()? {
            if !send(piece) {
                break;
            }
        }
        Ok(())
    }
}

/// The stop with the lowest offset so far.
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

/// Returns the failure of an I/O that stopped the work, with the path of its disk.
pub fn failure(stop: Stop, paths: [&std::path::Path; 2]) -> Failure {
    match stop {
        Stop::Failed(index, error) => {
            let path = paths.get(index).copied().unwrap_or(paths[0]);
            super::of(path)(&error)
        }
        Stop::Differs(at) => Failure::because(format!("the disks differ at byte {at}")),
    }
}

/// Returns true if all bytes are zeroes.
pub fn is_zero(bytes: &[u8]) -> bool {
    let (lines, rest) = bytes.as_chunks::<LINE_BYTES>();
    let is_zero = |bytes: &[u8]| bytes.iter().fold(0, |all, byte| all | byte) == 0;
    lines.iter().all(|line| is_zero(line)) && is_zero(rest)
}

/// Returns the index of the first byte that differs.
pub fn first_difference(one: &[u8], other: &[u8]) -> Option<usize> {
    if one == other {
        return None;
    }
    one.iter().zip(other).position(|(one, other)| one != other)
}

#[cfg(test)]
mod tests {
    use super::*;

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
