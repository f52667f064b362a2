//! Delivers task management requests from one transport to the tasks of all transports (SAM-5, 7).
//!
//! A runner is a queue or connection on some worker. It receives the call as a message, marks the affected tasks, and keeps a clone of the
//! [`Hold`] until each of them has ended and can no longer access a disk. When the last clone is dropped, the caller continues. Control
//! plane: one lock per call, none per request.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use latency::UnitAddress;
use scsi::{AbortScope, NexusId, TaskManagementFunction, TaskTag};

use crate::Task;

/// Kept until an affected task has ended. Dropping the last clone calls the callback.
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
    /// Creates a hold that calls `done` when its last clone is dropped.
    pub fn new(done: impl FnOnce() + Send + 'static) -> Hold {
        Hold {
            _on_last: Arc::new(OnLast(Mutex::new(Some(Box::new(done))))),
        }
    }
}

/// Waits until all clones of a hold are dropped.
pub struct Holding {
    receiver: mpsc::Receiver<()>,
}

impl Holding {
    /// Creates a hold and a receiver for the drop of its last clone.
    pub fn new() -> (Hold, Holding) {
        let (sender, receiver) = mpsc::channel();
        let hold = Hold::new(move || {
            // The receiver may be gone.
            sender.send(()).ok();
        });
        (hold, Holding { receiver })
    }

    /// Blocks until the last clone is dropped. Returns false after `patience`.
    pub fn wait(&self, patience: Duration) -> bool {
        self.receiver.recv_timeout(patience) != Err(mpsc::RecvTimeoutError::Timeout)
    }
}

/// Operation of a call on tasks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TaskOperation {
    /// Abort the tasks.
    Abort,
    /// Abort by a reset: some transports have a separate response for it.
    Reset,
    /// Abort because the unit is removed.
    Remove,
    /// Wait for the end of the tasks that have begun.
    End,
    /// Find out if such a task exists.
    Find,
}

impl TaskOperation {
    /// Returns the operation of a task management function on the tasks of its scope.
    pub fn of(function: TaskManagementFunction) -> TaskOperation {
        use TaskManagementFunction::*;
        match function {
            AbortTaskSet | ClearTaskSet => TaskOperation::Abort,
            LogicalUnitReset | TargetReset | NexusReset => TaskOperation::Reset,
        }
    }
}

/// Selection of tasks.
#[derive(Clone)]
pub enum Tasks {
    /// Tasks of an abort scope.
    Scope(Arc<AbortScope>),
    /// One task of a unit, by the number that its initiator gave it: ABORT TASK, QUERY TASK.
    One(UnitAddress, u64),
    /// Tasks of a unit, from one nexus or from all: QUERY TASK SET.
    Set(UnitAddress, Option<NexusId>),
    /// Tasks of units that are being removed.
    Units(Arc<[UnitAddress]>),
}

/// An operation on a selection of tasks. A [`Tasks::Scope`] may reach every runner; the other selections reach only runners of the
/// transport that has the units at these addresses.
#[derive(Clone)]
pub struct Call {
    /// Selected tasks.
    pub tasks: Tasks,
    /// Operation on them.
    pub operation: TaskOperation,
    /// Tasks of the scope that are excluded, because the caller's command was sent before them.
    pub exempt: Option<Exempt>,
    found: Arc<AtomicBool>,
}

/// A task as described by its runner.
pub struct Known<'a> {
    /// The task.
    pub task: &'a Task,
    /// Tag in the SCSI core, if the core has planned the command.
    pub tag: Option<TaskTag>,
    /// Address that the task was sent to, if a unit has this address.
    pub unit: Option<UnitAddress>,
    /// Number given by the initiator.
    pub id: u64,
    /// The task has left the queue of its task set.
    pub started: bool,
    /// The task is exempt.
    pub later: bool,
    /// The task still has to be answered.
    pub open: bool,
}

impl Call {
    /// Creates a call for these tasks.
    pub fn new(tasks: Tasks, operation: TaskOperation) -> Call {
        Call {
            tasks,
            operation,
            exempt: None,
            found: Arc::default(),
        }
    }

    /// Creates a call for the tasks of a scope.
    pub fn of_scope(scope: AbortScope, operation: TaskOperation) -> Call {
        Call::new(Tasks::Scope(Arc::new(scope)), operation)
    }

    /// Excludes tasks from the call.
    pub fn except(self, exempt: Option<Exempt>) -> Call {
        Call { exempt, ..self }
    }

    /// Returns the scope of a [`Tasks::Scope`] call.
    pub fn scope(&self) -> Option<&Arc<AbortScope>> {
        match &self.tasks {
            Tasks::Scope(scope) => Some(scope),
            _ => None,
        }
    }

