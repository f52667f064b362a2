//! A minimal vhost-user front end that checks whether a back end answers. Message layout: request, flags, payload size, payload,
//! little endian (vhost-user specification, "Message Specification").

use anyhow::{Context, Result, ensure};
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

/// GET_FEATURES, version 1, no payload.
const GET_FEATURES: [u8; 12] = [1, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0];

/// GET_FEATURES, version 1 with the reply flag, 8 bytes of payload.
const FEATURES: [u8; 12] = [1, 0, 0, 0, 5, 0, 0, 0, 8, 0, 0, 0];

/// VIRTIO_F_VERSION_1.
pub const VERSION_1: u64 = 1 << 32;

/// An open vhost-user session.
pub struct Client(UnixStream);

impl Client {
    /// Connects to a back end's socket.
    pub fn connect(socket: &Path) -> Result<Client> {
        let stream = UnixStream::connect(socket)
            .with_context(|| format!("cannot connect to {}", socket.display()))?;
        Client::over(stream)
    }

    /// Uses a connected stream.
    pub fn over(stream: UnixStream) -> Result<Client> {
        stream.set_read_timeout(Some(Duration::from_secs(20)))?;
        Ok(Client(stream))
    }

    /// Requests the device's features.
    pub fn features(&mut self) -> Result<u64> {
        self.0
            .write_all(&GET_FEATURES)
            .context("the session is closed")?;
        let mut answer = [0; 20];
        self.0
            .read_exact(&mut answer)
            .context("no answer to GET_FEATURES")?;
        let (head, payload) = answer.split_at(12);
        ensure!(
            head == FEATURES,
            "GET_FEATURES was answered with the header {head:?}"
        );
        Ok(u64::from_le_bytes(payload.try_into()?))
    }
}
