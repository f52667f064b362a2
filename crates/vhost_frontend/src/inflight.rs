//! The memory in which a back end keeps requests in flight, from the front end's side (vhost-user protocol, "Inflight I/O tracking").

use std::os::fd::{AsFd, OwnedFd};

use crate::{Error, FrontEnd, Result, request};

/// Size and offset of the region, 64 bits each, then queues and entries of a queue, 16 bits each, and padding.
const DESCRIPTION: usize = 24;

/// A region that a back end has made and the front end keeps, over connections too.
pub struct InflightMemory {
    description: [u8; DESCRIPTION],
    file: OwnedFd,
}

impl FrontEnd {
    /// Asks for a new region for `queues` queues of `size` entries (`GET_INFLIGHT_FD`), as a front end does whose driver starts anew.
    pub fn new_inflight(&self, queues: u16, size: u16) -> Result<InflightMemory> {
        let mut description = [0; DESCRIPTION];
        description[16..18].copy_from_slice(&queues.to_ne_bytes());
        description[18..20].copy_from_slice(&size.to_ne_bytes());
        let (answer, file) = self
            .channel()
            .call_for_fd(request::GET_INFLIGHT_FD, &description)?;
        let description = answer.try_into().map_err(|answer: Vec<u8>| Error::Answer {
            request: request::GET_INFLIGHT_FD,
            what: format!("{} bytes", answer.len()),
        })?;
        Ok(InflightMemory { description, file })
    }

    /// Gives the back end a region (`SET_INFLIGHT_FD`), as is done before rings start.
    pub fn give_inflight(&self, region: &InflightMemory) -> Result<()> {
        let fds = [region.file.as_fd()];
        self.acknowledged(request::SET_INFLIGHT_FD, &region.description, &fds)
    }
}
