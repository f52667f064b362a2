//! What peers may make this transport hold. The protocol's own bounds are in `iscsi::Limits`.

use std::time::Duration;

/// Bounds of a server.
#[derive(Clone, Debug)]
pub struct ServerLimits {
    /// TCP connections at a time.
    pub connections: usize,
    /// Of these, connections that have not logged in to a target, discovery sessions too; one more ends the oldest of them.
    pub half_open: usize,
    /// Sessions at a time.
    pub sessions: usize,
    /// Connections of one session: MaxConnections is negotiated down to it.
    pub connections_per_session: u16,
    /// Time to log in.
    pub login_time: Duration,
    /// A connection from which nothing came for so long is pinged.
    pub idle_time: Duration,
    /// A connection that is pinged, or owed output, and on which nothing moves for so long is dropped.
    pub silent_time: Duration,
    /// Bytes of command data that the connections of one session may hold together before the next command waits for
    /// memory. Unsolicited data is taken beyond it: FirstBurstLength for each command of the window, at most.
    pub data_bytes: usize,
    /// Bytes of output that one connection may have queued before nothing more is received from it, or looked at.
    pub output_bytes: u64,
    /// Bounds inside a connection.
    pub protocol: iscsi::Limits,
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
            // An initiator that does nothing else for a minute, as those without a thread of their own may, stays.
            silent_time: Duration::from_secs(60),
            data_bytes: 32 << 20,
            output_bytes: 8 << 20,
            protocol: iscsi::Limits::default(),
        }
    }
}
