//! Log of a daemon; `lunette log` changes its filter.

use std::sync::Arc;

use cli_common::Levels;
use daemon::{LogHandle, LogLevels};

struct Filter(Levels);

impl LogLevels for Filter {
    fn filter(&self) -> String {
        self.0.filter()
    }

    fn set_filter(&self, filter: &str) -> Result<(), String> {
        self.0.set_filter(filter)
    }
}

/// Adapts a log filter to the daemon's interface.
pub fn handle(levels: Levels) -> LogHandle {
    LogHandle(Arc::new(Filter(levels)))
}
