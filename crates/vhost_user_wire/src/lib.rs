//! Messages of the vhost-user protocol, for front ends and back ends. Names are those of the specification ("Message Specification").
//!
//! [`parse`] and [`Message::encode`] convert between bytes with descriptors and typed messages, without input or output. [`parse_reply`] and
//! [`Reply::encode`] do the same for replies. [`stream`] transfers whole messages on a socket. The parser checks sizes, numbers of
//! descriptors and the ranges of fields. A back end checks indices, addresses and features.
//!
//! Rejected: the crate `vhost`. Its back end reads the socket itself, waits for the rest of a message without a time limit, requires
//! negotiation before messages that QEMU sends without it, and leaves the rest of a refused message in the socket. Tests use it as the
//! other end.
//!
//! A message consists of a header with request, flags and payload size, 32 bits each in native byte order, and the payload.

#![forbid(unsafe_code)]

mod message;
mod payload;
mod reply;
pub mod stream;

pub use message::{Message, parse};
pub use payload::{Config, Inflight, Log, MemoryRegion, VringAddr, VringState};
pub use reply::{Reply, parse_reply, reply_payload};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

/// Size of a header.
pub const HEADER: usize = size_of::<Header>();
/// Maximum payload size.
pub const PAYLOAD_MAX: usize = 4096;
/// Maximum number of descriptors of a message, and so of regions in SET_MEM_TABLE.
pub const DESCRIPTORS_MAX: usize = 32;

/// Protocol version 1, in the lower two bits of the flags.
pub const VERSION: u32 = 1;
const VERSION_MASK: u32 = 3;
/// The message is a reply.
pub const REPLY: u32 = 1 << 2;
/// The message requests a reply even if it would have none (`REPLY_ACK`).
pub const NEED_REPLY: u32 = 1 << 3;

/// VHOST_USER_BACKEND_CONFIG_CHANGE_MSG, a request of the back end on its channel.
pub const BACKEND_CONFIG_CHANGE_MSG: u32 = 2;

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
    pub const SEND_RARP: u32 = 19;
    pub const NET_SET_MTU: u32 = 20;
    pub const SET_BACKEND_REQ_FD: u32 = 21;
    pub const GET_CONFIG: u32 = 24;
    pub const SET_CONFIG: u32 = 25;
    pub const GET_INFLIGHT_FD: u32 = 31;
    pub const SET_INFLIGHT_FD: u32 = 32;
    pub const RESET_DEVICE: u32 = 34;
    pub const GET_MAX_MEM_SLOTS: u32 = 36;
    pub const ADD_MEM_REG: u32 = 37;
    pub const REM_MEM_REG: u32 = 38;
    pub const GET_SHARED_OBJECT: u32 = 41;
    pub const SET_DEVICE_STATE_FD: u32 = 42;
    pub const CHECK_DEVICE_STATE: u32 = 43;
    pub const GET_SHMEM_CONFIG: u32 = 44;
}

/// Feature bits of the vhost-user protocol.
pub mod protocol_feature {
    #![allow(missing_docs)]
    pub const MQ: u64 = 1 << 0;
    pub const LOG_SHMFD: u64 = 1 << 1;
    pub const REPLY_ACK: u64 = 1 << 3;
    pub const BACKEND_REQ: u64 = 1 << 5;
    pub const CONFIG: u64 = 1 << 9;
    pub const INFLIGHT_SHMFD: u64 = 1 << 12;
    pub const RESET_DEVICE: u64 = 1 << 13;
    pub const CONFIGURE_MEM_SLOTS: u64 = 1 << 15;
}

/// Header of a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, Immutable, KnownLayout)]
#[repr(C)]
pub struct Header {
    /// Request number.
    pub request: u32,
    /// Flags, with the version.
    pub flags: u32,
    /// Payload size.
    pub size: u32,
}

impl Header {
    /// Splits a header from the bytes of a message, which may be incomplete, and checks it.
    ///
    /// # Errors
    /// Fails if the rest of the stream cannot be parsed: the header is incomplete, has another version or a too large payload.
    pub fn parse(bytes: &[u8]) -> Result<(Header, &[u8]), WireError> {
        let (header, payload) =
            Header::read_from_prefix(bytes).map_err(|_| WireError::Incomplete)?;
        if header.flags & VERSION_MASK != VERSION {
            return Err(WireError::Version(header.flags & VERSION_MASK));
        }
        if header.size as usize > PAYLOAD_MAX {
            return Err(WireError::TooLong(header.size));
        }
        Ok((header, payload))
    }

    /// Returns true if the sender waits for a reply to a message without one.
    pub fn needs_reply(self) -> bool {
        self.flags & NEED_REPLY != 0
    }
}

/// Returns the bytes of a message, with the version in its flags.
pub fn encode(request: u32, flags: u32, payload: &[u8]) -> Vec<u8> {
    let header = Header {
        request,
        flags: flags | VERSION,
        size: payload.len() as u32,
    };
    [header.as_bytes(), payload].concat()
}

/// Splits a whole message and checks its length and flags.
fn split(bytes: &[u8], flags: u32) -> Result<(u32, &[u8]), WireError> {
    let (header, payload) = Header::parse(bytes)?;
    if header.size as usize != payload.len() {
        return Err(WireError::Incomplete);
    }
    if header.flags & !NEED_REPLY != flags | VERSION {
        return Err(WireError::Flags(header.flags));
    }
    Ok((header.request, payload))
}

/// Defects of a message.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WireError {
    /// The bytes are not one whole message.
    #[error("incomplete message")]
    Incomplete,
    /// Another version of the protocol.
    #[error("version {0} of the protocol is not supported")]
    Version(u32),
    /// The payload is too long.
    #[error("a payload of {0} bytes is longer than {PAYLOAD_MAX} bytes")]
    TooLong(u32),
    /// Reserved flags, or a reply in place of a request, or the reverse.
    #[error("invalid flags {0:#x}")]
    Flags(u32),
    /// The request is unknown.
    #[error("unknown request")]
    Request,
    /// The payload has another size than the request defines.
    #[error("invalid payload of {0} bytes")]
    Size(usize),
    /// The request has another number of descriptors.
    #[error("invalid number of descriptors: {0}")]
    Descriptors(usize),
    /// A field of the payload is out of its range.
    #[error("invalid {0}")]
    Field(&'static str),
}
