//! A layer that adds a fixed or random service time to every I/O.
//!
//! For benchmarks and tests: a RAM disk then behaves like a device with that latency and unlimited depth. Ring timers are late by some tens
//! of microseconds on a machine that must wake up for them. Allocates nothing in the steady state.

use std::io;
use std::sync::Arc;
use std::time::Duration;

pub use block::DelayTime;
use block::{IoOutcome, IoRequest};
use guest_memory::IoBuffer;
use uring::{Completion, Owner, Ring};

use crate::slots::Slots;
use crate::{Attach, BlockDevice, Finished, IoChannel, Layer, Submission, Tag};

/// Draws a service time.
fn draw(time: DelayTime, random: &mut u64) -> Duration {
    if let DelayTime::Fixed(fixed) = time {
        return fixed;
    }
    // SplitMix64, and the 53 bits of a float.
    *random = random.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut bits = *random;
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^= bits >> 31;
    time.quantile((bits >> 11) as f64 / (1u64 << 53) as f64)
}

/// A block device with a service time.
pub struct Delay {
    inner: Arc<dyn BlockDevice>,
    time: DelayTime,
}

impl Delay {
    /// Adds `time` to every I/O of a block device.
    pub fn new(inner: Arc<dyn BlockDevice>, time: impl Into<DelayTime>) -> Delay {
        Delay {
            inner,
            time: time.into(),
        }
    }
}

impl Layer for Delay {
    fn inner(&self) -> &dyn BlockDevice {
        &*self.inner
    }

    fn layer_kind(&self) -> &'static str {
        "delay"
    }

    fn attach_layer(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        let owner = attach.owner();
        Ok(Box::new(DelayChannel {
            inner: self.inner.attach(attach)?,
            time: self.time,
            random: u64::from(owner.0),
            owner,
            waiting: Slots::default(),
            over: Vec::new(),
        }))
    }
}

struct DelayChannel {
    inner: Box<dyn IoChannel>,
    time: DelayTime,
    /// Random state, initially the owner's number: runs are reproducible.
    random: u64,
    owner: Owner,
    waiting: Slots<Option<Finished>>,
    over: Vec<Finished>,
}

impl DelayChannel {
    fn wait(&mut self, ring: &mut Ring, tag: Tag, buffer: IoBuffer, outcome: IoOutcome) {
        let index = self.waiting.occupy(Some(Finished {
            tag,
            buffer,
            outcome,
        }));
        let time = draw(self.time, &mut self.random);
        ring.timer(self.owner, index.into(), time);
    }
}

impl IoChannel for DelayChannel {
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
        if completion.owner == self.owner {
            let index = completion.token as u32;
            finished.extend(self.waiting[index].take());
            self.waiting.release(index);
            return;
        }
        let mut over = std::mem::take(&mut self.over);
        self.inner.complete(ring, completion, &mut over);
        for one in over.drain(..) {
            self.wait(ring, one.tag, one.buffer, one.outcome);
        }
        self.over = over;
    }

    /// I/O that waits for its time ends at once; other I/O is aborted below.
    fn abort(&mut self, ring: &mut Ring, tag: Tag) {
        let waits = |one: &Option<Finished>| one.as_ref().is_some_and(|one| one.tag == tag);
        match self.waiting.find(waits) {
            Some(index) => ring.cancel(self.owner, index.into()),
            None => self.inner.abort(ring, tag),
        }
    }

    fn close(&mut self, ring: &mut Ring) {
        self.inner.close(ring);
    }

    fn is_closed(&self) -> bool {
        self.in_flight() == 0 && self.inner.is_closed()
    }

    fn in_flight(&self) -> usize {
        self.inner.in_flight() + self.waiting.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn drawn_delays_have_the_configured_quantiles() {
        let mean = Duration::from_micros(1000);
        for time in [
            DelayTime::Uniform(mean, 3 * mean),
            DelayTime::Exponential(mean),
        ] {
            let mut random = 7;
            let mut drawn: Vec<Duration> = (0..20_000).map(|_| draw(time, &mut random)).collect();
            drawn.sort_unstable();
            for q in [0.1, 0.5, 0.9] {
                let found = drawn[(q * 20_000.0) as usize].as_secs_f64();
                let error = found / time.quantile(q).as_secs_f64() - 1.0;
                assert!(error.abs() < 0.05, "{time} {q}: {error}");
            }
        }
    }
}
