//! One virtqueue: slots, their memory layout, and notifications.
//!
//! Header, descriptor table and data of a slot have fixed addresses. A request changes only the disk address in the header; the table
//! changes only with length or direction. Each request has its own cache lines, with Linux's layout: virtio-blk's header and status in
//! one line, virtio-scsi's request and response in two. The driver writes all of these lines for each request, like Linux, which clears a
//! command first. Constant parts are in separate lines, so that those are not transferred. The ring is `split` or `packed`.

use std::mem::MaybeUninit;
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use anyhow::{Result, bail, ensure};
use fastrand::Rng;
use guest_memory::RingMemory;
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use scsi::cdb::{self, UNMAP_LIST};
use vhost_frontend::{Area, FrontEnd, feature};
use virtqueue::PACKED_START;
use virtqueue::driver::RingLayout;
use virtqueue::layout::{DESCRIPTOR_SIZE, Descriptor, NEXT, WRITE};
use zerocopy::big_endian::{U32, U64};
use zerocopy::little_endian;

use super::interrupts::{Interrupts, Waker};
use super::packed::PackedSlots;
use super::split::SplitSlots;
use super::{SLOT, stride};
use crate::driver::{Demand, DeviceInfo, Done, DriverOptions, IoKind, Kind, scsi_cdb};

/// virtio-blk layout: 16-byte header followed by the status byte, in the middle of a slot's first line.
const BLK_REQUEST_AT: usize = 16;
const BLK_HEADER: u32 = 16;
const BLK_SECTOR: usize = 8;
/// virtio-scsi layout: 51-byte request in a slot's first line. The 108-byte response starts at an odd offset, because Linux reserves 59
/// bytes for a request without padding; a response with status GOOD touches only the second line.
const SCSI_REQUEST_AT: usize = 8;
const SCSI_REQUEST: u32 = 51;
const SCSI_CDB: usize = 19;
/// Offset of the logical block address in a CDB.
const CDB_BLOCK: usize = 2;
const SCSI_RESPONSE_AT: usize = SCSI_REQUEST_AT + 59;
const SCSI_RESPONSE_BYTES: u32 = 108;
/// Bytes 10 and 11 of the response: SCSI status and virtio-scsi response code.
const SCSI_STATUS: usize = 10;
/// Table of three descriptors, in the constant last line of a slot.
const TABLE_AT: usize = SLOT - 64;
const _: () = assert!(SCSI_RESPONSE_AT + SCSI_RESPONSE_BYTES as usize <= TABLE_AT);
/// Discard ranges, separate from all slots: a segment of 16 bytes (virtio 1.3, 5.2.6), or UNMAP's parameter list with one descriptor
/// (SBC-3, 5.30).
const RANGE: usize = 32;
const BLK_RANGE: u32 = 16;
/// Initial status, never written by a device: VIRTIO_BLK_S_* and VIRTIO_SCSI_S_* are smaller.
const UNANSWERED: u8 = 0xff;
/// Descriptors of a request: header, data, status.
pub const PARTS: usize = 3;

/// Limits of the ring size, which all devices support.
const RING_SIZE_MAX: u16 = 1024;
const RING_SIZE_MIN: u16 = 128;

/// A part of a request: address, length, and whether the device writes it.
pub type Part = (u64, u32, bool);

/// A request for either kind of ring.
pub enum Chain<'a> {
    /// Indirect table of a slot: address and number of descriptors.
    Table(u64, usize),
    /// Descriptors in the ring itself.
    Parts(&'a [Part]),
}

/// A split or packed ring.
enum Vring {
    Split(SplitSlots),
    Packed(PackedSlots),
}

macro_rules! either {
    ($vring:expr, $slots:ident => $call:expr) => {
        match $vring {
            Vring::Split($slots) => $call,
            Vring::Packed($slots) => $call,
        }
    };
}

/// Writes the block address into a CDB.
#[inline(always)]
fn put_block(slots: &RingMemory, cdb: usize, wide: bool, block: u64) {
    if wide {
        slots.write(cdb + CDB_BLOCK, U64::new(block));
    } else {
        slots.write(cdb + CDB_BLOCK, U32::new(block as u32));
    }
}

