//! Store with its files on a thread of its own. A worker that changes saved state waits for this thread and opens no file itself. The
//! thread ends with the store.

use std::io;
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, PoisonError};

use scsi::{Store, Unusable};

type Task = Box<dyn FnOnce(&dyn Store) + Send>;

/// Passes each call to the thread and waits for its result.
pub(crate) struct StateThread(Mutex<Sender<Task>>);

impl StateThread {
    /// Starts the thread over `store`.
    pub fn start(store: impl Store + 'static) -> io::Result<StateThread> {
        let (sender, tasks) = channel::<Task>();
        std::thread::Builder::new()
            .name("state".to_owned())
            .spawn(move || {
                for task in tasks {
                    task(&store);
                }
            })?;
        Ok(StateThread(Mutex::new(sender)))
    }

    fn call<T: Send + 'static>(
        &self,
        task: impl FnOnce(&dyn Store) -> T + Send + 'static,
    ) -> io::Result<T> {
        let (answer, answered) = channel();
        let task: Task = Box::new(move |store| drop(answer.send(task(store))));
        let gone = || io::Error::other("the state thread has ended");
        let sender = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        sender.send(task).map_err(|_| gone())?;
        drop(sender);
        answered.recv().map_err(|_| gone())
    }
}

impl Store for StateThread {
    fn load(&self, key: &str) -> Result<Option<Vec<u8>>, Unusable> {
        let key = key.to_owned();
        let loaded = self.call(move |store| store.load(&key));
        loaded.unwrap_or_else(|error| Err(Unusable(error.to_string())))
    }

    fn save(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        let (key, bytes) = (key.to_owned(), bytes.to_vec());
        self.call(move |store| store.save(&key, &bytes))?
    }

    fn remove(&self, key: &str) {
        let key = key.to_owned();
        if let Err(error) = self.call(move |store| store.remove(&key)) {
            tracing::warn!("cannot remove saved state: {error}");
        }
    }

    fn discard_damaged(&self, key: &str) -> io::Result<()> {
        let key = key.to_owned();
        self.call(move |store| store.discard_damaged(&key))?
    }
}

#[cfg(test)]
mod tests {
    use scsi::MemoryStore;

    use super::*;

    #[test]
    fn saved_value_is_loaded_until_removed() {
        let store = StateThread::start(MemoryStore::default()).unwrap();
        store.save("k", b"v").unwrap();
        assert_eq!(store.load("k").unwrap().as_deref(), Some(&b"v"[..]));
        store.remove("k");
        assert_eq!(store.load("k").unwrap(), None);
    }
}
