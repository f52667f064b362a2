//! virtio-scsi (virtio 1.3, 5.6): a controller per socket, up to 256 targets of up to 16,384 logical units each.
//!
//! `request` is the wire format, pure; `queue` takes commands through the SCSI core and its plans through their I/Os, and
//! `pending` is what it remembers of each, `response` what it answers;
//! `control` answers task management, `events` tells the driver of changes; [`ScsiDevice`] is what a front end
//! configures. Commands themselves are crate `scsi`'s business.

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
