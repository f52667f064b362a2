//! `file`: a raw file or a block device, through io_uring.
//!
//! The block device holds the locks and the shared state of all workers: lost durability, and operations that the file system refuses. Each
//! worker's handle (`handle`) has its own open file description: no shared reference count per I/O, and the kernel reports a failed
//! write-back to each. `open` opens, `durability` is the sticky error, `bounce` aligns, `errno` classifies. Tests: `tests/file_*.rs`.

mod allocation;
mod bounce;
mod container;
mod durability;
mod errno;
mod format;
mod handle;
mod lock;
mod medium;
mod open;
mod properties;
mod reopen;
mod syncs;

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub use block::CacheMode;
use block::{Capacity, DiskInfo, Extent};
use iscsi_initiator::KnownUnits;
use rustix::fs::{OFlags, SeekFrom};

use crate::blocking::BlockingCalls;
use crate::turn_lock::{self, InUse, Users};
use crate::{
    Attach, BlockDevice, Capabilities, IoChannel, LocalFiles, Lockable, OnTurn, OpenError,
    Removable, Space, TurnDevice,
};
use allocation::Refused;
pub use container::Container;
pub(crate) use durability::Durability;
pub use format::ImageFormat;
pub use lock::FileLock;
pub use open::{LockedUse, open_locked, sync_folder};
use reopen::reopen;

/// Options for opening a file or block device.
#[derive(Clone, Debug)]
pub struct FileOptions {
    /// Path of a raw file or a block device.
    pub path: PathBuf,
    /// Size in bytes. A missing or empty file gets this size, sparse; an existing one must have it.
    pub size: Option<u64>,
    /// Cache mode.
    pub cache: CacheMode,
    /// Refuse writes, and permit other readers.
    pub read_only: bool,
    /// Bytes per logical block; default: 512 for files, the device's own for block devices.
    pub block_size: Option<u32>,
    /// Duration of the locks against other writers, QEMU included.
    pub lock: FileLock,
    /// The content is an image of another format: any size, no warning.
    pub is_container: bool,
}

impl FileOptions {
    /// Returns options for a writable, locked file with direct I/O.
    pub fn new(path: impl Into<PathBuf>) -> FileOptions {
        FileOptions {
            path: path.into(),
            size: None,
            cache: CacheMode::None,
            read_only: false,
            block_size: None,
            lock: FileLock::Always,
            is_container: false,
        }
    }
}

/// Required alignment in bytes of offset, length and memory; 1: none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Alignment {
    offset: u32,
    memory: u32,
}

/// Part of the file that the disk consists of.
#[derive(Debug)]
enum Coverage {
    /// The whole file.
    Whole,
    /// The first part of a block device, of a configured size.
    Part,
    /// The whole file, which is an image of another format.
    Container {
        /// The last block is incomplete.
        ends_within_block: AtomicBool,
    },
}

/// State shared by the handles of all workers.
#[derive(Debug)]
pub(crate) struct SharedFile {
    path: PathBuf,
    info: DiskInfo,
    capacity: Arc<Capacity>,
    cache: CacheMode,
    block_device: bool,
    alignment: Alignment,
    durability: Durability,
    refused: Refused,
    calls: BlockingCalls,
    /// Names of a block device with a path that the kernel assigns.
    known: Option<KnownUnits>,
    coverage: Coverage,
    /// Size of the file or block device in bytes when the last use began, or after the last change by this process.
    last_size: AtomicU64,
    /// Holds the locks and opens handles by its number. Not used for I/O.
    control: OwnedFd,
    /// Exclusive open (`O_EXCL`) of a writable block device, against mounts and other servers. `None` while the locks are released.
    claim: Mutex<Option<OwnedFd>>,
    users: Users,
}

