//! `ram`: a disk in this process' memory, gone when the process ends.
//!
//! I/O is a copy, done before `submit` returns. Memory is taken when it is first written, and given back by
//! discard and by write-zeroes with unmap. Huge pages are asked for by default: random 4 KiB reads are bound by
//! address translation otherwise. Their price is that the first write takes 2 MiB at once; `huge_pages: false` is
//! for thin disks. Workers may copy the same bytes at the same time: like any disk, it promises no order then.

use std::io;
use std::sync::Arc;

use disk::{DiskInfo, Geometry, IoError, IoErrorKind, IoFlags, IoKind, IoOutcome, IoRequest};
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

/// The engine `ram`.
#[derive(Debug)]
pub struct Ram {
    info: DiskInfo,
    memory: Arc<Mapping>,
}

impl Ram {
    /// Makes one, full of zeroes.
    ///
    /// # Errors
    /// When size or block size are not allowed, or there is not that much address space.
    pub fn create(options: RamOptions) -> Result<Ram, OpenError> {
        let block_size = check_block_size(options.block_size)?;
        let size = check_size(options.size, block_size)?;
        let refused = |source| OpenError::Memory { size, source };
        // The last page is whole, so that it can be given back.
        let length = usize::try_from(size)
            .ok()
            .and_then(|size| size.checked_next_multiple_of(PAGE as usize))
            .ok_or_else(|| refused(io::ErrorKind::OutOfMemory.into()))?;
        let memory = Mapping::anonymous(length).map_err(refused)?;
        if options.huge_pages
            && let Err(error) = memory.advise_huge_pages()
        {
            tracing::debug!(%error, "no huge pages for a RAM disk of {size} bytes");
        }
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
            memory,
        })
    }
}

impl Engine for Ram {
    fn info(&self) -> DiskInfo {
        self.info.clone()
    }

    fn kind(&self) -> &'static str {
        "ram"
    }

    fn next_data(&self, offset: u64) -> u64 {
        let offset = usize::try_from(offset).unwrap_or(usize::MAX);
        (self.memory.next_used(offset) as u64).min(self.info.geometry.capacity_bytes())
    }

    fn open(&self, _owner: Owner, _ring: &mut Ring) -> io::Result<Box<dyn Backend>> {
        Ok(Box::new(RamBackend {
            limits: Limits::of(&self.info),
            memory: MappingView::new(&self.memory),
        }))
    }
}

struct RamBackend {
    limits: Limits,
    memory: MappingView,
}

impl RamBackend {
    /// Zeroes a range by giving its whole pages back.
    #[cold]
    fn give_back(&self, offset: u64, length: u64) -> IoOutcome {
        let end = offset + length;
        let first_page = offset.next_multiple_of(PAGE);
        let last_page = end & !(PAGE - 1);
        if first_page >= last_page {
            self.zero(offset, end);
            return Ok(());
        }
        self.zero(offset, first_page);
        self.zero(last_page, end);
        self.memory
            .give_back(first_page as usize, (last_page - first_page) as usize)
            .map_err(|e| {
                IoError::with_errno(IoErrorKind::WriteMedium, e.raw_os_error().unwrap_or(0))
            })
    }

    fn zero(&self, from: u64, to: u64) {
        self.memory.fill(from as usize, (to - from) as usize, 0);
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
        let outcome = match io.kind {
            IoKind::Read => {
                assert_eq!(buffer.len() as u64, io.length, "window and I/O differ");
                buffer.fill_from(&self.memory, io.offset as usize);
                Ok(())
            }
            IoKind::Write => {
                assert_eq!(buffer.len() as u64, io.length, "window and I/O differ");
                buffer.drain_to(&self.memory, io.offset as usize);
                Ok(())
            }
            IoKind::Flush => Ok(()),
            IoKind::Discard => self.give_back(io.offset, io.length),
            IoKind::WriteZeroes if io.flags.has(IoFlags::UNMAP) => {
                self.give_back(io.offset, io.length)
            }
            IoKind::WriteZeroes => {
                self.zero(io.offset, io.offset + io.length);
                Ok(())
            }
        };
        Submission::Done(outcome)
    }

    #[inline]
    fn look(&self, io: &IoRequest, buffer: &mut IoBuffer) -> bool {
        let allowed = io.kind == IoKind::Read && self.limits.admit(io).is_ok();
        if allowed {
            buffer.point_at(&self.memory, io.offset as usize, io.length as usize);
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
