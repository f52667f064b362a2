//! Log filter, and its change at run time. Implemented by the program that set up the log.

use std::fmt;
use std::sync::Arc;

/// The log's filter.
pub trait LogLevels: Send + Sync {
    /// Returns the filter: a level, or PART=LEVEL,...
    fn filter(&self) -> String;

    /// Sets the filter.
    ///
    /// # Errors
    /// The reason why `filter` is invalid.
    fn set_filter(&self, filter: &str) -> Result<(), String>;
}

/// Handle of the log.
#[derive(Clone)]
pub struct LogHandle(pub Arc<dyn LogLevels>);

impl fmt::Debug for LogHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LogHandle({})", self.0.filter())
    }
}
