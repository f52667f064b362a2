//! Writes dirty data of images from the page cache while clients are still served. Closing an image makes its data durable, which would
//! prolong the pause between two daemons.

use std::time::{Duration, Instant};

use bdev::BlockingIo;
use block::IoRequest;
use config::BlockDeviceConfig;

use crate::objects::Live;

/// No flush starts after this time. Slow storage writes the rest when the images are closed.
const LIMIT: Duration = Duration::from_secs(3);

/// A flush that takes less leaves little to write.
const LITTLE: Duration = Duration::from_millis(4);

/// Most passes. Each pass leaves the data that clients write during it.
const PASSES: usize = 4;

/// Flushes the served images several times and closes its channels.
pub fn write_ahead(live: &Live) {
    let until = Instant::now() + LIMIT;
    let images = live.disks.values().filter(|disk| {
        let config = live.config.disk(disk.name());
        config.is_some_and(|disk| matches!(disk.backend, BlockDeviceConfig::Image { .. }))
    });
    let images = images.filter_map(|disk| BlockingIo::new(disk.device()).ok());
    let mut images: Vec<BlockingIo> = images.collect();
    for _ in 0..PASSES {
        let mut is_much = false;
        for image in &mut images {
            let before = Instant::now();
            if before > until {
                return tracing::info!("writing images ahead stopped after {} s", LIMIT.as_secs());
            }
            // A failed write is reported when the image is closed.
            let flushed = image.run_plain(&IoRequest::flush());
            is_much |= flushed.is_ok() && before.elapsed() > LITTLE;
        }
        if !is_much {
            return;
        }
    }
}
