//! The memory in which requests in flight are kept, so that a daemon that comes after one that died takes them again:
//! `GET_INFLIGHT_FD` and `SET_INFLIGHT_FD` (vhost-user protocol, "Inflight I/O tracking").
//!
//! The front end keeps the file; each queue has a part of it ([`virtqueue::Inflight`], [`virtqueue::PackedInflight`]).

use std::fs::File;
use std::os::fd::AsFd;

use guest_memory::{MemoryTable, RegionSpec, RingMemory};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fstat, ftruncate, memfd_create};
use vhost::vhost_user::message::VhostUserInflight;
use virtqueue::{Inflight, PackedInflight};

/// Which memory a region is: device and inode of its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RegionId {
    device: u64,
    inode: u64,
}

impl RegionId {
    /// # Errors
    /// When the descriptor is not one of a file, in words.
    pub fn of(file: &File) -> Result<RegionId, String> {
        let stat = fstat(file).map_err(|errno| format!("the in-flight region: {errno}"))?;
        Ok(RegionId {
            device: stat.st_dev,
            inode: stat.st_ino,
        })
    }
}

/// A region that the front end has given.
pub(crate) struct InflightRegion {
    pub id: RegionId,
    memory: MemoryTable,
    queues: u16,
    size: u16,
    bytes: u64,
}

/// Bytes of a queue's part.
fn stride(size: u16, packed: bool) -> usize {
    match packed {
        true => PackedInflight::stride(size),
        false => Inflight::stride(size),
    }
}

impl InflightRegion {
    /// Makes the memory for a front end to keep, with room for either kind of queue: it may not have said which it wants.
    ///
    /// # Errors
    /// When there is no memory or no descriptor left, in words.
    pub fn create(queues: u16, size: u16) -> Result<(VhostUserInflight, File), String> {
        let bytes = (stride(size, true) * usize::from(queues)) as u64;
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
    /// When it cannot be mapped, in words.
    pub fn map(said: &VhostUserInflight, file: &File) -> Result<InflightRegion, String> {
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
            id: RegionId::of(file)?,
            memory,
            queues: said.num_queues,
            size: said.queue_size,
            bytes: said.mmap_size,
        })
    }

    /// The part of queue `index`, if it has one.
    ///
    /// # Errors
    /// When the region is too small for its queues, in words.
    pub fn part(&self, index: u16, packed: bool) -> Result<Option<RingMemory>, String> {
        if index >= self.queues {
            return Ok(None);
        }
        let stride = stride(self.size, packed) as u64;
        let needed = stride * u64::from(self.queues);
        if self.bytes < needed {
            return Err(format!(
                "an in-flight region of {} bytes for {} queues of {}, which need {needed}",
                self.bytes, self.queues, self.size
            ));
        }
        let part = self.memory.ring(stride * u64::from(index), stride);
        part.map(Some).map_err(|error| error.to_string())
    }

    /// Has any queue requests that were taken and not answered?
    pub fn has_requests(&self, packed: bool) -> bool {
        let parts = (0..self.queues).filter_map(|index| self.part(index, packed).ok().flatten());
        parts.into_iter().any(|part| match packed {
            true => PackedInflight::has_requests(&part, self.size),
            false => Inflight::has_requests(&part, self.size),
        })
    }

    /// The driver has reset the device: what its queue has not had answered, because it was ended, is meant by nobody any more.
    pub fn empty(&self, index: u16, packed: bool) {
        if let Ok(Some(part)) = self.part(index, packed) {
            part.clear(0, part.len());
        }
    }

    /// The front end knows where a queue that has stopped stands, and may start it again as another kind: see
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

    /// Takes and answers a ring's worth of requests, three times.
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

    /// The driver after it has other descriptors in the places of those that were taken.
    #[test]
    fn reset_queue_has_nothing_in_flight() {
        let (said, file) = InflightRegion::create(QUEUES, SIZE).unwrap();
        let region = InflightRegion::map(&said, &file).unwrap();
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
        let (said, file) = InflightRegion::create(QUEUES, SIZE).unwrap();
        let region = InflightRegion::map(&said, &file).unwrap();
        for packed in [false, true] {
            assert!(!region.has_requests(packed));
            let part = region.part(1, packed).unwrap().unwrap();
            (0..part.len() / 8).for_each(|word| part.write(word * 8, u64::MAX));
            assert!(region.has_requests(packed));
            region.empty(1, packed);
        }
        assert!(!region.has_requests(false));
    }

    /// Firmware's driver may use split rings, and that of the kernel after it packed ones, with the same region; the parts
    /// of the two kinds are of different lengths.
    #[test]
    fn region_serves_queues_of_either_kind_one_after_the_other() {
        for first_packed in [false, true] {
            let (said, file) = InflightRegion::create(QUEUES, SIZE).unwrap();
            let region = InflightRegion::map(&said, &file).unwrap();
            for packed in [first_packed, !first_packed, first_packed] {
                (0..QUEUES).for_each(|queue| serve(&region, queue, packed));
                (0..QUEUES).for_each(|queue| region.reset_unused(queue, packed));
            }
        }
    }
}
