//! The life of a request: the order of its hops, and the stamp of each.
//!
//! A transport implements one hook per hop. A virtqueue calls [`Transport::take_in`] when its worker drains it, a connection when bytes have
//! arrived. The worker calls [`Transport::publish_responses`] at the end of the iteration. Both are inlined into these callers.

use latency::{Stage, Stamp, Stamps};
use reactor::Io;

use crate::Measurement;

/// A source of requests: a virtqueue or a connection.
pub trait Transport {
    /// Returns the measurements.
    fn measurement(&mut self) -> &mut Measurement;

    /// Returns the number of requests in flight for the statistics.
    fn requests(&self) -> usize;

    /// **popped**: takes requests from the client. Received bytes of a connection need no further step.
    #[inline(always)]
    fn pop(&mut self) {}

    /// **parsed**: parses requests into slots.
    fn parse(&mut self, io: &mut Io);

    /// **submitted**, **reaped**: submits the I/Os of the parsed requests. Some complete synchronously.
    fn submit(&mut self, io: &mut Io, stamps: Stamps);

    /// **answered**: writes the responses of completed requests. Returns true if the client needs a notification.
    fn answer(&mut self, io: &mut Io) -> bool;

    /// **notified**: notifies the client, if that is needed. Returns true if this took time.
    fn notify(&mut self, io: &mut Io, is_needed: bool) -> bool;

    /// Passes the requests that were just answered to [`Measurement::note_slow`], unless that was done before their slots were released.
    #[cold]
    fn describe_slow(&mut self) {}

    /// Hops from **popped** to **reaped**, for requests that were noticed at this time.
    #[inline(always)]
    fn take_in(&mut self, io: &mut Io, noticed: Stamp) {
        let mut stamps = Stamps::noticed(noticed);
        self.pop();
        stamps.mark(Stage::Popped, self.measurement().stamp(io));
        self.parse(io);
        stamps.mark(Stage::Parsed, self.measurement().stamp(io));
        self.submit(io, stamps);
    }

    /// Hops **answered** and **notified**, and the measurements of the iteration.
    #[inline(always)]
    fn publish_responses(&mut self, io: &mut Io) {
        let is_needed = self.answer(io);
        let answered = self.measurement().stamp(io);
        let notified = match self.notify(io, is_needed) {
            true => self.measurement().stamp(io),
            false => answered,
        };
        if self.measurement().notified(answered, notified) {
            self.describe_slow();
            self.measurement()
                .record_slow(io.clock(), answered, notified);
        }
        let requests = self.requests();
        self.measurement().end_iteration(requests);
    }
}
