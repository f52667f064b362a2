//! Reads a libvirt domain as a [`Plan`](crate::topology::Plan), which can be written as QEMU's command line, the daemon's configuration,
//! or XML.
//!
//! The text is untrusted: it is parsed without entities or files. Unsupported parts are listed with their paths.

mod addresses;
mod disks;
mod document;
mod domain;
mod guest;
mod network;
mod peripherals;

pub use domain::{Domain, DomainError};
