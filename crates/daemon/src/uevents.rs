//! Listens to the kernel's uevents: a changed block device may have a new size, which its disk adopts.
//!
//! One thread, which sleeps between messages. Any process may send to the socket, so only the kernel's messages are used, and only the
//! block device's number in them. Without the socket (a sandbox, a kernel without netlink) and in network namespaces without uevents, sizes
//! are checked at status and reload requests.

use std::io::{self, IoSliceMut};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::thread::JoinHandle;

use rustix::event::{EventfdFlags, PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::netlink::{KOBJECT_UEVENT, SocketAddrNetlink};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvFlags, ReturnFlags, SocketFlags, SocketType,
};

use crate::objects::Manager;

/// Multicast group of the kernel's own messages. The second group has udev's.
const KERNEL_GROUP: u32 = 1;
/// Four times the kernel's buffer for the variables of a message.
const MESSAGE_BYTES_MAX: usize = 8192;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Changed {
    Device(u32, u32),
    /// Any block device, because messages were lost.
    Any,
}

/// Listening thread. Dropping it ends the thread.
pub(crate) struct Uevents {
    stop: Arc<OwnedFd>,
    thread: Option<JoinHandle<()>>,
}

impl Uevents {
    /// Starts to pass changes of block devices to `manager`.
    ///
    /// # Errors
    /// If the socket is not allowed or the thread cannot be started.
    pub(crate) fn start(manager: Manager) -> io::Result<Uevents> {
        let socket = listen()?;
        let stop = Arc::new(rustix::event::eventfd(0, EventfdFlags::CLOEXEC)?);
        let stopped = Arc::clone(&stop);
        let thread = std::thread::Builder::new()
            .name("uevents".to_owned())
            .spawn(move || {
                if let Err(error) = pass_on(&socket, &stopped, &manager) {
                    tracing::warn!(%error, "cannot receive uevents, checking sizes only at `lunette status` and `lunette reload`");
                }
            })?;
        Ok(Uevents {
            stop,
            thread: Some(thread),
        })
    }
}

impl Drop for Uevents {
    fn drop(&mut self) {
        // Cannot fail: this is the only writer of the eventfd.
        rustix::io::write(&*self.stop, &1u64.to_ne_bytes()).ok();
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("uevents thread panicked");
        }
    }
}

fn listen() -> io::Result<OwnedFd> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (family, kind) = (AddressFamily::NETLINK, SocketType::DGRAM);
    let socket = rustix::net::socket_with(family, kind, flags, Some(KOBJECT_UEVENT))?;
    rustix::net::bind(&socket, &SocketAddrNetlink::new(0, KERNEL_GROUP))?;
    Ok(socket)
}

/// Passes changes on until `stopped` is signalled or the owner has ended.
fn pass_on(socket: &OwnedFd, stopped: &OwnedFd, manager: &Manager) -> io::Result<()> {
    // Changes before the socket was open.
    let mut changed = Some(Changed::Any);
    loop {
        if let Some(changed) = changed {
            let device = match changed {
                Changed::Device(major, minor) => Some((major, minor)),
                Changed::Any => None,
            };
            // Waits for the owner. Later messages stay in the socket; an overflow is reported as `Any`.
            let followed = manager.call(move |owner| {
                owner.device_changed(device);
                Ok(())
            });
            if followed.is_err() {
                return Ok(());
            }
        }
        let mut ready = [
            PollFd::new(stopped, PollFlags::IN),
            PollFd::new(socket, PollFlags::IN),
        ];
        match rustix::event::poll(&mut ready, None) {
            Err(Errno::INTR) => {}
            polled => drop(polled?),
        }
        if !ready[0].revents().is_empty() {
            return Ok(());
        }
        changed = receive(socket)?;
    }
}

/// Receives a message. Returns a change if it is the kernel's and concerns a block device.
fn receive(socket: &OwnedFd) -> io::Result<Option<Changed>> {
    let mut message = [0; MESSAGE_BYTES_MAX];
    let mut ancillary = RecvAncillaryBuffer::default();
    let buffers = &mut [IoSliceMut::new(&mut message)];
    let received = rustix::net::recvmsg(socket, buffers, &mut ancillary, RecvFlags::empty());
    let received = match received {
        Ok(received) => received,
        Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
        Err(Errno::NOBUFS) => return Ok(Some(Changed::Any)),
        Err(error) => return Err(error.into()),
    };
    // Only the kernel has port 0.
    let sender = received.address.map(SocketAddrNetlink::try_from);
    if !sender.is_some_and(|sender| sender.is_ok_and(|sender| sender.pid() == 0)) {
        return Ok(None);
    }
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Ok(Some(Changed::Any));
    }
    Ok(message.get(..received.bytes).and_then(changed_device))
}

