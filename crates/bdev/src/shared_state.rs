//! State that a device stores with its content for all daemons that serve it, needed by each before its next command.
//!
//! The state is opaque to the device. [`block::IoKind::ReplaceState`] replaces it if no other daemon has in the meantime, and ends only
//! after every other daemon has adopted it. A daemon that does not in time is excluded: its I/O no longer reaches the content.

use std::sync::Arc;
use std::time::Duration;

/// Maximum length of the state in bytes.
pub const STATE_MAX: usize = 128 << 10;

/// Bytes before the state in the buffer of [`block::IoKind::ReplaceState`]: the replaced version, most significant byte first.
pub const STATE_VERSION_LENGTH: usize = 8;

/// A device that stores such a state.
pub trait SharedState: Send + Sync {
    /// Joins until the membership is dropped. Does not block: `observer` is notified afterwards.
    fn join(&self, observer: Arc<dyn StateObserver>) -> StateMembership;

    /// Returns why this member does not have the present state; `None` if it has, or is no member.
    fn unknown(&self) -> Option<String>;
}

/// User of the state in one daemon. Called on threads of the device; must not block for long.
pub trait StateObserver: Send + Sync {
    /// Adopts a state for commands begun from now on. An older version than before is ignored.
    ///
    /// # Errors
    /// The state is invalid; the daemon acts as without one.
    fn changed(&self, version: u64, state: &[u8]) -> Result<(), String>;

    /// Returns true if all commands have ended that began under an earlier state and that the last one forbids.
    fn is_settled(&self) -> bool;

    /// Sets whether the last state is the present one. If not, no command that depends on it may begin.
    fn set_current(&self, current: bool);

    /// Sets how long the last state holds without further calls, on the process' clock. Afterwards others may replace it without an
    /// acknowledgement.
    fn set_valid_until(&self, until: Duration);

    /// Returns the state after power on, if it changes. Called if no daemon served the content before.
    fn after_power_on(&self, version: u64, state: &[u8]) -> Option<Vec<u8>>;
}

/// Membership of a daemon. Dropping it leaves, which may take a moment.
pub struct StateMembership(Option<Box<dyn FnOnce() + Send + Sync>>);

impl StateMembership {
    /// Creates a membership that `leave` ends.
    pub(crate) fn new(leave: impl FnOnce() + Send + Sync + 'static) -> StateMembership {
        StateMembership(Some(Box::new(leave)))
    }
}

impl Drop for StateMembership {
    fn drop(&mut self) {
        if let Some(leave) = self.0.take() {
            leave();
        }
    }
}
