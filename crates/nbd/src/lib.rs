//! The NBD protocol (`doc/proto.md` of the reference implementation, with its extension of extended headers) without I/O.
//!
//! ```text
//!   server   handshake::Handshake   bytes -> option replies, then a Session with an export and a reply style
//!            request::Request       bytes -> header -> check -> Action or ErrorCode
//!            reply                  Action's result -> bytes
//!   client   client::Handshake      bytes -> options, then a Session with size, flags and contexts
//!            client::Transmission   request -> bytes; bytes -> data, extents and results of requests in flight
//!   both     address                URI of an export
//! ```
//!
//! Every length, offset, flag and string from a peer is checked here. A request that breaks a rule of its own fails alone with an
//! [`ErrorCode`]. Input after which the stream cannot be parsed any more is a [`Violation`], which ends the connection. Tests: at the end of
//! each module; `tests/` has wire bytes from the protocol document and runs both sides against each other.

#![forbid(unsafe_code)]

pub mod address;
pub mod client;
mod error;
mod fields;
pub mod handshake;
pub mod reply;
pub mod request;
pub mod wire;

pub use error::{ErrorCode, Violation};

/// Form of requests and replies in the transmission phase.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Style {
    /// Compact requests, simple replies.
    #[default]
    Simple,
    /// Compact requests, structured replies (`NBD_OPT_STRUCTURED_REPLY`).
    Structured,
    /// Extended requests and replies (`NBD_OPT_EXTENDED_HEADERS`).
    Extended,
}

/// Size constraints of an export in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockSizes {
    /// Minimum block size: alignment of offset and length of every request.
    pub minimum: u32,
    /// Preferred block size.
    pub preferred: u32,
    /// Maximum payload of a request or a reply.
    pub maximum_payload: u32,
}

/// An export as advertised to clients.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportInfo {
    /// Canonical name.
    pub name: String,
    /// Description for humans; may be empty.
    pub description: String,
    /// Size in bytes.
    pub size: u64,
    /// Transmission flags (`wire::transmission`).
    pub flags: u16,
    /// Size constraints.
    pub block_sizes: BlockSizes,
    /// Names of the metadata contexts. A context's ID is its index.
    pub contexts: Vec<String>,
}
