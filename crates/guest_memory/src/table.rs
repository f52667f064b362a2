//! A client's memory regions: translates guest-physical and front-end addresses to checked host ranges.
//!
//! A table is immutable. A change creates a new table, and the old one lives until its last view is dropped, so
//! regions can be added, removed and remapped during I/O. Look-ups trust no input: this module checks every address
//! and length, by subtraction.

use std::cell::Cell;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::BorrowedFd;
use std::rc::Rc;
use std::sync::Arc;

use zerocopy::FromBytes;

use crate::buffer::{IoBuffer, Segment, prefetch_line};
use crate::{Appender, DirtyLog, Filler, Mapping, RingMemory, volatile};

/// Location of a region, as sent by the front end (vhost-user `SET_MEM_TABLE`, `ADD_MEM_REG`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionSpec {
    /// Guest-physical address of the first byte.
    pub guest_address: u64,
    /// Size in bytes.
    pub size: u64,
    /// Address of the first byte in the front end's address space, which is used for ring addresses.
    pub user_address: u64,
    /// Offset of the region in its file, in bytes.
    pub file_offset: u64,
}

/// Errors of memory tables and look-ups.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The range is not (wholly) in the client's memory.
    #[error("address {address:#x} + {length} bytes is not in the client's memory")]
    NotMapped {
        /// First guest-physical address of the range.
        address: u64,
        /// Length in bytes.
        length: u64,
    },
    /// Two regions overlap, or a region wraps around.
    #[error(
        "memory region {guest_address:#x} + {size} bytes overlaps another region or wraps around"
    )]
    Overlap {
        /// First guest-physical address of the region.
        guest_address: u64,
        /// Size of the region in bytes.
        size: u64,
    },
    /// The sum of all regions exceeds the size of any guest.
    #[error("memory regions of more than {} TiB together", TABLE_BYTES_MAX >> 40)]
    TooMuch,
    /// No such region to remove.
    #[error("no memory region starts at {guest_address:#x} with {size} bytes")]
    NoSuchRegion {
        /// First guest-physical address of the request.
        guest_address: u64,
        /// Size in bytes.
        size: u64,
    },
    /// The file behind the region could not be mapped.
    #[error("cannot map {size} bytes at file offset {file_offset}: {source}")]
    Map {
        /// Size of the region in bytes.
        size: u64,
        /// Offset of the region in the file.
        file_offset: u64,
        /// Error of the kernel.
        source: io::Error,
    },
}

/// Maximum size of a table in bytes: far more than guests have, and less than all clients together may share.
const TABLE_BYTES_MAX: u64 = 32 << 40;

#[derive(Clone, Debug)]
struct Region {
    spec: RegionSpec,
    mapping: Arc<Mapping>,
    /// Offset of the region in its mapping; file offsets need not be page-aligned.
    skip: usize,
}

impl Region {
    fn host(&self, offset: u64) -> *mut u8 {
        // SAFETY: callers pass offsets below the region's size, which the mapping covers.
        unsafe { self.mapping.base().add(self.skip + offset as usize) }
    }
}

/// An immutable set of regions, sorted by guest-physical address.
#[derive(Clone, Debug, Default)]
pub struct MemoryTable {
    regions: Vec<Region>,
}

impl MemoryTable {
    /// Returns this table with one more region, mapped from `file`.
    ///
    /// # Errors
    /// When the region overlaps another one, wraps around, or its file is too short or cannot be mapped.
    pub fn with_region(
        &self,
        spec: RegionSpec,
        file: BorrowedFd<'_>,
    ) -> Result<MemoryTable, MemoryError> {
        let map = |source| MemoryError::Map {
            size: spec.size,
            file_offset: spec.file_offset,
            source,
        };
        let page = crate::mapping::page_size(file).map_err(map)? as u64;
        let skip = spec.file_offset & (page - 1);
        let length = usize::try_from(spec.size.saturating_add(skip)).unwrap_or(usize::MAX);
        let mapping = Mapping::shared_file(file, spec.file_offset - skip, length).map_err(map)?;
        self.insert(Region {
            spec,
            mapping,
            skip: skip as usize,
        })
    }

