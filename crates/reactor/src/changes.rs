//! One worker's changes to one disk, as the disk's gate needs to know them: what is in flight, and what is set aside.
//!
//! A change that pends is counted under the present epoch, and its tag says so. When a range is being acquired, a new
//! epoch begins, and the acquirer is told when the old one's count has come to nothing. Nothing is counted for changes
//! that end at once.

use std::collections::VecDeque;
use std::sync::Arc;

use backend::{Gate, Member, Membership, Settling, Tag};
use disk::{IoFlags, IoRequest};
use guest_memory::IoBuffer;

use crate::WorkerHandle;

/// How many of a tag's highest bits are marks: no id of a source reaches there.
pub(crate) const MARKS: u32 = 2;
/// It is counted.
const COUNTED: u64 = 1 << 63;
/// Under which epoch.
const EPOCH: u64 = 1 << 62;

/// A change that has to wait for a range to be released.
pub(crate) struct Parked {
    pub request: IoRequest,
    pub buffer: IoBuffer,
    pub tag: Tag,
}

pub(crate) struct Changes {
    gate: Arc<Gate>,
    _membership: Membership,
    in_flight: [u32; 2],
    epoch: usize,
    /// Acquirers that wait for the epoch before the present one to end.
    settling: Vec<Settling>,
    /// Those that came meanwhile.
    next: VecDeque<Settling>,
    pub parked: Vec<Parked>,
}

struct Handle {
    worker: WorkerHandle,
    disk: u32,
}

impl Member for Handle {
    fn settle(&self, settling: Settling) {
        let disk = self.disk;
        self.worker.send(move |w| w.io().settle(disk, settling));
    }

    fn reopened(&self) {
        let disk = self.disk;
        self.worker.send(move |w| w.unpark(disk));
    }
}

impl Changes {
    pub fn new(gate: &Arc<Gate>, worker: &WorkerHandle, disk: u32) -> Changes {
        let handle = Handle {
            worker: worker.clone(),
            disk,
        };
        Changes {
            gate: gate.clone(),
            _membership: gate.join(Arc::new(handle)),
            in_flight: [0; 2],
            epoch: 0,
            settling: Vec::new(),
            next: VecDeque::new(),
            parked: Vec::new(),
        }
    }

    /// Must this change wait? One load where no range is held.
    #[inline]
    pub fn must_wait(&self, request: &IoRequest) -> bool {
        !self.gate.is_open() && self.is_held(request)
    }

    #[cold]
    fn is_held(&self, request: &IoRequest) -> bool {
        !request.flags.has(IoFlags::HOLDER) && self.gate.holds(request.offset, request.length)
    }

    /// Sets an I/O aside until its range is released, or the disk opens to it.
    #[cold]
    pub fn park(&mut self, request: &IoRequest, buffer: &mut IoBuffer, tag: Tag) {
        self.parked.push(Parked {
            request: *request,
            buffer: std::mem::take(buffer),
            tag,
        });
    }

    /// The tag of a change that is being submitted.
    #[inline]
    pub fn tag(&self, tag: Tag) -> Tag {
        debug_assert_eq!(tag.0 & (COUNTED | EPOCH), 0, "marks in the tag of a source");
        Tag(tag.0 | COUNTED | if self.epoch == 1 { EPOCH } else { 0 })
    }

    /// A change with such a tag is pending.
    #[inline]
    pub fn pended(&mut self) {
        self.in_flight[self.epoch] += 1;
    }

    /// An I/O has finished: its tag without the marks.
    #[inline]
    pub fn finished(&mut self, tag: Tag) -> Tag {
        if tag.0 & COUNTED == 0 {
            return tag;
        }
        let epoch = usize::from(tag.0 & EPOCH != 0);
        self.in_flight[epoch] -= 1;
        if epoch != self.epoch && self.in_flight[epoch] == 0 && !self.settling.is_empty() {
            self.settled();
        }
        Tag(tag.0 & !(COUNTED | EPOCH))
    }

    /// Lets go of `settling` when all changes that are in flight now have ended.
    pub fn settle(&mut self, settling: Settling) {
        if self.in_flight == [0, 0] {
            return;
        }
        self.next.push_back(settling);
        if self.settling.is_empty() {
            self.begin_epoch();
        }
    }

    fn begin_epoch(&mut self) {
        self.settling.extend(self.next.drain(..));
        self.epoch = 1 - self.epoch;
        if self.in_flight[1 - self.epoch] == 0 {
            self.settled();
        }
    }

    #[cold]
    fn settled(&mut self) {
        self.settling.clear();
        if !self.next.is_empty() {
            self.begin_epoch();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use backend::Lease;

    use super::*;
    use crate::{PollLimit, Pool, WorkerOptions};

    fn changes() -> (Pool, Changes) {
        let options = WorkerOptions {
            count: 1,
            cpus: Vec::new(),
            poll: PollLimit::Never.into(),
        };
        let pool = Pool::start(&options).unwrap();
        let gate = Arc::new(Gate::default());
        let changes = Changes::new(&gate, &pool.place(), 0);
        (pool, changes)
    }

    /// A settling of which we hear when it is let go.
    fn settling() -> (Settling, Arc<Mutex<Option<Lease>>>) {
        struct Catch(Mutex<Option<Settling>>);
        impl Member for Catch {
            fn settle(&self, settling: Settling) {
                *self.0.lock().unwrap() = Some(settling);
            }
            fn reopened(&self) {}
        }
        let other = Arc::new(Gate::default());
        let catch = Arc::new(Catch(Mutex::new(None)));
        let _membership = other.join(catch.clone());
        let granted = Arc::new(Mutex::new(None));
        let seen = granted.clone();
        other.acquire(0, 1, move |lease| *seen.lock().unwrap() = Some(lease));
        let caught = catch.0.lock().unwrap().take().unwrap();
        (caught, granted)
    }

    #[test]
    fn settled_when_what_was_in_flight_has_ended_whatever_came_after() {
        let (_pool, mut changes) = changes();
        let old = changes.tag(Tag(7));
        changes.pended();
        let (first, granted) = settling();
        changes.settle(first);
        let new = changes.tag(Tag(8));
        changes.pended();
        assert!(granted.lock().unwrap().is_none());
        assert_eq!(changes.finished(new), Tag(8));
        assert!(
            granted.lock().unwrap().is_none(),
            "the older one has not ended"
        );
        changes.pended();
        assert_eq!(changes.finished(old), Tag(7));
        assert!(granted.lock().unwrap().is_some());
    }

    #[test]
    fn one_that_comes_while_another_settles_waits_for_an_epoch_of_its_own() {
        let (_pool, mut changes) = changes();
        let a = changes.tag(Tag(1));
        changes.pended();
        let (first, first_granted) = settling();
        changes.settle(first);
        let b = changes.tag(Tag(2));
        changes.pended();
        let (second, second_granted) = settling();
        changes.settle(second);
        changes.finished(a);
        assert!(first_granted.lock().unwrap().is_some());
        assert!(second_granted.lock().unwrap().is_none());
        changes.finished(b);
        assert!(second_granted.lock().unwrap().is_some());
    }
}
