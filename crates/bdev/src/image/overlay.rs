//! A new image over the device of a disk: an external snapshot. And the way back: what lies below comes up into the image.

use std::path::Path;
use std::sync::Arc;

use qcow2::{Backing, CreateOptions, Mapping};

use super::owner::Owner;
use super::{Image, ImageOptions, open};
use crate::{BlockDevice, CacheMode, File, FileOptions, OpenError};

/// An empty file is made this large; the image makes it larger.
const FIRST_BYTES: u64 = 512;

/// How an image names what it stands on, for whoever opens it next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackingName {
    /// As QEMU reads it: a path, `iscsi://...` or `rbd:...`.
    pub name: String,
    /// `raw` or `qcow2`.
    pub format: &'static str,
}

impl Image {
    /// Makes an empty image of this size over a device, and opens it. Where the device has ended, it reads as zeroes.
    ///
    /// # Errors
    /// When there is such a file already, or what cannot be made. No file is left behind.
    pub fn create_over(
        options: &ImageOptions,
        name: &BackingName,
        below: Arc<dyn BlockDevice>,
        size: u64,
    ) -> Result<Image, OpenError> {
        Image::create_with(options, size, Some(name), || {
            open::open_over(options, below)
        })
    }

    /// Makes an empty image that stands alone.
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
            return Err(open::fail(
                path,
                "exists already; hint: give the path of a file that is to be made, or remove it first",
            ));
        }
        let made = make(path, size, backing);
        made.and_then(|()| open())
            .and_then(Image::serve)
            .inspect_err(|_| {
                // The error says what was wrong; half an image would only hide that next time.
                std::fs::remove_file(path).ok();
            })
    }
}

fn make(path: &Path, size: u64, backing: Option<&BackingName>) -> Result<(), OpenError> {
    let file = File::open(FileOptions {
        size: Some(FIRST_BYTES),
        cache: CacheMode::Writeback,
        is_container: true,
        ..FileOptions::new(path)
    })?;
    let container = file.container().map_err(|error| open::fail(path, error))?;
    let options = CreateOptions {
        backing: backing.map(|backing| (backing.name.clone(), backing.format.to_owned())),
        ..shape(size)
    };
    qcow2::create(&container, &options).map_err(|error| open::fail(path, error))?;
    let folder = path.parent().filter(|folder| *folder != Path::new(""));
    let folder = std::fs::File::open(folder.unwrap_or(Path::new(".")));
    let durable = folder.and_then(|folder| folder.sync_all());
    durable.map_err(|error| open::fail(path, format!("cannot make it durable: {error}")))
}

/// Why an image and what it stands on stay as they are.
pub(super) const HAS_SNAPSHOTS: &str = "it has snapshots inside, which read what they have not from its backing image; hint: remove them with lunette image snapshot --delete, or move the disk with lunette disk mirror";

/// Of a new image.
fn shape(size: u64) -> CreateOptions {
    #[cfg(feature = "simulated")]
    if let Some(shape) = super::stepped::shape_of_new_images() {
        return CreateOptions { size, ..shape };
    }
    CreateOptions::new(size)
}

impl Owner {
    /// Its snapshots would read otherwise.
    fn has_no_snapshots(&self) -> qcow2::Result<()> {
        match self.image.snapshots() {
            [] => Ok(()),
            _ => Err(qcow2::Error::Unsupported(HAS_SNAPSHOTS.to_owned())),
        }
    }

    /// Stands alone from now on. All of what it stood on has been copied.
    pub(super) fn leave_backing(&mut self) -> qcow2::Result<()> {
        self.has_no_snapshots()?;
        self.image.set_backing(None)
    }

    /// Allocates what a range does not have of its own, with the content that lies below it. Where that is nothing but a hole, the
    /// tables say so.
    pub(super) fn copy_up(&mut self, offset: u64, length: u64) -> qcow2::Result<()> {
        self.has_no_snapshots()?;
        let end_of_backing = self.shared.backing_bytes;
        let end = (offset + length).min(end_of_backing);
        let cluster = self.image.header().cluster_bytes();
        let mut at = offset / cluster * cluster;
        let (mut clusters, mut data) = (Vec::new(), Vec::new());
        while at < end {
            self.image.load(at)?;
            let segment = self.image.map().segment(at, end - at);
            let next = at + segment.length;
            if segment.mapping == Mapping::Unallocated {
                let first = at / cluster * cluster;
                for cluster_at in (first..next).step_by(cluster as usize) {
                    let is_whole = cluster_at >= at && (cluster_at + cluster).min(end) <= next;
                    match is_whole {
                        true => clusters.push(cluster_at),
                        // Other parts of it are its own.
                        false => data.push(cluster_at),
                    }
                }
            }
            at = next;
        }
        let size = self.shared.capacity.bytes();
        for cluster_at in clusters {
            let end = (cluster_at + cluster).min(end_of_backing);
            match self.image.can_zero() && self.is_hole_below(cluster_at, end) {
                true => {
                    let length = cluster.min(size - cluster_at);
                    self.image
                        .zero_clusters(cluster_at, length, end_of_backing)?;
                }
                false => data.push(cluster_at),
            }
        }
        let backing = self.backing.as_mut();
        let backing = backing.map(|backing| backing as &mut dyn Backing);
        let failed = self.image.prepare_write(&data, backing);
        match failed.into_iter().next() {
            None => Ok(()),
            Some((_, error)) => Err(error),
        }
    }

    fn is_hole_below(&mut self, at: u64, end: u64) -> bool {
        let Some(backing) = &mut self.backing else {
            return false;
        };
        let found = backing.block_status(at, end - at);
        let first = found.ok().and_then(|extents| extents.into_iter().next());
        first
            .is_some_and(|extent| extent.end >= end && extent.allocation == block::Allocation::Hole)
    }
}
