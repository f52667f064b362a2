//! Those who use the disks: drivers of virtio-blk and virtio-scsi, and initiators of iSCSI.

pub mod blk;
pub mod guest;
pub mod initiator;
pub mod scsi;

use reactor::Worker;

/// What is done with blocks of a disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Read,
    /// Durable by itself, where a client can say so.
    Write {
        durable: bool,
    },
    Flush,
    /// The blocks become zeroes.
    Zero {
        unmap: bool,
    },
    /// They do, for whoever wants to know what is there no more.
    Discard,
    /// They become what comes with it if they are what comes with it first.
    CompareAndWrite,
    /// PERSISTENT RESERVE OUT; its parameter list is the data.
    Reserve(ReserveOut),
}

/// What is done with reservations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReserveOut {
    /// REGISTER AND IGNORE EXISTING KEY; 0: not any more.
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
    /// Whoever has this key is registered no more, and does not hold it.
    Preempt {
        kind: u8,
        key: u64,
    },
}

impl ReserveOut {
    /// Service action, and scope with type (SPC-4, tables 213 and 214).
    pub fn codes(self) -> (u8, u8) {
        match self {
            ReserveOut::Reserve { kind } => (1, kind),
            ReserveOut::Release { kind } => (2, kind),
            ReserveOut::Clear => (3, 0),
            ReserveOut::Preempt { kind, .. } => (4, kind),
            ReserveOut::Register { .. } => (6, 0),
        }
    }

    /// The parameter list of whoever is registered with a key.
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
    /// Names it.
    pub token: u64,
    pub disk: usize,
    pub kind: Kind,
    pub lba: u64,
    pub blocks: u64,
    /// What is written.
    pub data: Vec<u8>,
}

/// How it ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Outcome {
    Good,
    /// It was not done, and comes again if it is wanted: a unit attention, or too much at once.
    NotNow(String),
    /// A reservation forbids it: nothing was done.
    Conflict,
    /// What was compared is not there: nothing was done.
    Miscompare,
    Failed(String),
}

/// Why requests fail though nothing went wrong on purpose: nobody knows then whether they were done.
pub const LOST: &str = "the connection is lost";
pub const ABORTED: &str = "the task is aborted";

pub struct Done {
    pub token: u64,
    pub outcome: Outcome,
    pub data: Vec<u8>,
}

/// One of them.
pub trait Client {
    fn name(&self) -> String;

    /// Can it do this to its disks?
    fn can(&self, kind: Kind) -> bool;

    /// Sends a request; false where it has no room for one.
    fn submit(&mut self, request: &Request) -> bool;

    /// Has requests in flight aborted; which come back as failed once that is answered. What it says of that.
    fn abort(&mut self, _seed: u64) -> Option<String> {
        None
    }

    /// Resets logical units. What it says of that, and the disks of which requests of others may end without an answer.
    fn reset(&mut self, _seed: u64) -> Option<(String, Vec<usize>)> {
        None
    }

    /// Somebody else has reset a disk: its requests may never be answered.
    fn may_lose(&mut self, _disk: usize) {}

    /// What has ended.
    fn poll(&mut self, done: &mut Vec<Done>);

    /// The worker that serves it.
    fn worker(&self) -> usize;

    /// Its connection breaks, where it has one. What was in flight comes back as failed.
    fn disconnect(&mut self) {}

    /// Whether it has to be connected again.
    fn is_gone(&self) -> bool {
        false
    }

    /// The daemon was killed. Does it know of the requests in flight, and serve them in its next life? Then they stay.
    fn survives(&self) -> bool {
        false
    }

    /// A driver that does what no driver may.
    fn misbehave(&mut self, _seed: u64) {}

    /// The daemon is gone.
    fn detach(&mut self);

    /// The daemon of before is gone; this one serves it from now on.
    fn attach(&mut self, worker: &mut Worker);
}
