//! Scratch files of points in time: sparse files without a name.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::{BlockDevice, CacheMode, File, FileOptions, Image, ImageOptions, OpenError};

/// Creates a sparse file without a name in a folder. The file ends with its last descriptor, also if the process is killed.
///
/// # Errors
/// The file cannot be created.
pub fn create_scratch(folder: &Path, bytes: u64) -> Result<Arc<dyn BlockDevice>, OpenError> {
    let path = random_path(folder)?;
    let file = File::create_unnamed(&FileOptions {
        size: Some(bytes),
        cache: CacheMode::Writeback,
        ..FileOptions::new(&path)
    });
    match file {
        Ok(file) => Ok(Arc::new(file)),
        // File systems limit the size of files, for example ext4 to 16 TiB. An image takes the space of its data only.
        Err(error) => image(&path, bytes).map_err(|_| error),
    }
}

/// Creates an image and removes its name.
fn image(path: &Path, bytes: u64) -> Result<Arc<dyn BlockDevice>, OpenError> {
    let options = ImageOptions {
        cache: CacheMode::Writeback,
        ..ImageOptions::new(path)
    };
    let image = Image::create(&options, bytes)?;
    std::fs::remove_file(path).map_err(|error| OpenError::File {
        path: path.to_owned(),
        reason: format!("cannot remove its name: {error}"),
    })?;
    Ok(Arc::new(image))
}

/// Returns a path with a random name, which other programs cannot predict.
fn random_path(folder: &Path) -> Result<PathBuf, OpenError> {
    let number = getrandom::u64().map_err(|error| OpenError::File {
        path: folder.to_owned(),
        reason: format!("cannot choose a random name in it: {error}"),
    })?;
    Ok(folder.join(format!(".lunette-{number:016x}.scratch")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scratch_files_have_no_names_at_any_size() {
        let folder = tempfile::tempdir().unwrap();
        // The second size is too large for a file of ext4.
        for bytes in [1 << 20, 1 << 45] {
            let made = create_scratch(folder.path(), bytes);
            assert_eq!(made.unwrap().capacity().bytes(), bytes);
            assert_eq!(folder.path().read_dir().unwrap().count(), 0);
        }
    }

    #[test]
    fn a_missing_folder_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let error = create_scratch(&folder.path().join("none"), 1 << 20).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("none does not exist"), "{text}");
    }
}
