//! Deadlines of connections without traffic: slow login, idle, or unanswered ping.
//!
//! Each connection has one deadline, in seconds of the accepting thread's clock. Only expired deadlines cost anything.

use std::collections::{BTreeSet, HashMap};

/// Deadlines by connection number and by time.
#[derive(Default)]
pub(crate) struct Deadlines {
    due: BTreeSet<(u64, u64)>,
    of: HashMap<u64, u64>,
}

impl Deadlines {
    /// Sets the deadline of a connection, unless it has an earlier one.
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

    /// Removes and returns a connection with an expired deadline.
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
