//! One mmap, unmapped when its last user drops it.
//!
//! Shared through `Arc` and used from any thread. Accesses are raw copies or volatile loads, never references, because the peers of the
//! memory may write to it at any time.

use std::fs::File;
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustix::fs::{
    MemfdFlags, SealFlags, SeekFrom, fcntl_add_seals, fcntl_get_seals, ftruncate, memfd_create,
    seek,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};

use crate::{copy, sigbus};

/// Flags of private zeroes. Miri does not support NORESERVE.
const ANONYMOUS: MapFlags = match cfg!(miri) {
    true => MapFlags::PRIVATE,
    false => MapFlags::PRIVATE.union(MapFlags::NORESERVE),
};

/// Maximum address space for clients' memory, in bytes: three quarters of the 2^47 of a process. Sparse files may have any length, and
/// a process without free addresses cannot allocate memory.
const CLIENTS_BYTES_MAX: usize = 96 << 40;

/// Address space in use by clients' memory, in bytes.
static CLIENTS_BYTES: AtomicUsize = AtomicUsize::new(0);

/// One mapping's share of `CLIENTS_BYTES`.
struct AddressSpaceShare(usize);

impl AddressSpaceShare {
    fn reserve(bytes: usize) -> io::Result<AddressSpaceShare> {
        let more = |taken: usize| {
            let sum = taken.checked_add(bytes)?;
            (sum <= CLIENTS_BYTES_MAX).then_some(sum)
        };
        let (success, failure) = (Ordering::Relaxed, Ordering::Relaxed);
        match CLIENTS_BYTES.fetch_update(success, failure, more) {
            Ok(_) => Ok(AddressSpaceShare(bytes)),
            Err(taken) => Err(io::Error::other(format!(
                "cannot map more client memory: clients already share {} GiB",
                taken >> 30
            ))),
        }
    }
}

impl Drop for AddressSpaceShare {
    fn drop(&mut self) {
        CLIENTS_BYTES.fetch_sub(self.0, Ordering::Relaxed);
    }
}

/// An address range of this process that was mapped by this crate.
pub struct Mapping {
    base: *mut u8,
    length: usize,
    mapped: usize,
    watch: Option<sigbus::Watch>,
    /// Returned when the memory is unmapped.
    _share: Option<AddressSpaceShare>,
    /// The daemon's own memfd, and the offset of the mapping in it.
    sealed_memfd: Option<(File, u64)>,
}

// SAFETY: the mapping is plain memory that every thread of the process sees alike; all accesses through it are raw copies, volatile
// loads or atomics, for which no thread affinity exists.
unsafe impl Send for Mapping {}
// SAFETY: as above; the only interior state is the memory itself, which is shared with the client anyway.
unsafe impl Sync for Mapping {}

/// Maps a part of a file as shared, readable and writable.
fn map_shared(file: BorrowedFd<'_>, offset: u64, length: usize) -> io::Result<*mut u8> {
    let (prot, flags) = (
        ProtFlags::READ | ProtFlags::WRITE,
        MapFlags::SHARED | MapFlags::NORESERVE,
    );
    // SAFETY: a new mapping at an address that the kernel chooses cannot overlap an existing object of this process.
    let base = unsafe { mmap(std::ptr::null_mut(), length, prot, flags, file, offset)? };
    Ok(base.cast())
}

impl Mapping {
    /// Maps `length` bytes of `file` at `offset` as shared, readable and writable.
    ///
    /// # Errors
    /// `EINVAL` for an empty or unaligned range, or for one that ends beyond the file. A message if page faults of the file system may
    /// block on another program, or if clients share too much memory or too many mappings. Otherwise the error of mmap.
    pub fn shared_file(
        file: BorrowedFd<'_>,
        offset: u64,
        length: usize,
    ) -> io::Result<Arc<Mapping>> {
        let stat = rustix::fs::fstat(file)?;
        let is_regular = rustix::fs::FileType::from_raw_mode(stat.st_mode).is_file();
        // munmap requires whole huge pages. Bytes beyond the file are mapped but never accessed.
        let mapped = length.checked_next_multiple_of(page_size(file)?);
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        let beyond = offset > size || length as u64 > size - offset;
        let (Some(mapped), false) = (mapped, length == 0 || (is_regular && beyond)) else {
            return Err(io::Error::from(rustix::io::Errno::INVAL));
        };
        let share = AddressSpaceShare::reserve(mapped)?;
        let base = map_shared(file.as_fd(), offset, mapped)?;
        let mut mapping = Mapping {
            base,
            length,
            mapped,
            watch: None,
            _share: Some(share),
            sealed_memfd: None,
        };
        // If a client truncates its file later, the watch converts SIGBUS into a poisoned mapping.
        mapping.watch = sigbus::Watch::new(base as usize, mapped);
        match mapping.watch {
            Some(_) => Ok(Arc::new(mapping)),
            None => Err(io::Error::other(
                "cannot watch the mapping for truncation: clients share too many regions",
            )),
        }
    }

