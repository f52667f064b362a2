//! `ram`: a disk in this process' memory, gone when the process ends.
//!
//! I/O is a copy, done before `submit` returns. Memory is taken when it is first written, and given back by
//! discard and by write-zeroes with unmap. Huge pages are asked for by default: random 4 KiB reads are bound by
//! address translation otherwise. Their price is that the first write takes 2 MiB at once; `huge_pages: false` is
//! for thin disks. A disk that grows gets more mappings behind its first. Workers may copy the same bytes at the same time: like any disk, it promises no order then.

use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use disk::{
    Capacity, DiskInfo, Geometry, IoError, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest,
};
use guest_memory::{IoBuffer, Mapping, MappingView};
use ring::{Completion, Owner, Ring};

use crate::admit::Limits;
use crate::error::{check_block_size, check_size};
use crate::{Backend, Engine, Finished, OpenError, Submission, Tag};

/// Memory is given back in pages of this many bytes.
const PAGE: u64 = 4096;

/// What a `ram` disk is to be.
#[derive(Clone, Copy, Debug)]
pub struct RamOptions {
    /// Bytes.
    pub size: u64,
    /// Bytes per logical block.
    pub block_size: u32,
    /// Refuse writes.
    pub read_only: bool,
    /// Ask for huge pages; where the kernel has none to give, ordinary ones serve.
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

/// A part of a disk's memory. The first is all of it until the disk grows; what is mapped never moves.
#[derive(Clone, Debug)]
struct Extent {
    /// Byte of the disk that it begins with.
    start: u64,
    memory: Arc<Mapping>,
}

impl Extent {
    fn end(&self) -> u64 {
        self.start + self.memory.len() as u64
    }
}

/// What all workers' handles share.
#[derive(Debug)]
struct Memory {
    extents: RwLock<Arc<[Extent]>>,
}

impl Memory {
    fn extents(&self) -> Arc<[Extent]> {
        let extents = self.extents.read().unwrap_or_else(PoisonError::into_inner);
        extents.clone()
    }
}

/// The engine `ram`.
#[derive(Debug)]
pub struct Ram {
    info: DiskInfo,
    capacity: Arc<Capacity>,
    memory: Arc<Memory>,
    huge_pages: bool,
}

/// Maps zeroes for `bytes` of a disk; the last page is whole, so that it can be given back.
fn map(bytes: u64, huge_pages: bool) -> io::Result<Arc<Mapping>> {
    let length = usize::try_from(bytes)
        .ok()
        .and_then(|size| size.checked_next_multiple_of(PAGE as usize))
        .ok_or(io::ErrorKind::OutOfMemory)?;
    let memory = Mapping::anonymous(length)?;
    if huge_pages && let Err(error) = memory.advise_huge_pages() {
        tracing::debug!(%error, "no huge pages for {bytes} bytes of a RAM disk");
    }
    Ok(memory)
}

impl Ram {
    /// Makes one, full of zeroes.
    ///
    /// # Errors
    /// When size or block size are not allowed, or there is not that much address space.
    pub fn create(options: RamOptions) -> Result<Ram, OpenError> {
        let block_size = check_block_size(options.block_size)?;
        let size = check_size(options.size, block_size)?;
        let memory =
            map(size, options.huge_pages).map_err(|source| OpenError::Memory { size, source })?;
        let extents: Arc<[Extent]> = Arc::new([Extent { start: 0, memory }]);
        Ok(Ram {
            info: DiskInfo {
                geometry: Geometry::new(block_size, size),
                physical_block_size: PAGE as u32,
                optimal_io_size: 0,
                read_only: options.read_only,
                write_cache: false,
                discard_granularity: Some(PAGE as u32),
                discard_zeroes: true,
                write_zeroes: true,
                rotational: false,
                serial: String::new(),
                naa: 0,
            },
            capacity: Arc::new(Capacity::new(size)),
            memory: Arc::new(Memory {
                extents: RwLock::new(extents),
            }),
            huge_pages: options.huge_pages,
        })
    }

    /// Zeroes what is mapped beyond the end, so that it reads as zeroes when the disk grows again.
    fn clear_beyond(&self, bytes: u64) -> io::Result<()> {
        for extent in self.memory.extents().iter() {
            let from = bytes.max(extent.start);
            if from < extent.end() {
                let pages = from.next_multiple_of(PAGE);
                let at = (from - extent.start) as usize;
                extent.memory.fill(at, (pages - from) as usize, 0);
                let at = (pages - extent.start) as usize;
                extent.memory.give_back(at, extent.memory.len() - at)?;
            }
        }
        Ok(())
    }
}

impl Engine for Ram {
    fn info(&self) -> DiskInfo {
        DiskInfo {
            geometry: Geometry::new(self.info.geometry.block_size(), self.capacity.bytes()),
            ..self.info.clone()
        }
    }

