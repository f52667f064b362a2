//! Memory for request data of one connection: a pool, and the limit that it shares with other connections (`memory`).

use std::ops::Range;
use std::sync::Arc;

use guest_memory::IoBuffer;
use reactor::{Addressed, SourceHandle};

use crate::memory::{MemoryShare, SharedMemory};
use crate::{BufferPool, SendMemory, buffer_size};

/// Buffers of one connection, counted in a [`SharedMemory`]: those in use, and the free ones that the pool keeps.
pub struct Buffers<C: Addressed + 'static> {
    pool: BufferPool,
    lease: MemoryShare<C>,
    /// Bytes that [`Buffers::reserve`] has set aside.
    reserved: usize,
}

impl<C: Addressed + 'static> Buffers<C> {
    /// Creates an empty pool.
    pub fn new(memory: Arc<SharedMemory<C>>) -> Buffers<C> {
        Buffers {
            pool: BufferPool::default(),
            lease: MemoryShare::new(memory),
            reserved: 0,
        }
    }

    /// Counts all memory in `memory` from now on.
    pub fn count_in(&mut self, memory: Arc<SharedMemory<C>>) {
        self.lease = MemoryShare::new(memory);
        self.lease.force(self.pool.held() + self.reserved);
    }

    /// Wakes the connection at `handle` when memory may be available. The caller must try once more after this call.
    pub fn wait(&mut self, handle: &SourceHandle<C>) {
        self.lease.wait(handle);
    }

    /// Returns true if the connection waits for memory.
    pub fn is_waiting(&self) -> bool {
        self.lease.is_waiting()
    }

    /// Returns true if the connection waits because of the limit of its group or of the budget, not of connections that belong together.
    pub fn waits_beyond_own_limit(&self) -> bool {
        self.lease.waits_beyond_own_limit()
    }

    /// Ends the wait for memory. Wakes the next connections in place of this one.
    pub fn give_up(&mut self) {
        self.lease.give_up();
    }

    /// Returns true if others wait for memory and this connection uses more than its guaranteed part.
    pub fn delays_others(&self) -> bool {
        self.lease.delays_others()
    }

    /// Returns true if `length` more bytes are available. The caller must take or reserve them before other memory.
    #[inline]
    pub fn has(&mut self, length: usize) -> bool {
        let more = self.reserved + buffer_size(length);
        let held = self.pool.held_with(more);
        self.lease.covers(held)
            || (self.pool.free_unused() && self.lease.covers(self.pool.in_use() + more))
    }

    /// Sets the memory for a buffer of `length` bytes aside, for [`Buffers::take_reserved`].
    #[inline]
    pub fn reserve(&mut self, length: usize) {
        self.reserved += buffer_size(length);
    }

    /// Ends the reservation of memory that is not needed.
    #[inline]
    pub fn give_reserved(&mut self, length: usize) {
        self.reserved -= buffer_size(length);
    }

    /// Takes a buffer that was reserved.
    #[inline]
    pub fn take_reserved(&mut self, length: usize) -> IoBuffer {
        self.give_reserved(length);
        self.take_anyway(length)
    }

    /// Takes a buffer of at least `length` bytes, even above the limit. For memory that [`Buffers::has`] has found available, or that has
    /// another limit.
    #[inline]
    pub fn take_anyway(&mut self, length: usize) -> IoBuffer {
        let buffer = self.pool.take(length);
        if !self.lease.has(self.pool.held()) {
            // Free buffers of other sizes were counted for this one.
            self.pool.free_unused();
        }
        self.lease.force(self.pool.held());
        buffer
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
        self.shrink();
    }

    /// Stops counting a buffer that the kernel may still write to. It is not reused.
    pub fn lose(&mut self, buffer: &IoBuffer) {
        self.pool.lose(buffer);
        self.shrink();
    }

    #[inline]
    fn shrink(&mut self) {
        if self.lease.memory().is_short() {
            self.pool.free_unused();
        }
        self.lease.shrink(self.pool.held() + self.reserved);
    }

    /// Returns the bytes of all buffers in use, and those that are reserved.
    #[inline]
    pub fn in_use(&self) -> usize {
        self.pool.in_use() + self.reserved
    }

    /// Frees all unused buffers and shells, and returns all memory above the floor that is not in use, if connections wait for memory that
    /// this one could return, or if no buffer is in use: memory of an idle connection reduces the parts of other groups.
    pub fn reclaim(&mut self) {
        if self.in_use() == 0 || self.lease.memory().is_short() {
            self.pool.trim();
            self.lease.give_back(self.pool.held() + self.reserved);
        }
    }

    /// Frees all unused buffers and shells.
    pub fn trim(&mut self) {
        self.pool.trim();
        self.lease.shrink(self.pool.held() + self.reserved);
    }
}

