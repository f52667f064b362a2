//! What images have in the system's page cache is written while clients are still served. An image makes all of it durable when it is
//! closed; between two daemons that would be a part of the pause.

use std::time::{Duration, Instant};

use bdev::BlockingIo;
use block::IoRequest;
use config::BlockDeviceConfig;

use crate::objects::Live;

/// After this no further flush begins: storage is slow, and what is left is written when the images are closed.
const LIMIT: Duration = Duration::from_secs(3);

/// What is written in less time is little enough to be left.
const LITTLE: Duration = Duration::from_millis(4);

/// Clients write on meanwhile: what a pass leaves is what they wrote during it.
const PASSES: usize = 4;

/// Flushes the images that are served, some times over. Nobody has them open here afterwards.
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
                return tracing::info!("images are not written after {} s", LIMIT.as_secs());
            }
            // What cannot be written is said when the image is closed.
            let flushed = image.run_plain(&IoRequest::flush());
            is_much |= flushed.is_ok() && before.elapsed() > LITTLE;
        }
        if !is_much {
            return;
        }
    }
}
