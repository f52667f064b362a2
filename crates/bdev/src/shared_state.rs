//! State that a device keeps with its content for all daemons that serve it: what each of them has to know before it serves the next
//! command.
//!
//! The device does not look into the state. It replaces it by [`block::IoKind::ReplaceState`] if nobody else has meanwhile, has every
//! other daemon take over what it has become, and only then ends that I/O. A daemon that does not take it over in time is excluded:
//! nothing that it has begun reaches the content any more.

use std::sync::Arc;
use std::time::Duration;

/// The longest state in bytes.
pub const STATE_MAX: usize = 128 << 10;

/// Bytes before the state in the buffer of [`block::IoKind::ReplaceState`]: the version that it replaces, most significant byte first.
pub const STATE_VERSION_LENGTH: usize = 8;

/// A device that keeps such a state.
pub trait SharedState: Send + Sync {
    /// Takes part from now on, until the membership is dropped. Does not block: `observer` hears when it has joined.
    fn join(&self, observer: Arc<dyn StateObserver>) -> StateMembership;

    /// Why this daemon, which takes part, does not know the state just now; `None`: it does, or takes no part.
    fn unknown(&self) -> Option<String>;
}

/// Whoever acts on the state, within one daemon. Called on threads of the device; must not block for long.
pub trait StateObserver: Send + Sync {
    /// The state is this now; what is begun from now on follows it. An older version than one that was given before means nothing.
    ///
    /// # Errors
    /// Why the state makes no sense: then it is as if the daemon knew none.
    fn changed(&self, version: u64, state: &[u8]) -> Result<(), String>;

    /// Has everything ended that was begun under an earlier state and that the one given last does not allow?
    fn is_settled(&self) -> bool;

    /// Is the state that was given last the one that holds? If not, nothing may be begun that depends on it.
    fn set_current(&self, current: bool);

    /// The state that was given last is the one that holds up to this time of the process' clock, if nothing else is said: others may
    /// replace it afterwards without being acknowledged.
    fn set_valid_until(&self, until: Duration);

    /// No daemon has served the content before this one. What the state becomes by that; `None`: it stays.
    fn after_power_on(&self, version: u64, state: &[u8]) -> Option<Vec<u8>>;
}

/// That a daemon takes part. Dropping it ends that, and may take a moment.
pub struct StateMembership(Option<Box<dyn FnOnce() + Send + Sync>>);

impl StateMembership {
    /// One that is ended by `leave`.
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
