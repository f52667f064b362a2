//! virtio-blk and virtio-scsi over vhost-user, for rates above those of real guest drivers.
//!
//! A [`VhostSession`] connects and shares memory; each [`VhostQueue`] is one virtqueue (`queue`) with a split or packed ring (`split`,
//! `packed`), owned by one thread.

mod interrupts;
mod packed;
mod queue;
mod split;

use anyhow::{Context, Result, bail, ensure};
use scsi::cdb;
use vhost_frontend::{
    FrontEnd, Layout, LogMemory, Options, QueueOptions, ScsiDone, ScsiQueue, ScsiRequest, feature,
};

pub use interrupts::Waker;
pub use queue::VhostQueue;

use super::{Demand, DeviceInfo, DriverOptions, Kind, Subject, scsi_end};

/// `VIRTIO_SCSI_S_BAD_TARGET`.
const BAD_TARGET: u8 = 3;
/// Initial response, never written by a device.
const UNTOUCHED: u8 = 0xff;
/// Size of a slot in bytes, four cache lines: header, response and descriptor table.
const SLOT: usize = 256;
/// First request queue of a SCSI controller.
const SCSI_FIRST_QUEUE: u16 = 2;

mod blk_feature {
    pub const READ_ONLY: u64 = 1 << 5;
    pub const BLOCK_SIZE: u64 = 1 << 6;
    pub const MQ: u64 = 1 << 12;
    pub const DISCARD: u64 = 1 << 13;
}

/// A connection to a device.
pub struct VhostSession {
    front_end: FrontEnd,
    kind: Kind,
    info: DeviceInfo,
    used: u16,
    pid: Option<u32>,
    /// Dirty log of all queues, if the subject has one.
    log: Option<LogMemory>,
}

/// Returns true if no process listens on the socket.
fn is_deserted(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionRefused, NotFound};
    matches!(error.kind(), ConnectionRefused | NotFound)
}

impl VhostSession {
    /// Connects with memory for `queues` queues with this demand.
    pub fn open(
        subject: &Subject,
        options: &DriverOptions,
        demand: Demand,
        queues: usize,
    ) -> Result<VhostSession> {
        let per_queue = (1usize << 17) + usize::from(demand.slots) * (SLOT + stride(demand));
        // The capacity query of a controller uses a queue. Its memory stays allocated.
        let memory = ((8usize << 20) + queues * per_queue).next_multiple_of(2 << 20);
        let wanted = Options {
            packed: options.packed,
            event_idx: options.event_idx,
            memory,
            huge_pages: options.huge_pages,
            ..Options::default()
        };
        let place = subject.path.display();
        let mut front_end = FrontEnd::connect(&subject.path, &wanted).map_err(|error| {
            let hint = match &error {
                vhost_frontend::Error::Io(io) if is_deserted(io) => {
                    ": no daemon listens there; hint: start it, or correct the path"
                }
                _ => "",
            };
            anyhow::Error::new(error).context(format!("cannot drive the device at {place}{hint}"))
        })?;
        ensure!(
            !options.packed || front_end.has(feature::RING_PACKED),
            "the device at {place} has no packed rings: it does not offer VIRTIO_F_RING_PACKED"
        );
        let peer = rustix::net::sockopt::socket_peercred(front_end.channel().stream()).ok();
        // The kernel reports the process that listens. For sockets of a service manager that is not the device.
        let listener = peer.map(|peer| peer.pid.as_raw_nonzero().get().unsigned_abs());
        let pid = subject.pid.or(listener.filter(|pid| *pid != 1));
        let info = match subject.kind {
            Kind::VhostScsi { target, lun } => scsi_info(&mut front_end, target, lun)
                .with_context(|| format!("target {target} LUN {lun} of {place}"))?,
            _ => blk_info(&front_end).with_context(|| {
                format!(
                    "{place} has no configuration; hint: for a virtio-scsi device, give vhost-user-scsi:SOCKET"
                )
            })?,
        };
        let log = match subject.dirty_log {
            true => Some(start_log(&front_end).with_context(|| format!("{place}: dirty log"))?),
            false => None,
        };
        Ok(VhostSession {
            log,
            front_end,
            kind: subject.kind,
            info,
            used: 0,
            pid,
        })
    }

    /// Returns the properties of the device.
    pub fn info(&self) -> DeviceInfo {
        self.info
    }

    /// Returns true if the device has disconnected.
    pub fn is_closed(&self) -> bool {
        self.front_end.channel().is_closed()
    }

