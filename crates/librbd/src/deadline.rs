//! Timeouts for calls that block while a cluster is unreachable.
//!
//! The libraries have no interruptible calls. After the timeout the call continues on its thread until the cluster
//! answers; the late result is dropped there.

use std::sync::mpsc;
use std::time::Duration;

use crate::Error;

/// Runs `work` on a new thread and waits for at most `limit`.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    operation: &str,
    work: impl FnOnce() -> Result<T, Error> + Send + 'static,
) -> Result<T, Error> {
    let (done, result) = mpsc::sync_channel(1);
    let spawned = std::thread::Builder::new()
        .name("rbd-call".to_owned())
        .spawn(move || {
            // After the timeout, the result is dropped here.
            done.send(work()).ok();
        });
    if let Err(error) = spawned {
        let errno = error.raw_os_error().unwrap_or(libc::EAGAIN);
        return Err(Error::failed(
            format!("start a thread to {operation}"),
            errno,
            "",
        ));
    }
    match result.recv_timeout(limit) {
        Ok(result) => result,
        Err(mpsc::RecvTimeoutError::Timeout) => Err(Error::timed_out(operation, limit)),
        Err(mpsc::RecvTimeoutError::Disconnected) => {
            Err(Error::failed(operation, libc::ECANCELED, ""))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[test]
    fn a_call_that_takes_too_long_is_given_up_and_its_result_dropped() {
        let made = Arc::new(());
        let (release, wait) = mpsc::channel::<()>();
        let inside = Arc::clone(&made);
        let result = within(Duration::from_millis(10), "wait", move || {
            wait.recv().ok();
            Ok(inside)
        });
        assert!(matches!(result, Err(Error::TimedOut { .. })));
        drop(release);
        while Arc::strong_count(&made) > 1 {
            std::thread::yield_now();
        }
        assert_eq!(within(Duration::MAX, "add", || Ok(1 + 1)).unwrap(), 2);
    }
}
