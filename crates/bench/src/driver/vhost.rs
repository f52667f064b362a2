//! virtio-blk and virtio-scsi over vhost-user, written for rates that no guest's driver reaches.
//!
//! A slot has its descriptor, its header and its tables for good; a request changes the address on the disk in the header,
//! and a table only where length or direction changes. What the driver writes, what the device writes and what
//! stays as it is lie apart, so that few cache lines travel per request. Split rings. Owned by one thread.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::atomic::{Ordering, fence};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use front_end::{Area, Cuts, FrontEnd, Options, QueueOptions, ScsiQueue, ScsiRequest, feature};
use guest_memory::RingMemory;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use virtqueue::driver::RingLayout;
use virtqueue::layout::{
    DESCRIPTOR_SIZE, Descriptor, INDEX, INDIRECT, NEXT, NO_INTERRUPT, NO_NOTIFY, RING,
    USED_ELEMENT_SIZE, UsedElement, WRITE, available_event, passes_event, used_event,
};
use zerocopy::little_endian::{U16, U64};

use super::{Ask, Demand, DeviceInfo, Done, DriverOptions, Kind, Subject};
use crate::workload::Random;

/// Bytes of slots' own memory, for each of them. Like lies beside like: all headers, then all answers, then all tables.
const SLOT: usize = 256;
/// virtio-blk: headers of 16 bytes, statuses of one.
const BLK_HEADER: u32 = 16;
const BLK_SECTOR: usize = 8;
/// virtio-scsi: requests of 51 bytes, a cache line each; responses of 108 bytes, two lines each.
const SCSI_REQUEST: u32 = 51;
const SCSI_REQUEST_ROOM: usize = 64;
const SCSI_CDB: usize = 19;
const SCSI_RESPONSE_BYTES: u32 = 108;
const SCSI_RESPONSE_ROOM: usize = 128;
/// Bytes 10 and 11 of the response: SCSI status, then how virtio-scsi fared.
const SCSI_STATUS: usize = 10;
/// Three descriptors, in a cache line that stays as it is.
const TABLE: usize = 64;
/// Descriptors of a request: header, data, status.
const PARTS: usize = 3;

/// First request queue of a SCSI controller.
const SCSI_FIRST_QUEUE: u16 = 2;
/// Rings are no larger than any device takes.
const RING_SIZE_MAX: u16 = 1024;
const RING_SIZE_MIN: u16 = 128;

mod blk_feature {
    pub const READ_ONLY: u64 = 1 << 5;
    pub const BLOCK_SIZE: u64 = 1 << 6;
    pub const MQ: u64 = 1 << 12;
}

/// A connection to a device.
pub struct VhostSession {
    front_end: FrontEnd,
    kind: Kind,
    info: DeviceInfo,
    used: u16,
    pid: Option<u32>,
}

impl VhostSession {
    /// Connects with memory for `queues` queues of such a demand.
    pub fn open(
        subject: &Subject,
        options: &DriverOptions,
        demand: Demand,
        queues: usize,
    ) -> Result<VhostSession> {
        let per_queue = (1usize << 17) + usize::from(demand.slots) * (SLOT + stride(demand));
        // A controller is first asked for its capacity, over a queue that stays in memory.
        let memory = ((8usize << 20) + queues * per_queue).next_multiple_of(2 << 20);
        let wanted = Options {
            event_idx: options.event_idx,
            memory,
            huge_pages: options.huge_pages,
            ..Options::default()
        };
        let place = subject.path.display();
        let mut front_end = FrontEnd::connect(&subject.path, &wanted)
            .with_context(|| format!("cannot drive the device at {place}"))?;
        let peer = rustix::net::sockopt::socket_peercred(front_end.channel().stream()).ok();
        let pid = subject
            .pid
            .or(peer.map(|peer| peer.pid.as_raw_nonzero().get().unsigned_abs()));
        let info = match subject.kind {
            Kind::VhostScsi { target, lun } => scsi_info(&mut front_end, target, lun)
                .with_context(|| format!("target {target} LUN {lun} of {place}"))?,
            _ => blk_info(&front_end).with_context(|| format!("configuration of {place}"))?,
        };
        Ok(VhostSession {
            front_end,
            kind: subject.kind,
            info,
            used: 0,
            pid,
        })
    }