    fn capacity(&self) -> &Arc<Capacity> {
        &self.capacity
    }

    fn set_size(&self, bytes: u64) -> io::Result<()> {
        if bytes <= self.capacity.bytes() {
            return self.clear_beyond(bytes);
        }
        let extents = self.memory.extents();
        let start = extents.last().map_or(0, Extent::end);
        if bytes > start {
            let memory = map(bytes - start, self.huge_pages)?;
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

    fn next_data(&self, offset: u64) -> u64 {
        for extent in self.memory.extents().iter() {
            if offset >= extent.end() {
                continue;
            }
            let at = extent
                .memory
                .next_used(offset.saturating_sub(extent.start) as usize);
            if at < extent.memory.len() {
                return (extent.start + at as u64).min(self.capacity.bytes());
            }
        }
        self.capacity.bytes()
    }

    fn open(&self, _owner: Owner, _ring: &mut Ring) -> io::Result<Box<dyn Backend>> {
        let extents = self.memory.extents();
        Ok(Box::new(RamBackend {
            limits: Limits::of(&self.info, &self.capacity),
            first: MappingView::new(&extents[0].memory),
            extents,
            memory: self.memory.clone(),
        }))
    }
}

struct RamBackend {
    limits: Limits,
    /// The first extent's memory, to point buffers at.
    first: MappingView,
    /// As this worker knows them; there may be more by now.
    extents: Arc<[Extent]>,
    memory: Arc<Memory>,
}

/// Does an I/O that was admitted on the part of the disk that `memory` is; `at` is its place there.
#[inline]
fn carry_out(memory: &Mapping, io: &IoRequest, at: u64, buffer: &IoBuffer) -> IoOutcome {
    match io.kind {
        IoKind::Read => {
            assert_eq!(buffer.len() as u64, io.length, "window and I/O differ");
            buffer.fill_from(memory, at as usize);
            Ok(())
        }
        IoKind::Write => {
            assert_eq!(buffer.len() as u64, io.length, "window and I/O differ");
            buffer.drain_to(memory, at as usize);
            Ok(())
        }
        IoKind::Flush => Ok(()),
        IoKind::Discard => give_back(memory, at, io.length),
        IoKind::WriteZeroes if io.flags.has(IoFlags::UNMAP) => give_back(memory, at, io.length),
        IoKind::WriteZeroes => {
            memory.fill(at as usize, io.length as usize, 0);
            Ok(())
        }
    }
}

/// Zeroes a range by giving its whole pages back.
#[cold]
fn give_back(memory: &Mapping, offset: u64, length: u64) -> IoOutcome {
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
        .give_back(first_page as usize, (last_page - first_page) as usize)
        .map_err(|e| IoError::with_errno(IoErrorKind::WriteMedium, e.raw_os_error().unwrap_or(0)))
}

impl RamBackend {
    /// An I/O that does not lie in the first extent: piece by piece.
    #[cold]
    fn across(&mut self, io: &IoRequest, buffer: &IoBuffer) -> IoOutcome {
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

impl Backend for RamBackend {
    #[inline]
    fn submit(
        &mut self,
        _ring: &mut Ring,
        io: &IoRequest,
        buffer: &mut IoBuffer,
        _tag: Tag,
    ) -> Submission {
        if let Err(refused) = self.limits.admit(io) {
            return Submission::Done(Err(refused));
        }
        let outcome = match io.offset + io.length <= self.first.len() as u64 {
            true => carry_out(&self.first, io, io.offset, buffer),
            false => self.across(io, buffer),
        };
        Submission::Done(outcome)
    }

    #[inline]
    fn look(&self, io: &IoRequest, buffer: &mut IoBuffer) -> bool {
        let allowed = io.kind == IoKind::Read && self.limits.admit(io).is_ok();
        let allowed = allowed && io.offset + io.length <= self.first.len() as u64;
        if allowed {
            buffer.point_at(&self.first, io.offset as usize, io.length as usize);
        }
        allowed
    }

    fn complete(
        &mut self,
        _ring: &mut Ring,
        _completion: Completion,
        _finished: &mut Vec<Finished>,
    ) {
    }

    fn in_flight(&self) -> usize {
        0
    }
}
