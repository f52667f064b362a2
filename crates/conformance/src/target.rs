//! The back end under test.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::net::sockopt::socket_peercred;
use rustix::process::Pid;
use vhost_frontend::{Channel, Error, FrontEnd, Layout, Options, QueueOptions, feature, request};

use crate::io::Io;
use crate::{Flaw, Verdict, needs};

/// Time limit for a back end that has not noticed the end of the previous session.
const NEXT_SESSION: Duration = Duration::from_secs(5);

/// Device type behind the socket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Device {
    /// virtio-blk.
    Blk,
    /// virtio-scsi, with the target and the LUN to use.
    Scsi(u8, u16),
}

/// A back end's socket and the rules for its tests.
#[derive(Clone, Debug)]
pub struct Target {
    /// Socket.
    pub socket: PathBuf,
    /// Device type.
    pub device: Device,
    /// Tests may write to the disk.
    pub is_destructive: bool,
    /// Requires Lunette's responses to violations of the protocol. Otherwise the back end only has to serve the next front end.
    pub is_strict: bool,
}

impl Target {
    /// Creates a target with a disk that must not be written.
    pub fn new(socket: &Path, device: Device) -> Target {
        Target {
            socket: socket.to_owned(),
            device,
            is_destructive: false,
            is_strict: false,
        }
    }

    /// Creates a target for this project's server, with a disk that may be written.
    pub fn strict(socket: &Path, device: Device) -> Target {
        Target {
            is_destructive: true,
            is_strict: true,
            ..Target::new(socket, device)
        }
    }

    /// Connects and negotiates. Repeats that while the back end ends an earlier session.
    pub(crate) fn connect(&self, options: &Options) -> vhost_frontend::Result<FrontEnd> {
        let until = Instant::now() + NEXT_SESSION;
        loop {
            match FrontEnd::connect(&self.socket, options) {
                Err(Error::Closed) if Instant::now() < until => {
                    std::thread::sleep(Duration::from_millis(10));
                }
                other => return other,
            }
        }
    }

    /// Connects with packed rings. Skips the test if the back end does not offer them.
    pub(crate) fn connect_ring(&self, packed: bool, options: &Options) -> Verdict<FrontEnd> {
        let front_end = self.connect(&Options { packed, ..*options })?;
        needs(
            !packed || front_end.has(feature::RING_PACKED),
            "VIRTIO_F_RING_PACKED",
        )?;
        Ok(front_end)
    }

    /// Opens a channel without negotiation.
    pub(crate) fn channel(&self) -> vhost_frontend::Result<Channel> {
        Channel::connect(&self.socket)
    }

    /// Index of the first request queue.
    pub(crate) fn first_queue(&self) -> u16 {
        match self.device {
            Device::Blk => 0,
            Device::Scsi(..) => 2,
        }
    }

    /// Returns the reason if the device cannot be tested.
    pub fn check(&self) -> Result<(), String> {
        match self.serves() {
            Ok(_) => Ok(()),
            Err(Flaw::Failed(reason) | Flaw::Skipped(reason)) => Err(reason),
        }
    }

    /// Checks that the back end serves a front end. Returns the process that listens.
    ///
    /// # Errors
    /// The back end does not serve.
    pub fn serves(&self) -> Verdict<Pid> {
        let mut front_end = self.connect(&Options {
            memory: 4 << 20,
            ..Options::default()
        })?;
        let options = QueueOptions::default();
        Io::start(self, &mut front_end, 0, &options, Layout::Separate)?.ping()?;
        front_end.channel().call(request::GET_FEATURES, &[], &[])?;
        Ok(socket_peercred(front_end.channel().stream())?.pid)
    }
}
