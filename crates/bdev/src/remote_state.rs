//! Availability of a device that reconnects by itself, and the callback for changes: code for units, RBD images and NBD exports.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use latency::Clock;

use crate::DiskState;

/// Written by the threads that maintain connections; read by the control plane.
#[derive(Default)]
pub(crate) struct RemoteState {
    /// Reason for the device being unavailable; time of the next attempt, on the clock of the process.
    unavailable: Mutex<Option<(String, Duration)>>,
    changed: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl RemoteState {
    fn unavailable(&self) -> MutexGuard<'_, Option<(String, Duration)>> {
        self.unavailable
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }

    /// Records that the device is unavailable, and the time until the next attempt.
    pub fn set_unavailable(&self, reason: String, next_try: Duration) {
        *self.unavailable() = Some((reason, Clock::shared().elapsed() + next_try));
    }

    /// Records that the device is available.
    pub fn set_ready(&self) {
        *self.unavailable() = None;
    }

    /// Returns the state, as [`crate::RemoteDevice::state`].
    pub fn get(&self) -> DiskState {
        match &*self.unavailable() {
            None => DiskState::Ready,
            Some((reason, next_try)) => DiskState::Unavailable {
                reason: reason.clone(),
                next_try: next_try.saturating_sub(Clock::shared().elapsed()),
            },
        }
    }

    /// Registers the callback of [`crate::RemoteDevice::on_change`].
    pub fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        // Set only once, by the owner of the disk.
        self.changed.set(changed).ok();
    }

    /// Reports a new size, or that the device is available again.
    pub fn notify_change(&self) {
        if let Some(changed) = self.changed.get() {
            changed();
        }
    }
}
