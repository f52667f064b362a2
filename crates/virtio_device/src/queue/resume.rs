//! Start position of a ring without an in-flight region, determined from the ring itself.

use std::time::Duration;

use guest_memory::RingMemory;
use latency::Labels;
use reactor::RateLimit;
use virtqueue::{DeviceQueue, QueueError, Resumed};

/// Limits the log if a front end starts one ring again and again.
static RESUMED_LOG: RateLimit = RateLimit::with_burst(Duration::from_millis(100), 64);

/// Resumes from the in-flight region. Without one, resumes with the requests that are unanswered according to the ring. Logs if this
/// differs from the front end's base.
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
        repeated,
        lost,
    } = resumed;
    if let Some(suppressed) = RESUMED_LOG.pass() {
        tracing::warn!(
            export = labels.export,
            queue = labels.queue,
            base,
            used,
            repeated,
            lost,
            suppressed,
            "ring resumed at its used index: the base differs, and there is no in-flight region"
        );
    }
    Ok(())
}
