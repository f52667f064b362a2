//! Files that other programs resize while they are served.

mod common;

use std::fs;
use std::path::Path;
use std::sync::Arc;

use bdev::{CacheMode, Disk, FileOptions, Ram, RamOptions};
use block::IoErrorKind;
use common::{Worker, open};

const MIB: u64 = 1 << 20;

fn served(path: &Path, read_only: bool) -> Disk {
    let options = FileOptions {
        cache: CacheMode::Writeback,
        read_only,
        ..FileOptions::new(path)
    };
    Disk::new("d", None, open(options)).unwrap()
}

fn set_len(path: &Path, bytes: u64) {
    let file = fs::File::options().write(true).open(path).unwrap();
    file.set_len(bytes).unwrap();
}

fn size(disk: &Disk) -> u64 {
    disk.info().geometry.capacity_bytes()
}

#[test]
fn file_that_grew_is_followed_in_whole_blocks() {
    for read_only in [false, true] {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("disk");
        fs::write(&path, vec![7; MIB as usize]).unwrap();
        let disk = served(&path, read_only);
        let mut worker = Worker::new(&*disk.device());
        assert!(!disk.has_other_size());
        assert_eq!(disk.follow_size().unwrap(), None);
        set_len(&path, 2 * MIB + 100);
        assert!(worker.read(MIB, 512).is_err(), "not before it is followed");
        assert!(disk.has_other_size());
        assert_eq!(disk.follow_size().unwrap(), Some(2 * MIB));
        assert_eq!(size(&disk), 2 * MIB);
        assert!(!disk.has_other_size());
        assert_eq!(disk.follow_size().unwrap(), None);
        assert_eq!(worker.read(2 * MIB - 512, 512), Ok(vec![0; 512]));
        // The exact size is invalid: not a multiple of a block.
        let error = disk.found_size().unwrap_err().to_string();
        assert!(error.contains("2097252"), "{error}");
    }
}

#[test]
fn shrunk_file_fails_io_beyond_its_end_and_is_followed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    fs::write(&path, vec![7; 2 * MIB as usize]).unwrap();
    let disk = served(&path, false);
    let mut worker = Worker::new(&*disk.device());
    set_len(&path, MIB);
    let beyond = worker.read(MIB, 512).unwrap_err();
    assert_eq!(beyond.kind, IoErrorKind::ReadMedium);
    assert_eq!(worker.read(MIB - 512, 512), Ok(vec![7; 512]));
    assert_eq!(disk.follow_size().unwrap(), Some(MIB));
    assert_eq!(size(&disk), MIB);
    assert_eq!(disk.found_size().unwrap(), MIB);
    let beyond = worker.read(MIB, 512).unwrap_err();
    assert_eq!(beyond.kind, IoErrorKind::OutOfRange);
    // A write there would extend the file again.
    assert!(worker.write(MIB, &[1; 512]).is_err());
    assert_eq!(fs::metadata(&path).unwrap().len(), MIB);
}

#[test]
fn emptied_file_retains_its_size_with_an_error() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    fs::write(&path, vec![7; MIB as usize]).unwrap();
    let disk = served(&path, false);
    let mut worker = Worker::new(&*disk.device());
    for left in [0, 511] {
        set_len(&path, left);
        assert!(!disk.has_other_size());
        assert!(disk.follow_size().is_err() && disk.found_size().is_err());
        assert_eq!(size(&disk), MIB);
        assert!(worker.read(MIB - 512, 512).is_err());
    }
    // The file was being replaced and is complete now.
    fs::write(&path, vec![8; 2 * MIB as usize]).unwrap();
    assert_eq!(disk.follow_size().unwrap(), Some(2 * MIB));
    assert_eq!(worker.read(MIB, 512), Ok(vec![8; 512]));
}

#[test]
fn private_disk_retains_its_created_size() {
    let options = RamOptions {
        size: MIB,
        ..RamOptions::default()
    };
    let disk = Disk::new("d", None, Arc::new(Ram::create(options).unwrap())).unwrap();
    assert!(!disk.has_other_size());
    assert_eq!(disk.follow_size().unwrap(), None);
    assert_eq!(disk.found_size().unwrap(), MIB);
}
