//! Limits the number of queued operations per system call.
//!
//! The kernel prepares all reads and writes of a call, 1 to 5 us each, before it passes the first one to the device. An idle
//! device would wait for that, so it first receives a few, and more while it works on them.

/// Reads and writes in the first call for a nearly idle device. The kernel passes this many on without batching.
const FIRST: usize = 2;
/// Reads and writes in the next call, per operation in progress. Preparing one takes a fraction of the device's time for it.
const GROWTH: usize = 3;

/// Counts of reads and writes of one ring.
#[derive(Default)]
pub(crate) struct Ramp {
    /// Begun and not reaped.
    open: usize,
    /// Upper bound of those not yet submitted; other entries are queued among them.
    queued: usize,
}

impl Ramp {
    #[inline]
    pub(crate) fn queue(&mut self) {
        self.open += 1;
        self.queued += 1;
    }

    #[inline]
    pub(crate) fn reap(&mut self) {
        self.open -= 1;
    }

    /// Records that `left` entries of any kind are still queued.
    #[inline]
    pub(crate) fn entered(&mut self, left: usize) {
        self.queued = self.queued.min(left);
    }

    /// Returns the number of entries to submit before the rest, if splitting helps.
    #[inline]
    pub(crate) fn part(&self) -> Option<usize> {
        let part = match self.open.saturating_sub(self.queued) {
            under_way if under_way < FIRST => FIRST,
            under_way => GROWTH * under_way,
        };
        (self.queued > part).then_some(part)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parts(ramp: &mut Ramp, mut queued: usize) -> Vec<usize> {
        let mut parts = Vec::new();
        while let Some(part) = ramp.part() {
            parts.push(part);
            queued -= part;
            ramp.entered(queued);
        }
        ramp.entered(0);
        parts
    }

    #[test]
    fn device_without_work_gets_some_at_once_and_a_busy_one_all_together() {
        let mut ramp = Ramp::default();
        let mut queue = |count: usize| {
            (0..count).for_each(|_| ramp.queue());
            parts(&mut ramp, count)
        };
        assert_eq!(queue(32), [2, 6], "and the other 24");
        assert_eq!(queue(32), [0; 0], "32 are under way");
        (0..64).for_each(|_| ramp.reap());
        let mut queue = |count: usize| {
            (0..count).for_each(|_| ramp.queue());
            parts(&mut ramp, count)
        };
        assert_eq!(queue(1), [0; 0]);
        assert_eq!(queue(16), [2, 9], "and the other 5");
        assert_eq!(queue(100), [51]);
    }

    #[test]
    fn other_entries_that_the_kernel_does_not_take_confuse_nothing() {
        let mut ramp = Ramp::default();
        (0..10).for_each(|_| ramp.queue());
        // The kernel takes eight of ten reads and five other entries after them; the eight complete.
        ramp.entered(7);
        (0..8).for_each(|_| ramp.reap());
        assert_eq!(ramp.part(), Some(FIRST));
        ramp.entered(0);
        (0..2).for_each(|_| ramp.reap());
        assert_eq!((ramp.part(), ramp.open), (None, 0));
    }
}
