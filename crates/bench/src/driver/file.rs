//! Driver for a file or block device of this machine, through io_uring. It is the baseline for all devices.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{ErrorKind, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fastrand::Rng;
use guest_memory::IoBuffer;
use rustix::fs::FallocateFlags;
use rustix::fs::{AtFlags, StatxFlags, statx};
use rustix::io::Errno;
use sys::discard_now;
use uring::{Completion, Owner, Ring, RingFd, Wait};

use super::{Demand, DeviceInfo, Done, DriverOptions, IoKind, Subject};

const OWNER: Owner = Owner(0);
/// Punches a hole without changing the file size.
const PUNCH: FallocateFlags = FallocateFlags::PUNCH_HOLE.union(FallocateFlags::KEEP_SIZE);
/// More queues than any thread configuration needs.
const QUEUES_MAX: u16 = u16::MAX;

/// An open file.
pub struct FileSession {
    file: File,
    info: DeviceInfo,
}

/// Creates and fills a file of `size` bytes if it does not exist. It gets its name only when it is full, so an interrupted run leaves no
/// partial file.
pub fn prepare(path: &Path, size: u64, interrupted: &AtomicBool) -> Result<()> {
    if path.exists() {
        return Ok(());
    }
    // A regular file in /dev would be measured in place of the missing device.
    ensure!(
        !path.starts_with("/dev") || path.starts_with("/dev/shm"),
        "{}: no such device; hint: lsblk lists the block devices",
        path.display()
    );
    let folder = match path.parent() {
        Some(folder) if folder != Path::new("") => folder,
        _ => Path::new("."),
    };
    let failed = || format!("cannot create {}", path.display());
    let file = tempfile::Builder::new()
        .prefix(".lunette-bench")
        // The umask restricts these permissions.
        .permissions(Permissions::from_mode(0o666))
        .tempfile_in(folder);
    let mut file = file.with_context(failed)?;
    let mut noise = Rng::with_seed(size);
    let mut chunk = vec![0; 1 << 20];
    let mut left = size;
    while left > 0 {
        noise.fill(&mut chunk);
        let part = chunk.len().min(usize::try_from(left).unwrap_or(usize::MAX));
        file.write_all(&chunk[..part])
            .with_context(|| format!("cannot fill {}", path.display()))?;
        left -= part as u64;
        ensure!(
            !interrupted.load(Ordering::Relaxed),
            "interrupted while filling {}",
            path.display()
        );
    }
    file.as_file().sync_all()?;
    file.persist_noclobber(path).with_context(failed)?;
    Ok(())
}

/// Returns the logical block size of a device, or the direct I/O alignment of a file, which the kernel reports since Linux 6.1.
pub fn block_size(file: &File, direct: bool) -> Result<u32> {
    if file.metadata()?.file_type().is_block_device() {
        return Ok(rustix::fs::ioctl_blksszget(file).unwrap_or(512));
    }
    if !direct {
        return Ok(512);
    }
    let attributes = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN)?;
    let known = StatxFlags::from_bits_retain(attributes.stx_mask).contains(StatxFlags::DIOALIGN);
    Ok(match attributes.stx_dio_offset_align {
        size if known && size > 0 => size,
        _ => 512,
    })
}

impl FileSession {
    /// Opens the file for writing where permitted.
    pub fn open(subject: &Subject, direct: bool) -> Result<FileSession> {
        let flags = if direct {
            rustix::fs::OFlags::DIRECT.bits() as i32
        } else {
            0
        };
        ensure!(
            !subject.path.is_dir(),
            "{} is a folder: give a file or a block device",
            subject.path.display()
        );
        let open = |write: bool| {
            let mut options = OpenOptions::new();
            options.read(true).write(write).custom_flags(flags);
            options.open(&subject.path)
        };
        let (mut file, read_only) = match open(true) {
            Ok(file) => (file, false),
            Err(_) => {
                let file = open(false);
                let place = subject.path.display();
                let refused = |error: &std::io::Error| error.kind() == ErrorKind::InvalidInput;
                let hint = match direct && file.as_ref().is_err_and(refused) {
                    true => " with O_DIRECT; hint: disable direct I/O with ,direct=0",
                    false => "",
                };
                (
                    file.with_context(|| format!("cannot open {place}{hint}"))?,
                    true,
                )
            }
        };
        let block_size = block_size(&file, direct)?;
        let capacity = file.seek(SeekFrom::End(0))?;
        ensure!(capacity > 0, "{} is empty", subject.path.display());
        Ok(FileSession {
            file,
            info: DeviceInfo {
                capacity,
                block_size,
                queues: QUEUES_MAX,
                read_only,
                discard_max: u64::MAX,
            },
        })
    }

