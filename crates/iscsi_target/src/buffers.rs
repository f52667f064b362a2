//! Page-aligned memory for command data: one pool per connection. Memory in use is limited per session (`memory`).
//!
//! Free buffers are kept by size class and reused without being zeroed: only bytes that were written for the current command are sent.
//! Empty shells, which point at memory of a disk, are kept too, for their heap allocation.

use std::ops::Range;
use std::sync::Arc;

use guest_memory::IoBuffer;

use crate::memory::{MemoryShare, SessionMemory};
use crate::shared::ConnectionHandle;
use scsi_exec::WorkMemory;

const CLASSES: [usize; 5] = [4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20];
/// Maximum bytes of free buffers that are kept.
const KEPT_MAX: usize = 16 << 20;
/// Maximum number of free shells: one for each command of a full window and for each response that is being sent.
const SHELLS_MAX: usize = 256;

pub(crate) struct Buffers {
    free: [Vec<IoBuffer>; CLASSES.len()],
    shells: Vec<IoBuffer>,
    kept: usize,
    in_use: usize,
    lease: MemoryShare,
}

fn class(length: usize) -> Option<usize> {
    CLASSES.iter().position(|size| length <= *size)
}

fn size(length: usize) -> usize {
    class(length).map_or(length, |class| CLASSES[class])
}

impl Buffers {
    pub fn new(memory: Arc<SessionMemory>) -> Buffers {
        Buffers {
            free: Default::default(),
            shells: Vec::new(),
            kept: 0,
            in_use: 0,
            lease: MemoryShare::new(memory),
        }
    }

    /// Counts memory in use in `memory` from now on.
    pub fn count_in(&mut self, memory: Arc<SessionMemory>) {
        self.lease = MemoryShare::new(memory);
        self.lease.force(self.in_use);
    }

    /// Returns the working memory that commands are counted in.
    pub fn work(&self) -> &Arc<WorkMemory> {
        &self.lease.memory().work
    }

    /// Wakes the connection at `handle` when memory may be available. The caller must try once more after this call.
    pub fn wait(&self, handle: &ConnectionHandle) {
        self.lease.memory().wait(handle);
    }

    /// Returns true if `length` more bytes are available. They are then reserved, and the caller must take them.
    #[inline]
    pub fn has(&mut self, length: usize) -> bool {
        self.lease.covers(self.in_use + size(length))
    }

    /// Takes a buffer of at least `length` bytes, unless the limit is reached.
    #[cfg(test)]
    fn take(&mut self, length: usize) -> Option<IoBuffer> {
        self.has(length).then(|| self.hand_out(length))
    }

    /// Takes a buffer of at least `length` bytes, even above the limit. For memory that [`Buffers::has`] has reserved, or that has another
    /// limit.
    #[inline]
    pub fn take_anyway(&mut self, length: usize) -> IoBuffer {
        self.lease.force(self.in_use + size(length));
        self.hand_out(length)
    }

    fn hand_out(&mut self, length: usize) -> IoBuffer {
        let class = class(length);
        self.in_use += size(length);
        match class.and_then(|class| self.free[class].pop()) {
            Some(buffer) => {
                self.kept -= buffer.total_len();
                buffer
            }
            None => IoBuffer::owned(size(length)),
        }
    }

    /// Copies the data of a shell that overlaps one of these address ranges. Ignores the limit.
    pub fn copy_held(&mut self, shell: &IoBuffer, held: &[Range<usize>]) -> Option<IoBuffer> {
        let view = shell.view()?;
        let overlaps = |range: &Range<usize>| view.start < range.end && range.start < view.end;
        if !held.iter().any(overlaps) {
            return None;
        }
        let own = self.take_anyway(view.len());
        shell.copy_part(0, &own, 0, view.len());
        Some(own)
    }

    /// Takes an empty buffer that can point at memory of a disk. The caller must return it with [`Buffers::give_shell`].
    #[inline]
    pub fn take_shell(&mut self) -> IoBuffer {
        self.shells.pop().unwrap_or_default()
    }

    /// Returns a shell and releases its pin.
    #[inline]
    pub fn give_shell(&mut self, mut shell: IoBuffer) {
        if self.shells.len() < SHELLS_MAX {
            shell.clear();
            self.shells.push(shell);
        }
    }

    /// Returns a buffer or a shell.
    #[inline]
    pub fn give(&mut self, buffer: IoBuffer) {
        if !buffer.is_owned() {
            return self.give_shell(buffer);
        }
        let size = buffer.total_len();
        self.in_use -= size;
        self.lease.shrink(self.in_use);
        if let Some(class) = CLASSES.iter().position(|class| *class == size)
            && self.kept + size <= KEPT_MAX
        {
            self.kept += size;
            self.free[class].push(buffer);
        }
    }

    /// Stops counting a buffer that the kernel may still write to. It is not reused.
    pub fn lose(&mut self, buffer: &IoBuffer) {
        self.in_use -= buffer.total_len();
        self.lease.shrink(self.in_use);
    }

    pub fn in_use(&self) -> usize {
        self.in_use
    }

    /// Frees all unused buffers and shells.
    pub fn trim(&mut self) {
        self.free.iter_mut().for_each(|free| *free = Vec::new());
        self.shells = Vec::new();
        self.kept = 0;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_in_use_is_bounded_but_one_large_buffer_gets_through() {
        let mut buffers = Buffers::new(SessionMemory::new(64 << 10));
        // One buffer may exceed the limit; the rest stays available to others.
        let large = buffers.take(1 << 20).unwrap();
        let held: Vec<_> = (0..16).map(|_| buffers.take(4096).unwrap()).collect();
        assert!(buffers.take(1).is_none());
        held.into_iter().for_each(|buffer| buffers.give(buffer));
        buffers.give(large);
        let held: Vec<_> = (0..17).map(|_| buffers.take(4096).unwrap()).collect();
        assert!(buffers.take(1).is_none());
        assert_eq!(buffers.take_anyway(1).total_len(), 4096);
        held.into_iter().for_each(|buffer| buffers.give(buffer));
        assert!(buffers.take(1).is_some());
    }

    #[test]
    fn buffers_are_reused_and_freed() {
        let mut buffers = Buffers::new(SessionMemory::new(1 << 20));
        let buffer = buffers.take(5000).unwrap();
        buffer.write_at(0, b"moon");
        buffers.give(buffer);
        let mut bytes = [0; 4];
        let again = buffers.take(16 << 10).unwrap();
        again.read_at(0, &mut bytes);
        assert_eq!(&bytes, b"moon");
        buffers.give(again);
        buffers.trim();
        assert_eq!(buffers.kept, 0);
        assert!(buffers.free.iter().all(Vec::is_empty));
    }
}
