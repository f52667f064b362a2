//! Locks of ranges of a disk against all other reads and writes, on every transport and worker.
//!
//! Nearly always no range is held, as the disk's [`Conditions`] show, which every I/O loads anyway. An atomic task (COMPARE AND WRITE,
//! WRITE ATOMIC) acquires its range. Workers defer I/O that reads or changes it, and report when earlier I/O has ended; then the range is
//! granted. Therefore no read sees half of the task's write. Control plane: locks and messages, none per plain I/O.
//!
//! A closed disk admits only I/O of the operation that closed it, after all other I/O has ended: no earlier write lands on blocks that a
//! sanitize operation has already overwritten.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, PoisonError};

use block::{IoFlags, IoRequest};

use crate::conditions::{Condition, Conditions};
use crate::sync::{CountingArc, Mutex, MutexGuard};

/// Held by a worker until its earlier I/Os have ended. Dropping the last copy grants the range.
#[derive(Clone)]
pub struct Barrier {
    _last_barrier: CountingArc<LastBarrier>,
}

type GrantCallback = Box<dyn FnOnce(RangeLock) + Send>;

struct LastBarrier(Mutex<Option<DrainAction>>);

enum DrainAction {
    Grant(RangeLock, GrantCallback),
    /// I/O in flight at this closing has ended.
    Closed(Arc<RangeLocks>, u64),
}

impl LastBarrier {
    fn barrier(then: DrainAction) -> Barrier {
        Barrier {
            _last_barrier: CountingArc::new(LastBarrier(Mutex::new(Some(then)))),
        }
    }
}

impl Drop for LastBarrier {
    fn drop(&mut self) {
        let last = self
            .0
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        match last {
            Some(DrainAction::Grant(lease, on_granted)) => on_granted(lease),
            Some(DrainAction::Closed(locks, closing)) => locks.closing_drained(closing),
            None => {}
        }
    }
}

/// Decision whether an I/O may start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission {
    /// The I/O may start.
    Proceed,
    /// The I/O is deferred until [`Participant::reopened`].
    Defer,
    /// The I/O fails.
    Reject,
}

/// A worker's handle on the disk, for the range locks. Called from any thread; must not block.
pub trait Participant: Send + Sync {
    /// A range is being acquired: hold `barrier` until every read and change now in flight has ended.
    fn drain(&self, barrier: Barrier);

    /// A range was released, or closing has drained: retry deferred I/O.
    fn reopened(&self);
}

/// A request for a range, for [`RangeLocks::withdraw`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Acquisition(u64);

struct Waiting {
    key: u64,
    range: Range<u64>,
    on_granted: GrantCallback,
}

