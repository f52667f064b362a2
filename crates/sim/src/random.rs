//! Pseudo-random numbers from a seed.

/// Generator with a sequence that depends only on its seed.
#[derive(Clone, Debug)]
pub struct Random(fastrand::Rng);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(fastrand::Rng::with_seed(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0.u64(..)
    }

    /// Returns a number below `bound`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0.u64(..bound.max(1))
    }

    /// Returns true once in `times` calls, on average.
    pub fn one_in(&mut self, times: u64) -> bool {
        self.below(times) == 0
    }
}
