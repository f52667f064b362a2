//! Access to descriptors that the process inherited, by number.

use std::io;
use std::os::fd::{FromRawFd, OwnedFd};

/// Duplicates an inherited descriptor of a parent or service manager. The original stays open.
///
/// # Errors
/// When the number is not an open descriptor.
pub fn inherited(number: i32) -> io::Result<OwnedFd> {
    // SAFETY: the call takes no pointer and does not change the descriptor with this number, which may have another owner.
    let duplicate = unsafe { libc::fcntl(number, libc::F_DUPFD_CLOEXEC, 0) };
    if duplicate < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor was just created and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(duplicate) })
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    use super::*;

    #[test]
    fn duplicate_shares_the_file_and_a_bad_descriptor_is_an_error() {
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
