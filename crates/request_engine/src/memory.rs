//! Memory limit of connections that belong together: those of an iSCSI session, or of an NBD export.
//!
//! The connections are on different workers, so each leases memory in pieces that last for many requests. Shared state is accessed only to
//! lease or return a piece. One request at a time may exceed the limit. The connections therefore make progress for requests of any size,
//! even if others hold all memory. All memory is also leased from the group (`memory_budget`).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicI64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use reactor::{Addressed, SourceHandle};

use crate::memory_budget::{GroupMemory, Limit, Member};

const PIECE_MIN: usize = 4 << 10;
/// Maximum number of connections that one return of memory wakes.
const WOKEN_MAX: usize = 16;

/// Connections that wait for memory.
struct Waiting<C> {
    /// By their tickets, which are in the order of arrival.
    tickets: BTreeMap<u64, SourceHandle<C>>,
    next_ticket: u64,
}

/// Memory limit of connections of type `C`.
pub struct SharedMemory<C> {
    group: Arc<GroupMemory>,
    piece: usize,
    /// Bytes that each connection may use without a lease.
    floor: usize,
    /// Bytes that are neither leased nor the floor of a connection. Negative if unavoidable allocations exceeded the limit.
    left: AtomicI64,
    /// A request exceeds the limit.
    overdrawn: AtomicBool,
    /// Number of connections that wait because of this limit, including those that were woken and have not tried again.
    short: AtomicUsize,
    /// There are connections to wake.
    anyone_waits: AtomicBool,
    /// The group wakes these connections.
    waits_in_group: AtomicBool,
    waiting: Mutex<Waiting<C>>,
}

impl<C: Addressed + 'static> SharedMemory<C> {
    /// Creates a limit of `bytes` bytes for at most `connections` connections. Each of them may use `floor` bytes at any time, which the
    /// group does not count.
    pub fn new(
        group: Arc<GroupMemory>,
        bytes: usize,
        connections: usize,
        floor: usize,
    ) -> Arc<SharedMemory<C>> {
        let leased = bytes.saturating_sub(floor.saturating_mul(connections));
        // A connection keeps up to two unused pieces. All together keep at most half of the memory.
        let pieces = connections.saturating_mul(4).max(1);
        Arc::new(SharedMemory {
            group,
            piece: (leased / pieces).max(PIECE_MIN),
            floor,
            left: AtomicI64::new(i64::try_from(bytes).unwrap_or(i64::MAX)),
            overdrawn: AtomicBool::new(false),
            short: AtomicUsize::new(0),
            anyone_waits: AtomicBool::new(false),
            waits_in_group: AtomicBool::new(false),
            waiting: Mutex::new(Waiting {
                tickets: BTreeMap::new(),
                next_ticket: 0,
            }),
        })
    }

    /// Returns true if a connection waits for memory of these connections, of their group or of the budget.
    #[inline]
    pub fn is_short(&self) -> bool {
        self.waiting_connections() > 0
    }

    /// Returns the number of connections that wait for memory that these connections could return.
    #[inline]
    fn waiting_connections(&self) -> usize {
        let limits = [Limit::Own, Limit::Group, Limit::Budget];
        let waiting = limits.map(|limit| self.short(limit).load(Ordering::Relaxed));
        waiting.iter().sum()
    }

    /// Returns the number of connections that wait because of a limit.
    #[inline]
    fn short(&self, limit: Limit) -> &AtomicUsize {
        match limit {
            Limit::Own => &self.short,
            Limit::Group => self.group.short(),
            Limit::Budget => self.group.short_of_budget(),
        }
    }

    fn waiting(&self) -> MutexGuard<'_, Waiting<C>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Leases `bytes` bytes.
    ///
    /// # Errors
    /// The limit that the lease would exceed.
    fn try_lease(&self, bytes: usize) -> Result<(), Limit> {
        let take = |left: i64| (left >= bytes as i64).then(|| left - bytes as i64);
        let taken = self
            .left
            .fetch_update(Ordering::SeqCst, Ordering::SeqCst, take);
        taken.map_err(|_| Limit::Own)?;
        let leased = self.group.try_lease(bytes);
        if leased.is_err() {
            self.left.fetch_add(bytes as i64, Ordering::SeqCst);
        }
        leased
    }

    fn release(&self, bytes: usize) {
        self.left.fetch_add(bytes as i64, Ordering::SeqCst);
        self.group.release(bytes);
        self.wake();
    }

    /// Lets one request exceed the limit by `bytes` bytes. Returns `None` if another one does.
    fn try_overdraw(&self, bytes: usize) -> Option<Excess> {
        if self.overdrawn.swap(true, Ordering::SeqCst) {
            return None;
        }
        let is_leased = self.group.try_lease(bytes).is_ok();
        if is_leased || self.group.try_overdraw() {
            return Some(Excess { bytes, is_leased });
        }
        self.overdrawn.store(false, Ordering::SeqCst);
        None
    }

    fn end_overdraft(&self, excess: &Excess) {
        self.overdrawn.store(false, Ordering::SeqCst);
        match excess.is_leased {
            true => self.group.release(excess.bytes),
            false => self.group.end_overdraft(),
        }
        self.wake();
    }

    /// Has the group wake these connections when it returns memory.
    fn wait_in_group(self: &Arc<Self>) {
        if !self.waits_in_group.swap(true, Ordering::SeqCst) {
            let member: Weak<SharedMemory<C>> = Arc::downgrade(self);
            self.group.wait(member);
        }
    }

    /// Wakes the connections that have waited longest. A connection that still gets no memory waits again, with its ticket.
    fn wake(&self) {
        if !self.anyone_waits.load(Ordering::SeqCst) {
            return;
        }
        let mut waiting = self.waiting();
        let first = std::iter::from_fn(|| waiting.tickets.pop_first());
        let woken: Vec<_> = first.take(WOKEN_MAX).collect();
        self.set_anyone_waits(&waiting);
        drop(waiting);
        for (_, handle) in woken {
            // At the end of its iteration the connection checks its waiting requests.
            handle.send(|_, _| {});
        }
    }

    fn set_anyone_waits(&self, waiting: &Waiting<C>) {
        self.anyone_waits
            .store(!waiting.tickets.is_empty(), Ordering::SeqCst);
    }
}