/// Returns the changed block device of a message: `change@PATH`, then variables, each ended by a zero byte.
fn changed_device(message: &[u8]) -> Option<Changed> {
    let mut parts = message.split(|byte| *byte == 0);
    parts.next()?.strip_prefix(b"change@")?;
    let (mut is_block, mut major, mut minor) = (false, None, None);
    for part in parts {
        let at = part.iter().position(|byte| *byte == b'=');
        let Some((name, value)) = at.and_then(|at| Some((part.get(..at)?, part.get(at + 1..)?)))
        else {
            continue;
        };
        match name {
            b"SUBSYSTEM" => is_block = value == b"block",
            b"MAJOR" => major = number(value),
            b"MINOR" => minor = number(value),
            _ => {}
        }
    }
    is_block.then_some(Changed::Device(major?, minor?))
}

/// Parses a number in the kernel's format: digits without leading zeros.
fn number(text: &[u8]) -> Option<u32> {
    let number: u32 = std::str::from_utf8(text).ok()?.parse().ok()?;
    (number.to_string().as_bytes() == text).then_some(number)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Message of Linux 6.1 for a loop device that grows.
    const GREW: &[u8] = b"change@/devices/virtual/block/loop0\0ACTION=change\0DEVPATH=/devices/virtual/block/loop0\0\
        SUBSYSTEM=block\0RESIZE=1\0MAJOR=7\0MINOR=0\0DEVNAME=loop0\0DEVTYPE=disk\0DISKSEQ=47\0SEQNUM=888\0";

    #[test]
    fn the_device_of_a_change_is_its_number() {
        assert_eq!(changed_device(GREW), Some(Changed::Device(7, 0)));
    }

    #[test]
    fn other_messages_are_ignored() {
        for message in [
            &b""[..],
            b"change@",
            b"\0",
            b"add@/devices/x\0SUBSYSTEM=block\0MAJOR=7\0MINOR=0\0",
            b"change@/devices/x\0SUBSYSTEM=net\0MAJOR=7\0MINOR=0\0",
            b"change@/devices/x\0SUBSYSTEM=block\0MAJOR=7\0",
            b"change@/devices/x\0SUBSYSTEM=block\0MAJOR=\0MINOR=0\0",
            b"change@/devices/x\0SUBSYSTEM=block\0MAJOR=+7\0MINOR=0\0",
            b"change@/devices/x\0SUBSYSTEM=block\0MAJOR=7\0MINOR=01\0",
            b"change@/devices/x\0SUBSYSTEM=block\0MAJOR=4294967296\0MINOR=0\0",
            // udev's own format
            b"libudev\0\xfe\xed\xca\xfe\0SUBSYSTEM=block\0MAJOR=7\0MINOR=0\0",
        ] {
            assert_eq!(changed_device(message), None, "{message:?}");
        }
    }

    #[test]
    fn messages_of_other_processes_are_ignored() {
        let socket =
            listen().expect("a netlink socket; hint: run the tests where AF_NETLINK is allowed");
        let address = rustix::net::getsockname(&socket).unwrap();
        let address = SocketAddrNetlink::try_from(address).unwrap();
        let (family, kind) = (AddressFamily::NETLINK, SocketType::DGRAM);
        let sender = rustix::net::socket(family, kind, Some(KOBJECT_UEVENT)).unwrap();
        let to = SocketAddrNetlink::new(address.pid(), 0);
        // The kernel may send messages meanwhile, but none about this device number.
        let forged = b"change@/devices/x\0SUBSYSTEM=block\0MAJOR=4095\0MINOR=1048575\0";
        let none = Changed::Device(4095, 1_048_575);
        assert_eq!(changed_device(forged), Some(none));
        let sent = rustix::net::sendto(&sender, forged, rustix::net::SendFlags::empty(), &to);
        assert!(
            matches!(sent, Ok(_) | Err(Errno::PERM | Errno::ACCESS)),
            "{sent:?}"
        );
        for _ in 0..64 {
            assert_ne!(receive(&socket).unwrap(), Some(none));
        }
    }

    proptest! {
        #[test]
        fn arbitrary_messages_never_panic(message in proptest::collection::vec(any::<u8>(), 0..512)) {
            changed_device(&message);
        }

        #[test]
        fn damaged_messages_name_no_other_device_than_their_numbers(at in 0..GREW.len(), byte: u8, cut in 0..=GREW.len()) {
            let mut message = GREW.to_vec();
            message[at] = byte;
            message.truncate(cut);
            if let Some(Changed::Device(major, minor)) = changed_device(&message) {
                for (name, number) in [("MAJOR", major), ("MINOR", minor)] {
                    let field = format!("\0{name}={number}");
                    let mut places = message.windows(field.len());
                    prop_assert!(places.any(|part| part == field.as_bytes()), "{name}={number}");
                }
            }
        }

        #[test]
        fn variables_come_in_any_order(major: u32, minor: u32, order in Just([0, 1, 2, 3]).prop_shuffle()) {
            let variables = [
                "SUBSYSTEM=block".to_owned(),
                format!("MAJOR={major}"),
                format!("MINOR={minor}"),
                "ACTION=change".to_owned(),
            ];
            let mut message = b"change@/devices/x\0".to_vec();
            for variable in order {
                message.extend(variables[variable].bytes());
                message.push(0);
            }
            prop_assert_eq!(changed_device(&message), Some(Changed::Device(major, minor)));
        }
    }
}
