//! USDT probes of the provider `lunette`, one at each stage of a request's way: what bpftrace attaches to.
//!
//! A probe that nobody is attached to costs a load and a branch, and that once for a batch: only when somebody is, the
//! batch's requests are walked. A request's ID is unique among those in flight in the process. Unsafe: the probes are
//! instructions and notes that the crate `probe` writes as assembler. Scripts: `scripts/trace/`.

use probe::probe_lazy;

/// Where a source's requests are: the upper half of their IDs. `worker` and `source` are the source's place.
#[inline]
pub const fn queue(worker: u32, source: u32) -> u64 {
    // From 1, so that no ID is 0.
    (worker as u64 + 1) << 48 | (source as u64 & 0xffff) << 32
}

/// The ID of the request in a slot of a queue.
#[inline]
pub const fn id(queue: u64, slot: u32) -> u64 {
    queue | slot as u64
}

/// A request as it was read.
#[derive(Clone, Copy, Debug, Default)]
pub struct Parsed {
    /// Its ID.
    pub id: u64,
    /// 0 read, 1 write, 2 flush, 3 discard, 4 other.
    pub operation: u64,
    /// First byte on the disk.
    pub offset: u64,
    /// Bytes.
    pub length: u64,
}

/// Fires a probe for each of a batch. One place in the code for all of them, for each place has a semaphore of its own, and
/// tools raise only one for each name.
macro_rules! each {
    ($batch:expr, $probe:ident, $one:ident => $first:expr $(, $more:expr)*) => {{
        let mut make = Some($batch);
        let mut batch = None;
        loop {
            let $one;
            // Arguments are evaluated in their order, and only when somebody is attached.
            let is_attached = probe_lazy!(
                lunette,
                $probe,
                {
                    if let Some(make) = make.take() {
                        batch = Some(make().peekable());
                    }
                    // Callers have at least one.
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

/// A queue's worker saw that there is work.
#[inline]
pub fn noticed(queue: u64) {
    probe_lazy!(lunette, noticed, queue);
}

/// These requests, at least one, were taken from their ring or connection: IDs and tags (descriptor head, initiator task
/// tag). `number` is the queue's index in its device, or the connection's worker.
#[inline]
pub fn popped<B: Iterator<Item = (u64, u64)>>(number: u32, batch: impl FnOnce() -> B) {
    each!(batch, popped, one => one.0, one.1, u64::from(number));
}

/// These, at least one, were read and checked.
#[inline]
pub fn parsed<B: Iterator<Item = Parsed>>(batch: impl FnOnce() -> B) {
    each!(batch, parsed, one => one.id, one.operation, one.offset, one.length);
}

/// The first of the write data that the client was asked for is there.
#[inline]
pub fn awaited(id: u64) {
    probe_lazy!(lunette, awaited, id);
}

/// The last of it is.
#[inline]
pub fn received(id: u64) {
    probe_lazy!(lunette, received, id);
}

/// The back end was given these, at least one.
#[inline]
pub fn submitted<B: Iterator<Item = u64>>(batch: impl FnOnce() -> B) {
    each!(batch, submitted, one => one);
}

/// It gave these, at least one, back.
#[inline]
pub fn reaped<B: Iterator<Item = u64>>(batch: impl FnOnce() -> B) {
    each!(batch, reaped, one => one);
}

/// The answers of these, at least one, are written; were they good ones?
#[inline]
pub fn answered<B: Iterator<Item = (u64, bool)>>(batch: impl FnOnce() -> B) {
    each!(batch, answered, one => one.0, u64::from(one.1));
}

/// The client of these, at least one, was told, or need not be.
#[inline]
pub fn notified<B: Iterator<Item = u64>>(batch: impl FnOnce() -> B) {
    each!(batch, notified, one => one);
}