impl<C: Addressed + 'static> Member for SharedMemory<C> {
    fn wake(&self) {
        self.waits_in_group.store(false, Ordering::SeqCst);
        SharedMemory::wake(self);
    }
}

/// Memory of the one request that exceeds the limit.
#[derive(Debug)]
struct Excess {
    bytes: usize,
    /// The bytes are leased from the group.
    is_leased: bool,
}

/// One connection's share.
pub struct MemoryShare<C: Addressed + 'static> {
    memory: Arc<SharedMemory<C>>,
    /// Bytes that the connection may use: its leases and the floor.
    bytes: usize,
    /// Memory of the one request that may exceed the limit.
    excess: Option<Excess>,
    /// Limit that the last lease would have exceeded.
    refused_by: Limit,
    /// Limit that the connection is counted as waiting for, until memory was available.
    waits_for: Option<Limit>,
    /// Place among the waiting connections.
    ticket: Option<u64>,
}

impl<C: Addressed + 'static> MemoryShare<C> {
    /// Creates the share of a further connection.
    pub fn new(memory: Arc<SharedMemory<C>>) -> MemoryShare<C> {
        memory.left.fetch_sub(memory.floor as i64, Ordering::SeqCst);
        MemoryShare {
            bytes: memory.floor,
            memory,
            excess: None,
            refused_by: Limit::Own,
            waits_for: None,
            ticket: None,
        }
    }

    /// Returns the limit of the group.
    pub fn memory(&self) -> &Arc<SharedMemory<C>> {
        &self.memory
    }

    /// Returns true if the connection uses memory that others could use.
    pub fn is_above_floor(&self) -> bool {
        self.excess.is_some() || self.bytes > self.memory.floor
    }

    /// Returns true if other connections wait for memory and this one uses more than its guaranteed part.
    pub fn delays_others(&self) -> bool {
        let own = usize::from(self.is_waiting());
        self.memory.waiting_connections() > own && self.is_above_floor()
    }

    /// Returns true if the connection waits for memory.
    pub fn is_waiting(&self) -> bool {
        self.waits_for.is_some()
    }

    /// Returns true if the connection waits because of the limit of its group or of the budget, not of connections that belong together.
    pub fn waits_beyond_own_limit(&self) -> bool {
        self.waits_for.is_some_and(|limit| limit != Limit::Own)
    }

    /// Ends the wait for memory. Wakes the next connections in place of this one.
    pub fn give_up(&mut self) {
        if self.is_waiting() {
            self.pass_on();
        }
    }

    /// Returns true if `bytes` in total are reserved.
    #[inline]
    pub fn has(&self, bytes: usize) -> bool {
        bytes <= self.bytes + self.overdrawn()
    }

    #[inline]
    fn overdrawn(&self) -> usize {
        self.excess.as_ref().map_or(0, |excess| excess.bytes)
    }

    /// Reserves `bytes` in total and returns true if they are available. One request at a time may exceed the limit.
    #[inline]
    pub fn covers(&mut self, bytes: usize) -> bool {
        if self.has(bytes) {
            self.give_up();
            return true;
        }
        self.extend(bytes) || self.overdraw(bytes)
    }

    /// Reserves `bytes` in total, even above the limit.
    #[inline]
    pub fn force(&mut self, bytes: usize) {
        if !self.has(bytes) && !self.extend(bytes) {
            let short = bytes - self.bytes - self.overdrawn();
            self.memory.left.fetch_sub(short as i64, Ordering::SeqCst);
            self.memory.group.force(short);
            self.bytes += short;
        }
    }

    #[cold]
    fn extend(&mut self, bytes: usize) -> bool {
        let short = bytes - self.bytes - self.overdrawn();
        let pieces = short.next_multiple_of(self.memory.piece);
        for bytes in [pieces, short] {
            match self.memory.try_lease(bytes) {
                Ok(()) => {
                    self.bytes += bytes;
                    self.stop_waiting();
                    return true;
                }
                Err(limit) => self.refused_by = limit,
            }
        }
        false
    }

    #[cold]
    fn overdraw(&mut self, bytes: usize) -> bool {
        if self.excess.is_some() || self.is_behind_others() {
            return false;
        }
        // The turn of a connection lasts until it has returned the excess.
        self.excess = self.memory.try_overdraw(bytes - self.bytes);
        if self.excess.is_some() {
            self.stop_waiting();
        }
        self.excess.is_some()
    }

    fn end_overdraft(&mut self) {
        if let Some(excess) = self.excess.take() {
            self.memory.end_overdraft(&excess);
        }
    }

    /// Returns true if other connections have waited longer.
    fn is_behind_others(&self) -> bool {
        let waiting = self.memory.waiting();
        let first = waiting.tickets.first_key_value();
        first.is_some_and(|(first, _)| self.ticket.is_none_or(|own| *first < own))
    }

    /// Wakes the connection when memory may be available. The caller must check again afterwards: memory may have been returned just
    /// before.
    #[cold]
    pub fn wait(&mut self, handle: &SourceHandle<C>) {
        self.count_wait();
        let mut waiting = self.memory.waiting();
        let ticket = *self.ticket.get_or_insert_with(|| {
            waiting.next_ticket += 1;
            waiting.next_ticket
        });
        waiting.tickets.insert(ticket, handle.clone());
        self.memory.set_anyone_waits(&waiting);
        drop(waiting);
        self.memory.wait_in_group();
    }

    /// Counts the connection as waiting for the limit that the last lease would have exceeded, and no longer for an earlier one.
    fn count_wait(&mut self) {
        let limit = self.refused_by;
        let earlier = self.waits_for.replace(limit);
        if earlier != Some(limit) {
            self.memory.short(limit).fetch_add(1, Ordering::SeqCst);
            self.uncount_wait(earlier);
        }
    }

    fn uncount_wait(&self, limit: Option<Limit>) {
        if let Some(limit) = limit {
            self.memory.short(limit).fetch_sub(1, Ordering::SeqCst);
        }
    }

    /// Wakes the next connections, because this one was woken and does not need the memory.
    #[cold]
    fn pass_on(&mut self) {
        self.stop_waiting();
        self.memory.wake();
    }

    fn stop_waiting(&mut self) {
        let limit = self.waits_for.take();
        self.uncount_wait(limit);
        if let Some(ticket) = self.ticket.take() {
            let mut waiting = self.memory.waiting();
            waiting.tickets.remove(&ticket);
            self.memory.set_anyone_waits(&waiting);
        }
    }

    /// Returns memory beyond `needed` bytes, except for spare pieces.
    #[inline]
    pub fn shrink(&mut self, needed: usize) {
        let keep = needed + 2 * self.memory.piece;
        if self.excess.is_some() || self.bytes > keep || self.memory.is_short() {
            let spare = match self.memory.is_short() {
                true => 0,
                false => self.memory.piece,
            };
            self.release(needed, spare);
        }
    }

    /// Returns all memory beyond `needed` bytes.
    pub fn give_back(&mut self, needed: usize) {
        self.release(needed, 0);
    }

    #[cold]
    fn release(&mut self, needed: usize, spare: usize) {
        if needed <= self.bytes {
            self.end_overdraft();
        }
        let keep = (needed + spare).max(self.memory.floor);
        let surplus = self.bytes.saturating_sub(keep);
        if surplus > 0 {
            self.bytes -= surplus;
            self.memory.release(surplus);
        }
    }
}

