//! Where a daemon that is killed may leave a ring and its in-flight region half written. A simulation has it end there; otherwise this
//! is nothing.

/// The process may end here, and what was written before is all that the next one finds.
#[inline(always)]
pub(crate) fn may_end_here() {
    #[cfg(feature = "simulated")]
    simulated::pass();
}

/// For simulations, which run on one thread.
#[cfg(feature = "simulated")]
pub mod simulated {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// What unwinds when it has come to that.
    #[derive(Debug)]
    pub struct Ended;

    /// The process ends after it has passed `places` more of these places. `None`: it does not end.
    pub fn end_after(places: Option<u32>) {
        LEFT.set(places);
    }

    #[inline(never)]
    pub(super) fn pass() {
        match LEFT.get() {
            None => {}
            Some(0) => {
                LEFT.set(None);
                // No panic: nothing is wrong.
                std::panic::resume_unwind(Box::new(Ended));
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }
}
