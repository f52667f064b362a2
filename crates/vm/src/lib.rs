//! Guests under QEMU with disks from a vhost-user back end, for `lunette vm` and the tests.
//!
//! [`GuestBuilder`] boots a kernel with an initramfs built here; [`Guest::run`] runs a shell script in it and returns exit code and
//! output. Processes are killed when their owner is dropped, every wait has a timeout, and an
//! error contains the end of the relevant log. The guest's side is the program of `crates/guest_agent`. `scripts/setup` installs the
//! requirements.
#![forbid(unsafe_code)]

mod accelerator;
mod agent;
mod build;
mod cpio;
mod guest;
mod inner_lunette;
mod interrupt;
mod migration;
mod places;
mod process;
mod qmp;
mod tgt;
mod two_paths;

pub mod initramfs;
pub mod kernel_target;
pub mod libvirt;
pub mod running;
pub mod setup;
pub mod topology;
pub mod vhost_scsi;

pub use accelerator::Accelerator;
pub use agent::{Agent, Output, Running};
pub use build::{GuestProgram, Profile, guest_program, lunette_program, use_lunette};
pub use guest::{Guest, GuestBuilder, MIGRATING_KIB};
pub use interrupt::{interrupt, interrupted, signal, watch, watch_until_second};
pub use migration::{DestinationDies, Migration, Moment};
pub use places::{guest_directory, kernel, tool, use_data_folder, workspace};
pub use process::{Process, wait_until};
pub use qmp::Qmp;
pub use two_paths::TwoPaths;
