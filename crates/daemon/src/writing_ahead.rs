//! Writes dirty data from the page cache while clients are still served. Closing an image makes its data durable, and so does the end of a
//! turn of a raw file, which would prolong the pause between two daemons.

use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use bdev::{BlockDevice, BlockingIo};
use block::IoRequest;
use config::{BlockDeviceConfig, CacheMode};

use crate::helper_threads::HelperThreads;
use crate::objects::Live;

/// No flush starts after this time. Slow storage writes the rest when the disks are closed.
const LIMIT: Duration = Duration::from_secs(3);

/// Time after that for the flush in progress.
const LAST_FLUSH_MAX: Duration = Duration::from_secs(1);

/// A flush that takes less leaves little to write.
const LITTLE: Duration = Duration::from_millis(4);

/// Most passes. Each pass leaves the data that clients write during it.
const PASSES: usize = 4;

/// Flushes the served disks several times and closes its channels. Leaves disks on storage that does not respond.
pub fn write_ahead(live: &Live) {
    let until = Instant::now() + LIMIT;
    let threads = HelperThreads::default();
    let (written, all_written) = mpsc::channel::<()>();
    for disk in live.disks.values() {
        let config = live.config.disk(disk.name()).map(|disk| &disk.backend);
        let Some(backend) = config.filter(|backend| is_written_at_close(backend)) else {
            continue;
        };
        let (device, written) = (disk.device(), written.clone());
        let write = move || {
            flush_until_little_is_left(device, until);
            drop(written);
        };
        // A failure means that the disk is written when it is closed.
        let place = backend.blocking_storage().unwrap_or_default();
        threads.run(&place, write).ok();
    }
    drop(written);
    let left = until.saturating_duration_since(Instant::now());
    if all_written.recv_timeout(left + LAST_FLUSH_MAX) == Err(mpsc::RecvTimeoutError::Timeout) {
        tracing::warn!(
            "disks are still being written ahead, the storage is slow or does not respond"
        );
    }
}

fn is_written_at_close(backend: &BlockDeviceConfig) -> bool {
    match backend {
        BlockDeviceConfig::Image { .. } => true,
        BlockDeviceConfig::File { cache, .. } => {
            backend.takes_turns() && *cache == CacheMode::Writeback
        }
        _ => false,
    }
}

fn flush_until_little_is_left(device: Arc<dyn BlockDevice>, until: Instant) {
    let Ok(mut disk) = BlockingIo::new(device) else {
        return;
    };
    for _ in 0..PASSES {
        let before = Instant::now();
        // A failed write is reported when the disk is closed.
        let flushed = disk.run_plain(&IoRequest::flush());
        if before > until || flushed.is_err() || before.elapsed() < LITTLE {
            return;
        }
    }
}
