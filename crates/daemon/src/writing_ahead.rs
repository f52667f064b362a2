//! What images have in the system's page cache is written while clients are still served. An image makes all of it durable when it is
//! closed; between two daemons that would be a part of the pause.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use bdev::{BlockDevice, BlockingIo};
use block::IoRequest;
use config::BlockDeviceConfig;

use crate::objects::Live;

/// Storage that takes longer keeps nobody from going on.
const LIMIT: Duration = Duration::from_secs(3);

/// What is written in less time is little enough to be left.
const LITTLE: Duration = Duration::from_millis(4);

/// Clients write on meanwhile: what a pass leaves is what they wrote during it.
const PASSES: usize = 4;

/// Flushes the images that are served, some times over, in bounded time.
pub fn write_ahead(live: &Live) {
    let images = live.disks.values().filter(|disk| {
        let config = live.config.disk(disk.name());
        config.is_some_and(|disk| matches!(disk.backend, BlockDeviceConfig::Image { .. }))
    });
    let images: Vec<Arc<dyn BlockDevice>> = images.map(|disk| disk.device()).collect();
    if images.is_empty() {
        return;
    }
    let is_late = Arc::<AtomicBool>::default();
    let (done, written) = mpsc::channel::<()>();
    let late = Arc::clone(&is_late);
    let thread = std::thread::Builder::new().name("write-ahead".to_owned());
    let spawned = thread.spawn(move || {
        passes(images, &late);
        drop(done);
    });
    if let Err(error) = spawned {
        tracing::debug!("nothing is written ahead: {error}");
    }
    if written.recv_timeout(LIMIT) == Err(mpsc::RecvTimeoutError::Timeout) {
        tracing::warn!("images are not written within {} s", LIMIT.as_secs());
        is_late.store(true, Ordering::Relaxed);
    }
}

fn passes(images: Vec<Arc<dyn BlockDevice>>, is_late: &AtomicBool) {
    let mut images: Vec<BlockingIo> = images
        .into_iter()
        .filter_map(|device| BlockingIo::new(device).ok())
        .collect();
    for _ in 0..PASSES {
        let mut is_much = false;
        for image in &mut images {
            if is_late.load(Ordering::Relaxed) {
                return;
            }
            let before = Instant::now();
            // What cannot be written is said when the image is closed.
            let flushed = image.run_plain(&IoRequest::flush());
            is_much |= flushed.is_ok() && before.elapsed() > LITTLE;
        }
        if !is_much {
            return;
        }
    }
}