struct RangeLockState {
    next: u64,
    held: Vec<(u64, Range<u64>)>,
    waiting: VecDeque<Waiting>,
    members: Vec<(u64, Arc<dyn Participant>)>,
    /// Unit of ranges in bytes: a part of a device's block cannot be written alone.
    unit: u64,
    closed: Closed,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Closed {
    #[default]
    No,
    /// The closing with this number has not drained.
    Barrier(u64),
    Settled,
}

/// Range locks of a disk.
#[derive(Default)]
pub struct RangeLocks {
    /// Conditions of the disk, which show whether the disk is closed and whether a range is held.
    conditions: Arc<Conditions>,
    state: Mutex<RangeLockState>,
}

/// A held range; dropping it releases the range.
pub struct RangeLock {
    locks: Arc<RangeLocks>,
    key: u64,
}

/// Registration of a worker; dropping it removes the worker.
pub struct Membership {
    locks: Arc<RangeLocks>,
    key: u64,
}

impl Default for RangeLockState {
    fn default() -> RangeLockState {
        RangeLockState {
            next: 0,
            held: Vec::new(),
            waiting: VecDeque::new(),
            members: Vec::new(),
            unit: 1,
            closed: Closed::No,
        }
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl RangeLockState {
    /// Extends a range to whole units at both ends.
    fn extended(&self, range: &Range<u64>) -> Range<u64> {
        let start = range.start / self.unit * self.unit;
        let end = range.end.checked_next_multiple_of(self.unit);
        start..end.unwrap_or(u64::MAX)
    }

    fn members(&self) -> Vec<Arc<dyn Participant>> {
        let members = self.members.iter();
        members.map(|(_, member)| member.clone()).collect()
    }
}

impl RangeLocks {
    fn lock(&self) -> MutexGuard<'_, RangeLockState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn new(conditions: Arc<Conditions>) -> RangeLocks {
        RangeLocks {
            conditions,
            state: Mutex::default(),
        }
    }

    /// Sets the unit of ranges in bytes, while the caller holds the whole disk or it is not served yet.
    pub(crate) fn set_unit(&self, unit: u32) {
        let mut state = self.lock();
        let is_coarse = unit > block::SECTOR_BYTES;
        self.conditions.set(Condition::Coarse, is_coarse);
        state.unit = u64::from(unit.max(1));
        let waiting = std::mem::take(&mut state.waiting);
        let extended = waiting.into_iter().map(|waiting| Waiting {
            range: state.extended(&waiting.range),
            ..waiting
        });
        state.waiting = extended.collect();
    }

    /// Returns true if no range is held.
    pub fn is_open(&self) -> bool {
        !self.conditions.has(Condition::Locked)
    }

    /// Returns true if a part of this range is held.
    pub fn holds(&self, offset: u64, length: u64) -> bool {
        let range = offset..offset.saturating_add(length);
        self.lock()
            .held
            .iter()
            .any(|(_, held)| overlap(held, &range))
    }

    /// Returns the ranges held now.
    pub fn held(&self) -> Vec<Range<u64>> {
        let state = self.lock();
        state.held.iter().map(|(_, range)| range.clone()).collect()
    }

    /// Closes the disk. Deferred I/O is checked again, and fails.
    pub(crate) fn close(self: &Arc<Self>) {
        let mut state = self.lock();
        if state.closed != Closed::No {
            return;
        }
        state.next += 1;
        self.conditions.set(Condition::Closed, true);
        state.closed = Closed::Barrier(state.next);
        let barrier = LastBarrier::barrier(DrainAction::Closed(self.clone(), state.next));
        let members = state.members();
        drop(state);
        for member in members {
            member.drain(barrier.clone());
            member.reopened();
        }
    }

    fn closing_drained(&self, closing: u64) {
        let mut state = self.lock();
        if state.closed != Closed::Barrier(closing) {
            return;
        }
        state.closed = Closed::Settled;
        let members = state.members();
        drop(state);
        for member in members {
            member.reopened();
        }
    }

    pub(crate) fn reopen(&self) {
        let mut state = self.lock();
        state.closed = Closed::No;
        self.conditions.set(Condition::Closed, false);
        let members = state.members();
        drop(state);
        for member in members {
            member.reopened();
        }
    }

    /// Decides whether a closed disk admits this I/O. I/O of the closing operation waits for all other I/O. Called under
    /// [`Condition::Closed`].
    pub fn admit_closed(&self, request: &IoRequest) -> Admission {
        let closer = request.flags.has(IoFlags::CLOSER);
        match self.lock().closed {
            Closed::No => Admission::Proceed,
            Closed::Barrier(_) if closer => Admission::Defer,
            Closed::Settled if closer => Admission::Proceed,
            Closed::Barrier(_) | Closed::Settled => Admission::Reject,
        }
    }

    /// Registers a worker.
    pub fn join(self: &Arc<Self>, member: Arc<dyn Participant>) -> Membership {
        let mut state = self.lock();
        state.next += 1;
        let key = state.next;
        state.members.push((key, member));
        Membership {
            locks: self.clone(),
            key,
        }
    }

    /// Acquires a range. `on_granted` is called, on any thread, once no other I/O can change it. Overlapping ranges are granted in order of
    /// calls.
    pub fn acquire(
        self: &Arc<Self>,
        offset: u64,
        length: u64,
        on_granted: impl FnOnce(RangeLock) + Send + 'static,
    ) -> Acquisition {
        let mut state = self.lock();
        let range = state.extended(&(offset..offset.saturating_add(length)));
        state.next += 1;
        let key = state.next;
        state.waiting.push_back(Waiting {
            key,
            range,
            on_granted: Box::new(on_granted),
        });
        self.grant(state);
        Acquisition(key)
    }

    /// Gives up an acquisition before its grant. I/O that was deferred for it starts, although I/O from before the acquisition has not ended.
    /// A later grant is without effect.
    pub fn withdraw(self: &Arc<Self>, Acquisition(key): Acquisition) {
        let withdrawn = {
            let mut state = self.lock();
            let waiting = &mut state.waiting;
            let at = waiting.iter().position(|waiting| waiting.key == key);
            at.and_then(|at| waiting.remove(at))
        };
        drop(withdrawn);
        self.release(key);
    }

    fn release(self: &Arc<Self>, key: u64) {
        let mut state = self.lock();
        state.held.retain(|(held, _)| *held != key);
        let members = state.members();
        self.grant(state);
        for member in members {
            member.reopened();
        }
    }

    /// Holds waiting ranges that overlap no held and no earlier waiting one.
    fn grant(self: &Arc<Self>, mut state: MutexGuard<'_, RangeLockState>) {
        let mut barrier = Vec::new();
        let mut before: Vec<Range<u64>> = Vec::new();
        for waiting in std::mem::take(&mut state.waiting) {
            let free = |range: &Range<u64>| {
                !before.iter().any(|b| overlap(b, range))
                    && !state.held.iter().any(|(_, h)| overlap(h, range))
            };
            if !free(&waiting.range) {
                before.push(waiting.range.clone());
                state.waiting.push_back(waiting);
                continue;
            }
            state.held.push((waiting.key, waiting.range));
            let lease = RangeLock {
                locks: self.clone(),
                key: waiting.key,
            };
            barrier.push(LastBarrier::barrier(DrainAction::Grant(
                lease,
                waiting.on_granted,
            )));
        }
        // Visible to every worker that begins an I/O after `drain`.
        self.conditions
            .set(Condition::Locked, !state.held.is_empty());
        let members = state.members();
        drop(state);
        for barrier in barrier {
            for member in &members {
                member.drain(barrier.clone());
            }
        }
    }
}

impl Drop for RangeLock {
    fn drop(&mut self) {
        self.locks.release(self.key);
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.locks
            .lock()
            .members
            .retain(|(key, _)| *key != self.key);
    }
}

impl std::fmt::Debug for RangeLocks {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RangeLocks")
            .field("held", &!self.is_open())
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for RangeLock {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RangeLock")
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Holds barriers until the test drops them.
    #[derive(Default)]
    struct Worker {
        barrier: Mutex<Vec<Barrier>>,
        reopened: AtomicUsize,
    }

    impl Participant for Worker {
        fn drain(&self, barrier: Barrier) {
            self.barrier.lock().unwrap().push(barrier);
        }

        fn reopened(&self) {
            self.reopened.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[derive(Clone, Default)]
    struct GrantLog(Arc<Mutex<Vec<(u32, RangeLock)>>>);

    impl GrantLog {
        fn ask(&self, locks: &Arc<RangeLocks>, name: u32, offset: u64, length: u64) {
            let granted = self.clone();
            locks.acquire(offset, length, move |lease| {
                granted.0.lock().unwrap().push((name, lease))
            });
        }

        fn names(&self) -> Vec<u32> {
            self.0
                .lock()
                .unwrap()
                .iter()
                .map(|(name, _)| *name)
                .collect()
        }

        fn release(&self, name: u32) {
            let mut all = self.0.lock().unwrap();
            let at = all.iter().position(|(n, _)| *n == name).unwrap();
            let (_, lease) = all.remove(at);
            drop(all);
            drop(lease);
        }
    }

    #[test]
    fn range_is_granted_when_every_worker_has_drained() {
        let locks = Arc::new(RangeLocks::default());
        let worker = Arc::new(Worker::default());
        let _membership = locks.join(worker.clone());
        let granted = GrantLog::default();
        granted.ask(&locks, 1, 4096, 4096);
        assert!(!locks.is_open(), "I/Os are set aside from now on");
        assert!(
            granted.names().is_empty(),
            "an earlier I/O is still in flight"
        );
        worker.barrier.lock().unwrap().clear();
        assert_eq!(granted.names(), [1]);
        assert!(locks.holds(8191, 1) && !locks.holds(8192, 1) && !locks.holds(0, 4096));
        granted.release(1);
        assert!(locks.is_open());
        assert_eq!(worker.reopened.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn overlapping_ranges_are_granted_in_order_others_at_once() {
        let locks = Arc::new(RangeLocks::default());
        let granted = GrantLog::default();
        granted.ask(&locks, 1, 0, 100);
        granted.ask(&locks, 2, 50, 100);
        granted.ask(&locks, 3, 120, 10);
        granted.ask(&locks, 4, 200, 10);
        assert_eq!(granted.names(), [1, 4], "3 overlaps 2, which came before");
        granted.release(1);
        assert_eq!(granted.names(), [4, 2]);
        granted.release(2);
        assert_eq!(granted.names(), [4, 3]);
        granted.release(3);
        granted.release(4);
        assert!(locks.is_open());
    }

    #[test]
    fn withdrawn_range_is_released_before_the_workers_have_drained() {
        let locks = Arc::new(RangeLocks::default());
        let worker = Arc::new(Worker::default());
        let _membership = locks.join(worker.clone());
        let granted = GrantLog::default();
        let first = locks.acquire(0, 100, drop);
        let waiting = locks.acquire(50, 100, |held| panic!("{held:?} was withdrawn"));
        let first_barrier = std::mem::take(&mut *worker.barrier.lock().unwrap());
        locks.withdraw(waiting);
        locks.withdraw(first);
        assert!(locks.is_open());
        assert!(
            worker.reopened.load(Ordering::SeqCst) > 0,
            "deferred I/O starts"
        );

        granted.ask(&locks, 3, 0, 100);
        assert!(granted.names().is_empty(), "its own barrier decides");
        drop(first_barrier);
        assert!(
            locks.holds(0, 100),
            "the late grant releases only its own range"
        );
        worker.barrier.lock().unwrap().clear();
        assert_eq!(granted.names(), [3]);
        granted.release(3);
        assert!(locks.is_open());
    }

    #[test]
    fn closed_disk_admits_only_its_closer_after_a_drain() {
        let locks = Arc::new(RangeLocks::default());
        let worker = Arc::new(Worker::default());
        let _membership = locks.join(worker.clone());
        let (read, write) = (IoRequest::read(0, 512), IoRequest::write(0, 512));
        let holder = write.flagged(IoFlags::HOLDER);
        let closer = write.flagged(IoFlags::CLOSER);
        let passages =
            |locks: &RangeLocks| [read, write, holder, closer].map(|io| locks.admit_closed(&io));
        let refused = [Admission::Reject; 3];

        locks.close();
        assert_eq!(passages(&locks)[..3], refused);
        assert_eq!(
            passages(&locks)[3],
            Admission::Defer,
            "a change is in flight"
        );
        let looked_again = worker.reopened.load(Ordering::SeqCst);
        let in_flight = std::mem::take(&mut *worker.barrier.lock().unwrap());
        locks.close();
        assert!(worker.barrier.lock().unwrap().is_empty(), "closed already");
        drop(in_flight);
        assert_eq!(passages(&locks)[..3], refused);
        assert_eq!(passages(&locks)[3], Admission::Proceed);
        assert!(worker.reopened.load(Ordering::SeqCst) > looked_again);

        // An earlier closing's drain does not count for the next.
        locks.reopen();
        assert_eq!(passages(&locks), [Admission::Proceed; 4]);
        assert!(!locks.conditions.has(Condition::Closed));
        locks.close();
        assert!(locks.conditions.has(Condition::Closed));
        let first = std::mem::take(&mut *worker.barrier.lock().unwrap());
        locks.reopen();
        locks.close();
        drop(first);
        assert_eq!(passages(&locks)[3], Admission::Defer);
        worker.barrier.lock().unwrap().clear();
        assert_eq!(passages(&locks)[3], Admission::Proceed);
    }
}
