//! A target without portals and accepting thread. The simulation provides connections and time.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use bdev::Disk;
use reactor::Worker;
use scsi_exec::Units;

use crate::connection::Connection;
use crate::server::{ServerError, begin};
use crate::shared::{SharedServer, lock};
use crate::target::IscsiTarget;
use crate::{Portal, ServerLimits, TargetOptions};

/// Like [`crate::Server`], without its thread.
pub struct SimulatedServer {
    shared: Arc<SharedServer>,
}

impl SimulatedServer {
    /// Creates a server with one target.
    ///
    /// # Errors
    /// Fails if a LUN is not allowed.
    pub fn new(
        units: Arc<Units>,
        limits: ServerLimits,
        options: TargetOptions,
        luns: &[(u16, Arc<Disk>)],
    ) -> Result<SimulatedServer, ServerError> {
        let shared = Arc::new(SharedServer::new(units, limits));
        let portals: Vec<Portal> = options.portals.clone();
        let name = options.name.clone();
        let target = IscsiTarget::new(options, &portals, &shared.units, Arc::default());
        target
            .add_luns(&shared.units, luns)
            .map_err(ServerError::Lun)?;
        lock(&shared.targets).insert(name, Arc::new(target));
        Ok(SimulatedServer { shared })
    }

    /// Accepts a connection and places it on this worker.
    pub fn accept(&self, worker: &mut Worker, socket: OwnedFd, peer: SocketAddr, at: SocketAddr) {
        let number = self.shared.next_number();
        begin(worker, self.shared.clone(), number, socket, (peer, at));
    }

    /// Advances the clock by one second.
    pub fn second_passed(&self) {
        for handle in self.shared.second_passed() {
            handle.send(Connection::check_deadlines);
        }
    }

    /// Returns the number of connections.
    pub fn connections(&self) -> usize {
        self.shared.connection_count()
    }

    /// Ends all connections, as a stopping daemon does.
    pub fn dismiss(&self) {
        for handle in self.shared.connections() {
            handle.send(|connection, io| connection.dismiss(io, "the daemon is shutting down"));
        }
    }
}