    /// What the device is.
    pub fn info(&self) -> DeviceInfo {
        self.info
    }

    /// The process at the other end.
    pub fn pid(&self) -> Option<u32> {
        self.pid
    }

    /// One more queue.
    pub fn queue(&mut self, options: &DriverOptions, demand: Demand) -> Result<Box<VhostQueue>> {
        ensure!(
            self.used < self.info.queues,
            "the device has {} queues, not more",
            self.info.queues
        );
        let first = match self.kind {
            Kind::VhostScsi { .. } => SCSI_FIRST_QUEUE,
            _ => 0,
        };
        let index = first + self.used;
        self.used += 1;
        VhostQueue::start(
            &mut self.front_end,
            self.kind,
            self.info,
            index,
            options,
            demand,
        )
        .with_context(|| format!("queue {index}"))
    }
}

fn stride(demand: Demand) -> usize {
    (demand.largest as usize).next_multiple_of(4096)
}

fn le<const N: usize>(bytes: &[u8], at: usize) -> Result<[u8; N]> {
    let part = bytes.get(at..at + N).and_then(|part| part.try_into().ok());
    part.context("the configuration is too short")
}

fn blk_info(front_end: &FrontEnd) -> Result<DeviceInfo> {
    let config = front_end.config(0, 36)?;
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
        capacity: sectors.checked_mul(512).context("impossible capacity")?,
        block_size,
        queues: queues.min(front_end.queue_count().max(1)),
        read_only: front_end.has(blk_feature::READ_ONLY),
    })
}

/// Asks the logical unit over a queue that is stopped again.
fn scsi_info(front_end: &mut FrontEnd, target: u8, lun: u16) -> Result<DeviceInfo> {
    const TRIES: usize = 8;
    let options = QueueOptions::default();
    let mut queue = ScsiQueue::start(front_end, SCSI_FIRST_QUEUE, &options, 1, 4096, Cuts::Usual)?;
    let mut answer = [0; 32];
    // READ CAPACITY(16); unit attentions are told once each.
    let cdb = [0x9e, 0x10, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 32, 0, 0];
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
        Some(done) => bail!(
            "READ CAPACITY(16) ends with response {} status {} sense {:02x?}",
            done.response,
            done.status,
            done.sense
        ),
        None => bail!("nothing was asked"),
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
    // Control and event queue are counted in where the device counts.
    let queues = front_end.queue_count().saturating_sub(SCSI_FIRST_QUEUE);
    Ok(DeviceInfo {
        capacity: capacity.context("impossible capacity")?,
        block_size,
        queues: queues.max(1),
        read_only: false,
    })
}

/// What a slot's table says at the moment.
type Shape = (Ask, u32);

/// One vring and its slots.
pub struct VhostQueue {
    is_scsi: bool,
    lun: [u8; 4],
    block_shift: u32,
    ring_size: u16,
    event_idx: bool,
    indirect: bool,
    polling: bool,
    descriptors: RingMemory,
    available: RingMemory,
    used: RingMemory,
    slots: RingMemory,
    slots_address: u64,
    data: Area,
    stride: usize,
    shapes: Box<[Option<Shape>]>,
    in_flight: Box<[bool]>,
    next_available: u16,
    published: u16,
    next_used: u16,
    call: OwnedFd,
    epoll: OwnedFd,
    kick: OwnedFd,
    kicks: u64,
    interrupts: u64,
}

