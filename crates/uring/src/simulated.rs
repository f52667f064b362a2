//! What stands in the kernel's place in tests: no operation ends by itself, time is what the test says it is, and the order in which
//! operations end follows from a seed.
//!
//! Knows what workers need of a ring besides I/O on descriptors: timers, operations that do nothing, events and cancelling.
//! Only with the feature `simulated`, which the daemon is built without.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crate::Completion;
use crate::slab::{Slab, Use};

/// What an operation waits for.
enum Until {
    /// Nothing: it ends in one of the next iterations.
    Now,
    /// The time.
    Due(Duration),
    /// An event's notification, each time.
    Notified(Arc<AtomicBool>),
}

struct Operation {
    slot: u32,
    until: Until,
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
            // xorshift64 stays at 0.
            random: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1,
            operations: Vec::new(),
        }
    }

    fn begin(&mut self, slot: u32, until: Until) {
        self.operations.push(Operation {
            slot,
            until,
            cancelled: false,
        });
    }

    pub fn nop(&mut self, slot: u32) {
        self.begin(slot, Until::Now);
    }

    pub fn timer(&mut self, slot: u32, after: Duration) {
        let due = (self.now)() + after;
        self.begin(slot, Until::Due(due));
    }

    pub fn watch(&mut self, slot: u32, flag: Arc<AtomicBool>) {
        self.begin(slot, Until::Notified(flag));
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

    /// Ends what may end, in any order; what may end need not do so in this iteration, unless `all` has to. Returns how many watches
    /// have ended.
    pub fn run(&mut self, slab: &mut Slab, all: bool, out: &mut Vec<Completion>) -> usize {
        let now = (self.now)();
        let mut ended_watches = 0;
        // Backwards: `swap_remove` moves one that was looked at.
        for index in (0..self.operations.len()).rev() {
            let operation = &self.operations[index];
            let may_end = operation.cancelled
                || match &operation.until {
                    Until::Now => true,
                    Until::Due(due) => *due <= now,
                    Until::Notified(flag) => flag.load(Ordering::Acquire),
                };
            if !may_end || !all && self.draw(4) == 0 {
                continue;
            }
            let operation = &self.operations[index];
            let slot = slab.slot(operation.slot);
            let mut completion = Completion {
                owner: slot.owner,
                token: slot.token,
                result: Ok(0),
                buffer: None,
                message: None,
                more: false,
            };
            let is_watch = matches!(slot.used, Use::Watch | Use::Silenced);
            if !operation.cancelled
                && let Until::Notified(flag) = &operation.until
            {
                flag.store(false, Ordering::Release);
                completion.more = true;
                completion.result = Ok(1);
                out.push(completion);
                continue;
            }
            completion.result = match &operation.until {
                _ if operation.cancelled => Err(libc::ECANCELED),
                Until::Due(_) => Err(libc::ETIME),
                _ => Ok(0),
            };
            if slot.used != Use::Silenced {
                out.push(completion);
            }
            slab.give_back(operation.slot);
            ended_watches += usize::from(is_watch);
            self.operations.swap_remove(index);
        }
        for index in (1..out.len()).rev() {
            let other = self.draw(index + 1);
            out.swap(index, other);
        }
        ended_watches
    }
}
