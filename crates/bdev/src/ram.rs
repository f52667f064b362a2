//! `ram`: a disk in this process' memory, which ends with the process unless it is stored ([`Ram::keep`]).
//!
//! I/O is a copy within `submit`. Large zeroing or unmapping continues piece by piece in later iterations, so that the worker serves other
//! clients in between. Memory is allocated on first write, and released by discard and write-zeroes with unmap. Huge pages are the default,
//! because random 4 KiB reads are otherwise bound by address translation; a first write then allocates 2 MiB. Use `huge_pages: false` for
//! thin disks. A growing disk gets more mappings. Workers may copy the same bytes concurrently: like any disk, it promises no order then.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use block::{
    AtomicWrites, Capacity, CompareAndWrite, DiskInfo, Geometry, Identity, IoError, IoErrorKind,
    IoFlags, IoKind, IoOutcome, IoRequest, encode_extents,
};
use guest_memory::{IoBuffer, Mapping, MappingView};
use uring::{Completion, Owner, Ring};

use crate::admit::Limits;
use crate::blocking::answer_at_once;
use crate::error::{check_block_size, check_size};
use crate::network_medium::NetworkMedium;
use crate::retained_memory::{DATA_AT, RetainedMemory, descriptor_store};
use crate::{
    Attach, BlockDevice, Capabilities, Finished, IoChannel, Medium, OpenError, Prefetch, Removable,
    Submission, Tag,
};

/// Page size in bytes, the unit of releasing memory.
const PAGE: u64 = 4096;

/// Bytes of one disk that a worker zeroes, or releases, per iteration for all requests: some tenths of a millisecond. Powers of two, at
/// least a page.
const ZEROED_AT_ONCE: u64 = 1 << 20;
const FREED_PER_STEP: u64 = 16 << 20;

/// Maximum bytes of an atomic write: one copy while its range is held, and memory lost with the process shows no client half of it. Any
/// length would be correct; this one delays other clients by a tenth of a millisecond.
const ATOMIC_BYTES_MAX: u32 = 1 << 20;

/// Options of a `ram` disk.
#[derive(Clone, Copy, Debug)]
pub struct RamOptions {
    /// Size in bytes.
    pub size: u64,
    /// Bytes per logical block.
    pub block_size: u32,
    /// Refuse writes.
    pub read_only: bool,
    /// Request huge pages; the kernel provides ordinary ones if it has none.
    pub huge_pages: bool,
}

impl Default for RamOptions {
    fn default() -> Self {
        RamOptions {
            size: 1 << 30,
            block_size: 512,
            read_only: false,
            huge_pages: true,
        }
    }
}

/// A part of a disk's memory; the first is the whole disk until it grows. Mappings never move.
#[derive(Clone, Debug)]
struct Extent {
    /// Offset of the part in the disk.
    start: u64,
    memory: Arc<Mapping>,
}

impl Extent {
    fn end(&self) -> u64 {
        self.start + self.memory.len() as u64
    }
}

/// State shared by the handles of all workers.
#[derive(Debug)]
struct Memory {
    extents: RwLock<Arc<[Extent]>>,
}

impl Memory {
    fn extents(&self) -> Arc<[Extent]> {
        let extents = self.extents.read().unwrap_or_else(PoisonError::into_inner);
        extents.clone()
    }

    /// Returns the extent at `offset`.
    fn extent(&self, offset: u64) -> block::Extent {
        let extents = self.extents();
        let Some(own) = extents.iter().find(|own| offset < own.end()) else {
            return block::Extent::UNKNOWN;
        };
        let at = offset.saturating_sub(own.start) as usize;
        let used = own.memory.next_used(at);
        match used.start {
            start if start > at => block::Extent::hole(own.start + start as u64),
            _ => block::Extent::data(own.start + used.end as u64),
        }
    }
}

/// The block device `ram`.
#[derive(Debug)]
pub struct Ram {
    info: DiskInfo,
    capacity: Arc<Capacity>,
    memory: Arc<Memory>,
    huge_pages: bool,
    retained: Option<RetainedDisk>,
}

/// Memory of a disk that outlives the daemon.
struct RetainedDisk {
    disk: String,
    memory: Mutex<RetainedMemory>,
    medium: NetworkMedium,
    /// The memory was created when the disk was opened.
    is_new: bool,
}

impl std::fmt::Debug for RetainedDisk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RetainedDisk")
            .field("disk", &self.disk)
            .finish_non_exhaustive()
    }
}

