//! Keeps the order of one I_T nexus' tasks (SAM-5, 8.7) across all queues or connections of the nexus, on any worker.
//!
//! While all tasks are SIMPLE, each starts at once and costs one atomic load. An ORDERED task waits until all older tasks of its unit have
//! ended on all workers, which [`Runners`] reports. During this wait, and while a HEAD OF QUEUE task runs, new tasks for the same unit wait
//! here. Each unit has its own task set (SAM-5, 4.9).

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use scsi::{AbortScope, Nexus, NexusId, TaskAttribute, UnitId};

use crate::{Call, Runners, TaskOperation};

/// Starts a delayed task. Called, or dropped with everything it holds, on any thread. Must not block. A task that is not SIMPLE keeps its
/// ticket until it has ended.
pub type StartTask = Box<dyn FnOnce(Option<Ticket>) + Send>;

/// Result of [`TaskOrder::admit`].
#[derive(Debug)]
pub enum Admission {
    /// The task may start, and keeps the ticket, if there is one, until it has ended.
    Now(Option<Ticket>),
    /// The [`StartTask`] callback is called later.
    Defer,
}

/// Order of one nexus' tasks.
pub struct TaskOrder {
    /// At least one unit has a task that is not SIMPLE, or a waiting task.
    busy: AtomicBool,
    /// Task sets of the units with such a task.
    sets: Mutex<Sets>,
    nexus: NexusId,
    runners: Arc<Runners>,
}

type Sets = HashMap<UnitId, TaskSetState>;

#[derive(Default)]
struct TaskSetState {
    /// Number of running HEAD OF QUEUE tasks.
    heads: usize,
    /// An ORDERED task runs, or waits for older tasks to end.
    ordered: bool,
    waiting: VecDeque<(TaskAttribute, StartTask)>,
}

/// Position of a task in its task set, held until the ticket is dropped.
pub struct Ticket {
    attribute: TaskAttribute,
    unit: UnitId,
    order: Arc<TaskOrder>,
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Ticket").field(&self.attribute).finish()
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.order.ended(self.unit, self.attribute);
    }
}

impl TaskOrder {
    pub(crate) fn new(nexus: &Nexus, runners: &Arc<Runners>) -> Arc<TaskOrder> {
        Arc::new(TaskOrder {
            busy: AtomicBool::new(false),
            sets: Mutex::default(),
            nexus: nexus.id(),
            runners: runners.clone(),
        })
    }

    /// Returns true if a task of this attribute may start without [`TaskOrder::admit`].
    #[inline]
    pub fn is_free(&self, attribute: TaskAttribute) -> bool {
        let simple = matches!(attribute, TaskAttribute::Simple | TaskAttribute::Aca);
        simple && !self.busy.load(Ordering::Acquire)
    }

    /// Admits a new task for a unit. `later` creates the callback for a task that must wait. An ACA task counts as SIMPLE until it begins,
    /// when it is refused.
    #[inline]
    pub fn admit(
        self: &Arc<Self>,
        unit: UnitId,
        attribute: TaskAttribute,
        later: impl FnOnce() -> StartTask,
    ) -> Admission {
        if self.is_free(attribute) {
            return Admission::Now(None);
        }
        self.admit_slowly(unit, attribute, later)
    }

    #[cold]
    fn admit_slowly(
        self: &Arc<Self>,
        unit: UnitId,
        attribute: TaskAttribute,
        later: impl FnOnce() -> StartTask,
    ) -> Admission {
        let mut sets = self.lock();
        match attribute {
            TaskAttribute::HeadOfQueue => {
                sets.entry(unit).or_default().heads += 1;
                self.busy.store(true, Ordering::Release);
                return Admission::Now(Some(self.ticket(unit, attribute)));
            }
            TaskAttribute::Ordered => {}
            TaskAttribute::Simple | TaskAttribute::Aca if !sets.contains_key(&unit) => {
                return Admission::Now(None);
            }
            TaskAttribute::Simple | TaskAttribute::Aca => {}
        }
        // Set before the runners are asked for running tasks: a runner that does not see the flag has begun its task before it is asked.
        self.busy.store(true, Ordering::SeqCst);
        let waiting = &mut sets.entry(unit).or_default().waiting;
        waiting.push_back((attribute, later()));
        self.start_ready_tasks(sets, unit);
        Admission::Defer
    }