/// Operation and length described by a slot's table.
type Shape = (IoKind, u32);

/// One vring and its slots.
pub struct VhostQueue {
    is_scsi: bool,
    lun: [u8; 4],
    block_shift: u32,
    /// Some block addresses or counts do not fit a CDB of 10 bytes.
    wide: bool,
    indirect: bool,
    polling: bool,
    vring: Vring,
    slots: RingMemory,
    slots_address: u64,
    data: Area,
    ranges: Area,
    stride: usize,
    shapes: Box<[Option<Shape>]>,
    in_flight: Box<[bool]>,
    /// Slot that completed last. With few requests in flight, it is usually also the next one.
    last: u16,
    interrupts: Interrupts,
    epoll: OwnedFd,
    kick: OwnedFd,
    kicks: u64,
    layout: RingLayout,
}

impl VhostQueue {
    pub fn start(
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
        let packed = front_end.has(feature::RING_PACKED);
        let bytes = RingLayout::at(0, ring_size, packed).end as usize;
        let ring = front_end.allocate(bytes, 4096)?;
        let layout = RingLayout::at(ring.address, ring_size, packed);
        let count = usize::from(demand.slots);
        let slots = front_end.allocate(SLOT * count, 4096)?;
        let stride = stride(demand);
        let data = front_end.allocate(stride * count, 4096)?;
        let ranges = front_end.allocate(RANGE * count, 64)?;
        let table = front_end.table()?;
        let event_idx = front_end.has(feature::EVENT_IDX);
        let (vring, base) = if packed {
            let slots = PackedSlots::new(&layout, &table, event_idx, demand.slots)?;
            (Vring::Packed(slots), PACKED_START)
        } else {
            let slots = SplitSlots::new(&layout, &table, event_idx, indirect)?;
            (Vring::Split(slots), 0)
        };
        let lun = match kind {
            Kind::VhostScsi { target, lun } => {
                let lun = lun.to_be_bytes();
                [1, target, lun[0] | 0x40, lun[1]]
            }
            _ => [0; 4],
        };
        let block_shift = info.block_size.trailing_zeros();
        let flags = EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK;
        let mut queue = Box::new(VhostQueue {
            is_scsi: matches!(kind, Kind::VhostScsi { .. }),
            lun,
            block_shift,
            wide: info.capacity >> block_shift > 1 << 32
                || demand.largest >> block_shift > u32::from(u16::MAX),
            indirect,
            polling: options.polling,
            vring,
            slots: table.ring(slots.address, (SLOT * count) as u64)?,
            slots_address: slots.address,
            data,
            ranges,
            stride,
            shapes: vec![None; count].into(),
            in_flight: vec![false; count].into(),
            last: 0,
            interrupts: Interrupts::new()?,
            epoll: epoll::create(epoll::CreateFlags::CLOEXEC)?,
            kick: eventfd(0, flags)?,
            kicks: 0,
            layout,
        });
        queue.lay_out(demand);
        let edges = epoll::EventFlags::IN | epoll::EventFlags::ET;
        epoll::add(
            &queue.epoll,
            &queue.interrupts,
            epoll::EventData::new_u64(0),
            edges,
        )?;
        let (call, kick) = (queue.interrupts.as_fd(), queue.kick.as_fd());
        front_end.begin_ring(index, &queue.layout, base, call, kick)?;
        Ok(queue)
    }

    /// Returns the layout of the ring.
    pub(super) fn layout(&self) -> &RingLayout {
        &self.layout
    }

