//! What virtio-blk and virtio-scsi share: a queue's slots, its batches, answers and stamps, and how a front end's
//! control plane reaches them.
//!
//! A device is two things: a [`VirtioDevice`], shared, that a front end configures, and per queue a [`Protocol`]
//! that reads requests and writes answers. [`Queue`] joins a protocol with a ring and is what a worker owns.
//! Nothing here allocates or locks per request.

#![forbid(unsafe_code)]

mod device;
mod protocol;
mod queue;
mod slots;

pub use device::{
    Breach, BuiltQueue, ConfigError, OnBroken, QueueChange, QueueControl, QueueMaker, QueueSetup,
    VirtioDevice,
};
pub use protocol::{Answer, Job, Malformed, Protocol, Request, Start, Step};
pub use queue::Queue;
