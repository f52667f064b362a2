//! Reads a libvirt domain as a [`Plan`](crate::topology::Plan), so that everything that can be written of a plan can be written of
//! a domain: QEMU's command line, the daemon's configuration, XML again.
//!
//! The text is somebody else's: it is parsed without entities or files. What is not understood is named with its path.

mod disks;
mod document;
mod domain;
mod peripherals;

pub use domain::{Domain, DomainError};
