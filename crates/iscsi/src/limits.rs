//! Limits on the resources that a peer can consume.

/// Limits per connection or session, enforced on reception.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of additional header segments in one PDU; the field allows at most 1,020.
    pub additional_header_bytes: usize,
    /// Bytes of one text negotiation sequence over all its PDUs (RFC 7143, 6.1 requires at least 8,192).
    pub text_bytes: usize,
    /// Login Requests on one connection before the full feature phase.
    pub login_requests: u32,
    /// Non-immediate commands in progress per session; the window argument of [`crate::session::SessionTable::new`].
    pub commands_per_session: u32,
    /// Immediate commands in progress on one connection, in addition to the window.
    pub immediate_commands: u32,
    /// Task management functions in progress on one connection.
    pub task_management_functions: usize,
    /// Bytes of parked requests that wait for their CmdSN on one connection, without command data.
    pub parked_bytes: usize,
    /// Outstanding R2Ts per task, also if more were negotiated.
    pub outstanding_r2t: u32,
    /// Missing ranges of one R2T at a time when Data-Out PDUs arrive out of order.
    pub gaps_per_r2t: usize,
    /// Bytes of unacknowledged read data stored per connection for retransmission, at error recovery level 1 and above.
    pub retransmission_bytes: usize,
    /// Unanswered NOP-In pings.
    pub outstanding_pings: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits {
            additional_header_bytes: 1020,
            text_bytes: 16 * 1024,
            login_requests: 64,
            commands_per_session: 128,
            immediate_commands: 16,
            task_management_functions: 16,
            parked_bytes: 64 * 1024,
            outstanding_r2t: 8,
            gaps_per_r2t: 64,
            retransmission_bytes: 16 << 20,
            outstanding_pings: 4,
        }
    }
}
