//! Threads for calls that may block: opening, sizing and closing disks on a file system or target that may not answer. The owner makes no
//! such call itself, so one dead mount does not stop changes to other disks.
//!
//! A location is a folder, a target or a cluster. Tasks of one location run on at most [`OF_LOCATION_MAX`] threads, which leaves threads for other
//! locations. A thread is started for a task and ends when no task is left.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most threads of all locations.
const THREADS_MAX: usize = 256;
/// Most threads of one location.
const OF_LOCATION_MAX: usize = 32;

pub(crate) type Task = Box<dyn FnOnce() + Send>;

#[derive(Clone, Default)]
pub(crate) struct HelperThreads(Arc<Mutex<ThreadPool>>);

#[derive(Default)]
struct ThreadPool {
    locations: BTreeMap<String, LocationQueue>,
    threads: usize,
}

#[derive(Default)]
struct LocationQueue {
    waiting: VecDeque<Task>,
    threads: usize,
}

impl ThreadPool {
    /// Returns the next task and its location, for a thread that has worked for `location`.
    fn next(&mut self, location: &str) -> Option<(String, Task)> {
        let own = self.locations.get_mut(location);
        if let Some(task) = own.and_then(|own| own.waiting.pop_front()) {
            return Some((location.to_owned(), task));
        }
        if let Some(own) = self.locations.get_mut(location) {
            own.threads -= 1;
            if own.threads == 0 {
                self.locations.remove(location);
            }
        }
        let mut others = self.locations.iter_mut();
        let found = others.find_map(|(name, other)| {
            let task = (other.threads < OF_LOCATION_MAX).then(|| other.waiting.pop_front())??;
            other.threads += 1;
            Some((name.clone(), task))
        });
        if found.is_none() {
            self.threads -= 1;
        }
        found
    }
}

impl HelperThreads {
    fn lock(&self) -> MutexGuard<'_, ThreadPool> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the locations with tasks.
    pub fn busy(&self) -> BTreeSet<String> {
        self.lock().locations.keys().cloned().collect()
    }

    /// Runs a task of a location, at once or when a thread is free.
    ///
    /// # Errors
    /// If the thread cannot be started. The task is dropped.
    pub fn run(&self, location: &str, task: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut state = self.lock();
        let has_thread = state.threads < THREADS_MAX;
        let of_location = state.locations.entry(location.to_owned()).or_default();
        if !has_thread || of_location.threads >= OF_LOCATION_MAX {
            of_location.waiting.push_back(Box::new(task));
            return Ok(());
        }
        of_location.threads += 1;
        state.threads += 1;
        drop(state);
        let (threads, of) = (self.clone(), location.to_owned());
        let thread = std::thread::Builder::new()
            .name("disk-helper".to_owned())
            .stack_size(bdev::STACK_BYTES);
        let work = move || {
            let mut next = Some((of, Box::new(task) as Task));
            while let Some((location, task)) = next {
                task();
                next = threads.lock().next(&location);
            }
        };
        let started = thread.spawn(work).map(drop);
        if started.is_err() {
            let mut state = self.lock();
            state.threads -= 1;
            if let Some(of_location) = state.locations.get_mut(location) {
                of_location.threads -= 1;
                if of_location.threads == 0 && of_location.waiting.is_empty() {
                    state.locations.remove(location);
                }
            }
        }
        started
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;
    use std::time::Duration;

    use super::*;

    const LONG: Duration = Duration::from_secs(20);

    #[test]
    fn blocked_location_delays_no_other_location() {
        let threads = HelperThreads::default();
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let (done, is_done) = mpsc::channel();
        for _ in 0..3 * OF_LOCATION_MAX {
            let (released, done) = (Arc::clone(&released), done.clone());
            let task = move || {
                // An error also ends the wait.
                released.lock().unwrap().recv().ok();
                done.send("hung").unwrap();
            };
            threads.run("/hung", task).unwrap();
        }
        let other = done.clone();
        let task = move || other.send("other").unwrap();
        threads.run("/other", task).unwrap();
        assert_eq!(is_done.recv_timeout(LONG), Ok("other"));
        assert!(threads.lock().threads <= OF_LOCATION_MAX + 1);
        drop(release);
        for _ in 0..3 * OF_LOCATION_MAX {
            assert_eq!(is_done.recv_timeout(LONG), Ok("hung"));
        }
        while threads.lock().threads > 0 {
            std::thread::yield_now();
        }
        assert!(threads.lock().locations.is_empty());
    }
}