impl SharedFile {
    fn claim(&self) -> MutexGuard<'_, Option<OwnedFd>> {
        self.claim.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// See [`LocalFiles::check_file`].
    fn check_file(&self) -> io::Result<()> {
        let path = self.path.display();
        let changed = |reason: String| {
            let hint = "another program changed the file; hint: stop that program, and start again";
            io::Error::other(format!("{path}: {reason}: {hint}"))
        };
        let found = match rustix::fs::stat(&self.path) {
            Err(rustix::io::Errno::NOENT) => {
                return Err(changed("the file no longer exists".to_owned()));
            }
            found => found?,
        };
        let open = rustix::fs::fstat(&self.control)?;
        if self.block_device {
            return match found.st_rdev == open.st_rdev {
                true => Ok(()),
                false => Err(changed("it is another device now".to_owned())),
            };
        }
        if (found.st_dev, found.st_ino) != (open.st_dev, open.st_ino) {
            let bytes = found.st_size;
            return Err(changed(format!(
                "the path now names another file, of {bytes} bytes"
            )));
        }
        let (bytes, expected) = (open.st_size.unsigned_abs(), self.capacity.bytes());
        // The last block of an image may be incomplete.
        match bytes.next_multiple_of(self.unit()) >= expected {
            true => Ok(()),
            false => Err(changed(format!(
                "the file has {bytes} bytes instead of {expected}"
            ))),
        }
    }

    /// Returns the smallest part that I/O accesses, in bytes.
    fn unit(&self) -> u64 {
        let block_size = self.info.geometry.block_size();
        block_size.max(self.info.io_alignment).into()
    }

    /// Returns the present size in bytes. May block.
    fn found_size(&self) -> io::Result<u64> {
        match self.block_device {
            true => properties::device_size(&self.control),
            // Never negative.
            false => Ok(rustix::fs::fstat(&self.control)?.st_size.unsigned_abs()),
        }
    }

    /// Adopts the size that another process has set since the last use.
    fn follow_size(&self) -> io::Result<()> {
        let found = self.found_size()?;
        let rest = found % self.unit();
        let is_container = matches!(self.coverage, Coverage::Container { .. });
        if !is_container && found == rest {
            return Err(io::Error::other(format!(
                "{}: another process has truncated the file to {found} bytes",
                self.path.display()
            )));
        }
        let is_changed = self.last_size.swap(found, Ordering::AcqRel) != found;
        match &self.coverage {
            Coverage::Container { ends_within_block } => {
                ends_within_block.store(rest != 0, Ordering::Relaxed);
                self.capacity.set(found.next_multiple_of(self.unit()));
            }
            Coverage::Part if found >= self.capacity.bytes() => {}
            Coverage::Whole | Coverage::Part if is_changed => self.capacity.set(found - rest),
            Coverage::Whole | Coverage::Part => {}
        }
        Ok(())
    }

    /// Returns the extent at a block, from the file system: a block with any data is data. May block.
    fn extent(&self, offset: u64) -> Extent {
        // The position of the control handle has no other use. Block devices report only data.
        let seek = |from| rustix::fs::seek(&self.control, from);
        let block = self.unit();
        match seek(SeekFrom::Data(offset)) {
            Ok(data) if data / block * block > offset => {
                self.without_data(offset, data / block * block)
            }
            Ok(data) => match seek(SeekFrom::Hole(data)) {
                // A file may end within a block, and blocks of the file system may be smaller.
                Ok(hole) if hole > data => Extent::data(hole.next_multiple_of(block)),
                _ => Extent::UNKNOWN,
            },
            Err(rustix::io::Errno::NXIO) => {
                // Bytes beyond the end of a truncated file are no hole: reads of them fail.
                let size = rustix::fs::fstat(&self.control).map_or(0, |stat| stat.st_size as u64);
                let size = size.next_multiple_of(block).min(self.capacity.bytes());
                match size > offset {
                    true => self.without_data(offset, size),
                    false => Extent::UNKNOWN,
                }
            }
            Err(_) => Extent::UNKNOWN,
        }
    }

    /// Returns the extent at `from`. The file has no data from there to `to`.
    fn without_data(&self, from: u64, to: u64) -> Extent {
        if !self.info.anchors {
            return Extent::hole(to);
        }
        match sys::first_unwritten(self.control.as_fd(), from..to) {
            Ok(Some(space)) if space.start > from => Extent::hole(space.start),
            Ok(Some(space)) => Extent::reserved(space.end),
            // a file system that reports no unwritten space has none
            Ok(None) | Err(_) => Extent::hole(to),
        }
    }
}

/// The block device `file`.
#[derive(Debug)]
pub struct File {
    shared: Arc<SharedFile>,
    /// Opening the file created it.
    is_created: bool,
}

impl File {
    /// Returns true if opening it created the file.
    pub(crate) fn is_created(&self) -> bool {
        self.is_created
    }

    /// Opens a file or block device, or creates a file.
    ///
    /// # Errors
    /// The file is missing, in use, of another size or type, or lacks an ability; with a hint.
    pub fn open(options: FileOptions) -> Result<File, OpenError> {
        let (shared, is_created) = open::open(&options)?;
        Ok(File {
            shared: Arc::new(shared),
            is_created,
        })
    }

