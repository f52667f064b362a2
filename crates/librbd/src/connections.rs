//! Connections that are open, counted: Ceph's libraries have threads of their own, which must not run on while a process ends and destroys
//! what they use.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

static OPEN: Mutex<usize> = Mutex::new(0);
static CLOSED: Condvar = Condvar::new();

fn open() -> MutexGuard<'static, usize> {
    OPEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A connection, until its shutdown has ended.
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

/// Before a process ends: waits until no connection to a cluster is left, at most for `limit`. Whoever used one last closes it, it may be on
/// another thread.
pub fn wait_until_closed(limit: Duration) {
    let waited = CLOSED.wait_timeout_while(open(), limit, |open| *open > 0);
    let (open, _) = waited.unwrap_or_else(PoisonError::into_inner);
    if *open > 0 {
        tracing::warn!(
            "connections to ceph clusters are left open: they do not end within {} s",
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