    /// Returns this table with one more region in an existing mapping (tests, benchmarks).
    pub fn with_mapping(
        &self,
        spec: RegionSpec,
        mapping: Arc<Mapping>,
    ) -> Result<MemoryTable, MemoryError> {
        if spec.size > mapping.len() as u64 {
            return Err(MemoryError::NotMapped {
                address: spec.guest_address,
                length: spec.size,
            });
        }
        self.insert(Region {
            spec,
            mapping,
            skip: 0,
        })
    }

    fn insert(&self, region: Region) -> Result<MemoryTable, MemoryError> {
        let RegionSpec {
            guest_address,
            size,
            user_address,
            ..
        } = region.spec;
        let overlap = || MemoryError::Overlap {
            guest_address,
            size,
        };
        let guest_end = guest_address.checked_add(size).ok_or_else(overlap)?;
        user_address.checked_add(size).ok_or_else(overlap)?;
        if size == 0 {
            return Err(overlap());
        }
        let overlaps = |r: &Region| {
            let s = &r.spec;
            guest_address < s.guest_address + s.size && s.guest_address < guest_end
        };
        if self.regions.iter().any(overlaps) {
            return Err(overlap());
        }
        let sizes = self.regions.iter().map(|r| r.spec.size);
        if sizes.fold(size, u64::saturating_add) > TABLE_BYTES_MAX {
            return Err(MemoryError::TooMuch);
        }
        let mut regions = self.regions.clone();
        let at = regions.partition_point(|r| r.spec.guest_address < guest_address);
        regions.insert(at, region);
        Ok(MemoryTable { regions })
    }

    /// Returns this table without one region.
    ///
    /// # Errors
    /// When no region has exactly these addresses and this size.
    pub fn without_region(
        &self,
        guest_address: u64,
        user_address: u64,
        size: u64,
    ) -> Result<MemoryTable, MemoryError> {
        let mut regions = self.regions.clone();
        let before = regions.len();
        regions.retain(|r| {
            let s = &r.spec;
            (s.guest_address, s.user_address, s.size) != (guest_address, user_address, size)
        });
        if regions.len() == before {
            return Err(MemoryError::NoSuchRegion {
                guest_address,
                size,
            });
        }
        Ok(MemoryTable { regions })
    }

    /// Number of regions.
    pub fn region_count(&self) -> usize {
        self.regions.len()
    }

    /// Identities of the regions' mappings. Successive tables share unchanged mappings.
    pub fn mappings(&self) -> impl Iterator<Item = *const Mapping> {
        self.regions.iter().map(|r| Arc::as_ptr(&r.mapping))
    }

    /// Returns true if the client truncated one of its files.
    pub fn is_poisoned(&self) -> bool {
        self.regions.iter().any(|r| r.mapping.is_poisoned())
    }

    /// Translates an address of the front end to a guest-physical address.
    pub fn user_to_guest(&self, address: u64) -> Option<u64> {
        self.regions.iter().find_map(|r| {
            let offset = address.checked_sub(r.spec.user_address)?;
            (offset < r.spec.size).then(|| r.spec.guest_address + offset)
        })
    }

    /// Returns the ring memory at a guest-physical address. It must lie in one region.
    ///
    /// # Errors
    /// [`MemoryError::NotMapped`].
    pub fn ring(&self, address: u64, length: u64) -> Result<RingMemory, MemoryError> {
        let not_mapped = MemoryError::NotMapped { address, length };
        let Some(index) = self.region_of(address) else {
            return Err(not_mapped);
        };
        let region = &self.regions[index];
        let offset = address - region.spec.guest_address;
        if length > region.spec.size - offset {
            return Err(not_mapped);
        }
        Ok(RingMemory::new(
            region.mapping.clone(),
            region.skip + offset as usize,
            length as usize,
        ))
    }

