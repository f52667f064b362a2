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
    /// What was compared is not there: nothing was done.
    Miscompare,
    Failed(String),
}

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
