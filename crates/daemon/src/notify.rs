//! Notifies the service manager: `sd_notify(3)`, a datagram of lines to `$NOTIFY_SOCKET`.
//!
//! Without a service manager there is no socket and no notification. Each send waits at most one second for a slow manager, whose socket
//! has room for ten messages. Lost messages are not repeated.

use std::ffi::OsStr;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};
use std::time::Duration;

use rustix::io::retry_on_intr;
use rustix::net::{
    SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, sendmsg_addr,
};
use rustix::time::{ClockId, clock_gettime};

/// Longest wait for a slow service manager.
const PATIENCE: Duration = Duration::from_secs(1);

/// Message of a daemon to the next one: its disks are closed, except those in use by queues that do not end. Programs without support for it
/// wait for the end of the process.
pub const RELEASED: &str = "X_LUNETTE_RELEASED=1";

/// Message of a daemon to the next one: it exits now, without having closed all disks. The exit closes them, unless storage blocks it.
pub const EXITING: &str = "X_LUNETTE_EXITING=1";

/// Connection to the service manager.
#[derive(Debug)]
pub struct Notifier {
    socket: UnixDatagram,
    manager: SocketAddr,
}

impl Notifier {
    /// Returns the notifier for this process' environment; `None` without a service manager.
    pub fn from_environment() -> Option<Notifier> {
        let named = std::env::var_os("NOTIFY_SOCKET").filter(|name| !name.is_empty())?;
        match Notifier::new(&named) {
            Ok(notifier) => Some(notifier),
            Err(error) => {
                tracing::warn!("cannot notify the service manager at {named:?}: {error}");
                None
            }
        }
    }

    /// Returns the notifier for a path, or for `@NAME`, an abstract socket.
    ///
    /// # Errors
    /// If the address is invalid.
    pub fn new(name: &OsStr) -> io::Result<Notifier> {
        let manager = match name.as_bytes() {
            [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
            path => SocketAddr::from_pathname(OsStr::from_bytes(path))?,
        };
        let socket = UnixDatagram::unbound()?;
        socket.set_write_timeout(Some(PATIENCE))?;
        Ok(Notifier { socket, manager })
    }

    /// Sends a message. Returns false on failure.
    fn send(&self, lines: &str) -> bool {
        loop {
            match self.socket.send_to_addr(lines.as_bytes(), &self.manager) {
                Ok(_) => return true,
                // A send with a timeout is interrupted even by signals with restarting handlers (signal(7)).
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => {
                    tracing::warn!("cannot notify the service manager: {error}");
                    return false;
                }
            }
        }
    }

    /// Reports that all exports accept clients.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={status}"));
    }

    /// Reports a status line for display.
    pub fn status(&self, status: &str) {
        self.send(&format!("STATUS={status}"));
    }

    /// Reports that the configuration is being reloaded. [`Notifier::ready`] ends that.
    pub fn reloading(&self) {
        let now = clock_gettime(ClockId::Monotonic);
        let micros = Duration::try_from(now).unwrap_or_default().as_micros();
        self.send(&format!("RELOADING=1\nMONOTONIC_USEC={micros}"));
    }

    /// Reports that the daemon is ending.
    pub fn stopping(&self) {
        self.send("STOPPING=1");
    }

    /// Sends [`RELEASED`].
    pub fn released(&self) {
        self.send(RELEASED);
    }

    /// Sends [`EXITING`].
    pub fn exiting(&self) {
        self.send(EXITING);
    }

