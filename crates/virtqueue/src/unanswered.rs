//! Finds the requests of a split ring that an earlier device left unanswered, from the ring itself. For front ends that start a ring at
//! another index than the used index and have no in-flight region.
//!
//! `available index - used index` requests are unanswered, but the indices do not identify them. A device that answers in order left the
//! last ones. Any other device, like this one, may have left older ones. DPDK repeats the last ones. A request that is answered twice
//! breaks the driver's queue, and a repeated write may read memory that is already used for other data. The entries of both rings are
//! therefore compared first: for each head, its last position in the available and in the used ring. The result is exact while the rings
//! have not been overwritten, and while every head that was made available later than it was answered is unanswered. Otherwise it is the
//! best guess. Only an in-flight region is always exact.

/// Entries of one head in both rings. Positions count from the oldest entry of the used ring.
#[derive(Clone, Copy, Default)]
struct Head {
    /// Number of available entries minus number of used entries, as far as the rings reach.
    balance: i32,
    made_available: Option<u32>,
    answered: Option<u32>,
}

/// A split ring. Entries are read at a ring index, which wraps.
pub(crate) struct Rings<A, U> {
    pub size: u16,
    pub available_index: u16,
    pub used_index: u16,
    /// Returns the head at an index of the available ring.
    pub available: A,
    /// Returns the head at an index of the used ring.
    pub used: U,
}

impl<A: Fn(u16) -> u16, U: Fn(u16) -> u32> Rings<A, U> {
    /// Returns the heads of the unanswered requests in order of availability, or `None` if the indices are
    /// inconsistent. There may be fewer than the indices imply, because overwritten entries are lost.
    pub fn unanswered(&self) -> Option<Vec<u16>> {
        let count = self.available_index.wrapping_sub(self.used_index);
        if count > self.size {
            return None;
        }
        let mut heads = vec![Head::default(); usize::from(self.size)];
        self.read(count, &mut heads);
        let mut found: Vec<(bool, u32, u32, u16)> = (0..self.size)
            .zip(&heads)
            .filter_map(|(number, head)| {
                let at = head.made_available?;
                // When an entry is written, at most as many answers exist as entries before it.
                let ahead = match head.answered {
                    Some(answered) => at.checked_sub(answered).filter(|ahead| *ahead > 0)?,
                    None => u32::MAX,
                };
                Some((head.balance > 0, ahead, at, number))
            })
            .collect();
        // If there are more candidates than unanswered requests, some candidates were answered out of order, soon after they were
        // made available. They are dropped.
        found.sort_unstable_by(|a, b| b.cmp(a));
        found.truncate(usize::from(count));
        found.sort_unstable_by_key(|(_, _, at, _)| *at);
        Some(found.into_iter().map(|(_, _, _, number)| number).collect())
    }

    fn read(&self, count: u16, heads: &mut [Head]) {
        let (size, fresh) = (self.size, self.is_fresh());
        let begin = self.used_index.wrapping_sub(size);
        for at in 0..size {
            if !fresh || size - at <= self.used_index {
                let number = (self.used)(begin.wrapping_add(at));
                if let Some(head) = usize::try_from(number).ok().and_then(|n| heads.get_mut(n)) {
                    head.balance -= 1;
                    head.answered = Some(u32::from(at));
                }
            }
        }
        for at in 0..size {
            if !fresh || size - at <= self.available_index {
                let at = at + count;
                let number = (self.available)(begin.wrapping_add(at));
                if let Some(head) = heads.get_mut(usize::from(number)) {
                    head.balance += 1;
                    head.made_available = Some(u32::from(at));
                }
            }
        }
    }

