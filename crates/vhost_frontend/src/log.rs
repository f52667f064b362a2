//! Dirty log of a live migration, from the front end's side (vhost-user protocol, "Migration").

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

use guest_memory::Mapping;

use vhost_user_wire::{Log, VringAddr};
use virtqueue::driver::RingLayout;

use crate::session::unexpected;
use crate::{FrontEnd, Message, Result, feature};

/// Memory of a dirty log: one bit per page of 4096 bytes.
pub struct LogMemory {
    file: File,
    mapping: Arc<Mapping>,
}

impl LogMemory {
    /// Creates a log for the pages below a guest-physical address.
    pub fn below(address: u64) -> Result<LogMemory> {
        LogMemory::of_bytes(address.div_ceil(8 * 4096))
    }

    /// Creates a log of `bytes` bytes.
    pub fn of_bytes(bytes: u64) -> Result<LogMemory> {
        let (mapping, file) = Mapping::memfd("dirty-log", bytes as usize)?;
        Ok(LogMemory { file, mapping })
    }

    /// Returns the file of the log.
    pub fn file(&self) -> &File {
        &self.file
    }

    /// Returns the numbers of the marked pages.
    pub fn pages(&self) -> Vec<u64> {
        let mut bytes = vec![0; self.mapping.len()];
        self.mapping.read(0, &mut bytes);
        let marked = (0..).zip(&bytes).filter(|(_, byte)| **byte != 0);
        let bits = marked.flat_map(|(at, byte)| (0..8).map(move |bit| (8 * at + bit, byte >> bit)));
        bits.filter(|(_, bit)| bit & 1 != 0)
            .map(|(page, _)| page)
            .collect()
    }

    /// Clears the log. The device must not write at the same time.
    pub fn clear(&self) {
        self.mapping.fill(0, self.mapping.len(), 0);
    }
}

impl FrontEnd {
    /// Passes a log to the back end (`SET_LOG_BASE`).
    pub fn set_log(&self, log: &LogMemory) -> Result<()> {
        let bytes = log.mapping.len() as u64;
        self.set_log_part(bytes, 0, log.file.as_fd())
    }

    /// As [`FrontEnd::set_log`], for a part of any file.
    pub fn set_log_part(&self, bytes: u64, offset: u64, file: BorrowedFd<'_>) -> Result<()> {
        let log = Log {
            mmap_size: bytes,
            mmap_offset: offset,
        };
        // The specification requires a reply and defines no payload. Back ends reply with none, or with the request's payload or its begin.
        let set = Message::SetLogBase(log, file);
        let (request, payload, fds) = set.into_parts();
        let answer = self.channel().call(request, &payload, &fds)?;
        match payload.starts_with(&answer) {
            true => Ok(()),
            false => Err(unexpected(request)),
        }
    }

    /// Starts or ends the logging of data (`VHOST_F_LOG_ALL`).
    pub fn log_data(&self, is_logged: bool) -> Result<()> {
        let mut features = self.features();
        if is_logged {
            features |= feature::LOG_ALL;
        }
        self.acknowledge(Message::SetFeatures(features))
    }

    /// Starts or ends the logging of the used ring (`VHOST_VRING_F_LOG`).
    pub fn log_ring(&self, index: u16, layout: &RingLayout, is_logged: bool) -> Result<()> {
        let message = Message::SetVringAddr(VringAddr {
            index: u32::from(index),
            flags: if is_logged { VringAddr::F_LOG } else { 0 },
            descriptor: self.user_address(layout.descriptor_area),
            used: self.user_address(layout.device_area),
            available: self.user_address(layout.driver_area),
            log: layout.device_area,
        });
        self.acknowledge(message)
    }
}
