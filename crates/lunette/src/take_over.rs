//! `lunette serve --take-over`: takes over from the daemon at the control socket. This daemon checks itself first. On its request the
//! other daemon stops its queues, passes the descriptors of its front ends, closes its disks, and ends.

use std::io::IoSliceMut;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixDatagram;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use config::Config;
use control::{Client, HANDOVER_VERSION, Method, Upgrade, Version};
use daemon::{Handover, notify};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use serde_json::json;

use crate::failure::Failure;

/// Maximum time until the other daemon releases its disks or ends: its own limit, and some more.
pub const END_LIMIT: Duration = Duration::from_secs(25);

/// Maximum time for the exit of the other daemon at its limit. Storage that does not respond blocks the exit.
const EXIT_LIMIT: Duration = Duration::from_secs(2);

/// Maximum bytes of a message with a descriptor.
const MESSAGE_MAX: usize = 4096;

/// Takes over from the daemon at the control socket of `config`, by default the `usual` one.
///
/// # Errors
/// When there is no daemon, when it refuses and continues, or when it does not end.
pub fn take(config: &Config, usual: Option<&Path>) -> Result<Handover, Failure> {
    let Some(control) = config.control.as_deref().or(usual) else {
        return Err(Failure::mistake(
            "--take-over needs a control socket; hint: --control PATH",
        ));
    };
    let client = Client::new(control);
    let before: Version = client.get("/v1/version")?;
    let ending = Pid::from_raw(before.pid.cast_signed())
        .map(|pid| pidfd_open(pid, PidfdFlags::empty()))
        .transpose()
        .map_err(|errno| {
            Failure::because(format!("cannot watch process {}: {errno}", before.pid))
        })?;
    let Some(ending) = ending else {
        return Err(Failure::because(
            "the running daemon's version does not support a handover; hint: restart it",
        ));
    };
    let handover_socket = HandoverSocket::new(control)?;
    let wanted = Upgrade {
        handover: HANDOVER_VERSION,
        socket: handover_socket.path.display().to_string(),
    };
    client.change(Method::POST, "/v1/upgrade", Some(&json!(wanted)))?;
    let handover = receive(&handover_socket.socket, &ending)?;
    tracing::debug!("the previous daemon has released its disks");
    Ok(handover)
}

/// Returns the handover socket of process `pid`.
pub fn socket_path(control: &Path, pid: u32) -> PathBuf {
    let folder = control.parent().unwrap_or(Path::new("."));
    folder.join(format!("upgrade-{pid}.sock"))
}

/// A socket beside the control socket, accessible only to daemons of this user.
struct HandoverSocket {
    path: PathBuf,
    socket: UnixDatagram,
}

impl HandoverSocket {
    fn new(control: &Path) -> Result<HandoverSocket, Failure> {
        let path = socket_path(control, std::process::id());
        std::fs::remove_file(&path).ok();
        let failed = |error: std::io::Error| {
            Failure::because(format!("cannot listen at {}: {error}", path.display()))
        };
        let socket = UnixDatagram::bind(&path).map_err(failed)?;
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o600)).map_err(failed)?;
        let path = std::path::absolute(&path).map_err(failed)?;
        Ok(HandoverSocket { path, socket })
    }
}

impl Drop for HandoverSocket {
    fn drop(&mut self) {
        std::fs::remove_file(&self.path).ok();
    }
}

/// Receives descriptors until the other daemon has released its disks or has ended. A process that storage blocks cannot end.
fn receive(socket: &UnixDatagram, ending: &OwnedFd) -> Result<Handover, Failure> {
    let mut until = Instant::now() + END_LIMIT;
    let mut is_exiting = false;
    let mut handover = Handover::default();
    loop {
        let mut waits = [
            PollFd::new(socket, PollFlags::IN),
            PollFd::new(ending, PollFlags::IN),
        ];
        let rest = Timespec::try_from(until.saturating_duration_since(Instant::now()));
        let rest = rest.map_err(|error| Failure::because(error.to_string()))?;
        match poll(&mut waits, Some(&rest)) {
            Ok(0) if is_exiting => {
                tracing::warn!(
                    "the previous daemon cannot exit, disks on storage that does not respond stay locked"
                );
                return Ok(handover);
            }
            Ok(0) => {
                return Err(Failure::because(format!(
                    "the previous daemon did not end within {} s",
                    END_LIMIT.as_secs()
                )));
            }
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => {
                return Err(Failure::because(format!(
                    "cannot wait for the previous daemon: {errno}"
                )));
            }
        }
        if !waits[0].revents().is_empty() {
            match message(socket)? {
                Message::Descriptor(name, descriptor) => {
                    // Other descriptors are closed.
                    handover.add(&name, descriptor).ok();
                }
                Message::Released => return Ok(handover),
                Message::Exiting => {
                    until = Instant::now() + EXIT_LIMIT;
                    is_exiting = true;
                }
                Message::Unknown => {}
            }
        } else if !waits[1].revents().is_empty() {
            return Ok(handover);
        }
    }
}

/// A message of the other daemon.
enum Message {
    /// A descriptor and its name.
    Descriptor(String, OwnedFd),
    /// The disks are closed, except those in use by queues that do not end.
    Released,
    /// The daemon exits without having closed all disks.
    Exiting,
    /// A message of a later version.
    Unknown,
}

/// Receives a message.
fn message(socket: &UnixDatagram) -> Result<Message, Failure> {
    let mut bytes = [0; MESSAGE_MAX];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let got = recvmsg(
        socket,
        &mut [IoSliceMut::new(&mut bytes)],
        &mut control,
        flags,
    );
    let got =
        got.map_err(|errno| Failure::because(format!("cannot receive the handover: {errno}")))?;
    let mut descriptor = None;
    for one in control.drain() {
        if let RecvAncillaryMessage::ScmRights(mut fds) = one {
            descriptor = fds.next();
        }
    }
    let text = String::from_utf8_lossy(&bytes[..got.bytes]).into_owned();
    let name = text.lines().find_map(|line| line.strip_prefix("FDNAME="));
    Ok(match (name, descriptor) {
        (Some(name), Some(descriptor)) => Message::Descriptor(name.to_owned(), descriptor),
        _ if text == notify::RELEASED => Message::Released,
        _ if text == notify::EXITING => Message::Exiting,
        _ => Message::Unknown,
    })
}
