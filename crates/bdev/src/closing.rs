//! Flushes devices before they are closed, if a flush after the next opening would not cover their acknowledged writes.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use block::IoRequest;

use crate::{BlockDevice, BlockingIo, RemoteDevice};

/// Longest wait for such a flush. Guests wait meanwhile when a daemon hands its disks over to the next one.
const FLUSH_MAX: Duration = Duration::from_secs(3);

/// Returns true if [`flush_before_close`] has something to do.
#[must_use]
pub fn needs_flush_before_close(device: &dyn BlockDevice) -> bool {
    let remote = device.capabilities().remote;
    remote.is_some_and(RemoteDevice::needs_flush_before_close)
}

/// Flushes a device for which [`RemoteDevice::needs_flush_before_close`] is true. Blocks for a few seconds at most if the storage does not
/// respond. Called when no client uses the device any more.
///
/// # Errors
/// The device fails or does not respond: writes since its last flush may be lost, although the reopened device will not report that.
pub fn flush_before_close(device: &Arc<dyn BlockDevice>) -> io::Result<()> {
    if !needs_flush_before_close(&**device) {
        return Ok(());
    }
    let io = BlockingIo::new(Arc::clone(device))?;
    let mut io = io.while_wanted(|| true, Some(FLUSH_MAX));
    io.run_plain(&IoRequest::flush())
}
