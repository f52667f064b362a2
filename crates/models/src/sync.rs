//! loom's primitives in place of the standard library's.

pub(crate) use loom::sync::atomic::{
    AtomicBool, AtomicU32, AtomicU64, AtomicUsize, Ordering, fence,
};
pub(crate) use loom::sync::{Arc as CountingArc, Mutex, MutexGuard};

/// Channel for one value. Unlike loom's own, it reports that the sender is gone.
pub(crate) mod mpsc {
    use std::sync::Arc;

    use loom::sync::{Condvar, Mutex};

    enum State<T> {
        Empty,
        Sent(T),
        Gone,
    }

    struct Channel<T> {
        state: Mutex<State<T>>,
        changed: Condvar,
    }

    pub(crate) struct SyncSender<T>(Arc<Channel<T>>);
    pub(crate) struct Receiver<T>(Arc<Channel<T>>);
    #[derive(Debug)]
    pub(crate) struct Gone;

    pub(crate) fn sync_channel<T>(_capacity: usize) -> (SyncSender<T>, Receiver<T>) {
        let channel = Arc::new(Channel {
            state: Mutex::new(State::Empty),
            changed: Condvar::new(),
        });
        (SyncSender(channel.clone()), Receiver(channel))
    }

    impl<T> SyncSender<T> {
        pub(crate) fn send(&self, value: T) -> Result<(), Gone> {
            *self.0.state.lock().unwrap() = State::Sent(value);
            self.0.changed.notify_one();
            Ok(())
        }
    }

    impl<T> Drop for SyncSender<T> {
        fn drop(&mut self) {
            let mut state = self.0.state.lock().unwrap();
            if matches!(*state, State::Empty) {
                *state = State::Gone;
            }
            self.0.changed.notify_one();
        }
    }

    impl<T> Receiver<T> {
        pub(crate) fn recv(&self) -> Result<T, Gone> {
            let mut state = self.0.state.lock().unwrap();
            loop {
                match std::mem::replace(&mut *state, State::Gone) {
                    State::Empty => {
                        *state = State::Empty;
                        state = self.0.changed.wait(state).unwrap();
                    }
                    State::Sent(value) => return Ok(value),
                    State::Gone => return Err(Gone),
                }
            }
        }
    }
}
