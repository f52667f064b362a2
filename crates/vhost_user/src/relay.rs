//! Passes messages from the front end's socket to the crate `vhost`, one complete message at a time. The crate checks them and calls the
//! session.
//!
//! The crate accepts feature-dependent messages only after the message that accepts the feature. When it refuses a message, half of it
//! remains in the socket. Front ends are less orderly: when a back end restarts at the wrong moment, QEMU sends GET_INFLIGHT_FD on a
//! connection without accepted features. The crate therefore uses a socket of its own, on which all offered features are accepted. A
//! refused message is answered here: if the front end waits for an answer, it gets a failure and the session continues. Otherwise the front
//! end would not notice the failure, and the session ends. ADR 3.

use std::io::{self, IoSlice, IoSliceMut, Read};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, PoisonError};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, recvmsg, sendmsg,
};
use vhost::vhost_user::{BackendReqHandler, Error, VhostUserBackendReqHandlerMut};

use crate::record::Record;
use crate::session::Session;
use crate::whole_message::{DESCRIPTORS_MAX, HEADER, PAYLOAD_MAX};

const GET_FEATURES: u32 = 1;
const SET_MEM_TABLE: u32 = 5;
const SET_LOG_BASE: u32 = 6;
const SET_LOG_FD: u32 = 7;
const SET_VRING_KICK: u32 = 12;
const SET_VRING_ERR: u32 = 14;
const SET_PROTOCOL_FEATURES: u32 = 16;
const SET_VRING_ENABLE: u32 = 18;
const SEND_RARP: u32 = 19;
const NET_SET_MTU: u32 = 20;
const SET_BACKEND_REQ_FD: u32 = 21;
const GET_CONFIG: u32 = 24;
const SET_CONFIG: u32 = 25;
const GET_INFLIGHT_FD: u32 = 31;
const SET_INFLIGHT_FD: u32 = 32;
const GPU_SET_SOCKET: u32 = 33;
const ADD_MEM_REG: u32 = 37;
const SET_DEVICE_STATE_FD: u32 = 42;

/// Flags: version 1 in the lower two bits; reply; reply wanted.
const VERSION_MASK: u32 = 3;
const VERSION: u32 = 1;
const REPLY: u32 = 1 << 2;
const NEED_REPLY: u32 = 1 << 3;
/// Flag in messages with a ring's descriptor: no descriptor.
const NO_FD: u8 = 1;

/// Padding in the answer to GET_INFLIGHT_FD.
const INFLIGHT_PADDING: std::ops::Range<usize> = HEADER + 20..HEADER + 24;

/// Result of a message.
pub(crate) enum Handled {
    Done,
    /// Refused. The front end has got an answer or needs none.
    Refused(String),
}

/// Message path of one front end.
pub(crate) struct Relay {
    front_end: UnixStream,
    /// This side and the crate's side of the inner socket.
    inner: UnixStream,
    handler_stream: UnixStream,
    handler: BackendReqHandler<Mutex<Session>>,
    session: Arc<Mutex<Session>>,
    /// Messages that are in effect.
    record: Record,
}

pub(crate) struct Message {
    pub request: u32,
    flags: u32,
    pub payload: Vec<u8>,
    fds: Vec<OwnedFd>,
}

impl Message {
    /// Flags of a message without a reply.
    pub const PLAIN: u32 = VERSION;

    /// Encodes the message, without its reply flag, and returns its descriptors.
    pub fn into_bytes(self) -> (Vec<u8>, Vec<OwnedFd>) {
        let header = [self.request, Message::PLAIN, self.payload.len() as u32];
        let mut bytes = header.map(u32::to_ne_bytes).concat();
        bytes.extend(&self.payload);
        (bytes, self.fds)
    }

