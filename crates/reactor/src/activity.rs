//! Wakes one waiting thread when a worker wakes up for a client or a disk. An idle process needs no timer to notice its next request.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::Thread;
use std::time::Duration;

/// A thread that waits for activity, and whether it waits now.
#[derive(Debug, Default)]
pub struct Activity {
    is_awaited: AtomicBool,
    waiter: OnceLock<Thread>,
}

impl Activity {
    /// Waits for the next activity, for a call of [`Activity::wake`], or for `limit`. Only one thread may ever call it. Activity between two
    /// calls ends the second wait at once. A worker that is awake when the first wait begins reports nothing, so the caller must look at the
    /// counters after a limited wait before it waits without a limit.
    pub fn wait(&self, limit: Option<Duration>) {
        self.waiter.get_or_init(std::thread::current);
        self.is_awaited.store(true, Ordering::SeqCst);
        match limit {
            Some(limit) => std::thread::park_timeout(limit),
            None => std::thread::park(),
        }
    }

    /// Ends a wait, or the next one.
    pub fn wake(&self) {
        if let Some(waiter) = self.waiter.get() {
            waiter.unpark();
        }
    }

    /// Reports activity: one load, unless a thread waits.
    #[inline]
    pub(crate) fn report(&self) {
        if self.is_awaited.load(Ordering::Relaxed) {
            self.end_wait();
        }
    }

    #[cold]
    fn end_wait(&self) {
        if self.is_awaited.swap(false, Ordering::SeqCst) {
            self.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Instant;

    use super::*;

    #[test]
    fn activity_ends_the_wait_of_a_thread() {
        let activity = Arc::new(Activity::default());
        let waiting = {
            let activity = activity.clone();
            std::thread::spawn(move || activity.wait(None))
        };
        while !waiting.is_finished() {
            activity.report();
            std::thread::yield_now();
        }
        waiting.join().unwrap();
        // Without a waiting thread nothing is reported.
        activity.report();
        assert!(!activity.is_awaited.load(Ordering::SeqCst));
    }

    #[test]
    fn a_limited_wait_ends() {
        let activity = Activity::default();
        let start = Instant::now();
        activity.wait(Some(Duration::from_millis(5)));
        // Activity between two waits ends the second one.
        activity.report();
        activity.wait(None);
        assert!(start.elapsed() < Duration::from_secs(60));
    }
}