    /// Marks the pages of segments of this table in a dirty log.
    pub(crate) fn mark(&self, segments: &[Segment], log: &DirtyLog) {
        let mut last = 0;
        for segment in segments {
            let offset = |region: &Region| {
                let offset = (segment.base() as u64).wrapping_sub(region.host(0) as u64);
                (offset < region.spec.size).then(|| region.spec.guest_address + offset)
            };
            // Segments of a chain are nearly always in one region.
            let address = self.regions.get(last).and_then(offset).or_else(|| {
                let mut regions = self.regions.iter().enumerate();
                let (index, address) = regions.find_map(|(i, r)| Some((i, offset(r)?)))?;
                last = index;
                Some(address)
            });
            if let Some(address) = address {
                log.mark(address, segment.len() as u64);
            }
        }
    }

    fn region_of(&self, address: u64) -> Option<usize> {
        let inside = |r: &Region| address.wrapping_sub(r.spec.guest_address) < r.spec.size;
        let index = self
            .regions
            .partition_point(|r| r.spec.guest_address <= address)
            .checked_sub(1)?;
        inside(&self.regions[index]).then_some(index)
    }
}

/// One worker's pin on a table. Buffers keep it, and through it the mappings, alive. Reference counting costs no
/// atomic operation, because a view never leaves its worker.
#[derive(Clone)]
pub struct GuestView {
    inner: Rc<Inner>,
}

struct Inner {
    table: Arc<MemoryTable>,
    /// Regions of the last look-ups, which nearly always match the next one.
    recent_regions: RecentRegions,
}

/// The last two different regions: those below and above the hole that a PC has under 4 GiB.
pub(crate) struct RecentRegions {
    last: Cell<RecentRegion>,
    other: Cell<RecentRegion>,
}

impl RecentRegions {
    /// Host address of a range that lies in one of the regions as a whole.
    #[inline(always)]
    pub fn find(&self, address: u64, length: u64) -> Option<*mut u8> {
        match self.last.get().find(address, length) {
            Some(host) => Some(host),
            None => self.other.get().find(address, length),
        }
    }

    fn record(&self, hit: RecentRegion) {
        let last = self.last.replace(hit);
        // Except at the first look-up, where the last region may be `RecentRegion::NONE`.
        if hit.guest_address != last.guest_address {
            self.other.set(last);
        }
    }
}

/// A flat copy of a region; a hit accesses no other memory.
#[derive(Clone, Copy)]
struct RecentRegion {
    guest_address: u64,
    size: u64,
    host: *mut u8,
}

impl RecentRegion {
    const NONE: RecentRegion = RecentRegion {
        guest_address: 0,
        size: 0,
        host: std::ptr::null_mut(),
    };

    /// Host address of a range that lies in this region as a whole.
    #[inline(always)]
    fn find(&self, address: u64, length: u64) -> Option<*mut u8> {
        let offset = address.wrapping_sub(self.guest_address);
        if offset < self.size && length <= self.size - offset {
            // SAFETY: inside of the region, which its mapping covers.
            Some(unsafe { self.host.add(offset as usize) })
        } else {
            None
        }
    }
}

impl GuestView {
    /// Pins a table for this worker.
    pub fn new(table: Arc<MemoryTable>) -> GuestView {
        GuestView {
            inner: Rc::new(Inner {
                table,
                recent_regions: RecentRegions {
                    last: Cell::new(RecentRegion::NONE),
                    other: Cell::new(RecentRegion::NONE),
                },
            }),
        }
    }

    /// The pinned table.
    pub fn table(&self) -> &Arc<MemoryTable> {
        &self.inner.table
    }

    /// Appends the range at a guest-physical address to `buffer`. A range over adjacent regions becomes several
    /// segments.
    ///
    /// # Errors
    /// [`MemoryError::NotMapped`]; the buffer may then hold a part of the range.
    ///
    /// # Panics
    /// When the buffer already holds memory of another kind or view.
    #[inline]
    pub fn append(
        &self,
        address: u64,
        length: u32,
        buffer: &mut IoBuffer,
    ) -> Result<(), MemoryError> {
        buffer.pin_guest(self);
        if let Some(host) = self.inner.recent_regions.find(address, u64::from(length)) {
            buffer.push(Segment::new(host, length as usize));
            return Ok(());
        }
        let appended = self.append_by_search(address, u64::from(length), buffer);
        buffer.open();
        appended
    }

