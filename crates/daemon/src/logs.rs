//! What the daemon logs, and how that is changed while it runs. Whoever set up the log says how.

use std::fmt;
use std::sync::Arc;

/// The log's filter.
pub trait LogLevels: Send + Sync {
    /// What is logged: a level, or PART=LEVEL,...
    fn filter(&self) -> String;

    /// Logs something else from now on.
    ///
    /// # Errors
    /// Why that is no filter.
    fn set_filter(&self, filter: &str) -> Result<(), String>;
}

/// A handle on the log.
#[derive(Clone)]
pub struct LogHandle(pub Arc<dyn LogLevels>);

impl fmt::Debug for LogHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LogHandle({})", self.0.filter())
    }
}