impl VhostQueue {
    fn start(
        front_end: &mut FrontEnd,
        kind: Kind,
        info: DeviceInfo,
        index: u16,
        options: &DriverOptions,
        demand: Demand,
    ) -> Result<Box<VhostQueue>> {
        let indirect = options.indirect && front_end.has(feature::INDIRECT_DESC);
        let entries = if indirect {
            usize::from(demand.slots)
        } else {
            PARTS * usize::from(demand.slots)
        };
        ensure!(
            entries <= usize::from(RING_SIZE_MAX),
            "{} requests in flight do not fit into a ring of {RING_SIZE_MAX}",
            demand.slots
        );
        let ring_size = (entries as u16).next_power_of_two().max(RING_SIZE_MIN);
        let bytes = RingLayout::at(0, ring_size, false).end as usize;
        let layout = RingLayout::at(front_end.allocate(bytes, 4096)?.address, ring_size, false);
        let count = usize::from(demand.slots);
        let slots = front_end.allocate(SLOT * count, 4096)?;
        let stride = stride(demand);
        let data = front_end.allocate(stride * count, 4096)?;
        let table = front_end.table()?;
        let area = |address, bytes: usize| table.ring(address, bytes as u64);
        use virtqueue::layout::{available_ring_size, descriptor_area_size, used_ring_size};
        let lun = match kind {
            Kind::VhostScsi { target, lun } => {
                let lun = lun.to_be_bytes();
                [1, target, lun[0] | 0x40, lun[1]]
            }
            _ => [0; 4],
        };
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let mut queue = Box::new(VhostQueue {
            is_scsi: matches!(kind, Kind::VhostScsi { .. }),
            lun,
            block_shift: info.block_size.trailing_zeros(),
            ring_size,
            event_idx: front_end.has(feature::EVENT_IDX),
            indirect,
            polling: options.polling,
            descriptors: area(layout.descriptor_area, descriptor_area_size(ring_size))?,
            available: area(layout.driver_area, available_ring_size(ring_size))?,
            used: area(layout.device_area, used_ring_size(ring_size))?,
            slots: area(slots.address, SLOT * count)?,
            slots_address: slots.address,
            data,
            stride,
            shapes: vec![None; count].into(),
            in_flight: vec![false; count].into(),
            next_available: 0,
            published: 0,
            next_used: 0,
            call: eventfd(0, flags)?,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            kick: eventfd(0, flags)?,
            kicks: 0,
            interrupts: 0,
        });
        queue.lay_out(demand);
        let edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(
            &queue.epoll,
            &queue.call,
            epoll::EventData::new_u64(0),
            edges,
        )?;
        let (call, kick) = (queue.call.as_fd(), queue.kick.as_fd());
        front_end.begin_ring(index, &layout, 0, call, kick)?;
        Ok(queue)
    }

    /// Writes what stays as it is, and touches all memory.
    fn lay_out(&mut self, demand: Demand) {
        if self.polling {
            self.available.store_release_u16(0, NO_INTERRUPT);
            // As far away as can be.
            let never = used_event(self.ring_size);
            self.available.store_release_u16(never, u16::MAX);
        }
        let mut noise = Random::new(demand.slots.into());
        let mut page = vec![0; self.stride];
        for slot in 0..demand.slots {
            if !demand.zeroes {
                for chunk in page.chunks_exact_mut(8) {
                    chunk.copy_from_slice(&noise.draw().to_le_bytes());
                }
            }
            self.data.write(usize::from(slot) * self.stride, &page);
            let (header, answer) = (self.header_at(slot), self.answer_at(slot));
            if self.is_scsi {
                self.slots.write(header, self.lun);
                self.slots.write(header + 8, U64::new(slot.into()));
                self.slots.write(answer + SCSI_STATUS, [0xffu8; 2]);
            } else {
                self.slots.write(answer, 0xffu8);
            }
            if self.indirect {
                self.describe_indirect(slot, 0);
            }
        }
    }

    /// Where a slot's header lies among the slots' memory.
    #[inline]
    fn header_at(&self, slot: u16) -> usize {
        let room = if self.is_scsi {
            SCSI_REQUEST_ROOM
        } else {
            BLK_HEADER as usize
        };
        usize::from(slot) * room
    }

    /// Where what the device answers lies.
    #[inline]
    fn answer_at(&self, slot: u16) -> usize {
        let room = if self.is_scsi { SCSI_RESPONSE_ROOM } else { 1 };
        self.in_flight.len() * SCSI_REQUEST_ROOM + usize::from(slot) * room
    }

    /// Where its table lies.
    fn table_at(&self, slot: u16) -> usize {
        self.in_flight.len() * (SCSI_REQUEST_ROOM + SCSI_RESPONSE_ROOM) + usize::from(slot) * TABLE
    }

    fn describe_indirect(&self, slot: u16, parts: usize) {
        let address = self.slots_address + self.table_at(slot) as u64;
        let descriptor = Descriptor {
            address: address.into(),
            length: ((parts * DESCRIPTOR_SIZE) as u32).into(),
            flags: INDIRECT.into(),
            next: 0.into(),
        };
        self.descriptors
            .write(usize::from(slot) * DESCRIPTOR_SIZE, descriptor);
    }

