//! Limits of the resources that peers can occupy.

use std::time::Duration;

/// Limits of a server.
#[derive(Clone, Debug)]
pub struct ServerLimits {
    /// Maximum number of connections, including handshakes.
    pub connections: usize,
    /// Maximum number of connections from one IP address.
    pub connections_per_address: usize,
    /// Maximum number of handshakes. One more ends the oldest.
    pub half_open: usize,
    /// Time allowed for a handshake.
    pub handshake_time: Duration,
    /// Time without transfer after which a connection is dropped that has unsent output or an incomplete request.
    pub silent_time: Duration,
    /// Maximum number of requests in flight of one connection. Further requests stay in the socket.
    pub requests: usize,
    /// Maximum bytes of request data of one connection. Further requests wait for memory; one request may exceed the limit.
    pub data_bytes: usize,
    /// Bytes of queued output above which a connection neither receives nor parses input.
    pub output_bytes: u64,
}

impl Default for ServerLimits {
    fn default() -> Self {
        ServerLimits {
            connections: 512,
            connections_per_address: 128,
            half_open: 64,
            handshake_time: Duration::from_secs(15),
            silent_time: Duration::from_secs(60),
            requests: 128,
            data_bytes: 32 << 20,
            output_bytes: 8 << 20,
        }
    }
}
