//! Memory limits of a session, for the commands of all its connections, and the memory of one connection.

use std::sync::Arc;

use request_engine::{Buffers, SharedMemory};
use scsi_exec::WorkMemory;

use crate::connection::Connection;
use crate::limits::ServerLimits;

#[derive(Clone)]
pub(crate) struct SessionMemory {
    /// Data of commands.
    pub data: Arc<SharedMemory<Connection>>,
    /// Working memory of commands besides their data, with the same limit.
    pub work: Arc<WorkMemory>,
}

impl SessionMemory {
    pub fn new(limits: &ServerLimits) -> SessionMemory {
        let connections = limits.connections_per_session.into();
        SessionMemory {
            data: SharedMemory::new(limits.data_bytes, connections, 0),
            work: WorkMemory::new(limits.data_bytes),
        }
    }
}

/// Memory of one connection.
pub(crate) struct ConnectionMemory {
    /// Data of commands, and output.
    pub buffers: Buffers<Connection>,
    /// Working memory of commands besides their data.
    pub work: Arc<WorkMemory>,
}

impl ConnectionMemory {
    pub fn new(limits: SessionMemory) -> ConnectionMemory {
        ConnectionMemory {
            buffers: Buffers::new(limits.data),
            work: limits.work,
        }
    }

    /// Counts all memory in the limits of a session from now on.
    pub fn count_in(&mut self, limits: SessionMemory) {
        self.buffers.count_in(limits.data);
        self.work = limits.work;
    }
}
