//! Network card of a guest on a tap device, created without a helper program or script. QEMU inherits the descriptors.
//!
//! The tap is not persistent: it disappears with its last descriptors when QEMU ends, for any reason.

use anyhow::{Context, Result, bail, ensure};
use rustix::fd::{AsFd, AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use rustix::io::{Errno, FdFlags};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use std::path::Path;

const TUN: &str = "/dev/net/tun";
const VHOST: &str = "/dev/vhost-net";

/// Options of a tap device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TapOptions {
    /// Bridge of the tap.
    pub bridge: Option<String>,
    /// Use vhost-net in the kernel.
    pub vhost: bool,
    /// Number of queue pairs.
    pub queues: u32,
}

/// A tap device, which exists while this process or QEMU has its descriptors.
#[derive(Debug)]
pub struct Tap {
    name: String,
    queues: Vec<OwnedFd>,
    vhost: Vec<OwnedFd>,
}

/// Returns the properties of a network card with this number of queue pairs.
pub fn card_properties(queues: usize) -> String {
    match queues {
        1 => String::new(),
        // One vector per direction and queue, one for the control queue, one for configuration changes.
        queues => format!(",mq=on,vectors={}", 2 * queues + 2),
    }
}

impl Tap {
    /// Creates the device, adds it to its bridge and enables it. Returns a note if vhost-net is missing.
    ///
    /// # Errors
    /// The error names the missing part and the alternative.
    pub fn make(options: &TapOptions) -> Result<(Tap, Option<String>)> {
        let mut name = "lunette%d".to_owned();
        let mut queues = Vec::new();
        for _ in 0..options.queues {
            let tun = open(TUN).map_err(|error| refused(TUN, error))?;
            name = sys::make_tap(&tun, &name, options.queues > 1).map_err(|error| {
                match error.raw_os_error() {
                    Some(code) if code == Errno::PERM.raw_os_error() => anyhow::anyhow!(
                        "cannot create a tap device: this process lacks the capability CAP_NET_ADMIN; hint: run as root, or setpriv --inh-caps +net_admin --ambient-caps +net_admin; --net user needs no privileges"
                    ),
                    _ => anyhow::anyhow!("cannot create the tap device {name}: {error}"),
                }
            })?;
            queues.push(tun);
        }
        let (vhost, warning) = match options.vhost {
            true => vhost(options.queues)?,
            false => (Vec::new(), None),
        };
        let links = Links::open()?;
        let tap = links.index(&name)?;
        if let Some(bridge) = &options.bridge {
            let index = links.index(bridge).map_err(|_| {
                anyhow::anyhow!("there is no interface {bridge}; hint: ip link add {bridge} type bridge && ip link set {bridge} up")
            })?;
            links.join(tap, index).with_context(|| {
                format!("cannot join {name} to {bridge}; hint: check that it is a bridge with ip -d link show {bridge}")
            })?;
        }
        links
            .bring_up(tap)
            .with_context(|| format!("cannot enable {name}"))?;
        let tap = Tap {
            name,
            queues,
            vhost,
        };
        Ok((tap, warning))
    }

    /// Returns the name of the interface.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns QEMU's `-netdev` for the tap.
    pub fn netdev(&self, id: &str) -> String {
        let numbers = |all: &[OwnedFd]| {
            let all: Vec<String> = all.iter().map(|fd| fd.as_raw_fd().to_string()).collect();
            all.join(":")
        };
        let plural = if self.queues.len() > 1 { "fds" } else { "fd" };
        let mut text = format!("tap,id={id},{plural}={}", numbers(&self.queues));
        if !self.vhost.is_empty() {
            let plural = if self.vhost.len() > 1 {
                "vhostfds"
            } else {
                "vhostfd"
            };
            text.push_str(&format!(",vhost=on,{plural}={}", numbers(&self.vhost)));
        }
        text
    }

    /// Returns the properties of the card: as many queues as the tap has.
    pub fn card_properties(&self) -> String {
        card_properties(self.queues.len())
    }

    /// Sets whether processes started from now on inherit the descriptors.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn set_inherited(&self, is_inherited: bool) -> Result<()> {
        let flags = match is_inherited {
            true => FdFlags::empty(),
            false => FdFlags::CLOEXEC,
        };
        for fd in self.queues.iter().chain(&self.vhost) {
            rustix::io::fcntl_setfd(fd, flags)?;
        }
        Ok(())
    }
}

fn open(path: &str) -> Result<OwnedFd, Errno> {
    let flags = OFlags::RDWR | OFlags::CLOEXEC | OFlags::NONBLOCK;
    rustix::fs::open(path, flags, Mode::empty())
}

/// Describes why a device node cannot be used.
fn refused(path: &str, error: Errno) -> anyhow::Error {
    let module = if path == TUN { "tun" } else { "vhost_net" };
    match error {
        Errno::NOENT | Errno::NODEV | Errno::NXIO => anyhow::anyhow!(
            "there is no {path}; hint: modprobe {module}, or pass the device node into the container; --net user does not need it"
        ),
        Errno::ACCESS | Errno::PERM => anyhow::anyhow!(
            "no permission to open {path}{}; hint: add the user to its group, or run as root; --net user does not need it",
            group_of(Path::new(path))
        ),
        error => anyhow::anyhow!("cannot open {path}: {error}"),
    }
}

/// Returns the group with access, if there is one.
fn group_of(path: &Path) -> String {
    use std::os::unix::fs::MetadataExt;
    let Ok(metadata) = std::fs::metadata(path) else {
        return String::new();
    };
    let group = metadata.gid();
    let groups = std::fs::read_to_string("/etc/group").unwrap_or_default();
    let name = groups.lines().find_map(|line| {
        let mut parts = line.split(':');
        let name = parts.next()?;
        (parts.nth(1)?.parse() == Ok(group)).then(|| name.to_owned())
    });
    format!(
        ", which belongs to group {} with mode {:o}",
        name.unwrap_or_else(|| group.to_string()),
        metadata.mode() & 0o777
    )
}

