//! Disk handles of one queue or connection. A handle is opened at the first I/O of a logical unit, and closed when its disk is removed or
//! the source ends. Owned by a source, on its worker. An open handle costs one indexed lookup.

use std::sync::Arc;

use bdev::Disk;
use reactor::{DiskHandle, Io};
use scsi::DiskId;

use crate::Units;

/// Handles by [`DiskId`].
#[derive(Default)]
pub struct DiskHandles(Vec<Option<DiskHandle>>);

impl DiskHandles {
    /// Returns the handle of a unit's disk, or `None` if the disk is gone.
    #[inline]
    pub fn get(&mut self, io: &mut Io, units: &Units, id: DiskId) -> Option<DiskHandle> {
        match self.0.get(id.0 as usize) {
            Some(Some(handle)) => Some(*handle),
            _ => self.open(io, units, id),
        }
    }

    #[cold]
    fn open(&mut self, io: &mut Io, units: &Units, id: DiskId) -> Option<DiskHandle> {
        let disk = units.disk(id)?;
        let index = id.0 as usize;
        if self.0.len() <= index {
            self.0.resize(index + 1, None);
        }
        self.0[index] = Some(io.open(&disk));
        self.0[index]
    }

    /// Closes the handles of a disk that is being removed from the process. Returns true if any was open.
    pub fn close_disk(&mut self, io: &mut Io, disk: &Arc<Disk>) -> bool {
        let mut any = false;
        for place in &mut self.0 {
            if let Some(handle) = place.take_if(|handle| io.is_of(*handle, disk)) {
                io.close(handle);
                any = true;
            }
        }
        any
    }

    /// Closes all handles.
    pub fn close(&mut self, io: &mut Io) {
        for handle in self.0.drain(..).flatten() {
            io.close(handle);
        }
    }
}
