//! Drivers: submit requests to a device as a guest's driver would.
//!
//! A [`Session`] belongs to the thread that opens it; each [`PendingQueue`] of it moves to one worker thread and becomes a [`Device`] there: one
//! queue with a fixed number of slots. No allocation or lock per request: constant parts are written once per slot (`vhost`), shared
//! indices once per batch. Trusts the device for memory safety; an unexpected completion ends the run. Tests: `tests/`.

mod file;
mod iscsi;
mod nbd;
mod outgoing;
mod process;
mod subject;
mod vhost;

use std::time::Duration;

use anyhow::{Result, bail};
use scsi::cdb::{self, cdb10, cdb16};
use scsi::{Cdb, opcode};

pub use file::{block_size, prepare as prepare_file};
pub use iscsi::{SessionKeys, UnitAddress};
pub use nbd::parse_address;
pub use subject::{FORMS, Kind, Subject};
pub use vhost::Waker;

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IoKind {
    /// Read.
    Read,
    /// Write.
    Write,
    /// Flush written data to stable storage.
    Flush,
    /// Discard.
    Trim,
}

/// A completed request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Done {
    /// Slot of the request.
    pub slot: u16,
    /// Success, as far as known before [`Device::settled`].
    pub ok: bool,
}

/// Returns the CDB of a request: READ(10) and similar, or their 16-byte forms if `wide`.
#[inline]
fn scsi_cdb(ask: IoKind, wide: bool, block: u64, blocks: u32) -> Cdb {
    let [short, long] = match ask {
        IoKind::Read => [opcode::READ_10, opcode::READ_16],
        IoKind::Write => [opcode::WRITE_10, opcode::WRITE_16],
        IoKind::Flush => [opcode::SYNCHRONIZE_CACHE_10, opcode::SYNCHRONIZE_CACHE_16],
        IoKind::Trim => return cdb::unmap(block, blocks).0,
    };
    match wide {
        true => cdb16(long, block, blocks),
        false => cdb10(short, block as u32, blocks as u16),
    }
}

/// Describes the status of a SCSI command for messages.
fn scsi_end(status: u8, sense: &[u8]) -> String {
    // Fixed format sense data: SPC-5, 4.4.3.
    let (Some(key), Some(&[code, qualifier])) = (sense.get(2), sense.get(12..14)) else {
        return format!("status {status:02x}h");
    };
    let hint = match (code, qualifier) {
        (0x25, 0) => ": no such unit",
        _ => "",
    };
    let key = key & 0xf;
    format!("status {status:02x}h, sense {key:x}h/{code:02x}h/{qualifier:02x}h{hint}")
}

/// Options of a driver.
#[derive(Clone, Debug)]
pub struct DriverOptions {
    /// A vhost-user driver polls instead of waiting for interrupts.
    pub polling: bool,
    /// The file driver polls.
    pub poll_files: bool,
    /// Maximum number of queues; `None`: all queues of the device.
    pub queues: Option<u16>,
    /// Use indirect descriptors if the device supports them, as Linux does.
    pub indirect: bool,
    /// Use VIRTIO_F_EVENT_IDX if the device supports it, as Linux does.
    pub event_idx: bool,
    /// Use packed rings (VIRTIO_F_RING_PACKED) instead of split rings.
    pub packed: bool,
    /// Back guest memory with huge pages.
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

/// Requirements for one queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Demand {
    /// Number of requests in flight.
    pub slots: u16,
    /// Largest request in bytes.
    pub largest: u32,
    /// Writes contain zeroes.
    pub zeroes: bool,
}

/// Properties of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Capacity in bytes.
    pub capacity: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// Number of usable queues.
    pub queues: u16,
    /// The device refuses writes.
    pub read_only: bool,
    /// Maximum length of a discard in bytes; 0 if the device advertises none. A unit without support fails the first discard.
    pub discard_max: u64,
}

/// An open subject.
pub enum Session {
    /// A device on a vhost-user socket.
    Vhost(Box<vhost::VhostSession>),
    /// A file or a block device of this machine.
    File(file::FileSession),
    /// A logical unit of an iSCSI target.
    Iscsi(iscsi::IscsiSession),
    /// An export of an NBD server.
    Nbd(nbd::NbdSession),
}

impl Session {
    /// Opens a subject with memory for `queues` queues with this demand.
    pub fn open(
        subject: &Subject,
        options: &DriverOptions,
        demand: Demand,
        queues: usize,
        direct: Option<bool>,
    ) -> Result<Session> {
        match subject.kind {
            Kind::File => {
                let direct = direct.unwrap_or(subject.direct);
                Ok(Session::File(file::FileSession::open(subject, direct)?))
            }
            _ if direct == Some(false) => bail!(
                "direct=0 is not possible: the driver of {} has no page cache",
                subject.name
            ),
            Kind::VhostBlk | Kind::VhostScsi { .. } => {
                let session = vhost::VhostSession::open(subject, options, demand, queues)?;
                Ok(Session::Vhost(Box::new(session)))
            }
            Kind::Iscsi => iscsi::IscsiSession::open(subject).map(Session::Iscsi),
            Kind::Nbd => nbd::NbdSession::open(subject).map(Session::Nbd),
        }
    }

    /// Returns the properties of the device.
    pub fn info(&self) -> DeviceInfo {
        match self {
            Session::Vhost(session) => session.info(),
            Session::File(session) => session.info(),
            Session::Iscsi(session) => session.info(),
            Session::Nbd(session) => session.info(),
        }
    }

