//! Replies of the back end.

use std::os::fd::OwnedFd;

use zerocopy::IntoBytes;

use crate::payload::{Config, Inflight, Log, VringState, fixed};
use crate::{REPLY, WireError, request};

/// A reply of the back end with its descriptor of type `F`.
#[derive(Debug)]
pub enum Reply<F = OwnedFd> {
    /// Features, a number, or the result of a request that has only an acknowledgement: 0 for success.
    U64(u64),
    /// Base of a stopped vring.
    VringState(VringState),
    /// Contents of the configuration space; empty if the request failed.
    Config(Config),
    /// In-flight region; without a descriptor if the request failed.
    Inflight(Inflight, Option<F>),
    /// Log that the back end uses.
    Log(Log),
}

/// Parses the reply to `request`.
///
/// # Errors
/// Fails if it replies to another request, or has another size or number of descriptors.
pub fn parse_reply(request: u32, bytes: &[u8], fds: Vec<OwnedFd>) -> Result<Reply, WireError> {
    let payload = reply_payload(request, bytes)?;
    Ok(match request {
        request::GET_VRING_BASE => Reply::VringState(fixed(payload)?),
        request::GET_CONFIG => Reply::Config(Config::parse(payload)?),
        request::GET_INFLIGHT_FD => match fds.len() {
            0 | 1 => Reply::Inflight(fixed(payload)?, fds.into_iter().next()),
            count => return Err(WireError::Descriptors(count)),
        },
        request::SET_LOG_BASE if payload.len() != size_of::<u64>() => Reply::Log(fixed(payload)?),
        _ => Reply::U64(fixed(payload)?),
    })
}

/// Returns the payload of the reply to `request`.
///
/// # Errors
/// Fails if it is not a whole reply to this request.
pub fn reply_payload(request: u32, bytes: &[u8]) -> Result<&[u8], WireError> {
    match crate::split(bytes, REPLY)? {
        (number, payload) if number == request => Ok(payload),
        _ => Err(WireError::Request),
    }
}

impl<F> Reply<F> {
    /// Returns the bytes of the reply to `request`, and its descriptor.
    pub fn encode(self, request: u32) -> (Vec<u8>, Option<F>) {
        let (payload, fd) = match self {
            Reply::U64(value) => (value.as_bytes().to_vec(), None),
            Reply::VringState(state) => (state.as_bytes().to_vec(), None),
            Reply::Config(config) => (config.encode(), None),
            Reply::Inflight(inflight, fd) => (inflight.as_bytes().to_vec(), fd),
            Reply::Log(log) => (log.as_bytes().to_vec(), None),
        };
        (crate::encode(request, REPLY, &payload), fd)
    }
}
