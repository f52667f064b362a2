//! A descriptor that operations on a ring refer to. It stays open until the last of them has completed.

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::rc::Rc;

/// One worker's reference to an open descriptor. Cloning it costs no atomic operation.
#[derive(Clone, Debug)]
pub struct RingFd(Rc<OwnedFd>);

impl RingFd {
    pub(crate) fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }
}

impl From<OwnedFd> for RingFd {
    fn from(fd: OwnedFd) -> Self {
        RingFd(Rc::new(fd))
    }
}

impl From<File> for RingFd {
    fn from(file: File) -> Self {
        RingFd::from(OwnedFd::from(file))
    }
}

impl From<&Rc<OwnedFd>> for RingFd {
    fn from(fd: &Rc<OwnedFd>) -> Self {
        RingFd(fd.clone())
    }
}

impl From<&RingFd> for RingFd {
    fn from(fd: &RingFd) -> Self {
        fd.clone()
    }
}

impl AsFd for RingFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}
