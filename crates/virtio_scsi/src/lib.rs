//! virtio-scsi (virtio 1.3, 5.6): one controller per socket, up to 256 targets with up to 16,384 logical units each.
//!
//! `request` is the wire format; `queue` executes commands through the SCSI core; `pending` is the state of a command, `response` its
//! result. `control` handles task management, `events` reports changes to the driver. A front end configures [`ScsiDevice`]. The crate
//! `scsi` implements the commands.

#![forbid(unsafe_code)]

mod control;
mod device;
mod events;
mod pending;
mod queue;
pub mod request;
mod response;

pub use device::{LunError, ScsiDevice, ScsiOptions};
pub use events::Event;
