//! How many of the chains that wait an iteration takes.
//!
//! All of them as a rule. Where many come at once after polling had found none, driver and device wait for each other in turns: half
//! of them are taken first, so that the driver goes on with their answers while the others are worked off. A driver that sleeps
//! until it is interrupted is told of its first answers before all others. Figures: `docs/performance.md`.

/// Most requests taken in one go: bounds how long other sources of the worker wait.
pub(super) const BATCH: usize = 128;

/// Where so many come at once after polling had found none, driver and device have waited for each other in turns, and half of
/// them are taken first. An iteration more costs as much as a few requests.
const HALVED: usize = 8;

/// What the most chains that came at once is counted in. One part is forgotten each time that polling had found none: more
/// slowly than driver and device get out of step, after which all come at once again.
const MOST_PARTS: usize = 64;

/// A driver that sleeps until it is interrupted is told of so many answers before the rest of its requests is worked off: it
/// needs long to wake, and not to sleep at all if it is told soon enough.
const EARLY: usize = 2;

/// What a queue knows of how its driver asks.
pub(super) struct BatchSize {
    /// How often polling had found nothing when chains were taken last.
    polls: u64,
    /// Most chains that are taken in one go since then.
    size: usize,
    /// Most that came at once lately, in parts.
    most: usize,
    /// Chains were taken after polling had found none, and their answers are not published yet.
    fresh: bool,
    /// The driver wanted to be interrupted for the first answers after it had been silent, and their I/Os had ended at once.
    awaited: bool,
}

impl BatchSize {
    pub(super) fn new() -> BatchSize {
        BatchSize {
            polls: 0,
            size: BATCH,
            most: 0,
            fresh: false,
            awaited: false,
        }
    }

    /// Most chains to be taken now, by how often polling has found none so far and how many are `there`. What is said stays until
    /// polling finds nothing again, or until there are more than the driver is known to ask: it has more in flight now, and nobody
    /// waits meanwhile.
    #[inline(always)]
    pub(super) fn next(&mut self, polls: u64, there: usize) -> usize {
        let parts = there * MOST_PARTS;
        if polls == std::mem::replace(&mut self.polls, polls) {
            return match parts * 2 > self.most * 3 {
                true => BATCH,
                false => self.size,
            };
        }
        self.most = parts.max(self.most.saturating_sub(1));
        self.size = size_of_batch(there, self.most / MOST_PARTS);
        self.fresh = true;
        match self.awaited {
            true => self.size.min(EARLY),
            false => self.size,
        }
    }

    /// Answers were published: did the driver want an interrupt, and had their I/Os ended at once?
    #[inline(always)]
    pub(super) fn published(&mut self, awaited: bool) {
        if std::mem::take(&mut self.fresh) {
            self.awaited = awaited;
        }
    }
}

/// Of so many chains that are there, and where so many came at once lately, how many are taken in one go. What comes alone and is
/// about a half is such a half: halved again it would take twice the iterations.
fn size_of_batch(there: usize, most: usize) -> usize {
    if most < HALVED {
        BATCH
    } else if there * 8 <= most * 5 {
        there.max(most / 2)
    } else {
        most / 2
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// What a driver asks, in whatever order: chains, looks that found none before, and whether it wants an interrupt.
        #[test]
        fn batch_size_reaches_what_is_there_in_a_few_iterations(
            asked in proptest::collection::vec((1usize..=BATCH, 0u64..3, any::<bool>()), 1..60),
        ) {
            let (mut batch_size, mut polls) = (BatchSize::new(), 0);
            for (there, looks, awaited) in asked {
                polls += looks;
                let (mut left, mut iterations) = (there, 0);
                while left > 0 {
                    let most = batch_size.next(polls, left);
                    prop_assert!(most > 0);
                    left -= most.min(left);
                    batch_size.published(awaited);
                    iterations += 1;
                }
                // Early answers, and halves of what may be half as much again as what came at once before.
                prop_assert!(iterations <= 5, "{iterations} iterations for {there} chains");
            }
        }
    }
}
