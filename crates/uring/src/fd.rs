//! A descriptor for operations on a ring. It stays open until the last of them has completed.
//!
//! Registration with a ring saves a look-up and a shared reference count per operation. The table entry is
//! cleared in the iteration after the last reference was dropped.

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
    /// Number of the descriptor in a submission entry; [`RingFd::mark`] sets its kind.
    pub(crate) fn number(&self) -> Fd {
        match &self.0.registered {
            Some(registered) => Fd(registered.index as RawFd),
            None => Fd(self.0.fd.as_raw_fd()),
        }
    }

    /// Returns true if the descriptor is registered with another ring, where its number refers to another file.
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
    /// `None`: not created yet. 0: not supported.
    size: Option<u32>,
    used: u32,
    free: Vec<u32>,
    dropped: Rc<RefCell<Vec<u32>>>,
}

/// Table sizes to try. The limit of open files bounds the table.
const TABLE_SIZES: [u32; 4] = [4096, 1024, 256, 64];

impl Registry {
    /// Registers the descriptor if the table has a free entry. Otherwise returns it unregistered.
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

    /// Returns true if a registered descriptor was dropped since [`Registry::sweep`].
    #[inline]
    pub(crate) fn has_dropped(&self) -> bool {
        !self.dropped.borrow().is_empty()
    }

    /// Clears the table. Closing the ring would also do so, but later.
    pub(crate) fn close(&mut self, submitter: &Submitter<'_>) {
        if self.size.is_some_and(|size| size > 0) {
            // After a failure, the kernel clears the table when the ring is closed.
            drop(submitter.unregister_files());
        }
    }

    /// Clears the entries of dropped descriptors, so that the kernel closes the files.
    #[cold]
    pub(crate) fn sweep(&mut self, submitter: &Submitter<'_>) {
        for index in self.dropped.borrow_mut().drain(..) {
            // An entry that cannot be cleared is not reused.
            if set(submitter, index, -1).is_ok() {
                self.free.push(index);
            }
        }
    }
}

fn set(submitter: &Submitter<'_>, index: u32, fd: RawFd) -> io::Result<()> {
    submitter.register_files_update(index, &[fd]).map(drop)
}
