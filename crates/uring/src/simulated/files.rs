//! Files of a simulation: their contents, the state after a power cut, and injected faults.
//!
//! The faults, all derived from the seed:
//! - a power cut tears a write at any sector; sectors that are not durable are lost or kept independently: only a sync orders writes;
//! - a read or write transfers less than requested;
//! - a read, write, sync or change of allocation fails with `EIO`, or with `ENOSPC` if it allocates;
//! - an operation is slow, or stuck for up to a minute;
//! - a write goes to another sector, or one of its bits flips; readers must detect this;
//! - the process, or the power, ends between two calls: later calls have no effect.
//!
//! The state belongs to the thread that runs the simulation. On other threads files are real.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::time::Duration;

use super::calls::outcome;
use crate::slab::SlabSlot;

/// Atomic unit of a device, in bytes.
const SECTOR: u64 = 512;

/// Fault rates: one in this many operations on average; 0 is never.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    /// Reads and writes that transfer less than requested.
    pub short: u32,
    /// Reads that fail.
    pub read: u32,
    /// Writes and changes of allocation that fail with `EIO`.
    pub write: u32,
    /// Writes and allocations that fail with `ENOSPC`.
    pub full: u32,
    /// Syncs that fail.
    pub sync: u32,
    /// Operations that take up to a millisecond.
    pub slow: u32,
    /// Operations that take up to a minute.
    pub stuck: u32,
    /// Writes with a flipped bit.
    pub flipped: u32,
    /// Writes to the following sector.
    pub misdirected: u32,
}

/// Contents of a sector since it was last durable, each with the write count.
type Versions = Vec<(u64, [u8; SECTOR as usize])>;

/// State of a file after a power cut.
#[derive(Default)]
struct Durable {
    bytes: Vec<u8>,
    dirty: BTreeMap<u64, Versions>,
    /// Length of the file, including data that are not durable.
    length: u64,
    /// Number of failed syncs.
    failures: u64,
    /// Failures reported by each descriptor. A descriptor reports the last failure once.
    reported: BTreeMap<i32, u64>,
}

/// The files of this thread's simulation.
#[derive(Default)]
pub struct Files {
    random: u64,
    known: BTreeMap<(u64, u64), Durable>,
    faults: Faults,
    /// Number of writes.
    written: u64,
    /// Calls until the cut.
    calls_left: Option<u64>,
    /// Faults since the last [`Files::take_happened`].
    happened: Vec<String>,
}

thread_local! {
    static FILES: RefCell<Option<Files>> = const { RefCell::new(None) };
}

fn with<T>(act: impl FnOnce(&mut Files) -> T) -> Option<T> {
    FILES.with_borrow_mut(|files| files.as_mut().map(act))
}

impl Files {
    /// Starts the simulation of files on this thread.
    pub fn begin(seed: u64) {
        FILES.set(Some(Files {
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            ..Files::default()
        }));
    }

    /// Ends the simulation; files are real again.
    pub fn end() {
        FILES.set(None);
    }

    /// Sets the fault rates.
    pub fn set_faults(faults: Faults) {
        with(|files| files.faults = faults);
    }

    /// Simulates reopening of the files: descriptors do not report earlier failures.
    pub fn reopen_all() {
        with(|files| {
            for known in files.known.values_mut() {
                (known.failures, known.reported) = (0, BTreeMap::new());
            }
        });
    }

    /// Ends the process or cuts the power after `calls` more calls; later calls have no effect. `None`: never.
    pub fn cut_after(calls: Option<u64>) {
        with(|files| files.calls_left = calls);
    }

    /// Returns true if the cut has happened.
    pub fn is_cut() -> bool {
        with(|files| files.calls_left == Some(0)).unwrap_or(false)
    }

    /// Returns the faults since the last call.
    pub fn take_happened() -> Vec<String> {
        with(|files| std::mem::take(&mut files.happened)).unwrap_or_default()
    }

