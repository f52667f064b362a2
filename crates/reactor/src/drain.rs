//! Counts one worker's in-flight I/Os on a disk for the disk's range locks.
//!
//! Before a range is granted, all I/Os in flight must end, because a running read could see a partial write. Without held
//! ranges nothing is counted here: the uncounted I/Os are those of the block device minus the counted ones. I/Os submitted
//! while a range is held (or the disk has limits) are counted under the current epoch, which is stored in their tags.
//! Flushes are counted separately, because acquirers do not wait for them. An acquirer starts a new epoch and is granted
//! the range when the old epoch has no I/Os left. Data that is being sent from the disk's memory must be returned first.

use std::collections::VecDeque;
use std::sync::Arc;

use bdev::{Barrier, Membership, Participant, RangeLocks, Tag};

use crate::WorkerHandle;

/// Number of highest tag bits reserved for marks; source ids do not use them.
pub(crate) const MARKS: u32 = 2;
/// Marks of an I/O counted under the first epoch; with `SECOND`, under the second one.
const COUNTED: u64 = 1 << 63;
const SECOND: u64 = 1 << 62;
const FLUSH: u64 = SECOND;

pub(crate) struct Drain {
    _membership: Membership,
    /// Counted I/Os in flight, by epoch.
    counted: [u32; 2],
    epoch: usize,
    /// Flushes in flight.
    flushes: u32,
    /// Uncounted I/Os that acquirers wait for; 0 without acquirers.
    uncounted: usize,
    /// Acquirers wait for data that is being sent from the disk's memory.
    borrowed: bool,
    /// Acquirers that wait for the end of the previous epoch.
    barrier: Vec<Barrier>,
    /// Acquirers that arrived in the meantime.
    next: VecDeque<Barrier>,
}

struct Handle {
    worker: WorkerHandle,
    disk: u32,
}

impl Participant for Handle {
    fn drain(&self, barrier: Barrier) {
        let disk = self.disk;
        self.worker.send(move |w| w.io().begin_drain(disk, barrier));
    }

    fn reopened(&self) {
        let disk = self.disk;
        self.worker.send(move |w| w.resume_deferred(disk));
    }
}

impl Drain {
    pub fn new(locks: &Arc<RangeLocks>, worker: &WorkerHandle, disk: u32) -> Drain {
        let handle = Handle {
            worker: worker.clone(),
            disk,
        };
        Drain {
            _membership: locks.join(Arc::new(handle)),
            counted: [0; 2],
            epoch: 0,
            flushes: 0,
            uncounted: 0,
            borrowed: false,
            barrier: Vec::new(),
            next: VecDeque::new(),
        }
    }

    /// Returns the tag of an I/O to count under the current epoch.
    pub fn counted_tag(&self, tag: Tag) -> Tag {
        debug_assert_eq!(tag.0 & (COUNTED | SECOND), 0, "marks in a source's tag");
        Tag(tag.0 | COUNTED | if self.epoch == 1 { SECOND } else { 0 })
    }

    /// Counts a pending I/O with such a tag.
    pub fn pended(&mut self) {
        self.counted[self.epoch] += 1;
    }

    /// Returns the tag of a flush.
    #[inline]
    pub fn flush_tag(&self, tag: Tag) -> Tag {
        debug_assert_eq!(tag.0 & (COUNTED | SECOND), 0, "marks in a source's tag");
        Tag(tag.0 | FLUSH)
    }

    /// Counts a pending flush with such a tag.
    #[inline]
    pub fn flush_pended(&mut self) {
        self.flushes += 1;
    }

    /// Returns the tag without the bits `COUNTED` and `SECOND`.
    #[inline]
    pub fn unmarked(tag: Tag) -> Tag {
        Tag(tag.0 & !(COUNTED | SECOND))
    }

    /// Removes a finished I/O from the counts. Returns its tag without the bits `COUNTED` and `SECOND`.
    #[inline]
    pub fn finished(&mut self, tag: Tag) -> Tag {
        if tag.0 & (COUNTED | SECOND) != 0 || self.uncounted > 0 {
            self.finished_watched(tag);
        }
        Drain::unmarked(tag)
    }

    fn finished_watched(&mut self, tag: Tag) {
        match tag.0 & (COUNTED | SECOND) {
            0 => self.uncounted -= 1,
            FLUSH => self.flushes -= 1,
            marks => self.counted[usize::from(marks & SECOND != 0)] -= 1,
        }
        self.check();
    }

