//! Who runs tasks: what one transport asks of tasks reaches those of every other (SAM-5, 7).
//!
//! A runner is a queue or connection on some worker. It is sent the call as a message, marks the tasks that it
//! means, and keeps a clone of the [`Hold`] until each of them has ended and can touch no disk any more. When the
//! last clone is gone, whoever asked goes on. Control plane: a lock per call, none per request.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use scsi::{AbortScope, NexusId, TaskTag};

use crate::Task;

/// Kept until a task that is meant has ended; the last one to go calls back.
#[derive(Clone)]
pub struct Hold {
    _on_last: Arc<OnLast>,
}

struct OnLast(Mutex<Option<Box<dyn FnOnce() + Send>>>);

impl Drop for OnLast {
    fn drop(&mut self) {
        let done = self
            .0
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner)
            .take();
        if let Some(done) = done {
            done();
        }
    }
}

impl Hold {
    /// A hold whose last clone, when it is dropped, calls `done`.
    pub fn new(done: impl FnOnce() + Send + 'static) -> Hold {
        Hold {
            _on_last: Arc::new(OnLast(Mutex::new(Some(Box::new(done))))),
        }
    }
}

/// Waits for holds to go.
pub struct Holding {
    gone: mpsc::Receiver<()>,
}

impl Holding {
    /// A hold, and what waits for its last clone.
    pub fn new() -> (Hold, Holding) {
        let (tell, gone) = mpsc::channel();
        let hold = Hold::new(move || {
            // Nobody may wait any more.
            tell.send(()).ok();
        });
        (hold, Holding { gone })
    }

    /// Sleeps until the last clone is gone; false when that takes longer than `patience`.
    pub fn wait(&self, patience: Duration) -> bool {
        self.gone.recv_timeout(patience) != Err(mpsc::RecvTimeoutError::Timeout)
    }
}

/// What is wanted of tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Want {
    /// That they are aborted.
    Abort,
    /// The same by a reset: some transports have a response of its own for it.
    Reset,
    /// To know when those that have begun by now have ended.
    End,
}

/// What is wanted, of which tasks.
#[derive(Clone)]
pub struct Call {
    /// Which tasks.
    pub scope: Arc<AbortScope>,
    /// What is wanted of them.
    pub want: Want,
    /// Tasks of the scope that are not meant, for whoever asked did so before they were sent.
    pub exempt: Option<Exempt>,
}

impl Call {
    /// Wants something of all tasks of a scope.
    pub fn new(scope: Arc<AbortScope>, want: Want) -> Call {
        Call {
            scope,
            want,
            exempt: None,
        }
    }

    /// What it does to a task. `begun`: the task has left the task set's queue; `later`: it is one of those that are exempt.
    pub fn effect(&self, tag: TaskTag, task: &Task, begun: bool, later: bool) -> Option<Effect> {
        if later || !self.scope.matches(tag) {
            let ends = self.scope.ends(tag.nexus, |unit| task.writes_to(unit));
            return ends.then_some(Effect::Wait);
        }
        match self.want {
            _ if task.aborts(&self.scope) => None,
            Want::Abort | Want::Reset => Some(Effect::Abort),
            Want::End => begun.then_some(Effect::Wait),
        }
    }
}

/// What a call does to a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// It is aborted; the hold lasts until it has ended.
    Abort,
    /// The hold lasts until it has ended.
    Wait,
}

/// The tasks of a nexus that were sent later than something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exempt {
    /// Who sends them.
    pub nexus: NexusId,
    /// The first number that they may have, where its commands are numbered: iSCSI's CmdSN.
    pub from: u32,
}

/// How a runner is reached, from any thread; must not block.
pub type Runner = Arc<dyn Fn(&Call, Hold) + Send + Sync>;

/// All runners of a process.
#[derive(Default)]
pub struct Runners {
    next: Mutex<u64>,
    list: Mutex<BTreeMap<u64, Runner>>,
}

/// A runner's entry; dropping it takes the runner out.
pub struct Registration {
    key: u64,
    runners: Arc<Runners>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runners {
    /// Enters a runner.
    pub fn register(self: &Arc<Self>, runner: Runner) -> Registration {
        let key = {
            let mut next = lock(&self.next);
            *next += 1;
            *next
        };
        lock(&self.list).insert(key, runner);
        Registration {
            key,
            runners: self.clone(),
        }
    }

    /// Reaches the tasks of a call's scope wherever they run; `done` is called, on any thread, when the last has ended.
    pub fn call(&self, call: &Call, done: impl FnOnce() + Send + 'static) {
        let hold = Hold::new(done);
        let runners: Vec<Runner> = lock(&self.list).values().cloned().collect();
        for runner in runners {
            runner(call, hold.clone());
        }
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        lock(&self.runners.list).remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn last_hold_calls_back_once() {
        let calls = Arc::new(AtomicU32::new(0));
        let counted = calls.clone();
        let hold = Hold::new(move || {
            counted.fetch_add(1, Ordering::SeqCst);
        });
        let other = hold.clone();
        drop(hold);
        assert_eq!(calls.load(Ordering::SeqCst), 0);
        drop(other);
        assert_eq!(calls.load(Ordering::SeqCst), 1);
    }

    #[test]
    fn runner_that_left_is_not_reached() {
        let runners = Arc::new(Runners::default());
        let reached = Arc::new(AtomicU32::new(0));
        let counted = reached.clone();
        let runner: Runner = Arc::new(move |_, _| {
            counted.fetch_add(1, Ordering::SeqCst);
        });
        let registration = runners.register(runner);
        drop(registration);
        assert!(lock(&runners.list).is_empty());
        assert_eq!(reached.load(Ordering::SeqCst), 0);
    }
}
