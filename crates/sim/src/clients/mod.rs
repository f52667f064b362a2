//! Clients of the disks: virtio-blk drivers, virtio-scsi drivers and iSCSI initiators.

pub mod blk;
pub mod guest;
pub mod initiator;
pub mod scsi;

use reactor::Worker;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    /// Durable on completion, if the client can request that.
    Write {
        durable: bool,
    },
    Flush,
    /// Writes zeroes.
    Zero {
        unmap: bool,
    },
    /// Discards the blocks. The model treats them as zeroes.
    Discard,
    /// Writes the second half of the data if the blocks equal the first half.
    CompareAndWrite,
    /// PERSISTENT RESERVE OUT; its parameter list is the data.
    Reserve(ReserveOut),
}

/// PERSISTENT RESERVE OUT commands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveOut {
    /// REGISTER AND IGNORE EXISTING KEY; 0 unregisters.
    Register {
        key: u64,
    },
    Reserve {
        kind: u8,
    },
    Release {
        kind: u8,
    },
    Clear,
    /// Removes the registrations with this key, and their reservation.
    Preempt {
        kind: u8,
        key: u64,
    },
}

impl ReserveOut {
    /// Returns the service action, and the byte with scope and type (SPC-4, tables 213 and 214).
    pub fn codes(self) -> (u8, u8) {
        match self {
            ReserveOut::Reserve { kind } => (1, kind),
            ReserveOut::Release { kind } => (2, kind),
            ReserveOut::Clear => (3, 0),
            ReserveOut::Preempt { kind, .. } => (4, kind),
            ReserveOut::Register { .. } => (6, 0),
        }
    }

    /// Returns the parameter list for a nexus that is registered with the key `own`.
    pub fn list(self, own: u64) -> Vec<u8> {
        let (key, action_key) = match self {
            ReserveOut::Register { key } => (0, key),
            ReserveOut::Preempt { key, .. } => (own, key),
            _ => (own, 0),
        };
        let mut list = Vec::from(key.to_be_bytes());
        list.extend(action_key.to_be_bytes());
        list.extend([0; 8]);
        list
    }
}

/// A request of the simulation.
#[derive(Clone, Debug)]
pub struct Request {
    /// Identifies the request.
    pub token: u64,
    pub disk: usize,
    pub kind: Kind,
    pub lba: u64,
    pub blocks: u64,
    /// Data to write.
    pub data: Vec<u8>,
}

/// Result of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Good,
    /// Not executed, may be retried: unit attention, TASK SET FULL or BUSY.
    NotNow(String),
    /// Rejected because of a reservation.
    Conflict,
    /// The compared data differs; nothing was written.
    Miscompare,
    Failed(String),
}

/// Reasons for failures without injected faults. The command may or may not have taken effect.
pub const LOST: &str = "the connection is lost";
pub const ABORTED: &str = "the task is aborted";

pub struct Done {
    pub token: u64,
    pub outcome: Outcome,
    pub data: Vec<u8>,
}

/// A client.
pub trait Client {
    fn name(&self) -> String;

    /// Returns true if the client supports this operation.
    fn can(&self, kind: Kind) -> bool;

    /// Sends a request. Returns false if no slot is free.
    fn submit(&mut self, request: &Request) -> bool;

    /// Aborts requests in flight; they fail once the abort is answered. Returns a description for the trace.
    fn abort(&mut self, _seed: u64) -> Option<String> {
        None
    }

    /// Resets logical units. Returns a description for the trace, and the disks on which requests of other clients may end without a
    /// response.
    fn reset(&mut self, _seed: u64) -> Option<(String, Vec<usize>)> {
        None
    }

    /// Another client has reset a disk: requests to it may never be answered.
    fn may_lose(&mut self, _disk: usize) {}

    /// Adds completed requests to `done`.
    fn poll(&mut self, done: &mut Vec<Done>);

    /// Returns the worker that serves this client.
    fn worker(&self) -> usize;

    /// Breaks the connection, if there is one. Requests in flight fail.
    fn disconnect(&mut self) {}

    /// Returns true if the client must reconnect.
    fn is_gone(&self) -> bool {
        false
    }

    /// Returns true if requests in flight survive a kill of the daemon and are served in its next life.
    fn survives(&self) -> bool {
        false
    }

    /// Violates the specification.
    fn misbehave(&mut self, _seed: u64) {}

    /// Detaches from the daemon.
    fn detach(&mut self);

    /// Attaches to a new daemon.
    fn attach(&mut self, worker: &mut Worker);
}