    /// Creates a file without a name, which ends with its last descriptor, in the folder of the path.
    pub(crate) fn create_unnamed(options: &FileOptions) -> Result<File, OpenError> {
        Ok(File {
            shared: Arc::new(open::create_unnamed(options)?),
            is_created: true,
        })
    }

    /// Returns the errno of the first failure to make data durable. Every flush fails since.
    pub fn durability_lost(&self) -> Option<i32> {
        self.shared.durability.lost()
    }
}

fn open_flags(cache: CacheMode, read_only: bool) -> OFlags {
    let access = if read_only {
        OFlags::RDONLY
    } else {
        OFlags::RDWR
    };
    match cache {
        CacheMode::None => access | OFlags::DIRECT,
        CacheMode::Writeback | CacheMode::Writethrough => access,
    }
}

impl File {
    /// Returns device and inode of the open file.
    pub(crate) fn id(&self) -> io::Result<(u64, u64)> {
        let stat = rustix::fs::fstat(&self.shared.control)?;
        Ok((stat.st_dev, stat.st_ino))
    }

    /// Begins a use of a file with locks that depend on it.
    ///
    /// # Errors
    /// Another process has the lock, or the file system refuses it.
    pub(crate) fn begin_use(&self) -> io::Result<InUse> {
        InUse::begin(self.shared.clone())
    }

    /// Returns an error if the disk cannot become a backing file, because another daemon may change it.
    pub(crate) fn check_stays_locked(&self) -> io::Result<()> {
        match self.shared.users.decide() {
            false => Ok(()),
            true => Err(io::Error::other(TAKES_TURNS)),
        }
    }
}

const TAKES_TURNS: &str =
    "a disk with lock=while-active cannot become a backing file; hint: set lock=always";

impl BlockDevice for File {
    fn info(&self) -> DiskInfo {
        self.shared.info.resized(self.shared.capacity.bytes())
    }

    fn capacity(&self) -> &Arc<Capacity> {
        &self.shared.capacity
    }

    /// Changes the size of a file; only checks that of a block device.
    fn set_size(&self, bytes: u64) -> io::Result<()> {
        let shared = &self.shared;
        if shared.block_device {
            let found = properties::device_size(&shared.control)?;
            return match bytes <= found {
                true => Ok(()),
                false => Err(io::Error::other(format!(
                    "the block device has {found} bytes"
                ))),
            };
        }
        if self.found_size()? == bytes {
            return Ok(());
        }
        if shared.info.read_only {
            return Err(io::Error::other("the disk is read-only"));
        }
        let before = shared.last_size.load(Ordering::Acquire);
        let _in_use = InUse::begin(shared.clone())?;
        let now = shared.last_size.load(Ordering::Acquire);
        if shared.users.decide() && before != now {
            return Err(io::Error::other(format!(
                "{}: another process has changed the size from {before} to {now} bytes; hint: repeat the command",
                shared.path.display()
            )));
        }
        rustix::fs::ftruncate(&shared.control, bytes)?;
        shared.last_size.store(bytes, Ordering::Release);
        // The new size is as durable as data written into it. It applies even if the sync fails, an error that is reported only once.
        if let Err(error) = rustix::fs::fsync(&shared.control) {
            shared.lose(error.raw_os_error());
        }
        Ok(())
    }

    fn kind(&self) -> &'static str {
        "file"
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            medium: Some(&*self.shared),
            files: Some(self),
            lockable: Some(self),
            turns: self.shared.users.decide().then_some(self as _),
            removable: Some(self),
            ..Capabilities::NONE
        }
    }

    fn attach(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        let shared = self.shared.clone();
        let in_use = attach.begin_use(shared.clone())?;
        let flags = open_flags(shared.cache, shared.info.read_only);
        let fd = reopen(shared.control.as_fd(), flags).map_err(|e| {
            let path = shared.path.display();
            io::Error::new(
                e.kind(),
                format!("{path}: cannot open another handle through /proc/self/fd: {e}"),
            )
        })?;
        let (owner, status) = (attach.owner(), attach.owner());
        let fd = attach.ring().register(fd);
        Ok(Box::new(handle::FileChannel::new(
            shared, in_use, fd, owner, status,
        )))
    }
}