    /// Address and length of each part of a request, and whether the device writes it.
    fn parts(&self, slot: u16, ask: Ask, length: u32) -> ([(u64, u32, bool); PARTS], usize) {
        let first = self.slots_address + self.header_at(slot) as u64;
        let answer = self.slots_address + self.answer_at(slot) as u64;
        let data = self.data.address + (usize::from(slot) * self.stride) as u64;
        let (header, answer) = if self.is_scsi {
            (
                (first, SCSI_REQUEST, false),
                (answer, SCSI_RESPONSE_BYTES, true),
            )
        } else {
            ((first, BLK_HEADER, false), (answer, 1, true))
        };
        match (ask, self.is_scsi) {
            // What the device writes comes last; a SCSI response comes before the data (virtio 1.3, 5.6.6.1).
            (Ask::Read, true) => ([header, answer, (data, length, true)], 3),
            (Ask::Read, false) => ([header, (data, length, true), answer], 3),
            (Ask::Write, _) => ([header, (data, length, false), answer], 3),
            (Ask::Flush, _) => ([header, answer, answer], 2),
        }
    }

    #[cold]
    fn reshape(&mut self, slot: u16, ask: Ask, length: u32) {
        let (parts, count) = self.parts(slot, ask, length);
        let first = if self.indirect {
            0
        } else {
            slot * PARTS as u16
        };
        let table = self.table_at(slot);
        for (at, (address, length, write)) in parts.into_iter().take(count).enumerate() {
            let last = at + 1 == count;
            let next = if last { 0 } else { NEXT };
            let descriptor = Descriptor {
                address: address.into(),
                length: length.into(),
                flags: (next | if write { WRITE } else { 0 }).into(),
                next: if last { 0 } else { first + at as u16 + 1 }.into(),
            };
            if self.indirect {
                self.slots.write(table + at * DESCRIPTOR_SIZE, descriptor);
            } else {
                let at = (usize::from(first) + at) * DESCRIPTOR_SIZE;
                self.descriptors.write(at, descriptor);
            }
        }
        if self.indirect {
            self.describe_indirect(slot, count);
        }
        if !self.is_scsi {
            let kind: u32 = match ask {
                Ask::Read => 0,
                Ask::Write => 1,
                Ask::Flush => 4,
            };
            let base = self.header_at(slot);
            self.slots.write(base, kind.to_le_bytes());
            self.slots.write(base + 4, 0u32.to_le_bytes());
        }
        self.shapes[usize::from(slot)] = Some((ask, length));
    }

    /// READ(10) and its like where they reach, else the ones with 16 bytes.
    #[inline]
    fn write_command(&mut self, base: usize, ask: Ask, offset: u64, length: u32) {
        let at = base + SCSI_CDB;
        let block = offset >> self.block_shift;
        let blocks = length >> self.block_shift;
        let mut cdb = [0u8; 16];
        match (u32::try_from(block), u16::try_from(blocks)) {
            (Ok(block), Ok(blocks)) => {
                cdb[0] = match ask {
                    Ask::Read => 0x28,
                    Ask::Write => 0x2a,
                    Ask::Flush => 0x35,
                };
                cdb[2..6].copy_from_slice(&block.to_be_bytes());
                cdb[7..9].copy_from_slice(&blocks.to_be_bytes());
            }
            _ => {
                cdb[0] = match ask {
                    Ask::Read => 0x88,
                    Ask::Write => 0x8a,
                    Ask::Flush => 0x91,
                };
                cdb[2..10].copy_from_slice(&block.to_be_bytes());
                cdb[10..14].copy_from_slice(&blocks.to_be_bytes());
            }
        }
        self.slots.write(at, cdb);
    }

    /// Puts a request into a slot.
    #[inline]
    pub fn submit(&mut self, slot: u16, ask: Ask, offset: u64, length: u32) {
        let base = self.header_at(slot);
        if self.shapes[usize::from(slot)] != Some((ask, length)) {
            self.reshape(slot, ask, length);
        }
        if self.is_scsi {
            self.write_command(base, ask, offset, length);
        } else {
            let sector = if ask == Ask::Flush { 0 } else { offset >> 9 };
            self.slots.write(base + BLK_SECTOR, U64::new(sector));
        }
        self.in_flight[usize::from(slot)] = true;
        let head = if self.indirect {
            slot
        } else {
            slot * PARTS as u16
        };
        let place = usize::from(self.next_available & (self.ring_size - 1));
        self.available.write(RING + 2 * place, U16::new(head));
        self.next_available = self.next_available.wrapping_add(1);
    }

