//! The memory in which requests in flight are kept, so that a daemon that comes after one that died takes them again:
//! `GET_INFLIGHT_FD` and `SET_INFLIGHT_FD` (vhost-user protocol, "Inflight I/O tracking").
//!
//! The front end keeps the file; each split queue has a part of it ([`virtqueue::Inflight`]).

use std::fs::File;
use std::os::fd::AsFd;

use guest_memory::{MemoryTable, RegionSpec, RingMemory};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;
use virtqueue::Inflight;

/// A region that the front end has given.
pub(crate) struct InflightRegion {
    memory: MemoryTable,
    queues: u16,
    stride: usize,
}

impl InflightRegion {
    /// Makes the memory for a front end to keep.
    ///
    /// # Errors
    /// When there is no memory or no descriptor left, in words.
    pub fn create(queues: u16, size: u16) -> Result<(VhostUserInflight, File), String> {
        let bytes = (Inflight::stride(size) * usize::from(queues)) as u64;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let made = memfd_create("lunette-in-flight", flags).and_then(|file| {
            ftruncate(&file, bytes)?;
            // Nobody has to fear that it gets shorter.
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
            Ok(File::from(file))
        });
        let file = made.map_err(|errno| format!("no memory for requests in flight: {errno}"))?;
        Ok((VhostUserInflight::new(bytes, 0, queues, size), file))
    }

    /// Maps what a front end has kept.
    ///
    /// # Errors
    /// When it is too small for its queues or cannot be mapped, in words.
    pub fn map(said: &VhostUserInflight, file: &File) -> Result<InflightRegion, String> {
        let stride = Inflight::stride(said.queue_size);
        let needed = (stride * usize::from(said.num_queues)) as u64;
        if said.mmap_size < needed {
            return Err(format!(
                "an in-flight region of {} bytes for {} queues of {}, which need {needed}",
                said.mmap_size, said.num_queues, said.queue_size
            ));
        }
        let spec = RegionSpec {
            guest_address: 0,
            size: said.mmap_size,
            user_address: 0,
            file_offset: said.mmap_offset,
        };
        let memory = MemoryTable::default()
            .with_region(spec, file.as_fd())
            .map_err(|error| format!("the in-flight region: {error}"))?;
        Ok(InflightRegion {
            memory,
            queues: said.num_queues,
            stride,
        })
    }

    /// The part of queue `index`, if it has one.
    pub fn part(&self, index: u16) -> Option<RingMemory> {
        if index >= self.queues {
            return None;
        }
        let offset = (self.stride * usize::from(index)) as u64;
        self.memory.ring(offset, self.stride as u64).ok()
    }
}
