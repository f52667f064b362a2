//! iSCSI (RFC 7143) without I/O: bytes in, steps and bytes out.
//!
//! Nothing here opens a socket, reads a clock or knows SCSI beyond the CDB's bytes. A transport feeds a [`target::Connection`]
//! what it received, places command data where it likes, and sends what [`target::Outgoing`] lists. Every length, tag,
//! offset and count of a peer is checked here, once; memory per connection is bounded by [`Limits`].
//! Tests: at the end of each module, and `tests/` for our initiator against our target over a pipe.
#![forbid(unsafe_code)]

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
