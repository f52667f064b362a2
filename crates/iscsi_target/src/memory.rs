//! Memory limits of a session, for the commands of all its connections.

use std::sync::Arc;

use request_engine::SharedMemory;
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
