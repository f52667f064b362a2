//! Restricts a ring to operations on open descriptors. Operations that open, connect or rename are refused.
//!
//! A seccomp filter does not see ring operations, so the ring refuses them itself, permanently and from its first operation on.
//! Each operation is checked against two bit maps. The restriction applies also without a sandbox.

use std::io;

use io_uring::register::Restriction;
use io_uring::{IoUring, opcode, squeue};

/// Operations of `ring` and `ring/sockets`.
const OPERATIONS: [u8; 15] = [
    opcode::Read::CODE,
    opcode::ReadFixed::CODE,
    opcode::Readv::CODE,
    opcode::Write::CODE,
    opcode::WriteFixed::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::UringCmd16::CODE,
    opcode::Timeout::CODE,
    opcode::Nop::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
    opcode::Recv::CODE,
    opcode::SendMsg::CODE,
];

/// `enum io_uring_register_op` of linux/io_uring.h: tables of descriptors and memory, and the start of the ring.
const REGISTRATIONS: [u8; 8] = [
    1,  // IORING_UNREGISTER_BUFFERS
    3,  // IORING_UNREGISTER_FILES
    6,  // IORING_REGISTER_FILES_UPDATE
    8,  // IORING_REGISTER_PROBE
    12, // IORING_REGISTER_ENABLE_RINGS
    13, // IORING_REGISTER_FILES2
    15, // IORING_REGISTER_BUFFERS2
    16, // IORING_REGISTER_BUFFERS_UPDATE
];

/// Restricts and enables a ring that was set up disabled, on the thread that uses it.
pub(crate) fn restrict_and_enable(ring: &IoUring) -> io::Result<()> {
    let flags = squeue::Flags::FIXED_FILE
        | squeue::Flags::IO_LINK
        | squeue::Flags::ASYNC
        | squeue::Flags::SKIP_SUCCESS;
    let operations = OPERATIONS.into_iter().map(Restriction::sqe_op);
    let registrations = REGISTRATIONS.into_iter().map(Restriction::register_op);
    let mut all: Vec<Restriction> = operations.chain(registrations).collect();
    all.push(Restriction::sqe_flags_allowed(flags.bits()));
    let submitter = ring.submitter();
    submitter.register_restrictions(&mut all)?;
    submitter.register_enable_rings()
}

#[cfg(test)]
mod tests {
    use io_uring::types::Fd;

    use super::*;
    use crate::setup;

    #[test]
    fn ring_refuses_to_open_a_path_and_to_make_a_socket() {
        let mut ring = setup::build(4).unwrap();
        let open = opcode::OpenAt::new(Fd(libc::AT_FDCWD), c"/etc/hostname".as_ptr()).build();
        let socket = opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build();
        for entry in [open, socket] {
            // SAFETY: the path is static, and the other operation refers to no memory.
            unsafe { ring.submission().push(&entry).unwrap() };
            // The kernel refuses the entry with a completion.
            ring.submit_and_wait(1).unwrap();
            let completion = ring.completion().next().unwrap();
            assert_eq!(completion.result(), -libc::EACCES);
        }
    }
}