    /// Returns the process ID of the device, if known.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// Prepares another queue.
    pub fn queue(&mut self, options: &DriverOptions, demand: Demand) -> Result<Box<VhostQueue>> {
        ensure!(
            self.used < self.info.queues,
            "the device has only {} queues",
            self.info.queues
        );
        let first = match self.kind {
            Kind::VhostScsi { .. } => SCSI_FIRST_QUEUE,
            _ => 0,
        };
        let index = first + self.used;
        self.used += 1;
        let queue = VhostQueue::start(
            &mut self.front_end,
            self.kind,
            self.info,
            index,
            options,
            demand,
        );
        let logged = queue.and_then(|queue| {
            if self.log.is_some() {
                self.front_end.log_ring(index, queue.layout(), true)?;
            }
            Ok(queue)
        });
        logged.with_context(|| format!("queue {index}"))
    }
}

/// Starts to log written pages, as QEMU does during a live migration.
fn start_log(front_end: &FrontEnd) -> Result<LogMemory> {
    let regions = front_end.memory().regions().iter();
    let end = regions.map(|region| region.spec.guest_address + region.spec.size);
    let log = LogMemory::below(end.max().unwrap_or(0))?;
    front_end.set_log(&log)?;
    front_end.log_data(true)?;
    Ok(log)
}

/// Describes a failed capacity query.
fn refused(done: &ScsiDone) -> String {
    let (response, status) = (done.response, done.status);
    if response == UNTOUCHED {
        return "no response; hint: for a virtio-blk device, give vhost-user-blk:SOCKET".to_owned();
    }
    let end = match response {
        0 => scsi_end(status, &done.sense),
        BAD_TARGET => "response 3: no such target".to_owned(),
        _ => format!("response {response}"),
    };
    format!("READ CAPACITY(16) ends with {end}")
}

fn stride(demand: Demand) -> usize {
    (demand.largest as usize).next_multiple_of(4096)
}

fn le<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    let part = bytes.get(at..at + N).and_then(|part| part.try_into().ok());
    part.context("the configuration is too short")
}

fn blk_info(front_end: &FrontEnd) -> Result<DeviceInfo> {
    let config = front_end.config(
        0,
        if front_end.has(blk_feature::DISCARD) {
            40
        } else {
            36
        },
    )?;
    let sectors = u64::from_le_bytes(le(&config, 0)?);
    let block_size = if front_end.has(blk_feature::BLOCK_SIZE) {
        u32::from_le_bytes(le(&config, 20)?).max(512)
    } else {
        512
    };
    let queues = if front_end.has(blk_feature::MQ) {
        u16::from_le_bytes(le(&config, 34)?).max(1)
    } else {
        1
    };
    Ok(DeviceInfo {
        capacity: sectors.checked_mul(512).context("invalid capacity")?,
        block_size,
        queues: queues.min(front_end.queue_count().max(1)),
        read_only: front_end.has(blk_feature::READ_ONLY),
        discard_max: if front_end.has(blk_feature::DISCARD) {
            u64::from(u32::from_le_bytes(le(&config, 36)?)) << 9
        } else {
            0
        },
    })
}

/// Queries the logical unit on a queue that is stopped afterwards.
fn scsi_info(front_end: &mut FrontEnd, target: u8, lun: u16) -> Result<DeviceInfo> {
    const TRIES: usize = 8;
    let options = QueueOptions::default();
    let mut queue = ScsiQueue::start(
        front_end,
        SCSI_FIRST_QUEUE,
        &options,
        1,
        4096,
        Layout::Separate,
    )?;
    let mut answer = [0; 32];
    // READ CAPACITY(16); each unit attention is reported once.
    let cdb = cdb::read_capacity_16();
    let request = ScsiRequest {
        target,
        lun,
        tag: 1,
        cdb: &cdb,
    };
    let mut last = None;
    for _ in 0..TRIES {
        let done = queue.run(&request, &[], &mut answer)?;
        let good = done.response == 0 && done.status == 0;
        last = Some(done);
        if good {
            break;
        }
    }
    match last {
        Some(done) if done.response == 0 && done.status == 0 => {}
        Some(done) => bail!(refused(&done)),
        None => bail!("no request is pending"),
    }
    front_end.stop_queue(SCSI_FIRST_QUEUE)?;
    let mut last_block = [0; 8];
    last_block.copy_from_slice(&answer[..8]);
    let block_size = u32::from_be_bytes([answer[8], answer[9], answer[10], answer[11]]);
    ensure!(
        block_size >= 512 && block_size.is_power_of_two(),
        "blocks of {block_size} bytes"
    );
    let capacity = u64::from_be_bytes(last_block)
        .checked_add(1)
        .and_then(|blocks| blocks.checked_mul(u64::from(block_size)));
    // The device's queue count includes the control and event queues.
    let queues = front_end.queue_count().saturating_sub(SCSI_FIRST_QUEUE);
    Ok(DeviceInfo {
        capacity: capacity.context("invalid capacity")?,
        block_size,
        queues: queues.max(1),
        read_only: false,
        discard_max: u64::MAX,
    })
}
