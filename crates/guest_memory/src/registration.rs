//! Index of memory in a ring's table of registered buffers. The kernel keeps registered memory pinned and needs no
//! page look-up.
//!
//! Created by a ring, held by the memory, and confined to their worker. When the memory is dropped, so is the
//! registration, and the ring clears the index in its next iteration; it is not reused before. Addresses are not
//! compared: memory that the allocator returns again has no registration until a ring creates one.

use std::cell::RefCell;
use std::rc::Rc;

/// Indexes whose memory was dropped, to be cleared by their ring.
pub type Vacated = Rc<RefCell<Vec<u16>>>;

/// An index in a ring's table, valid during the lifetime of this value.
#[derive(Debug)]
pub struct Registration {
    index: u16,
    vacated: Vacated,
}

impl Registration {
    /// Records that a ring registered the memory at `index`.
    pub fn new(index: u16, vacated: &Vacated) -> Registration {
        Registration {
            index,
            vacated: vacated.clone(),
        }
    }

    /// Returns the index if `vacated` identifies the ring that registered the memory.
    #[inline]
    pub fn index(&self, vacated: &Vacated) -> Option<u16> {
        Rc::ptr_eq(&self.vacated, vacated).then_some(self.index)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.vacated.borrow_mut().push(self.index);
    }
}