    /// Returns true if a [`TaskOperation::Find`] call has found a task so far.
    pub fn has_found(&self) -> bool {
        self.found.load(Ordering::Acquire)
    }

    /// Returns the effect of the call on a task.
    pub fn effect(&self, known: &Known<'_>) -> Option<Effect> {
        let (nexus, is_scope) = (known.tag.map(|tag| tag.nexus), self.scope().is_some());
        let is_meant = match &self.tasks {
            Tasks::Scope(scope) => {
                let tag = known.tag?;
                if known.later || !scope.matches(tag) {
                    let ends = scope.ends(tag.nexus, |unit| known.task.writes_to(unit));
                    return ends.then_some(Effect::Wait);
                }
                !known.task.aborts(scope)
            }
            Tasks::One(unit, id) => known.unit == Some(*unit) && known.id == *id,
            Tasks::Set(unit, of) => known.unit == Some(*unit) && (of.is_none() || nexus == *of),
            Tasks::Units(units) => known.unit.is_some_and(|unit| units.contains(&unit)),
        };
        match self.operation {
            _ if !is_meant => None,
            TaskOperation::Abort | TaskOperation::Reset | TaskOperation::Remove => {
                Some(Effect::Abort)
            }
            TaskOperation::End => (known.started || !is_scope).then_some(Effect::Wait),
            TaskOperation::Find => {
                self.found.fetch_or(known.open, Ordering::AcqRel);
                None
            }
        }
    }
}

/// Effect of a call on a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Effect {
    /// Aborts the task; the hold lasts until it has ended.
    Abort,
    /// The hold lasts until the task has ended.
    Wait,
}

/// Tasks of a nexus that were sent after a certain command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exempt {
    /// Nexus that sends them.
    pub nexus: NexusId,
    /// Lowest number of these tasks, if the commands are numbered: iSCSI's CmdSN.
    pub from: u32,
}

/// Delivers a call to a runner, from any thread. Must not block.
pub type Runner = Arc<dyn Fn(&Call, Hold) + Send + Sync>;

/// All runners of a process.
#[derive(Default)]
pub struct Runners {
    next: Mutex<u64>,
    list: Mutex<BTreeMap<u64, Runner>>,
}

/// Entry of a runner; dropping it removes the runner.
pub struct Registration {
    key: u64,
    runners: Arc<Runners>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Runners {
    /// Adds a runner.
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

    /// Delivers a call to all runners. `done` is called, on any thread, when the last affected task has ended.
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

    fn known(task: &Task) -> Known<'_> {
        Known {
            task,
            tag: None,
            unit: Some(UnitAddress { target: 1, lun: 2 }),
            id: 7,
            started: false,
            later: false,
            open: true,
        }
    }

    /// SAM-5, 7.2, 7.10 and 7.11: a task by its unit and number, all tasks of a unit.
    #[test]
    fn functions_select_the_tasks_of_sam() {
        let task = Task::default();
        let unit = |lun| UnitAddress { target: 1, lun };
        for (tasks, is_meant) in [
            (Tasks::One(unit(2), 7), true),
            (Tasks::One(unit(2), 8), false),
            (Tasks::One(unit(3), 7), false),
            (Tasks::Set(unit(2), None), true),
            (Tasks::Set(unit(3), None), false),
            (Tasks::Units([unit(3), unit(2)].into()), true),
            (Tasks::Units([unit(3)].into()), false),
        ] {
            let effect = |operation| {
                let call = Call::new(tasks.clone(), operation);
                (call.effect(&known(&task)), call.has_found())
            };
            let (aborted, waits) = (Some(Effect::Abort), Some(Effect::Wait));
            for operation in [
                TaskOperation::Abort,
                TaskOperation::Reset,
                TaskOperation::Remove,
            ] {
                assert_eq!(effect(operation), (aborted.filter(|_| is_meant), false));
            }
            assert_eq!(
                effect(TaskOperation::End),
                (waits.filter(|_| is_meant), false)
            );
            assert_eq!(effect(TaskOperation::Find), (None, is_meant));
            let call = Call::new(tasks, TaskOperation::Find);
            let answered = Known {
                open: false,
                ..known(&task)
            };
            assert_eq!((call.effect(&answered), call.has_found()), (None, false));
        }
    }

    #[test]
    fn resets_and_aborts_are_distinguished() {
        use TaskManagementFunction::*;
        for function in [AbortTaskSet, ClearTaskSet] {
            assert_eq!(TaskOperation::of(function), TaskOperation::Abort);
        }
        for function in [LogicalUnitReset, TargetReset, NexusReset] {
            assert_eq!(TaskOperation::of(function), TaskOperation::Reset);
        }
    }

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