impl<C: Addressed + 'static> SendMemory for Buffers<C> {
    /// Ignores the limit.
    fn copy_held(&mut self, shell: &IoBuffer, held: &[Range<usize>]) -> Option<IoBuffer> {
        let own = self.pool.copy_held(shell, held)?;
        self.lease.force(self.pool.held());
        Some(own)
    }

    fn give(&mut self, buffer: IoBuffer) {
        Buffers::give(self, buffer);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_budget::{GroupMemory, MemoryBudget};
    use crate::testing::{NoConnection, alone};

    fn buffers(bytes: usize) -> Buffers<NoConnection> {
        Buffers::new(alone(bytes, 16, 0))
    }

    fn take(buffers: &mut Buffers<NoConnection>, length: usize) -> Option<IoBuffer> {
        buffers.has(length).then(|| buffers.take_anyway(length))
    }

    #[test]
    fn memory_in_use_is_bounded_but_one_large_buffer_gets_through() {
        let mut buffers = buffers(64 << 10);
        // One buffer may exceed the limit; the rest stays available to others.
        let large = take(&mut buffers, 2 << 20).unwrap();
        let held: Vec<_> = (0..16).map(|_| take(&mut buffers, 4096).unwrap()).collect();
        assert!(take(&mut buffers, 1).is_none());
        held.into_iter().for_each(|buffer| buffers.give(buffer));
        buffers.give(large);
        let held: Vec<_> = (0..17).map(|_| take(&mut buffers, 4096).unwrap()).collect();
        assert!(take(&mut buffers, 1).is_none());
        assert_eq!(buffers.take_anyway(1).total_len(), 4096);
        held.into_iter().for_each(|buffer| buffers.give(buffer));
        assert!(take(&mut buffers, 1).is_some());
    }

    #[test]
    fn free_buffers_are_counted_until_others_need_the_memory() {
        let memory = alone(8 << 20, 16, 0);
        let [mut a, mut b]: [Buffers<NoConnection>; 2] =
            std::array::from_fn(|_| Buffers::new(memory.clone()));
        let held: Vec<_> = (0..8).map(|_| take(&mut a, 1 << 20).unwrap()).collect();
        held.into_iter().for_each(|buffer| a.give(buffer));
        // The free buffers of `a` fill the limit; the one request above it is taken.
        let _first = take(&mut b, 1 << 20).unwrap();
        assert!(take(&mut b, 1 << 20).is_none());
        a.trim();
        let many: Vec<_> = (0..7).filter_map(|_| take(&mut b, 1 << 20)).collect();
        assert_eq!(many.len(), 7);
    }

    #[test]
    fn an_idle_connection_keeps_no_lease_if_others_need_memory() {
        let budget = MemoryBudget::new(256 << 20);
        let [mut idle, mut busy] = [0; 2].map(|_| {
            let group = GroupMemory::new(budget.clone());
            let memory = SharedMemory::new(group, 16 << 20, 4, 256 << 10);
            Buffers::<NoConnection>::new(memory)
        });
        let buffer = take(&mut idle, 300 << 10).unwrap();
        idle.give(buffer);
        assert!(budget.left() < 256 << 20, "a spare piece");
        idle.reclaim();
        assert_eq!(budget.left(), 256 << 20);
        let buffer = take(&mut busy, 1 << 20).unwrap();
        busy.reclaim();
        assert!(budget.left() < 256 << 20, "in use");
        busy.give(buffer);
        busy.reclaim();
        assert_eq!(budget.left(), 256 << 20);
    }

    #[test]
    fn reserved_memory_is_not_available_twice() {
        let mut buffers = buffers(1 << 20);
        assert!(buffers.has(1 << 20));
        buffers.reserve(1 << 20);
        let large = take(&mut buffers, 1 << 20).unwrap();
        assert!(!buffers.has(1), "one request exceeds the limit already");
        let reserved = buffers.take_reserved(1 << 20);
        assert_eq!(buffers.in_use(), 2 << 20);
        buffers.give(reserved);
        buffers.give(large);
        assert!(buffers.has(1 << 20));
    }
}