    /// Writes the constant parts and touches all memory.
    fn lay_out(&mut self, demand: Demand) {
        if self.polling {
            match &mut self.vring {
                Vring::Split(slots) => slots.ring.never_interrupt(),
                Vring::Packed(slots) => slots.ring.disable_interrupts(),
            }
        }
        let mut noise = Rng::with_seed(demand.slots.into());
        let mut page = vec![0; self.stride];
        for slot in 0..demand.slots {
            if !demand.zeroes {
                noise.fill(&mut page);
            }
            self.data.write(usize::from(slot) * self.stride, &page);
            if self.is_scsi {
                let header = self.header_at(slot);
                self.slots.write(header, self.lun);
                self.slots
                    .write(header + 8, little_endian::U64::new(slot.into()));
            }
        }
    }

    /// Returns the offset of a slot's header in the slot memory.
    #[inline]
    fn header_at(&self, slot: u16) -> usize {
        let within = if self.is_scsi {
            SCSI_REQUEST_AT
        } else {
            BLK_REQUEST_AT
        };
        usize::from(slot) * SLOT + within
    }

    #[inline]
    fn answer_at(&self, slot: u16) -> usize {
        if self.is_scsi {
            usize::from(slot) * SLOT + SCSI_RESPONSE_AT
        } else {
            self.header_at(slot) + BLK_HEADER as usize
        }
    }

    fn table_at(&self, slot: u16) -> usize {
        usize::from(slot) * SLOT + TABLE_AT
    }

    /// Clears the response of a slot, so that a device that writes none is detected.
    #[inline]
    fn clear_answer(&self, slot: u16) {
        let answer = self.answer_at(slot);
        if self.is_scsi {
            self.slots.write(answer + SCSI_STATUS, [UNANSWERED; 2]);
        } else {
            self.slots.write(answer, UNANSWERED);
        }
    }

