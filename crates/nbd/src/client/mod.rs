//! Client side of the protocol.

mod handshake;
mod reply;

pub use handshake::{Failure, Handshake, Session, Step, Wanted};
pub use reply::{Chunk, Content, Reply, content, decode};
