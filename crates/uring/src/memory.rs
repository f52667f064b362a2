//! A ring's table of registered memory: reads and writes of it spare the kernel looking its pages up and pinning them.
//!
//! Only memory of our own is registered. A guest's is not: pinned pages stay where they are while its balloon, free page
//! reporting or migration give them back, and the device would go on writing to what the guest no longer has.
//! Where the kernel has no such table, or the limit of locked memory is reached, memory simply is not registered.

use std::io;
use std::rc::Rc;

use guest_memory::{IoBuffer, Registration, Segment, Vacated};
use io_uring::Submitter;

/// Table sizes tried, largest first.
const TABLE_SIZES: [u32; 3] = [8192, 1024, 64];

/// A ring's table.
#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// `None`: not asked for yet. 0: there is none.
    size: Option<u32>,
    used: u16,
    free: Vec<u16>,
    vacated: Vacated,
    /// The kernel would not take more: not asked again until a place is vacated.
    refused: bool,
    told: bool,
}

impl Memory {
    /// Places taken.
    pub(crate) fn count(&self) -> usize {
        usize::from(self.used) - self.free.len() - self.vacated.borrow().len()
    }

    /// The place of a buffer's memory in this table.
    #[inline]
    pub(crate) fn place(&self, buffer: &IoBuffer) -> Option<u16> {
        buffer.registration()?.place(&self.vacated)
    }

    /// Registers a buffer's memory if that pays and there is room.
    #[inline]
    pub(crate) fn adopt(&mut self, submitter: &Submitter<'_>, buffer: &IoBuffer) {
        if let Some(memory) = buffer.to_register() {
            self.register(submitter, buffer, memory);
        }
    }

    #[cold]
    fn register(&mut self, submitter: &Submitter<'_>, buffer: &IoBuffer, memory: Segment) {
        self.sweep(submitter);
        if self.refused {
            return;
        }
        let size = *self.size.get_or_insert_with(|| {
            let fits = |size: &u32| submitter.register_buffers_sparse(*size).is_ok();
            TABLE_SIZES.into_iter().find(fits).unwrap_or(0)
        });
        let place = match self.free.pop() {
            Some(place) => place,
            None if u32::from(self.used) < size => {
                self.used += 1;
                self.used - 1
            }
            None => return,
        };
        match set(submitter, place, memory.base(), memory.len()) {
            Ok(()) => buffer.registered(Registration::new(place, &self.vacated)),
            Err(error) => {
                self.free.push(place);
                self.refused = true;
                if !std::mem::replace(&mut self.told, true) {
                    tracing::info!(
                        "memory is not registered with io_uring: {error}; I/O costs a little more; hint: allow more locked memory (ulimit -l, LimitMEMLOCK=)"
                    );
                }
            }
        }
    }

    /// Has memory with a place gone since [`Memory::sweep`]?
    #[inline]
    pub(crate) fn has_vacated(&self) -> bool {
        !self.vacated.borrow().is_empty()
    }

    /// Empties the places whose memory has gone.
    #[cold]
    pub(crate) fn sweep(&mut self, submitter: &Submitter<'_>) {
        let vacated = Rc::clone(&self.vacated);
        for place in vacated.borrow_mut().drain(..) {
            // A place that cannot be emptied is not used again.
            if set(submitter, place, std::ptr::null_mut(), 0).is_ok() {
                self.free.push(place);
                self.refused = false;
            }
        }
    }

    /// Empties the table: closing the ring would do so as well, but some time later.
    pub(crate) fn close(&mut self, submitter: &Submitter<'_>) {
        if self.size.is_some_and(|size| size > 0) {
            // What fails here is done by the kernel when the ring is closed.
            drop(submitter.unregister_buffers());
        }
    }
}

fn set(submitter: &Submitter<'_>, place: u16, base: *mut u8, length: usize) -> io::Result<()> {
    let memory = libc::iovec {
        iov_base: base.cast(),
        iov_len: length,
    };
    // SAFETY: the kernel pins the pages that lie there now; whatever is done with the address range later, they stay
    // pages. Operations name the place only together with a buffer that keeps this very memory allocated.
    unsafe { submitter.register_buffers_update(place.into(), &[memory], None) }
}
