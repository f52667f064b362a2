//! A file with an image of another format. The image's owner accesses tables through the page cache, on a thread that may block; data goes
//! through channels.

use std::io;
use std::os::fd::{AsFd, AsRawFd};
use std::path::Path;
use std::sync::Arc;

use rustix::fs::{Advice, FallocateFlags};

use super::allocation::Allocation;
use super::errno::is_refusal;
use super::properties::device_size;
use super::{File, SharedFile};

/// System calls of the container; replaced in a simulation.
#[cfg(not(feature = "simulated"))]
mod calls {
    use std::fs::File;
    use std::io;
    use std::os::unix::fs::FileExt;

    use rustix::fs::FallocateFlags;

    pub fn set_len(file: &File, length: u64) -> io::Result<()> {
        file.set_len(length)
    }

    pub fn fallocate(
        file: &File,
        flags: FallocateFlags,
        offset: u64,
        length: u64,
    ) -> io::Result<()> {
        Ok(rustix::fs::fallocate(file, flags, offset, length)?)
    }

    pub fn write_all_at(file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        file.write_all_at(bytes, offset)
    }

    pub fn read_at(file: &File, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        file.read_at(bytes, offset)
    }

    pub fn sync_data(file: &File) -> io::Result<()> {
        file.sync_data()
    }
}
#[cfg(feature = "simulated")]
use uring::simulated::Files as calls;

/// Zeroes for writing where the file system cannot create them.
static ZEROES: [u8; 64 << 10] = [0; 64 << 10];

/// Blocking access to the bytes of a file.
#[derive(Clone)]
pub struct Container {
    shared: Arc<SharedFile>,
    /// Separate open file description: position and errors are not shared.
    file: Arc<std::fs::File>,
}

impl File {
    /// Returns blocking access to the file.
    ///
    /// # Errors
    /// The file cannot be opened again.
    pub fn container(&self) -> io::Result<Container> {
        let access = super::open_flags(super::CacheMode::Writeback, self.shared.info.read_only);
        let fd = super::reopen(self.shared.control.as_fd(), access)?;
        Ok(Container {
            shared: Arc::clone(&self.shared),
            file: Arc::new(fd.into()),
        })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.shared.path
    }
}

impl Container {
    /// Extends a file, sparse. Rereads the size of a block device, which another program may have extended.
    fn extend(&self, end: u64) -> io::Result<()> {
        let shared = &self.shared;
        if end <= shared.capacity.bytes() {
            return Ok(());
        }
        if shared.block_device {
            return self.follow_device(end);
        }
        if end > self.file.metadata()?.len() {
            calls::set_len(&self.file, end)?;
        }
        shared.capacity.set(end);
        Ok(())
    }

    /// Adopts the current size of the block device.
    fn follow_device(&self, end: u64) -> io::Result<()> {
        let shared = &self.shared;
        let (known, found) = (shared.capacity.bytes(), device_size(&shared.control)?);
        if found > known {
            let path = shared.path.display();
            tracing::info!(
                "block device of an image has grown, path={path}, bytes={found}, before={known}"
            );
            shared.capacity.set(found);
        }
        match end <= found {
            true => Ok(()),
            false => Err(io::Error::from_raw_os_error(libc::ENOSPC)),
        }
    }

    /// Drops the cached pages, which another host does not update. Written pages must be durable.
    ///
    /// # Errors
    /// The system refuses.
    pub(crate) fn drop_cache(&self) -> io::Result<()> {
        Ok(rustix::fs::fadvise(&self.file, 0, None, Advice::DontNeed)?)
    }

    fn write_zeroes(&self, mut offset: u64, mut length: u64) -> io::Result<()> {
        while length > 0 {
            let part = length.min(ZEROES.len() as u64);
            calls::write_all_at(&self.file, &ZEROES[..part as usize], offset)?;
            (offset, length) = (offset + part, length - part);
        }
        Ok(())
    }
}

impl qcow2::Storage for Container {
    fn read_at(&self, offset: u64, bytes: &mut [u8]) -> io::Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            match calls::read_at(&self.file, &mut bytes[done..], offset + done as u64) {
                Ok(0) => {
                    bytes[done..].fill(0);
                    break;
                }
                Ok(read) => done += read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn write_at(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.extend(offset + bytes.len() as u64)?;
        calls::write_all_at(&self.file, bytes, offset)
    }

    fn zero(&self, offset: u64, length: u64) -> io::Result<()> {
        let before = self.shared.capacity.bytes();
        self.extend(offset + length)?;
        // A file reads as zeroes beyond its old end; a grown block device may have old data there.
        let length = match self.shared.block_device {
            true => length,
            false => (offset + length).min(before.max(offset)) - offset,
        };
        if length == 0 {
            return Ok(());
        }
        let refused = &self.shared.refused;
        let keep = FallocateFlags::KEEP_SIZE;
        for (operation, flags) in [
            (Allocation::Punch, FallocateFlags::PUNCH_HOLE),
            (Allocation::ZeroRange, FallocateFlags::ZERO_RANGE),
        ] {
            if refused.has(operation) {
                continue;
            }
            let Err(error) = calls::fallocate(&self.file, flags | keep, offset, length) else {
                return Ok(());
            };
            match error.raw_os_error() {
                Some(errno) if is_refusal(errno) => refused.add(operation),
                // Only this range: cached pages are dirty, and the kernel does not wait for them, because the device is claimed; or a part
                // of a block is meant.
                Some(libc::EBUSY | libc::EINVAL) if self.shared.block_device => {}
                _ => return Err(error),
            }
        }
        self.write_zeroes(offset, length)
    }

    /// A failed sync is a loss for all handles: no later flush may succeed.
    fn sync(&self) -> io::Result<()> {
        if let Some(errno) = self.shared.durability.lost() {
            return Err(io::Error::from_raw_os_error(errno));
        }
        calls::sync_data(&self.file).inspect_err(|error| {
            self.shared.lose(error.raw_os_error().unwrap_or(libc::EIO));
        })
    }

    fn size(&self) -> io::Result<u64> {
        Ok(self.shared.capacity.bytes())
    }
}

impl std::fmt::Debug for Container {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Container")
            .field(&self.file.as_raw_fd())
            .finish()
    }
}
