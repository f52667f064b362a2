//! How much a peer may make us hold or do. One place, so that a reader can add it up.

/// Bounds on one connection or session; all are enforced where the bytes come in.
#[derive(Clone, Debug)]
pub struct Limits {
    /// Bytes of additional header segments in one PDU; 1,020 is the most that the field can say.
    pub additional_header_bytes: usize,
    /// Bytes of one text negotiation sequence, all its PDUs together (RFC 7143, 6.1 asks for at least 8,192).
    pub text_bytes: usize,
    /// Login Requests on one connection before it must have reached the full feature phase.
    pub login_requests: u32,
    /// Non-immediate commands that a session may have in progress: the window to give to [`crate::session::SessionTable::new`].
    pub commands_per_session: u32,
    /// Immediate commands in progress on one connection, beside the window.
    pub immediate_commands: u32,
    /// Task management functions in progress on one connection.
    pub task_management_functions: usize,
    /// Bytes held for requests that wait for their CmdSN on one connection, command data not counted.
    pub parked_bytes: usize,
    /// R2Ts outstanding for one task, whatever was negotiated.
    pub outstanding_r2t: u32,
    /// Pieces of one R2T that may be missing at a time when data PDUs come out of order.
    pub gaps_per_r2t: usize,
    /// Bytes of read data that one connection keeps, from error recovery level 1 on, until the initiator acknowledges them.
    pub kept_bytes: usize,
    /// NOP-In pings without an answer.
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
            kept_bytes: 16 << 20,
            outstanding_pings: 4,
        }
    }
}
