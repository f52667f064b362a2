//! Counts open connections. Threads of Ceph's libraries must not run while the process exits and destroys their data.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

static OPEN: Mutex<usize> = Mutex::new(0);
static CLOSED: Condvar = Condvar::new();

fn open() -> MutexGuard<'static, usize> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection, counted until its shutdown has ended.
pub(crate) struct Connection(());

impl Connection {
    pub fn new() -> Connection {
        *open() += 1;
        Connection(())
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        *open() -= 1;
        CLOSED.notify_all();
    }
}

/// Waits at process exit until all connections to clusters are closed, at most for `limit`. The last user of a connection closes it,
/// possibly on another thread.
pub fn wait_until_closed(limit: Duration) {
    let waited = CLOSED.wait_timeout_while(open(), limit, |open| *open > 0);
    let (open, _) = waited.unwrap_or_else(PoisonError::into_inner);
    if *open > 0 {
        tracing::warn!(
            "connections to Ceph clusters did not close within {} s",
            limit.as_secs()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_waits_for_connections_of_other_threads() {
        let connection = Connection::new();
        let closing = std::thread::spawn(move || drop(connection));
        wait_until_closed(Duration::MAX);
        assert_eq!(*open(), 0);
        closing.join().unwrap();
        let _left = Connection::new();
        wait_until_closed(Duration::from_millis(1));
    }
}
