//! Threads for calls that may block: opening, sizing and closing disks on a file system or target that may not answer. The owner makes no
//! such call itself, so one dead mount does not stop changes to other disks.
//!
//! A place is a folder, a target or a cluster. Tasks of one place run on at most [`OF_PLACE_MAX`] threads, which leaves threads for other
//! places. A thread is started for a task and ends when no task is left.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Most threads of all places.
const THREADS_MAX: usize = 256;
/// Most threads of one place.
const OF_PLACE_MAX: usize = 32;

pub(crate) type Task = Box<dyn FnOnce() + Send>;

#[derive(Clone, Default)]
pub(crate) struct HelperThreads(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    places: BTreeMap<String, Place>,
    threads: usize,
}

#[derive(Default)]
struct Place {
    waiting: VecDeque<Task>,
    threads: usize,
}

impl State {
    /// Returns the next task and its place, for a thread that has worked for `place`.
    fn next(&mut self, place: &str) -> Option<(String, Task)> {
        let own = self.places.get_mut(place);
        if let Some(task) = own.and_then(|own| own.waiting.pop_front()) {
            return Some((place.to_owned(), task));
        }
        if let Some(own) = self.places.get_mut(place) {
            own.threads -= 1;
            if own.threads == 0 {
                self.places.remove(place);
            }
        }
        let mut others = self.places.iter_mut();
        let found = others.find_map(|(name, other)| {
            let task = (other.threads < OF_PLACE_MAX).then(|| other.waiting.pop_front())??;
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
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs a task of a place, at once or when a thread is free.
    ///
    /// # Errors
    /// If the thread cannot be started. The task is dropped.
    pub fn run(&self, place: &str, task: impl FnOnce() + Send + 'static) -> io::Result<()> {
        let mut state = self.lock();
        let has_thread = state.threads < THREADS_MAX;
        let of_place = state.places.entry(place.to_owned()).or_default();
        if !has_thread || of_place.threads >= OF_PLACE_MAX {
            of_place.waiting.push_back(Box::new(task));
            return Ok(());
        }
        of_place.threads += 1;
        state.threads += 1;
        drop(state);
        let (threads, of) = (self.clone(), place.to_owned());
        let thread = std::thread::Builder::new()
            .name("disk-helper".to_owned())
            .stack_size(bdev::STACK_BYTES);
        let work = move || {
            let mut next = Some((of, Box::new(task) as Task));
            while let Some((place, task)) = next {
                task();
                next = threads.lock().next(&place);
            }
        };
        let started = thread.spawn(work).map(drop);
        if started.is_err() {
            let mut state = self.lock();
            state.threads -= 1;
            if let Some(of_place) = state.places.get_mut(place) {
                of_place.threads -= 1;
                if of_place.threads == 0 && of_place.waiting.is_empty() {
                    state.places.remove(place);
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
    fn place_that_does_not_answer_holds_up_no_other_place() {
        let threads = HelperThreads::default();
        let (release, released) = mpsc::channel::<()>();
        let released = Arc::new(Mutex::new(released));
        let (done, is_done) = mpsc::channel();
        for _ in 0..3 * OF_PLACE_MAX {
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
        assert!(threads.lock().threads <= OF_PLACE_MAX + 1);
        drop(release);
        for _ in 0..3 * OF_PLACE_MAX {
            assert_eq!(is_done.recv_timeout(LONG), Ok("hung"));
        }
        while threads.lock().threads > 0 {
            std::thread::yield_now();
        }
        assert!(threads.lock().places.is_empty());
    }
}