    /// Adds an existing file to the simulation; its contents are durable.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn add_file(file: &File) -> io::Result<()> {
        let found = file.metadata()?;
        let mut bytes = vec![0; found.len() as usize];
        file.read_exact_at(&mut bytes, 0)?;
        let durable = Durable {
            length: found.len(),
            bytes,
            ..Durable::default()
        };
        with(|files| files.known.insert((found.dev(), found.ino()), durable));
        Ok(())
    }

    /// Cuts the power: a sector that is not durable keeps one of its versions since then.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn cut_power(file: &File) -> io::Result<()> {
        let key = key(file.as_fd())?;
        let left = with(|files| {
            let mut durable = files.known.remove(&key)?;
            let length = match files.draw(2) {
                0 => durable.bytes.len() as u64,
                _ => durable.length,
            };
            durable.bytes.resize(length as usize, 0);
            for (sector, versions) in std::mem::take(&mut durable.dirty) {
                let kept = files.draw(versions.len() as u64 + 1) as usize;
                if let Some((_, content)) = versions.get(kept) {
                    durable.put(sector, content);
                }
            }
            Some(durable.bytes)
        });
        if let Some(bytes) = left.flatten() {
            file.set_len(0)?;
            file.write_all_at(&bytes, 0)?;
            Files::add_file(file)?;
        }
        Ok(())
    }

    /// Delay of the next operation.
    pub(super) fn delay() -> Option<Duration> {
        with(|files| {
            let Faults { slow, stuck, .. } = files.faults;
            if files.happens(stuck) {
                let seconds = 1 + files.draw(60);
                files.happened.push(format!("I/O is stuck for {seconds} s"));
                return Some(Duration::from_secs(seconds));
            }
            let slow = files.happens(slow);
            slow.then(|| Duration::from_micros(files.draw(1000)))
        })?
    }

    /// Number of writes.
    pub(crate) fn written() -> u64 {
        with(|files| files.written).unwrap_or(0)
    }

    fn draw(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random >> 8) % below.max(1)
    }

    fn happens(&mut self, once_in: u32) -> bool {
        once_in > 0 && self.draw(once_in.into()) == 0
    }

    fn lives(&mut self) -> bool {
        match &mut self.calls_left {
            None => true,
            Some(0) => false,
            Some(left) => {
                *left -= 1;
                true
            }
        }
    }

    /// Returns an errno if the fault occurs.
    fn fails(&mut self, call: &str, with: u32, errno: i32) -> Result<(), i32> {
        if !self.happens(with) {
            return Ok(());
        }
        let name = if errno == libc::ENOSPC {
            "ENOSPC"
        } else {
            "EIO"
        };
        self.happened.push(format!("{call} fails with {name}"));
        Err(errno)
    }
}

impl Durable {
    fn put(&mut self, sector: u64, content: &[u8]) {
        let (from, to) = ((sector * SECTOR) as usize, ((sector + 1) * SECTOR) as usize);
        if self.bytes.len() < to {
            self.bytes.resize(to, 0);
        }
        self.bytes[from..to].copy_from_slice(content);
    }

    /// Makes writes up to a write count durable, in a range of sectors.
    fn settle(&mut self, before: u64, sectors: std::ops::Range<u64>) {
        let dirty: Vec<u64> = self
            .dirty
            .range(sectors)
            .map(|(sector, _)| *sector)
            .collect();
        for sector in dirty {
            let mut versions = self.dirty.remove(&sector).unwrap_or_default();
            let newest = versions.iter().rposition(|(count, _)| *count <= before);
            if let Some(newest) = newest {
                let content = versions[newest].1;
                self.put(sector, &content);
                versions.drain(..=newest);
            }
            if !versions.is_empty() {
                self.dirty.insert(sector, versions);
            }
        }
    }
}

fn key(fd: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let found = rustix::fs::fstat(fd)?;
    Ok((found.st_dev, found.st_ino))
}

