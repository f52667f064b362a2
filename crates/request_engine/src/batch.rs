//! Hops **submitted** and **reaped** of a connection.
//!
//! The requests of one receive are submitted together and share their stamps. A virtqueue has a loop of its own: its slots stay until the
//! notification, so it records stamps and fires probes for the whole batch.

use latency::{Operation, Part, PartCounts, Stage, Stamp, Stamps};
use reactor::{Io, Job};

use crate::{Transport, prefetch_following};

/// A request after the steps that did not have to wait.
pub struct Submitted {
    /// Slot of the request.
    pub slot: u32,
    /// Operation for the measurements.
    pub operation: Operation,
    /// Partition of its measurements.
    pub part: Part,
    /// The request is counted now, not in an earlier batch or at the arrival of its data.
    pub is_counted: bool,
    /// The response is ready.
    pub is_done: bool,
}

/// A connection that submits its requests in batches.
pub trait BatchTransport: Transport {
    /// Identifies a request of a batch.
    type Request: Copy;

    /// Returns the requests that can be submitted.
    fn batch(&mut self) -> &mut Vec<Self::Request>;

    /// Returns the next I/O of a request if a prefetch hint for it is useful.
    fn next_job(&mut self, io: &mut Io, request: Self::Request) -> Option<Job>;

    /// Executes the steps of a request. `stamps` are those of its batch. Returns `None` if none was executed, or if no response follows.
    fn submit_one(
        &mut self,
        io: &mut Io,
        request: Self::Request,
        stamps: &Stamps,
    ) -> Option<Submitted>;

    /// Hops **submitted** and **reaped** for the requests of the batch, which share their stamps; `None`: they were noticed now.
    fn submit_batch(&mut self, io: &mut Io, stamps: Option<Stamps>) {
        if self.batch().is_empty() {
            return;
        }
        let now = self.measurement().stamp(io);
        let mut stamps = stamps.unwrap_or(Stamps::noticed(now));
        stamps.mark(Stage::Submitted, now);
        let mut batch = std::mem::take(self.batch());
        let mut counts = None;
        let prefetches = io.wants_prefetch();
        for at in 0..batch.len() {
            if prefetches {
                prefetch_following(io, &batch[at + 1..], |io, one| self.next_job(io, one));
            }
            let Some(submitted) = self.submit_one(io, batch[at], &stamps) else {
                continue;
            };
            let part = submitted.part;
            let counts = counts.get_or_insert(PartCounts {
                part,
                ..PartCounts::default()
            });
            self.measurement().turn_to(counts, part);
            let id = self.measurement().probe_id(submitted.slot);
            probes::submitted(|| std::iter::once(id));
            let counted = match submitted.is_done {
                true => {
                    probes::reaped(|| std::iter::once(id));
                    &mut counts.at_once
                }
                false => &mut counts.pending,
            };
            counted[submitted.operation as usize] += u32::from(submitted.is_counted);
        }
        if self.batch().is_empty() {
            batch.clear();
            *self.batch() = batch;
        }
        let measurement = self.measurement();
        let reaped = measurement.stamp(io);
        if measurement.reaped == Stamp::default() {
            measurement.reaped = reaped;
        }
        measurement.submitted(&counts.unwrap_or_default(), stamps, now, reaped);
    }
}