/// Opens a vhost-net descriptor per queue pair, or returns a note if the kernel has no vhost-net.
fn vhost(queues: u32) -> Result<(Vec<OwnedFd>, Option<String>)> {
    let mut opened = Vec::new();
    for _ in 0..queues {
        match open(VHOST) {
            Ok(fd) => opened.push(fd),
            Err(Errno::NOENT | Errno::NODEV | Errno::NXIO) => {
                let warning = format!(
                    "there is no {VHOST}: QEMU transfers the frames itself; hint: modprobe vhost_net"
                );
                return Ok((Vec::new(), Some(warning)));
            }
            Err(error) => return Err(refused(VHOST, error)),
        }
    }
    Ok((opened, None))
}

/// Client of rtnetlink for network interfaces.
struct Links(OwnedFd);

/// `struct nlmsghdr`, `struct ifinfomsg` and at most one attribute: rtnetlink(7).
const HEADER: usize = 16;
const RTM_NEWLINK: u16 = 16;
const NLM_F_REQUEST_ACK: u16 = 1 | 4;
const NLMSG_ERROR: u16 = 2;
const IFLA_MASTER: u16 = 10;
const IFF_UP: u32 = 1;

impl Links {
    fn open() -> Result<Links> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            None,
        );
        Ok(Links(socket.context("cannot open a netlink socket")?))
    }

    fn index(&self, name: &str) -> Result<u32> {
        let index = rustix::net::netdevice::name_to_index(self.0.as_fd(), name);
        index.with_context(|| format!("there is no interface {name}"))
    }

    fn join(&self, interface: u32, bridge: u32) -> Result<()> {
        let mut attribute = Vec::new();
        attribute.extend(8_u16.to_ne_bytes());
        attribute.extend(IFLA_MASTER.to_ne_bytes());
        attribute.extend(bridge.to_ne_bytes());
        self.change(&new_link(interface, 0, &attribute))
    }

    fn bring_up(&self, interface: u32) -> Result<()> {
        self.change(&new_link(interface, IFF_UP, &[]))
    }

    fn change(&self, message: &[u8]) -> Result<()> {
        rustix::net::send(&self.0, message, SendFlags::empty())?;
        let mut answer = [0; 1024];
        let (length, _) = rustix::net::recv(&self.0, &mut answer[..], RecvFlags::empty())?;
        acknowledged(&answer[..length.min(1024)])
    }
}

/// Builds a change of one interface: flags to set, and an attribute.
fn new_link(interface: u32, flags: u32, attribute: &[u8]) -> Vec<u8> {
    let length = (HEADER + 16 + attribute.len()) as u32;
    let mut message = Vec::new();
    message.extend(length.to_ne_bytes());
    message.extend(RTM_NEWLINK.to_ne_bytes());
    message.extend(NLM_F_REQUEST_ACK.to_ne_bytes());
    // sequence, port
    message.extend([0; 8]);
    // family and type
    message.extend([0; 4]);
    message.extend(interface.to_ne_bytes());
    message.extend(flags.to_ne_bytes());
    // which flags change
    message.extend(flags.to_ne_bytes());
    message.extend(attribute);
    message
}

/// Checks a response: an error message with code 0 means success.
fn acknowledged(answer: &[u8]) -> Result<()> {
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok());
    let code = answer.get(HEADER..HEADER + 4);
    let code: Option<[u8; 4]> = code.and_then(|bytes| bytes.try_into().ok());
    let (Some(kind), Some(code)) = (kind, code) else {
        bail!(
            "a truncated response of {} bytes from the kernel",
            answer.len()
        );
    };
    ensure!(
        u16::from_ne_bytes(kind) == NLMSG_ERROR,
        "an unexpected response from the kernel"
    );
    match i32::from_ne_bytes(code) {
        0 => Ok(()),
        code => Err(std::io::Error::from_raw_os_error(code.wrapping_neg()).into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_change_of_an_interface_is_what_rtnetlink_reads() {
        assert_eq!(
            new_link(0x0102_0304, IFF_UP, &[]),
            [
                &32_u32.to_ne_bytes()[..],
                &16_u16.to_ne_bytes(),
                &5_u16.to_ne_bytes(),
                &[0; 12],
                &0x0102_0304_u32.to_ne_bytes(),
                &1_u32.to_ne_bytes(),
                &1_u32.to_ne_bytes(),
            ]
            .concat()
        );
    }

    #[test]
    fn answers_are_errors_or_none() {
        let answer = |code: i32| {
            let mut bytes = vec![0; 36];
            bytes[4..6].copy_from_slice(&NLMSG_ERROR.to_ne_bytes());
            bytes[16..20].copy_from_slice(&code.to_ne_bytes());
            acknowledged(&bytes)
        };
        assert!(answer(0).is_ok());
        let error = answer(-1).unwrap_err().to_string();
        assert!(error.contains("not permitted"), "{error}");
        assert!(acknowledged(&[0; 5]).is_err());
    }

    #[test]
    fn what_is_missing_is_named_with_the_way_without() {
        let missing = refused(TUN, Errno::NOENT).to_string();
        assert!(
            missing.contains("there is no /dev/net/tun")
                && missing.contains("modprobe tun")
                && missing.contains("--net user"),
            "{missing}"
        );
        let forbidden = refused(VHOST, Errno::ACCESS).to_string();
        assert!(
            forbidden.contains("no permission to open /dev/vhost-net"),
            "{forbidden}"
        );
    }
}
