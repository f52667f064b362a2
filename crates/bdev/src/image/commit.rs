//! Opens an image and its backing device for writing, to commit data while the disk is in use. Both are opened again, so that all readers
//! and writers of a device share its tables in memory.

use std::os::unix::fs::FileTypeExt;
use std::path::PathBuf;
use std::sync::Arc;

use qcow2::{Header, Mapping};

use super::names::{BackingFormat, CheckNamed, backing_of};
use super::overlay::HAS_SNAPSHOTS;
use super::owner::Owner;
use super::remote_backing::is_remote;
use super::{Image, ImageOptions, open};
use crate::{BlockDevice, File, FileOptions, Lockable, OpenError};

/// An image and its backing device, opened for writing.
pub struct Committable {
    /// The image.
    pub overlay: Arc<dyn BlockDevice>,
    /// Backing device, as large as the image.
    pub base: Arc<dyn BlockDevice>,
    /// Path of the backing device.
    pub base_path: PathBuf,
    /// The backing device is a qcow2 image, not raw.
    pub base_is_image: bool,
    /// Size to configure in bytes: that of the image, on a larger block device.
    pub base_size: Option<u64>,
}

pub(super) fn reopen(image: &Image) -> Result<Committable, OpenError> {
    let path = image.path();
    let failed = |reason: String| open::fail(path, reason);
    let container = image.shared.file.container();
    let container = container.map_err(|error| failed(error.to_string()))?;
    let header = Header::read(&container).map_err(|error| failed(error.to_string()))?;
    let (Some(named), Some(below)) = (backing_of(path, &header)?, image.shared.backing.device())
    else {
        return Err(failed("has no backing image".to_owned()));
    };
    if header.snapshots > 0 {
        return Err(failed(HAS_SNAPSHOTS.to_owned()));
    }
    let base_path = named.path;
    let named_files = image.shared.named_files;
    named_files.check(path, "backing image", &base_path)?;
    if base_path.to_str().is_some_and(is_remote) {
        return Err(failed(format!(
            "cannot commit to its backing image {}, which is read-only; hint: copy the disk into one image with lunette disk mirror",
            base_path.display()
        )));
    }
    let base_is_image = named.format == BackingFormat::Qcow2;
    let released = image
        .become_read_only()
        .and_then(|()| {
            let lockable = below.capabilities().lockable;
            lockable.map_or(Ok(()), Lockable::release_locks)
        })
        .and_then(|()| image.release_locks());
    let opened = released
        .map_err(|error| failed(format!("cannot release the image: {error}")))
        .and_then(|()| open_both(image, base_path, base_is_image));
    opened.inspect_err(|_| {
        if let Err(error) = image.take_locks() {
            tracing::error!(path = %path.display(), "cannot lock the image again: {error}");
        }
    })
}

fn open_both(
    image: &Image,
    base_path: PathBuf,
    base_is_image: bool,
) -> Result<Committable, OpenError> {
    let shared = &image.shared;
    let options = ImageOptions {
        cache: shared.cache,
        block_size: Some(shared.info.geometry.block_size()),
        data_file: shared.data_file.as_ref().map(|file| file.path().to_owned()),
        named_files: shared.named_files,
        ..ImageOptions::new(image.path())
    };
    let base = open_base(&options, &base_path, base_is_image)?;
    let (wanted, found) = (shared.capacity.bytes(), base.capacity().bytes());
    let base_size =
        (found > wanted && !base_is_image && is_block_device(&base_path)).then_some(wanted);
    if base_size.is_some() {
        // The rest of the block device does not belong to the disk.
        base.capacity().set(wanted);
    } else if found > wanted {
        return Err(open::fail(
            image.path(),
            format!(
                "is smaller than its backing image, {wanted} bytes to {found}: a commit would expose the data beyond its end"
            ),
        ));
    }
    if found < wanted {
        let grown = base.set_size(wanted);
        grown.map_err(|error| {
            let reason =
                format!("cannot grow it to the size of its overlay, {wanted} bytes: {error}");
            open::fail(&base_path, reason)
        })?;
        base.capacity().set(wanted);
    }
    let opened = open::open_over(&options, Arc::clone(&base))?;
    Ok(Committable {
        overlay: Arc::new(Image::serve(opened)?),
        base,
        base_path,
        base_is_image,
        base_size,
    })
}

fn is_block_device(path: &std::path::Path) -> bool {
    std::fs::metadata(path).is_ok_and(|metadata| metadata.file_type().is_block_device())
}

fn open_base(
    options: &ImageOptions,
    path: &std::path::Path,
    is_image: bool,
) -> Result<Arc<dyn BlockDevice>, OpenError> {
    let options = ImageOptions {
        path: path.to_owned(),
        data_file: None,
        // A commit applies to the whole chain.
        trusts_name: true,
        ..options.clone()
    };
    if is_image {
        return Ok(Arc::new(Image::open(&options)?));
    }
    Ok(Arc::new(File::open(FileOptions {
        cache: options.cache,
        block_size: options.block_size,
        ..FileOptions::new(path)
    })?))
}

impl Owner {
    /// Lists the pieces of a range: the end of each, and whether the image stores it.
    pub(super) fn own_pieces(
        &mut self,
        offset: u64,
        length: u64,
    ) -> qcow2::Result<Vec<(u64, bool)>> {
        let end = offset + length;
        let mut pieces: Vec<(u64, bool)> = Vec::new();
        let mut at = offset;
        while at < end {
            self.image.load(at)?;
            let segment = self.image.map().segment(at, end - at);
            let is_own = segment.mapping != Mapping::Unallocated;
            at += segment.length;
            match pieces.last_mut() {
                Some((last, own)) if *own == is_own => *last = at,
                _ => pieces.push((at, is_own)),
            }
        }
        Ok(pieces)
    }
}
