//! A descriptor that operations on a ring refer to. It stays open until the last of them has completed.
//!
//! Registered with a ring, it spares the kernel a look-up and a shared reference count per operation. The entry
//! in the ring's table is swept at the iteration after the last reference was dropped.

use std::cell::RefCell;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

use io_uring::Submitter;
use io_uring::squeue::{Entry, Flags};
use io_uring::types::Fd;

/// One worker's reference to an open descriptor. Cloning it costs no atomic operation.
#[derive(Clone, Debug)]
pub struct RingFd(Rc<Inner>);

#[derive(Debug)]
struct Inner {
    fd: Rc<OwnedFd>,
    registered: Option<Registered>,
}

#[derive(Debug)]
struct Registered {
    index: u32,
    dropped: Rc<RefCell<Vec<u32>>>,
}

impl Drop for Registered {
    fn drop(&mut self) {
        self.dropped.borrow_mut().push(self.index);
    }
}

impl RingFd {
    /// What an entry calls it: [`RingFd::mark`] says which kind of number it is.
    pub(crate) fn number(&self) -> Fd {
        match &self.0.registered {
            Some(registered) => Fd(registered.index as RawFd),
            None => Fd(self.0.fd.as_raw_fd()),
        }
    }

    /// Is it registered with another ring? Then its number means another file there.
    #[inline]
    pub(crate) fn is_foreign(&self, registry: &Registry) -> bool {
        match &self.0.registered {
            Some(registered) => !Rc::ptr_eq(&registered.dropped, &registry.dropped),
            None => false,
        }
    }

    pub(crate) fn mark(&self, entry: Entry) -> Entry {
        match self.0.registered {
            Some(_) => entry.flags(Flags::FIXED_FILE),
            None => entry,
        }
    }
}

impl From<OwnedFd> for RingFd {
    fn from(fd: OwnedFd) -> Self {
        RingFd::from(&Rc::new(fd))
    }
}

impl From<File> for RingFd {
    fn from(file: File) -> Self {
        RingFd::from(OwnedFd::from(file))
    }
}

impl From<&Rc<OwnedFd>> for RingFd {
    fn from(fd: &Rc<OwnedFd>) -> Self {
        RingFd(Rc::new(Inner {
            fd: fd.clone(),
            registered: None,
        }))
    }
}

impl From<&RingFd> for RingFd {
    fn from(fd: &RingFd) -> Self {
        fd.clone()
    }
}

impl AsFd for RingFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.fd.as_fd()
    }
}

/// A ring's table of registered descriptors.
#[derive(Debug, Default)]
pub(crate) struct Registry {
    /// `None`: not asked for yet. 0: there is none.
    size: Option<u32>,
    used: u32,
    free: Vec<u32>,
    dropped: Rc<RefCell<Vec<u32>>>,
}

/// Sizes tried, largest first: the limit of open files bounds the table.
const TABLE_SIZES: [u32; 4] = [4096, 1024, 256, 64];

impl Registry {
    /// The descriptor, registered if there is room, else as it is.
    pub(crate) fn register(&mut self, submitter: &Submitter<'_>, fd: RingFd) -> RingFd {
        self.sweep(submitter);
        let size = *self.size.get_or_insert_with(|| {
            let fits = |size: &u32| submitter.register_files_sparse(*size).is_ok();
            TABLE_SIZES.into_iter().find(fits).unwrap_or(0)
        });
        let index = match self.free.pop() {
            Some(index) => index,
            None if self.used < size => {
                self.used += 1;
                self.used - 1
            }
            None => return fd,
        };
        if set(submitter, index, fd.as_fd().as_raw_fd()).is_err() {
            self.free.push(index);
            return fd;
        }
        RingFd(Rc::new(Inner {
            fd: fd.0.fd.clone(),
            registered: Some(Registered {
                index,
                dropped: self.dropped.clone(),
            }),
        }))
    }

    /// Has a descriptor with an entry been dropped since [`Registry::sweep`]?
    #[inline]
    pub(crate) fn has_dropped(&self) -> bool {
        !self.dropped.borrow().is_empty()
    }

    /// Empties the table: closing the ring would do so as well, but some time later.
    pub(crate) fn close(&mut self, submitter: &Submitter<'_>) {
        if self.size.is_some_and(|size| size > 0) {
            // What fails here is done by the kernel when the ring is closed.
            drop(submitter.unregister_files());
        }
    }

    /// Empties the entries whose descriptors were dropped, so that the kernel closes them as well.
    #[cold]
    pub(crate) fn sweep(&mut self, submitter: &Submitter<'_>) {
        for index in self.dropped.borrow_mut().drain(..) {
            // An entry that cannot be emptied is not used again.
            if set(submitter, index, -1).is_ok() {
                self.free.push(index);
            }
        }
    }
}

fn set(submitter: &Submitter<'_>, index: u32, fd: RawFd) -> io::Result<()> {
    submitter.register_files_update(index, &[fd]).map(drop)
}
