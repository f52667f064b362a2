//! Opens a file disk. Every error has a cause and a remedy.
//!
//! Runs on the control plane, once per disk; may block. Locks before it changes anything. Removes a created file if opening fails.

use std::fmt::Display;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64};
use std::sync::{Arc, Mutex};

use block::{Capacity, CompareAndWrite, DiskInfo, Geometry, Identity, SECTOR_BYTES};
use iscsi_initiator::KnownUnits;
use rustix::fs::{FileType, Mode, OFlags, Stat, major, minor};
use rustix::io::Errno;
use sys::file_lock::{self, Conflict};

use super::durability::Durability;
use super::format::ImageFormat;
use super::medium::names_at;
use super::properties::{
    Queue, atomic_writes, can_punch, device_size, direct_alignment, keeps_space,
};
use super::{
    Alignment, CacheMode, Coverage, FileLock, FileOptions, Refused, SharedFile, open_flags, reopen,
};
use crate::OpenError;
use crate::blocking::BlockingCalls;
use crate::error::{check_block_size, check_size};
use crate::turn_lock::Users;

/// Opens or creates a file. The second value is true if this created it.
pub(super) fn open(options: &FileOptions) -> Result<(SharedFile, bool), OpenError> {
    let path = options.path.as_path();
    if let (Some(size), Some(block_size)) = (options.size, options.block_size) {
        check_size(size, check_block_size(block_size)?)?;
    }
    let (control, created) = open_or_create(options)?;
    let mut locked = false;
    let opened = examine(options, control, &mut locked).and_then(|shared| {
        if created {
            make_durable(path, shared.control.as_fd())?;
        }
        Ok(shared)
    });
    if opened.is_err() && created && locked {
        // An empty file would hide the error at the next attempt.
        if let Err(error) = std::fs::remove_file(path) {
            tracing::warn!(path = %path.display(), "cannot remove the file just created: {error}");
        }
    }
    opened.map(|shared| (shared, created))
}

/// Creates a file without a name in the folder of the path. The path itself is used, briefly, only if the file system cannot do this.
pub(super) fn create_unnamed(options: &FileOptions) -> Result<SharedFile, OpenError> {
    create_unnamed_with(options, |folder, flags| {
        let unnamed = flags | OFlags::TMPFILE | OFlags::EXCL;
        rustix::fs::open(folder, unnamed, Mode::RUSR | Mode::WUSR)
    })
}

/// As [`create_unnamed`]; `make` creates the file in a folder.
fn create_unnamed_with(
    options: &FileOptions,
    make: impl FnOnce(&Path, OFlags) -> Result<OwnedFd, Errno>,
) -> Result<SharedFile, OpenError> {
    let path = options.path.as_path();
    let flags = open_flags(CacheMode::Writeback, false) | OFlags::CLOEXEC;
    let folder = path.parent().unwrap_or(Path::new("/"));
    let made = match is_below_dev(path) {
        true => Err(Errno::OPNOTSUPP),
        false => make(folder, flags),
    };
    let control = match made {
        Ok(control) => control,
        Err(_) => {
            let control = create_new(path, flags)?;
            std::fs::remove_file(path)
                .map_err(|error| fail(path, format!("cannot remove its name: {error}")))?;
            control
        }
    };
    examine(options, control, &mut false)
}

/// Makes size and name of a new file durable.
fn make_durable(path: &Path, file: BorrowedFd<'_>) -> Result<(), OpenError> {
    let synced = rustix::fs::fsync(file).map_err(std::io::Error::from);
    let synced = synced.and_then(|()| sync_folder(path));
    synced.map_err(|error| {
        let folder = path.parent().unwrap_or(path).display();
        let hint = format!("hint: check the storage below {folder}");
        fail(
            path,
            format!("cannot make the new file durable: {error}; {hint}"),
        )
    })
}

/// Makes the name of a file durable.
///
/// # Errors
/// The folder cannot be opened or synced. A file system without such a sync is no error.
pub fn sync_folder(path: &Path) -> std::io::Result<()> {
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let folder = std::fs::File::open(folder.unwrap_or(Path::new(".")))?;
    match folder.sync_all() {
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        synced => synced,
    }
}

