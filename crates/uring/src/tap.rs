//! Tap and TUN devices: network interfaces whose frames or packets a program reads and writes. The ioctl that makes one takes a pointer, which
//! rustix leaves to `unsafe` code.

use rustix::fd::{AsFd, AsRawFd};
use std::io;

/// `struct ifreq` as TUNSETIFF reads and writes it: linux/if.h.
#[repr(C)]
struct Request {
    name: [u8; libc::IFNAMSIZ],
    flags: libc::c_short,
    rest: [u8; 22],
}

/// Makes a tap device of this name by a descriptor of `/dev/net/tun`, or, where `has_queues`, one more queue of it. Frames have the
/// header of virtio-net, whose length QEMU sets. `%d` in the name becomes a number that is free; gives the name that it got. The
/// device is gone when its last descriptor is closed.
///
/// # Errors
/// `EINVAL` for a name that is none; else the kernel's: `EPERM` without CAP_NET_ADMIN, `EBUSY` for a device that is in use.
pub fn make_tap(tun: impl AsFd, name: &str, has_queues: bool) -> io::Result<String> {
    let queues = if has_queues { libc::IFF_MULTI_QUEUE } else { 0 };
    let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | queues;
    make(tun, name, flags)
}

/// Makes a TUN device, whose packets have no header before IP's, likewise.
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
    // The last byte stays 0.
    if name.is_empty() || name.len() >= libc::IFNAMSIZ || name.contains('\0') {
        return Err(io::Error::from_raw_os_error(libc::EINVAL));
    }
    request.name[..name.len()].copy_from_slice(name.as_bytes());
    // SAFETY: TUNSETIFF reads and writes one ifreq, which `request` is by layout and size (asserted above), for the time of the call;
    // other kinds of files know no such ioctl and touch nothing.
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
    fn a_file_of_another_kind_and_a_name_that_is_none_are_refused() {
        let null = std::fs::File::open("/dev/null").unwrap();
        let refused = |name: &str| make_tap(&null, name, false).unwrap_err().raw_os_error();
        assert_eq!(refused("lunette%d"), Some(libc::ENOTTY));
        for name in ["", "a\0b", "sixteen_letters_"] {
            assert_eq!(refused(name), Some(libc::EINVAL), "{name:?}");
        }
    }
}
