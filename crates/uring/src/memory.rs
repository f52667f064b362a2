//! A ring's table of registered buffers. Reads and writes of registered memory save the kernel the page look-up and
//! pinning.
//!
//! Only the daemon's own memory is registered. Pinned guest pages would stay in place while the guest's balloon, free
//! page reporting or migration releases them, and the device would write to pages that the guest no longer owns. Without
//! kernel support, or at the limit of locked memory, I/O uses unregistered memory.

use std::io;
use std::rc::Rc;

use guest_memory::{IoBuffer, Registration, Segment, Vacated};
use io_uring::Submitter;

/// Table sizes tried, largest first.
const TABLE_SIZES: [u32; 3] = [8192, 1024, 64];

#[derive(Debug, Default)]
pub(crate) struct Memory {
    /// `None`: not created yet. 0: not supported.
    size: Option<u32>,
    used: u16,
    free: Vec<u16>,
    vacated: Vacated,
    /// The kernel refused a registration. Not retried before an index is vacated.
    refused: bool,
    logged: bool,
}

impl Memory {
    /// Number of registered buffers.
    pub(crate) fn count(&self) -> usize {
        usize::from(self.used) - self.free.len() - self.vacated.borrow().len()
    }

    /// Index of a buffer's memory in this table.
    #[inline]
    pub(crate) fn index(&self, buffer: &IoBuffer) -> Option<u16> {
        buffer.registration()?.index(&self.vacated)
    }

    /// Registers a buffer's memory if it is used often and the table has a free index.
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
        let index = match self.free.pop() {
            Some(index) => index,
            None if u32::from(self.used) < size => {
                self.used += 1;
                self.used - 1
            }
            None => return,
        };
        match set(submitter, index, memory.base(), memory.len()) {
            Ok(()) => buffer.registered(Registration::new(index, &self.vacated)),
            Err(error) => {
                self.free.push(index);
                self.refused = true;
                if !std::mem::replace(&mut self.logged, true) {
                    tracing::info!(
                        "cannot register memory with io_uring, I/O takes slightly more CPU time: {error}; hint: allow more locked memory (ulimit -l, LimitMEMLOCK=)"
                    );
                }
            }
        }
    }

    /// Returns true if registered memory was dropped since [`Memory::sweep`].
    #[inline]
    pub(crate) fn has_vacated(&self) -> bool {
        !self.vacated.borrow().is_empty()
    }

    /// Clears the indexes of dropped memory.
    #[cold]
    pub(crate) fn sweep(&mut self, submitter: &Submitter<'_>) {
        let vacated = Rc::clone(&self.vacated);
        for index in vacated.borrow_mut().drain(..) {
            // An index that cannot be cleared is not reused.
            if set(submitter, index, std::ptr::null_mut(), 0).is_ok() {
                self.free.push(index);
                self.refused = false;
            }
        }
    }

    /// Clears the table. Closing the ring would also do so, but later.
    pub(crate) fn close(&mut self, submitter: &Submitter<'_>) {
        if self.size.is_some_and(|size| size > 0) {
            // After a failure, the kernel clears the table when the ring is closed.
            drop(submitter.unregister_buffers());
        }
    }
}

fn set(submitter: &Submitter<'_>, index: u16, base: *mut u8, length: usize) -> io::Result<()> {
    let memory = libc::iovec {
        iov_base: base.cast(),
        iov_len: length,
    };
    // SAFETY: the kernel pins the pages that are mapped there now; they stay allocated even if the address
    // range is unmapped later. Operations use the index only together with a buffer that keeps this same memory allocated.
    unsafe { submitter.register_buffers_update(index.into(), &[memory], None) }
}
