//! Reopens an open file with its own open file description.
//!
//! The path is in /proc, and confined workers open no paths: one thread opens for the process. The control plane starts it with the first
//! file; it never ends. A worker waits for it as for its own system call.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::mpsc::{Sender, channel};
use std::sync::{Mutex, OnceLock, PoisonError};

use rustix::fs::{Mode, OFlags};

struct Request {
    path: String,
    flags: OFlags,
    answer: Sender<io::Result<OwnedFd>>,
}

static OPENER: OnceLock<Mutex<Sender<Request>>> = OnceLock::new();

/// Starts the thread if needed, from a context that may open paths.
pub fn prepare() -> io::Result<()> {
    if OPENER.get().is_some() {
        return Ok(());
    }
    let (sender, requests) = channel::<Request>();
    std::thread::Builder::new()
        .name("reopen".to_owned())
        .spawn(move || {
            for request in requests {
                let opened = rustix::fs::open(request.path, request.flags, Mode::empty());
                // The requesting thread may have ended in the meantime.
                request.answer.send(opened.map_err(io::Error::from)).ok();
            }
        })?;
    // If another caller was first, this thread ends with its sender.
    OPENER.set(Mutex::new(sender)).ok();
    Ok(())
}

/// Opens the file behind `control` again.
pub fn reopen(control: BorrowedFd<'_>, flags: OFlags) -> io::Result<OwnedFd> {
    prepare()?;
    let ended = || io::Error::other("the thread that opens files has ended");
    let (answer, answered) = channel();
    let request = Request {
        path: format!("/proc/self/fd/{}", control.as_raw_fd()),
        flags: flags | OFlags::CLOEXEC,
        answer,
    };
    let opener = OPENER.get().ok_or_else(ended)?;
    let sender = opener.lock().unwrap_or_else(PoisonError::into_inner);
    sender.send(request).map_err(|_| ended())?;
    drop(sender);
    // `control` is borrowed until the answer arrives: its number means the same file.
    answered.recv().map_err(|_| ended())?
}
