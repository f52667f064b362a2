//! Client side of the protocol.

mod handshake;
mod reply;
mod transmission;

pub use handshake::{Failure, Handshake, Session, Step, Wanted};
pub use reply::{Chunk, Content, Reply, content, decode};
pub use transmission::{Event, Transmission};
