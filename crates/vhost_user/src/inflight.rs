//! In-flight region: memory with the requests in flight. After a crash, the next daemon repeats them. `GET_INFLIGHT_FD` and
//! `SET_INFLIGHT_FD` (vhost-user protocol, "Inflight I/O tracking").
//!
//! The front end keeps the file. Each queue has a part of it ([`virtqueue::Inflight`], [`virtqueue::PackedInflight`]).

use std::os::fd::{AsFd, OwnedFd};

use guest_memory::{MemoryTable, RegionSpec, RingMemory};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use vhost_user_wire::Inflight as Description;
use virtqueue::{Inflight, PackedInflight};

/// Identity of a region: device and inode of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionId {
    device: u64,
    inode: u64,
}

impl RegionId {
    /// Returns the identity of a file.
    ///
    /// # Errors
    /// Returns a description if the descriptor has no file.
    pub fn of(file: &OwnedFd) -> Result<RegionId, String> {
        let stat =
            fstat(file).map_err(|errno| format!("cannot use the in-flight region: {errno}"))?;
        Ok(RegionId {
            device: stat.st_dev,
            inode: stat.st_ino,
        })
    }
}

/// A region that the front end has sent.
pub(crate) struct InflightRegion {
    pub id: RegionId,
    memory: MemoryTable,
    queues: u16,
    size: u16,
    bytes: u64,
}

/// Returns the length of a queue's part.
fn stride(size: u16, packed: bool) -> usize {
    match packed {
        true => PackedInflight::stride(size),
        false => Inflight::stride(size),
    }
}

