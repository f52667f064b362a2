//! Brings requests to a device, as its driver would.
//!
//! A [`Session`] belongs to the thread that opens it; each [`Seed`] of it goes to one worker thread and becomes a
//! [`Device`] there: one queue with a fixed number of slots. Per request nothing is allocated or locked: whatever
//! can be is written once per slot (`vhost`), and shared indices once per batch. Trusts its device as far as memory
//! goes; an answer to nothing ends the run. Tests: `tests/`.

mod file;
mod iscsi;
mod subject;
mod vhost;

use std::os::fd::OwnedFd;
use std::time::Duration;

use anyhow::{Result, bail};

pub use file::{block_size, prepare as prepare_file};
pub use iscsi::{Place as IscsiPlace, SessionKeys};
pub use subject::{FORMS, Kind, Subject};

/// What a device is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Make what was written durable.
    Flush,
    /// Discard.
    Trim,
}

/// A request that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Its slot.
    pub slot: u16,
    /// It did what was asked, as far as is known before [`Device::settled`].
    pub ok: bool,
}

/// How a SCSI command ended, for people.
fn scsi_end(status: u8, sense: &[u8]) -> String {
    // Fixed format: SPC-5, 4.4.3.
    let (Some(key), Some(&[code, qualifier])) = (sense.get(2), sense.get(12..14)) else {
        return format!("status {status:02x}h");
    };
    let hint = match (code, qualifier) {
        (0x25, 0) => ": there is no such unit",
        _ => "",
    };
    let key = key & 0xf;
    format!("status {status:02x}h, sense {key:x}h/{code:02x}h/{qualifier:02x}h{hint}")
}

/// How a driver behaves.
#[derive(Clone, Debug)]
pub struct DriverOptions {
    /// A vhost-user driver looks again and again instead of waiting to be told.
    pub polling: bool,
    /// So does the driver of files.
    pub poll_files: bool,
    /// Most queues that are used; `None`: as many as the device has.
    pub queues: Option<u16>,
    /// Requests lie in tables of their own, as Linux does it where the device can.
    pub indirect: bool,
    /// Tells the other side by index when it wants to be told, as Linux does it where the device can.
    pub event_idx: bool,
    /// Rings are packed (VIRTIO_F_RING_PACKED), else split.
    pub packed: bool,
    /// Guest memory consists of huge pages.
    pub huge_pages: bool,
}

impl Default for DriverOptions {
    fn default() -> Self {
        DriverOptions {
            polling: true,
            poll_files: false,
            queues: None,
            indirect: true,
            event_idx: true,
            packed: false,
            huge_pages: false,
        }
    }
}

/// What is wanted of one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Requests in flight.
    pub slots: u16,
    /// Largest request in bytes.
    pub largest: u32,
    /// Writes carry zeroes.
    pub zeroes: bool,
}

/// What a device is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Bytes.
    pub capacity: u64,
    /// Logical block in bytes.
    pub block_size: u32,
    /// Queues that may be used.
    pub queues: u16,
    /// Refuses writes.
    pub read_only: bool,
    /// Bytes of the largest discard, 0 where the device offers none. A unit that offers none says so to the first.
    pub discard_max: u64,
}

/// A subject that is open.
pub enum Session {
    /// Over a vhost-user socket.
    Vhost(Box<vhost::VhostSession>),
    /// A file or a block device of this machine.
    File(file::FileSession),
    /// A unit of an iSCSI target.
    Iscsi(iscsi::IscsiSession),
}

impl Session {
    /// Opens a subject with room for `queues` queues of such a demand.
    pub fn open(
        subject: &Subject,
        options: &DriverOptions,
        demand: Demand,
        queues: usize,
        direct: Option<bool>,
    ) -> Result<Session> {
        match subject.kind {
            Kind::VhostBlk | Kind::VhostScsi { .. } => {
                if direct == Some(false) {
                    bail!("direct=0: a driver of {} has no page cache", subject.name);
                }
                let session = vhost::VhostSession::open(subject, options, demand, queues)?;
                Ok(Session::Vhost(Box::new(session)))
            }
            Kind::File => {
                let direct = direct.unwrap_or(subject.direct);
                Ok(Session::File(file::FileSession::open(subject, direct)?))
            }
            Kind::Iscsi => {
                if direct == Some(false) {
                    bail!("direct=0: a driver of {} has no page cache", subject.name);
                }
                iscsi::IscsiSession::open(subject).map(Session::Iscsi)
            }
        }
    }

    /// What it is.
    pub fn info(&self) -> DeviceInfo {
        match self {
            Session::Vhost(session) => session.info(),
            Session::File(session) => session.info(),
            Session::Iscsi(session) => session.info(),
        }
    }