    /// Returns the properties of the file.
    pub fn info(&self) -> DeviceInfo {
        self.info
    }

    /// Prepares another ring for the file.
    pub fn queue(&mut self, options: &DriverOptions, demand: Demand) -> Result<PendingFileQueue> {
        Ok(PendingFileQueue {
            file: self.file.try_clone()?.into(),
            polling: options.polling,
            demand,
        })
    }
}

/// An open file on its way to its driver thread.
pub struct PendingFileQueue {
    file: OwnedFd,
    polling: bool,
    demand: Demand,
}

impl PendingFileQueue {
    /// Creates the ring.
    pub fn start(self) -> Result<FileQueue> {
        let mut ring = Ring::new(u32::from(self.demand.slots.max(8)))?;
        let file = File::from(self.file);
        let is_device = file.metadata()?.file_type().is_block_device();
        let fd = ring.register(OwnedFd::from(file.try_clone()?));
        let stride = (self.demand.largest as usize).next_multiple_of(4096);
        let mut noise = Rng::with_seed(u64::from(self.demand.slots));
        let buffers = (0..self.demand.slots).map(|_| {
            let buffer = IoBuffer::owned(stride);
            let mut page = vec![0; stride];
            if !self.demand.zeroes {
                noise.fill(&mut page);
            }
            buffer.write_whole(0, &page);
            Some(buffer)
        });
        Ok(FileQueue {
            buffers: buffers.collect(),
            lengths: vec![0; usize::from(self.demand.slots)].into(),
            trims: vec![None; usize::from(self.demand.slots)].into(),
            is_device,
            rings_discard: true,
            file,
            ring,
            fd,
            polling: self.polling,
            completions: Vec::with_capacity(usize::from(self.demand.slots)),
        })
    }
}

/// An io_uring and its slots.
pub struct FileQueue {
    ring: Ring,
    fd: RingFd,
    file: File,
    is_device: bool,
    /// io_uring is assumed to support discards of block devices.
    rings_discard: bool,
    /// Offset and length of a block device's discard.
    trims: Box<[Option<(u64, u64)>]>,
    polling: bool,
    buffers: Vec<Option<IoBuffer>>,
    lengths: Box<[u32]>,
    completions: Vec<Completion>,
}

impl FileQueue {
    /// Queues a request.
    #[inline]
    pub fn submit(&mut self, slot: u16, ask: IoKind, offset: u64, length: u32) {
        let index = usize::from(slot);
        let token = u64::from(slot);
        if ask == IoKind::Flush {
            self.lengths[index] = 0;
            self.ring.fsync(OWNER, token, &self.fd, true);
            return;
        }
        if ask == IoKind::Trim {
            self.trim(slot, offset, length.into());
            return;
        }
        let Some(mut buffer) = self.buffers[index].take() else {
            return;
        };
        buffer.set_window(0, length as usize);
        self.lengths[index] = length;
        match ask {
            IoKind::Read => self.ring.read(OWNER, token, &self.fd, offset, buffer),
            _ => self
                .ring
                .write(OWNER, token, &self.fd, offset, buffer, false),
        }
    }

    fn trim(&mut self, slot: u16, offset: u64, length: u64) {
        let token = u64::from(slot);
        self.lengths[usize::from(slot)] = 0;
        if !self.is_device {
            let mode = PUNCH.bits() as i32;
            self.ring
                .fallocate(OWNER, token, &self.fd, mode, offset, length);
            return;
        }
        self.trims[usize::from(slot)] = Some((offset, length));
        if self.rings_discard {
            self.ring
                .discard_blocks(OWNER, token, &self.fd, offset, length);
        } else {
            self.ring.nop(OWNER, token);
        }
    }

