//! Memory's place in a ring's table of registered memory: the kernel keeps it pinned and need not look its pages up.
//!
//! Made by a ring, held by the memory, never leaves their worker. When the memory goes, so does this, and the ring
//! empties the place in its next iteration; until then nothing else has it. No address is compared: memory that the
//! allocator hands out again has no registration until a ring gives it a new one.

use std::cell::RefCell;
use std::rc::Rc;

/// Places whose memory has gone, for their ring to empty.
pub type Vacated = Rc<RefCell<Vec<u16>>>;

/// A place in a ring's table, for as long as this lives.
#[derive(Debug)]
pub struct Registration {
    place: u16,
    vacated: Vacated,
}

impl Registration {
    /// For rings: the memory was put there.
    pub fn new(place: u16, vacated: &Vacated) -> Registration {
        Registration {
            place,
            vacated: vacated.clone(),
        }
    }

    /// The place in that ring's table; `None`: it is another ring's.
    #[inline]
    pub fn place(&self, vacated: &Vacated) -> Option<u16> {
        Rc::ptr_eq(&self.vacated, vacated).then_some(self.place)
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        self.vacated.borrow_mut().push(self.place);
    }
}