    /// Empties a buffer and returns an appender that adds ranges as [`append`](Self::append) does, until
    /// [`Appender::finish`].
    pub fn appender<'a>(&'a self, buffer: &'a mut IoBuffer) -> Appender<'a> {
        Appender::new(self, buffer)
    }

    /// Same as [`appender`](Self::appender), for up to `limit` ranges of the common case.
    #[inline(always)]
    pub fn filler<'a>(&'a self, buffer: &'a mut IoBuffer, limit: usize) -> Filler<'a> {
        Filler::new(self, buffer, limit)
    }

    #[cold]
    fn append_by_search(
        &self,
        address: u64,
        length: u64,
        buffer: &mut IoBuffer,
    ) -> Result<(), MemoryError> {
        self.segments(address, length, |segment| buffer.extend(segment))
    }

    /// Calls `each` for every host segment of a guest-physical range, and records the last region.
    pub(crate) fn segments(
        &self,
        address: u64,
        length: u64,
        mut each: impl FnMut(Segment),
    ) -> Result<(), MemoryError> {
        let inner = &*self.inner;
        let (mut at, mut left) = (address, length);
        loop {
            let Some(index) = inner.table.region_of(at) else {
                return Err(MemoryError::NotMapped { address, length });
            };
            let region = &inner.table.regions[index];
            inner.recent_regions.record(RecentRegion {
                guest_address: region.spec.guest_address,
                size: region.spec.size,
                host: region.host(0),
            });
            let offset = at - region.spec.guest_address;
            let piece = left.min(region.spec.size - offset);
            each(Segment::new(region.host(offset), piece as usize));
            left -= piece;
            if left == 0 {
                return Ok(());
            }
            // Cannot wrap, because regions do not.
            at += piece;
        }
    }

    /// Reads a plain value at a guest-physical address. Copies it once, so that the caller uses the value that it
    /// checked.
    ///
    /// # Errors
    /// [`MemoryError::NotMapped`].
    #[inline]
    pub fn read<T: FromBytes>(&self, address: u64) -> Result<T, MemoryError> {
        const { assert!(size_of::<T>() > 0, "nothing to read") };
        if let Some(host) = self
            .inner
            .recent_regions
            .find(address, size_of::<T>() as u64)
        {
            // SAFETY: in a region, which the table keeps mapped.
            return Ok(unsafe { volatile::load(host.cast::<T>()) });
        }
        self.read_fragmented(address)
    }

    /// Reads a value outside of the recent regions or across several.
    #[cold]
    pub(crate) fn read_fragmented<T: FromBytes>(&self, address: u64) -> Result<T, MemoryError> {
        let mut value = MaybeUninit::<T>::zeroed();
        let mut done = 0;
        self.segments(address, size_of::<T>() as u64, |segment| {
            // SAFETY: the segment is mapped, kept by the table, and the pieces add up to the value's size.
            unsafe {
                let into = value.as_mut_ptr().cast::<u8>().add(done);
                volatile::copy_out(segment.base(), into, segment.len());
            }
            done += segment.len();
        })?;
        // SAFETY: zeroed, then written; FromBytes makes any bytes a value.
        Ok(unsafe { value.assume_init() })
    }

    /// Prefetches the cache line at a guest-physical address, if it is in a recent region.
    #[inline]
    pub fn prefetch(&self, address: u64) {
        if let Some(host) = self.inner.recent_regions.find(address, 1) {
            prefetch_line(host);
        }
    }

    #[inline(always)]
    pub(crate) fn recent_regions(&self) -> &RecentRegions {
        &self.inner.recent_regions
    }

    #[inline(always)]
    pub(crate) fn is_same(&self, other: &GuestView) -> bool {
        Rc::ptr_eq(&self.inner, &other.inner)
    }

    /// Number of holders of this view, including this one.
    pub fn pins(&self) -> usize {
        Rc::strong_count(&self.inner)
    }
}

impl std::fmt::Debug for GuestView {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GuestView")
            .field("regions", &self.inner.table.region_count())
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(guest_address: u64, size: u64) -> RegionSpec {
        RegionSpec {
            guest_address,
            size,
            user_address: guest_address + 0x7000_0000,
            file_offset: 0,
        }
    }