    fn ended(self: &Arc<Self>, unit: UnitId, attribute: TaskAttribute) {
        let mut sets = self.lock();
        let Some(state) = sets.get_mut(&unit) else {
            return;
        };
        match attribute {
            TaskAttribute::HeadOfQueue => state.heads = state.heads.saturating_sub(1),
            TaskAttribute::Ordered => state.ordered = false,
            TaskAttribute::Simple | TaskAttribute::Aca => {}
        }
        self.start_ready_tasks(sets, unit);
    }

    /// Starts the tasks that may start. SIMPLE tasks are started under the lock, so that the next ORDERED task finds them begun. The
    /// runners are asked without the lock, because the older tasks may end at once and call back.
    fn start_ready_tasks(self: &Arc<Self>, mut sets: MutexGuard<'_, Sets>, unit: UnitId) {
        let mut ordered = None;
        if let Some(state) = sets.get_mut(&unit) {
            while state.heads == 0 && !state.ordered {
                match state.waiting.pop_front() {
                    Some((TaskAttribute::Ordered, start)) => {
                        state.ordered = true;
                        ordered = Some(start);
                    }
                    Some((_, start)) => start(None),
                    None => break,
                }
            }
            if state.is_idle() {
                sets.remove(&unit);
            }
        }
        self.busy.store(!sets.is_empty(), Ordering::SeqCst);
        drop(sets);
        if let Some(start) = ordered {
            let ticket = self.ticket(unit, TaskAttribute::Ordered);
            let scope = AbortScope::of_nexus_and_unit(self.nexus, unit);
            let older = Call::of_scope(scope, TaskOperation::End);
            self.runners.call(&older, move || start(Some(ticket)));
        }
    }

