//! virtio-blk (virtio 1.3, 5.2): one disk per socket.
//!
//! `request` reads and checks a request without side effects. `queue` executes its I/Os and writes its status. `config` is
//! the configuration space. [`BlkDevice`] is configured by a front end.

#![forbid(unsafe_code)]

pub mod config;
mod device;
mod queue;
pub mod request;

pub use device::{BlkDevice, BlkOptions};