    #[test]
    fn appender_does_what_append_does() {
        let view = GuestView::new(Arc::new(two_regions()));
        let (mut one, mut other) = (IoBuffer::default(), IoBuffer::default());
        let mut appender = view.appender(&mut other);
        for (address, length) in [(0x1000, 16), (0x3000, 16), (0x2ff0, 32), (0x1010, 16)] {
            view.append(address, length, &mut one).unwrap();
            appender.append(address, length).unwrap();
            assert!(appender.read::<u64>(address).is_ok());
        }
        assert!(appender.read::<u64>(0x3ffc).is_err());
        appender.finish();
        assert_eq!((one.segments(), one.total_len()), (other.segments(), 80));
    }

    #[test]
    fn filler_does_what_an_appender_does_or_refuses() {
        let view = GuestView::new(Arc::new(two_regions()));
        let (mut one, mut other) = (IoBuffer::default(), IoBuffer::default());
        assert!(
            !view.filler(&mut other, 8).append(0x1000, 1),
            "nothing is known"
        );
        for address in [0x3000, 0x1000] {
            view.append(address, 1, &mut other).unwrap();
        }
        let mut filler = view.filler(&mut other, 3);
        for (address, length) in [(0x1000, 16), (0x3000, 4096), (0x2fff, 1)] {
            view.append(address, length, &mut one).unwrap();
            assert!(filler.append(address, length));
        }
        for (address, length) in [(0x2fff, 2), (0x3001, 4096), (0xfff, 1), (u64::MAX, 2)] {
            assert!(!filler.append(address, length), "{address:#x}");
        }
        assert!(!filler.append(0x1000, 1), "three at most");
        assert_eq!(filler.finish(4113, 0), 3);
        assert_eq!((one.segments(), one.total_len()), (other.segments(), 4113));
        let mut unfinished = view.filler(&mut other, 8);
        while unfinished.append(0x1000, 1) {}
        view.appender(&mut other).finish();
        assert!(other.segments().is_empty(), "it was not finished");
    }

    #[test]
    fn table_of_client_memory_has_so_many_entries_and_no_more() {
        let table = two_regions();
        table.regions[0].mapping.write(8184, &7u64.to_le_bytes());
        let view = GuestView::new(Arc::new(table));
        let mut buffer = IoBuffer::default();
        for _ in 0..8 {
            view.append(0x1000, 1, &mut buffer).unwrap(); // makes room
        }
        for (address, bytes) in [(0x2ff0, 24), (0x4000, 8), (0x2ff0, 12), (0x2ff0, 7)] {
            let unusual = view.filler(&mut buffer, 8).table::<u64>(address, bytes);
            assert!(unusual.is_none(), "{address:#x} {bytes}");
        }
        let mut entries = view
            .filler(&mut buffer, 8)
            .table::<u64>(0x2ff0, 16)
            .unwrap();
        assert_eq!(entries.entry(), Some(0));
        assert!(entries.append(0x1000, 512) && !entries.is_complete());
        assert_eq!(entries.entry(), Some(u64::from_le(7)));
        assert!(entries.append(0x1200, 512) && entries.is_complete());
        assert_eq!((entries.count(), entries.entry()), (2, None));
        assert!(!entries.append(0x1000, 512), "one for each entry");
        assert_eq!(entries.finish(1024, 1), 2);
        assert_eq!((buffer.segments().len(), buffer.len()), (2, 1024));

        let mut few_free_slots = view
            .filler(&mut buffer, 1)
            .table::<u64>(0x2ff0, 16)
            .unwrap();
        assert!(few_free_slots.entry().is_some() && few_free_slots.append(0x1000, 1));
        assert!(few_free_slots.entry().is_none() && !few_free_slots.is_complete());
        let mut begun = view.filler(&mut buffer, 8);
        assert!(begun.append(0x1000, 1));
        assert!(begun.table::<u64>(0x2ff0, 16).is_none(), "begun otherwise");
        let none = view.filler(&mut buffer, 8).table::<u64>(0x2ff0, 0).unwrap();
        assert!(none.entry().is_none() && none.is_complete());
    }

