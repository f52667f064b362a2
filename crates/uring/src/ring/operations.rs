//! Operations on files, timers, and no-ops.

use std::time::Duration;

use guest_memory::IoBuffer;
use io_uring::opcode;
use io_uring::types::{FsyncFlags, TimeoutFlags, Timespec};

use super::{Ring, transfer_length};
use crate::Owner;
use crate::fd::RingFd;
use crate::slab::Use;
#[cfg(feature = "simulated")]
use crate::{
    kernel::Kernel,
    simulated::{Files, Work},
};

impl Ring {
    /// Reads into the window of `buffer`, at most 1024 segments, from byte `offset`.
    pub fn read(&mut self, owner: Owner, token: u64, fd: &RingFd, offset: u64, buffer: IoBuffer) {
        let slot = self.occupy(owner, token, Use::Transfer, Some(fd), buffer);
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            return kernel.begin(slot, Work::Read { offset });
        }
        self.ramp.queue();
        let file = fd.number();
        let buffer = &self.slab.slot(slot).buffer;
        let entry = match (buffer.segments(), self.memory.index(buffer)) {
            ([one], Some(index)) => {
                opcode::ReadFixed::new(file, one.base(), transfer_length(one.len()), index)
                    .offset(offset)
                    .build()
            }
            ([one], None) => opcode::Read::new(file, one.base(), transfer_length(one.len()))
                .offset(offset)
                .build(),
            (many, _) => opcode::Readv::new(file, many.as_ptr().cast(), many.len() as u32)
                .offset(offset)
                .build(),
        };
        self.push_for(fd, slot, entry);
    }

    /// Writes the window of `buffer`, at most 1024 segments, to byte `offset`. With `durable` it completes after the data and the
    /// metadata to find them are on stable storage (`RWF_DSYNC`).
    pub fn write(
        &mut self,
        owner: Owner,
        token: u64,
        fd: &RingFd,
        offset: u64,
        buffer: IoBuffer,
        durable: bool,
    ) {
        let slot = self.occupy(owner, token, Use::Transfer, Some(fd), buffer);
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            return kernel.begin(slot, Work::Write { offset, durable });
        }
        self.ramp.queue();
        let file = fd.number();
        let flags = if durable { libc::RWF_DSYNC } else { 0 };
        let buffer = &self.slab.slot(slot).buffer;
        let entry = match (buffer.segments(), self.memory.index(buffer)) {
            ([one], Some(index)) => {
                opcode::WriteFixed::new(file, one.base(), transfer_length(one.len()), index)
                    .offset(offset)
                    .rw_flags(flags)
                    .build()
            }
            ([one], None) => opcode::Write::new(file, one.base(), transfer_length(one.len()))
                .offset(offset)
                .rw_flags(flags)
                .build(),
            (many, _) => opcode::Writev::new(file, many.as_ptr().cast(), many.len() as u32)
                .offset(offset)
                .rw_flags(flags)
                .build(),
        };
        self.push_for(fd, slot, entry);
    }

    /// Writes the window of `buffer`, which is one segment, to byte `offset` atomically (`RWF_ATOMIC`, Linux 6.11). The kernel
    /// refuses writes that file system or device cannot keep whole.
    ///
    /// # Panics
    /// When the window has several segments.
    pub fn write_atomic(
        &mut self,
        owner: Owner,
        token: u64,
        fd: &RingFd,
        offset: u64,
        buffer: IoBuffer,
        durable: bool,
    ) {
        let slot = self.occupy(owner, token, Use::Transfer, Some(fd), buffer);
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            return kernel.begin(slot, Work::Write { offset, durable });
        }
        self.ramp.queue();
        let durable = if durable { libc::RWF_DSYNC } else { 0 };
        let [one] = self.slab.slot(slot).buffer.segments() else {
            panic!("buffer of an atomic write is not one segment")
        };
        // The kernel does not support registered memory here.
        let entry = opcode::Write::new(fd.number(), one.base(), transfer_length(one.len()))
            .offset(offset)
            .rw_flags(libc::RWF_ATOMIC | durable)
            .build();
        self.push_for(fd, slot, entry);
    }

    /// Makes a file's data durable. With `data_only`, omits metadata that are not needed to read them back.
    pub fn fsync(&mut self, owner: Owner, token: u64, fd: &RingFd, data_only: bool) {
        self.fsync_range(owner, token, fd, 0, 0, data_only);
    }

    /// Same as [`fsync`](Self::fsync) for `length` bytes from `offset`; other dirty pages need not be written. Reports earlier
    /// write errors of any range.
    pub fn fsync_range(
        &mut self,
        owner: Owner,
        token: u64,
        fd: &RingFd,
        offset: u64,
        length: u32,
        data_only: bool,
    ) {
        let slot = self.occupy(owner, token, Use::Plain, Some(fd), IoBuffer::default());
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            let before = Files::written();
            return kernel.begin(slot, Work::Sync { before });
        }
        let flags = if data_only {
            FsyncFlags::DATASYNC
        } else {
            FsyncFlags::empty()
        };
        let entry = opcode::Fsync::new(fd.number())
            .offset(offset)
            .len(length)
            .flags(flags)
            .build();
        self.push_for(fd, slot, entry);
    }

    /// `fallocate(2)` with a `mode` of `FALLOC_FL_*` bits.
    pub fn fallocate(
        &mut self,
        owner: Owner,
        token: u64,
        fd: &RingFd,
        mode: i32,
        offset: u64,
        length: u64,
    ) {
        let slot = self.occupy(owner, token, Use::Plain, Some(fd), IoBuffer::default());
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            let work = Work::Allocate {
                mode,
                offset,
                length,
            };
            return kernel.begin(slot, work);
        }
        let entry = opcode::Fallocate::new(fd.number(), length)
            .offset(offset)
            .mode(mode)
            .build();
        self.push_for(fd, slot, entry);
    }

    /// Discards a range of a block device (Linux 6.12: `BLOCK_URING_CMD_DISCARD`). Older kernels and devices without support
    /// complete it with `EOPNOTSUPP`, `EINVAL` or `ENOTTY`.
    pub fn discard_blocks(
        &mut self,
        owner: Owner,
        token: u64,
        fd: &RingFd,
        offset: u64,
        length: u64,
    ) {
        /// `_IO(0x12, 0)` of linux/blkdev.h.
        const BLOCK_URING_CMD_DISCARD: u32 = 0x1200;
        let slot = self.occupy(owner, token, Use::Plain, Some(fd), IoBuffer::default());
        // The length is passed in `addr3`, which overlaps the command bytes.
        let mut command = [0; 16];
        command[..8].copy_from_slice(&length.to_ne_bytes());
        let entry = opcode::UringCmd16::new(fd.number(), BLOCK_URING_CMD_DISCARD)
            .addr(Some(offset))
            .cmd(command)
            .build();
        self.push_for(fd, slot, entry);
    }

    /// Completes with `Err(ETIME)` after `after`.
    pub fn timer(&mut self, owner: Owner, token: u64, after: Duration) {
        let slot = self.occupy(owner, token, Use::Plain, None, IoBuffer::default());
        let time = &mut self.slab.slot(slot).time;
        *time = Timespec::from(after);
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            return kernel.timer(slot, after);
        }
        let entry = opcode::Timeout::new(std::ptr::from_ref(time))
            .flags(TimeoutFlags::empty())
            .build();
        self.push(entry.user_data(slot.into()));
    }

    /// Completes at the next iteration.
    pub fn nop(&mut self, owner: Owner, token: u64) {
        let slot = self.occupy(owner, token, Use::Plain, None, IoBuffer::default());
        #[cfg(feature = "simulated")]
        if let Kernel::Simulated(kernel) = &mut self.io {
            return kernel.begin(slot, Work::Nothing);
        }
        self.push(opcode::Nop::new().build().user_data(slot.into()));
    }
}
