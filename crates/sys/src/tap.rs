//! Creates tap and TUN devices: network interfaces of a program, which reads and writes their frames or packets.

use rustix::fd::{AsFd, AsRawFd};
use std::io;

/// `struct ifreq` for TUNSETIFF: linux/if.h.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// Creates a tap device with this name on a descriptor of `/dev/net/tun`, or with `has_queues` another queue of it. Frames carry the
/// virtio-net header; QEMU sets its length. `%d` in the name is replaced by a free number. Returns the actual name. The device is removed
/// when its last descriptor is closed.
///
/// # Errors
/// `EINVAL` for an invalid name. Otherwise the kernel's error: `EPERM` without CAP_NET_ADMIN, `EBUSY` for a device in use.
pub fn make_tap(tun: impl AsFd, name: &str, has_queues: bool) -> io::Result<String> {
    let queues = if has_queues { libc::IFF_MULTI_QUEUE } else { 0 };
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | queues;
    make(tun, name, flags)
}

/// Same as [`make_tap`] for a TUN device. Its packets start with the IP header.
///
/// # Errors
/// As [`make_tap`].
pub fn make_tun(tun: impl AsFd, name: &str) -> io::Result<String> {
    make(tun, name, libc::IFF_TUN | libc::IFF_NO_PI)
}

fn make(tun: impl AsFd, name: &str, flags: libc::c_int) -> io::Result<String> {
    const _: () = assert!(size_of::<Request>() == size_of::<libc::ifreq>());
    let mut request = Request {
        name: [0; libc::IFNAMSIZ],
        flags: flags as libc::c_short,
        rest: [0; 22],
    };
    // The last byte must stay 0.
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains('\0') {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: TUNSETIFF reads and writes one ifreq, which `request` is by layout and size (asserted above), during the call; other kinds of
    // files do not have this ioctl and access no memory.
    let result = unsafe {
        libc::ioctl(
            tun.as_fd().as_raw_fd(),
            libc::TUNSETIFF as _,
            &raw mut request,
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let end = request.name.iter().position(|byte| *byte == 0);
    let name = &request.name[..end.unwrap_or(libc::IFNAMSIZ)];
    Ok(String::from_utf8_lossy(name).into_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn non_tap_files_and_invalid_names_are_refused() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let refused = |name: &str| make_tap(&null, name, false).unwrap_err().raw_os_error();
        assert_eq!(refused("lunette%d"), Some(libc::ENOTTY));
        for name in ["", "a\0b", "sixteen_letters_"] {
            assert_eq!(refused(name), Some(libc::EINVAL), "{name:?}");
        }
    }
}
