//! Shared helpers of the end-to-end tests: a daemon with its temporary folders, guest checks, a minimal vhost-user client.
//!
//! Tests are independent and may run in any order. Tests with guests run one at a time, because a guest needs the whole machine.
#![forbid(unsafe_code)]

pub mod bootable;
pub mod browser;
pub mod ceph;
pub mod client;
mod daemon;
pub mod dashboard;
pub mod files;
pub mod firmware;
pub mod http;
pub mod hung_mount;
pub mod idle;
pub mod initiator;
pub mod lio;
pub mod loop_device;
pub mod memory_group;
pub mod multipath;
pub mod open_iscsi;
pub mod packages;
pub mod preload;
pub mod prose;
pub mod proxy;
pub mod rig;
mod scratch;
pub mod small_file_system;
mod soak;
mod successor;
pub mod systemd;
pub mod user_guests;

pub use daemon::{Daemon, DaemonBuilder};
pub use idle::ensure_idle;
pub use initiator::IscsiSession;
pub use rig::Rig;
pub use scratch::Scratch;
pub use small_file_system::SmallFileSystem;
pub use soak::Soak;
pub use successor::Successor;
pub use user_guests::UserGuests;

pub use anyhow::{Context, Result, bail, ensure};
pub use vm::{Guest, GuestBuilder, Profile};