impl RetainedDisk {
    fn memory(&self) -> MutexGuard<'_, RetainedMemory> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the disk's stored memory, or new memory and stores it.
    fn take(options: &RamOptions, disk: &str) -> Result<RetainedDisk, OpenError> {
        let failed = |source| OpenError::Memory {
            size: options.size,
            source,
        };
        let store = descriptor_store();
        let (mut memory, is_new) = match store.and_then(|store| store.take(disk)) {
            Some(memory) => (RetainedMemory::open(memory).map_err(failed)?, false),
            None => {
                let id = Identity::random().bits().to_be_bytes();
                let made = RetainedMemory::create(disk, options.size, options.block_size, id);
                (made.map_err(failed)?, true)
            }
        };
        let is_kept = store.is_some_and(|store| store.keep(disk, memory.file.as_fd()));
        if !is_kept {
            tracing::warn!(
                disk,
                "RAM disk loses its content when this process ends; hint: run the daemon under systemd with FileDescriptorStoreMax="
            );
        }
        let is_larger = memory.size > options.size && !memory.may_end_at(options.size);
        if memory.block_size != options.block_size || is_larger {
            return Err(OpenError::RetainedMemory {
                size: memory.size,
                block_size: memory.block_size,
            });
        }
        if memory.size != options.size {
            memory.resize(options.size).map_err(failed)?;
        }
        Ok(RetainedDisk {
            disk: disk.to_owned(),
            medium: NetworkMedium::new(memory.key()),
            memory: Mutex::new(memory),
            is_new,
        })
    }
}

/// Maps zeroes for `bytes` of a disk, or stored memory from a byte on. The last page is whole and can be released.
fn map(bytes: u64, huge_pages: bool, from: Option<(&File, u64)>) -> io::Result<Arc<Mapping>> {
    let length = usize::try_from(bytes)
        .ok()
        .and_then(|size| size.checked_next_multiple_of(PAGE as usize))
        .ok_or(io::ErrorKind::OutOfMemory)?;
    let memory = match from {
        Some((file, start)) => Mapping::sealed_memfd(file, DATA_AT + start, length)?,
        None => Mapping::anonymous(length)?,
    };
    if huge_pages && let Err(error) = memory.advise_huge_pages() {
        tracing::debug!(%error, "cannot use huge pages for {bytes} bytes of a RAM disk");
    }
    Ok(memory)
}

impl Ram {
    /// Creates a disk of zeroes.
    ///
    /// # Errors
    /// Size or block size is invalid, or the address space too small.
    pub fn create(options: RamOptions) -> Result<Ram, OpenError> {
        Ram::make(options, None)
    }

    /// Creates a disk with memory that outlives the daemon, or opens stored memory: see [`DescriptorStore`](crate::DescriptorStore).
    ///
    /// # Errors
    /// As [`Ram::create`]; or the stored memory is longer, or has another block size.
    pub fn keep(options: RamOptions, disk: &str) -> Result<Ram, OpenError> {
        check_size(options.size, check_block_size(options.block_size)?)?;
        Ram::make(options, Some(RetainedDisk::take(&options, disk)?))
    }

    fn make(options: RamOptions, retained: Option<RetainedDisk>) -> Result<Ram, OpenError> {
        let block_size = check_block_size(options.block_size)?;
        let size = check_size(options.size, block_size)?;
        let memory = {
            let file = retained.as_ref().map(RetainedDisk::memory);
            let from = file.as_ref().map(|retained| (&retained.file, 0));
            map(size, options.huge_pages, from)
        };
        let memory = memory.map_err(|source| OpenError::Memory { size, source })?;
        Ok(Ram {
            info: DiskInfo {
                geometry: Geometry::new(block_size, size),
                physical_block_size: PAGE as u32,
                io_alignment: block::SECTOR_BYTES,
                optimal_io_size: 0,
                read_only: options.read_only,
                write_cache: false,
                discard_granularity: Some(PAGE as u32),
                discard_zeroes: true,
                write_zeroes: true,
                // The kernel reports unused memory as such or not at all. In a memfd, reading marks pages as used.
                anchors: !options.read_only && retained.is_none() && memory.next_used(0).is_empty(),
                compare_and_write: Some(CompareAndWrite::Emulated),
                // A killed daemon may leave a part of a write in retained memory, so writes to such memory are not atomic.
                atomic_writes: (!options.read_only && retained.is_none()).then_some(AtomicWrites {
                    bytes_max: ATOMIC_BYTES_MAX,
                    unit: block_size,
                }),
                shared: false,
                rotational: false,
                passthrough: None,
                identity: Identity::UNSET,
                serial: String::new(),
                naa: 0,
            },
            capacity: Arc::new(Capacity::new(size)),
            memory: Arc::new(Memory {
                extents: RwLock::new(Arc::new([Extent { start: 0, memory }])),
            }),
            huge_pages: options.huge_pages,
            retained,
        })
    }

