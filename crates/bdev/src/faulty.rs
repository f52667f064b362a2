//! A layer that injects faults, for tests. It injects, exactly as planned:
//!
//! - **fail**: an I/O of a kind fails and is not executed;
//! - **torn**: a write executes its first bytes, then fails (an atomic one executes none); **undone**: an I/O is executed, but fails;
//! - **delay**: a late answer; **hold**: an answer when the test releases it;
//! - **shuffle**: answers in another order, the same for the same seed;
//! - **alignment**: I/O on partial blocks is refused.
//!
//! Not injected: lost or misdirected writes that succeed, wrong data, crashes.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use block::{DiskInfo, IoError, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use uring::{Completion, Owner, Ring};

use crate::slots::Slots;
use crate::{Attach, BlockDevice, Finished, IoChannel, Layer, Submission, Tag};

/// One fault: the affected I/Os and the effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// Kind of the affected I/Os. All handles count together.
    pub kind: IoKind,
    /// Number of I/Os that succeed first.
    pub skip: u64,
    /// Number of I/Os that fail.
    pub times: u64,
    /// Effect on them.
    pub action: FaultAction,
}

/// Effect of a fault on an I/O.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// The I/O fails and is not executed.
    Fail(IoError),
    /// A write executes its first bytes (whole blocks), then fails.
    Torn(u64, IoError),
    /// The I/O is executed, but reported as failed.
    Undone(IoError),
    /// The I/O is executed and completes after this time.
    Delay(Duration),
    /// The I/O is executed and completes after a call of [`Faulty::release`].
    Hold,
}

/// Faults to inject.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    /// Faults. The first match applies.
    pub faults: Vec<Fault>,
    /// Seed of the order of answers, if answers are shuffled.
    pub shuffle: Option<u64>,
}

#[derive(Debug)]
struct Plan {
    faults: Mutex<Vec<Fault>>,
    released: AtomicBool,
    shuffle: Option<u64>,
}

impl Plan {
    fn hit(&self, kind: IoKind) -> Option<FaultAction> {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let mut hit = None;
        for fault in faults.iter_mut().filter(|f| f.kind == kind && f.times > 0) {
            if fault.skip > 0 {
                fault.skip -= 1;
            } else if hit.is_none() {
                fault.times -= 1;
                hit = Some(fault.action);
            }
        }
        hit
    }
}

/// A block device with faults.
pub struct Faulty {
    inner: Arc<dyn BlockDevice>,
    plan: Arc<Plan>,
    /// [`DiskInfo::io_alignment`], if larger than that of the device below.
    alignment: u32,
}

impl Faulty {
    /// Adds faults to a block device.
    pub fn new(inner: Arc<dyn BlockDevice>, plan: FaultPlan) -> Faulty {
        Faulty {
            inner,
            plan: Arc::new(Plan {
                faults: Mutex::new(plan.faults),
                released: AtomicBool::new(false),
                shuffle: plan.shuffle,
            }),
            alignment: 1,
        }
    }

    /// Makes the device refuse I/O not aligned to `alignment` bytes.
    #[must_use]
    pub fn with_alignment(self, alignment: u32) -> Faulty {
        Faulty { alignment, ..self }
    }

    /// Adds a fault while I/O is running.
    pub fn inject(&self, fault: Fault) {
        let mut faults = self
            .plan
            .faults
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        faults.push(fault);
    }

    /// Releases all answers that are held, now or later.
    pub fn release(&self) {
        self.plan.released.store(true, Ordering::Release);
    }
}

impl Layer for Faulty {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn layer_kind(&self) -> &'static str {
        "faulty"
    }

    fn layer_info(&self, inner: DiskInfo) -> DiskInfo {
        DiskInfo {
            io_alignment: inner.io_alignment.max(self.alignment),
            atomic_writes: inner
                .atomic_writes
                .filter(|atomic| atomic.unit >= self.alignment),
            ..inner
        }
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        let owner = attach.owner();
        Ok(Box::new(FaultyChannel {
            inner: self.inner.attach(attach)?,
            plan: self.plan.clone(),
            io_mask: u64::from(self.alignment) - 1,
            owner,
            slots: Slots::default(),
            shuffled: Vec::new(),
            random: self.plan.shuffle.unwrap_or(0) | 1,
            over: Vec::new(),
        }))
    }
}

/// Time of the answer to an I/O that has ended.
#[derive(Clone, Copy)]
enum Answer {
    Now,
    Shuffled,
    After(Duration),
    Held,
}

struct FaultySlot {
    tag: Tag,
    answer: Answer,
    /// Replaces the outcome of the device below.
    forced: Option<IoError>,
    /// The client's buffer, while the device below has a part.
    whole: Option<IoBuffer>,
    over: Option<(IoBuffer, IoOutcome)>,
}

/// Token that makes one shuffled answer due; other tokens are slot numbers.
const SHUFFLE: u64 = u64::MAX;

/// Interval of the checks whether held I/Os were released.
const HOLD_POLL: Duration = Duration::from_millis(1);

struct FaultyChannel {
    inner: Box<dyn IoChannel>,
    plan: Arc<Plan>,
    /// Offset and length bits that are zero in aligned I/O.
    io_mask: u64,
    owner: Owner,
    slots: Slots<FaultySlot>,
    shuffled: Vec<u32>,
    random: u64,
    over: Vec<Finished>,
}