    /// Returns true if the ring was never filled. Drivers zero it at first, and 0 is also a valid head.
    fn is_fresh(&self) -> bool {
        self.available_index <= self.size
            && (self.available_index..self.size).all(|at| (self.available)(at) == 0)
            && (self.used_index..self.size).all(|at| (self.used)(at) == 0)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::*;

    const SIZE: u16 = 16;

    /// A driver that reuses the last returned head, like Linux, and a device that answers in any order.
    struct Ring {
        available: [u16; SIZE as usize],
        used: [u32; SIZE as usize],
        available_index: u16,
        used_index: u16,
        free: Vec<u16>,
        taken: VecDeque<u16>,
    }

    impl Ring {
        fn new(start: u16) -> Ring {
            Ring {
                available: [0; SIZE as usize],
                used: [0; SIZE as usize],
                available_index: start,
                used_index: start,
                free: (0..SIZE).rev().collect(),
                taken: VecDeque::new(),
            }
        }

        fn submit(&mut self) {
            if let Some(head) = self.free.pop() {
                self.available[usize::from(self.available_index % SIZE)] = head;
                self.available_index = self.available_index.wrapping_add(1);
                self.taken.push_back(head);
            }
        }

        fn answer(&mut self, which: usize) {
            if let Some(head) = self.taken.remove(which % self.taken.len().max(1)) {
                self.used[usize::from(self.used_index % SIZE)] = u32::from(head);
                self.used_index = self.used_index.wrapping_add(1);
                self.free.push(head);
            }
        }

        fn unanswered(&self) -> Vec<u16> {
            let rings = Rings {
                size: SIZE,
                available_index: self.available_index,
                used_index: self.used_index,
                available: |at| self.available[usize::from(at % SIZE)],
                used: |at| self.used[usize::from(at % SIZE)],
            };
            rings.unanswered().unwrap()
        }
    }

    proptest! {
        #[test]
        fn device_that_answers_in_order_left_the_last_ones(
            start in any::<u16>(),
            steps in prop::collection::vec(any::<bool>(), 0..200),
        ) {
            let mut ring = Ring::new(start);
            for submit in steps {
                if submit { ring.submit() } else { ring.answer(0) }
            }
            prop_assert_eq!(ring.unanswered(), Vec::from(ring.taken));
        }

        #[test]
        fn fresh_ring_is_exact_whatever_the_order(
            steps in prop::collection::vec((any::<bool>(), any::<usize>()), 0..60),
        ) {
            let mut ring = Ring::new(0);
            for (submit, which) in steps {
                if !submit {
                    ring.answer(which);
                } else if ring.available_index < SIZE {
                    ring.submit();
                }
            }
            prop_assert_eq!(ring.unanswered(), Vec::from(ring.taken));
        }

        /// Linux with a constant number of requests in flight, answered in any order, as in benchmarks and on busy disks.
        #[test]
        fn constant_depth_is_exact_unless_one_waits_a_ring_long(
            start in any::<u16>(),
            depth in 1..SIZE,
            answers in prop::collection::vec(any::<usize>(), 0..200),
        ) {
            let mut ring = Ring::new(start);
            (0..depth).for_each(|_| ring.submit());
            let mut oldest_max = 0;
            for which in answers {
                // No request is overtaken by more than half of the ring.
                let first = ring.taken.front().copied();
                let at = (0..SIZE).find(|back| {
                    let index = ring.available_index.wrapping_sub(1 + back);
                    Some(ring.available[usize::from(index % SIZE)]) == first
                });
                let waited = at.unwrap_or(SIZE);
                oldest_max = oldest_max.max(waited);
                ring.answer(if waited >= SIZE - 2 { 0 } else { which });
                ring.submit();
            }
            prop_assert_eq!(ring.unanswered(), Vec::from(ring.taken));
        }

        #[test]
        fn any_bytes_give_distinct_heads_of_the_ring(
            available in prop::collection::vec(any::<u16>(), usize::from(SIZE)),
            used in prop::collection::vec(any::<u32>(), usize::from(SIZE)),
            available_index in any::<u16>(),
            ahead in 0..SIZE * 2,
        ) {
            let rings = Rings {
                size: SIZE,
                available_index,
                used_index: available_index.wrapping_sub(ahead),
                available: |at| available[usize::from(at % SIZE)] % (SIZE + 2),
                used: |at| used[usize::from(at % SIZE)] % u32::from(SIZE + 2),
            };
            let found = rings.unanswered();
            prop_assert_eq!(found.is_some(), ahead <= SIZE);
            let mut found = found.unwrap_or_default();
            prop_assert!(found.len() <= usize::from(ahead));
            found.sort_unstable();
            prop_assert!(found.windows(2).all(|pair| pair[0] < pair[1]));
            prop_assert!(found.iter().all(|head| *head < SIZE));
        }
    }
}