/// Records the new contents of a range of a file.
fn note(fd: BorrowedFd<'_>, offset: u64, length: u64, durable: bool) {
    if !Files::are_simulated() {
        return;
    }
    let Ok(key) = key(fd) else {
        return;
    };
    with(|files| {
        files.written += 1;
        let count = files.written;
        let Some(known) = files.known.get_mut(&key) else {
            return;
        };
        let size = rustix::fs::fstat(fd).map_or(0, |found| found.st_size as u64);
        known.length = size;
        if length == 0 {
            return;
        }
        let sectors = offset / SECTOR
            ..(offset + length)
                .min(size.next_multiple_of(SECTOR))
                .div_ceil(SECTOR);
        for sector in sectors.clone() {
            let mut content = [0; SECTOR as usize];
            rustix::io::pread(fd, &mut content, sector * SECTOR).ok();
            known
                .dirty
                .entry(sector)
                .or_default()
                .push((count, content));
        }
        if durable {
            known.settle(count, sectors);
        }
    });
}

/// Number of bytes that a transfer moves, or its errno.
fn moved(length: usize, is_write: bool) -> Result<usize, i32> {
    with(|files| {
        if !files.lives() {
            return Err(libc::EIO);
        }
        let Faults {
            short,
            read,
            write,
            full,
            ..
        } = files.faults;
        if is_write {
            files.fails("a write", write, libc::EIO)?;
            files.fails("a write", full, libc::ENOSPC)?;
        } else {
            files.fails("a read", read, libc::EIO)?;
        }
        if length > SECTOR as usize && files.happens(short) {
            let sectors = files.draw((length as u64 - 1) / SECTOR) + 1;
            return Ok((sectors * SECTOR) as usize);
        }
        Ok(length)
    })
    .unwrap_or(Ok(length))
}

/// Segments of a slot's buffer, up to `length` bytes.
fn ranges(slot: &SlabSlot, mut length: usize) -> Vec<libc::iovec> {
    let mut ranges = Vec::new();
    for segment in slot.buffer.segments() {
        let here = segment.len().min(length);
        if here > 0 {
            ranges.push(libc::iovec {
                iov_base: segment.base().cast(),
                iov_len: here,
            });
        }
        length -= here;
    }
    ranges
}

pub(super) fn read(slot: &SlabSlot, offset: u64) -> Result<u32, i32> {
    let Some(fd) = &slot.fd else {
        return Err(libc::EBADF);
    };
    let ranges = ranges(slot, moved(slot.buffer.len(), false)?);
    // SAFETY: the slot keeps the buffer; its memory may be written at any time.
    outcome(unsafe {
        libc::preadv(
            fd.as_fd().as_raw_fd(),
            ranges.as_ptr(),
            ranges.len() as i32,
            offset as i64,
        )
    })
}

pub(super) fn write(slot: &SlabSlot, mut offset: u64, durable: bool) -> Result<u32, i32> {
    let Some(fd) = &slot.fd else {
        return Err(libc::EBADF);
    };
    let fd = fd.as_fd();
    let ranges = ranges(slot, moved(slot.buffer.len(), true)?);
    let is_astray = with(|files| {
        let Faults {
            misdirected,
            flipped,
            ..
        } = files.faults;
        (files.happens(misdirected), files.happens(flipped))
    });
    let (misdirected, flipped) = is_astray.unwrap_or_default();
    if misdirected {
        with(|files| {
            files
                .happened
                .push(format!("a write to {offset} goes to {}", offset + SECTOR))
        });
        offset += SECTOR;
    }
    // SAFETY: the slot keeps the buffer, and the call only reads it.
    let written = outcome(unsafe {
        libc::pwritev(
            fd.as_raw_fd(),
            ranges.as_ptr(),
            ranges.len() as i32,
            offset as i64,
        )
    })?;
    if flipped {
        let mut byte = [0];
        rustix::io::pread(fd, &mut byte, offset).ok();
        rustix::io::pwrite(fd, &[byte[0] ^ 1], offset).ok();
        with(|files| files.happened.push(format!("a bit flips at {offset}")));
    }
    note(fd, offset, written.into(), durable);
    Ok(written)
}