impl LocalFiles for File {
    fn found_size(&self) -> io::Result<u64> {
        self.shared.found_size()
    }

    fn known_size(&self) -> io::Result<u64> {
        let shared = &self.shared;
        match shared.block_device {
            true => properties::device_size(&shared.control),
            false => Ok(properties::known(&shared.control)?.stx_size),
        }
    }

    fn check_file(&self) -> io::Result<()> {
        self.shared.check_file()
    }

    fn space(&self) -> io::Result<Option<Space>> {
        properties::space(&self.shared.control)
    }
}

impl Lockable for File {
    fn become_read_only(&self) -> io::Result<()> {
        self.check_stays_locked()?;
        // A read-only disk needs only a reader's locks.
        sys::file_lock::lower(self.shared.control.as_fd())
    }

    fn release_locks(&self) -> io::Result<()> {
        self.shared.release_locks()
    }

    fn take_locks(&self) -> io::Result<()> {
        self.shared.take_locks()
    }
}

impl TurnDevice for File {
    fn wait_for_release(&self, until: Duration) {
        turn_lock::wait_for_release(&*self.shared, until);
    }

    fn on_turn(&self, on_turn: OnTurn) {
        self.shared.users.on_turn(on_turn);
    }

    fn release_error(&self) -> Option<String> {
        self.shared.users.release_error()
    }
}

impl Removable for File {
    fn remove_if_created(&self) {
        let path = &self.shared.path;
        if self.is_created
            && let Err(error) = std::fs::remove_file(path)
        {
            let path = path.display();
            tracing::warn!(%path, "cannot remove the file just created: {error}");
        }
    }

