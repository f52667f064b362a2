//! How much of what is queued goes to the kernel with one system call.
//!
//! The kernel prepares all reads and writes of a call, 1 to 5 us each, before it shows the device the first of them. A device that
//! has nothing to do waits for that; so it is given a few at first, and more while it works on those.

/// Reads and writes that go first to a device that has hardly any work: so many the kernel hands over one by one.
const FIRST: usize = 2;
/// The next part, for each read or write that is under way: preparing one takes a fraction of what the device needs for it.
const GROWTH: usize = 3;

/// Reads and writes of one ring.
#[derive(Default)]
pub(crate) struct Ramp {
    /// Begun and not reaped.
    open: usize,
    /// Of these, not yet with the kernel: at most so many, for other entries lie among them.
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

    /// So many entries are still queued, reads and writes among them.
    #[inline]
    pub(crate) fn entered(&mut self, left: usize) {
        self.queued = self.queued.min(left);
    }

    /// How many entries to hand over by themselves before the rest, if that gains anything.
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
        // Of ten, and five others behind them, eight are taken, and end.
        ramp.entered(7);
        (0..8).for_each(|_| ramp.reap());
        assert_eq!(ramp.part(), Some(FIRST));
        ramp.entered(0);
        (0..2).for_each(|_| ramp.reap());
        assert_eq!((ramp.part(), ramp.open), (None, 0));
    }
}
