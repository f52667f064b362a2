//! iSCSI (RFC 7143) without I/O: bytes in, protocol steps and bytes out.
//!
//! This crate opens no sockets, reads no clock, and treats the CDB as opaque bytes. A transport passes received bytes to a
//! [`target::Connection`], chooses the buffers for command data, and sends the pieces listed in [`target::Outgoing`]. Every
//! length, tag, offset and count from a peer is validated here. [`Limits`] bounds the memory per connection. Tests: at the
//! end of each module; `tests/` runs our initiator against our target over a pipe.
#![forbid(unsafe_code)]

pub mod access;
pub mod address;
pub mod chap;
pub mod initiator;
mod limits;
pub mod login;
pub mod negotiation;
pub mod pdu;
pub mod serial;
pub mod session;
pub mod target;
pub mod text;

pub use limits::Limits;
