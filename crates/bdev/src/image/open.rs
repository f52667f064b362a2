//! Opens an image and its backing images.

use std::collections::HashSet;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, OnceLock};

use block::{Capacity, CompareAndWrite, DiskInfo, Geometry, Identity};
use qcow2::{Header, OpenOptions};

use super::backing_link::BackingLink;
use super::names::{BackingFormat, CheckNamed, backing_of};
use super::owner::Owner;
use super::readers::Readers;
use super::remote_backing::Remote;
use super::turns::Turns;
use super::{Damage, Image, ImageOptions, PublishedMap, SharedImage, data_file};
use crate::error::check_size;
use crate::file::Container;
use crate::{BlockDevice, BlockingIo, CacheMode, File, FileLock, FileOptions, OpenError};

/// Stack size of I/O threads in bytes. The channels of a chain call each other, with less than 4 KiB each in a debug build.
pub const STACK_BYTES: usize = 8 << 20;
/// Maximum number of qcow2 images in a chain, above a year of daily backups. Each costs a thread and some descriptors.
pub const CHAIN_MAX: usize = 512;

const BLOCK_SIZE_DEFAULT: u32 = 512;
const BACKING_CYCLE: &str = "its backing images form a cycle";

/// An open image without its owner thread.
pub(super) struct Opened {
    image: qcow2::Image<Container>,
    pub shared: Arc<SharedImage>,
    turns: Option<Turns>,
}

impl Opened {
    /// Creates the owner. Called on the owner thread.
    pub fn start(self) -> io::Result<Owner> {
        // The owner reads the backing image only for allocations and copies. A read-only image needs no descriptors for that.
        let backing = match self.shared.backing.device() {
            Some(device) if !self.shared.info.read_only => Some(BlockingIo::lazy(device)?),
            _ => None,
        };
        Ok(Owner {
            image: self.image,
            backing,
            shared: self.shared,
            freeing: None,
            left: None,
            turns: self.turns,
            release_waiters: Vec::new(),
        })
    }
}

/// Device and inode of each file of a chain, to detect cycles.
type Seen = HashSet<(u64, u64)>;

pub(super) fn open(options: &ImageOptions) -> Result<Opened, OpenError> {
    let mut seen = Seen::new();
    let files = open_level(options, &mut seen)?;
    let mut below = open_backing(options, &files.header, &mut seen)?;
    // No recursion: a long chain could overflow the stack.
    let mut levels = Vec::new();
    let mut named_by = options.path.clone();
    let mut device = loop {
        match below {
            BackingDevice::Image(options) => {
                let files = open_level(&options, &mut seen)?;
                let (policy, path) = (options.named_files, &options.path);
                policy.check_opened(&named_by, "backing image", path, &files.file)?;
                named_by.clone_from(path);
                below = open_backing(&options, &files.header, &mut seen)?;
                levels.push((options, files));
            }
            BackingDevice::Device(device) => break Some(device),
            BackingDevice::Nothing => break None,
        }
    };
    for (options, files) in levels.into_iter().rev() {
        let opened = assemble(&options, files, device)?;
        device = Some(Arc::new(Image::serve(opened)?));
    }
    assemble(options, files, device)
}

/// Opens an image over an open backing device.
pub(super) fn open_over(
    options: &ImageOptions,
    below: Arc<dyn BlockDevice>,
) -> Result<Opened, OpenError> {
    let files = open_level(options, &mut Seen::new())?;
    let below = Some(below).filter(|_| files.header.backing_file.is_some());
    assemble(options, files, below)
}

pub(super) fn fail(path: &Path, reason: impl std::fmt::Display) -> OpenError {
    OpenError::File {
        path: path.to_owned(),
        reason: reason.to_string(),
    }
}

/// Opens the files of one image of a chain.
fn open_level(options: &ImageOptions, seen: &mut Seen) -> Result<Files, OpenError> {
    let path = options.path.as_path();
    let found = std::fs::metadata(path).map_err(|error| {
        let hint = match error.kind() {
            io::ErrorKind::NotFound => {
                "; hint: create it with lunette image create, or correct the path"
            }
            _ => "",
        };
        fail(path, format!("cannot open it: {error}{hint}"))
    })?;
    if !seen.insert((found.dev(), found.ino())) {
        return Err(fail(path, BACKING_CYCLE));
    }
    if seen.len() > CHAIN_MAX {
        return Err(fail(
            path,
            format!(
                "its chain has more than {CHAIN_MAX} images; hint: shorten it with lunette image commit or rebase"
            ),
        ));
    }
    open_files(options)
}

