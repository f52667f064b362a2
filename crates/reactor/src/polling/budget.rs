//! Limit on the time that a worker polls without a result.

/// Divisor of the elapsed time. The quotient may be polled without a result.
const PART_OF_TIME: u64 = 64;
/// Divisor of the time that was polled with success. The quotient may be polled without a result in addition.
const PART_OF_FOUND: u64 = 2;

/// Time that may still be polled without a result, in ticks. All of a worker's polling shares it.
pub(super) struct Budget {
    left: u64,
    max: u64,
    /// Time of the last refill.
    refilled_at: u64,
}

impl Budget {
    /// Creates a full budget of `max` ticks.
    pub fn new(max: u64) -> Budget {
        Budget {
            left: max,
            max,
            refilled_at: 0,
        }
    }

    /// Returns the time that may be polled without a result from `now` on.
    #[inline]
    pub fn left(&mut self, now: u64) -> u64 {
        let more = now.saturating_sub(self.refilled_at) / PART_OF_TIME;
        if more > 0 {
            self.left = self.left.saturating_add(more).min(self.max);
            self.refilled_at = now;
        }
        self.left
    }

    /// Records time that was polled with success.
    #[inline]
    pub fn found(&mut self, ticks: u64) {
        self.left = (self.left + ticks / PART_OF_FOUND).min(self.max);
    }

    /// Records time that was polled without a result.
    #[inline]
    pub fn wasted(&mut self, ticks: u64) {
        self.left = self.left.saturating_sub(ticks);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn budget_grows_with_time_and_success_up_to_its_maximum() {
        let mut budget = Budget::new(1_000);
        assert_eq!(budget.left(0), 1_000);
        budget.wasted(900);
        assert_eq!(budget.left(640), 110);
        assert_eq!(budget.left(703), 110);
        assert_eq!(budget.left(704), 111);
        budget.found(300);
        assert_eq!(budget.left(704), 261);
        budget.wasted(5_000);
        assert_eq!(budget.left(704), 0);
        assert_eq!(budget.left(u64::MAX), 1_000);
    }
}
