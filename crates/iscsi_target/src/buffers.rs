//! Memory for command data of one connection: a pool, and the session's limit of memory in use (`memory`).

use std::ops::Range;
use std::sync::Arc;

use guest_memory::IoBuffer;
use request_engine::{BufferPool, SendMemory, buffer_size};

use crate::memory::{MemoryShare, SessionMemory};
use crate::shared::ConnectionHandle;
use scsi_exec::WorkMemory;

pub(crate) struct Buffers {
    pool: BufferPool,
    lease: MemoryShare,
}

impl Buffers {
    pub fn new(memory: Arc<SessionMemory>) -> Buffers {
        Buffers {
            pool: BufferPool::default(),
            lease: MemoryShare::new(memory),
        }
    }

    /// Counts memory in use in `memory` from now on.
    pub fn count_in(&mut self, memory: Arc<SessionMemory>) {
        self.lease = MemoryShare::new(memory);
        self.lease.force(self.pool.in_use());
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
        self.lease.covers(self.pool.in_use() + buffer_size(length))
    }

    /// Takes a buffer of at least `length` bytes, unless the limit is reached.
    #[cfg(test)]
    fn take(&mut self, length: usize) -> Option<IoBuffer> {
        self.has(length).then(|| self.pool.take(length))
    }

    /// Takes a buffer of at least `length` bytes, even above the limit. For memory that [`Buffers::has`] has reserved, or that has another
    /// limit.
    #[inline]
    pub fn take_anyway(&mut self, length: usize) -> IoBuffer {
        self.lease.force(self.pool.in_use() + buffer_size(length));
        self.pool.take(length)
    }

    /// Takes an empty buffer that can point at memory of a disk. The caller must return it with [`Buffers::give_shell`].
    #[inline]
    pub fn take_shell(&mut self) -> IoBuffer {
        self.pool.take_shell()
    }

    /// Returns a shell and releases its pin.
    #[inline]
    pub fn give_shell(&mut self, shell: IoBuffer) {
        self.pool.give_shell(shell);
    }

    /// Returns a buffer or a shell.
    #[inline]
    pub fn give(&mut self, buffer: IoBuffer) {
        if !buffer.is_owned() {
            return self.pool.give_shell(buffer);
        }
        self.pool.give(buffer);
        self.lease.shrink(self.pool.in_use());
    }

    /// Stops counting a buffer that the kernel may still write to. It is not reused.
    pub fn lose(&mut self, buffer: &IoBuffer) {
        self.pool.lose(buffer);
        self.lease.shrink(self.pool.in_use());
    }

    pub fn in_use(&self) -> usize {
        self.pool.in_use()
    }

    /// Frees all unused buffers and shells.
    pub fn trim(&mut self) {
        self.pool.trim();
    }
}

impl SendMemory for Buffers {
    /// Ignores the limit.
    fn copy_held(&mut self, shell: &IoBuffer, held: &[Range<usize>]) -> Option<IoBuffer> {
        let own = self.pool.copy_held(shell, held)?;
        self.lease.force(self.pool.in_use());
        Some(own)
    }

    fn give(&mut self, buffer: IoBuffer) {
        Buffers::give(self, buffer);
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
}
