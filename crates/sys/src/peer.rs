//! The process at the other end of a Unix socket.

use std::fs::File;
use std::io::{self, Read};
use std::mem::size_of;

use rustix::fd::{AsFd, AsRawFd};

/// The process that has connected a Unix socket. It may have passed the socket to another process since then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer {
    /// Process ID; `None` for a process of another PID namespace.
    pub pid: Option<u32>,
    /// User ID.
    pub uid: u32,
}

/// Returns the process that has connected a Unix socket (SO_PEERCRED). `rustix` has this call too, but its result cannot hold the process ID
/// 0, which stands for a process of another PID namespace.
///
/// # Errors
/// The kernel's error, for other kinds of descriptors.
pub fn peer_of(socket: impl AsFd) -> io::Result<Peer> {
    let mut found = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the kernel writes at most `length` bytes to `found`, which has this size and accepts any bytes, during the call.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut found).cast(),
            &raw mut length,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(Peer {
        pid: u32::try_from(found.pid).ok().filter(|pid| *pid > 0),
        uid: found.uid,
    })
}

/// Maximum bytes of a command line that are read. The process chooses its length.
const COMMAND_LINE_MAX: u64 = 256 << 10;
/// Maximum characters of a guest's name.
const NAME_MAX: usize = 255;

/// Returns the name of the guest that a QEMU process runs, from `-name` of its command line. `None` also if the process is invisible. May
/// block, because the process controls the memory with its command line.
pub fn guest_of(pid: u32) -> Option<String> {
    let file = File::open(format!("/proc/{pid}/cmdline")).ok()?;
    let mut command_line = Vec::new();
    file.take(COMMAND_LINE_MAX)
        .read_to_end(&mut command_line)
        .ok()?;
    guest_in(&command_line)
}

/// Returns the guest's name in a command line of QEMU with NUL bytes between arguments: `-name NAME` or `-name guest=NAME`, followed by
/// other options. A comma in the name is doubled.
fn guest_in(command_line: &[u8]) -> Option<String> {
    let mut arguments = command_line.split(|byte| *byte == 0);
    arguments.find(|argument| matches!(*argument, b"-name" | b"--name"))?;
    let value = String::from_utf8_lossy(arguments.next()?).replace(",,", "\0");
    let mut options = value.split(',');
    let first = options.next()?;
    let named = |option: &str| option.strip_prefix("guest=").map(str::to_owned);
    let is_bare = !first.contains('=');
    let name = named(first)
        .or_else(|| options.find_map(named))
        .or_else(|| is_bare.then(|| first.to_owned()))?;
    let name: String = name.chars().take(NAME_MAX).collect();
    (!name.is_empty()).then(|| name.replace('\0', ","))
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn the_peer_of_an_own_socket_pair_is_this_process() {
        let (socket, _other) = UnixStream::pair().unwrap();
        let peer = peer_of(&socket).unwrap();
        assert_eq!(peer.pid, Some(std::process::id()));
        assert_eq!(peer.uid, rustix::process::getuid().as_raw());
        let file = std::fs::File::open("/dev/null").unwrap();
        assert!(peer_of(&file).is_err());
    }

    #[test]
    fn a_guest_is_named_in_each_form_of_the_option() {
        let of = |line: &str| guest_in(line.replace(' ', "\0").as_bytes());
        let is = |line: &str, name: &str| assert_eq!(of(line).as_deref(), Some(name), "{line}");
        is(
            "qemu-system-x86_64 -name guest=web1,debug-threads=on -m 1G",
            "web1",
        );
        is("qemu -m 1G --name web2,process=x", "web2");
        is("qemu -name debug-threads=on,guest=web3", "web3");
        is("qemu -name guest=a,,b", "a,b");
        is(
            &format!("qemu -name {}", "n".repeat(9000)),
            &"n".repeat(255),
        );
        for line in [
            "",
            "qemu",
            "qemu -name",
            "qemu -name debug-threads=on",
            "qemu -name guest=",
        ] {
            assert_eq!(of(line), None, "{line}");
        }
    }
}