    fn two_regions() -> MemoryTable {
        let a = Mapping::anonymous(8192).unwrap();
        let b = Mapping::anonymous(4096).unwrap();
        MemoryTable::default()
            .with_mapping(spec(0x1000, 8192), a)
            .unwrap()
            .with_mapping(spec(0x3000, 4096), b)
            .unwrap()
    }

    #[test]
    fn range_over_touching_regions_becomes_two_segments() {
        let view = GuestView::new(Arc::new(two_regions()));
        let mut buffer = IoBuffer::default();
        view.append(0x2ff0, 32, &mut buffer).unwrap();
        assert_eq!((buffer.len(), buffer.segments().len()), (32, 2));
    }

    #[test]
    fn range_outside_is_refused() {
        let view = GuestView::new(Arc::new(two_regions()));
        for (address, length) in [
            (0, 1),
            (0xfff, 2),
            (0x3ff0, 17),
            (0x4000, 1),
            (u64::MAX, 2),
            (u64::MAX - 1, u32::MAX),
        ] {
            let mut buffer = IoBuffer::default();
            assert!(
                view.append(address, length, &mut buffer).is_err(),
                "{address:#x}+{length}"
            );
        }
    }

    #[test]
    fn value_is_read_across_touching_regions_and_refused_outside() {
        let table = two_regions();
        table.regions[0].mapping.write(8188, &[1, 2, 3, 4]);
        table.regions[1].mapping.write(0, &[5, 6, 7, 8]);
        let view = GuestView::new(Arc::new(table));
        assert_eq!(
            view.read::<[u8; 8]>(0x2ffc).unwrap(),
            [1, 2, 3, 4, 5, 6, 7, 8]
        );
        assert_eq!(view.read::<[u8; 4]>(0x2ffc).unwrap(), [1, 2, 3, 4]);
        assert_eq!(view.read::<[u8; 4]>(0x3000).unwrap(), [5, 6, 7, 8]);
        for address in [0xfff, 0x3ff9, 0x4000, u64::MAX - 3] {
            assert!(view.read::<[u8; 8]>(address).is_err(), "{address:#x}");
            view.prefetch(address);
        }
    }

    #[test]
    fn ring_memory_must_lie_in_one_region() {
        let table = two_regions();
        assert!(table.ring(0x2ff0, 16).is_ok());
        assert!(table.ring(0x2ff0, 17).is_err());
        assert!(table.ring(u64::MAX, 16).is_err());
        assert_eq!(table.user_to_guest(0x7000_1010), Some(0x1010));
        assert_eq!(table.user_to_guest(0x1010), None);
    }

    #[test]
    fn overlapping_and_wrapping_regions_are_refused() {
        let table = two_regions();
        let m = Mapping::anonymous(1 << 20).unwrap();
        for (address, size) in [
            (0x3800, 16),
            (0, 0x1001),
            (0, 1 << 20),
            (u64::MAX - 4095, 8192),
        ] {
            let spec = RegionSpec {
                guest_address: address,
                size,
                user_address: 0,
                file_offset: 0,
            };
            assert!(
                table.with_mapping(spec, m.clone()).is_err(),
                "{address:#x}+{size}"
            );
        }
    }

    #[test]
    fn mapping_lives_until_the_last_buffer_is_gone() {
        let mapping = Mapping::anonymous(4096).unwrap();
        let watch = Arc::downgrade(&mapping);
        let table = Arc::new(
            MemoryTable::default()
                .with_mapping(spec(0, 4096), mapping)
                .unwrap(),
        );
        let view = GuestView::new(table.clone());
        let mut buffer = IoBuffer::default();
        view.append(0, 512, &mut buffer).unwrap();
        let changed = table.without_region(0, 0x7000_0000, 4096).unwrap();
        drop((view, table));
        assert!(watch.upgrade().is_some(), "an I/O still refers to it");
        drop(buffer);
        assert!(watch.upgrade().is_none());
        assert_eq!(changed.region_count(), 0);
    }
}
