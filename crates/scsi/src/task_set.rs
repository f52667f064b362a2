//! The order of the tasks of one nexus (SAM-5, 8.7), for a door that hands tasks over one after another.
//!
//! Owned by one worker; each nexus has a task set of its own (TST 001b). A SIMPLE task starts at once unless
//! an ORDERED or HEAD OF QUEUE task is in the way: then the cost of this module is one comparison.

use std::collections::VecDeque;

use crate::command::TaskAttribute;

/// The tasks of one nexus and logical unit; `T` is what the door knows a task by.
#[derive(Debug)]
pub struct TaskSet<T> {
    simple_running: usize,
    ordered_running: bool,
    head_running: usize,
    waiting: VecDeque<(TaskAttribute, T)>,
}

impl<T> Default for TaskSet<T> {
    fn default() -> Self {
        TaskSet {
            simple_running: 0,
            ordered_running: false,
            head_running: 0,
            waiting: VecDeque::new(),
        }
    }
}

impl<T> TaskSet<T> {
    /// A new task: given back when it may start now, else kept until [`TaskSet::next_ready`] gives it.
    /// Without ACA conditions an ACA task is a SIMPLE one.
    #[inline]
    pub fn admit(&mut self, attribute: TaskAttribute, task: T) -> Option<T> {
        let may_start = match attribute {
            TaskAttribute::HeadOfQueue => true,
            _ => self.waiting.is_empty() && self.may_start(attribute),
        };
        if may_start {
            self.started(attribute);
            return Some(task);
        }
        self.waiting.push_back((attribute, task));
        None
    }

    /// A task that had started has ended, or was aborted.
    #[inline]
    pub fn ended(&mut self, attribute: TaskAttribute) {
        match attribute {
            TaskAttribute::Ordered => self.ordered_running = false,
            TaskAttribute::HeadOfQueue => self.head_running = self.head_running.saturating_sub(1),
            _ => self.simple_running = self.simple_running.saturating_sub(1),
        }
    }

    /// A task that waited and may start now. To be asked after [`TaskSet::ended`] until it gives none.
    #[inline]
    pub fn next_ready(&mut self) -> Option<(TaskAttribute, T)> {
        let (attribute, _) = self.waiting.front()?;
        let attribute = *attribute;
        if !self.may_start(attribute) {
            return None;
        }
        self.started(attribute);
        self.waiting.pop_front()
    }

    /// Takes tasks that still wait out: they are aborted before they began.
    pub fn abort_waiting(&mut self, mut matches: impl FnMut(&T) -> bool) -> Vec<T> {
        let (aborted, kept) = self.waiting.drain(..).partition(|(_, task)| matches(task));
        self.waiting = kept;
        let aborted: VecDeque<(TaskAttribute, T)> = aborted;
        aborted.into_iter().map(|(_, task)| task).collect()
    }

    /// Does this task wait?
    pub fn is_waiting(&self, mut matches: impl FnMut(&T) -> bool) -> bool {
        self.waiting.iter().any(|(_, task)| matches(task))
    }

    fn may_start(&self, attribute: TaskAttribute) -> bool {
        let blocked = self.ordered_running || self.head_running > 0;
        match attribute {
            TaskAttribute::Ordered => !blocked && self.simple_running == 0,
            _ => !blocked,
        }
    }

    fn started(&mut self, attribute: TaskAttribute) {
        match attribute {
            TaskAttribute::Ordered => self.ordered_running = true,
            TaskAttribute::HeadOfQueue => self.head_running += 1,
            _ => self.simple_running += 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::TaskAttribute::{HeadOfQueue, Ordered, Simple};
    use super::*;

    #[test]
    fn an_ordered_task_waits_for_older_ones_and_holds_younger_ones() {
        let mut set = TaskSet::default();
        assert_eq!(set.admit(Simple, 1), Some(1));
        assert_eq!(set.admit(Ordered, 2), None);
        assert_eq!(set.admit(Simple, 3), None);
        assert_eq!(set.next_ready(), None);
        set.ended(Simple);
        assert_eq!(set.next_ready(), Some((Ordered, 2)));
        assert_eq!(set.next_ready(), None);
        set.ended(Ordered);
        assert_eq!(set.next_ready(), Some((Simple, 3)));
    }

    #[test]
    fn a_head_of_queue_task_overtakes_all_that_wait() {
        let mut set = TaskSet::default();
        set.admit(Ordered, 1);
        assert_eq!(set.admit(Simple, 2), None);
        assert_eq!(set.admit(HeadOfQueue, 3), Some(3));
        set.ended(Ordered);
        assert_eq!(set.next_ready(), None);
        set.ended(HeadOfQueue);
        assert_eq!(set.next_ready(), Some((Simple, 2)));
    }

    #[test]
    fn an_aborted_ordered_task_lets_younger_ones_go() {
        let mut set = TaskSet::default();
        set.admit(Simple, 1);
        set.admit(Ordered, 2);
        set.admit(Simple, 3);
        assert!(set.is_waiting(|task| *task == 2));
        assert_eq!(set.abort_waiting(|task| *task == 2), [2]);
        assert_eq!(set.next_ready(), Some((Simple, 3)));
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 256, failure_persistence: None, ..ProptestConfig::default() })]

        /// Whatever comes and ends: each task starts once, none starts before an older one that is ORDERED
        /// has ended, and an ORDERED one starts when all older ones have ended.
        #[test]
        fn starts_keep_the_order_of_the_attributes(
            steps in prop::collection::vec((0usize..4, any::<prop::sample::Index>()), 1..60),
        ) {
            let mut set = TaskSet::default();
            // attribute, started, ended
            let mut tasks: Vec<(TaskAttribute, bool, bool)> = Vec::new();
            for (step, index) in steps {
                let mut started = Vec::new();
                match [Some(Simple), Some(Ordered), Some(HeadOfQueue), None][step] {
                    Some(attribute) => {
                        tasks.push((attribute, false, false));
                        started.extend(set.admit(attribute, tasks.len() - 1));
                    }
                    None => {
                        let running: Vec<usize> =
                            (0..tasks.len()).filter(|&at| tasks[at].1 && !tasks[at].2).collect();
                        if !running.is_empty() {
                            let at = running[index.index(running.len())];
                            tasks[at].2 = true;
                            set.ended(tasks[at].0);
                        }
                        while let Some((attribute, at)) = set.next_ready() {
                            prop_assert_eq!(attribute, tasks[at].0);
                            started.push(at);
                        }
                    }
                }
                for at in started {
                    prop_assert!(!tasks[at].1);
                    tasks[at].1 = true;
                    if tasks[at].0 != HeadOfQueue {
                        for older in &tasks[..at] {
                            let must_have_ended = older.0 != Simple || tasks[at].0 == Ordered;
                            prop_assert!(older.2 || !must_have_ended);
                        }
                    }
                }
                if tasks.iter().all(|task| !task.1 || task.2) {
                    prop_assert!(tasks.iter().all(|task| task.1), "nothing runs and something waits");
                }
            }
        }
    }
}
