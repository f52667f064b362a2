//! Descriptors that a process was started with, known by their numbers.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// A duplicate of the descriptor with this number, which a parent or a service manager has left open; the original stays.
///
/// # Errors
/// When it is none.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointer, and leaves the descriptor of this number as it is, whoever has it.
    let duplicate = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if duplicate < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: it was just made, for the caller alone.
    Ok(unsafe { OwnedFd::from_raw_fd(duplicate) })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn duplicate_is_of_the_same_and_what_is_none_is_an_error() {
        let (mut reader, mut writer) = io::pipe().unwrap();
        let mut again = io::PipeWriter::from(inherited(writer.as_raw_fd()).unwrap());
        again.write_all(b"a").unwrap();
        writer.write_all(b"b").unwrap();
        drop((again, writer));
        let mut read = String::new();
        reader.read_to_string(&mut read).unwrap();
        assert_eq!(read, "ab");
        let errno = |number| inherited(number).unwrap_err().raw_os_error();
        assert_eq!(
            (errno(-1), errno(1 << 20)),
            (Some(libc::EBADF), Some(libc::EBADF))
        );
    }
}
