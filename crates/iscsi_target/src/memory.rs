//! The memory of a session: what the commands of all its connections hold together is bounded.
//!
//! Connections are on different workers, so each leases memory in pieces that serve many commands; only a connection that
//! takes or gives back a piece touches what they share. One command at a time may get more than there is left: so the
//! session goes on, however large a command is and whoever holds the rest.

use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, Mutex};

use scsi_exec::WorkMemory;

use crate::shared::{Place, lock};

/// Pieces that the memory of a session is leased in: a connection keeps up to two that it does not need.
const PIECES: usize = 64;
const PIECE_MIN: usize = 4 << 10;

pub(crate) struct SessionMemory {
    piece: usize,
    /// Not leased. Below nothing when what had to be taken was more than was left.
    left: AtomicI64,
    /// A command has more than was left.
    overdrawn: AtomicBool,
    anyone_waits: AtomicBool,
    waiting: Mutex<Vec<Place>>,
    /// What commands work with beside the data that moves: as much again.
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

    fn give_back(&self, bytes: usize) {
        self.left.fetch_add(bytes as i64, Ordering::SeqCst);
        self.wake();
    }

    fn wake(&self) {
        if !self.anyone_waits.swap(false, Ordering::SeqCst) {
            return;
        }
        for place in std::mem::take(&mut *lock(&self.waiting)) {
            // It looks at what waits at the end of its iteration.
            place.send(|_, _| {});
        }
    }

    /// The connection is told when there may be more. It has to look again afterwards: some may have come just before.
    #[cold]
    pub fn wait(&self, place: &Place) {
        let mut waiting = lock(&self.waiting);
        if waiting.iter().all(|other| other.number != place.number) {
            waiting.push(place.clone());
        }
        drop(waiting);
        self.anyone_waits.store(true, Ordering::SeqCst);
    }
}

/// One connection's part.
pub(crate) struct MemoryShare {
    memory: Arc<SessionMemory>,
    bytes: usize,
    /// What the command that finds room where there is none has beyond that.
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

    /// Is there room for so many bytes in all? One command at a time finds room where there is none.
    #[inline]
    pub fn covers(&mut self, bytes: usize) -> bool {
        bytes <= self.bytes + self.overdrawn || self.extend(bytes) || self.overdraw(bytes)
    }

    /// Makes room for so many bytes in all, whether there is any or not.
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
        // Its own iteration lasts until what it took is given back.
        let first = self.overdrawn == 0 && !self.memory.overdrawn.swap(true, Ordering::SeqCst);
        if first {
            self.overdrawn = bytes - self.bytes;
        }
        first
    }

    /// No more than so many bytes are needed now: what is too much goes back.
    #[inline]
    pub fn shrink(&mut self, needed: usize) {
        let keep = needed + 2 * self.memory.piece;
        if self.overdrawn > 0
            || self.bytes > keep
            || self.memory.anyone_waits.load(Ordering::Relaxed)
        {
            self.give_back(needed);
        }
    }

    #[cold]
    fn give_back(&mut self, needed: usize) {
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
            self.memory.give_back(surplus);
        }
    }
}

impl Drop for MemoryShare {
    fn drop(&mut self) {
        self.give_back(0);
        self.memory.give_back(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_one_connection_has_the_others_have_not() {
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
    fn what_must_be_taken_is_owed() {
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
