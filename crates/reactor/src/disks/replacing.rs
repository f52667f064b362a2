//! Replaces the device under a disk in use, in two steps. First a worker attaches to the new device, which may fail without
//! consequences. Then, while the whole disk is held and has no read or change in flight, it switches over, which cannot
//! fail. Operations still in flight on the old channel (flushes, block status) end there; then the channel is closed.
//! Tests: `tests/replaced_devices.rs`.

use std::io;
use std::sync::Arc;

use bdev::{BlockDevice, Disk, Finished, IoChannel, LockWaits};
use uring::{Completion, Owner, Ring};

use super::{Io, OpenDisk, attach_to};

/// A channel that receives no new I/O.
struct Other {
    channel: Box<dyn IoChannel>,
    owners: Vec<Owner>,
}

/// The channels of a handle that receive no new I/O.
#[derive(Default)]
pub(crate) struct Others {
    /// Channel of the next device.
    prepared: Option<Other>,
    /// Channels of earlier devices.
    retired: Vec<Other>,
}

impl Others {
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.prepared.is_none() && self.retired.is_empty()
    }

    fn all(&mut self) -> impl Iterator<Item = &mut Other> {
        self.retired.iter_mut().chain(&mut self.prepared)
    }

    fn in_flight(&self) -> usize {
        let retired = self.retired.iter();
        retired.map(|other| other.channel.in_flight()).sum()
    }

    pub fn abort(&mut self, ring: &mut Ring, tag: bdev::Tag) {
        let retired = self.retired.iter_mut();
        retired.for_each(|other| other.channel.abort(ring, tag));
    }

    /// Closes all channels when the handle closes.
    pub fn close(&mut self, ring: &mut Ring) {
        self.drop_prepared(ring);
        for other in &mut self.retired {
            other.close_idle(ring);
        }
    }

    fn drop_prepared(&mut self, ring: &mut Ring) {
        if let Some(mut other) = self.prepared.take() {
            other.close_idle(ring);
            self.retired.push(other);
        }
    }

    /// Removes closed channels and returns their owners.
    pub fn take_closed(&mut self) -> Vec<Vec<Owner>> {
        let is_closed = |other: &mut Other| other.channel.is_closed();
        let closed = self.retired.extract_if(.., is_closed);
        closed.map(|other| other.owners).collect()
    }
}

impl Other {
    /// Closes the channel if nothing is in flight.
    fn close_idle(&mut self, ring: &mut Ring) {
        if self.channel.in_flight() == 0 {
            self.channel.close(ring);
        }
    }
}

impl OpenDisk {
    /// Returns the number of I/Os in all devices.
    pub(super) fn in_flight(&self) -> usize {
        self.channel.in_flight() + self.attachment.others.in_flight()
    }

    /// Dispatches a completion of a handle with several channels.
    #[cold]
    pub(super) fn complete_by_owner(
        &mut self,
        ring: &mut Ring,
        completion: Completion,
        finished: &mut Vec<Finished>,
    ) {
        let mut others = self.attachment.others.all();
        match others.find(|other| other.owners.contains(&completion.owner)) {
            Some(other) => {
                let before = other.channel.in_flight();
                other.channel.complete(ring, completion, finished);
                // The channel may close only after its last operation.
                if before > 0 {
                    other.close_idle(ring);
                }
            }
            None => self.channel.complete(ring, completion, finished),
        }
    }
}

impl Io {
    /// Attaches to the next device of a disk. It receives no I/O before [`Io::change_device`].
    ///
    /// # Errors
    /// Errors of the device.
    pub fn prepare_device(
        &mut self,
        disk: &Arc<Disk>,
        device: &Arc<dyn BlockDevice>,
    ) -> io::Result<()> {
        for index in self.handles_on(disk) {
            let (ring, listeners) = (&mut self.ring, &mut self.listeners);
            // A lock that is not taken fails the attempt.
            let mut waits = LockWaits::new(Arc::new(|| {}));
            let (attached, owners) =
                attach_to(&**device, ring, listeners, index as u32, &mut waits);
            let Some(Some(open)) = self.disks.get_mut(index) else {
                continue;
            };
            match attached {
                Ok(channel) => open.attachment.others.prepared = Some(Other { channel, owners }),
                Err(error) => {
                    self.unlisten_all(&owners);
                    return Err(error);
                }
            }
        }
        Ok(())
    }

    /// Drops the channel of [`Io::prepare_device`] without using it.
    pub fn drop_prepared(&mut self, disk: &Arc<Disk>) {
        for index in self.handles_on(disk) {
            if let Some(Some(open)) = self.disks.get_mut(index) {
                open.attachment.others.drop_prepared(&mut self.ring);
            }
            self.take_closed(index as u32);
        }
    }

    /// Directs I/O to the disk's new device ([`Disk::replace_device`]). No read and no change may be in flight.
    pub fn change_device(&mut self, disk: &Arc<Disk>) {
        let (_, generation) = disk.device_and_generation();
        for index in self.handles_on(disk) {
            let Some(Some(open)) = self.disks.get_mut(index) else {
                continue;
            };
            if open.attachment.generation == generation {
                // The handle was opened after the replacement.
                open.attachment.others.drop_prepared(&mut self.ring);
                self.take_closed(index as u32);
                continue;
            }
            if open.attachment.retry.is_some() {
                // The handle has no channel; its next attempt attaches to the current device.
                open.attachment.others.drop_prepared(&mut self.ring);
                self.take_closed(index as u32);
                continue;
            }
            let Some(new) = open.attachment.others.prepared.take() else {
                // The handle was opened between the two steps and has no I/O in flight.
                self.retire_channel(index, None, generation);
                continue;
            };
            self.retire_channel(index, Some(new), generation);
        }
    }

    fn retire_channel(&mut self, index: usize, new: Option<Other>, generation: u64) {
        let Some(Some(open)) = self.disks.get_mut(index) else {
            return;
        };
        let is_ready = new.is_some();
        let new = new.unwrap_or_else(|| Other {
            channel: Box::new(crate::attaching::Absent),
            owners: Vec::new(),
        });
        self.prefetching -= usize::from(open.channel.wants_prefetch());
        self.prefetching += usize::from(new.channel.wants_prefetch());
        let channel = std::mem::replace(&mut open.channel, new.channel);
        let owners = std::mem::replace(&mut open.attachment.owners, new.owners);
        open.attachment.generation = generation;
        open.unaligned
            .set_alignment(open.disk.device().info().io_alignment);
        let mut old = Other { channel, owners };
        old.close_idle(&mut self.ring);
        open.attachment.others.retired.push(old);
        if !is_ready {
            self.attach(index);
        }
        self.take_closed(index as u32);
    }

    fn handles_on(&self, disk: &Arc<Disk>) -> Vec<usize> {
        let all = self.disks.iter().enumerate();
        let ours = all.filter(|(_, open)| {
            let open = open.as_ref();
            open.is_some_and(|open| open.usage.is_open() && Arc::ptr_eq(&open.disk, disk))
        });
        ours.map(|(index, _)| index).collect()
    }

    #[cold]
    pub(super) fn take_closed(&mut self, disk: u32) {
        let Some(Some(open)) = self.disks.get_mut(disk as usize) else {
            return;
        };
        for owners in open.attachment.others.take_closed() {
            self.unlisten_all(&owners);
        }
    }
}
