//! Ranges of a disk that one task holds against all other changes, through every door and on every worker.
//!
//! Open nearly always: a worker that is about to change the disk does one load. A task that must be atomic (COMPARE AND
//! WRITE, WRITE ATOMIC) acquires its range; workers then set aside what would change it, and report when what they had
//! begun before has ended; only then is the range granted. Control plane: locks and messages, none per plain I/O.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Kept by a worker until the changes that it had begun have ended; the last one to go grants the range.
#[derive(Clone)]
pub struct Settling {
    _on_last: Arc<OnLast>,
}

type Granted = Box<dyn FnOnce(Lease) + Send>;

struct OnLast(Mutex<Option<(Lease, Granted)>>);

impl Drop for OnLast {
    fn drop(&mut self) {
        let last = self
            .0
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some((lease, granted)) = last {
            granted(lease);
        }
    }
}

/// A worker's handle on the disk, as the gate sees it. Called from any thread; must not block.
pub trait Member: Send + Sync {
    /// A range is being acquired: keep `settling` until every change that is in flight now has ended.
    fn settle(&self, settling: Settling);

    /// A range was released: what was set aside may go on.
    fn reopened(&self);
}

struct Waiting {
    range: Range<u64>,
    granted: Granted,
}

#[derive(Default)]
struct State {
    next: u64,
    held: Vec<(u64, Range<u64>)>,
    waiting: VecDeque<Waiting>,
    members: Vec<(u64, Arc<dyn Member>)>,
}

/// A disk's gate.
#[derive(Default)]
pub struct Gate {
    /// How many ranges are held.
    held: AtomicUsize,
    state: Mutex<State>,
}

/// A range that is held; dropping it releases it.
pub struct Lease {
    gate: Arc<Gate>,
    key: u64,
}

/// A worker's entry; dropping it takes the worker out.
pub struct Membership {
    gate: Arc<Gate>,
    key: u64,
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Is no range held? One load.
    #[inline]
    pub fn is_open(&self) -> bool {
        self.held.load(Ordering::Acquire) == 0
    }

    /// Is a part of this range held?
    pub fn holds(&self, offset: u64, length: u64) -> bool {
        let range = offset..offset.saturating_add(length);
        self.lock()
            .held
            .iter()
            .any(|(_, held)| overlap(held, &range))
    }

    /// Enters a worker.
    pub fn join(self: &Arc<Self>, member: Arc<dyn Member>) -> Membership {
        let mut state = self.lock();
        state.next += 1;
        let key = state.next;
        state.members.push((key, member));
        Membership {
            gate: self.clone(),
            key,
        }
    }

    /// Acquires a range. `granted` is called, on any thread, once nothing else can change it; ranges that overlap are
    /// granted in the order in which they were asked for.
    pub fn acquire(
        self: &Arc<Self>,
        offset: u64,
        length: u64,
        granted: impl FnOnce(Lease) + Send + 'static,
    ) {
        let range = offset..offset.saturating_add(length);
        let mut state = self.lock();
        state.waiting.push_back(Waiting {
            range,
            granted: Box::new(granted),
        });
        self.grant(state);
    }

    /// Holds every waiting range that overlaps neither a held one nor one that waits before it.
    fn grant(self: &Arc<Self>, mut state: MutexGuard<'_, State>) {
        let mut settling = Vec::new();
        let mut before: Vec<Range<u64>> = Vec::new();
        for waiting in std::mem::take(&mut state.waiting) {
            let free = |range: &Range<u64>| {
                !before.iter().any(|b| overlap(b, range))
                    && !state.held.iter().any(|(_, h)| overlap(h, range))
            };
            if !free(&waiting.range) {
                before.push(waiting.range.clone());
                state.waiting.push_back(waiting);
                continue;
            }
            state.next += 1;
            let key = state.next;
            state.held.push((key, waiting.range));
            // Seen by every worker that begins a change after it has been told to settle.
            self.held.fetch_add(1, Ordering::SeqCst);
            let lease = Lease {
                gate: self.clone(),
                key,
            };
            let on_last = OnLast(Mutex::new(Some((lease, waiting.granted))));
            settling.push(Settling {
                _on_last: Arc::new(on_last),
            });
        }
        let members: Vec<_> = state
            .members
            .iter()
            .map(|(_, member)| member.clone())
            .collect();
        drop(state);
        for settling in settling {
            for member in &members {
                member.settle(settling.clone());
            }
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        let mut state = self.gate.lock();
        state.held.retain(|(key, _)| *key != self.key);
        self.gate.held.fetch_sub(1, Ordering::SeqCst);
        let members: Vec<_> = state
            .members
            .iter()
            .map(|(_, member)| member.clone())
            .collect();
        self.gate.grant(state);
        for member in members {
            member.reopened();
        }
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.gate.lock().members.retain(|(key, _)| *key != self.key);
    }
}

impl std::fmt::Debug for Gate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Gate")
            .field("held", &self.held)
            .finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Lease {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lease")
            .field("key", &self.key)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Keeps what it is given until told.
    #[derive(Default)]
    struct Worker {
        settling: Mutex<Vec<Settling>>,
        reopened: AtomicUsize,
    }

    impl Member for Worker {
        fn settle(&self, settling: Settling) {
            self.settling.lock().unwrap().push(settling);
        }

        fn reopened(&self) {
            self.reopened.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[derive(Clone, Default)]
    struct Granted(Arc<Mutex<Vec<(u32, Lease)>>>);

    impl Granted {
        fn ask(&self, gate: &Arc<Gate>, name: u32, offset: u64, length: u64) {
            let granted = self.clone();
            gate.acquire(offset, length, move |lease| {
                granted.0.lock().unwrap().push((name, lease))
            });
        }

        fn names(&self) -> Vec<u32> {
            self.0
                .lock()
                .unwrap()
                .iter()
                .map(|(name, _)| *name)
                .collect()
        }

        fn release(&self, name: u32) {
            let mut all = self.0.lock().unwrap();
            let at = all.iter().position(|(n, _)| *n == name).unwrap();
            let (_, lease) = all.remove(at);
            drop(all);
            drop(lease);
        }
    }

    #[test]
    fn range_is_granted_when_every_worker_has_settled() {
        let gate = Arc::new(Gate::default());
        let worker = Arc::new(Worker::default());
        let _membership = gate.join(worker.clone());
        let granted = Granted::default();
        granted.ask(&gate, 1, 4096, 4096);
        assert!(!gate.is_open(), "changes are set aside from now on");
        assert!(
            granted.names().is_empty(),
            "what was begun before has not ended"
        );
        worker.settling.lock().unwrap().clear();
        assert_eq!(granted.names(), [1]);
        assert!(gate.holds(8191, 1) && !gate.holds(8192, 1) && !gate.holds(0, 4096));
        granted.release(1);
        assert!(gate.is_open());
        assert_eq!(worker.reopened.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn overlapping_ranges_are_granted_one_after_the_other_and_others_at_once() {
        let gate = Arc::new(Gate::default());
        let granted = Granted::default();
        granted.ask(&gate, 1, 0, 100);
        granted.ask(&gate, 2, 50, 100);
        granted.ask(&gate, 3, 120, 10);
        granted.ask(&gate, 4, 200, 10);
        assert_eq!(granted.names(), [1, 4], "3 overlaps 2, which came before");
        granted.release(1);
        assert_eq!(granted.names(), [4, 2]);
        granted.release(2);
        assert_eq!(granted.names(), [4, 3]);
        granted.release(3);
        granted.release(4);
        assert!(gate.is_open());
    }
}