/// Builds an image from its files and its backing device.
fn assemble(
    options: &ImageOptions,
    files: Files,
    backing: Option<Arc<dyn BlockDevice>>,
) -> Result<Opened, OpenError> {
    let path = options.path.as_path();
    let Files {
        file,
        container,
        header,
        data,
    } = files;
    let is_image = |error: qcow2::Error| fail(path, error);
    let block_size = options.block_size.unwrap_or(BLOCK_SIZE_DEFAULT);
    check_size(header.size, block_size).map_err(|error| fail(path, error))?;
    let (data_file, data) = data.unzip();
    let (image, turns) = match options.lock {
        FileLock::WhileActive => {
            let image = qcow2::Image::unread(container.clone(), header.clone());
            (image, Some(Turns::new(container, data)))
        }
        FileLock::Always | FileLock::Never => {
            let image = open_for_service(container, data, options.read_only);
            (image.map_err(is_image)?, None)
        }
    };
    log_state(options, &header, &image);
    let below = data_file.as_ref().unwrap_or(&file).info();
    let mut info = describe(&below, options, &header, block_size);
    if let Some(backing) = &backing {
        info.io_alignment = info.io_alignment.max(backing.info().io_alignment);
    }
    check_alignment(path, &info, &header)?;
    let shared = SharedImage {
        capacity: Arc::new(Capacity::new(header.size)),
        info,
        cache: options.cache,
        named_files: options.named_files,
        backing: BackingLink::new(backing),
        can_zero: image.can_zero(),
        map: PublishedMap::new(image.map()),
        readers: Readers::default(),
        damage: Damage::new(image.corruption().is_some()),
        is_unread: AtomicBool::new(turns.is_some()),
        on_turn: OnceLock::new(),
        file,
        data_file,
    };
    Ok(Opened {
        image,
        shared: Arc::new(shared),
        turns,
    })
}

/// Reads the tables of an image that clients use.
pub(super) fn open_for_service(
    container: Container,
    data: Option<Container>,
    read_only: bool,
) -> qcow2::Result<qcow2::Image<Container>> {
    let options = OpenOptions {
        read_only,
        // The guest can still read a corrupt image.
        accept_corrupt: true,
        ..OpenOptions::READ_WRITE
    };
    qcow2::Image::open_with(container, data, options)
}

/// Logs that the image is corrupt and read-only, or that opening it has invalidated its bitmaps.
fn log_state(options: &ImageOptions, header: &Header, image: &qcow2::Image<Container>) {
    let shown = options.path.display();
    if image.corruption().is_some() {
        tracing::error!(
            path = %shown,
            "image is marked as corrupt, all writes fail; hint: remove the disk, then lunette image check --repair all {shown}"
        );
    } else if header.bitmaps.is_some() && !options.read_only {
        tracing::warn!(
            path = %shown,
            "persistent bitmaps of the image become invalid, because writes are not recorded in them; hint: free their clusters with lunette image check --repair leaks {shown}"
        );
    }
}

struct Files {
    file: File,
    container: Container,
    header: Header,
    /// External data file, if any.
    data: Option<(File, Container)>,
}

fn open_files(options: &ImageOptions) -> Result<Files, OpenError> {
    let path = options.path.as_path();
    let open = |cache| {
        let (file, container) = open_file(options, path, cache)?;
        let header = Header::read(&container).map_err(|error| fail(path, not_served(&error)))?;
        let data = match data_file::path(options, &header)? {
            Some(named) => {
                let opened = open_file(options, &named, cache)?;
                if options.data_file.is_none() {
                    let policy = options.named_files;
                    policy.check_opened(path, "data file", &named, &opened.0)?;
                }
                Some(opened)
            }
            None => None,
        };
        Ok::<_, OpenError>(Files {
            file,
            container,
            header,
            data,
        })
    };
    // The channel syncs data together with the tables, not the file with each piece.
    let cache = match options.cache {
        CacheMode::None => CacheMode::None,
        CacheMode::Writeback | CacheMode::Writethrough => CacheMode::Writeback,
    };
    let opened = open(cache)?;
    // Write-back of a cached page with tables and data would overwrite newer data written with direct I/O.
    let page = rustix::param::page_size() as u64;
    if cache == CacheMode::None && opened.header.subcluster_bytes() < page {
        drop(opened);
        tracing::info!(
            path = %path.display(),
            "clusters of the image are smaller than a page, serving it with cache=writeback"
        );
        return open(CacheMode::Writeback);
    }
    Ok(opened)
}

fn open_file(
    options: &ImageOptions,
    path: &Path,
    cache: CacheMode,
) -> Result<(File, Container), OpenError> {
    let file = File::open(FileOptions {
        cache,
        read_only: options.read_only,
        block_size: options.block_size,
        is_container: true,
        lock: options.lock,
        ..FileOptions::new(path)
    })?;
    let container = file
        .container()
        .map_err(|error| fail(path, format!("cannot open it again: {error}")))?;
    Ok((file, container))
}

