//! USDT probes of the provider `lunette`, one per stage of a request, for bpftrace and similar tools.
//!
//! A probe without a tracer costs a load and a branch per batch. The requests of the batch are iterated only if a tracer is
//! attached. A request's ID is unique among those in flight in the process. Unsafe: the crate `probe` emits the probes as assembler
//! instructions and notes. Scripts: `scripts/trace/`.

use probe::probe_lazy;

/// Returns the upper half of the request IDs of a source. `worker` and `source` are the indexes of the worker and the source.
#[inline]
pub const fn queue(worker: u32, source: u32) -> u64 {
    // Starts at 1, so that no ID is 0.
    (worker as u64 + 1) << 48 | (source as u64 & 0xffff) << 32
}

/// Returns the ID of the request in a slot of a queue.
#[inline]
pub const fn id(queue: u64, slot: u32) -> u64 {
    queue | slot as u64
}

/// A parsed request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parsed {
    /// Request ID.
    pub id: u64,
    /// 0 read, 1 write, 2 flush, 3 discard, 4 other.
    pub operation: u64,
    /// Offset on the disk, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Fires a probe for each request of a batch. All probes of a name share this one code location, because each location has its own
/// semaphore, and tools raise only one per name.
macro_rules! each {
    ($batch:expr, $probe:ident, $one:ident => $first:expr $(, $more:expr)*) => {{
        let mut make = Some($batch);
        let mut batch = None;
        loop {
            let $one;
            // Arguments are evaluated in order, and only if a tracer is attached.
            let is_attached = probe_lazy!(
                lunette,
                $probe,
                {
                    if let Some(make) = make.take() {
                        batch = Some(make().peekable());
                    }
                    // Callers pass at least one request.
                    $one = batch.as_mut().and_then(Iterator::next).unwrap_or_default();
                    $first
                }
                $(, $more)*
            );
            let is_last = batch.as_mut().is_none_or(|batch| batch.peek().is_none());
            if !is_attached || is_last {
                break;
            }
        }
    }};
}

/// A queue's worker has found requests.
#[inline]
pub fn noticed(queue: u64) {
    probe_lazy!(lunette, noticed, queue);
}

/// Requests (at least one) were taken from their ring or connection: IDs and tags (descriptor head, initiator task tag). `number`
/// is the queue's index in its device, or the connection's worker.
#[inline]
pub fn popped<B: Iterator<Item = (u64, u64)>>(number: u32, batch: impl FnOnce() -> B) {
    each!(batch, popped, one => one.0, one.1, u64::from(number));
}

/// Requests (at least one) were parsed and checked.
#[inline]
pub fn parsed<B: Iterator<Item = Parsed>>(batch: impl FnOnce() -> B) {
    each!(batch, parsed, one => one.id, one.operation, one.offset, one.length);
}

/// The first solicited write data has arrived.
#[inline]
pub fn awaited(id: u64) {
    probe_lazy!(lunette, awaited, id);
}

/// The last solicited write data has arrived.
#[inline]
pub fn received(id: u64) {
    probe_lazy!(lunette, received, id);
}

/// Requests (at least one) were submitted to the back end.
#[inline]
pub fn submitted<B: Iterator<Item = u64>>(batch: impl FnOnce() -> B) {
    each!(batch, submitted, one => one);
}

/// Requests (at least one) were completed by the back end.
#[inline]
pub fn reaped<B: Iterator<Item = u64>>(batch: impl FnOnce() -> B) {
    each!(batch, reaped, one => one);
}

/// The responses of requests (at least one) are written. The flag is true for success.
#[inline]
pub fn answered<B: Iterator<Item = (u64, bool)>>(batch: impl FnOnce() -> B) {
    each!(batch, answered, one => one.0, u64::from(one.1));
}

/// The client of requests (at least one) was notified, or needs no notification.
#[inline]
pub fn notified<B: Iterator<Item = u64>>(batch: impl FnOnce() -> B) {
    each!(batch, notified, one => one);
}
