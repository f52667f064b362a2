//! virtio-blk (virtio 1.3, 5.2): one disk per socket.
//!
//! `request` reads and checks a request, pure; `queue` takes it through its I/Os and writes its status; `config` is the
//! configuration space; [`BlkDevice`] is what a front end configures.

#![forbid(unsafe_code)]

pub mod config;
mod device;
mod queue;
pub mod request;

pub use device::{BlkDevice, BlkOptions};