    fn ticket(self: &Arc<Self>, unit: UnitId, attribute: TaskAttribute) -> Ticket {
        Ticket {
            attribute,
            unit,
            order: self.clone(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Sets> {
        self.sets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl TaskSetState {
    fn is_idle(&self) -> bool {
        self.heads == 0 && !self.ordered && self.waiting.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use block::{DiskInfo, Geometry};
    use proptest::prelude::*;
    use scsi::TaskAttribute::{HeadOfQueue, Ordered, Simple};
    use scsi::{
        Directory, DiskId, LogicalUnit, MemoryStore, Target, TargetPort, TransportId, UnitConfig,
    };

    use super::*;
    use crate::{Hold, Registration};
    use scsi::TaskTag;

    /// Queues of one nexus. The test decides when their messages are delivered.
    struct Bed {
        order: Arc<TaskOrder>,
        queues: Vec<Arc<Queue>>,
        units: [UnitId; 2],
        _registrations: Vec<Registration>,
    }

    type Message = Box<dyn FnOnce(&mut Tasks) + Send>;

    #[derive(Default)]
    struct Queue {
        mailbox: Mutex<VecDeque<Message>>,
        tasks: Mutex<Tasks>,
    }

    #[derive(Default)]
    struct Tasks {
        /// Running tasks by number, with the holds on their end.
        running: BTreeMap<usize, (UnitId, Option<Ticket>, Vec<Hold>)>,
        started: Vec<usize>,
    }

    impl Queue {
        fn send(&self, message: impl FnOnce(&mut Tasks) + Send + 'static) {
            self.mailbox.lock().unwrap().push_back(Box::new(message));
        }

        fn tasks(&self) -> MutexGuard<'_, Tasks> {
            self.tasks.lock().unwrap()
        }
    }

    impl Bed {
        fn new(count: usize) -> Bed {
            let port = Arc::new(TargetPort {
                relative_id: 1,
                group: 1,
                name: None,
                device_name: None,
                state_setters: scsi::StateSetters::default(),
            });
            let target = Target::new(vec![port.clone()]);
            let initiator = TransportId::iscsi_device("iqn.2026-11.org.example:i");
            let nexus = target.attach_nexus(initiator, port);
            let nexus_id = nexus.id();
            let directory = Directory::new(Box::new(MemoryStore::default()));
            let units = [1, 2].map(|number| {
                let info = DiskInfo {
                    geometry: Geometry::new(512, 512),
                    physical_block_size: 512,
                    io_alignment: 512,
                    optimal_io_size: 0,
                    read_only: false,
                    write_cache: false,
                    discard_granularity: None,
                    discard_zeroes: false,
                    write_zeroes: false,
                    anchors: false,
                    atomic_writes: None,
                    compare_and_write: Some(block::CompareAndWrite::Emulated),
                    shared: false,
                    rotational: false,
                    passthrough: None,
                    identity: block::Identity::from_random_bits(number.into()),
                    serial: String::new(),
                    naa: number,
                };
                let config = UnitConfig {
                    disk: DiskId(number as u32),
                    info,
                    removable: false,
                    medium: None,
                };
                LogicalUnit::new(&directory, config).id()
            });
            let runners = Arc::new(Runners::default());
            let queues: Vec<Arc<Queue>> = (0..count).map(|_| Arc::default()).collect();
            let registrations = queues.iter().map(|queue| {
                let (queue, nexus) = (queue.clone(), nexus_id);
                runners.register(Arc::new(move |call: &Call, hold: Hold| {
                    assert_eq!(call.operation, TaskOperation::End);
                    let scope = call.scope().expect("a scope").clone();
                    queue.send(move |tasks| {
                        for (unit, _, waits) in tasks.running.values_mut() {
                            let tag = TaskTag { nexus, unit: *unit };
                            if scope.matches(tag) {
                                waits.push(hold.clone());
                            }
                        }
                    });
                }))
            });
            Bed {
                _registrations: registrations.collect(),
                order: TaskOrder::new(&nexus, &runners),
                queues,
                units,
            }
        }

        fn come(&self, at: usize, attribute: TaskAttribute, number: usize) {
            self.come_for(0, at, attribute, number);
        }

        fn come_for(&self, unit: usize, at: usize, attribute: TaskAttribute, number: usize) {
            let unit = self.units[unit];
            let queue = self.queues[at].clone();
            let begin = move |tasks: &mut Tasks, ticket: Option<Ticket>| {
                tasks.running.insert(number, (unit, ticket, Vec::new()));
                tasks.started.push(number);
            };
            let later = || -> StartTask {
                let queue = queue.clone();
                Box::new(move |ticket| queue.send(move |tasks| begin(tasks, ticket)))
            };
            match self.order.admit(unit, attribute, later) {
                Admission::Now(ticket) => begin(&mut queue.tasks(), ticket),
                Admission::Defer => {}
            }
        }

        fn iterate(&self, at: usize) -> bool {
            let message = self.queues[at].mailbox.lock().unwrap().pop_front();
            let came = message.is_some();
            if let Some(message) = message {
                message(&mut self.queues[at].tasks());
            }
            came
        }

        fn settle(&self) {
            while (0..self.queues.len()).any(|at| self.iterate(at)) {}
        }

        fn end(&self, at: usize, number: usize) {
            let ended = self.queues[at].tasks().running.remove(&number);
            drop(ended);
        }

        fn started(&self) -> Vec<usize> {
            let all = self
                .queues
                .iter()
                .map(|queue| queue.tasks().started.clone());
            let mut all: Vec<usize> = all.flatten().collect();
            all.sort_unstable();
            all
        }
    }

    #[test]
    fn ordered_task_waits_for_older_and_holds_younger_everywhere() {
        let bed = Bed::new(2);
        bed.come(0, Simple, 0);
        bed.come(1, Ordered, 1);
        bed.come(0, Simple, 2);
        bed.settle();
        assert_eq!(bed.started(), [0]);
        bed.end(0, 0);
        bed.settle();
        assert_eq!(bed.started(), [0, 1]);
        bed.end(1, 1);
        bed.settle();
        assert_eq!(bed.started(), [0, 1, 2]);
        assert!(!bed.order.busy.load(Ordering::SeqCst));
    }

    #[test]
    fn head_of_queue_task_overtakes_waiting_and_holds_later_tasks() {
        let bed = Bed::new(2);
        bed.come(0, Ordered, 0);
        bed.settle();
        bed.come(1, Simple, 1);
        bed.come(1, HeadOfQueue, 2);
        bed.settle();
        assert_eq!(bed.started(), [0, 2]);
        bed.end(0, 0);
        bed.settle();
        assert_eq!(bed.started(), [0, 2]);
        bed.end(1, 2);
        bed.settle();
        assert_eq!(bed.started(), [0, 1, 2]);
    }

    #[test]
    fn tasks_for_another_unit_are_not_held() {
        let bed = Bed::new(2);
        bed.come(0, Simple, 0);
        bed.come(1, Ordered, 1);
        bed.come(0, Simple, 2);
        bed.come_for(1, 0, Simple, 3);
        bed.come_for(1, 1, Ordered, 4);
        bed.settle();
        assert_eq!(bed.started(), [0, 3]);
        bed.end(0, 3);
        bed.settle();
        assert_eq!(bed.started(), [0, 3, 4]);
        bed.end(0, 0);
        bed.settle();
        assert_eq!(bed.started(), [0, 1, 3, 4]);
        bed.end(1, 1);
        bed.end(1, 4);
        bed.settle();
        assert_eq!(bed.started(), [0, 1, 2, 3, 4]);
        assert!(!bed.order.busy.load(Ordering::SeqCst));
    }

    #[test]
    fn removed_queue_holds_no_task() {
        let bed = Bed::new(2);
        bed.come(0, Simple, 0);
        bed.come(1, Ordered, 1);
        bed.come(0, Simple, 2);
        bed.settle();
        bed.end(0, 0);
        // The ordered task's message is dropped with its queue.
        let dropped = std::mem::take(&mut *bed.queues[1].mailbox.lock().unwrap());
        drop(dropped);
        bed.settle();
        assert_eq!(bed.started(), [0, 2]);
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        /// For all orders of tasks and messages: each task starts once. Only HEAD OF QUEUE tasks start before an older ORDERED task has
        /// ended. An ORDERED task starts after all older tasks. In the end all tasks have started.
        #[test]
        fn starts_keep_the_order_of_the_attributes(
            steps in prop::collection::vec((0usize..6, 0usize..3, any::<prop::sample::Index>()), 1..60),
        ) {
            let bed = Bed::new(3);
            // Attribute, queue, ended.
            let mut tasks: Vec<(TaskAttribute, usize, bool)> = Vec::new();
            let check = |tasks: &[(TaskAttribute, usize, bool)], before: &[usize]| {
                for &at in bed.started().iter().filter(|at| !before.contains(at)) {
                    if tasks[at].0 == HeadOfQueue {
                        continue;
                    }
                    for older in &tasks[..at] {
                        let must_have_ended = match (older.0, tasks[at].0) {
                            (Ordered, _) | (_, Ordered) => true,
                            (HeadOfQueue, _) => false,
                            _ => false,
                        };
                        prop_assert!(older.2 || !must_have_ended, "{tasks:?}: {at}");
                    }
                }
                Ok(())
            };
            for (step, queue, index) in steps {
                let before = bed.started();
                match step {
                    0..=2 => {
                        let attribute = [Simple, Ordered, HeadOfQueue][step];
                        tasks.push((attribute, queue, false));
                        bed.come(queue, attribute, tasks.len() - 1);
                    }
                    3 => {
                        let running: Vec<usize> =
                            before.iter().copied().filter(|&at| !tasks[at].2).collect();
                        if !running.is_empty() {
                            let at = running[index.index(running.len())];
                            tasks[at].2 = true;
                            bed.end(tasks[at].1, at);
                        }
                    }
                    _ => {
                        bed.iterate(queue);
                    }
                }
                check(&tasks, &before)?;
            }
            for _ in 0..2 * tasks.len() + 2 {
                let before = bed.started();
                bed.settle();
                check(&tasks, &before)?;
                for at in bed.started() {
                    if !std::mem::replace(&mut tasks[at].2, true) {
                        bed.end(tasks[at].1, at);
                    }
                }
            }
            prop_assert_eq!(bed.started(), (0..tasks.len()).collect::<Vec<_>>());
        }
    }
}