    /// Returns address, length and direction of each part of a request.
    fn parts(&self, slot: u16, ask: IoKind, length: u32) -> ([Part; PARTS], usize) {
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
            // Device-writable parts come last; a SCSI response precedes the data (virtio 1.3, 5.6.6.1).
            (IoKind::Read, true) => ([header, answer, (data, length, true)], 3),
            (IoKind::Read, false) => ([header, (data, length, true), answer], 3),
            (IoKind::Write, _) => ([header, (data, length, false), answer], 3),
            (IoKind::Flush, _) => ([header, answer, answer], 2),
            (IoKind::Trim, _) => {
                let range = self.ranges.address + (usize::from(slot) * RANGE) as u64;
                let bytes = if self.is_scsi {
                    UNMAP_LIST as u32
                } else {
                    BLK_RANGE
                };
                ([header, (range, bytes, false), answer], 3)
            }
        }
    }

    /// Returns the request in the form that its ring uses.
    #[inline]
    fn chain<'a>(&self, slot: u16, parts: &'a [Part]) -> Chain<'a> {
        if self.indirect {
            let table = self.slots_address + self.table_at(slot) as u64;
            Chain::Table(table, parts.len())
        } else {
            Chain::Parts(parts)
        }
    }

    fn fill_table(&self, slot: u16, parts: &[Part]) {
        let packed = matches!(self.vring, Vring::Packed(_));
        let table = self.table_at(slot);
        for (at, &(address, length, device_writes)) in parts.iter().enumerate() {
            let last = at + 1 == parts.len();
            let direction = if device_writes { WRITE } else { 0 };
            // Descriptors of a packed table are consecutive and their IDs are unused. The flags of a packed descriptor are at the offset
            // of a split descriptor's `next`.
            let (flags, next) = match (packed, last) {
                (true, _) => (0, direction),
                (false, true) => (direction, 0),
                (false, false) => (direction | NEXT, at as u16 + 1),
            };
            let descriptor = Descriptor {
                address: address.into(),
                length: length.into(),
                flags: flags.into(),
                next: next.into(),
            };
            self.slots.write(table + at * DESCRIPTOR_SIZE, descriptor);
        }
    }

    #[cold]
    fn reshape(&mut self, slot: u16, ask: IoKind, length: u32) {
        let (parts, count) = self.parts(slot, ask, length);
        if self.indirect {
            self.fill_table(slot, &parts[..count]);
        }
        if let Vring::Split(slots) = &self.vring {
            slots.describe(slot, &self.chain(slot, &parts[..count]));
        }
        let base = self.header_at(slot);
        if self.is_scsi {
            // Each request has its own block address.
            let command = scsi_cdb(ask, self.wide, 0, length >> self.block_shift);
            self.slots.write(base + SCSI_CDB, command);
        } else {
            let kind: u32 = match ask {
                IoKind::Read => 0,
                IoKind::Write => 1,
                IoKind::Flush => 4,
                IoKind::Trim => 11,
            };
            self.slots.write(base, kind.to_le_bytes());
            self.slots.write(base + 4, 0u32.to_le_bytes());
        }
        self.shapes[usize::from(slot)] = Some((ask, length));
    }

    /// Places a request in a slot.
    #[inline]
    pub fn submit(&mut self, slot: u16, ask: IoKind, offset: u64, length: u32) {
        let base = self.header_at(slot);
        if self.shapes[usize::from(slot)] != Some((ask, length)) {
            self.reshape(slot, ask, length);
        }
        if ask == IoKind::Trim {
            self.put_range(slot, offset, length);
        } else if self.is_scsi {
            let block = offset >> self.block_shift;
            put_block(&self.slots, base + SCSI_CDB, self.wide, block);
        } else {
            let sector = if ask == IoKind::Flush { 0 } else { offset >> 9 };
            self.slots
                .write(base + BLK_SECTOR, little_endian::U64::new(sector));
        }
        self.clear_answer(slot);
        self.in_flight[usize::from(slot)] = true;
        match &mut self.vring {
            Vring::Split(slots) => slots.offer(slot),
            Vring::Packed(_) => self.offer_packed(slot, ask, length),
        }
    }

    fn put_range(&self, slot: u16, offset: u64, length: u32) {
        let mut range = [0; UNMAP_LIST];
        let bytes = if self.is_scsi {
            range = cdb::unmap(offset >> self.block_shift, length >> self.block_shift).1;
            &range[..]
        } else {
            range[..8].copy_from_slice(&(offset >> 9).to_le_bytes());
            range[8..12].copy_from_slice(&(length >> 9).to_le_bytes());
            // The sector field of the header is unused.
            let sector = self.header_at(slot) + BLK_SECTOR;
            self.slots.write(sector, little_endian::U64::new(0));
            &range[..BLK_RANGE as usize]
        };
        self.ranges.write(usize::from(slot) * RANGE, bytes);
    }

    #[inline]
    fn offer_packed(&mut self, slot: u16, ask: IoKind, length: u32) {
        let (parts, count) = self.parts(slot, ask, length);
        let chain = self.chain(slot, &parts[..count]);
        if let Vring::Packed(slots) = &mut self.vring {
            slots.offer(slot, &chain);
        }
    }

    /// Publishes submitted requests, with one kick if the device wants it.
    #[inline]
    pub fn publish(&mut self) -> Result<()> {
        if either!(&mut self.vring, slots => slots.ring.publish()) {
            self.kicks += 1;
            // A full counter means that a kick is already pending.
            rustix::io::write(&self.kick, &1u64.to_ne_bytes()).ok();
        }
        Ok(())
    }

    /// Collects a batch of completions and prefetches their responses, which [`VhostQueue::has_succeeded`] reads.
    #[inline]
    pub fn reap(&mut self, done: &mut Vec<Done>) -> Result<()> {
        if !either!(&mut self.vring, slots => slots.ring.has_used()) {
            return Ok(());
        }
        // The slot number is in another cache line of the device. A correct guess fetches both lines at once.
        self.slots.prefetch(self.answer_at(self.last));
        // Each pop decrements the requests in flight, so the loop ends.
        while let Some(slot) = either!(&mut self.vring, slots => slots.pop()) {
            let known = usize::try_from(slot)
                .ok()
                .and_then(|slot| self.in_flight.get_mut(slot));
            match known {
                Some(in_flight) if *in_flight => *in_flight = false,
                _ => bail!("the device returned buffer {slot}, which is not in flight"),
            }
            // The slot's next request is written there.
            self.slots.prefetch_to_write(self.answer_at(slot as u16));
            self.slots.prefetch_to_write(self.header_at(slot as u16));
            self.last = slot as u16;
            done.push(Done {
                slot: slot as u16,
                ok: true,
            });
        }
        Ok(())
    }

    /// Returns true if a completed request succeeded.
    #[inline]
    pub fn has_succeeded(&self, slot: u16) -> bool {
        let answer = self.answer_at(slot);
        if self.is_scsi {
            self.slots.read::<[u8; 2]>(answer + SCSI_STATUS) == [0, 0]
        } else {
            self.slots.read::<u8>(answer) == 0
        }
    }

    /// Enables the interrupt and waits for it.
    pub fn wait(&mut self, limit: Duration) -> Result<()> {
        if self.polling {
            std::thread::yield_now();
            return Ok(());
        }
        if !either!(&mut self.vring, slots => slots.ring.enable_interrupts()) {
            // Edge-triggered: the counter need not be read and accumulates the number of interrupts.
            let limit = (limit < Duration::from_secs(1)).then(|| Timespec::try_from(limit));
            let limit = limit.and_then(Result::ok);
            let mut events = [const { MaybeUninit::uninit() }; 1];
            match epoll::wait(&self.epoll, &mut events, limit.as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(errno) => bail!("cannot wait for an interrupt: {errno}"),
            }
        }
        either!(&mut self.vring, slots => slots.ring.disable_interrupts());
        Ok(())
    }

    pub fn waker(&self) -> Result<Waker> {
        self.interrupts.waker()
    }

    /// Returns the numbers of kicks and interrupts.
    pub fn signals(&mut self) -> (u64, u64) {
        (self.kicks, self.interrupts.count())
    }

    /// Writes the data of a slot.
    pub fn write_data(&self, slot: u16, data: &[u8]) {
        self.data.write(usize::from(slot) * self.stride, data);
    }

    /// Reads the data of a slot.
    pub fn read_data(&self, slot: u16, into: &mut [u8]) {
        self.data.read(usize::from(slot) * self.stride, into);
    }
}