impl FaultyChannel {
    fn vacate(&mut self, index: u32) -> Finished {
        self.slots.release(index);
        let slot = &mut self.slots[index];
        let (buffer, outcome) = slot.over.take().expect("an I/O completes after its end");
        Finished {
            tag: slot.tag,
            buffer,
            outcome,
        }
    }

    /// Returns the answer of an ended I/O, or schedules it.
    fn answer_fault(
        &mut self,
        ring: &mut Ring,
        index: u32,
        buffer: IoBuffer,
        outcome: IoOutcome,
    ) -> Option<Finished> {
        let slot = &mut self.slots[index];
        let buffer = slot.whole.take().unwrap_or(buffer);
        slot.over = Some((buffer, slot.forced.map_or(outcome, Err)));
        let token = index.into();
        match slot.answer {
            Answer::Now => return Some(self.vacate(index)),
            Answer::Shuffled => {
                self.shuffled.push(index);
                ring.nop(self.owner, SHUFFLE);
            }
            Answer::After(time) => ring.timer(self.owner, token, time),
            Answer::Held => ring.timer(self.owner, token, HOLD_POLL),
        }
        None
    }

    /// xorshift64: good enough to shuffle an order.
    fn random(&mut self, below: usize) -> usize {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        (self.random % below as u64) as usize
    }

    fn due(&mut self, ring: &mut Ring, token: u64) -> Option<Finished> {
        if token == SHUFFLE {
            let at = self.random(self.shuffled.len());
            let index = self.shuffled.swap_remove(at);
            return Some(self.vacate(index));
        }
        let index = token as u32;
        let held = matches!(self.slots[index].answer, Answer::Held);
        if held && !self.plan.released.load(Ordering::Acquire) {
            ring.timer(self.owner, token, HOLD_POLL);
            return None;
        }
        Some(self.vacate(index))
    }
}

impl IoChannel for FaultyChannel {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if io.touches_data() && (io.offset | io.length) & self.io_mask != 0 {
            return Submission::Done(Err(IoErrorKind::OutOfRange.into()));
        }
        let action = self.plan.hit(io.kind);
        let answer = match action {
            Some(FaultAction::Delay(time)) => Answer::After(time),
            Some(FaultAction::Hold) => Answer::Held,
            _ if self.plan.shuffle.is_some() => Answer::Shuffled,
            _ => Answer::Now,
        };
        let (mut io, mut given) = (*io, std::mem::take(buffer));
        let mut slot = FaultySlot {
            tag,
            answer,
            forced: None,
            whole: None,
            over: None,
        };
        let mut skip = false;
        match action {
            Some(FaultAction::Fail(error)) => (slot.forced, skip) = (Some(error), true),
            Some(FaultAction::Undone(error)) => slot.forced = Some(error),
            Some(FaultAction::Torn(_, error)) if io.flags.has(IoFlags::ATOMIC) => {
                (slot.forced, skip) = (Some(error), true);
            }
            Some(FaultAction::Torn(bytes, error)) if io.kind == IoKind::Write => {
                io.length = io.length.min(bytes);
                slot.forced = Some(error);
                let part = given.slice(0, io.length as usize);
                slot.whole = Some(std::mem::replace(&mut given, part));
            }
            Some(FaultAction::Torn(_, error)) => (slot.forced, skip) = (Some(error), true),
            Some(FaultAction::Delay(_) | FaultAction::Hold) | None => {}
        }
        let index = self.slots.occupy(slot);
        let submission = if skip {
            Submission::Done(Ok(()))
        } else {
            let inner_tag = Tag(index.into());
            self.inner.submit(ring, &io, &mut given, inner_tag)
        };
        let Submission::Done(outcome) = submission else {
            return Submission::Pending;
        };
        match self.answer_fault(ring, index, given, outcome) {
            None => Submission::Pending,
            Some(over) => {
                *buffer = over.buffer;
                Submission::Done(over.outcome)
            }
        }
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        if completion.owner == self.owner {
            finished.extend(self.due(ring, completion.token));
            return;
        }
        let mut over = std::mem::take(&mut self.over);
        self.inner.complete(ring, completion, &mut over);
        for one in over.drain(..) {
            let index = one.tag.0 as u32;
            finished.extend(self.answer_fault(ring, index, one.buffer, one.outcome));
        }
        self.over = over;
    }

    /// Completes a delayed I/O at once. A held I/O stays held.
    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        let Some(index) = self.slots.find(|slot| slot.tag == tag) else {
            return;
        };
        match (&self.slots[index].over, self.slots[index].answer) {
            (None, _) => self.inner.abort(ring, Tag(index.into())),
            (Some(_), Answer::After(_)) => ring.cancel(self.owner, index.into()),
            (Some(_), Answer::Now | Answer::Shuffled | Answer::Held) => {}
        }
    }

    fn close(&mut self, ring: &mut Ring) {
        self.inner.close(ring);
    }

    fn is_closed(&self) -> bool {
        self.in_flight() == 0 && self.inner.is_closed()
    }

    fn in_flight(&self) -> usize {
        self.slots.len()
    }
}
