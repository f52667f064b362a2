//! Locks on a disk's file that are compatible with QEMU's.
//!
//! The scheme (QEMU, `block/file-posix.c`): a lock on byte `100 + p` means that its holder uses permission `p`,
//! a lock on byte `200 + p` that it does not share the permission. All locks are shared locks. After taking its
//! own locks, a process checks the opposite bytes for conflicting ones. The locks belong to the open file
//! description and end when it is closed, also if the process dies. Called when a disk is opened; may block on a
//! network file system.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};

/// Conflict with another lock holder, with QEMU's name of the permission.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Conflict {
    /// Another process writes to the file or resizes it, or may do so.
    InUse(&'static str),
    /// Another process does not share the permission.
    Forbidden(&'static str),
}

const USES: libc::off_t = 100;
const FORBIDS: libc::off_t = 200;

/// QEMU's permissions: bit number and name.
const CONSISTENT_READ: (libc::off_t, &str) = (0, "read");
const WRITE: (libc::off_t, &str) = (1, "write");
const RESIZE: (libc::off_t, &str) = (3, "resize");

/// Locks a file, as its only writer or as one of any number of readers. Returns the conflict, if there is one;
/// the locks taken so far stay until the descriptor is closed.
///
/// # Errors
/// When the file system has no locks, or its lock service fails.
pub fn lock(fd: BorrowedFd<'_>, writer: bool) -> io::Result<Option<Conflict>> {
    let uses: &[_] = if writer {
        &[CONSISTENT_READ, WRITE, RESIZE]
    } else {
        &[CONSISTENT_READ]
    };
    let forbids = [WRITE, RESIZE];
    for (bit, _) in uses {
        take_shared(fd, USES + bit)?;
    }
    for (bit, _) in forbids {
        take_shared(fd, FORBIDS + bit)?;
    }
    for (bit, name) in uses {
        if is_locked_by_another(fd, FORBIDS + bit)? {
            return Ok(Some(Conflict::Forbidden(name)));
        }
    }
    for (bit, name) in forbids {
        if is_locked_by_another(fd, USES + bit)? {
            return Ok(Some(Conflict::InUse(name)));
        }
    }
    Ok(None)
}

/// Downgrades the only writer to a reader: other readers are admitted, writers are not.
///
/// # Errors
/// When the lock service fails; some of the locks that exclude readers may be released.
pub fn lower(fd: BorrowedFd<'_>) -> io::Result<()> {
    for (bit, _) in [WRITE, RESIZE] {
        let mut unlocked = one_byte(libc::F_UNLCK, USES + bit);
        fcntl(fd, libc::F_OFD_SETLK, &mut unlocked)?;
    }
    Ok(())
}

/// Releases all locks, for a process that opens the file again and locks it by that descriptor.
///
/// # Errors
/// When the lock service fails.
pub fn unlock(fd: BorrowedFd<'_>) -> io::Result<()> {
    for (bit, _) in [CONSISTENT_READ, WRITE, RESIZE] {
        for base in [USES, FORBIDS] {
            let mut unlocked = one_byte(libc::F_UNLCK, base + bit);
            fcntl(fd, libc::F_OFD_SETLK, &mut unlocked)?;
        }
    }
    Ok(())
}

fn one_byte(kind: i32, at: libc::off_t) -> libc::flock {
    libc::flock {
        l_type: kind as libc::c_short,
        l_whence: libc::SEEK_SET as libc::c_short,
        l_start: at,
        l_len: 1,
        // Must be 0 for open file description locks.
        l_pid: 0,
    }
}

fn take_shared(fd: BorrowedFd<'_>, at: libc::off_t) -> io::Result<()> {
    fcntl(fd, libc::F_OFD_SETLK, &mut one_byte(libc::F_RDLCK, at))
}

fn is_locked_by_another(fd: BorrowedFd<'_>, at: libc::off_t) -> io::Result<bool> {
    let mut lock = one_byte(libc::F_WRLCK, at);
    fcntl(fd, libc::F_OFD_GETLK, &mut lock)?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

fn fcntl(fd: BorrowedFd<'_>, command: i32, lock: &mut libc::flock) -> io::Result<()> {
    // SAFETY: both commands take a pointer to a `flock`, which outlives the call.
    match unsafe { libc::fcntl(fd.as_raw_fd(), command, std::ptr::from_mut(lock)) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{File, OpenOptions};
    use std::os::fd::AsFd;

    use super::*;

    fn open(path: &std::path::Path, write: bool) -> File {
        OpenOptions::new()
            .read(true)
            .write(write)
            .open(path)
            .unwrap()
    }

    #[test]
    fn one_writer_or_many_readers() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (a, b, c) = (
            open(file.path(), false),
            open(file.path(), false),
            open(file.path(), true),
        );
        assert_eq!(lock(a.as_fd(), false).unwrap(), None);
        assert_eq!(lock(b.as_fd(), false).unwrap(), None);
        assert_eq!(
            lock(c.as_fd(), true).unwrap(),
            Some(Conflict::Forbidden("write"))
        );
        drop((a, b, c));
        let (d, e, f) = (
            open(file.path(), true),
            open(file.path(), true),
            open(file.path(), false),
        );
        assert_eq!(lock(d.as_fd(), true).unwrap(), None);
        assert!(lock(e.as_fd(), true).unwrap().is_some());
        drop(e);
        assert_eq!(
            lock(f.as_fd(), false).unwrap(),
            Some(Conflict::InUse("write"))
        );
        drop((d, f));
        let g = open(file.path(), true);
        assert_eq!(lock(g.as_fd(), true).unwrap(), None, "closing unlocks");
        lower(g.as_fd()).unwrap();
        let (h, i) = (open(file.path(), false), open(file.path(), true));
        assert_eq!(lock(h.as_fd(), false).unwrap(), None, "it only reads");
        assert!(
            lock(i.as_fd(), true).unwrap().is_some(),
            "writers are excluded"
        );
        drop((h, i));
        unlock(g.as_fd()).unwrap();
        let j = open(file.path(), true);
        assert_eq!(lock(j.as_fd(), true).unwrap(), None, "unlocked");
        assert!(lock(g.as_fd(), true).unwrap().is_some(), "locked");
    }

    #[test]
    fn bytes_are_those_that_qemu_locks() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let (ours, other) = (open(file.path(), true), open(file.path(), true));
        lock(ours.as_fd(), true).unwrap();
        let locked: Vec<libc::off_t> = (0..300)
            .filter(|&at| is_locked_by_another(other.as_fd(), at).unwrap())
            .collect();
        assert_eq!(locked, [100, 101, 103, 201, 203]);
    }
}