    /// The file remains.
    fn forget(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use block::{IoErrorKind, IoFlags, IoOutcome, IoRequest};
    use guest_memory::IoBuffer;
    use uring::{Owner, Ring, Wait};

    use super::*;
    use crate::{Submission, Tag};

    struct Worker(Ring, Box<dyn IoChannel>);

    impl Worker {
        fn on(file: &File) -> Worker {
            let mut ring = Ring::new(4).unwrap();
            let mut owners = (0..).map(Owner);
            let mut owner = || owners.next().unwrap();
            let backend = file.attach(&mut Attach::new(&mut ring, &mut owner));
            let backend = backend.unwrap();
            Worker(ring, backend)
        }

        fn submit(&mut self, io: IoRequest) -> Submission {
            let mut buffer = IoBuffer::owned(io.length.max(4096) as usize);
            buffer.set_window(0, io.length as usize);
            self.1.submit(&mut self.0, &io, &mut buffer, Tag(1))
        }

        fn finish(&mut self) -> IoOutcome {
            let (mut completions, mut finished) = (Vec::new(), Vec::new());
            while finished.is_empty() {
                self.0.enter(Wait::Until(None), &mut completions).unwrap();
                for completion in completions.drain(..) {
                    self.1.complete(&mut self.0, completion, &mut finished);
                }
            }
            finished[0].outcome
        }

        fn run(&mut self, io: IoRequest) -> IoOutcome {
            match self.submit(io) {
                Submission::Done(outcome) => outcome,
                Submission::Pending => self.finish(),
            }
        }
    }

    #[test]
    fn lost_durability_fails_flushes_and_fua_on_every_worker() {
        for cache in [
            CacheMode::None,
            CacheMode::Writeback,
            CacheMode::Writethrough,
        ] {
            let folder = tempfile::tempdir().unwrap();
            let options = FileOptions {
                size: Some(1 << 20),
                cache,
                ..FileOptions::new(folder.path().join("disk"))
            };
            let file = File::open(options.clone()).unwrap();
            let (mut one, mut two) = (Worker::on(&file), Worker::on(&file));
            // Detected by the other worker during this one's flush.
            assert_eq!(one.submit(IoRequest::flush()), Submission::Pending);
            file.shared.durability.lose(libc::EIO);
            let lost = Err(block::IoError::with_errno(
                IoErrorKind::WriteMedium,
                libc::EIO,
            ));
            assert_eq!(one.finish(), lost);
            let write = IoRequest::write(0, 4096);
            for worker in [&mut one, &mut two] {
                assert_eq!(worker.run(IoRequest::flush()), lost);
                assert_eq!(worker.run(write.flagged(IoFlags::FUA)), lost);
                let zeroes = IoRequest::write_zeroes(0, 4096).flagged(IoFlags::FUA);
                assert_eq!(worker.run(zeroes), lost);
                let plain = if cache == CacheMode::Writethrough {
                    lost
                } else {
                    Ok(())
                };
                assert_eq!(worker.run(write), plain);
                assert_eq!(worker.run(IoRequest::read(0, 4096)), Ok(()));
            }
            drop((file, one, two));
            let reopened = File::open(options).unwrap();
            assert_eq!(Worker::on(&reopened).run(IoRequest::flush()), Ok(()));
        }
    }

    /// If the promise fails later, for example after a move to another device, only the kernel refuses.
    #[test]
    fn unsupported_atomic_write_writes_nothing() {
        for cache in [CacheMode::None, CacheMode::Writeback] {
            let folder = tempfile::tempdir().unwrap();
            let mut file = File::open(FileOptions {
                size: Some(1 << 20),
                cache,
                ..FileOptions::new(folder.path().join("disk"))
            })
            .unwrap();
            let promised = file.info().atomic_writes;
            assert!(promised.is_none() || cache == CacheMode::None);
            let write = IoRequest::write(16384, 16384).flagged(IoFlags::ATOMIC);
            if promised.is_none() {
                let refused = block::IoError::new(IoErrorKind::Unsupported);
                assert_eq!(Worker::on(&file).run(write), Err(refused));
            }
            let shared = Arc::get_mut(&mut file.shared).unwrap();
            shared.info.atomic_writes = Some(block::AtomicWrites {
                bytes_max: 16384,
                unit: 16384,
            });
            let mut worker = Worker::on(&file);
            for pieces in [1, 4] {
                let memory = guest_memory::Mapping::anonymous(16384).unwrap();
                memory.fill(0, 16384, 1);
                let mut buffer = IoBuffer::of_mapping(&memory, 0, 16384);
                if pieces > 1 {
                    buffer.set_window(4096, 12288);
                    buffer.set_window(0, 16384);
                    assert!(buffer.segments().len() > 1);
                }
                let submitted = worker.1.submit(&mut worker.0, &write, &mut buffer, Tag(1));
                assert_eq!(submitted, Submission::Pending);
                let outcome = worker.finish();
                let bytes = std::fs::read(folder.path().join("disk")).unwrap();
                let written = &bytes[16384..32768];
                if promised.is_some() {
                    assert_eq!(outcome, Ok(()));
                    assert_eq!(written, [1; 16384]);
                    continue;
                }
                let errno = libc::EOPNOTSUPP;
                let refused = block::IoError::with_errno(IoErrorKind::Unsupported, errno);
                assert_eq!(outcome, Err(refused), "{cache:?}, {pieces} pieces");
                assert_eq!(written, [0; 16384]);
            }
            // Half of the promised unit is refused.
            let half = IoRequest::write(16384, 8192).flagged(IoFlags::ATOMIC);
            let mut buffer = IoBuffer::owned(8192);
            let submitted = worker.1.submit(&mut worker.0, &half, &mut buffer, Tag(1));
            let refused = block::IoError::new(IoErrorKind::Unsupported);
            assert_eq!(submitted, Submission::Done(Err(refused)));
        }
    }

    /// A page cache write with `RWF_DSYNC` may fail for earlier writes, with an errno like its own, and the next flush would succeed. A
    /// failed sync always counts.
    #[test]
    fn durable_write_through_the_page_cache_has_its_own_sync() {
        for (cache, steps) in [
            (CacheMode::None, 1),
            (CacheMode::Writeback, 2),
            (CacheMode::Writethrough, 2),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let file = File::open(FileOptions {
                size: Some(1 << 20),
                cache,
                ..FileOptions::new(folder.path().join("disk"))
            })
            .unwrap();
            let Worker(mut ring, mut backend) = Worker::on(&file);
            let mut buffer = IoBuffer::owned(4096);
            let write = IoRequest::write(8192, 4096).flagged(IoFlags::FUA);
            let submitted = backend.submit(&mut ring, &write, &mut buffer, Tag(1));
            assert_eq!(submitted, Submission::Pending);
            let (mut taken, mut completions, mut finished) = (0, Vec::new(), Vec::new());
            while finished.is_empty() {
                ring.enter(Wait::Until(None), &mut completions).unwrap();
                for completion in completions.drain(..) {
                    taken += 1;
                    backend.complete(&mut ring, completion, &mut finished);
                }
            }
            assert_eq!((taken, finished[0].outcome), (steps, Ok(())), "{cache:?}");
        }
    }
}
