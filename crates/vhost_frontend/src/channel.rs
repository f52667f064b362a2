//! Messages of the vhost-user protocol ("Message Specification"), with bytes and descriptors on a Unix socket.
//!
//! A message consists of request, flags and payload size, 32 bits each in native byte order, and the payload.

use std::io::{IoSlice, IoSliceMut, Read};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};

use crate::{Error, Result};

/// Request numbers of the front end.
pub mod request {
    #![allow(missing_docs)]
    pub const GET_FEATURES: u32 = 1;
    pub const SET_FEATURES: u32 = 2;
    pub const SET_OWNER: u32 = 3;
    pub const RESET_OWNER: u32 = 4;
    pub const SET_MEM_TABLE: u32 = 5;
    pub const SET_LOG_BASE: u32 = 6;
    pub const SET_LOG_FD: u32 = 7;
    pub const SET_VRING_NUM: u32 = 8;
    pub const SET_VRING_ADDR: u32 = 9;
    pub const SET_VRING_BASE: u32 = 10;
    pub const GET_VRING_BASE: u32 = 11;
    pub const SET_VRING_KICK: u32 = 12;
    pub const SET_VRING_CALL: u32 = 13;
    pub const SET_VRING_ERR: u32 = 14;
    pub const GET_PROTOCOL_FEATURES: u32 = 15;
    pub const SET_PROTOCOL_FEATURES: u32 = 16;
    pub const GET_QUEUE_NUM: u32 = 17;
    pub const SET_VRING_ENABLE: u32 = 18;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
}

/// Protocol version 1, in the lower two bits of the flags.
pub const VERSION: u32 = 1;
/// The message is a reply.
pub const REPLY: u32 = 1 << 2;
/// The message requests a reply even if it would have none.
pub const NEED_REPLY: u32 = 1 << 3;

/// Limit of a reply's payload; valid replies are shorter.
const PAYLOAD_MAX: usize = 64 * 1024;

/// A received message.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Request number.
    pub request: u32,
    /// Flags, including the version.
    pub flags: u32,
    /// Payload.
    pub payload: Vec<u8>,
}

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
        // SCM_MAX_FD is 253; tests send far fewer.
        let mut space = vec![std::mem::MaybeUninit::uninit(); 1024];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
            return Err(Error::Wrong(format!("{} descriptors at once", fds.len())));
        }
        let mut sent = sendmsg(
            &self.stream,
            &[IoSlice::new(bytes)],
            &mut control,
            SendFlags::NOSIGNAL,
        )
        .map_err(closed)?;
        while sent < bytes.len() {
            sent += rustix::net::send(&self.stream, &bytes[sent..], SendFlags::NOSIGNAL)
                .map_err(closed)?;
        }
        Ok(())
    }

    /// Sends a message.
    pub fn send(
        &self,
        request: u32,
        flags: u32,
        payload: &[u8],
        fds: &[BorrowedFd<'_>],
    ) -> Result<()> {
        let mut bytes = Vec::with_capacity(12 + payload.len());
        bytes.extend(request.to_ne_bytes());
        bytes.extend((flags | VERSION).to_ne_bytes());
        bytes.extend((payload.len() as u32).to_ne_bytes());
        bytes.extend(payload);
        self.send_bytes(&bytes, fds)
    }

    /// Waits for the next message.
    pub fn receive(&self) -> Result<Message> {
        Ok(self.receive_with_fd()?.0)
    }

    /// Waits for the next message and its descriptor.
    fn receive_with_fd(&self) -> Result<(Message, Option<OwnedFd>)> {
        let mut header = [0; 12];
        let (read, fd) = self.read_with_fd(&mut header)?;
        self.read(&mut header[read..])?;
        let word = |at: usize| {
            u32::from_ne_bytes([header[at], header[at + 1], header[at + 2], header[at + 3]])
        };
        let size = word(8) as usize;
        if size > PAYLOAD_MAX {
            return Err(Error::Answer {
                request: word(0),
                reason: format!("{size} bytes of payload"),
            });
        }
        let mut payload = vec![0; size];
        self.read(&mut payload)?;
        let message = Message {
            request: word(0),
            flags: word(4),
            payload,
        };
        Ok((message, fd))
    }

    /// Sends a request with a reply and waits for the reply.
    pub fn call(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Vec<u8>> {
        self.send(request, 0, payload, fds)?;
        self.answer(request)
    }

    /// Sends a request without a reply and waits for its acknowledgement (`REPLY_ACK`).
    pub fn acknowledged(&self, request: u32, payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<()> {
        self.send(request, NEED_REPLY, payload, fds)?;
        let answer = self.answer(request)?;
        if answer == [0; 8] {
            Ok(())
        } else {
            Err(Error::Refused(request))
        }
    }

    /// Sends a request and waits for its reply and descriptor.
    pub fn call_for_fd(&self, request: u32, payload: &[u8]) -> Result<(Vec<u8>, OwnedFd)> {
        self.send(request, 0, payload, &[])?;
        let (answer, fd) = self.receive_with_fd()?;
        let fd = fd.ok_or_else(|| Error::Answer {
            request,
            reason: "no descriptor".into(),
        })?;
        Ok((payload_of(request, answer)?, fd))
    }

    fn answer(&self, request: u32) -> Result<Vec<u8>> {
        payload_of(request, self.receive()?)
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

    /// Reads the first bytes of a message, with the descriptor.
    fn read_with_fd(&self, into: &mut [u8]) -> Result<(usize, Option<OwnedFd>)> {
        if !readable(&self.stream, self.limit)? {
            return Err(Error::Timeout(self.limit));
        }
        let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::CMSG_CLOEXEC;
        let received = recvmsg(
            &self.stream,
            &mut [IoSliceMut::new(into)],
            &mut control,
            flags,
        )
        .map_err(closed)?;
        if received.bytes == 0 {
            return Err(Error::Closed);
        }
        let fds = control.drain().filter_map(|message| match message {
            RecvAncillaryMessage::ScmRights(fds) => Some(fds),
            _ => None,
        });
        Ok((received.bytes, fds.flatten().next()))
    }

    fn read(&self, into: &mut [u8]) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            if !readable(&self.stream, self.limit)? {
                return Err(Error::Timeout(self.limit));
            }
            match (&self.stream).read(&mut into[done..]) {
                Ok(0) => return Err(Error::Closed),
                Ok(n) => done += n,
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => {
                    return Err(Error::Closed);
                }
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

/// Returns the payload of the reply to `request`.
fn payload_of(request: u32, answer: Message) -> Result<Vec<u8>> {
    if answer.request != request || answer.flags & REPLY == 0 {
        return Err(Error::Answer {
            request,
            reason: format!("request {} flags {:#x}", answer.request, answer.flags),
        });
    }
    Ok(answer.payload)
}

fn closed(errno: rustix::io::Errno) -> Error {
    match errno {
        rustix::io::Errno::PIPE | rustix::io::Errno::CONNRESET => Error::Closed,
        other => other.into(),
    }
}

/// Waits until a descriptor is readable or the limit expires.
pub(crate) fn readable(fd: impl std::os::fd::AsFd, limit: Duration) -> Result<bool> {
    let until = Instant::now() + limit;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        let left = Timespec::try_from(left).unwrap_or_default();
        match poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&left)) {
            Ok(0) => return Ok(false),
            Ok(_) => return Ok(true),
            Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(errno.into()),
        }
    }
}