impl InflightRegion {
    /// Creates a region for the front end to keep. Its size suits both ring layouts: the features may not be negotiated yet.
    ///
    /// # Errors
    /// Returns a description if memory or descriptors are exhausted.
    pub fn create(queues: u16, size: u16) -> Result<(Description, OwnedFd), String> {
        let bytes = (stride(size, true) * usize::from(queues)) as u64;
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let created = memfd_create("lunette-in-flight", flags).and_then(|file| {
            ftruncate(&file, bytes)?;
            // The sealed size protects users from truncation.
            fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW)?;
            Ok(file)
        });
        let file =
            created.map_err(|errno| format!("cannot allocate the in-flight region: {errno}"))?;
        let created = Description {
            mmap_size: bytes,
            num_queues: queues,
            queue_size: size,
            ..Description::default()
        };
        Ok((created, file))
    }

    /// Maps a region that a front end has kept.
    ///
    /// # Errors
    /// Returns a description if it cannot be mapped.
    pub fn map(requested: &Description, file: &OwnedFd) -> Result<InflightRegion, String> {
        let (queues, size) = (requested.num_queues, requested.queue_size);
        let largest = stride(size, true).max(stride(size, false)) as u64 * u64::from(queues);
        let spec = RegionSpec {
            guest_address: 0,
            // More would take the address space of other clients.
            size: requested.mmap_size.min(largest.max(1)),
            user_address: 0,
            file_offset: requested.mmap_offset,
        };
        let memory = MemoryTable::default()
            .with_region(spec, file.as_fd())
            .map_err(|error| format!("cannot use the in-flight region: {error}"))?;
        Ok(InflightRegion {
            id: RegionId::of(file)?,
            memory,
            queues,
            size,
            bytes: requested.mmap_size,
        })
    }

    /// Returns the part of queue `index`, if it has one.
    ///
    /// # Errors
    /// Returns a description if the region is too small for its queues.
    pub fn part(&self, index: u16, packed: bool) -> Result<Option<RingMemory>, String> {
        if index >= self.queues {
            return Ok(None);
        }
        let stride = stride(self.size, packed) as u64;
        let needed = stride * u64::from(self.queues);
        if self.bytes < needed {
            return Err(format!(
                "the in-flight region has {} bytes; {} queues of size {} need {needed}",
                self.bytes, self.queues, self.size
            ));
        }
        let part = self.memory.ring(stride * u64::from(index), stride);
        part.map(Some).map_err(|error| error.to_string())
    }

    /// Returns true if a queue has unanswered requests.
    pub fn has_requests(&self, packed: bool) -> bool {
        let parts = (0..self.queues).filter_map(|index| self.part(index, packed).ok().flatten());
        parts.into_iter().any(|part| match packed {
            true => PackedInflight::has_requests(&part, self.size),
            false => Inflight::has_requests(&part, self.size),
        })
    }

    /// Clears the part of a queue after a device reset: its unanswered requests are void.
    pub fn empty(&self, index: u16, packed: bool) {
        if let Ok(Some(part)) = self.part(index, packed) {
            part.clear(0, part.len());
        }
    }

    /// Resets the part of a stopped queue. The front end has its position and may start it with the other ring layout: see
    /// [`PackedInflight::reset_unused`].
    pub fn reset_unused(&self, index: u16, packed: bool) {
        match (self.part(index, packed), packed) {
            (Ok(Some(part)), true) => PackedInflight::reset_unused(&part, self.size),
            (Ok(Some(part)), false) => Inflight::reset_unused(&part, self.size),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use guest_memory::{GuestView, Mapping};
    use virtqueue::driver::{DriverConfig, DriverQueue, RingLayout};
    use virtqueue::{Chain, DeviceQueue, QueueConfig};

    use super::*;

    const QUEUES: u16 = 4;
    const SIZE: u16 = 128;

    /// Pops and answers three ring sizes of requests.
    fn serve(region: &InflightRegion, index: u16, packed: bool) {
        let mapping = Mapping::anonymous(1 << 20).unwrap();
        let spec = RegionSpec {
            guest_address: 0,
            size: 1 << 20,
            user_address: 0,
            file_offset: 0,
        };
        let table = MemoryTable::default().with_mapping(spec, mapping).unwrap();
        let view = GuestView::new(Arc::new(table.clone()));
        let layout = RingLayout::at(0, SIZE, packed);
        let mut driver = DriverQueue::new(DriverConfig::new(layout), &table).unwrap();
        let areas = [
            layout.descriptor_area,
            layout.driver_area,
            layout.device_area,
        ];
        let [descriptors, available, used] = areas;
        let config = match packed {
            true => QueueConfig::packed(SIZE, descriptors, available, used),
            false => QueueConfig::split(SIZE, descriptors, available, used),
        };
        let mut device = DeviceQueue::new(config, &table).unwrap();
        let part = region.part(index, packed).unwrap().unwrap();
        let tracked = device.track(part);
        tracked.unwrap_or_else(|error| panic!("queue {index}, packed {packed}: {error}"));
        let mut chain = Chain::default();
        for round in 0..3 {
            for token in 0..u64::from(SIZE) {
                let token = round * u64::from(SIZE) + token;
                driver.add(&[(0x20000, 1)], &[], token).unwrap();
            }
            driver.publish();
            let mut taken = Vec::new();
            while device.pop(&view, &mut chain).unwrap() {
                taken.push((chain.id, chain.descriptors));
            }
            assert_eq!(taken.len(), usize::from(SIZE));
            for (id, descriptors) in taken {
                device.push(id, descriptors, 0);
            }
            device.publish();
            while driver.pop_used().is_some() {}
        }
    }

    #[test]
    fn only_the_useful_part_of_a_region_is_mapped() {
        let (requested, file) = InflightRegion::create(QUEUES, SIZE).unwrap();
        let used = requested.mmap_size;
        drop(file);
        let file = memfd_create("region", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&file, 32 << 40).unwrap();
        let requested = Description {
            mmap_size: 32 << 40,
            ..requested
        };
        let region = InflightRegion::map(&requested, &file).unwrap();
        assert!(region.part(QUEUES - 1, true).unwrap().is_some());
        assert!(region.memory.ring(0, used).is_ok());
        assert!(region.memory.ring(0, used + 4096).is_err());
    }

    /// The next driver has other descriptors in the places of the old requests.
    #[test]
    fn reset_queue_has_nothing_in_flight() {
        let (requested, file) = InflightRegion::create(QUEUES, SIZE).unwrap();
        let region = InflightRegion::map(&requested, &file).unwrap();
        for packed in [false, true] {
            let part = region.part(1, packed).unwrap().unwrap();
            part.write(part.len() - 8, u64::MAX);
            part.write(0, [1u64; 2]);
            region.reset_unused(1, packed);
            region.empty(1, packed);
            serve(&region, 1, packed);
            region.reset_unused(1, packed);
        }
    }

    #[test]
    fn region_has_requests_until_it_is_emptied() {
        let (requested, file) = InflightRegion::create(QUEUES, SIZE).unwrap();
        let region = InflightRegion::map(&requested, &file).unwrap();
        for packed in [false, true] {
            assert!(!region.has_requests(packed));
            let part = region.part(1, packed).unwrap().unwrap();
            (0..part.len() / 8).for_each(|word| part.write(word * 8, u64::MAX));
            assert!(region.has_requests(packed));
            region.empty(1, packed);
        }
        assert!(!region.has_requests(false));
    }

    /// Firmware may use split rings and its kernel packed ones, with the same region. The parts of the two layouts differ in length.
    #[test]
    fn region_serves_queues_of_either_kind_one_after_the_other() {
        for first_packed in [false, true] {
            let (requested, file) = InflightRegion::create(QUEUES, SIZE).unwrap();
            let region = InflightRegion::map(&requested, &file).unwrap();
            for packed in [first_packed, !first_packed, first_packed] {
                (0..QUEUES).for_each(|queue| serve(&region, queue, packed));
                (0..QUEUES).for_each(|queue| region.reset_unused(queue, packed));
            }
        }
    }
}