impl<C: Addressed + 'static> Drop for MemoryShare<C> {
    fn drop(&mut self) {
        self.stop_waiting();
        self.end_overdraft();
        self.memory
            .left
            .fetch_add(self.memory.floor as i64, Ordering::SeqCst);
        // Also wakes the next connection, if this one was woken and did not take the memory.
        self.memory.release(self.bytes - self.memory.floor);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_budget::MemoryBudget;
    use crate::testing::{NoConnection, alone};

    fn shares<const N: usize>(
        memory: &Arc<SharedMemory<NoConnection>>,
    ) -> [MemoryShare<NoConnection>; N] {
        std::array::from_fn(|_| MemoryShare::new(memory.clone()))
    }

    #[test]
    fn memory_of_one_connection_is_unavailable_to_others() {
        let memory = alone(1 << 20, 16, 0);
        let [mut a, mut b] = shares(&memory);
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
    fn connections_of_a_hung_disk_leave_memory_to_others() {
        let budget = MemoryBudget::new(384 << 20);
        let mut exports = [0; 2].map(|_| {
            let group = GroupMemory::new(budget.clone());
            shares::<12>(&SharedMemory::new(group, 384 << 20, 384, 0))
        });
        let [hung, healthy] = &mut exports;
        let served = |shares: &mut [MemoryShare<NoConnection>], bytes| {
            let served = shares.iter_mut().map(|share| share.covers(bytes));
            served.filter(|served| *served).count()
        };
        // Three quarters of the limit, and one request beyond it.
        assert_eq!(served(hung, 32 << 20), 10);
        for _ in 0..100 {
            assert_eq!(served(&mut healthy[..9], 8 << 20), 9);
            assert_eq!(served(&mut healthy[9..], 32 << 20), 1);
            healthy.iter_mut().for_each(|share| share.shrink(0));
        }
        drop(exports);
        let [mut all] = shares(&SharedMemory::new(
            GroupMemory::new(budget),
            1 << 40,
            512,
            0,
        ));
        assert!(all.extend(288 << 20));
    }

    /// Creates two groups of one budget, each with one limit, and fills the first up to its part of the budget.
    fn filled_and_idle_group(budget: usize) -> [Vec<MemoryShare<NoConnection>>; 2] {
        let budget_of_both = MemoryBudget::new(budget);
        let mut groups = [0; 2].map(|_| {
            let group = GroupMemory::new(budget_of_both.clone());
            Vec::from(shares::<4>(&SharedMemory::new(group, budget, 4, 0)))
        });
        assert!(groups[0][0].extend(budget / 4 * 3));
        groups
    }

    #[test]
    fn a_group_at_its_part_leaves_pools_of_other_groups_alone() {
        let [mut hung, healthy] = filled_and_idle_group(64 << 20);
        assert!(!hung[1].extend(1 << 20));
        hung[1].count_wait();
        assert!(hung[1].waits_beyond_own_limit());
        assert!(hung[0].memory().is_short() && hung[0].delays_others());
        assert!(!healthy[0].memory().is_short());
        hung[1].give_up();
        assert!(!hung[0].memory().is_short());
    }

    #[test]
    fn a_wait_follows_the_limit_that_is_exceeded_now() {
        let [mut others, mut waiting] = filled_and_idle_group(64 << 20);
        let is_short =
            |groups: [&MemoryShare<NoConnection>; 2]| groups.map(|share| share.memory().is_short());
        assert!(!waiting[0].extend(17 << 20));
        waiting[0].count_wait();
        assert_eq!(is_short([&others[0], &waiting[0]]), [true, true]);
        others[0].shrink(0);
        assert!(!waiting[0].extend(60 << 20));
        waiting[0].count_wait();
        assert_eq!(is_short([&others[0], &waiting[0]]), [false, true]);
        assert!(waiting[0].covers(17 << 20) && !waiting[0].is_waiting());
        assert_eq!(is_short([&others[0], &waiting[0]]), [false, false]);
    }

    #[test]
    fn forced_allocation_becomes_a_debt() {
        let memory = alone(64 << 10, 16, 0);
        let [mut a, mut b] = shares(&memory);
        a.force(1 << 20);
        assert!(b.covers(1) && b.overdrawn() > 0 && !b.covers(2));
        b.shrink(0);
        a.shrink(0);
        assert!(b.covers(32 << 10) && b.overdrawn() == 0);
    }

    #[test]
    fn small_changes_touch_nothing_that_is_shared() {
        let memory = alone(32 << 20, 16, 0);
        let [mut a] = shares(&memory);
        a.force(4096);
        let left = memory.left.load(Ordering::SeqCst);
        for _ in 0..100 {
            assert!(a.covers(64 << 10));
            a.shrink(0);
        }
        assert_eq!(memory.left.load(Ordering::SeqCst), left);
    }

    #[test]
    fn each_connection_has_its_floor_whatever_others_hold() {
        let memory = alone(1 << 20, 4, 64 << 10);
        let [mut a, mut b, mut c, d] = shares(&memory);
        assert!(a.covers((1 << 20) - (3 << 16)) && b.covers(8 << 20));
        assert!(c.covers(64 << 10) && !c.is_above_floor());
        assert!(!c.covers((64 << 10) + 1));
        b.shrink(0);
        assert!(c.covers(8 << 20), "one request may exceed the limit");
        drop((a, b, c, d));
        assert_eq!(memory.left.load(Ordering::SeqCst), 1 << 20);
    }
}
