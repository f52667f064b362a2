//! Number of waiting chains that an iteration takes.
//!
//! Usually all of them. If many chains arrive at once after polling had found none, driver and device wait for each other in turns. Then
//! half of them are taken first: the driver processes their answers while the device processes the other half. A driver that sleeps until
//! it is interrupted gets its first answers ahead of all others. Figures: `docs/performance.md`.

/// Maximum number of requests per batch. Limits the time that other sources of the worker wait.
pub(super) const BATCH: usize = 128;

/// Minimum number of chains, arrived at once after an idle poll, that are taken in two halves. One more iteration costs as much as a few
/// requests.
const HALVED_MIN: usize = 8;

/// Resolution of the recent maximum, in fractions of a chain. Each idle poll that precedes chains reduces the maximum by one fraction.
/// This is slower than the drift between driver and device, after which all chains arrive at once again.
const FRACTIONS: usize = 64;

/// First batch for a driver that sleeps until it is interrupted. Such a driver takes long to wake, and does not sleep at all if the
/// interrupt is early enough.
const FIRST_BATCH: usize = 2;

/// Observed submission pattern of a driver.
pub(super) struct BatchSize {
    /// Number of idle polls when chains were last taken.
    polls: u64,
    /// Maximum batch size since then.
    size: usize,
    /// Recent maximum of chains that arrived at once, in units of 1/[`FRACTIONS`].
    recent_max: usize,
    /// Chains were taken after an idle poll, and their answers are not published yet.
    fresh: bool,
    /// The driver wanted an interrupt for the first answers after an idle time, and their I/Os had completed synchronously.
    awaited: bool,
}

impl BatchSize {
    pub(super) fn new() -> BatchSize {
        BatchSize {
            polls: 0,
            size: BATCH,
            recent_max: 0,
            fresh: false,
            awaited: false,
        }
    }

    /// Returns the maximum batch size for `available` waiting chains; `polls` is the number of idle polls so far. It is constant until the next
    /// idle poll, unless there are far more chains than the driver usually has in flight: its depth has grown, and neither side waits.
    #[inline(always)]
    pub(super) fn next(&mut self, polls: u64, available: usize) -> usize {
        let parts = available * FRACTIONS;
        if polls == std::mem::replace(&mut self.polls, polls) {
            return match parts * 2 > self.recent_max * 3 {
                true => BATCH,
                false => self.size,
            };
        }
        self.recent_max = parts.max(self.recent_max.saturating_sub(1));
        self.size = size_of_batch(available, self.recent_max / FRACTIONS);
        self.fresh = true;
        match self.awaited {
            true => self.size.min(FIRST_BATCH),
            false => self.size,
        }
    }

    /// Called when answers were published. `awaited`: the driver wanted an interrupt, and the I/Os had completed synchronously.
    #[inline(always)]
    pub(super) fn published(&mut self, awaited: bool) {
        if std::mem::take(&mut self.fresh) {
            self.awaited = awaited;
        }
    }
}

/// Returns the batch size for `available` chains if recently `recent_max` arrived at once. About half of `recent_max` is taken whole: halved
/// again it would take twice the iterations.
fn size_of_batch(available: usize, recent_max: usize) -> usize {
    if recent_max < HALVED_MIN {
        BATCH
    } else if available * 8 <= recent_max * 5 {
        available.max(recent_max / 2)
    } else {
        recent_max / 2
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Random driver behaviour: chains, idle polls before them, and whether the driver wants an interrupt.
        #[test]
        fn batch_size_reaches_what_is_there_in_a_few_iterations(
            asked in proptest::collection::vec((1usize..=BATCH, 0u64..3, any::<bool>()), 1..60),
        ) {
            let (mut batch_size, mut polls) = (BatchSize::new(), 0);
            for (available, looks, awaited) in asked {
                polls += looks;
                let (mut left, mut iterations) = (available, 0);
                while left > 0 {
                    let recent_max = batch_size.next(polls, left);
                    prop_assert!(recent_max > 0);
                    left -= recent_max.min(left);
                    batch_size.published(awaited);
                    iterations += 1;
                }
                // Covers early answers, and halves of up to one and a half times the previous maximum.
                prop_assert!(iterations <= 5, "{iterations} iterations for {available} chains");
            }
        }
    }
}