    /// Maps `length` bytes of private zeroes. Pages are allocated when touched.
    pub fn anonymous(length: usize) -> io::Result<Arc<Mapping>> {
        if length == 0 {
            return Err(io::Error::from(rustix::io::Errno::INVAL));
        }
        crate::used_pages::pagemap();
        // SAFETY: as in `map_shared`.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                ANONYMOUS,
            )?
        };
        Ok(Arc::new(Mapping {
            base: base.cast(),
            length,
            mapped: length,
            watch: None,
            _share: None,
            sealed_memfd: None,
        }))
    }

    /// Creates a memfd of `length` zeroes for [`Mapping::sealed_memfd`]. Pages are allocated when touched; a seal prevents shrinking.
    ///
    /// # Errors
    /// The error of the system call.
    pub fn create_sealed_memfd(name: &str, length: u64) -> io::Result<File> {
        let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        let fd = memfd_create(name, flags)?;
        ftruncate(&fd, length)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK)?;
        Ok(File::from(fd))
    }

    /// Returns true if a memfd has pages at or after byte `offset`, or if the kernel does not support the query.
    pub fn has_data_from(file: &File, offset: u64) -> bool {
        !matches!(
            seek(file, SeekFrom::Data(offset)),
            Err(rustix::io::Errno::NXIO)
        )
    }

    /// Maps `length` bytes of a memfd that belongs to this process and that another process keeps after its end.
    ///
    /// # Errors
    /// `EINVAL` for an empty or unaligned range, for one beyond the file, or for a file without a seal against shrinking. Otherwise the
    /// error of mmap.
    pub fn sealed_memfd(file: &File, offset: u64, length: usize) -> io::Result<Arc<Mapping>> {
        let size = file.metadata()?.len();
        let is_within = offset <= size && length as u64 <= size - offset;
        // Truncation under this mapping would raise SIGBUS and end the process.
        let is_sealed = fcntl_get_seals(file).is_ok_and(|seals| seals.contains(SealFlags::SHRINK));
        if length == 0 || !is_within || !is_sealed || !(offset | length as u64).is_multiple_of(4096)
        {
            return Err(io::Error::from(rustix::io::Errno::INVAL));
        }
        let own = file.try_clone()?;
        let base = map_shared(file.as_fd(), offset, length)?;
        Ok(Arc::new(Mapping {
            base,
            length,
            mapped: length,
            watch: None,
            _share: None,
            sealed_memfd: Some((own, offset)),
        }))
    }

    /// Creates a memfd of `length` bytes and maps it, as a front end does to share memory.
    pub fn memfd(name: &str, length: usize) -> io::Result<(Arc<Mapping>, File)> {
        let fd = rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?;
        rustix::fs::ftruncate(&fd, length as u64)?;
        let mapping = Mapping::shared_file(fd.as_fd(), 0, length)?;
        Ok((mapping, File::from(fd)))
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.length
    }

    /// Always false: empty mappings are refused.
    pub fn is_empty(&self) -> bool {
        self.length == 0
    }

    /// Address of the first byte, for tables that translate addresses and for the kernel.
    pub fn base(&self) -> *mut u8 {
        self.base
    }

    /// Returns true if the file was truncated; the contents are then private zeroes.
    pub fn is_poisoned(&self) -> bool {
        self.watch.as_ref().is_some_and(sigbus::Watch::is_poisoned)
    }

    /// Requests huge pages for the mapping. The kernel may ignore the hint.
    pub fn advise_huge_pages(&self) -> io::Result<()> {
        self.advise(0, self.length, Advice::LinuxHugepage)
    }

    /// Frees the pages of a range. Private ranges read as zeroes afterwards.
    ///
    /// # Panics
    /// When the range lies outside of the mapping or is not made of whole pages.
    pub fn free_pages(&self, offset: usize, length: usize) -> io::Result<()> {
        assert!(
            (offset | length).is_multiple_of(4096),
            "give back of partial pages: {offset}+{length}"
        );
        if length == 0 {
            return Ok(());
        }
        let advice = match self.sealed_memfd {
            // Frees the pages of the file, not only this process' mapping of them.
            Some(_) => Advice::LinuxRemove,
            None => Advice::LinuxDontNeed,
        };
        self.advise(offset, length, advice)
    }

    /// Returns the first bytes at or after `offset` that have pages, or a part of them; bytes before the result read as zeroes. Empty,
    /// at the mapping's end, if there are none. If the kernel does not support the query, all bytes count as used. Only for
    /// memory that was never shared.
    pub fn next_used(&self, offset: usize) -> Range<usize> {
        if offset >= self.length {
            return self.length..self.length;
        }
        if let Some((file, start)) = &self.sealed_memfd {
            return self.next_data(file, *start, offset);
        }
        let base = self.base as usize;
        let page = (base + offset) & !4095;
        let end = (base + self.length).next_multiple_of(4096);
        let used = crate::used_pages::first_used(page as u64, end as u64);
        let to_offset = |address: u64| {
            let offset_in = (address as usize).saturating_sub(base);
            offset_in.clamp(offset, self.length)
        };
        to_offset(used.start)..to_offset(used.end)
    }

    /// Returns the first range at or after `offset` that has pages in a memfd.
    fn next_data(&self, file: &File, start: u64, offset: usize) -> Range<usize> {
        let to_offset = |at: u64| {
            usize::try_from(at.saturating_sub(start))
                .map_or(self.length, |at| at.clamp(offset, self.length))
        };
        match seek(file, SeekFrom::Data(start + offset as u64)) {
            Ok(data) => {
                let hole = seek(file, SeekFrom::Hole(data)).unwrap_or(u64::MAX);
                to_offset(data)..to_offset(hole)
            }
            // No data up to the end of the file.
            Err(rustix::io::Errno::NXIO) => self.length..self.length,
            Err(_) => offset..self.length,
        }
    }

    fn advise(&self, offset: usize, length: usize, advice: Advice) -> io::Result<()> {
        let start = self.checked(offset, length);
        // SAFETY: the range is inside this mapping. The advice changes only contents, which may change at any time anyway.
        unsafe { madvise(start.cast(), length, advice)? };
        Ok(())
    }

    /// Returns the address of a range inside of the mapping.
    ///
    /// # Panics
    /// When the range lies outside. Ranges from a peer must be checked before.
    #[inline]
    pub(crate) fn checked(&self, offset: usize, length: usize) -> *mut u8 {
        assert!(
            length <= self.length && offset <= self.length - length,
            "range outside of mapping: {offset} + {length} > {}",
            self.length
        );
        // SAFETY: just checked to be inside of one mapping.
        unsafe { self.base.add(offset) }
    }

    /// Prefetches the first lines for a later read of this range into a buffer. Any range is allowed.
    #[inline]
    pub fn prefetch_read(&self, offset: usize, length: usize) {
        copy::prefetch_to_client(self.base.wrapping_add(offset), length);
    }

    /// Same as [`Mapping::prefetch_read`], for a write from a buffer.
    #[inline]
    pub fn prefetch_write(&self, offset: usize, length: usize) {
        copy::prefetch_from_client(self.base.wrapping_add(offset), length);
    }

    /// Copies out of the mapping, for data that are not parsed. Panics if the range lies outside.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.checked(offset, into.len());
        // SAFETY: the source was checked above and the destination is an exclusive slice. They cannot overlap, because no Rust slice
        // covers memory of a mapping.
        unsafe { std::ptr::copy_nonoverlapping(from, into.as_mut_ptr(), into.len()) }
    }

    /// Copies into the mapping. Panics if the range lies outside.
    pub fn write(&self, offset: usize, from: &[u8]) {
        let into = self.checked(offset, from.len());
        // SAFETY: as in `read`, in the other direction.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), into, from.len()) }
    }

    /// Sets a range to one byte. Panics if the range lies outside.
    pub fn fill(&self, offset: usize, length: usize, byte: u8) {
        let into = self.checked(offset, length);
        // SAFETY: range checked above.
        unsafe { std::ptr::write_bytes(into, byte, length) }
    }
}

