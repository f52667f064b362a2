//! State that a device stores with its content for all daemons that serve it. Each daemon must have the present state before it serves the
//! next command.
//!
//! The state is opaque to the device. [`block::IoKind::ReplaceState`] replaces it, if no other daemon has done so in the meantime. The I/O
//! ends only after every other daemon has adopted the new state. A daemon that does not adopt it in time is excluded: no I/O that it has
//! begun reaches the content any more.

use std::sync::Arc;
use std::time::Duration;

/// Maximum length of the state in bytes.
pub const STATE_MAX: usize = 128 << 10;

/// Bytes before the state in the buffer of [`block::IoKind::ReplaceState`]: the version that it replaces, most significant byte first.
pub const STATE_VERSION_LENGTH: usize = 8;

/// A device that stores such a state.
pub trait SharedState: Send + Sync {
    /// Joins until the membership is dropped. Does not block: `observer` is notified when it has joined.
    fn join(&self, observer: Arc<dyn StateObserver>) -> StateMembership;

    /// Returns the reason why this daemon, although a member, does not have the present state; `None` if it has, or is not a member.
    fn unknown(&self) -> Option<String>;
}

/// User of the state within one daemon. Called on threads of the device; must not block for long.
pub trait StateObserver: Send + Sync {
    /// Adopts a state, which applies to commands begun from now on. An older version than one adopted before is ignored.
    ///
    /// # Errors
    /// The state is invalid; the daemon then acts as if it had no state.
    fn changed(&self, version: u64, state: &[u8]) -> Result<(), String>;

    /// Returns true if all commands have ended that were begun under an earlier state and that the last adopted one does not permit.
    fn is_settled(&self) -> bool;

    /// Sets whether the last adopted state is the present one. If not, no command that depends on it may begin.
    fn set_current(&self, current: bool);

    /// Sets the time on the process' clock until which the last adopted state holds, unless a later call changes it. After that time others
    /// may replace the state without an acknowledgement.
    fn set_valid_until(&self, until: Duration);

    /// Returns the state after power on; `None`: it does not change. Called if no daemon has served the content before this one.
    fn after_power_on(&self, version: u64, state: &[u8]) -> Option<Vec<u8>>;
}

/// Membership of a daemon. Dropping it ends the membership, which may take a moment.
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
