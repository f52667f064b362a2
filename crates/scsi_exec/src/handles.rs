//! The handles of one queue or connection on the disks of logical units: opened at a unit's first I/O, closed when its
//! disk is taken out, or at the end. Owned by a source, on its worker; a handle that is open costs one look by index.

use std::sync::Arc;

use bdev::Disk;
use reactor::{DiskHandle, Io};
use scsi::DiskId;

use crate::Units;

/// Handles by [`DiskId`].
#[derive(Default)]
pub struct DiskHandles(Vec<Option<DiskHandle>>);

impl DiskHandles {
    /// The handle on a unit's disk; `None` when the disk is gone.
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

    /// Closes the handle on a disk that is being taken out of the process. Was there one?
    pub fn let_go(&mut self, io: &mut Io, disk: &Arc<Disk>) -> bool {
        let mut any = false;
        for place in &mut self.0 {
            if let Some(handle) = place.take_if(|handle| io.is_of(*handle, disk)) {
                io.close(handle);
                any = true;
            }
        }
        any
    }

    /// Closes all.
    pub fn close(&mut self, io: &mut Io) {
        for handle in self.0.drain(..).flatten() {
            io.close(handle);
        }
    }
}
