//! System calls that rustix does not have as safe functions, outside of the data path.
//!
//! ```text
//!   file_lock          F_OFD_SETLK      locks on a disk's file, compatible with QEMU's
//!   first_unwritten    FS_IOC_FIEMAP    allocated but unwritten space of a file
//!   discard_now        BLKDISCARD       discards a range of a block device
//!   sg_io              SG_IO            SCSI commands for local devices
//!   make_tap, make_tun TUNSETIFF        network interfaces of a program
//!   peer_of            SO_PEERCRED      process at the other end of a Unix socket
//!   inherited          F_DUPFD_CLOEXEC  descriptors by number, from the parent process
//! ```
//!
//! This crate contains `unsafe` code; its exported API is safe. Every call borrows its descriptor and its memory until it returns, and may
//! block. System calls of the data path are in `uring`.

mod discard;
pub mod file_lock;
mod inherited;
mod peer;
pub mod sg_io;
mod tap;
mod unwritten;

pub use discard::discard_now;
pub use inherited::inherited;
pub use peer::{Peer, guest_of, peer_of};
pub use tap::{make_tap, make_tun};
pub use unwritten::first_unwritten;