    /// Holds `barrier` until all I/Os now in flight have ended. `in_flight` is the count of the block device. `borrowed`
    /// means that data is being sent from the disk's memory; the caller must then call [`Drain::returned`] when that has
    /// ended.
    pub fn begin(&mut self, barrier: Barrier, in_flight: usize, borrowed: bool) {
        let counted = self.counted[0] + self.counted[1] + self.flushes;
        // Exact: while an acquirer waits, every submitted I/O is counted.
        self.uncounted = in_flight.saturating_sub(counted as usize);
        if self.uncounted == 0 && self.counted == [0, 0] && !borrowed {
            return;
        }
        self.borrowed |= borrowed;
        self.next.push_back(barrier);
        if self.barrier.is_empty() {
            self.begin_epoch();
        }
    }

    /// Records that no data is being sent from the disk's memory any more.
    pub fn returned(&mut self) {
        self.borrowed = false;
        self.check();
    }

    /// Returns true if an acquirer waits for data that is being sent from the disk's memory.
    pub fn waits_for_borrowed(&self) -> bool {
        self.borrowed
    }

    fn begin_epoch(&mut self) {
        self.barrier.extend(self.next.drain(..));
        self.epoch = 1 - self.epoch;
        self.check();
    }

    /// Releases the barrier if everything it waits for has ended.
    fn check(&mut self) {
        let ended = self.uncounted == 0 && !self.borrowed && self.counted[1 - self.epoch] == 0;
        if ended && !self.barrier.is_empty() {
            self.barrier.clear();
            if !self.next.is_empty() {
                self.begin_epoch();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use bdev::RangeLock;

    use super::*;
    use crate::{PollLimit, Pool, WorkerOptions};

    fn drain() -> (Pool, Drain) {
        let options = WorkerOptions {
            count: 1,
            cpus: Vec::new(),
            poll: PollLimit::Never.into(),
        };
        let pool = Pool::start(&options).unwrap();
        let locks = Arc::new(RangeLocks::default());
        let drain = Drain::new(&locks, &pool.select_worker(), 0);
        (pool, drain)
    }

    /// Returns a barrier with an observable release.
    fn barrier() -> (Barrier, Arc<Mutex<Option<RangeLock>>>) {
        struct Catch(Mutex<Option<Barrier>>);
        impl Participant for Catch {
            fn drain(&self, barrier: Barrier) {
                *self.0.lock().unwrap() = Some(barrier);
            }
            fn reopened(&self) {}
        }
        let other = Arc::new(RangeLocks::default());
        let catch = Arc::new(Catch(Mutex::new(None)));
        let _membership = other.join(catch.clone());
        let granted = Arc::new(Mutex::new(None));
        let seen = granted.clone();
        other.acquire(0, 1, move |lease| *seen.lock().unwrap() = Some(lease));
        let caught = catch.0.lock().unwrap().take().unwrap();
        (caught, granted)
    }

    #[test]
    fn drain_ignores_later_io() {
        let (_pool, mut drain) = drain();
        let old = drain.counted_tag(Tag(7));
        drain.pended();
        let (first, granted) = barrier();
        drain.begin(first, 1, false);
        let new = drain.counted_tag(Tag(8));
        drain.pended();
        assert!(granted.lock().unwrap().is_none());
        assert_eq!(drain.finished(new), Tag(8));
        assert!(
            granted.lock().unwrap().is_none(),
            "the older one has not ended"
        );
        drain.pended();
        assert_eq!(drain.finished(old), Tag(7));
        assert!(granted.lock().unwrap().is_some());
    }

    #[test]
    fn concurrent_drain_waits_for_its_own_epoch() {
        let (_pool, mut drain) = drain();
        let a = drain.counted_tag(Tag(1));
        drain.pended();
        let (first, first_granted) = barrier();
        drain.begin(first, 1, false);
        let b = drain.counted_tag(Tag(2));
        drain.pended();
        let (second, second_granted) = barrier();
        drain.begin(second, 2, false);
        drain.finished(a);
        assert!(first_granted.lock().unwrap().is_some());
        assert!(second_granted.lock().unwrap().is_none());
        drain.finished(b);
        assert!(second_granted.lock().unwrap().is_some());
    }

    #[test]
    fn drain_waits_for_borrowed_data_but_not_for_flushes() {
        let (_pool, mut drain) = drain();
        let flush = drain.flush_tag(Tag(1));
        drain.flush_pended();
        let (only_flushes, granted) = barrier();
        drain.begin(only_flushes, 1, false);
        assert!(granted.lock().unwrap().is_some());
        // Two uncounted reads are in flight.
        let (first, granted) = barrier();
        drain.begin(first, 3, true);
        assert_eq!(drain.finished(Tag(2)), Tag(2));
        assert_eq!(drain.finished(flush), Tag(1));
        assert_eq!(drain.finished(Tag(3)), Tag(3));
        assert!(granted.lock().unwrap().is_none() && drain.waits_for_borrowed());
        drain.returned();
        assert!(granted.lock().unwrap().is_some());
        assert_eq!(drain.finished(Tag(4)), Tag(4), "of before any acquirer");
    }
}
