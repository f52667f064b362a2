//! A connection to a back end: sends requests and waits for replies. The messages are those of the crate `vhost_user_wire`; tests also send
//! invalid ones.

use std::io::{ErrorKind, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use vhost_user_wire::{NEED_REPLY, Reply, WireError, stream};

use crate::{Error, Message, Result};

/// A connection to a back end.
pub struct Channel {
    stream: UnixStream,
    limit: Duration,
}

impl Channel {
    /// Connects to a back end's socket.
    pub fn connect(path: &Path) -> Result<Channel> {
        Ok(Channel::from_stream(UnixStream::connect(path)?))
    }

    /// Uses a connected stream.
    pub fn from_stream(stream: UnixStream) -> Channel {
        Channel {
            stream,
            limit: Duration::from_secs(30),
        }
    }

    /// Returns the stream.
    pub fn stream(&self) -> &UnixStream {
        &self.stream
    }

    /// Sends raw bytes with descriptors.
    pub fn send_bytes(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        stream::send(&self.stream, bytes, fds).map_err(|error| self.error(error))
    }

    /// Sends a message of any payload.
    pub fn send(
        &self,
        request: u32,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<()> {
        self.send_bytes(&vhost_user_wire::encode(request, flags, payload), fds)
    }

    /// Sends a message of any payload with a reply and waits for the payload of the reply.
    pub fn call(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>> {
        self.send(request, 0, payload, fds)?;
        let (bytes, _) = self.receive()?;
        let payload = vhost_user_wire::reply_payload(request, &bytes);
        Ok(payload.map_err(|error| invalid(request, error))?.to_vec())
    }

    /// Sends a message of any payload without a reply and waits for its acknowledgement (`REPLY_ACK`).
    pub fn acknowledged(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send(request, NEED_REPLY, payload, fds)?;
        match self.reply(request)? {
            Reply::U64(0) => Ok(()),
            _ => Err(Error::Refused(request)),
        }
    }

    /// Sends a message without a reply.
    pub fn tell(&self, message: Message<'_>) -> Result<()> {
        let (bytes, fds) = message.encode(0);
        self.send_bytes(&bytes, &fds)
    }

    /// Sends a message with a reply and waits for it.
    pub fn ask(&self, message: Message<'_>) -> Result<Reply> {
        let (request, payload, fds) = message.into_parts();
        self.send(request, 0, &payload, &fds)?;
        self.reply(request)
    }

    fn reply(&self, request: u32) -> Result<Reply> {
        let (bytes, fds) = self.receive()?;
        let reply = vhost_user_wire::parse_reply(request, &bytes, fds);
        reply.map_err(|error| invalid(request, error))
    }

    fn receive(&self) -> Result<(Vec<u8>, Vec<OwnedFd>)> {
        stream::receive(&self.stream, self.limit).map_err(|error| self.error(error))
    }

    fn error(&self, error: std::io::Error) -> Error {
        match error.kind() {
            ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => {
                Error::Closed
            }
            ErrorKind::TimedOut => Error::Timeout(self.limit),
            _ => error.into(),
        }
    }

    /// Waits until the back end has closed the session. Ignores messages before that.
    pub fn wait_closed(&self, limit: Duration) -> Result<()> {
        let until = Instant::now() + limit;
        let mut bytes = [0; 4096];
        loop {
            let left = until.saturating_duration_since(Instant::now());
            if !readable(&self.stream, left)? {
                return Err(Error::Timeout(limit));
            }
            match (&self.stream).read(&mut bytes) {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Returns true if the session is closed.
    pub fn is_closed(&self) -> bool {
        self.wait_closed(Duration::ZERO).is_ok()
    }
}

fn invalid(request: u32, error: WireError) -> Error {
    Error::Answer {
        request,
        reason: error.to_string(),
    }
}

/// Waits until a descriptor is readable or the limit expires.
pub(crate) fn readable(fd: impl std::os::fd::AsFd, limit: Duration) -> Result<bool> {
    Ok(stream::is_readable(fd, Instant::now() + limit)?)
}