    /// Returns true if a block device's discard succeeded. If io_uring does not support discards, repeats it by system call, one at a
    /// time, as fio does.
    #[cold]
    fn trimmed(&mut self, result: Result<u32, i32>, range: (u64, u64)) -> bool {
        let unknown = [Errno::OPNOTSUPP, Errno::INVAL, Errno::NOTTY];
        let is_refused = result.is_err_and(|error| {
            let errno = Errno::from_raw_os_error(error.abs());
            unknown.contains(&errno)
        });
        if self.rings_discard && !is_refused {
            return result.is_ok();
        }
        let done = discard_now(self.file.as_fd(), range.0, range.1).is_ok();
        // A device without discard support fails both.
        self.rings_discard &= !done;
        done
    }

    /// With polling, submits now. Otherwise submits with the next wait, which saves a system call.
    #[inline]
    pub fn publish(&mut self) -> Result<()> {
        if self.polling {
            self.ring.enter(Wait::No, &mut self.completions)?;
        }
        Ok(())
    }

    /// Collects completions.
    #[inline]
    pub fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        if self.completions.is_empty() {
            if !self.polling {
                return Ok(());
            }
            self.ring.enter(Wait::No, &mut self.completions)?;
        }
        let mut completions = std::mem::take(&mut self.completions);
        for completion in completions.drain(..) {
            let slot = completion.token as u16;
            let index = usize::from(slot);
            if let Some(buffer) = completion.buffer {
                self.buffers[index] = Some(buffer);
            }
            let ok = match self.trims[index].take() {
                Some(range) => self.trimmed(completion.result, range),
                None => completion.result == Ok(self.lengths[index]),
            };
            done.push(Done { slot, ok });
        }
        self.completions = completions;
        Ok(())
    }

    /// Submits and waits with one system call.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        self.ring
            .enter(Wait::Until(Some(limit)), &mut self.completions)?;
        Ok(())
    }

    /// Writes the data of a slot.
    pub fn write_data(&self, slot: u16, data: &[u8]) {
        if let Some(Some(buffer)) = self.buffers.get(usize::from(slot)) {
            buffer.write_whole(0, data);
        }
    }

    /// Reads the data of a slot.
    pub fn read_data(&self, slot: u16, into: &mut [u8]) {
        if let Some(Some(buffer)) = self.buffers.get(usize::from(slot)) {
            buffer.read_whole(0, into);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_device_is_not_created_as_a_file() {
        let path = Path::new("/dev/lunette-test-missing");
        let error = prepare(path, 4096, &AtomicBool::new(false)).unwrap_err();
        assert!(error.to_string().contains("no such device"), "{error}");
        assert!(!path.exists());
    }

    #[test]
    fn a_file_has_its_name_when_it_is_full() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f.raw");
        let names = || std::fs::read_dir(folder.path()).unwrap().count();
        let error = prepare(&path, 3 << 20, &AtomicBool::new(true)).unwrap_err();
        assert!(error.to_string().contains("interrupted"), "{error}");
        assert_eq!(names(), 0);
        prepare(&path, (3 << 20) + 512, &AtomicBool::new(false)).unwrap();
        let made = std::fs::metadata(&path).unwrap();
        assert_eq!((made.len(), names()), ((3 << 20) + 512, 1));
        // Other users may read it if the umask permits.
        let usual = folder.path().join("usual");
        File::create(&usual).unwrap();
        assert_eq!(
            made.permissions(),
            std::fs::metadata(&usual).unwrap().permissions()
        );
    }

    #[test]
    fn a_block_is_the_least_that_can_be_read() {
        let path = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&path, [7; 1 << 16]).unwrap();
        let open = |flags: rustix::fs::OFlags| {
            let mut options = OpenOptions::new();
            let flags = flags.bits() as i32;
            options.read(true).custom_flags(flags).open(&path)
        };
        let buffered = open(rustix::fs::OFlags::empty()).unwrap();
        assert_eq!(block_size(&buffered, false).unwrap(), 512);
        let direct = open(rustix::fs::OFlags::DIRECT).unwrap();
        let least = block_size(&direct, true).unwrap() as usize;
        let mut memory = vec![0; 1 << 16];
        let skip = memory.as_ptr().align_offset(4096);
        let mut read = |bytes: usize| {
            let place = &mut memory[skip..skip + bytes];
            rustix::io::pread(&direct, place, bytes as u64)
        };
        assert_eq!(read(least), Ok(least));
        // A file on tmpfs has no alignment requirement.
        let in_memory = rustix::fs::fstatfs(&direct).unwrap().f_type == 0x0102_1994;
        assert!(in_memory || read(least / 2).is_err(), "{least}");
    }
}
