//! Fairness between requests: a source executes a limited number of steps per iteration, so that other work of the worker is not delayed.

/// Limit of follow-up I/Os per iteration that complete synchronously. Each `STEP_BYTES` bytes count as one more.
const STEPS_MAX: usize = 32;
const STEP_BYTES: usize = 128 << 10;

/// Steps that a source has executed in this iteration.
#[derive(Default)]
pub struct Pace(usize);

impl Pace {
    /// Returns true if further steps must wait for the next iteration.
    #[inline(always)]
    pub fn is_exhausted(&self) -> bool {
        self.0 >= STEPS_MAX
    }

    /// Counts a synchronous I/O of `bytes` bytes. For I/O on the request's own buffer only the bytes count.
    #[inline(always)]
    pub fn count(&mut self, bytes: usize, is_scratch: bool) {
        self.0 += usize::from(is_scratch) + bytes / STEP_BYTES;
    }
}
