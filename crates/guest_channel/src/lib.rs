//! The protocol between a host and the agent in its guest, over one virtio-serial port: commands run side by side, each on a
//! channel of its own with input, output and errors, in frames.
//!
//! Bytes in, values out: nothing here knows a socket, a port or a thread. The host trusts nothing that the guest sends.
//!
//! - A frame is a header of 12 bytes, `a7 kind 00 00 channel(u32) length(u32)`, little endian, and at most 32 KiB of payload.
//! - The agent starts with a lead-in of zeroes, longer than any frame, and [`Frame::Hello`] with a random number; the host answers
//!   [`Frame::Welcome`] with the same number. Whatever either side reads before that is left over from before a reboot, and
//!   [`Hunter`] skips it.
//! - The host sends [`Frame::Script`], once or more, and [`Frame::Start`]. The agent answers [`Frame::Failed`], or [`Frame::Output`]
//!   and [`Frame::Errors`] and, when both are at their end and the command has ended, [`Frame::Exit`]. Either ends the channel.
//! - Each of the three streams of a channel starts with [`WINDOW`] bytes that may be sent, and the receiver gives more with
//!   [`Frame::Credit`]: a slow reader delays its own command only, and nobody stores more than a window ([`Budget`], [`Allowance`]).
#![forbid(unsafe_code)]

mod decoder;
mod frame;
mod window;

pub use decoder::{Decoder, Hunter};
pub use frame::{Frame, HEADER, PAYLOAD_MAX, SCRIPT_MAX, Stream, VERSION, Violation, lead_in};
pub use window::{Allowance, Budget, WINDOW};
