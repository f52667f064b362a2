//! In-flight region of a back end, from the front end's side (vhost-user protocol, "Inflight I/O tracking").

use std::os::fd::{AsFd, OwnedFd};

use crate::{Error, FrontEnd, Result, request};

/// Size of the description: size and offset of the region, 64 bits each, number of queues and queue size, 16 bits each, and padding.
const DESCRIPTION: usize = 24;

/// A region created by the back end, which the front end keeps across connections.
pub struct InflightMemory {
    description: [u8; DESCRIPTION],
    file: OwnedFd,
}

impl FrontEnd {
    /// Requests a new region for `queues` queues of `size` entries (`GET_INFLIGHT_FD`), as a front end does after a driver reset.
    pub fn new_inflight(&self, queues: u16, size: u16) -> Result<InflightMemory> {
        let mut description = [0; DESCRIPTION];
        description[16..18].copy_from_slice(&queues.to_ne_bytes());
        description[18..20].copy_from_slice(&size.to_ne_bytes());
        let (answer, file) = self
            .channel()
            .call_for_fd(request::GET_INFLIGHT_FD, &description)?;
        let description = answer.try_into().map_err(|answer: Vec<u8>| Error::Answer {
            request: request::GET_INFLIGHT_FD,
            reason: format!("{} bytes", answer.len()),
        })?;
        Ok(InflightMemory { description, file })
    }

    /// Passes a region to the back end (`SET_INFLIGHT_FD`), before rings start.
    pub fn give_inflight(&self, region: &InflightMemory) -> Result<()> {
        let fds = [region.file.as_fd()];
        self.acknowledged(request::SET_INFLIGHT_FD, &region.description, &fds)
    }
}