fn sync_file(fd: BorrowedFd<'_>, before: u64) -> Result<(), i32> {
    let Ok(key) = key(fd) else {
        return Err(libc::EBADF);
    };
    with(|files| {
        if !files.lives() {
            return Err(libc::EIO);
        }
        let failed = files.fails("a sync", files.faults.sync, libc::EIO);
        if let Some(known) = files.known.get_mut(&key) {
            if failed.is_err() {
                // As Linux: data with a failed write-back count as written.
                known.dirty.clear();
                known.failures += 1;
            }
            let reported = known.reported.insert(fd.as_raw_fd(), known.failures);
            if reported.unwrap_or(0) != known.failures {
                return Err(libc::EIO);
            }
            known.settle(before, 0..u64::MAX);
            if known.dirty.is_empty() {
                known.bytes.resize(known.length as usize, 0);
            }
        }
        Ok(())
    })
    .unwrap_or(Ok(()))
}

pub(super) fn sync(slot: &SlabSlot, before: u64) -> Result<u32, i32> {
    match &slot.fd {
        Some(fd) => sync_file(fd.as_fd(), before).map(|()| 0),
        None => Err(libc::EBADF),
    }
}

fn allocate_in(fd: BorrowedFd<'_>, mode: i32, offset: u64, length: u64) -> Result<(), i32> {
    with(|files| {
        if !files.lives() {
            return Err(libc::EIO);
        }
        let Faults { write, full, .. } = files.faults;
        files.fails("a change of allocation", write, libc::EIO)?;
        if mode & libc::FALLOC_FL_PUNCH_HOLE == 0 {
            files.fails("an allocation", full, libc::ENOSPC)?;
        }
        Ok(())
    })
    .unwrap_or(Ok(()))?;
    // SAFETY: a call with integers only.
    outcome(unsafe {
        libc::fallocate(fd.as_raw_fd(), mode, offset as i64, length as i64) as isize
    })?;
    note(fd, offset, length, false);
    Ok(())
}

pub(super) fn allocate(slot: &SlabSlot, mode: i32, offset: u64, length: u64) -> Result<u32, i32> {
    match &slot.fd {
        Some(fd) => allocate_in(fd.as_fd(), mode, offset, length).map(|()| 0),
        None => Err(libc::EBADF),
    }
}

/// Calls of a device's thread without a ring. Without a simulation they are the system calls.
impl Files {
    /// Returns true if files are simulated on this thread.
    pub fn are_simulated() -> bool {
        FILES.with_borrow(Option::is_some)
    }

    /// `pwrite(2)` of all bytes.
    ///
    /// # Errors
    /// The error of the system call or of the simulation.
    pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        if Files::are_simulated() {
            moved(0, true).map_err(io::Error::from_raw_os_error)?;
        }
        file.write_all_at(bytes, offset)?;
        note(file.as_fd(), offset, bytes.len() as u64, false);
        Ok(())
    }

    /// `pread(2)`.
    ///
    /// # Errors
    /// The error of the system call or of the simulation.
    pub fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        if Files::are_simulated() {
            moved(0, false).map_err(io::Error::from_raw_os_error)?;
        }
        file.read_at(bytes, offset)
    }

    /// `ftruncate(2)`.
    ///
    /// # Errors
    /// The error of the system call or of the simulation.
    pub fn set_len(file: &File, length: u64) -> io::Result<()> {
        if Files::are_simulated() {
            moved(0, true).map_err(io::Error::from_raw_os_error)?;
        }
        file.set_len(length)?;
        note(file.as_fd(), length, 0, false);
        Ok(())
    }

    /// `fallocate(2)`.
    ///
    /// # Errors
    /// The error of the system call or of the simulation.
    pub fn fallocate(
        file: &File,
        mode: rustix::fs::FallocateFlags,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        allocate_in(file.as_fd(), mode.bits() as i32, offset, length)
            .map_err(io::Error::from_raw_os_error)
    }

    /// `fdatasync(2)`.
    ///
    /// # Errors
    /// The error of the system call or of the simulation.
    pub fn sync_data(file: &File) -> io::Result<()> {
        if !Files::are_simulated() {
            return file.sync_data();
        }
        sync_file(file.as_fd(), u64::MAX).map_err(io::Error::from_raw_os_error)
    }
}
