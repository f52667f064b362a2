//! The kernel's side of a ring: io_uring, or its replacement in simulations.
//!
//! Without the feature `simulated` the enum has one variant, and its `match` costs nothing.

use std::ops::{Deref, DerefMut};

use io_uring::IoUring;

#[cfg(feature = "simulated")]
use crate::simulated::Simulated;

#[cfg_attr(
    feature = "simulated",
    expect(clippy::large_enum_variant, reason = "the small one is for tests")
)]
pub(crate) enum Kernel {
    Real(IoUring),
    #[cfg(feature = "simulated")]
    Simulated(Simulated),
}

impl Deref for Kernel {
    type Target = IoUring;

    #[inline(always)]
    fn deref(&self) -> &IoUring {
        match self {
            Kernel::Real(io) => io,
            #[cfg(feature = "simulated")]
            Kernel::Simulated(_) => panic!("operation that a simulated ring does not have"),
        }
    }
}

impl DerefMut for Kernel {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut IoUring {
        match self {
            Kernel::Real(io) => io,
            #[cfg(feature = "simulated")]
            Kernel::Simulated(_) => panic!("operation that a simulated ring does not have"),
        }
    }
}
