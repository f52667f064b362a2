//! The external data file of an image, with each cluster at its offset in the disk.

use std::path::{Path, PathBuf};

use block::Identity;
use qcow2::Header;

use super::names::{CheckNamed, folder_of, lies_below};
use super::{ImageOptions, open};
use crate::{File, FileLock, FileOptions, OpenError};

/// Returns the data file named by the header of an image; the name is not checked.
pub fn data_file_of(path: &Path) -> Option<PathBuf> {
    Some(path.parent()?.join(name(&header_of(path)?)?))
}

/// Returns the backing image named by the header of an image.
pub fn backing_path_of(path: &Path) -> Option<PathBuf> {
    let named = super::names::backing_of(path, &header_of(path)?).ok()??;
    Some(named.path)
}

/// Returns the random identity of an image: a copy has the same one, an image that replaces it another one or none.
pub fn identity_of(path: &Path) -> Option<Identity> {
    let identity = header_of(path)?.identity;
    identity.map(Identity::from_random_bits)
}

fn header_of(path: &Path) -> Option<Header> {
    let file = File::open(FileOptions {
        read_only: true,
        lock: FileLock::Never,
        is_container: true,
        ..FileOptions::new(path)
    });
    Header::read(&file.ok()?.container().ok()?).ok()
}

/// Returns the name without QEMU's protocol prefix `file:`.
fn name(header: &Header) -> Option<&str> {
    let name = header
        .data_file
        .as_deref()
        .filter(|_| header.has_data_file());
    let name = name.map(|name| name.strip_prefix("file:").unwrap_or(name));
    name.filter(|name| !name.is_empty())
}

/// Returns the path of the external data file; `None` if the data is in the image.
///
/// The image may come from anywhere, therefore its name of a data file is not trusted. For writing, the options must name the file; with
/// `trusts_name` it suffices that it lies in the folder of the image.
pub(super) fn path(options: &ImageOptions, header: &Header) -> Result<Option<PathBuf>, OpenError> {
    let path = options.path.as_path();
    let fail = |reason: String| Err(open::fail(path, reason));
    match (header.has_data_file(), &options.data_file) {
        (false, None) => return Ok(None),
        (false, Some(_)) => {
            return fail("the image has no external data file; hint: remove data_file".to_owned());
        }
        (true, Some(named)) => return Ok(Some(named.clone())),
        (true, None) => {}
    }
    let Some(name) = name(header) else {
        return fail(
            "the image has an external data file but does not name it; hint: set data_file = PATH"
                .to_owned(),
        );
    };
    if name.starts_with("json:") {
        return fail(format!(
            "its data file name {name} is not a path; hint: set data_file = PATH"
        ));
    }
    let folder = folder_of(path);
    let data = folder.join(name);
    options.named_files.check(path, "data file", &data)?;
    if !options.read_only && !options.trusts_name {
        return fail(format!(
            "cannot write to its data file {name}, which only the image names; hint: set data_file = {} to allow it",
            data.display()
        ));
    }
    if !options.read_only && !lies_below(&data, folder) {
        return fail(format!(
            "cannot write to its data file {name}, which only the image names and which is not in the folder of the image; hint: move it into that folder, or, for a served disk, set data_file = {} to allow it",
            data.display()
        ));
    }
    Ok(Some(data))
}