    /// Returns the process ID of the server, if known.
    pub fn pid(&self) -> Option<u32> {
        match self {
            Session::Vhost(session) => session.pid(),
            Session::Iscsi(session) => session.pid(),
            Session::Nbd(session) => session.pid(),
            Session::File(_) => None,
        }
    }

    /// Returns true if the device has disconnected. An iSCSI or NBD connection reports that by itself.
    pub fn is_closed(&self) -> bool {
        match self {
            Session::Vhost(session) => session.is_closed(),
            Session::File(_) | Session::Iscsi(_) | Session::Nbd(_) => false,
        }
    }

    /// Prepares another queue.
    pub fn queue(&mut self, options: &DriverOptions, demand: Demand) -> Result<PendingQueue> {
        match self {
            Session::Vhost(session) => session.queue(options, demand).map(PendingQueue::Vhost),
            Session::File(session) => session.queue(options, demand).map(PendingQueue::File),
            Session::Iscsi(session) => match session.multi(demand) {
                Some(queue) => queue.map(PendingQueue::Multi),
                None => session.queue(demand).map(PendingQueue::Iscsi),
            },
            Session::Nbd(session) => session.queue(demand).map(PendingQueue::Nbd),
        }
    }
}

/// A queue on its way to its driver thread.
pub enum PendingQueue {
    /// A vring.
    Vhost(Box<vhost::VhostQueue>),
    /// An open file.
    File(file::PendingFileQueue),
    /// A session with one connection.
    Iscsi(Box<iscsi::IscsiQueue>),
    /// A session with several connections.
    Multi(Box<iscsi::MultiQueue>),
    /// A connection to an NBD server.
    Nbd(Box<nbd::NbdQueue>),
}

impl PendingQueue {
    /// Starts the queue on its driver thread.
    pub fn start(self) -> Result<Device> {
        Ok(match self {
            PendingQueue::Vhost(queue) => Device::Vhost(queue),
            PendingQueue::File(seed) => Device::File(Box::new(seed.start()?)),
            PendingQueue::Iscsi(queue) => Device::Iscsi(queue),
            PendingQueue::Multi(queue) => Device::Multi(queue),
            PendingQueue::Nbd(queue) => Device::Nbd(queue),
        })
    }

    /// Returns a handle that wakes the thread while it waits.
    pub fn waker(&self) -> Result<Option<Waker>> {
        match self {
            PendingQueue::Vhost(queue) => queue.waker().map(Some),
            PendingQueue::File(_)
            | PendingQueue::Iscsi(_)
            | PendingQueue::Multi(_)
            | PendingQueue::Nbd(_) => Ok(None),
        }
    }
}

/// One queue, owned by its driver thread.
pub enum Device {
    /// A vring.
    Vhost(Box<vhost::VhostQueue>),
    /// An io_uring.
    File(Box<file::FileQueue>),
    /// A session with one connection.
    Iscsi(Box<iscsi::IscsiQueue>),
    /// A session with several connections.
    Multi(Box<iscsi::MultiQueue>),
    /// A connection to an NBD server.
    Nbd(Box<nbd::NbdQueue>),
}

macro_rules! each {
    ($device:expr, $queue:ident => $call:expr) => {
        match $device {
            Device::Vhost($queue) => $call,
            Device::File($queue) => $call,
            Device::Iscsi($queue) => $call,
            Device::Multi($queue) => $call,
            Device::Nbd($queue) => $call,
        }
    };
}

impl Device {
    /// Places a request in a free slot. The device sees it after [`Device::publish`].
    #[inline]
    pub fn submit(&mut self, slot: u16, ask: IoKind, offset: u64, length: u32) {
        each!(self, queue => queue.submit(slot, ask, offset, length));
    }

    /// Makes submitted requests visible to the device.
    #[inline]
    pub fn publish(&mut self) -> Result<()> {
        each!(self, queue => queue.publish())
    }

    /// Appends completed requests. [`Device::settled`] returns their results.
    #[inline]
    pub fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        each!(self, queue => queue.reap(done))
    }

    /// Returns the result of a completed request. It must be called before the slot is used again. The response in a vring is read only
    /// now: its cache line arrives from the device's core while earlier requests are handled.
    #[inline]
    pub fn settled(&self, done: Done) -> Done {
        match self {
            Device::Vhost(queue) => Done {
                ok: queue.has_succeeded(done.slot),
                ..done
            },
            Device::File(_) | Device::Iscsi(_) | Device::Multi(_) | Device::Nbd(_) => done,
        }
    }

    /// Waits for a completion, a wake-up, or approximately `limit`.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        each!(self, queue => queue.wait(limit))
    }

    /// Writes the data of a slot.
    pub fn write_data(&mut self, slot: u16, data: &[u8]) {
        each!(self, queue => queue.write_data(slot, data));
    }

    /// Reads the data of a slot.
    pub fn read_data(&self, slot: u16, into: &mut [u8]) {
        each!(self, queue => queue.read_data(slot, into));
    }

    /// Returns the numbers of kicks and interrupts.
    pub fn signals(&mut self) -> (u64, u64) {
        match self {
            Device::Vhost(queue) => queue.signals(),
            Device::File(_) | Device::Iscsi(_) | Device::Multi(_) | Device::Nbd(_) => (0, 0),
        }
    }
}