/// One worker's pin on a mapping. Its clones cost no atomic operation and write no cache line shared with other workers.
#[expect(
    clippy::redundant_allocation,
    reason = "the inner count is shared with other workers, the outer one is this worker's"
)]
#[derive(Clone, Debug)]
pub struct MappingView(Rc<Arc<Mapping>>);

impl MappingView {
    /// Creates a pin.
    pub fn new(mapping: &Arc<Mapping>) -> MappingView {
        MappingView(Rc::new(mapping.clone()))
    }

    /// Returns true if the pin has clones, for example in a buffer.
    pub fn is_shared(&self) -> bool {
        Rc::strong_count(&self.0) > 1
    }
}

impl std::ops::Deref for MappingView {
    type Target = Mapping;

    #[inline]
    fn deref(&self) -> &Mapping {
        &self.0
    }
}

/// File systems (linux/magic.h) whose pages the kernel itself provides. On others (FUSE, NFS) a page fault blocks the worker until
/// another program answers, which may be the client itself.
const FILE_SYSTEMS: [u64; 9] = [
    0x0102_1994, // tmpfs: memfd, shared memory, devices
    0x9584_58f6, // hugetlbfs
    0x8584_58f6, // ramfs
    0xef53,      // ext2, ext3, ext4
    0x5846_5342, // XFS
    0x9123_683e, // btrfs
    0xf2f5_2010, // F2FS
    0x2fc1_2fc1, // ZFS
    0x794c_7630, // overlayfs
];
const HUGETLBFS: u64 = FILE_SYSTEMS[1];

