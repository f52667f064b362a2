//! Where a ring goes on that nobody kept an in-flight region of: only the ring can tell.

use std::time::Duration;

use reactor::RateLimit;
use timeline::Labels;
use virtqueue::{DeviceQueue, Resumed};

/// A front end that starts one ring again and again must not fill the log.
static RESUMED_LOG: RateLimit = RateLimit::with_burst(Duration::from_millis(100), 64);

/// Goes on with what the ring says is unanswered, with a log line, where the front end has said otherwise.
pub(super) fn resume(ring: &mut DeviceQueue, labels: &Labels) {
    let Some(resumed) = ring.resume() else {
        return;
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
            "ring goes on at its used index: base differs, and the front end keeps no in-flight region"
        );
    }
}
