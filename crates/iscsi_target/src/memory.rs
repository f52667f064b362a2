//! Memory limits of a session, for the commands of all its connections, and the memory of one connection.

use std::sync::Arc;

use reactor::RateLimit;
use request_engine::{Buffers, GroupMemory, SharedMemory};
use scsi_exec::WorkMemory;

use crate::connection::Connection;
use crate::limits::ServerLimits;
use crate::shared::RECLAIM_INTERVAL;

/// Interval in seconds at which a connection that waits for memory tries again: only connections of its own target wake it.
pub(crate) const MEMORY_CHECK: u64 = 1;

#[derive(Clone)]
pub(crate) struct SessionMemory {
    /// Data of commands.
    pub data: Arc<SharedMemory<Connection>>,
    /// Working memory of commands besides their data, with the same limit.
    pub work: Arc<WorkMemory>,
    /// Limit of messages to the connections about memory.
    reclaims: Arc<RateLimit>,
}

impl SessionMemory {
    /// Creates the limits of a session. `target`: memory of all sessions of its target.
    pub fn new(limits: &ServerLimits, target: Arc<GroupMemory>) -> SessionMemory {
        let connections = limits.connections_per_session.into();
        SessionMemory {
            data: SharedMemory::new(target, limits.data_bytes, connections, limits.floor_bytes()),
            work: WorkMemory::new(limits.data_bytes),
            reclaims: Arc::new(RateLimit::new(RECLAIM_INTERVAL)),
        }
    }
}

/// Memory of one connection.
pub(crate) struct ConnectionMemory {
    /// Data of commands, and output.
    pub buffers: Buffers<Connection>,
    /// Working memory of commands besides their data.
    pub work: Arc<WorkMemory>,
    pub reclaims: Arc<RateLimit>,
}

impl ConnectionMemory {
    pub fn new(limits: SessionMemory) -> ConnectionMemory {
        ConnectionMemory {
            buffers: Buffers::new(limits.data),
            work: limits.work,
            reclaims: limits.reclaims,
        }
    }

    /// Counts all memory in the limits of a session from now on.
    pub fn count_in(&mut self, limits: SessionMemory) {
        self.buffers.count_in(limits.data);
        self.work = limits.work;
        self.reclaims = limits.reclaims;
    }
}
