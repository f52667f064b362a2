//! Guest memory shared by a VMM: memfd regions, with an allocator for areas in the first one.

use std::fs::File;
use std::os::fd::AsFd;
use std::sync::Arc;

use guest_memory::{Mapping, MemoryTable, RegionSpec};
use rustix::fs::{FallocateFlags, MemfdFlags, memfd_create};
use vhost_user_wire::MemoryRegion;

use crate::{Error, Message, Result};

/// Offset of the claimed user addresses; only the back end translates them.
const USER_OFFSET: u64 = 0x7f00_0000_0000;
/// First guest-physical address. Address 0 is invalid, so that an unset address is detected.
const FIRST_ADDRESS: u64 = 0x10_0000;

/// Size of a huge page in bytes.
pub const HUGE_PAGE: u64 = 2 << 20;

/// A readable and writable range of a region.
#[derive(Clone)]
pub struct Area {
    mapping: Arc<Mapping>,
    offset: usize,
    /// Guest-physical address.
    pub address: u64,
    /// Length in bytes.
    pub length: usize,
}

impl Area {
    /// Copies from byte `at` of the area.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        assert!(at + into.len() <= self.length, "read outside of an area");
        self.mapping.read(self.offset + at, into);
    }

    /// Copies to byte `at` of the area.
    pub fn write(&self, at: usize, from: &[u8]) {
        assert!(at + from.len() <= self.length, "write outside of an area");
        self.mapping.write(self.offset + at, from);
    }

    /// Returns a part of the area.
    pub fn part(&self, at: usize, length: usize) -> Area {
        assert!(at + length <= self.length, "part outside of an area");
        Area {
            mapping: self.mapping.clone(),
            offset: self.offset + at,
            address: self.address + at as u64,
            length,
        }
    }

    /// Returns address and length for a descriptor.
    pub fn element(&self) -> (u64, u32) {
        (self.address, self.length as u32)
    }
}

/// One region: a mapped memfd.
pub struct Region {
    /// Addresses and size, as sent to the back end.
    pub spec: RegionSpec,
    /// The memfd.
    pub file: File,
    mapping: Arc<Mapping>,
}

impl Region {
    fn new(guest_address: u64, size: usize, huge_pages: bool) -> Result<Region> {
        let mut flags = MemfdFlags::CLOEXEC;
        if huge_pages {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        // Huge pages are reserved here, because touching a missing one would raise SIGBUS.
        let make = || {
            let file = File::from(memfd_create("front-end", flags)?);
            file.set_len(size as u64)?;
            if huge_pages {
                let whole = (size as u64).next_multiple_of(HUGE_PAGE);
                rustix::fs::fallocate(&file, FallocateFlags::empty(), 0, whole)?;
            }
            let mapping = Mapping::shared_file(file.as_fd(), 0, size)?;
            Ok::<_, Error>((file, mapping))
        };
        let (file, mapping) = match make() {
            Err(Error::Io(error)) if huge_pages => {
                return Err(Error::HugePages {
                    pages: (size as u64).div_ceil(HUGE_PAGE),
                    error,
                });
            }
            made => made?,
        };
        Ok(Region {
            spec: RegionSpec {
                guest_address,
                size: size as u64,
                user_address: guest_address + USER_OFFSET,
                file_offset: 0,
            },
            file,
            mapping,
        })
    }

    /// Returns the whole region as an area.
    pub fn area(&self) -> Area {
        Area {
            mapping: self.mapping.clone(),
            offset: 0,
            address: self.spec.guest_address,
            length: self.mapping.len(),
        }
    }

    /// Returns the region's description for a message.
    pub fn description(&self) -> MemoryRegion {
        MemoryRegion {
            guest_address: self.spec.guest_address,
            size: self.spec.size,
            user_address: self.spec.user_address,
            mmap_offset: self.spec.file_offset,
        }
    }
}

/// All regions of one guest.
pub struct Memory {
    regions: Vec<Region>,
    /// Next free address of the first region, and address of the next region.
    free: u64,
    next: u64,
}

impl Memory {
    /// Creates memory with one region.
    pub fn new(size: usize, huge_pages: bool) -> Result<Memory> {
        let first = Region::new(FIRST_ADDRESS, size, huge_pages)?;
        Ok(Memory {
            free: FIRST_ADDRESS,
            next: (FIRST_ADDRESS + size as u64).next_multiple_of(1 << 20),
            regions: vec![first],
        })
    }

    /// Returns the regions in order.
    pub fn regions(&self) -> &[Region] {
        &self.regions
    }

    /// Allocates memory in the first region.
    pub fn allocate(&mut self, bytes: usize, alignment: u64) -> Result<Area> {
        let first = &self.regions[0];
        let at = self.free.next_multiple_of(alignment);
        let offset = at - first.spec.guest_address;
        let fits = first
            .spec
            .size
            .checked_sub(offset)
            .is_some_and(|left| left >= bytes as u64);
        if !fits {
            return Err(Error::Full(bytes as u64));
        }
        self.free = at + bytes as u64;
        Ok(self.regions[0].area().part(offset as usize, bytes))
    }

    /// Adds a region after the others, without a message to the back end.
    pub fn add(&mut self, size: usize) -> Result<&Region> {
        let region = Region::new(self.next, size, false)?;
        self.next = (self.next + size as u64).next_multiple_of(1 << 20);
        self.regions.push(region);
        Ok(&self.regions[self.regions.len() - 1])
    }

    /// Removes a region, without a message to the back end.
    pub fn take(&mut self, guest_address: u64) -> Option<Region> {
        let at = self
            .regions
            .iter()
            .position(|region| region.spec.guest_address == guest_address)?;
        Some(self.regions.remove(at))
    }

    /// Adds a removed region again.
    pub fn put(&mut self, region: Region) {
        self.regions.push(region);
    }

    /// Returns the regions as a table for the driver side of a ring.
    pub fn table(&self) -> Result<MemoryTable> {
        let mut table = MemoryTable::default();
        for region in &self.regions {
            table = table.with_mapping(region.spec, region.mapping.clone())?;
        }
        Ok(table)
    }

    /// Returns the message with all regions (`SET_MEM_TABLE`).
    pub fn message(&self) -> Message<'_> {
        let regions = self.regions.iter();
        Message::SetMemTable(regions.map(|r| (r.description(), r.file.as_fd())).collect())
    }
}