    /// Parses a message. Returns `None` if the bytes are invalid.
    pub fn of_bytes(bytes: &[u8], fds: Vec<OwnedFd>) -> Option<Message> {
        let (header, payload) = bytes.split_at_checked(HEADER)?;
        let word = |at: usize| header[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
        let is_whole = word(8) as usize == payload.len() && payload.len() <= PAYLOAD_MAX as usize;
        (is_whole && fds.len() <= DESCRIPTORS_MAX).then(|| Message {
            request: word(0),
            flags: Message::PLAIN,
            payload: payload.to_vec(),
            fds,
        })
    }

    pub fn new(request: u32, flags: u32, payload: Vec<u8>) -> Message {
        Message {
            request,
            flags,
            payload,
            fds: Vec::new(),
        }
    }

    /// Reads a message that has arrived completely.
    fn read(from: &UnixStream) -> Result<Message, Error> {
        let mut header = [0; HEADER];
        let (read, fds) = receive(from, &mut header).map_err(Error::SocketError)?;
        if read == 0 {
            return Err(Error::Disconnected);
        }
        let word = |at: usize| header[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
        let (request, flags, size) = (word(0), word(4), word(8));
        if read < HEADER || size > PAYLOAD_MAX || flags & VERSION_MASK != VERSION {
            return Err(Error::InvalidMessage);
        }
        let mut message = Message::new(request, flags, vec![0; size as usize]);
        message.fds = fds;
        let mut payload = from;
        let whole = payload.read_exact(&mut message.payload);
        whole.map_err(|_| Error::Disconnected)?;
        Ok(message)
    }

    fn send(&self, to: &UnixStream) -> Result<(), Error> {
        let header = [self.request, self.flags, self.payload.len() as u32];
        let mut bytes = header.map(u32::to_ne_bytes).concat();
        bytes.extend(&self.payload);
        send(to, &bytes, &self.fds).map_err(Error::SocketError)
    }

    pub fn word(&self, at: usize) -> Option<u32> {
        let bytes = self.payload.get(at..at + 4)?;
        bytes.try_into().ok().map(u32::from_ne_bytes)
    }

    fn wants_reply(&self) -> bool {
        self.flags & NEED_REPLY != 0
    }

    /// Closes unexpected descriptors, which the crate would refuse although they are harmless.
    fn close_unexpected_fds(&mut self) {
        let expects_fds = match self.request {
            SET_MEM_TABLE | SET_LOG_BASE | SET_LOG_FD | SET_BACKEND_REQ_FD | SET_INFLIGHT_FD
            | GPU_SET_SOCKET | ADD_MEM_REG | SET_DEVICE_STATE_FD => true,
            SET_VRING_KICK..=SET_VRING_ERR => {
                self.payload.get(1).is_none_or(|flags| flags & NO_FD == 0)
            }
            _ => false,
        };
        if !expects_fds {
            self.fds.clear();
        }
    }

    /// Returns the failure answer for a front end that waits for one, if there is such an answer.
    fn refusal(&self) -> Option<Message> {
        let mut payload = self.payload.clone();
        match (self.request, payload.len()) {
            // "uses zero length of payload to indicate an error"
            (GET_CONFIG, 12..) => {
                payload.truncate(12);
                payload[4..8].fill(0);
            }
            // A region of 0 bytes: QEMU continues without one.
            (GET_INFLIGHT_FD, 24) => payload[..16].fill(0),
            // Other requests with specific answers.
            (1 | 11 | 15 | 17 | 24 | 31 | 36 | 41 | 43 | 44, _) => return None,
            _ if self.wants_reply() => payload = 1u64.to_ne_bytes().to_vec(),
            _ => return None,
        }
        Some(Message::new(self.request, VERSION | REPLY, payload))
    }

    /// Returns true if the message may remain without effect.
    fn may_be_ignored(&self) -> bool {
        matches!(
            self.request,
            SEND_RARP | NET_SET_MTU | SET_BACKEND_REQ_FD | SET_CONFIG
        )
    }
}

impl Relay {
    /// Creates a relay for the front end at the other end of `front_end`.
    ///
    /// # Errors
    /// Fails if descriptors are exhausted.
    pub fn new(front_end: UnixStream, session: Arc<Mutex<Session>>) -> io::Result<Relay> {
        let (inner, handler_end) = UnixStream::pair()?;
        let handler = BackendReqHandler::from_stream(handler_end, session.clone());
        let mut relay = Relay {
            front_end,
            inner,
            handler_stream: handler.try_clone_connection()?,
            handler,
            session,
            record: Record::default(),
        };
        let accepted = relay.send_to_handler(Message::new(GET_FEATURES, VERSION, Vec::new()));
        accepted
            .and_then(|()| relay.accept_all())
            .map_err(|error| io::Error::other(error.to_string()))?;
        Ok(relay)
    }

    fn session(&self) -> std::sync::MutexGuard<'_, Session> {
        self.session.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes the crate treat all offered features as accepted.
    fn accept_all(&mut self) -> Result<(), Error> {
        let offered = self.session().get_protocol_features()?.bits();
        let payload = offered.to_ne_bytes().to_vec();
        self.send_to_handler(Message::new(SET_PROTOCOL_FEATURES, VERSION, payload))
    }

    /// Sends a message to the crate and discards the answer.
    fn send_to_handler(&mut self, message: Message) -> Result<(), Error> {
        message.send(&self.inner)?;
        self.handler.handle_request()?;
        drain(&self.inner);
        Ok(())
    }

    /// Returns the messages that are in effect.
    pub fn take_record(&mut self) -> Record {
        std::mem::take(&mut self.record)
    }

    /// Executes a message that the front end sent to the previous process, without an answer.
    ///
    /// # Errors
    /// Fails if the message is refused.
    pub fn replay(&mut self, message: Message) -> Result<(), Error> {
        match message.request {
            SET_VRING_ENABLE => self.enable(&message)?,
            SET_MEM_TABLE if message.word(0) == Some(0) => self.clear_memory(&message)?,
            SET_LOG_FD => self.set_log_fd(&message)?,
            _ => {
                message.send(&self.inner)?;
                self.handler.handle_request()?;
                drain(&self.inner);
            }
        }
        if message.request == SET_PROTOCOL_FEATURES {
            self.accept_all()?;
        }
        self.record.insert(message);
        Ok(())
    }

    /// Handles the next message, which has arrived completely.
    ///
    /// # Errors
    /// Fails if the session has to end.
    pub fn handle(&mut self) -> Result<Handled, Error> {
        let mut message = Message::read(&self.front_end)?;
        message.close_unexpected_fds();
        let result = match message.request {
            // Its number is a truth value, and no feature is required.
            SET_VRING_ENABLE => self.enable(&message),
            // The crate requires memory.
            SET_MEM_TABLE if message.word(0) == Some(0) => self.clear_memory(&message),
            // The crate does not support it.
            SET_LOG_FD => self.set_log_fd(&message),
            _ => self.pass(&message),
        };
        if message.request == SET_PROTOCOL_FEATURES {
            self.accept_all()?;
        }
        let Err(error) = result else {
            self.record.insert(message);
            return Ok(Handled::Done);
        };
        // Other errors leave a partial effect or a broken connection.
        if !matches!(
            error,
            Error::InvalidParam
                | Error::InvalidMessage
                | Error::IncorrectFds
                | Error::InactiveFeature(_)
                | Error::InactiveOperation(_)
                | Error::InvalidSocketFd(_)
                | Error::NotUnixSocket
                | Error::NotStreamSocket
        ) {
            return Err(error);
        }
        drain(&self.handler_stream);
        let refusal = message.refusal();
        if let Some(answer) = &refusal
            && !self.forward_answers()?
        {
            answer.send(&self.front_end)?;
        }
        if refusal.is_none() && !message.may_be_ignored() {
            return Err(error);
        }
        let why = self.session().refusal.take();
        let why = why.unwrap_or_else(|| error.to_string());
        Ok(Handled::Refused(format!(
            "request {}: {why}",
            message.request
        )))
    }

    /// Passes a message to the crate and forwards its answers, unless the message is refused.
    fn pass(&mut self, message: &Message) -> Result<(), Error> {
        message.send(&self.inner)?;
        self.handler.handle_request()?;
        self.forward_answers()?;
        Ok(())
    }

    fn enable(&mut self, message: &Message) -> Result<(), Error> {
        let (Some(index), Some(number), 8) =
            (message.word(0), message.word(4), message.payload.len())
        else {
            return Err(Error::InvalidMessage);
        };
        self.session().set_vring_enable(index, number != 0)?;
        self.acknowledge(message)
    }

    fn clear_memory(&mut self, message: &Message) -> Result<(), Error> {
        self.session().set_mem_table(&[], Vec::new(), None)?;
        self.acknowledge(message)
    }

    fn set_log_fd(&mut self, message: &Message) -> Result<(), Error> {
        let [fd] = &message.fds[..] else {
            return Err(Error::IncorrectFds);
        };
        let fd = fd.try_clone().map_err(Error::SocketError)?;
        self.session().set_log_call(fd)?;
        self.acknowledge(message)
    }

    fn acknowledge(&self, message: &Message) -> Result<(), Error> {
        if !message.wants_reply() {
            return Ok(());
        }
        let payload = 0u64.to_ne_bytes().to_vec();
        Message::new(message.request, VERSION | REPLY, payload).send(&self.front_end)
    }

    /// Forwards the crate's answers to the front end. Returns false if there are none.
    fn forward_answers(&self) -> Result<bool, Error> {
        let mut any = false;
        while rustix::io::ioctl_fionread(&self.inner).is_ok_and(|available| available > 0) {
            let mut bytes = [0; HEADER + PAYLOAD_MAX as usize];
            let (read, fds) = receive(&self.inner, &mut bytes).map_err(Error::SocketError)?;
            if bytes[..4] == GET_INFLIGHT_FD.to_ne_bytes() {
                // The crate sends uninitialised padding: parts of addresses of this process.
                bytes[INFLIGHT_PADDING].fill(0);
            }
            send(&self.front_end, &bytes[..read], &fds).map_err(Error::SocketError)?;
            any = true;
        }
        Ok(any)
    }
}

/// Discards all received bytes.
fn drain(stream: &UnixStream) {
    let mut bytes = [0; 4096];
    while rustix::io::ioctl_fionread(stream).is_ok_and(|available| available > 0)
        && receive(stream, &mut bytes).is_ok_and(|(read, _)| read > 0)
    {}
}

fn receive(from: &UnixStream, into: &mut [u8]) -> io::Result<(usize, Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::CMSG_CLOEXEC;
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(from, &mut [IoSliceMut::new(into)], &mut control, flags)
    })?;
    let mut fds = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(received_fds) = message {
            fds.extend(received_fds);
        }
    }
    Ok((received.bytes, fds))
}

fn send(to: &UnixStream, mut bytes: &[u8], fds: &[OwnedFd]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(DESCRIPTORS_MAX))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(&fds)) {
        return Err(io::Error::other("the message has too many descriptors"));
    }
    while !bytes.is_empty() {
        let sent = rustix::io::retry_on_intr(|| {
            sendmsg(
                to,
                &[IoSlice::new(bytes)],
                &mut control,
                SendFlags::NOSIGNAL,
            )
        })?;
        // Descriptors were sent with the first byte.
        control.clear();
        bytes = bytes.get(sent..).unwrap_or_default();
    }
    Ok(())
}
