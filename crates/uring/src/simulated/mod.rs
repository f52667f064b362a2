//! Simulated kernel side of a ring. Time comes from the simulation; the order in which operations take effect and complete follows from
//! a seed.
//!
//! Files and sockets are real ones of this process, accessed by non-blocking system calls. `files` also records the state of each file
//! after a power cut, and injects [`Faults`]. An operation takes effect in one iteration and completes in the same or a later one, in
//! any order among those in flight. Requires the feature `simulated`, which the daemon is built without.

mod calls;
mod files;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::Completion;
use crate::slab::{Slab, Use};
pub use files::{Faults, Files};

/// Work of an operation.
pub(crate) enum Work {
    /// Completes in one of the next iterations.
    Nothing,
    /// Waits for a time.
    Due(Duration),
    /// Waits for notifications of an event, repeatedly.
    Notified(Arc<AtomicBool>),
    /// Waits for input, repeatedly.
    Readable,
    Read {
        offset: u64,
    },
    Write {
        offset: u64,
        durable: bool,
    },
    /// Makes writes up to this write count durable.
    Sync {
        before: u64,
    },
    Allocate {
        mode: i32,
        offset: u64,
        length: u64,
    },
    Receive {
        whole: bool,
        done: usize,
    },
    Send,
}

impl Work {
    /// Returns true for watches, which complete more than once.
    fn repeats(&self) -> bool {
        matches!(self, Work::Notified(_) | Work::Readable)
    }
}

struct Operation {
    slot: u32,
    work: Work,
    /// Result, once the operation has taken effect.
    result: Option<Result<u32, i32>>,
    /// Earliest time of the effect, for a slow or stuck device.
    not_before: Duration,
    cancelled: bool,
}

/// The kernel's side of a ring.
pub(crate) struct Simulated {
    now: Box<dyn Fn() -> Duration>,
    random: u64,
    operations: Vec<Operation>,
}

impl Simulated {
    pub fn new(seed: u64, now: impl Fn() -> Duration + 'static) -> Simulated {
        Simulated {
            now: Box::new(now),
            // xorshift64 never leaves 0.
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            operations: Vec::new(),
        }
    }

    pub fn begin(&mut self, slot: u32, work: Work) {
        let mut not_before = Duration::ZERO;
        if matches!(
            work,
            Work::Read { .. } | Work::Write { .. } | Work::Sync { .. }
        ) && let Some(delay) = Files::delay()
        {
            not_before = (self.now)() + delay;
        }
        self.operations.push(Operation {
            slot,
            work,
            result: None,
            not_before,
            cancelled: false,
        });
    }

    pub fn timer(&mut self, slot: u32, after: Duration) {
        let due = (self.now)() + after;
        self.begin(slot, Work::Due(due));
    }

    pub fn cancel(&mut self, slot: u32) {
        let named = self.operations.iter_mut().find(|one| one.slot == slot);
        if let Some(operation) = named {
            operation.cancelled = true;
        }
    }

    fn draw(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % below as u64) as usize
    }

    /// A random permutation of the numbers below `count`.
    fn shuffled(&mut self, count: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..count).collect();
        for index in (1..count).rev() {
            let other = self.draw(index + 1);
            order.swap(index, other);
        }
        order
    }

    /// Completes operations in random order. Ready operations may be postponed to a later iteration unless `all` is set. Returns the
    /// number of watches that ended.
    pub fn run(&mut self, slab: &mut Slab, all: bool, out: &mut Vec<Completion>) -> usize {
        let now = (self.now)();
        let mut ended_watches = 0;
        for index in self.shuffled(self.operations.len()) {
            let waits_its_turn = !all && self.draw(4) == 0;
            self.take_effect(index, slab, now, all);
            if !waits_its_turn && self.operations[index].result.is_some() {
                ended_watches += self.end(index, slab, out);
            }
        }
        self.operations.retain(|one| one.slot != ENDED);
        for index in (1..out.len()).rev() {
            let other = self.draw(index + 1);
            out.swap(index, other);
        }
        ended_watches
    }

    fn take_effect(&mut self, index: usize, slab: &mut Slab, now: Duration, all: bool) {
        // After a kill, for example, the kernel may or may not have executed the operation.
        let too_late = self.operations[index].cancelled && (!all || self.draw(2) == 0);
        let later = !all && self.draw(4) == 0;
        let operation = &mut self.operations[index];
        if operation.result.is_some() {
            return;
        }
        if too_late || operation.cancelled && operation.work.repeats() {
            operation.result = Some(Err(libc::ECANCELED));
            return;
        }
        if operation.not_before > now && !all {
            return;
        }
        let limit = self.draw(8);
        let operation = &mut self.operations[index];
        let slot = slab.slot(operation.slot);
        let result = match &mut operation.work {
            Work::Nothing => Some(Ok(0)),
            Work::Due(due) => (*due <= now).then_some(Err(libc::ETIME)),
            Work::Notified(flag) => flag.swap(false, Ordering::AcqRel).then_some(Ok(1)),
            work if later && !work.repeats() => None,
            Work::Readable => calls::is_readable(slot).then_some(Ok(1)),
            Work::Read { offset } => Some(files::read(slot, *offset)),
            Work::Write { offset, durable } => Some(files::write(slot, *offset, *durable)),
            Work::Sync { before } => Some(files::sync(slot, *before)),
            Work::Allocate {
                mode,
                offset,
                length,
            } => Some(files::allocate(slot, *mode, *offset, *length)),
            Work::Receive { whole, done } => calls::receive(slot, *whole, done, limit == 0),
            Work::Send => calls::send(slot, limit == 0),
        };
        operation.result = match result {
            None if operation.cancelled => Some(Err(libc::ECANCELED)),
            result => result,
        };
    }

    /// Completes an operation that has a result. Returns the number of watches that ended.
    fn end(&mut self, index: usize, slab: &mut Slab, out: &mut Vec<Completion>) -> usize {
        let operation = &mut self.operations[index];
        let Some(result) = operation.result.take() else {
            return 0;
        };
        let slot = slab.slot(operation.slot);
        let used = slot.used;
        let mut completion = Completion {
            owner: slot.owner,
            token: slot.token,
            result,
            buffer: None,
            message: None,
            more: operation.work.repeats() && !operation.cancelled,
        };
        match used {
            Use::Buffered | Use::Transfer => {
                completion.buffer = Some(std::mem::take(&mut slot.buffer));
            }
            Use::Message | Use::Quiet => completion.message = slot.message.take(),
            Use::Plain | Use::Watch | Use::Silenced | Use::Free => {}
        }
        let goes_on = completion.more;
        if used != Use::Silenced {
            out.push(completion);
        }
        if goes_on {
            return 0;
        }
        slab.release(operation.slot);
        operation.slot = ENDED;
        usize::from(matches!(used, Use::Watch | Use::Silenced))
    }
}

/// Slot number of completed operations.
const ENDED: u32 = u32::MAX;