    /// The process at the other end, where there is one.
    pub fn pid(&self) -> Option<u32> {
        match self {
            Session::Vhost(session) => session.pid(),
            Session::Iscsi(session) => session.pid(),
            Session::File(_) => None,
        }
    }

    /// Has the device gone away? A connection of an initiator says so itself.
    pub fn is_closed(&self) -> bool {
        match self {
            Session::Vhost(session) => session.is_closed(),
            Session::File(_) | Session::Iscsi(_) => false,
        }
    }

    /// One more queue.
    pub fn queue(&mut self, options: &DriverOptions, demand: Demand) -> Result<Seed> {
        match self {
            Session::Vhost(session) => session.queue(options, demand).map(Seed::Vhost),
            Session::File(session) => session.queue(options, demand).map(Seed::File),
            Session::Iscsi(session) => match session.multi(demand) {
                Some(queue) => queue.map(Seed::Multi),
                None => session.queue(demand).map(Seed::Iscsi),
            },
        }
    }
}

/// A queue on its way to the thread that drives it.
pub enum Seed {
    /// A vring.
    Vhost(Box<vhost::VhostQueue>),
    /// An open file.
    File(file::FileSeed),
    /// A connection.
    Iscsi(Box<iscsi::IscsiQueue>),
    /// A session of several connections.
    Multi(Box<iscsi::MultiQueue>),
}

impl Seed {
    /// On the thread that drives it.
    pub fn start(self) -> Result<Device> {
        Ok(match self {
            Seed::Vhost(queue) => Device::Vhost(queue),
            Seed::File(seed) => Device::File(Box::new(seed.start()?)),
            Seed::Iscsi(queue) => Device::Iscsi(queue),
            Seed::Multi(queue) => Device::Multi(queue),
        })
    }

    /// What wakes its thread while it waits.
    pub fn waker(&self) -> Result<Option<OwnedFd>> {
        match self {
            Seed::Vhost(queue) => queue.waker().map(Some),
            Seed::File(_) | Seed::Iscsi(_) | Seed::Multi(_) => Ok(None),
        }
    }
}

/// One queue, in the hands of its thread.
pub enum Device {
    /// A vring.
    Vhost(Box<vhost::VhostQueue>),
    /// An io_uring.
    File(Box<file::FileQueue>),
    /// A connection.
    Iscsi(Box<iscsi::IscsiQueue>),
    /// A session of several connections.
    Multi(Box<iscsi::MultiQueue>),
}

macro_rules! each {
    ($device:expr, $queue:ident => $call:expr) => {
        match $device {
            Device::Vhost($queue) => $call,
            Device::File($queue) => $call,
            Device::Iscsi($queue) => $call,
            Device::Multi($queue) => $call,
        }
    };
}

impl Device {
    /// Puts a request into a slot that is free. The device sees it after [`Device::publish`].
    #[inline]
    pub fn submit(&mut self, slot: u16, ask: Ask, offset: u64, length: u32) {
        each!(self, queue => queue.submit(slot, ask, offset, length));
    }

    /// Shows the device what was submitted.
    #[inline]
    pub fn publish(&mut self) -> Result<()> {
        each!(self, queue => queue.publish())
    }

    /// Appends what has come back, of which [`Device::settled`] tells how it went.
    #[inline]
    pub fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        each!(self, queue => queue.reap(done))
    }

    /// How a request that has come back went, to be asked before its slot is used again. A vring's is read only now: by the
    /// time that those before it have been dealt with, its line has come from the device's core.
    #[inline]
    pub fn settled(&self, done: Done) -> Done {
        match self {
            Device::Vhost(queue) => Done {
                ok: queue.did_well(done.slot),
                ..done
            },
            Device::File(_) | Device::Iscsi(_) | Device::Multi(_) => done,
        }
    }

    /// Waits until something has come back, or somebody wakes it, or about the limit.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        each!(self, queue => queue.wait(limit))
    }

    /// Changes a slot's data.
    pub fn write_data(&mut self, slot: u16, data: &[u8]) {
        each!(self, queue => queue.write_data(slot, data));
    }

    /// Looks at a slot's data.
    pub fn read_data(&self, slot: u16, into: &mut [u8]) {
        each!(self, queue => queue.read_data(slot, into));
    }

    /// How often the device was kicked, and how often it interrupted.
    pub fn signals(&mut self) -> (u64, u64) {
        match self {
            Device::Vhost(queue) => queue.signals(),
            Device::File(_) | Device::Iscsi(_) | Device::Multi(_) => (0, 0),
        }
    }
}
