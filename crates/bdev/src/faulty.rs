//! A block device that fails on purpose, around any other: for tests. It injects, exactly as its plan says:
//!
//! - **fail**: an I/O of a kind fails with an error and is not done;
//! - **torn**: a write does its first bytes, then fails (an atomic one does none); **undone**: an I/O is done, but answered as failed;
//! - **delay**: the answer comes later; **hold**: it comes when the test says so;
//! - **shuffle**: answers come in another order, the same for the same seed;
//! - **alignment**: parts of its blocks are refused.
//!
//! It does not inject: lost or misdirected writes that are answered as done, wrong data, crashes.

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use block::{DiskInfo, IoError, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use uring::{Completion, Owner, Ring};

use crate::{Attach, BlockDevice, Finished, IoChannel, Layer, Submission, Tag};

/// One fault: which I/Os it hits, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fault {
    /// I/Os of this kind; all handles count together.
    pub kind: IoKind,
    /// This many I/Os succeed first.
    pub skip: u64,
    /// This many I/Os fail.
    pub times: u64,
    /// What happens to them.
    pub action: FaultAction,
}

/// What happens to an I/O that a fault hits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultAction {
    /// It is not done and fails.
    Fail(IoError),
    /// A write does its first bytes (whole blocks) and then fails.
    Torn(u64, IoError),
    /// It is done, and fails.
    Undone(IoError),
    /// It is done and answered after this time.
    Delay(Duration),
    /// It is done and answered once [`Faulty::release`] was called.
    Hold,
}

/// What goes wrong.
#[derive(Clone, Debug, Default)]
pub struct FaultPlan {
    /// The first that matches hits.
    pub faults: Vec<Fault>,
    /// Answers come in an order that this seed decides.
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
    /// Its [`DiskInfo::io_alignment`], if that is larger than that of the device below.
    alignment: u32,
}

impl Faulty {
    /// Puts faults around a block device.
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

    /// Makes the device refuse I/O whose offset or length is not a multiple of `alignment` bytes.
    #[must_use]
    pub fn with_alignment(self, alignment: u32) -> Faulty {
        Faulty { alignment, ..self }
    }

    /// Adds a fault while I/O goes on.
    pub fn inject(&self, fault: Fault) {
        let mut faults = self
            .plan
            .faults
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        faults.push(fault);
    }

    /// Lets all that is held, or will be, be answered.
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
        Ok(Box::new(FaultyBackend {
            inner: self.inner.attach(attach)?,
            plan: self.plan.clone(),
            io_mask: u64::from(self.alignment) - 1,
            owner,
            slots: Vec::new(),
            free: Vec::new(),
            shuffled: Vec::new(),
            random: self.plan.shuffle.unwrap_or(0) | 1,
            over: Vec::new(),
        }))
    }
}

/// When an I/O that is over is answered.
#[derive(Clone, Copy)]
enum Answer {
    Now,
    Shuffled,
    After(Duration),
    Held,
}

struct Slot {
    tag: Tag,
    answer: Answer,
    /// Instead of what the block device says.
    forced: Option<IoError>,
    /// The client's buffer while the block device has a part of it.
    whole: Option<IoBuffer>,
    over: Option<(IoBuffer, IoOutcome)>,
}

/// The token of an iteration in which one of the shuffled answers is due; the others are slot numbers.
const SHUFFLE: u64 = u64::MAX;

/// How often it is looked whether held I/Os have been released.
const HOLD_POLL: Duration = Duration::from_millis(1);

struct FaultyBackend {
    inner: Box<dyn IoChannel>,
    plan: Arc<Plan>,
    /// Bits of offset and length that are zero in an aligned I/O.
    io_mask: u64,
    owner: Owner,
    slots: Vec<Slot>,
    free: Vec<usize>,
    shuffled: Vec<usize>,
    random: u64,
    over: Vec<Finished>,
}

impl FaultyBackend {
    fn occupy(&mut self, slot: Slot) -> usize {
        match self.free.pop() {
            Some(index) => {
                self.slots[index] = slot;
                index
            }
            None => {
                self.slots.push(slot);
                self.slots.len() - 1
            }
        }
    }

    fn vacate(&mut self, index: usize) -> Finished {
        self.free.push(index);
        let slot = &mut self.slots[index];
        let (buffer, outcome) = slot.over.take().expect("only what is over is answered");
        Finished {
            tag: slot.tag,
            buffer,
            outcome,
        }
    }

    /// An I/O is over: now, or later, its answer is due.
    fn answer_fault(
        &mut self,
        ring: &mut Ring,
        index: usize,
        buffer: IoBuffer,
        outcome: IoOutcome,
    ) -> Option<Finished> {
        let slot = &mut self.slots[index];
        let buffer = slot.whole.take().unwrap_or(buffer);
        slot.over = Some((buffer, slot.forced.map_or(outcome, Err)));
        let token = index as u64;
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

    /// xorshift64: good enough to disturb an order.
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
        let index = token as usize;
        let held = matches!(self.slots[index].answer, Answer::Held);
        if held && !self.plan.released.load(Ordering::Acquire) {
            ring.timer(self.owner, token, HOLD_POLL);
            return None;
        }
        Some(self.vacate(index))
    }
}

impl IoChannel for FaultyBackend {
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
        let mut slot = Slot {
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
        let index = self.occupy(slot);
        let submission = if skip {
            Submission::Done(Ok(()))
        } else {
            let inner_tag = Tag(index as u64);
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
            let index = one.tag.0 as usize;
            finished.extend(self.answer_fault(ring, index, one.buffer, one.outcome));
        }
        self.over = over;
    }

    /// What is delayed ends at once; what is held stays held.
    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        let named = |index: &usize| self.slots[*index].tag == tag;
        let mut used = (0..self.slots.len()).filter(|index| !self.free.contains(index));
        let Some(index) = used.find(named) else {
            return;
        };
        match (&self.slots[index].over, self.slots[index].answer) {
            (None, _) => self.inner.abort(ring, Tag(index as u64)),
            (Some(_), Answer::After(_)) => ring.cancel(self.owner, index as u64),
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
        self.slots.len() - self.free.len()
    }
}