    /// Zeroes memory beyond the end, for the case that the disk grows again.
    fn clear_beyond(&self, bytes: u64) -> io::Result<()> {
        for extent in self.memory.extents().iter() {
            let from = bytes.max(extent.start);
            if from < extent.end() {
                let pages = from.next_multiple_of(PAGE);
                let at = (pages - extent.start) as usize;
                // First the call that may fail, which leaves the disk unchanged.
                extent.memory.free_pages(at, extent.memory.len() - at)?;
                let at = (from - extent.start) as usize;
                extent.memory.fill(at, (pages - from) as usize, 0);
            }
        }
        Ok(())
    }
}

impl BlockDevice for Ram {
    fn info(&self) -> DiskInfo {
        self.info.resized(self.capacity.bytes())
    }

    fn capacity(&self) -> &Arc<Capacity> {
        &self.capacity
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        let mut retained = self.retained.as_ref().map(RetainedDisk::memory);
        if bytes <= self.capacity.bytes() {
            self.clear_beyond(bytes)?;
            return retained.map_or(Ok(()), |mut retained| retained.resize(bytes));
        }
        if let Some(retained) = &mut retained {
            retained.resize(bytes)?;
        }
        let extents = self.memory.extents();
        let start = extents.last().map_or(0, Extent::end);
        if bytes > start {
            let from = retained.as_ref().map(|retained| (&retained.file, start));
            let memory = map(bytes - start, self.huge_pages, from)?;
            let more = Extent { start, memory };
            let all: Arc<[Extent]> = extents.iter().cloned().chain([more]).collect();
            let extents = &self.memory.extents;
            *extents.write().unwrap_or_else(PoisonError::into_inner) = all;
        }
        Ok(())
    }

    fn kind(&self) -> &'static str {
        "ram"
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            medium: self
                .retained
                .as_ref()
                .map(|retained| &retained.medium as &dyn Medium),
            removable: Some(self),
            ..Capabilities::NONE
        }
    }

    fn attach(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        let extents = self.memory.extents();
        Ok(Box::new(RamChannel {
            owner: attach.owner(),
            long: Vec::new(),
            iteration: 0,
            spent: 0,
            limits: Limits::of(&self.info, &self.capacity),
            first: MappingView::new(&extents[0].memory),
            extents,
            memory: self.memory.clone(),
        }))
    }
}

impl Removable for Ram {
    fn remove_if_created(&self) {
        if self
            .retained
            .as_ref()
            .is_some_and(|retained| retained.is_new)
        {
            self.forget();
        }
    }

    fn forget(&self) -> bool {
        if let (Some(retained), Some(store)) = (&self.retained, descriptor_store()) {
            store.forget(&retained.disk);
        }
        true
    }
}

/// An I/O that continues piece by piece.
struct Long {
    tag: Tag,
    /// Remaining part of the I/O.
    rest: IoRequest,
    buffer: IoBuffer,
}

struct RamChannel {
    owner: Owner,
    /// Operations in progress, indexed by their token.
    long: Vec<Option<Long>>,
    /// Iteration of the ring, and its spent budget in zeroed bytes.
    iteration: u64,
    spent: u64,
    limits: Limits,
    /// Memory of the first extent, for pointing buffers at it.
    first: MappingView,
    /// Known extents; the disk may have more by now.
    extents: Arc<[Extent]>,
    memory: Arc<Memory>,
}