    /// One store of the index, and one kick where the device wants it.
    #[inline]
    pub fn publish(&mut self) -> Result<()> {
        let (old, new) = (self.published, self.next_available);
        if old == new {
            return Ok(());
        }
        self.available.store_release_u16(INDEX, new);
        self.published = new;
        fence(Ordering::SeqCst);
        let wanted = if self.event_idx {
            let event = self.used.load_relaxed_u16(available_event(self.ring_size));
            passes_event(event, old, new)
        } else {
            self.used.load_relaxed_u16(0) & NO_NOTIFY == 0
        };
        if wanted {
            self.kicks += 1;
            // A full counter means that a kick is pending anyway.
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).ok();
        }
        Ok(())
    }

    /// Takes what has come back, a batch at a time.
    #[inline]
    pub fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        let end = self.used.load_acquire_u16(INDEX);
        if end == self.next_used {
            return Ok(());
        }
        let first = done.len();
        while self.next_used != end {
            let place = usize::from(self.next_used & (self.ring_size - 1));
            let element: UsedElement = self.used.read(RING + USED_ELEMENT_SIZE * place);
            self.next_used = self.next_used.wrapping_add(1);
            let head = element.id.get();
            let slot = if self.indirect {
                head
            } else {
                head / PARTS as u32
            };
            let known = usize::try_from(slot)
                .ok()
                .and_then(|slot| self.in_flight.get_mut(slot));
            match known {
                Some(in_flight) if *in_flight => *in_flight = false,
                _ => bail!("the device gave back head {head}, which is not in flight"),
            }
            self.slots.prefetch(self.answer_at(slot as u16));
            done.push(Done {
                slot: slot as u16,
                ok: true,
            });
        }
        // By now the lines that the device wrote are on their way.
        for done in &mut done[first..] {
            let answer = self.answer_at(done.slot);
            done.ok = if self.is_scsi {
                self.slots.read::<[u8; 2]>(answer + SCSI_STATUS) == [0, 0]
            } else {
                self.slots.read::<u8>(answer) == 0
            };
        }
        Ok(())
    }

    /// Arms the interrupt and waits for it.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        if self.polling {
            std::thread::yield_now();
            return Ok(());
        }
        if self.event_idx {
            let place = used_event(self.ring_size);
            self.available.store_release_u16(place, self.next_used);
        } else {
            self.available.store_release_u16(0, 0);
        }
        fence(Ordering::SeqCst);
        if self.used.load_acquire_u16(INDEX) == self.next_used {
            // Edge-triggered: the counter need not be read, and adds up to the number of interrupts.
            let limit = (limit < Duration::from_secs(1)).then(|| Timespec::try_from(limit));
            let limit = limit.and_then(Result::ok);
            let mut events = [const { MaybeUninit::uninit() }; 1];
            match epoll::wait(&self.epoll, &mut events, limit.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => bail!("cannot wait for an interrupt: {errno}"),
            }
        }
        if !self.event_idx {
            self.available.store_release_u16(0, NO_INTERRUPT);
        }
        Ok(())
    }

    /// Its interrupt, for whoever wants to wake the thread.
    pub fn waker(&self) -> Result<OwnedFd> {
        Ok(self.call.try_clone()?)
    }

    /// Kicks and interrupts so far.
    pub fn signals(&mut self) -> (u64, u64) {
        let mut count = [0; 8];
        // An error means that there was none since the last time.
        if rustix::io::read(&self.call, &mut count).is_ok() {
            self.interrupts += u64::from_ne_bytes(count);
        }
        (self.kicks, self.interrupts)
    }

    /// Changes a slot's data.
    pub fn write_data(&self, slot: u16, data: &[u8]) {
        self.data.write(usize::from(slot) * self.stride, data);
    }

    /// Looks at a slot's data.
    pub fn read_data(&self, slot: u16, into: &mut [u8]) {
        self.data.read(usize::from(slot) * self.stride, into);
    }
}
