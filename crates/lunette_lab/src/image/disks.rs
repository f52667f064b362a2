//! Disks for `lunette image`: files, block devices, and remote disks with the names that QEMU uses.

use std::path::Path;
use std::sync::Arc;

use bdev::{
    BackingImage, BlockDevice, BlockingIo, CacheMode, File, FileOptions, Image, ImageFormat,
    ImageOptions, NamedFiles,
};
use cli_common::Failure;

use super::arguments::Format;
use super::of;

/// Bytes at the start of a remote disk to search for a signature.
const HEAD_BYTES: usize = 4096;

/// Returns the name of a remote disk; `None` for a file or device.
pub fn remote(path: &Path) -> Option<&str> {
    path.to_str().filter(|name| bdev::is_remote(name))
}

/// Returns the format if name and content agree. Content alone is not sufficient, because a guest writes it: a file with a qcow2
/// signature is an image only if its name ends in `.qcow2`.
pub fn determine_format(path: &Path) -> Result<Format, Failure> {
    let is_remote = remote(path).is_some();
    let is_named_qcow2 = !is_remote && path.extension().is_some_and(|end| end == "qcow2");
    match (signature(path)?, is_named_qcow2) {
        (Some(ImageFormat::Qcow2), true) => Ok(Format::Qcow2),
        (None, false) => Ok(Format::Raw),
        (None, true) => Err(of(path)(&format!(
            "its name ends in .qcow2, but it is not a qcow2 image; {STATE_FORMAT}"
        ))),
        (Some(ImageFormat::Qcow2), false) if !is_remote => Err(of(path)(&format!(
            "it has the signature of a qcow2 image, which a guest may have written, and its name does not end in .qcow2; {STATE_FORMAT}: qcow2 for an image of your own, raw for a disk that a guest writes"
        ))),
        (Some(other), _) => Err(of(path)(&format!(
            "it has the signature of a disk image in the format {other}, which is not supported{}; hint: convert it with qemu-img convert, or state the format raw to use its bytes unchanged (--format, convert: --from, a backing image: --backing-format)",
            if is_remote { " over a network" } else { "" }
        ))),
    }
}

const STATE_FORMAT: &str =
    "hint: state its format (--format, convert: --from, a backing image: --backing-format)";

/// Returns the format of the signature at the start or end of a disk.
pub fn signature(path: &Path) -> Result<Option<ImageFormat>, Failure> {
    let Some(name) = remote(path) else {
        let unopened = |error: std::io::Error| of(path)(&format!("cannot open it: {error}"));
        let found = std::fs::metadata(path).map_err(unopened)?;
        if found.is_file() {
            std::fs::File::open(path).map_err(unopened)?;
        }
        return Ok(ImageFormat::of_path(path));
    };
    let mut head = [0; HEAD_BYTES];
    let mut disk = blocking(path, open_remote(name, true)?)?;
    let read = disk.read_at(0, &mut head);
    read.map_err(|error| of(path)(&error))?;
    Ok(ImageFormat::of(&head))
}

/// Resolves the name of a backing image, given by the user, for a header of `image`.
pub fn backing_image(
    image: &Path,
    name: &str,
    format: Option<Format>,
) -> Result<BackingImage, Failure> {
    let named = |format: Option<Format>| {
        let named = bdev::backing_named(image, name, format.map(Format::word));
        named.map_err(|error| Failure::because(error.to_string()))
    };
    match format {
        Some(format) => named(Some(format)),
        None if name.starts_with("json:") => named(None),
        None => {
            let place = named(Some(Format::Raw))?.path;
            named(Some(determine_format(&place)?))
        }
    }
}

fn blocking(path: &Path, device: Arc<dyn BlockDevice>) -> Result<BlockingIo, Failure> {
    BlockingIo::new(device).map_err(|error| of(path)(&error))
}

fn open_remote(name: &str, read_only: bool) -> Result<Arc<dyn BlockDevice>, Failure> {
    bdev::open_remote(name, read_only).map_err(Failure::because)
}

pub fn open_disk(
    path: &Path,
    format: Option<Format>,
    named_files: NamedFiles,
) -> Result<BlockingIo, Failure> {
    let format = match format {
        Some(format) => format,
        None => determine_format(path)?,
    };
    blocking(path, open(path, format, true, named_files)?)
}

pub fn open_writable(
    path: &Path,
    format: Format,
    named_files: NamedFiles,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    open(path, format, false, named_files)
}

fn open(
    path: &Path,
    format: Format,
    read_only: bool,
    named_files: NamedFiles,
) -> Result<Arc<dyn BlockDevice>, Failure> {
    let because = |error: &dyn std::fmt::Display| Failure::because(error.to_string());
    Ok(match (remote(path), format) {
        (Some(name), Format::Raw) => open_remote(name, read_only)?,
        (Some(_), Format::Qcow2) => {
            return Err(of(path)(&"a remote disk can only be raw"));
        }
        (None, Format::Raw) => {
            let file = File::open(FileOptions {
                read_only,
                cache: CacheMode::Writeback,
                is_container: true,
                ..FileOptions::new(path)
            });
            Arc::new(file.map_err(|error| because(&error))?)
        }
        (None, Format::Qcow2) => {
            let image = Image::open(&ImageOptions {
                read_only,
                cache: CacheMode::Writeback,
                trusts_name: true,
                named_files,
                ..ImageOptions::new(path)
            });
            Arc::new(image.map_err(|error| because(&error))?)
        }
    })
}