/// Executes an admitted I/O at offset `at` of `memory`.
#[inline]
fn carry_out(memory: &Mapping, io: &IoRequest, at: u64, buffer: &IoBuffer) -> IoOutcome {
    match io.kind {
        IoKind::Read => {
            assert_eq!(
                buffer.len() as u64,
                io.length,
                "window and I/O have different lengths"
            );
            buffer.fill_from(memory, at as usize);
            Ok(())
        }
        IoKind::Write => {
            assert_eq!(
                buffer.len() as u64,
                io.length,
                "window and I/O have different lengths"
            );
            buffer.drain_to(memory, at as usize);
            Ok(())
        }
        IoKind::Flush => Ok(()),
        IoKind::CompareAndWrite
        | IoKind::BlockStatus
        | IoKind::ReplaceState
        | IoKind::ScsiCommand => Err(IoErrorKind::Unsupported.into()),
        IoKind::Discard | IoKind::WriteZeroes if releases_pages(io) => {
            release_pages(memory, at, io.length)
        }
        IoKind::Discard | IoKind::WriteZeroes => {
            memory.fill(at as usize, io.length as usize, 0);
            Ok(())
        }
    }
}

/// Zeroes a range by releasing its whole pages.
#[cold]
fn release_pages(memory: &Mapping, offset: u64, length: u64) -> IoOutcome {
    let zero = |from: u64, to: u64| memory.fill(from as usize, (to - from) as usize, 0);
    let end = offset + length;
    let first_page = offset.next_multiple_of(PAGE);
    let last_page = end & !(PAGE - 1);
    if first_page >= last_page {
        zero(offset, end);
        return Ok(());
    }
    zero(offset, first_page);
    zero(last_page, end);
    memory
        .free_pages(first_page as usize, (last_page - first_page) as usize)
        .map_err(|e| IoError::with_errno(IoErrorKind::WriteMedium, e.raw_os_error().unwrap_or(0)))
}

fn releases_pages(io: &IoRequest) -> bool {
    io.kind == IoKind::Discard || io.kind == IoKind::WriteZeroes && io.flags.has(IoFlags::UNMAP)
}

/// Returns the maximum bytes of one piece of an I/O.
fn piece_bytes_max(io: &IoRequest) -> u64 {
    match io.kind {
        IoKind::Read
        | IoKind::Write
        | IoKind::Flush
        | IoKind::CompareAndWrite
        | IoKind::BlockStatus
        | IoKind::ReplaceState
        | IoKind::ScsiCommand => u64::MAX,
        IoKind::WriteZeroes | IoKind::Discard if releases_pages(io) => FREED_PER_STEP,
        IoKind::WriteZeroes | IoKind::Discard => ZEROED_AT_ONCE,
    }
}

/// Returns the cost of `length` bytes of an I/O in zeroed bytes.
fn cost(io: &IoRequest, length: u64) -> u64 {
    match releases_pages(io) {
        true => length / (FREED_PER_STEP / ZEROED_AT_ONCE),
        false => length,
    }
}

impl RamChannel {
    /// Executes an admitted I/O.
    #[inline]
    fn carry_out(&mut self, io: &IoRequest, buffer: &IoBuffer) -> IoOutcome {
        match io.offset + io.length <= self.first.len() as u64 {
            true => carry_out(&self.first, io, io.offset, buffer),
            false => self.carry_out_extents(io, buffer),
        }
    }

    /// Executes the next piece of a long I/O.
    fn next_piece(&mut self, long: &mut Long) -> IoOutcome {
        let rest = &mut long.rest;
        let most = piece_bytes_max(rest);
        if releases_pages(rest) {
            // Holes need no release, and large disks are mostly holes.
            let extent = self.memory.extent(rest.offset);
            if extent.allocation == block::Allocation::Hole {
                let length = rest.length.min(extent.end - rest.offset);
                (rest.offset, rest.length) = (rest.offset + length, rest.length - length);
            }
        }
        // Pieces end at multiples of their size, to release whole pages.
        let length = rest.length.min(most - rest.offset % most);
        let piece = IoRequest { length, ..*rest };
        (rest.offset, rest.length) = (rest.offset + length, rest.length - length);
        self.spent += cost(&piece, length);
        match length {
            0 => Ok(()),
            _ => self.carry_out(&piece, &long.buffer),
        }
    }

    /// Returns the bytes that may still be zeroed in this iteration.
    fn left(&mut self, ring: &Ring) -> u64 {
        if self.iteration != ring.iterations() {
            (self.iteration, self.spent) = (ring.iterations(), 0);
        }
        ZEROED_AT_ONCE.saturating_sub(self.spent)
    }

    /// Zeroes or releases a range, at once or, beyond this iteration's budget, piece by piece.
    #[cold]
    fn clear(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        let cost = cost(io, io.length);
        if cost > self.left(ring) {
            let (buffer, rest) = (std::mem::take(buffer), *io);
            self.begin_long(ring, Long { tag, rest, buffer });
            return Submission::Pending;
        }
        self.spent += cost;
        Submission::Done(self.carry_out(io, buffer))
    }

