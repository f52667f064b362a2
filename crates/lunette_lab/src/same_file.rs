//! Comparison of the two ends of a copy.

use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Returns true if both paths lead to the same regular file or block device.
pub fn is_same_file(one: &Path, other: &Path) -> bool {
    let file = |path: &Path| {
        let found = std::fs::metadata(path).ok()?;
        let kind = found.file_type();
        let is_disk = kind.is_file() || kind.is_block_device();
        is_disk.then(|| (found.dev(), found.ino(), found.rdev()))
    };
    file(one).is_some_and(|found| Some(found) == file(other))
}