fn fail(path: &Path, reason: impl Display) -> OpenError {
    OpenError::File {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

fn open_or_create(options: &FileOptions) -> Result<(OwnedFd, bool), OpenError> {
    let path = options.path.as_path();
    let flags = open_flags(CacheMode::Writeback, options.read_only) | OFlags::CLOEXEC;
    match open_existing(path, flags, options.read_only)? {
        Some(fd) => Ok((fd, false)),
        None => create(options, flags),
    }
}

/// Opens a file; `None` if it does not exist.
fn open_existing(
    path: &Path,
    flags: OFlags,
    read_only: bool,
) -> Result<Option<OwnedFd>, OpenError> {
    // NONBLOCK: opening a FIFO by mistake must not hang.
    match rustix::fs::open(path, flags | OFlags::NONBLOCK, Mode::empty()) {
        Ok(fd) => Ok(Some(fd)),
        Err(Errno::NOENT) => Ok(None),
        Err(Errno::ACCESS | Errno::PERM) => Err(fail(path, no_access(path, read_only))),
        Err(Errno::ROFS) => Err(fail(
            path,
            format!(
                "cannot open it for writing: its file system is read-only; hint: set read_only, or {}",
                sandbox::make_writable(path)
            ),
        )),
        Err(Errno::ISDIR) => Err(fail(path, IS_DIRECTORY)),
        Err(error) => Err(fail(path, format!("cannot open it: {error}"))),
    }
}

const IS_DIRECTORY: &str = "is a directory; hint: give a raw file or a block device";

/// Returns the type of an open file; fails unless it is a regular file or a block device.
fn file_type(path: &Path, fd: &OwnedFd) -> Result<FileType, OpenError> {
    let stat = rustix::fs::fstat(fd);
    let stat = stat.map_err(|error| fail(path, format!("cannot stat it: {error}")))?;
    let other = match FileType::from_raw_mode(stat.st_mode) {
        found @ (FileType::RegularFile | FileType::BlockDevice) => return Ok(found),
        // A directory can be opened for reading.
        FileType::Directory => return Err(fail(path, IS_DIRECTORY)),
        FileType::CharacterDevice => "character device",
        FileType::Fifo => "named pipe",
        FileType::Socket => "socket",
        FileType::Symlink | FileType::Unknown => "special file",
    };
    let reason = format!(
        "is neither a file nor a block device but a {other}; hint: give a raw file or a block device"
    );
    Err(fail(path, reason))
}

/// Explains "Permission denied" by the sandbox or by permissions, with the remedy.
fn no_access(path: &Path, read_only: bool) -> String {
    let (access, hint) = if read_only {
        ("reading", "")
    } else {
        ("reading and writing", ", or set read_only")
    };
    if let Some(refusal) = sandbox::refusal(path, !read_only) {
        return format!("cannot open it for {access}: {refusal}");
    }
    if let Some(hidden) = sandbox::hidden_by_unit(path) {
        return format!("cannot open it for {access}: {hidden}");
    }
    let user = sandbox::this_user();
    let profile = sandbox::allow_in_profile(path, read_only);
    let profile = profile.map_or_else(String::new, |remedy| format!("; {remedy}"));
    format!(
        "no permission to open it for {access} as user {user}; hint: give that user access to it and to every directory above it (chmod, chown, setfacl){hint}{profile}"
    )
}

fn create(options: &FileOptions, flags: OFlags) -> Result<(OwnedFd, bool), OpenError> {
    let path = options.path.as_path();
    if let Some(hidden) = sandbox::hidden_by_unit(path) {
        return Err(fail(path, format!("does not exist: {hidden}")));
    }
    if options.size.is_none() {
        return Err(fail(
            path,
            "does not exist; hint: give a size (size=10G) to create it, or correct the path",
        ));
    }
    if options.read_only {
        return Err(fail(
            path,
            "does not exist, and a read-only disk is not created; hint: correct the path",
        ));
    }
    create_new(path, flags).map(|fd| (fd, true))
}

fn create_new(path: &Path, flags: OFlags) -> Result<OwnedFd, OpenError> {
    if is_below_dev(path) {
        return Err(fail(
            path,
            "does not exist, and regular files are not created below /dev; hint: correct the path of the device, lsblk -p lists block devices",
        ));
    }
    // Disk content is private to the owner of the file.
    let mode = Mode::RUSR | Mode::WUSR;
    let made = rustix::fs::open(path, flags | OFlags::CREATE | OFlags::EXCL, mode);
    match made {
        Ok(fd) => Ok(fd),
        Err(Errno::NOENT) => {
            let parent = path.parent().unwrap_or(Path::new("/")).display();
            let reason = format!("cannot create it: the directory {parent} does not exist");
            Err(fail(path, format!("{reason}; hint: mkdir -p {parent}")))
        }
        Err(Errno::ACCESS | Errno::PERM) => Err(fail(path, no_access(path, false))),
        Err(Errno::ROFS) => {
            let hint = sandbox::make_writable(path);
            let reason = "cannot create it: its file system is read-only";
            Err(fail(path, format!("{reason}; hint: {hint}")))
        }
        Err(error) => Err(fail(path, format!("cannot create it: {error}"))),
    }
}

/// Returns true if a new file at `path` would be among the device nodes: below `/dev`, except for `/dev/shm`.
fn is_below_dev(path: &Path) -> bool {
    let Ok(path) = std::path::absolute(path) else {
        return false;
    };
    let mut folders = path.ancestors().skip(1);
    // Missing folders at the end have no links to resolve.
    let found = folders.find_map(|folder| Some((folder, folder.canonicalize().ok()?)));
    let Some((folder, resolved)) = found else {
        return false;
    };
    let mut place: PathBuf = resolved;
    for part in path.strip_prefix(folder).unwrap_or(&path).components() {
        match part {
            Component::ParentDir => drop(place.pop()),
            part => place.push(part),
        }
    }
    place.starts_with("/dev") && !place.starts_with("/dev/shm")
}

/// Use of a file or block device by blocking system calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LockedUse {
    /// Read an existing file beside other readers.
    Read,
    /// Write an existing file as its only user.
    Write,
    /// Create a file and write it as its only user.
    Create,
}

/// Opens or creates a file, or opens a block device, and locks it as a disk is locked. The locks end when the file is closed.
///
/// # Errors
/// The file is missing, or exists and is to be created, or is in use; with a hint.
pub fn open_locked(path: &Path, to: LockedUse) -> Result<std::fs::File, OpenError> {
    let read_only = to == LockedUse::Read;
    let flags = open_flags(CacheMode::Writeback, read_only) | OFlags::CLOEXEC;
    if to == LockedUse::Create {
        let fd = create_new(path, flags)?;
        lock(path, &fd, false)?;
        make_durable(path, fd.as_fd())?;
        return Ok(fd.into());
    }
    let fd = open_existing(path, flags, read_only)?
        .ok_or_else(|| fail(path, "does not exist; hint: correct the path"))?;
    let fd = match file_type(path, &fd)? {
        FileType::BlockDevice if !read_only => claim(path, fd.as_fd())?,
        _ => fd,
    };
    lock(path, &fd, read_only)?;
    Ok(fd.into())
}

fn examine(
    options: &FileOptions,
    control: OwnedFd,
    locked: &mut bool,
) -> Result<SharedFile, OpenError> {
    let path = options.path.as_path();
    let os = |operation: &'static str| move |e: Errno| fail(path, format!("{operation}: {e}"));
    let stat = rustix::fs::fstat(&control).map_err(os("cannot stat it"))?;
    let block_device = file_type(path, &control)? == FileType::BlockDevice;
    let claims = block_device && !options.read_only && options.lock != FileLock::WhileActive;
    let claim = match claims {
        true => Some(claim(path, control.as_fd())?),
        false => None,
    };
    if options.lock == FileLock::Always {
        lock(path, &control, options.read_only)?;
        *locked = true;
    }
    let size = determine_size(options, &control, block_device)?;
    let found_size = match block_device {
        true => {
            device_size(&control).map_err(|e| fail(path, format!("cannot read its size: {e}")))?
        }
        false => size,
    };
    let logical = match block_device {
        true => {
            Some(rustix::fs::ioctl_blksszget(&control).map_err(os("cannot read its block size"))?)
        }
        false => None,
    };
    let block_size = determine_block_size(options, logical)?;
    let alignment = determine_alignment(options, &control, logical)?;
    let io_alignment = alignment.offset.max(SECTOR_BYTES);
    let unit = block_size.max(io_alignment);
    if size == 0 {
        return Err(fail(path, "is empty: a disk needs at least one block"));
    }
    let ends_within_block = !size.is_multiple_of(unit.into());
    let (size, format) = match options.is_container {
        true => (size.next_multiple_of(unit.into()), None),
        false => (size, ImageFormat::of_file(&control)),
    };
    if !size.is_multiple_of(u64::from(block_size)) {
        return Err(fail(path, no_whole_blocks(path, size, block_size, format)));
    }
    if !size.is_multiple_of(u64::from(unit)) {
        return Err(fail(path, no_direct_tail(path, size, unit, format)));
    }
    if let Some(format) = format {
        tracing::warn!(path = %path.display(), "{}", format.warning());
    }
    let device = block_device.then(|| (major(stat.st_rdev), minor(stat.st_rdev)));
    let known = names_at(path, device).map(KnownUnits::of_device);
    let geometry = Geometry::new(block_size, size);
    let info = describe(
        options,
        &control,
        &stat,
        geometry,
        io_alignment,
        block_device,
    );
    Ok(SharedFile {
        path: options.path.clone(),
        capacity: Arc::new(Capacity::new(info.geometry.capacity_bytes())),
        info,
        cache: options.cache,
        block_device,
        alignment,
        durability: Durability::default(),
        refused: Refused::default(),
        calls: BlockingCalls::default(),
        known,
        coverage: Coverage::of(options, block_device, ends_within_block),
        last_size: AtomicU64::new(found_size),
        control,
        claim: Mutex::new(claim),
        users: Users::new(options.lock == FileLock::WhileActive),
    })
}

impl Coverage {
    fn of(options: &FileOptions, block_device: bool, ends_within_block: bool) -> Coverage {
        match options.is_container {
            true => Coverage::Container {
                ends_within_block: AtomicBool::new(ends_within_block),
            },
            false if block_device && options.size.is_some() => Coverage::Part,
            false => Coverage::Whole,
        }
    }
}

/// Returns the error for an incomplete block. Padding repairs a raw disk but damages an image of another format.
fn no_whole_blocks(path: &Path, size: u64, block_size: u32, format: Option<ImageFormat>) -> String {
    let reason =
        format!("its size, {size} bytes, is not a multiple of the block size, {block_size} bytes");
    let shown = path.display();
    let Some(format) = format else {
        let whole = size.next_multiple_of(u64::from(block_size));
        return format!("{reason}; hint: pad it, truncate -s {whole} {shown}");
    };
    let hint = match format {
        ImageFormat::Luks => String::new(),
        ImageFormat::Qcow2 => format!("; hint: serve it as an image, image:{shown}"),
        _ => format!("; hint: make a raw copy, qemu-img convert -O raw {shown} {shown}.raw"),
    };
    format!(
        "{reason}; it contains a disk image in the format {format}, which another size would damage{hint}"
    )
}

/// Returns the error for an end that direct I/O would extend.
fn no_direct_tail(path: &Path, size: u64, unit: u32, format: Option<ImageFormat>) -> String {
    let text = format!(
        "its size, {size} bytes, is not a multiple of {unit} bytes, the unit of direct I/O (cache=none) here; hint: set cache=writeback"
    );
    if format.is_some() {
        return text;
    }
    let whole = size.next_multiple_of(u64::from(unit));
    format!("{text}, or pad it, truncate -s {whole} {}", path.display())
}

/// Flags of an exclusive open.
pub(super) const CLAIM: OFlags = OFlags::RDWR.union(OFlags::EXCL);

/// Opens a block device exclusively, against mounts and other servers.
fn claim(path: &Path, control: BorrowedFd<'_>) -> Result<OwnedFd, OpenError> {
    reopen(control, CLAIM).map_err(|error| match error.raw_os_error() {
        Some(libc::EBUSY) => fail(
            path,
            "is in use by this machine (mounted, swap, RAID, LVM or another server); hint: find the user with lsblk",
        ),
        _ => fail(path, format!("cannot claim it: {error}")),
    })
}

fn lock(path: &Path, control: &OwnedFd, read_only: bool) -> Result<(), OpenError> {
    let doing = match file_lock::lock(control.as_fd(), !read_only) {
        Ok(None) => return Ok(()),
        Ok(Some(Conflict::InUse("resize"))) => "may resize it",
        Ok(Some(Conflict::InUse(_))) => "has it open for writing",
        Ok(Some(Conflict::Forbidden(_))) => "has it open and does not allow writers",
        Err(error) => {
            return Err(fail(
                path,
                format!(
                    "cannot lock it: {error}; without a lock two daemons could write to it; hint: move it to a file system that supports locks"
                ),
            ));
        }
    };
    let shown = path.display();
    Err(fail(
        path,
        format!(
            "is in use: another process (QEMU, qemu-img, another disk or daemon) {doing}; hint: find the process with lslocks or fuser -v {shown}"
        ),
    ))
}

fn determine_size(
    options: &FileOptions,
    control: &OwnedFd,
    block_device: bool,
) -> Result<u64, OpenError> {
    let path = options.path.as_path();
    let shown = path.display();
    let found = if block_device {
        device_size(control).map_err(|e| fail(path, format!("cannot read its size: {e}")))?
    } else {
        // Read again under the lock.
        let stat = rustix::fs::fstat(control);
        let stat = stat.map_err(|e| fail(path, format!("cannot stat it: {e}")))?;
        u64::try_from(stat.st_size).unwrap_or(0)
    };
    match options.size {
        None => Ok(found),
        Some(wanted) if wanted == found => Ok(found),
        // Just created, or left by a daemon that died before sizing it.
        Some(wanted) if found == 0 && !block_device && !options.read_only => {
            rustix::fs::ftruncate(control, wanted)
                .map_err(|e| fail(path, format!("cannot make it {wanted} bytes large: {e}")))?;
            Ok(wanted)
        }
        // The disk is the first part of the device.
        Some(wanted) if block_device && wanted < found => Ok(wanted),
        Some(wanted) if block_device => Err(fail(
            path,
            format!(
                "is {found} bytes large, not {wanted}; hint: omit size for a block device, or give a smaller one"
            ),
        )),
        Some(wanted) => {
            let resize = match (ImageFormat::of_file(control), wanted < found) {
                // Another size would damage the image.
                (Some(_), _) => String::new(),
                (None, true) => format!(
                    ", or resize it first: truncate -s {wanted} {shown}, which destroys the data beyond that size"
                ),
                (None, false) => {
                    format!(", or resize it first: truncate -s {wanted} {shown}")
                }
            };
            let mut reason = format!(
                "is {found} bytes large, not {wanted}; hint: omit size to use the present size{resize}"
            );
            if let Some(format) = ImageFormat::of_file(control) {
                reason = format!("{reason}; {}", format.warning());
            }
            Err(fail(path, reason))
        }
    }
}

fn determine_block_size(options: &FileOptions, logical: Option<u32>) -> Result<u32, OpenError> {
    let block_size = options
        .block_size
        .unwrap_or(logical.unwrap_or(SECTOR_BYTES));
    check_block_size(block_size)
}

/// Returns the alignment of I/O; logical blocks may be smaller: see [`DiskInfo::io_alignment`].
fn determine_alignment(
    options: &FileOptions,
    control: &OwnedFd,
    logical: Option<u32>,
) -> Result<Alignment, OpenError> {
    let path = options.path.as_path();
    let flags = open_flags(options.cache, options.read_only);
    let no_direct = || {
        fail(
            path,
            "its file system has no direct I/O (O_DIRECT), which cache=none needs; hint: set cache=writeback",
        )
    };
    // Also checks that handles can be opened, while an error can still be reported.
    let handle = reopen(control.as_fd(), flags).map_err(|error| match error.raw_os_error() {
        Some(libc::EINVAL) if options.cache == CacheMode::None => no_direct(),
        _ => fail(
            path,
            format!("cannot open it through /proc/self/fd: {error}; is /proc mounted?"),
        ),
    })?;
    if options.cache != CacheMode::None {
        return Ok(Alignment {
            offset: 1,
            memory: 1,
        });
    }
    direct_alignment(handle.as_fd(), logical).ok_or_else(no_direct)
}

fn describe(
    options: &FileOptions,
    control: &OwnedFd,
    stat: &Stat,
    geometry: Geometry,
    io_alignment: u32,
    block_device: bool,
) -> DiskInfo {
    let block_size = geometry.block_size().max(io_alignment);
    let device = if block_device {
        stat.st_rdev
    } else {
        stat.st_dev
    };
    let queue = Queue::of(rustix::fs::major(device), rustix::fs::minor(device));
    let writable = !options.read_only;
    let (physical, discard) = if block_device {
        let physical = rustix::fs::ioctl_blkpbszget(control).unwrap_or(block_size);
        (physical, queue.discard_bytes_max > 0)
    } else {
        let cluster = u32::try_from(stat.st_blksize).unwrap_or(4096);
        (
            cluster,
            writable && can_punch(control, geometry.capacity_bytes()),
        )
    };
    let physical = match physical {
        size if size.is_power_of_two() && size <= 65536 => size.max(block_size),
        _ => block_size.max(4096),
    };
    let granularity = match block_device {
        true => queue.discard_granularity.max(block_size),
        false => physical,
    };
    DiskInfo {
        geometry,
        physical_block_size: physical,
        io_alignment,
        optimal_io_size: if block_device {
            queue.optimal_io_size
        } else {
            0
        },
        read_only: options.read_only,
        write_cache: writable && options.cache != CacheMode::Writethrough,
        discard_granularity: (writable && discard).then_some(granularity),
        // Holes in files read as zeroes; devices do not promise that.
        discard_zeroes: writable && discard && !block_device,
        write_zeroes: writable,
        anchors: writable && discard && !block_device && keeps_space(control),
        compare_and_write: Some(CompareAndWrite::Emulated),
        // The page cache splits a write.
        atomic_writes: match writable && options.cache == CacheMode::None {
            true => atomic_writes(control.as_fd(), block_size),
            false => None,
        },
        shared: false,
        rotational: queue.rotational,
        passthrough: None,
        identity: Identity::UNSET,
        serial: String::new(),
        naa: 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_permission_names_user_and_hint() {
        let text = no_access(Path::new("d0.raw"), false);
        assert!(text.contains("as user ") && text.contains("read_only"));
    }

    #[test]
    fn scratch_file_loses_its_name_without_o_tmpfile() {
        let folder = tempfile::tempdir().unwrap();
        let options = FileOptions {
            size: Some(1 << 20),
            cache: CacheMode::Writeback,
            ..FileOptions::new(folder.path().join("scratch"))
        };
        let create = || create_unnamed_with(&options, |_, _| Err(Errno::OPNOTSUPP));
        let file = create().unwrap();
        assert_eq!(folder.path().read_dir().unwrap().count(), 0);
        let stat = rustix::fs::fstat(&file.control).unwrap();
        assert_eq!((stat.st_nlink, stat.st_size), (0, 1 << 20));
        // I/O channels open the file again.
        let channel = reopen(file.control.as_fd(), OFlags::RDWR).unwrap();
        assert_eq!(rustix::io::pwrite(&channel, b"data", 4096).unwrap(), 4);
        let mut data = [0; 4];
        rustix::io::pread(&channel, &mut data, 4096).unwrap();
        assert_eq!(&data, b"data");

        // A file of another program is neither used nor removed.
        std::fs::write(&options.path, "other").unwrap();
        let error = create().expect_err("the name is in use");
        assert!(error.to_string().contains("File exists"), "{error}");
        assert_eq!(std::fs::read_to_string(&options.path).unwrap(), "other");
    }
}
