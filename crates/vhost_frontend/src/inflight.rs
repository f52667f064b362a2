//! In-flight region of a back end, from the front end's side (vhost-user protocol, "Inflight I/O tracking").

use std::os::fd::{AsFd, OwnedFd};

use vhost_user_wire::{Inflight, Reply};

use crate::session::unexpected;
use crate::{FrontEnd, Message, Result, request};

/// A region created by the back end, which the front end keeps across connections.
pub struct InflightMemory {
    description: Inflight,
    file: OwnedFd,
}

impl FrontEnd {
    /// Requests a new region for `queues` queues of `size` entries (`GET_INFLIGHT_FD`), as a front end does after a driver reset.
    pub fn new_inflight(&self, queues: u16, size: u16) -> Result<InflightMemory> {
        let wanted = Inflight {
            num_queues: queues,
            queue_size: size,
            ..Inflight::default()
        };
        let get = Message::GetInflightFd(wanted);
        match self.channel().ask(get)? {
            Reply::Inflight(description, Some(file)) => Ok(InflightMemory { description, file }),
            _ => Err(unexpected(request::GET_INFLIGHT_FD)),
        }
    }

    /// Passes a region to the back end (`SET_INFLIGHT_FD`), before rings start.
    pub fn give_inflight(&self, region: &InflightMemory) -> Result<()> {
        let (description, file) = (region.description, region.file.as_fd());
        self.acknowledge(Message::SetInflightFd(description, file))
    }
}
