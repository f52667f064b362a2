//! An engine that takes its time: a fixed service time added to every I/O of another engine.
//!
//! For benchmarks and tests of what is around a disk: with it a RAM disk behaves like a device with that latency
//! and no limit to its depth. Uses ring timers; allocates nothing in the steady state.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use disk::{Capacity, DiskInfo, IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use ring::{Completion, Owner, Ring};

use crate::{Backend, Engine, Finished, Submission, Tag};

/// An engine with a service time.
pub struct Delay {
    inner: Arc<dyn Engine>,
    time: Duration,
}

impl Delay {
    /// Adds `time` to every I/O of an engine.
    pub fn new(inner: Arc<dyn Engine>, time: Duration) -> Delay {
        Delay { inner, time }
    }
}

impl Engine for Delay {
    fn info(&self) -> DiskInfo {
        self.inner.info()
    }

    fn capacity(&self) -> &Arc<Capacity> {
        self.inner.capacity()
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        self.inner.set_size(bytes)
    }

    fn kind(&self) -> &'static str {
        "delay"
    }

    fn next_data(&self, offset: u64) -> u64 {
        self.inner.next_data(offset)
    }

    fn open(&self, owner: Owner, ring: &mut Ring) -> io::Result<Box<dyn Backend>> {
        Ok(Box::new(DelayBackend {
            inner: self.inner.open(owner, ring)?,
            time: self.time,
            owner,
            waiting: Vec::new(),
            free: Vec::new(),
            over: Vec::new(),
        }))
    }
}

/// Marks tokens of ours among the engine's; `faulty` uses bit 63, so either may be around the other.
const OURS: u64 = 1 << 62;

struct DelayBackend {
    inner: Box<dyn Backend>,
    time: Duration,
    owner: Owner,
    waiting: Vec<Option<Finished>>,
    free: Vec<usize>,
    over: Vec<Finished>,
}

impl DelayBackend {
    fn wait(&mut self, ring: &mut Ring, tag: Tag, buffer: IoBuffer, outcome: IoOutcome) {
        let index = self.free.pop().unwrap_or_else(|| {
            self.waiting.push(None);
            self.waiting.len() - 1
        });
        self.waiting[index] = Some(Finished {
            tag,
            buffer,
            outcome,
        });
        ring.timer(self.owner, OURS | index as u64, self.time);
    }
}

impl Backend for DelayBackend {
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if let Submission::Done(outcome) = self.inner.submit(ring, io, buffer, tag) {
            self.wait(ring, tag, std::mem::take(buffer), outcome);
        }
        Submission::Pending
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        // The other wrapper's tokens have bit 63 and are the engine's business.
        if completion.token & (OURS | 1 << 63) == OURS {
            let index = (completion.token & !OURS) as usize;
            finished.extend(self.waiting[index].take());
            self.free.push(index);
            return;
        }
        let mut over = std::mem::take(&mut self.over);
        self.inner.complete(ring, completion, &mut over);
        for one in over.drain(..) {
            self.wait(ring, one.tag, one.buffer, one.outcome);
        }
        self.over = over;
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.waiting.len() - self.free.len()
    }
}
