//! Memory limit of a session, for the commands of all its connections.
//!
//! The connections are on different workers, so each leases memory in pieces that last for many commands. Shared state is accessed only to
//! lease or return a piece. One command at a time may exceed the limit. The session therefore makes progress for commands of any size, even
//! if other connections hold all memory.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use scsi_exec::WorkMemory;

use crate::shared::{ConnectionHandle, lock};

/// Number of pieces of a session's memory. A connection keeps up to two unused pieces.
const PIECES: usize = 64;
const PIECE_MIN: usize = 4 << 10;

pub(crate) struct SessionMemory {
    piece: usize,
    /// Bytes not leased. Negative if unavoidable allocations exceeded the limit.
    left: AtomicI64,
    /// A command exceeds the limit.
    overdrawn: AtomicBool,
    anyone_waits: AtomicBool,
    waiting: Mutex<Vec<ConnectionHandle>>,
    /// Working memory of commands besides their data, with the same limit.
    pub work: Arc<WorkMemory>,
}

impl SessionMemory {
    pub fn new(limit: usize) -> Arc<SessionMemory> {
        Arc::new(SessionMemory {
            piece: (limit / PIECES).max(PIECE_MIN),
            left: AtomicI64::new(i64::try_from(limit).unwrap_or(i64::MAX)),
            overdrawn: AtomicBool::new(false),
            anyone_waits: AtomicBool::new(false),
            waiting: Mutex::default(),
            work: WorkMemory::new(limit),
        })
    }

    fn try_lease(&self, bytes: usize) -> bool {
        let take = |left: i64| (left >= bytes as i64).then(|| left - bytes as i64);
        let taken = self
            .left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        taken.is_ok()
    }

    fn release(&self, bytes: usize) {
        self.left.fetch_add(bytes as i64, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if !self.anyone_waits.swap(false, Ordering::SeqCst) {
            return;
        }
        for handle in std::mem::take(&mut *lock(&self.waiting)) {
            // At the end of its iteration the connection checks its waiting commands.
            handle.send(|_, _| {});
        }
    }

    /// Wakes the connection when memory may be available. The caller must check again afterwards: memory may have been returned just
    /// before.
    #[cold]
    pub fn wait(&self, handle: &ConnectionHandle) {
        let mut waiting = lock(&self.waiting);
        if waiting.iter().all(|other| other.number != handle.number) {
            waiting.push(handle.clone());
        }
        drop(waiting);
        self.anyone_waits.store(true, Ordering::SeqCst);
    }
}

/// One connection's share.
pub(crate) struct MemoryShare {
    memory: Arc<SessionMemory>,
    bytes: usize,
    /// Bytes beyond the limit for the one command that may exceed it.
    overdrawn: usize,
}

impl MemoryShare {
    pub fn new(memory: Arc<SessionMemory>) -> MemoryShare {
        MemoryShare {
            memory,
            bytes: 0,
            overdrawn: 0,
        }
    }

    pub fn memory(&self) -> &Arc<SessionMemory> {
        &self.memory
    }

    /// Reserves `bytes` in total and returns true if they are available. One command at a time may exceed the limit.
    #[inline]
    pub fn covers(&mut self, bytes: usize) -> bool {
        bytes <= self.bytes + self.overdrawn || self.extend(bytes) || self.overdraw(bytes)
    }

    /// Reserves `bytes` in total, even above the limit.
    #[inline]
    pub fn force(&mut self, bytes: usize) {
        if bytes > self.bytes + self.overdrawn && !self.extend(bytes) {
            let short = bytes - self.bytes - self.overdrawn;
            self.memory.left.fetch_sub(short as i64, Ordering::SeqCst);
            self.bytes += short;
        }
    }

    #[cold]
    fn extend(&mut self, bytes: usize) -> bool {
        let short = bytes - self.bytes - self.overdrawn;
        let pieces = short.next_multiple_of(self.memory.piece);
        let taken = [pieces, short]
            .into_iter()
            .find(|bytes| self.memory.try_lease(*bytes));
        self.bytes += taken.unwrap_or(0);
        taken.is_some()
    }

    #[cold]
    fn overdraw(&mut self, bytes: usize) -> bool {
        // The turn of a connection lasts until it has returned the excess.
        let first = self.overdrawn == 0 && !self.memory.overdrawn.swap(true, Ordering::SeqCst);
        if first {
            self.overdrawn = bytes - self.bytes;
        }
        first
    }

    /// Returns memory beyond `needed` bytes, except for spare pieces.
    #[inline]
    pub fn shrink(&mut self, needed: usize) {
        let keep = needed + 2 * self.memory.piece;
        if self.overdrawn > 0
            || self.bytes > keep
            || self.memory.anyone_waits.load(Ordering::Relaxed)
        {
            self.release(needed);
        }
    }

    #[cold]
    fn release(&mut self, needed: usize) {
        if self.overdrawn > 0 && needed <= self.bytes {
            self.overdrawn = 0;
            self.memory.overdrawn.store(false, Ordering::SeqCst);
            self.memory.wake();
        }
        let spare = match self.memory.anyone_waits.load(Ordering::SeqCst) {
            true => 0,
            false => self.memory.piece,
        };
        let surplus = self.bytes.saturating_sub(needed + spare);
        if surplus > 0 {
            self.bytes -= surplus;
            self.memory.release(surplus);
        }
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.release(0);
        self.memory.release(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_one_connection_is_unavailable_to_others() {
        let memory = SessionMemory::new(1 << 20);
        let (mut a, mut b) = (
            MemoryShare::new(memory.clone()),
            MemoryShare::new(memory.clone()),
        );
        assert!(a.covers(1 << 20));
        assert!(b.covers(4096), "one more than there is");
        assert!(!a.covers((1 << 20) + 1), "and no other");
        b.shrink(0);
        assert!(a.covers((1 << 20) + 1), "the next");
        a.shrink(0);
        assert!(b.covers(900 << 10));
        drop((a, b));
        assert_eq!(memory.left.load(Ordering::SeqCst), 1 << 20);
        assert!(!memory.overdrawn.load(Ordering::SeqCst));
    }

    #[test]
    fn forced_allocation_becomes_a_debt() {
        let memory = SessionMemory::new(64 << 10);
        let (mut a, mut b) = (
            MemoryShare::new(memory.clone()),
            MemoryShare::new(memory.clone()),
        );
        a.force(1 << 20);
        assert!(b.covers(1) && b.overdrawn > 0 && !b.covers(2));
        b.shrink(0);
        a.shrink(0);
        assert!(b.covers(32 << 10) && b.overdrawn == 0);
    }

    #[test]
    fn small_changes_touch_nothing_that_is_shared() {
        let memory = SessionMemory::new(32 << 20);
        let mut a = MemoryShare::new(memory.clone());
        a.force(4096);
        let left = memory.left.load(Ordering::SeqCst);
        for _ in 0..100 {
            assert!(a.covers(64 << 10));
            a.shrink(0);
        }
        assert_eq!(memory.left.load(Ordering::SeqCst), left);
    }
}