/// Page size of a file on a file system, in bytes.
fn page_bytes(file_system: u64, block: u64) -> io::Result<usize> {
    match file_system & 0xffff_ffff {
        HUGETLBFS => Ok(usize::try_from(block).unwrap_or(4096)),
        known if FILE_SYSTEMS.contains(&known) => Ok(4096),
        other => Err(io::Error::other(format!(
            "its file system (type {other:#x}) may block the daemon; hint: use memfd, hugetlbfs or a local disk"
        ))),
    }
}

/// Page size of a file in bytes: 4096, or the huge page size on hugetlbfs.
pub(crate) fn page_size(file: BorrowedFd<'_>) -> io::Result<usize> {
    let stat = rustix::fs::fstatfs(file)?;
    page_bytes(stat.f_type as u64, stat.f_bsize as u64)
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // Removes the watch first, because the address range may be reused as soon as it is unmapped.
        self.watch = None;
        // SAFETY: base and length are those of this mapping's mmap, and every user held an `Arc` to it.
        let unmapped = unsafe { munmap(self.base.cast(), self.mapped) };
        debug_assert!(unmapped.is_ok(), "munmap of our own mapping: {unmapped:?}");
    }
}

impl std::fmt::Debug for Mapping {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mapping")
            .field("base", &self.base)
            .field("length", &self.length)
            .finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_whose_pages_come_from_another_program_is_refused() {
        // FUSE, NFS, 9P, CIFS, Ceph
        for other in [0x6573_5546, 0x6969, 0x0102_1997, 0xff53_4d42, 0x00c3_6400] {
            assert!(page_bytes(other, 4096).is_err(), "{other:#x}");
        }
        for (ours, block, page) in [
            (0x0102_1994, 4096, 4096),
            (0xef53, 1024, 4096),
            (0x5846_5342, 4096, 4096),
            (0xffff_ffff_9584_58f6, 2 << 20, 2 << 20),
        ] {
            assert_eq!(page_bytes(ours, block).unwrap(), page, "{ours:#x}");
        }
    }

    #[test]
    fn what_is_written_is_read() {
        let m = Mapping::anonymous(8192).unwrap();
        m.write(4090, b"lunette");
        let mut read = [0; 7];
        m.read(4090, &mut read);
        assert_eq!(&read, b"lunette");
    }

