//! Points at which a killed daemon may leave a ring and its in-flight region half written. A simulation can stop there; otherwise this code
//! does nothing.

/// Marks a point at which the process may stop. The next process finds only earlier stores.
#[inline(always)]
pub(crate) fn crash_point() {
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
    pub struct Crashed;

    /// Stops the process after it has passed `points` more points; `None`: never.
    pub fn crash_after(points: Option<u32>) {
        LEFT.set(points);
    }

    #[inline(never)]
    pub(super) fn pass() {
        match LEFT.get() {
            None => {}
            Some(0) => {
                LEFT.set(None);
                // Unwinds without a panic message: this is no error.
                std::panic::resume_unwind(Box::new(Crashed));
            }
            Some(left) => LEFT.set(Some(left - 1)),
        }
    }
}