    #[cold]
    fn block_status(&self, io: &IoRequest, buffer: &IoBuffer) -> Submission {
        let range = io.offset..io.offset + io.length;
        let extents = encode_extents(range, |offset| self.memory.extent(offset));
        Submission::Done(answer_at_once(buffer, &extents))
    }

    /// Begins an I/O that continues piece by piece, as iterations have budget.
    fn begin_long(&mut self, ring: &mut Ring, long: Long) {
        let free = self.long.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            self.long.push(None);
            self.long.len() - 1
        });
        self.long[index] = Some(long);
        ring.nop(self.owner, index as u64);
    }

    /// Executes an I/O outside the first extent, piece by piece.
    #[cold]
    fn carry_out_extents(&mut self, io: &IoRequest, buffer: &IoBuffer) -> IoOutcome {
        let end = io.offset + io.length;
        if self.extents.last().map_or(0, Extent::end) < end {
            self.extents = self.memory.extents();
        }
        let mut done = 0;
        for extent in self.extents.iter() {
            let from = (io.offset + done).max(extent.start);
            let to = end.min(extent.end());
            if from != io.offset + done || from >= to {
                continue;
            }
            let length = to - from;
            let piece = IoRequest {
                offset: from,
                length,
                ..*io
            };
            let at = from - extent.start;
            if io.moves_data() {
                let part = buffer.slice(done as usize, length as usize);
                carry_out(&extent.memory, &piece, at, &part)?;
            } else {
                carry_out(&extent.memory, &piece, at, buffer)?;
            }
            done += length;
        }
        assert_eq!(done, io.length, "a RAM disk's memory has a hole");
        Ok(())
    }
}

impl IoChannel for RamChannel {
    #[inline]
    fn submit(
        &mut self,
        ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        tag: Tag,
    ) -> Submission {
        if let Err(refused) = self.limits.admit(io) {
            return Submission::Done(Err(refused));
        }
        match io.kind {
            IoKind::WriteZeroes | IoKind::Discard => self.clear(ring, io, buffer, tag),
            IoKind::BlockStatus => self.block_status(io, buffer),
            IoKind::Read
            | IoKind::Write
            | IoKind::Flush
            | IoKind::CompareAndWrite
            | IoKind::ReplaceState
            | IoKind::ScsiCommand => Submission::Done(self.carry_out(io, buffer)),
        }
    }

    fn wants_prefetch(&self) -> bool {
        true
    }

    /// Not admitted yet: the range may be invalid.
    fn prefetch(&self, io: &IoRequest, soon: Prefetch) {
        let at = io.offset as usize;
        let length = match soon {
            Prefetch::Next => io.length as usize,
            Prefetch::Later => io.length.min(1) as usize,
        };
        match io.kind {
            IoKind::Read => self.first.prefetch_read(at, length),
            IoKind::Write => self.first.prefetch_write(at, length),
            IoKind::Flush
            | IoKind::Discard
            | IoKind::WriteZeroes
            | IoKind::CompareAndWrite
            | IoKind::BlockStatus
            | IoKind::ReplaceState
            | IoKind::ScsiCommand => {}
        }
    }

    #[inline]
    fn borrow(&self, io: &IoRequest, buffer: &mut IoBuffer) -> bool {
        let allowed = io.kind == IoKind::Read && self.limits.admit(io).is_ok();
        let allowed = allowed && io.offset + io.length <= self.first.len() as u64;
        if allowed {
            buffer.point_at(&self.first, io.offset as usize, io.length as usize);
        }
        allowed
    }

    fn is_borrowed(&self) -> bool {
        self.first.is_shared()
    }

    fn complete(&mut self, ring: &mut Ring, completion: Completion, finished: &mut Vec<Finished>) {
        let place = self.long.get_mut(completion.token as usize);
        let Some(mut long) = place.and_then(Option::take) else {
            return;
        };
        // Older I/Os come first.
        let outcome = match self.left(ring) {
            0 => Ok(()),
            _ => self.next_piece(&mut long),
        };
        if outcome.is_ok() && long.rest.length > 0 {
            self.long[completion.token as usize] = Some(long);
            ring.nop(self.owner, completion.token);
            return;
        }
        finished.push(Finished {
            tag: long.tag,
            buffer: long.buffer,
            outcome,
        });
    }

    fn in_flight(&self) -> usize {
        self.long.iter().flatten().count()
    }
}
