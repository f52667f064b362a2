//! When a connection has to be looked at though nothing comes from it: it logs in too slowly, is idle, or owes an answer.
//!
//! Each has one time, in seconds of the thread that accepts. Only those whose time has come cost anything.

use std::collections::{BTreeSet, HashMap};

/// Connections by their numbers, in order of time.
#[derive(Default)]
pub(crate) struct Deadlines {
    due: BTreeSet<(u64, u64)>,
    of: HashMap<u64, u64>,
}

impl Deadlines {
    /// Has this connection looked at then, unless it is looked at earlier anyway.
    pub fn set(&mut self, number: u64, second: u64) {
        if self.of.get(&number).is_none_or(|set| *set > second) {
            self.forget(number);
            self.of.insert(number, second);
            self.due.insert((second, number));
        }
    }

    pub fn forget(&mut self, number: u64) {
        if let Some(second) = self.of.remove(&number) {
            self.due.remove(&(second, number));
        }
    }

    /// One whose time has come, which it then has no more.
    pub fn next_due(&mut self, second: u64) -> Option<u64> {
        let (due, number) = *self.due.first()?;
        if due > second {
            return None;
        }
        self.forget(number);
        Some(number)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_is_due_once_at_the_earliest_time_that_was_set() {
        let mut alarms = Deadlines::default();
        alarms.set(7, 15);
        alarms.set(8, 3);
        alarms.set(9, 3);
        alarms.set(7, 4);
        alarms.set(8, 5);
        alarms.set(9, 2);
        alarms.set(10, 4);
        assert_eq!(alarms.next_due(1), None);
        assert_eq!(alarms.next_due(3), Some(9));
        assert_eq!(alarms.next_due(3), Some(8));
        assert_eq!(alarms.next_due(3), None);
        alarms.forget(10);
        assert_eq!(alarms.next_due(20), Some(7));
        alarms.set(7, 30);
        assert_eq!(alarms.next_due(29), None);
        assert_eq!(alarms.next_due(30), Some(7));
        assert_eq!(alarms.next_due(u64::MAX), None);
        assert!(alarms.of.is_empty(), "nothing is left behind");
    }
}
