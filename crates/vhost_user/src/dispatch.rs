//! Message path of one front end: receives a message, has the session execute it, and replies.
//!
//! A refused message has no effect. If the front end waits for an answer, it gets a failure and the session continues. Otherwise the front
//! end would not notice the failure, and the session ends. Messages need no negotiation before them: when a back end restarts at the wrong
//! moment, QEMU sends GET_INFLIGHT_FD on a connection without accepted features. ADR 3.

use std::io::{self, ErrorKind};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::time::Duration;

use vhost_user_wire::{Header, Log, Message, REPLY, Reply, encode, parse, request, stream};

use crate::record::Record;
use crate::session::Session;

/// Errors of a message.
#[derive(Debug)]
pub(crate) enum Error {
    /// The message is refused: it has no effect.
    Refused(String),
    /// The message has a partial effect. The session ends.
    Failed(String),
    /// The front end has closed the connection, or this process has.
    Closed,
    /// The socket failed, or its data cannot be parsed further.
    Io(io::Error),
}

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Error::Refused(why) | Error::Failed(why) => f.write_str(why),
            Error::Closed => f.write_str("connection closed"),
            Error::Io(error) => error.fmt(f),
        }
    }
}

impl From<io::Error> for Error {
    fn from(error: io::Error) -> Error {
        match error.kind() {
            ErrorKind::UnexpectedEof => Error::Closed,
            _ => Error::Io(error),
        }
    }
}

/// Message path of one front end.
pub(crate) struct Dispatcher {
    pub session: Session,
    pub stream: UnixStream,
    /// Messages that are in effect.
    record: Record,
}

impl Dispatcher {
    pub fn new(stream: UnixStream, session: Session) -> Dispatcher {
        Dispatcher {
            session,
            stream,
            record: Record::default(),
        }
    }

    /// Returns the messages that are in effect.
    pub fn take_record(&mut self) -> Record {
        std::mem::take(&mut self.record)
    }

    /// Executes a message that the front end sent to this process or the previous one. Returns its reply, if it has one of its own.
    ///
    /// # Errors
    /// Fails if the message is refused or the session has to end.
    pub fn execute(&mut self, message: Message) -> Result<Option<Reply>, Error> {
        let reply = self.session.handle(&message)?;
        self.record.insert(message);
        Ok(reply)
    }

    /// Receives and executes the next message, which must be complete within `limit`. Returns the reason if it was refused: the front end has
    /// got an answer or needs none.
    ///
    /// # Errors
    /// Fails if the session has to end.
    pub fn handle_next(&mut self, limit: Duration) -> Result<Option<String>, Error> {
        let (bytes, fds) = stream::receive(&self.stream, limit)?;
        let invalid = |error: vhost_user_wire::WireError| Error::Refused(error.to_string());
        let (header, payload) = Header::parse(&bytes).map_err(invalid)?;
        let executed = parse(&bytes, fds).map_err(invalid).and_then(|message| {
            if header.needs_reply() {
                self.session.drain_before(&message)?;
            }
            self.execute(message)
        });
        match executed {
            Ok(reply) => {
                let success = || header.needs_reply().then_some(Reply::U64(0));
                if let Some(reply) = reply.or_else(success) {
                    let (bytes, fd) = reply.encode(header.request);
                    stream::send(&self.stream, &bytes, fd.as_slice())?;
                }
                Ok(None)
            }
            Err(Error::Refused(why)) => {
                let why = format!("request {}: {why}", header.request);
                match failure(header, payload) {
                    Some(payload) => {
                        let bytes = encode(header.request, REPLY, &payload);
                        stream::send(&self.stream, &bytes, &[] as &[OwnedFd])?;
                    }
                    None if may_be_ignored(header.request) => {}
                    None => return Err(Error::Refused(why)),
                }
                Ok(Some(why))
            }
            Err(error) => Err(error),
        }
    }
}

/// Returns the payload of the failure answer for a front end that waits for one, if there is such an answer.
fn failure(header: Header, payload: &[u8]) -> Option<Vec<u8>> {
    use request::{
        CHECK_DEVICE_STATE, GET_CONFIG, GET_FEATURES, GET_INFLIGHT_FD, GET_MAX_MEM_SLOTS,
        GET_PROTOCOL_FEATURES, GET_QUEUE_NUM, GET_SHARED_OBJECT, GET_SHMEM_CONFIG, GET_VRING_BASE,
        SET_DEVICE_STATE_FD, SET_LOG_BASE,
    };
    let number = |number: u64| number.to_ne_bytes().to_vec();
    match (header.request, payload.len()) {
        // "uses zero length of payload to indicate an error"
        (GET_CONFIG, 12..) => Some([&payload[..4], &[0; 4], &payload[8..12]].concat()),
        // A region of 0 bytes: QEMU continues without one.
        (GET_INFLIGHT_FD, 24) => Some([&[0; 16], &payload[16..]].concat()),
        // The crate `vhost` waits for a whole log in place of an acknowledgement. QEMU asks for no acknowledgement and accepts any reply.
        (SET_LOG_BASE, 16) if header.needs_reply() => {
            let Log {
                mmap_size,
                mmap_offset,
            } = Log::REFUSED;
            Some([mmap_size, mmap_offset].map(u64::to_ne_bytes).concat())
        }
        // An error, and no descriptor.
        (SET_DEVICE_STATE_FD, _) => Some(number(0x101)),
        (CHECK_DEVICE_STATE, _) => Some(number(1)),
        // Other requests with specific answers.
        (
            GET_FEATURES
            | GET_VRING_BASE
            | GET_PROTOCOL_FEATURES
            | GET_QUEUE_NUM
            | GET_CONFIG
            | GET_INFLIGHT_FD
            | GET_MAX_MEM_SLOTS
            | GET_SHARED_OBJECT
            | GET_SHMEM_CONFIG,
            _,
        ) => None,
        _ => header.needs_reply().then(|| number(1)),
    }
}

/// Returns true if a message may remain without effect.
fn may_be_ignored(request: u32) -> bool {
    matches!(
        request,
        request::SEND_RARP
            | request::NET_SET_MTU
            | request::SET_BACKEND_REQ_FD
            | request::SET_CONFIG
    )
}

#[cfg(test)]
mod tests {
    use vhost_user_wire::NEED_REPLY;

    use super::*;

    #[test]
    fn refused_log_is_answered_with_the_bytes_of_a_log() {
        let failure_of = |flags: u32, payload: &[u8]| {
            let bytes = encode(request::SET_LOG_BASE, flags, payload);
            let (header, payload) = Header::parse(&bytes).unwrap();
            failure(header, payload)
        };
        let refused = [1, 0, 0, 0, 0, 0, 0, 0].into_iter().chain([0xff; 8]);
        assert_eq!(failure_of(NEED_REPLY, &[0; 16]), Some(refused.collect()));
        assert_eq!(failure_of(NEED_REPLY, &[0; 8]).unwrap().len(), 8);
        assert_eq!(failure_of(0, &[0; 16]), None);
    }
}