/// Opens an image and its data file for a program that changes the tables itself. Persistent bitmaps stay valid, therefore the program must
/// not change the content of the disk.
///
/// # Errors
/// A file cannot be opened or is not supported.
pub fn open_tables(options: &ImageOptions) -> Result<qcow2::Image<Container>, OpenError> {
    let files = open_files(options)?;
    let data = files.data.map(|(_, container)| container);
    let access = OpenOptions {
        read_only: options.read_only,
        keep_bitmaps: true,
        ..OpenOptions::READ_WRITE
    };
    let image = qcow2::Image::open_with(files.container, data, access);
    image.map_err(|error| fail(&options.path, error))
}

fn not_served(error: &qcow2::Error) -> String {
    match error {
        qcow2::Error::Unsupported(reason) if reason.contains("not a qcow2 image") => {
            format!("{reason}; hint: serve a raw disk with file:PATH")
        }
        error => error.to_string(),
    }
}

enum BackingDevice {
    Nothing,
    /// An open read-only device.
    Device(Arc<dyn BlockDevice>),
    /// A qcow2 image to open with these options.
    Image(ImageOptions),
}

/// Opens a raw or remote backing image; returns the options of a qcow2 image.
fn open_backing(
    options: &ImageOptions,
    header: &Header,
    seen: &mut Seen,
) -> Result<BackingDevice, OpenError> {
    let path = options.path.as_path();
    let Some(below) = backing_of(path, header)? else {
        return Ok(BackingDevice::Nothing);
    };
    options
        .named_files
        .check(path, "backing image", &below.path)?;
    if let Some(remote) = below.path.to_str().and_then(Remote::parse) {
        return open_remote(options, remote).map(BackingDevice::Device);
    }
    match below.format {
        BackingFormat::Raw => {
            let found = std::fs::metadata(&below.path);
            if found.is_ok_and(|found| !seen.insert((found.dev(), found.ino()))) {
                return Err(fail(path, BACKING_CYCLE));
            }
            let file = File::open(FileOptions {
                cache: options.cache,
                read_only: true,
                is_container: true,
                ..FileOptions::new(&below.path)
            })?;
            let (policy, named) = (options.named_files, &below.path);
            policy.check_opened(path, "backing image", named, &file)?;
            Ok(BackingDevice::Device(Arc::new(file)))
        }
        BackingFormat::Qcow2 => Ok(BackingDevice::Image(ImageOptions {
            cache: options.cache,
            read_only: true,
            named_files: options.named_files,
            ..ImageOptions::new(&below.path)
        })),
    }
}

fn open_remote(
    options: &ImageOptions,
    remote: Result<Remote, String>,
) -> Result<Arc<dyn BlockDevice>, OpenError> {
    let path = options.path.as_path();
    let refused = |reason: String| fail(path, format!("cannot open its backing image: {reason}"));
    remote.map_err(refused)?.open(true)
}

/// Checks that size and clusters are multiples of the smallest I/O below.
fn check_alignment(path: &Path, info: &DiskInfo, header: &Header) -> Result<(), OpenError> {
    let unit = u64::from(info.io_alignment);
    let refused = |wrong: String| {
        let hint = "the I/O alignment of its file or backing image; hint: set cache=writeback";
        Err(fail(path, format!("{wrong} {unit} bytes, {hint}")))
    };
    let (size, cluster) = (header.size, header.subcluster_bytes());
    if !size.is_multiple_of(unit) {
        return refused(format!("its size, {size} bytes, is not a multiple of"));
    }
    if cluster < unit {
        return refused(format!("its clusters of {cluster} bytes are smaller than"));
    }
    Ok(())
}

fn describe(file: &DiskInfo, options: &ImageOptions, header: &Header, block_size: u32) -> DiskInfo {
    let cluster = header.cluster_bytes() as u32;
    let writable = !options.read_only;
    DiskInfo {
        geometry: Geometry::new(block_size, header.size),
        physical_block_size: file.physical_block_size.max(block_size),
        io_alignment: file.io_alignment,
        optimal_io_size: cluster.max(block_size),
        read_only: options.read_only,
        write_cache: writable && options.cache != CacheMode::Writethrough,
        discard_granularity: writable.then_some(cluster.max(block_size)),
        // Partial clusters are zeroed.
        discard_zeroes: writable,
        write_zeroes: writable,
        anchors: false,
        compare_and_write: Some(CompareAndWrite::Emulated),
        // A write may span two clusters that are not adjacent.
        atomic_writes: None,
        shared: false,
        rotational: file.rotational,
        passthrough: None,
        identity: Identity::UNSET,
        serial: String::new(),
        naa: 0,
    }
}
