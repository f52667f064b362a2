//! Limits of the resources that peers can occupy.

use std::time::Duration;

/// Limits of a server.
#[derive(Clone, Debug)]
pub struct ServerLimits {
    /// Maximum number of connections, including handshakes.
    pub connections: usize,
    /// Number of these connections that are reserved for Unix sockets: TCP clients cannot occupy them.
    pub unix_connections: usize,
    /// Maximum number of connections from one IP address.
    pub connections_per_address: usize,
    /// Maximum number of handshakes. One more ends the oldest.
    pub half_open: usize,
    /// Time allowed for a handshake.
    pub handshake_time: Duration,
    /// Time for an incomplete request and for unsent output, besides the time of a transfer at the minimum rate of a slow network. A slower
    /// connection is dropped.
    pub silent_time: Duration,
    /// `silent_time` of a connection that uses more than `floor_bytes` while another connection waits for memory.
    pub shortage_time: Duration,
    /// Maximum number of requests in flight of one connection. Further requests stay in the socket.
    pub requests: usize,
    /// Maximum bytes of request data of one connection. Further requests wait for memory; one request may exceed the limit.
    pub data_bytes: usize,
    /// Maximum bytes of request data of all connections. One request of each export may exceed the limit. An export uses at most three
    /// quarters of the memory that the others leave.
    pub total_bytes: usize,
    /// Bytes of request data that each connection may use even if the others use all shared memory.
    pub floor_bytes: usize,
    /// Bytes of queued output above which a connection neither receives nor parses input.
    pub output_bytes: u64,
}

impl ServerLimits {
    /// Returns the part of `total_bytes` that is not reserved for single connections.
    pub(crate) fn leased_bytes(&self) -> usize {
        let floors = self.floor_bytes.saturating_mul(self.connections);
        self.total_bytes.saturating_sub(floors)
    }
}

impl Default for ServerLimits {
    fn default() -> Self {
        ServerLimits {
            connections: 512,
            unix_connections: 16,
            connections_per_address: 128,
            half_open: 64,
            handshake_time: Duration::from_secs(15),
            silent_time: Duration::from_secs(60),
            shortage_time: Duration::from_secs(10),
            requests: 128,
            data_bytes: 32 << 20,
            total_bytes: 512 << 20,
            floor_bytes: 256 << 10,
            output_bytes: 8 << 20,
        }
    }
}