    /// Stores a descriptor in the service manager under this name. It outlives the process (`FileDescriptorStoreMax=`).
    ///
    /// # Errors
    /// If it cannot be sent.
    pub fn store(&self, name: &str, descriptor: BorrowedFd<'_>) -> io::Result<()> {
        // Not polled, because a memory file has no peer that closes.
        let lines = format!("FDSTORE=1\nFDNAME={name}\nFDPOLL=0");
        let manager = match (self.manager.as_pathname(), self.manager.as_abstract_name()) {
            (Some(path), _) => SocketAddrUnix::new(path)?,
            (None, Some(name)) => SocketAddrUnix::new_abstract_name(name)?,
            (None, None) => return Err(io::ErrorKind::InvalidInput.into()),
        };
        let descriptors = [descriptor];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&descriptors));
        let bytes = [io::IoSlice::new(lines.as_bytes())];
        retry_on_intr(|| {
            let flags = SendFlags::empty();
            sendmsg_addr(&self.socket, &manager, &bytes, &mut control, flags)
        })?;
        Ok(())
    }

    /// Removes these descriptors from the service manager. Stops at the first failed send.
    pub fn remove_stored<'a>(&self, names: impl IntoIterator<Item = &'a str>) {
        let mut names = names.into_iter();
        names.all(|name| self.send(&format!("FDSTOREREMOVE=1\nFDNAME={name}")));
    }

    /// Reports that the daemon is alive.
    pub fn alive(&self) {
        self.send("WATCHDOG=1");
    }
}

/// Returns the watchdog interval that the service manager requests for this process.
pub fn watchdog_time() -> Option<Duration> {
    let value = |name| std::env::var(name).ok();
    watchdog_time_of(
        value("WATCHDOG_USEC").as_deref(),
        value("WATCHDOG_PID").as_deref(),
        std::process::id(),
    )
}

fn watchdog_time_of(micros: Option<&str>, pid: Option<&str>, own: u32) -> Option<Duration> {
    let micros = micros?.parse().ok().filter(|micros| *micros > 0)?;
    // A request to the parent process does not apply to its children.
    let mine = pid.is_none_or(|pid| pid.parse() == Ok(own));
    mine.then(|| Duration::from_micros(micros))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn receive(socket: &UnixDatagram) -> String {
        let mut bytes = [0; 256];
        let length = socket.recv(&mut bytes).unwrap();
        String::from_utf8(bytes[..length].to_vec()).unwrap()
    }

    #[test]
    fn messages_follow_sd_notify() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let notifier = Notifier::new(path.as_os_str()).unwrap();
        notifier.ready("3 exports");
        assert_eq!(receive(&manager), "READY=1\nSTATUS=3 exports");
        notifier.status("busy");
        assert_eq!(receive(&manager), "STATUS=busy");
        notifier.alive();
        assert_eq!(receive(&manager), "WATCHDOG=1");
        notifier.stopping();
        assert_eq!(receive(&manager), "STOPPING=1");
        notifier.reloading();
        let received = receive(&manager);
        let micros = received
            .strip_prefix("RELOADING=1\nMONOTONIC_USEC=")
            .unwrap();
        assert!(micros.parse::<u64>().unwrap() > 0);
        drop(manager);
        notifier.alive();
    }

    #[test]
    fn slow_service_manager_gets_every_message() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        let names: Vec<String> = (0..300)
            .map(|number| format!("handover.{number}"))
            .collect();
        let received = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(100));
            (0..300).map(|_| receive(&manager)).collect::<Vec<_>>()
        });
        let notifier = Notifier::new(path.as_os_str()).unwrap();
        notifier.remove_stored(names.iter().map(String::as_str));
        let received = received.join().unwrap();
        assert_eq!(received[299], "FDSTOREREMOVE=1\nFDNAME=handover.299");
    }

    #[test]
    fn an_at_sign_means_an_abstract_socket() {
        let name = format!("lunette-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        Notifier::new(OsStr::new(&format!("@{name}")))
            .unwrap()
            .alive();
        assert_eq!(receive(&manager), "WATCHDOG=1");
    }

    #[test]
    fn watchdog_applies_only_to_the_named_process() {
        let time = |micros, pid| watchdog_time_of(micros, pid, 7);
        let second = Some(Duration::from_secs(1));
        assert_eq!(time(Some("1000000"), None), second);
        assert_eq!(time(Some("1000000"), Some("7")), second);
        assert_eq!(time(Some("1000000"), Some("8")), None);
        assert_eq!(time(Some("0"), None), None);
        assert_eq!(time(None, None), None);
    }
}
