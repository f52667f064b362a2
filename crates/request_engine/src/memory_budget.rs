//! Memory limit of a server, shared by groups of connections: the exports of an NBD server, or the targets of an iSCSI server.
//!
//! A disk that does not answer keeps the memory of its requests. A group therefore gets at most three quarters of the memory that the other
//! groups leave, and one request of each group may exceed the limit. A group with healthy disks therefore makes progress, even if others
//! hold all memory. Shared state is accessed only to lease or return memory, in pieces that last for many requests.
//!
//! Rejected: an equal share for each group. Most groups are idle, and one busy disk would get little memory.

use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Maximum ratio of the memory of a group to the memory that it leaves free.
const GROUP_RATIO: i64 = 3;

/// Memory limit of a server.
#[derive(Debug)]
pub struct MemoryBudget {
    bytes: i64,
    /// Bytes not leased. Negative if unavoidable allocations exceeded the limit.
    left: AtomicI64,
    short: Short,
}

/// Number of connections that wait because a limit is reached. Each request of every connection reads it, so it has a cache line of its own.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Short(AtomicUsize);

impl MemoryBudget {
    /// Creates a limit of `bytes` bytes.
    pub fn new(bytes: usize) -> Arc<MemoryBudget> {
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        Arc::new(MemoryBudget {
            bytes,
            left: AtomicI64::new(bytes),
            short: Short::default(),
        })
    }

    #[cfg(test)]
    pub(crate) fn left(&self) -> i64 {
        self.left.load(Ordering::SeqCst)
    }
}

/// A limit that a lease would exceed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Limit {
    /// Limit of connections that belong together.
    Own,
    /// Part of the budget that a group may have, if the group holds at least as much as all others. Memory of other groups would not help
    /// a group with a hung disk.
    Group,
    /// Limit of all groups: the budget is used up, or other groups hold more than this one.
    Budget,
}

/// Connections of a group that share a limit and may wait for memory of the group.
pub(crate) trait Member: Send + Sync {
    /// Wakes connections that wait for memory.
    fn wake(&self);
}

/// Memory of one group.
pub struct GroupMemory {
    budget: Arc<MemoryBudget>,
    /// Bytes leased from the budget.
    held: AtomicI64,
    short: Short,
    /// A request exceeds the budget.
    overdrawn: AtomicBool,
    /// `waiting` is not empty.
    anyone_waits: AtomicBool,
    waiting: Mutex<Vec<Weak<dyn Member>>>,
}

impl Default for GroupMemory {
    /// Creates the only group of an unlimited budget.
    fn default() -> Self {
        GroupMemory {
            budget: MemoryBudget::new(usize::MAX),
            held: AtomicI64::new(0),
            short: Short::default(),
            overdrawn: AtomicBool::new(false),
            anyone_waits: AtomicBool::new(false),
            waiting: Mutex::default(),
        }
    }
}

impl GroupMemory {
    /// Creates a group without memory.
    pub fn new(budget: Arc<MemoryBudget>) -> Arc<GroupMemory> {
        Arc::new(GroupMemory {
            budget,
            ..GroupMemory::default()
        })
    }

    fn waiting(&self) -> MutexGuard<'_, Vec<Weak<dyn Member>>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the counter of connections that wait because the group has its part of the budget.
    #[inline]
    pub(crate) fn short(&self) -> &AtomicUsize {
        &self.short.0
    }

    /// Returns the counter of connections that wait because of the limit of all groups.
    #[inline]
    pub(crate) fn short_of_budget(&self) -> &AtomicUsize {
        &self.budget.short.0
    }

    /// Leases `bytes` bytes if the group then holds at most its part of the budget.
    ///
    /// # Errors
    /// The limit that the lease would exceed.
    pub(crate) fn try_lease(&self, bytes: usize) -> Result<(), Limit> {
        let bytes = bytes as i64;
        let own = self.held.load(Ordering::SeqCst);
        let held = own.saturating_add(bytes);
        let take = |left: i64| {
            let left = left.saturating_sub(bytes);
            (left >= 0 && held / GROUP_RATIO <= left).then_some(left)
        };
        let taken = self
            .budget
            .left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        taken.map_err(|left| {
            let others = self.budget.bytes - left - own;
            match left < bytes || own < others {
                true => Limit::Budget,
                false => Limit::Group,
            }
        })?;
        self.held.fetch_add(bytes, Ordering::SeqCst);
        Ok(())
    }

    /// Leases `bytes` bytes, even above the limit.
    pub(crate) fn force(&self, bytes: usize) {
        self.budget.left.fetch_sub(bytes as i64, Ordering::SeqCst);
        self.held.fetch_add(bytes as i64, Ordering::SeqCst);
    }

    /// Returns a lease.
    pub(crate) fn release(&self, bytes: usize) {
        self.held.fetch_sub(bytes as i64, Ordering::SeqCst);
        self.budget.left.fetch_add(bytes as i64, Ordering::SeqCst);
        self.wake();
    }

    /// Returns true if no other request of the group exceeds the budget. The caller may exceed it until [`GroupMemory::end_overdraft`].
    pub(crate) fn try_overdraw(&self) -> bool {
        !self.overdrawn.swap(true, Ordering::SeqCst)
    }

    pub(crate) fn end_overdraft(&self) {
        self.overdrawn.store(false, Ordering::SeqCst);
        self.wake();
    }

    /// Wakes `member` when the group returns memory. The caller must check again afterwards.
    pub(crate) fn wait(&self, member: Weak<dyn Member>) {
        let mut waiting = self.waiting();
        waiting.push(member);
        self.anyone_waits.store(true, Ordering::SeqCst);
    }

    fn wake(&self) {
        if !self.anyone_waits.load(Ordering::SeqCst) {
            return;
        }
        let mut waiting = self.waiting();
        let members = std::mem::take(&mut *waiting);
        self.anyone_waits.store(false, Ordering::SeqCst);
        drop(waiting);
        for member in members.iter().filter_map(Weak::upgrade) {
            member.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_group_leaves_memory_to_the_others() {
        let budget = MemoryBudget::new(64 << 20);
        let groups: [Arc<GroupMemory>; 3] =
            std::array::from_fn(|_| GroupMemory::new(budget.clone()));
        let filled = groups.each_ref().map(|group| {
            let count = (0..1000)
                .take_while(|_| group.try_lease(1 << 20).is_ok())
                .count();
            assert!(group.try_overdraw() && !group.try_overdraw());
            count
        });
        assert_eq!(filled, [48, 12, 3]);
        groups[0].release(48 << 20);
        assert!(groups[2].try_lease(20 << 20).is_ok());
    }

    #[test]
    fn a_group_with_less_than_the_others_waits_for_their_memory() {
        let budget = MemoryBudget::new(384 << 20);
        let [large, small] = [0; 2].map(|_| GroupMemory::new(budget.clone()));
        large.try_lease(288 << 20).unwrap();
        small.try_lease(64 << 20).unwrap();
        assert_eq!(small.try_lease(16 << 20), Err(Limit::Budget));
        assert_eq!(large.try_lease(16 << 20), Err(Limit::Group));
        // The large group has freed its pools.
        large.release(256 << 20);
        assert_eq!(small.try_lease(16 << 20), Ok(()));
    }
}
