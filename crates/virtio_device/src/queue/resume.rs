//! Where a ring goes on that nobody kept an in-flight region of: only the ring can tell.

use std::time::Duration;

use guest_memory::RingMemory;
use latency::Labels;
use reactor::RateLimit;
use virtqueue::{DeviceQueue, QueueError, Resumed};

/// A front end that starts one ring again and again must not fill the log.
static RESUMED_LOG: RateLimit = RateLimit::with_burst(Duration::from_millis(100), 64);

/// Goes on as the in-flight region says; without one with what the ring says is unanswered, with a log line, where the front end has
/// said otherwise.
pub(super) fn resume(
    ring: &mut DeviceQueue,
    region: Option<RingMemory>,
    labels: &Labels,
) -> Result<(), QueueError> {
    if let Some(part) = region {
        return ring.track(part);
    }
    let Some(resumed) = ring.resume() else {
        return Ok(());
    };
    let Resumed {
        base,
        used,
        again,
        lost,
    } = resumed;
    if let Some(suppressed) = RESUMED_LOG.pass() {
        tracing::warn!(
            export = labels.export,
            queue = labels.queue,
            base,
            used,
            again,
            lost,
            suppressed,
            "ring resumes at its used index: base differs, and there is no in-flight region"
        );
    }
    Ok(())
}
