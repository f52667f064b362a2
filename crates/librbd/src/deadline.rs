//! Calls that may block for as long as a cluster is away, bounded by a time.
//!
//! Neither library has a call that can be interrupted. A call that takes too long is left to its thread, which ends when
//! the cluster answers; its late result is dropped there.

use std::sync::mpsc;
use std::time::Duration;

use crate::Error;

/// Runs `work` on a thread of its own for at most `limit`.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    what: &str,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (done, result) = mpsc::sync_channel(1);
    let spawned = std::thread::Builder::new()
        .name("rbd-call".to_owned())
        .spawn(move || {
            // Nobody waits any more: what it made is dropped here.
            done.send(work()).ok();
        });
    if let Err(error) = spawned {
        let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
        return Err(Error::failed(
            format!("start a thread to {what}"),
            errno,
            "",
        ));
    }
    match result.recv_timeout(limit) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Timeout) => Err(Error::timed_out(what, limit)),
        Err(mpsc::RecvTimeoutError::Disconnected) => Err(Error::failed(what, libc::ECANCELED, "")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_call_that_takes_too_long_is_given_up_and_its_result_dropped() {
        let made = Arc::new(());
        let (go_on, wait) = mpsc::channel::<()>();
        let inside = Arc::clone(&made);
        let result = within(Duration::from_millis(10), "wait", move || {
            wait.recv().ok();
            Ok(inside)
        });
        assert!(matches!(result, Err(Error::TimedOut { .. })));
        drop(go_on);
        while Arc::strong_count(&made) > 1 {
            std::thread::yield_now();
        }
        assert_eq!(within(Duration::MAX, "add", || Ok(1 + 1)).unwrap(), 2);
    }
}
