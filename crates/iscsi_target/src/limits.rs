//! Limits of the resources that peers can occupy in this transport. The protocol's own limits are in `iscsi::Limits`.

use std::time::Duration;

/// Limits of a server.
#[derive(Clone, Debug)]
pub struct ServerLimits {
    /// Maximum number of TCP connections.
    pub connections: usize,
    /// Maximum number of connections that are not logged in to a target, including discovery sessions. One more ends the oldest.
    pub half_open: usize,
    /// Maximum number of sessions.
    pub sessions: usize,
    /// Maximum number of connections per session. MaxConnections is negotiated down to it.
    pub connections_per_session: u16,
    /// Time allowed for a login.
    pub login_time: Duration,
    /// Time without transfer after which a connection is pinged.
    pub idle_time: Duration,
    /// Time without transfer after which a connection with an unanswered ping or unsent output is dropped.
    pub silent_time: Duration,
    /// Maximum bytes of command data of one session's connections. Further commands wait for memory. Unsolicited data is accepted beyond
    /// it: at most FirstBurstLength for each command of the window.
    pub data_bytes: usize,
    /// Maximum bytes of command data of all connections. Each connection may use a small part at any time. One command of each target may
    /// exceed the limit. A target uses at most three quarters of the memory that the others leave.
    pub total_bytes: usize,
    /// Bytes of queued output above which a connection neither receives nor parses input.
    pub output_bytes: u64,
    /// Limits within a connection.
    pub protocol: iscsi::Limits,
}

/// Maximum bytes of command data that each connection may use even if others use all shared memory.
const FLOOR_BYTES_MAX: usize = 256 << 10;

impl ServerLimits {
    /// Returns the bytes of command data that each connection may use even if others use all shared memory. All connections of a session
    /// have at most half of its memory in this way, and all connections at most half of the server's.
    pub(crate) fn floor_bytes(&self) -> usize {
        let of_session = self.data_bytes / (2 * usize::from(self.connections_per_session).max(1));
        let of_server = self.total_bytes / (2 * self.connections.max(1));
        FLOOR_BYTES_MAX.min(of_session).min(of_server)
    }

    /// Returns the part of `total_bytes` that is not reserved for single connections.
    pub(crate) fn leased_bytes(&self) -> usize {
        self.total_bytes - self.floor_bytes() * self.connections
    }
}

impl Default for ServerLimits {
    fn default() -> Self {
        ServerLimits {
            connections: 1024,
            half_open: 128,
            sessions: 512,
            connections_per_session: 16,
            login_time: Duration::from_secs(15),
            idle_time: Duration::from_secs(15),
            // Initiators without a thread of their own may not answer for up to a minute.
            silent_time: Duration::from_secs(60),
            data_bytes: 32 << 20,
            total_bytes: 512 << 20,
            output_bytes: 8 << 20,
            protocol: iscsi::Limits::default(),
        }
    }
}