    #[test]
    fn freed_pages_read_zero() {
        let m = Mapping::anonymous(8192).unwrap();
        m.fill(0, 8192, 7);
        m.free_pages(4096, 4096).unwrap();
        let mut read = [9; 2];
        m.read(4095, &mut read);
        assert_eq!(read, [7, 0]);
    }

    #[test]
    fn sealed_memfd_outlives_its_mapping_and_reports_holes() {
        const MIB: usize = 1 << 20;
        let file = Mapping::create_sealed_memfd("kept", 8 << 20).unwrap();
        let map = || Mapping::sealed_memfd(&file, 2 << 20, 6 * MIB).unwrap();
        let first = map();
        assert_eq!(first.next_used(0), 6 * MIB..6 * MIB);
        first.write(MIB + 10, b"lunette");
        drop(first);
        assert!(Mapping::has_data_from(&file, 3 << 20));
        assert!(!Mapping::has_data_from(&file, 4 << 20));
        let remapped = map();
        let mut read = [0; 7];
        remapped.read(MIB + 10, &mut read);
        assert_eq!(&read, b"lunette");
        assert_eq!(remapped.next_used(0), MIB..MIB + 4096);
        assert_eq!(remapped.next_used(MIB + 4096).start, 6 * MIB);
        remapped.free_pages(MIB, 4096).unwrap();
        assert_eq!(remapped.next_used(0).start, 6 * MIB);
        // Reading a hole allocates a page.
        remapped.read(MIB + 10, &mut read);
        assert_eq!((read, remapped.next_used(0).start), ([0; 7], MIB));
        assert!(file.set_len(4096).is_err(), "it never becomes shorter");
        for (offset, length) in [(0, 0), (0, 9 * MIB), (100, MIB), (9 << 20, 4096), (0, 100)] {
            assert!(
                Mapping::sealed_memfd(&file, offset, length).is_err(),
                "{offset} {length}"
            );
        }
        let unsealed = Mapping::memfd("unsealed", MIB).unwrap().1;
        assert!(Mapping::sealed_memfd(&unsealed, 0, MIB).is_err());
    }

    #[test]
    fn nothing_but_used_bytes_is_other_than_zero() {
        const MIB: usize = 1 << 20;
        let m = Mapping::anonymous(64 * MIB).unwrap();
        let nothing = 64 * MIB..64 * MIB;
        let is_supported = m.next_used(0) == nothing;
        for at in [5 * MIB, 33 * MIB + 100] {
            m.write(at, &[1]);
        }
        assert!(m.next_used(0).start <= 5 * MIB && m.next_used(5 * MIB).start == 5 * MIB);
        assert_eq!(m.next_used(64 * MIB), nothing);
        if is_supported {
            // Pages, up to huge ones, are used as a whole.
            let first = m.next_used(0);
            assert!(first.start >= 4 * MIB && (5 * MIB + 4096..=6 * MIB).contains(&first.end));
            assert!((32 * MIB..=33 * MIB + 100).contains(&m.next_used(8 * MIB).start));
            assert_eq!(m.next_used(36 * MIB), nothing);
            m.free_pages(0, 64 * MIB).unwrap();
            assert_eq!(m.next_used(0), nothing);
            // A scan has a limit; the next one continues there.
            m.fill(0, 64 * MIB, 1);
            let (mut reached, mut scans) = (0, 0);
            while reached < 64 * MIB {
                let used = m.next_used(reached);
                assert!(used.start == reached && used.end > reached, "{used:?}");
                (reached, scans) = (used.end, scans + 1);
            }
            assert!((2..=64).contains(&scans), "{scans}");
        }
    }

    #[test]
    fn range_beyond_the_file_is_refused() {
        let (_m, file) = Mapping::memfd("t", 4096).unwrap();
        assert!(Mapping::shared_file(file.as_fd(), 0, 8192).is_err());
        assert!(Mapping::shared_file(file.as_fd(), 8192, 4096).is_err());
        assert!(Mapping::shared_file(file.as_fd(), u64::MAX - 4095, 4096).is_err());
        assert!(Mapping::shared_file(file.as_fd(), 0, 0).is_err());
    }

    #[test]
    #[should_panic(expected = "range outside of mapping")]
    fn access_outside_panics() {
        Mapping::anonymous(4096).unwrap().write(4095, &[0, 0]);
    }
}
