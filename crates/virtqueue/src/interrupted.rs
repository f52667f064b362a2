//! Points at which a killed daemon may leave a ring and its in-flight region half written. A simulation can stop there; otherwise this code
//! does nothing.

/// Marks a point at which the process may stop. The next process finds only earlier stores.
#[inline(always)]
pub(crate) fn may_end_here() {
    #[cfg(feature = "simulated")]
    simulated::pass();
}

/// For single-threaded simulations.
#[cfg(feature = "simulated")]
pub mod simulated {
    use std::cell::Cell;

    thread_local! {
        static LEFT: Cell<Option<u32>> = const { Cell::new(None) };
    }

    /// Payload of the unwinding at such a point.
    #[derive(Debug)]
    pub struct Ended;

    /// Stops the process after it has passed `places` more points; `None`: never.
    pub fn end_after(places: Option<u32>) {
        LEFT.set(places);
    }

    #[inline(never)]
    pub(super) fn pass() {
        match LEFT.get() {
            None => {}
            Some(0) => {
                LEFT.set(None);
                // Unwinds without a panic message: this is no error.
                std::panic::resume_unwind(Box::new(Ended));
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }
}
