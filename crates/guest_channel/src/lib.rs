//! Protocol between a host and the agent in its guest, over one virtio-serial port. Commands run in parallel, each on a channel with
//! input, output and errors, in frames.
//!
//! Pure: no sockets, ports or threads. All data from the guest is untrusted.
//!
//! - A frame is a header of 12 bytes, `a7 kind 00 00 channel(u32) length(u32)`, little endian, and at most 32 KiB of payload.
//! - The agent starts with a lead-in of zeroes, longer than any frame, and [`Frame::Hello`] with a random number. The host answers
//!   [`Frame::Welcome`] with the same number. All bytes before that are left over from before a reboot; [`Hunter`] skips them.
//! - The host sends [`Frame::Script`], once or more, and [`Frame::Start`]. The agent answers [`Frame::Failed`], or [`Frame::Output`] and
//!   [`Frame::Errors`] and, after the end of both streams and of the command, [`Frame::Exit`]. [`Frame::Failed`] and [`Frame::Exit`] end
//!   the channel.
//! - Each of the three streams of a channel starts with a send window of [`WINDOW`] bytes, which the receiver extends with
//!   [`Frame::Credit`]. A slow reader therefore delays only its own command, and neither side stores more than a window ([`Budget`],
//!   [`Allowance`]).
#![forbid(unsafe_code)]

mod decoder;
mod frame;
mod window;

pub use decoder::{Decoder, Hunter};
pub use frame::{Frame, HEADER, PAYLOAD_MAX, SCRIPT_MAX, Stream, VERSION, Violation, lead_in};
pub use window::{Allowance, Budget, WINDOW};
