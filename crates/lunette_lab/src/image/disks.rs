//! Disks that `lunette image` reads and writes: files, block devices, and disks that are no files, by the names that QEMU has for them.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use bdev::{
    BlockDevice, BlockingIo, CacheMode, File, FileOptions, Image, ImageFormat, ImageOptions,
};
use cli_common::Failure;

use super::arguments::Format;
use super::of;

/// Of a disk that is no file: how much of it says what it holds.
const HEAD_BYTES: usize = 4096;

/// A name in an image, or of one beside it: relative names are so to the image.
pub fn beside(image: &Path, name: &str) -> PathBuf {
    match bdev::is_remote(name) {
        true => PathBuf::from(name),
        false => image.parent().unwrap_or(Path::new("")).join(name),
    }
}

/// Is it no file? Its name, then.
pub fn remote(path: &Path) -> Option<&str> {
    path.to_str().filter(|name| bdev::is_remote(name))
}

/// The format that a disk's first bytes say: raw if they say none.
pub fn probe(path: &Path) -> Result<Format, Failure> {
    let found = match remote(path) {
        None => ImageFormat::of_path(path),
        Some(name) => {
            let mut head = [0; HEAD_BYTES];
            let mut disk = blocking(path, open_remote(name, true)?)?;
            let read = disk.read_at(0, &mut head);
            read.map_err(|error| of(path)(&error))?;
            ImageFormat::of(&head)
        }
    };
    match found {
        Some(ImageFormat::Qcow2) if remote(path).is_none() => Ok(Format::Qcow2),
        None => Ok(Format::Raw),
        Some(other) => Err(of(path)(&format!(
            "it begins as a disk image in the format {other}, which is not read{}; hint: qemu-img convert reads it, and the option \
             that names the format takes it as raw bytes",
            if remote(path).is_some() {
                " over a network"
            } else {
                ""
            }
        ))),
    }
}

fn blocking(path: &Path, device: Arc<dyn BlockDevice>) -> Result<BlockingIo, Failure> {
    BlockingIo::new(device).map_err(|error| of(path)(&error))
}

fn open_remote(name: &str, read_only: bool) -> Result<Arc<dyn BlockDevice>, Failure> {
    bdev::open_remote(name, read_only).map_err(Failure::because)
}

/// A disk to read, in whichever format.
pub fn open_disk(path: &Path, format: Option<Format>) -> Result<BlockingIo, Failure> {
    let format = match format {
        Some(format) => format,
        None => probe(path)?,
    };
    blocking(path, open(path, format, true)?)
}

/// A disk to write.
pub fn open_writable(path: &Path, format: Format) -> Result<Arc<dyn BlockDevice>, Failure> {
    open(path, format, false)
}

fn open(path: &Path, format: Format, read_only: bool) -> Result<Arc<dyn BlockDevice>, Failure> {
    let because = |error: &dyn std::fmt::Display| Failure::because(error.to_string());
    Ok(match (remote(path), format) {
        (Some(name), Format::Raw) => open_remote(name, read_only)?,
        (Some(_), Format::Qcow2) => {
            return Err(of(path)(&"over a network a disk can be raw only"));
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
                ..ImageOptions::new(path)
            });
            Arc::new(image.map_err(|error| because(&error))?)
        }
    })
}
