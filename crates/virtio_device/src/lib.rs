//! Common queue code of virtio-blk and virtio-scsi: slots, batches, answers and control-plane access.
//!
//! A device has two parts. A front end configures the shared [`VirtioDevice`]. Each queue has a [`Protocol`], which parses requests and
//! writes answers. [`Queue`] connects a protocol with a ring; a worker owns it. Nothing here allocates or locks per request.

#![forbid(unsafe_code)]

mod device;
mod protocol;
mod queue;
mod slots;

pub use device::{
    Breach, BuiltQueue, ConfigError, LogSetup, OnBroken, QueueChange, QueueControl, QueueMaker,
    QueueSetup, VirtioDevice,
};
pub use protocol::{Answer, Job, Malformed, ParsedRequest, Protocol, Request, Step};
pub use queue::Queue;