#[cfg(test)]
mod tests {
    use guest_memory::{Mapping, MemoryTable, RegionSpec};

    use super::*;

    fn bytes(ask: IoKind, wide: bool, block: u64, blocks: u32) -> [u8; 16] {
        let mapping = Mapping::anonymous(4096).unwrap();
        let spec = RegionSpec {
            guest_address: 0,
            size: 4096,
            user_address: 0,
            file_offset: 0,
        };
        let table = MemoryTable::default().with_mapping(spec, mapping).unwrap();
        let slots = table.ring(0, 64).unwrap();
        slots.write(SCSI_CDB, scsi_cdb(ask, wide, 0, blocks));
        put_block(&slots, SCSI_CDB, wide, block);
        slots.read(SCSI_CDB)
    }

    #[test]
    fn commands_are_those_of_sbc_in_their_short_form_where_it_reaches() {
        // READ(10), WRITE(10), SYNCHRONIZE CACHE(10); READ(16), WRITE(16), SYNCHRONIZE CACHE(16).
        assert_eq!(
            bytes(IoKind::Read, false, 0x0102_0304, 0x0506),
            [0x28, 0, 1, 2, 3, 4, 0, 5, 6, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(
            bytes(IoKind::Write, false, 8, 1)[..10],
            [0x2a, 0, 0, 0, 0, 8, 0, 0, 1, 0]
        );
        assert_eq!(
            bytes(IoKind::Flush, false, 0, 0)[..10],
            [0x35, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        );
        assert_eq!(
            bytes(IoKind::Read, true, 0x0102_0304_0506_0708, 0x090a_0b0c),
            [0x88, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 0, 0]
        );
        assert_eq!(
            bytes(IoKind::Write, true, u64::from(u32::MAX) + 1, 1),
            [0x8a, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0]
        );
        assert_eq!(
            bytes(IoKind::Flush, true, 0, 1 << 16),
            [0x91, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]
        );
    }
}
