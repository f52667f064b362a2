//! Creates images over the device of a disk (external snapshots), and copies backing data into an image.

use std::io;
use std::path::Path;
use std::sync::Arc;

use block::{Allocation, Identity};
use qcow2::{Backing, CreateOptions, Mapping};

use super::names::backing_named;
use super::open::CHAIN_MAX;
use super::owner::Owner;
use super::{Image, ImageOptions, open};
use crate::layer::visit_stack;
use crate::{BlockDevice, CacheMode, CopiedUp, File, FileOptions, OpenError, Removable};

/// Initial size of the file in bytes.
const FIRST_BYTES: u64 = 512;

/// Name of a backing image in the header of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingName {
    /// Name in QEMU syntax: a path, `iscsi://...` or `rbd:...`.
    pub name: String,
    /// Format: `raw` or `qcow2`.
    pub format: &'static str,
}

impl Image {
    /// Creates and opens an empty image of `size` bytes over a device. Beyond the end of the device it reads as zeroes.
    ///
    /// # Errors
    /// The file exists or cannot be created. No file is left behind.
    pub fn create_over(
        options: &ImageOptions,
        name: &BackingName,
        below: Arc<dyn BlockDevice>,
        size: u64,
    ) -> Result<Image, OpenError> {
        check_openable(&options.path, name, &*below)?;
        Image::create_with(options, size, Some(name), || {
            open::open_over(options, below)
        })
    }

    /// Creates and opens an empty image without a backing image.
    ///
    /// # Errors
    /// As [`Image::create_over`].
    pub fn create(options: &ImageOptions, size: u64) -> Result<Image, OpenError> {
        Image::create_with(options, size, None, || open::open(options))
    }

    fn create_with(
        options: &ImageOptions,
        size: u64,
        backing: Option<&BackingName>,
        open: impl FnOnce() -> Result<open::Opened, OpenError>,
    ) -> Result<Image, OpenError> {
        let path = options.path.as_path();
        if path.exists() {
            return Err(open::fail(path, EXISTS));
        }
        make(path, size, backing)?;
        open().and_then(Image::serve).inspect_err(|_| {
            // A partial image would hide the error at the next attempt.
            std::fs::remove_file(path).ok();
        })
    }
}

/// Refuses an image that could not be reopened: its chain is too long, or the name of its backing image means another file.
fn check_openable(
    path: &Path,
    name: &BackingName,
    below: &dyn BlockDevice,
) -> Result<(), OpenError> {
    backing_named(path, &name.name, Some(name.format))?;
    let mut images = 0;
    visit_stack(below, |device| {
        images += usize::from(device.kind() == "image")
    });
    if images >= CHAIN_MAX {
        return Err(open::fail(
            path,
            format!(
                "its chain would exceed {CHAIN_MAX} images, the maximum for opening; hint: shorten the chain of the disk with lunette disk stream or lunette disk commit, that of a backup with lunette image commit"
            ),
        ));
    }
    Ok(())
}

const EXISTS: &str = "already exists; hint: give the path of a new file, or remove this one first";

/// Writes a new image. A file that exists, or that another request creates meanwhile, is not changed.
fn make(path: &Path, size: u64, backing: Option<&BackingName>) -> Result<(), OpenError> {
    let file = File::open(FileOptions {
        size: Some(FIRST_BYTES),
        cache: CacheMode::Writeback,
        is_container: true,
        ..FileOptions::new(path)
    })?;
    if !file.is_created() {
        return Err(open::fail(path, EXISTS));
    }
    let options = CreateOptions {
        backing: backing.map(|backing| (backing.name.clone(), backing.format.to_owned())),
        ..shape(size)
    };
    let written = file.container().map_err(|error| open::fail(path, error));
    let written = written.and_then(|container| {
        qcow2::create(&container, &options).map_err(|error| open::fail(path, error))
    });
    written.inspect_err(|_| file.remove_if_created())
}

/// Maximum number of pieces that one `copy_up` skips. Each may need a table read and a block status below.
const PIECES_MAX: usize = 64;

/// Reason to refuse a commit or the removal of the backing image.
pub(super) const HAS_SNAPSHOTS: &str = "its internal snapshots need its backing image; hint: remove them with lunette image snapshot --delete, or move the disk with lunette disk mirror";

/// Returns the options of a new image.
fn shape(size: u64) -> CreateOptions {
    #[cfg(feature = "simulated")]
    if let Some(shape) = super::stepped::shape_of_new_images() {
        return CreateOptions { size, ..shape };
    }
    CreateOptions {
        identity: Some(Identity::random().bits()),
        ..CreateOptions::new(size)
    }
}

impl Owner {
    /// Refuses an image with internal snapshots, because they would change.
    fn has_no_snapshots(&self) -> qcow2::Result<()> {
        match self.image.snapshots() {
            [] => Ok(()),
            _ => Err(qcow2::Error::Unsupported(HAS_SNAPSHOTS.to_owned())),
        }
    }

    /// Removes the name of the backing image from the header and has the workers close their channels to it. All data of the backing
    /// image has been copied.
    pub(super) fn detach_backing(&mut self) -> qcow2::Result<()> {
        self.has_no_snapshots()?;
        self.image.set_backing(None)?;
        self.left = self.shared.backing.leave();
        Ok(())
    }

    /// Returns the former backing image, once no worker has a channel to it. Returns `None` while a worker has one.
    pub(super) fn close_backing(&mut self) -> io::Result<Option<Arc<dyn BlockDevice>>> {
        if self.left.is_none() || !self.shared.backing.is_unused() {
            return Ok(None);
        }
        if let Some(mut backing) = self.backing.take() {
            backing.detach()?;
        }
        Ok(self.left.take())
    }

    /// Allocates clusters for the data of the backing image. Its holes stay unallocated and later read as zeroes.
    pub(super) fn copy_up(&mut self, offset: u64, length: u64) -> qcow2::Result<CopiedUp> {
        self.has_no_snapshots()?;
        let end = self.shared.backing.bytes();
        let cluster = self.image.header().cluster_bytes();
        let count_max = (length / cluster).max(1) as usize;
        let (mut at, mut clusters) = (offset, Vec::new());
        for _ in 0..PIECES_MAX {
            if at >= end || clusters.len() >= count_max {
                break;
            }
            self.image.load(at)?;
            let segment = self.image.map().segment(at, end - at);
            if segment.mapping != Mapping::Unallocated {
                at += segment.length;
                continue;
            }
            let below = self.below(at, at + segment.length);
            if below.allocation != Allocation::Data {
                at = below.end.max(at + 1);
                continue;
            }
            // Whole clusters, even if a part is a hole or allocated.
            at = at / cluster * cluster;
            while at < below.end && clusters.len() < count_max {
                clusters.push(at);
                at += cluster;
            }
        }
        let bytes = clusters.len() as u64 * cluster;
        let backing = self.backing.as_mut();
        let backing = backing.map(|backing| backing as &mut dyn Backing);
        let failed = self.image.prepare_write(&clusters, backing);
        match failed.into_iter().next() {
            None if at >= end => Ok(CopiedUp {
                end: u64::MAX,
                bytes,
            }),
            None => Ok(CopiedUp { end: at, bytes }),
            Some((_, error)) => Err(error),
        }
    }
}
