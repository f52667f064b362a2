//! Who runs tasks: what one transport asks of tasks reaches those of every other (SAM-5, 7).
//!
//! A runner is a queue or connection on some worker. It is sent the call as a message, marks the tasks that it
//! means, and keeps a clone of the [`Hold`] until each of them has ended and can touch no disk any more. When the
//! last clone is gone, whoever asked goes on. Control plane: a lock per call, none per request.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::Duration;

use latency::UnitAddress;
use scsi::{AbortScope, NexusId, TaskManagementFunction, TaskTag};

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
    /// The same, for their unit is no more.
    Remove,
    /// To know when those that have begun by now have ended.
    End,
    /// To know whether there is one.
    Find,
}

impl Want {
    /// What a task management function wants of the tasks of its scope.
    pub fn of(function: TaskManagementFunction) -> Want {
        use TaskManagementFunction::*;
        match function {
            AbortTaskSet | ClearTaskSet => Want::Abort,
            LogicalUnitReset | TargetReset | NexusReset => Want::Reset,
        }
    }
}

/// Which tasks are meant.
#[derive(Clone)]
pub enum Tasks {
    /// Those of a scope.
    Scope(Arc<AbortScope>),
    /// One of a unit, by the number that its initiator gave it: ABORT TASK, QUERY TASK.
    One(UnitAddress, u64),
    /// Those that one nexus, or anybody, has sent to a unit: QUERY TASK SET.
    Set(UnitAddress, Option<NexusId>),
    /// Those of units that are taken away.
    Units(Arc<[UnitAddress]>),
}

/// What is wanted, of which tasks. A [`Tasks::Scope`] may reach every runner; all else those of the transport that has the units
/// at these addresses.
#[derive(Clone)]
pub struct Call {
    /// Which tasks.
    pub tasks: Tasks,
    /// What is wanted of them.
    pub want: Want,
    /// Tasks of the scope that are not meant, for whoever asked did so before they were sent.
    pub exempt: Option<Exempt>,
    found: Arc<AtomicBool>,
}

/// A task as its runner knows it.
pub struct Known<'a> {
    /// It.
    pub task: &'a Task,
    /// What the core knows it by, once it has been with it.
    pub tag: Option<TaskTag>,
    /// The address that it was sent to, as far as that is one of a unit.
    pub unit: Option<UnitAddress>,
    /// Its number.
    pub id: u64,
    /// It has left the task set's queue.
    pub begun: bool,
    /// It is one of those that are exempt.
    pub later: bool,
    /// It is to be answered.
    pub open: bool,
}

impl Call {
    /// Wants something of all these tasks.
    pub fn new(tasks: Tasks, want: Want) -> Call {
        Call {
            tasks,
            want,
            exempt: None,
            found: Arc::default(),
        }
    }

    /// The same of a scope.
    pub fn of_scope(scope: AbortScope, want: Want) -> Call {
        Call::new(Tasks::Scope(Arc::new(scope)), want)
    }

    /// The same but of these.
    pub fn except(self, exempt: Option<Exempt>) -> Call {
        Call { exempt, ..self }
    }

    /// The scope, if it means one.
    pub fn scope(&self) -> Option<&Arc<AbortScope>> {
        match &self.tasks {
            Tasks::Scope(scope) => Some(scope),
            _ => None,
        }
    }

    /// Has a task been found by now, of those that [`Want::Find`] looks for?
    pub fn has_found(&self) -> bool {
        self.found.load(Ordering::Acquire)
    }

    /// What it does to a task.
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
        match self.want {
            _ if !is_meant => None,
            Want::Abort | Want::Reset | Want::Remove => Some(Effect::Abort),
            Want::End => (known.begun || !is_scope).then_some(Effect::Wait),
            Want::Find => {
                self.found.fetch_or(known.open, Ordering::AcqRel);
                None
            }
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

    fn known(task: &Task) -> Known<'_> {
        Known {
            task,
            tag: None,
            unit: Some(UnitAddress { target: 1, lun: 2 }),
            id: 7,
            begun: false,
            later: false,
            open: true,
        }
    }

    /// SAM-5, 7.2, 7.10 and 7.11: a task by its unit and number, all tasks of a unit.
    #[test]
    fn functions_mean_the_tasks_that_sam_says() {
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
            let effect = |want| {
                let call = Call::new(tasks.clone(), want);
                (call.effect(&known(&task)), call.has_found())
            };
            let (aborted, waits) = (Some(Effect::Abort), Some(Effect::Wait));
            for want in [Want::Abort, Want::Reset, Want::Remove] {
                assert_eq!(effect(want), (aborted.filter(|_| is_meant), false));
            }
            assert_eq!(effect(Want::End), (waits.filter(|_| is_meant), false));
            assert_eq!(effect(Want::Find), (None, is_meant));
            let call = Call::new(tasks, Want::Find);
            let answered = Known {
                open: false,
                ..known(&task)
            };
            assert_eq!((call.effect(&answered), call.has_found()), (None, false));
        }
    }

    #[test]
    fn resets_are_told_from_aborts() {
        use TaskManagementFunction::*;
        for function in [AbortTaskSet, ClearTaskSet] {
            assert_eq!(Want::of(function), Want::Abort);
        }
        for function in [LogicalUnitReset, TargetReset, NexusReset] {
            assert_eq!(Want::of(function), Want::Reset);
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
