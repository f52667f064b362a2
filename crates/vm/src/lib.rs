//! Guests under QEMU with disks from a vhost-user back end, for `lunette vm`, the demonstration and the tests.
//!
//! [`GuestBuilder`] boots a kernel with an initramfs built here; [`Guest::run`] runs a shell script in it and returns exit code and
//! output; [`Daemon`] starts and stops `lunette`. Processes are killed when their owner is dropped, every wait has a timeout, and an
//! error contains the end of the relevant log. The guest's side is the program of `crates/guest_agent`. `scripts/setup` installs the
//! requirements.
#![forbid(unsafe_code)]

mod accelerator;
mod agent;
mod bootable;
mod build;
mod ceph;
mod cpio;
mod daemon;
mod firmware;
mod guest;
mod initiator;
mod initramfs;
mod inner_lunette;
mod interrupt;
mod lio;
mod multipath;
mod places;
mod process;
mod qmp;
mod scratch;
pub mod setup;

pub mod demo;
pub mod libvirt;
pub mod running;
pub mod topology;

pub use accelerator::Accelerator;
pub use agent::{Output, Running};
pub use bootable::{BootableSystem, bootable_image};
pub use build::{GuestProgram, Profile, guest_program, lunette_program, use_lunette};
pub use ceph::{CEPH_USER, Ceph};
pub use daemon::{Daemon, DaemonBuilder};
pub use firmware::{READ_WHOLE, bios_image, efi_image};
pub use guest::{Guest, GuestBuilder};
pub use initiator::RemoteTarget;
pub use initramfs::{ROOT, user_command_line};
pub use interrupt::{interrupt, interrupted, watch};
pub use places::{guest_directory, tool, use_data_folder, workspace};
pub use process::{Process, wait_until};
pub use qmp::Qmp;
pub use scratch::Scratch;
