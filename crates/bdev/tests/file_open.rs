//! Opening file disks: refusals, with cause and remedy.

mod common;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use bdev::{
    BlockDevice, CacheMode, File, FileLock, FileOptions, ImageFormat, LocalFiles, Lockable,
    release_deadline,
};
use common::{Worker, open, options};

fn refusal(options: FileOptions) -> String {
    let path = options.path.display().to_string();
    let text = File::open(options).unwrap_err().to_string();
    assert!(text.starts_with(&path), "no path in: {text}");
    text
}

fn says(text: &str, parts: &[&str]) {
    for part in parts {
        assert!(text.contains(part), "no {part:?} in: {text}");
    }
}

fn buffered(path: &Path) -> FileOptions {
    FileOptions {
        cache: CacheMode::Writeback,
        ..FileOptions::new(path)
    }
}

#[test]
fn file_with_a_size_is_created_sparse_and_private() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let file = open(options(&path, 1 << 40, CacheMode::None));
    let stat = fs::metadata(&path).unwrap();
    assert_eq!((stat.len(), stat.blocks()), (1 << 40, 0));
    assert_eq!(stat.permissions().mode() & 0o777, 0o600);
    assert_eq!(file.info().geometry.capacity_bytes(), 1 << 40);
    drop(file);
    open(options(&path, 1 << 40, CacheMode::None));
    open(FileOptions::new(&path));
}

#[test]
fn character_device_is_named_in_two_words() {
    let text = refusal(buffered(Path::new("/dev/null")));
    says(&text, &["but a character device; hint: "]);
}

#[test]
fn no_regular_file_is_created_among_the_device_nodes() {
    let folder = tempfile::tempdir().unwrap();
    let link = folder.path().join("devices");
    std::os::unix::fs::symlink("/dev", &link).unwrap();
    for path in [
        "/dev/lunette-test-disk".into(),
        "/dev/none/lunette-test-disk".into(),
        "/dev/shm/../lunette-test-disk".into(),
        link.join("lunette-test-disk"),
    ] {
        let text = refusal(options(&path, 1 << 20, CacheMode::Writeback));
        says(&text, &["not created below /dev", "hint: correct the path"]);
        assert!(!path.exists(), "{}", path.display());
    }
    let memory = tempfile::tempdir_in("/dev/shm").unwrap();
    let path = memory.path().join("disk");
    open(options(&path, 1 << 20, CacheMode::Writeback));
    assert!(path.exists());
}

/// Detects truncation, removal and replacement by other programs.
#[test]
fn changes_of_a_file_by_other_programs_are_found() {
    let folder = tempfile::tempdir().unwrap();
    let (path, other) = (folder.path().join("disk"), folder.path().join("other"));
    let image_path = folder.path().join("image");
    let image_options = bdev::ImageOptions {
        cache: CacheMode::Writeback,
        ..bdev::ImageOptions::new(&image_path)
    };
    let image = bdev::Image::create(&image_options, 1 << 20).unwrap();
    image.check_file().unwrap();
    let held = fs::File::options().write(true).open(&image_path).unwrap();
    held.set_len(65_536).unwrap();
    let error = image.check_file().unwrap_err().to_string();
    says(&error, &[image_path.to_str().unwrap(), "65536 bytes"]);
    let file = open(FileOptions {
        size: Some(1 << 20),
        ..buffered(&path)
    });
    file.check_file().unwrap();
    let by_other = fs::File::options().write(true).open(&path).unwrap();
    by_other.set_len(512).unwrap();
    let error = file.check_file().unwrap_err().to_string();
    says(&error, &[path.to_str().unwrap(), "512 bytes", "1048576"]);
    by_other.set_len(1 << 20).unwrap();
    file.check_file().unwrap();
    fs::write(&other, [0; 4096]).unwrap();
    fs::rename(&other, &path).unwrap();
    let error = file.check_file().unwrap_err().to_string();
    says(&error, &["another file", "4096 bytes"]);
    fs::remove_file(&path).unwrap();
    let error = file.check_file().unwrap_err().to_string();
    says(&error, &["no longer exists"]);
}

#[test]
fn missing_file_without_a_size_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    says(
        &refusal(FileOptions::new(&path)),
        &["does not exist", "size=10G"],
    );
    let read_only = FileOptions {
        read_only: true,
        ..options(&path, 4096, CacheMode::None)
    };
    says(&refusal(read_only), &["does not exist", "read-only"]);
    let deep = folder.path().join("no/such/disk");
    says(
        &refusal(options(&deep, 4096, CacheMode::None)),
        &["mkdir -p"],
    );
    assert!(!path.exists());
}

#[test]
fn existing_file_of_another_size_is_refused_and_untouched() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    fs::write(&path, vec![7; 8192]).unwrap();
    for wanted in [4096, 1 << 20] {
        let text = refusal(options(&path, wanted, CacheMode::None));
        let hint = format!("truncate -s {wanted}");
        says(&text, &["8192 bytes", &format!("not {wanted}"), &hint]);
    }
    assert_eq!(fs::read(&path).unwrap(), vec![7; 8192]);
}

#[test]
fn file_without_whole_blocks_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    fs::write(&path, vec![7; 1000]).unwrap();
    let text = refusal(FileOptions::new(&path));
    says(&text, &["1000 bytes", "512 bytes", "truncate -s 1024"]);
    fs::write(&path, []).unwrap();
    says(&refusal(FileOptions::new(&path)), &["is empty"]);
}

/// First bytes of images of other formats.
fn images() -> [(&'static str, Vec<u8>); 10] {
    let mut vdi = vec![0; 64];
    vdi.extend([0x7f, 0x10, 0xda, 0xbe]);
    [
        ("qcow2", b"QFI\xfb\0\0\0\x03".to_vec()),
        ("VMDK", b"KDMV\x01\0\0\0".to_vec()),
        ("VMDK", b"# Disk DescriptorFile\nversion=1\n".to_vec()),
        ("VHDX", b"vhdxfile".to_vec()),
        ("LUKS", b"LUKS\xba\xbe\0\x02".to_vec()),
        ("VDI", vdi),
        ("VHD", b"conectix\0\0\0\x02".to_vec()),
        ("QED", b"QED\0\0\0\x01\0".to_vec()),
        ("Parallels", b"WithoutFreeSpace\x02\0\0\0".to_vec()),
        ("qcow (version 1)", b"QFI\xfb\0\0\0\x01".to_vec()),
    ]
}

#[test]
fn image_of_another_format_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    for (format, mut image) in images() {
        image.resize(1000, 7);
        fs::write(&path, &image).unwrap();
        let odd = refusal(FileOptions::new(&path));
        says(
            &odd,
            &[
                "1000 bytes",
                "512 bytes",
                format,
                "another size would damage",
            ],
        );
        let other = refusal(options(&path, 1 << 20, CacheMode::None));
        says(&other, &["1000 bytes large", format]);
        for text in [odd, other] {
            assert!(
                !text.contains("truncate") && !text.contains("pad"),
                "{text}"
            );
        }
        assert_eq!(fs::read(&path).unwrap(), image);
    }
}

#[test]
fn image_of_another_format_with_whole_blocks_is_served_raw() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    for (number, (format, mut image)) in images().into_iter().enumerate() {
        // Separate files: a program started by another test holds a lock a moment longer.
        let path = folder.path().join(number.to_string());
        image.resize(4096, 7);
        fs::write(&path, &image).unwrap();
        let file = open(buffered(&path));
        let mut worker = Worker::new(&*file);
        assert_eq!(worker.read(0, 4096), Ok(image));
        let found = ImageFormat::of_path(&path).unwrap();
        assert_eq!(found.to_string(), format);
        says(&found.warning(), &[format, "raw bytes"]);
    }
    fs::write(&path, [7; 4096]).unwrap();
    assert_eq!(ImageFormat::of_path(&path), None);
    assert_eq!(ImageFormat::of_path(&folder.path().join("none")), None);
    assert_eq!(ImageFormat::of_path(Path::new("/dev/zero")), None);
}

#[test]
fn wrong_sizes_and_block_sizes_create_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    for (size, block_size) in [
        (1000, 512),
        (4096, 513),
        (4096, 8192),
        (512, 4096),
        (0, 512),
    ] {
        let options = FileOptions {
            block_size: Some(block_size),
            ..options(&path, size, CacheMode::None)
        };
        assert!(File::open(options).is_err(), "{size} {block_size}");
        assert!(!path.exists());
    }
}

#[test]
fn error_warns_that_truncation_destroys_data() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [7; 8192]).unwrap();
    let smaller = refusal(options(&path, 4096, CacheMode::None));
    says(&smaller, &["8192 bytes large", "-s 4096", "destroys"]);
    let larger = refusal(options(&path, 16384, CacheMode::None));
    says(&larger, &["-s 16384"]);
    assert!(!larger.contains("destroys"), "{larger}");
}

#[test]
fn unused_created_file_is_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    assert!(File::open(options(&path, 1000, CacheMode::None)).is_err());
    assert!(!path.exists());
    // Larger than every file system permits.
    let text = refusal(options(&path, i64::MAX as u64 & !511, CacheMode::None));
    says(&text, &["bytes large"]);
    assert!(!path.exists());
}

#[test]
fn other_file_types_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    says(&refusal(FileOptions::new(folder.path())), &["directory"]);
    says(&refusal(FileOptions::new("/dev/null")), &["neither a file"]);
}

#[test]
fn second_writer_is_refused_with_the_likely_owner() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let first = open(options(&path, 1 << 20, CacheMode::None));
    let text = refusal(buffered(&path));
    says(&text, &["in use", "QEMU", "lslocks", "fuser -v"]);
    let reader = FileOptions {
        read_only: true,
        ..buffered(&path)
    };
    says(&refusal(reader.clone()), &["open for writing"]);
    // A worker's handle outlives the block device, and so does the lock.
    let worker = Worker::new(&*first);
    drop(first);
    refusal(buffered(&path));
    drop(worker);
    let one = File::open(reader.clone()).unwrap();
    let _two = File::open(reader).unwrap();
    says(&refusal(buffered(&path)), &["does not allow writers"]);
    drop(one);
    let unlocked = FileOptions {
        lock: FileLock::Never,
        ..buffered(&path)
    };
    File::open(unlocked).unwrap();
}

#[test]
fn locks_of_a_disk_in_use_by_turns_are_held_while_a_worker_uses_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, [0; 8192]).unwrap();
    let open = || {
        let options = FileOptions {
            lock: FileLock::WhileActive,
            ..buffered(&path)
        };
        File::open(options).unwrap()
    };
    // A thread of the device releases the locks after the last use.
    let released = |file: &File| {
        let turns = file.capabilities().turns.unwrap();
        turns.wait_for_release(release_deadline());
    };
    let (first, second) = (open(), open());
    let workers = [Worker::new(&first), Worker::new(&first)];
    let in_use = |file: &File| {
        let error = file.set_size(4096).unwrap_err().to_string();
        assert!(error.contains("another process has locked"), "{error}");
    };
    in_use(&second);
    says(&refusal(buffered(&path)), &["is in use"]);
    let [one, other] = workers;
    drop(one);
    in_use(&second);
    drop(other);
    released(&first);
    let worker = Worker::new(&second);
    in_use(&first);
    drop(worker);
    released(&second);
    first.set_size(4096).unwrap();
    // It could be written by another daemon below an image.
    assert!(first.become_read_only().is_err());
}

#[test]
fn cache_mode_sets_the_reported_write_cache() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    for (mode, write_cache) in [("none", true), ("writeback", true), ("writethrough", false)] {
        let cache: CacheMode = mode.parse().unwrap();
        assert_eq!(cache.to_string(), mode);
        let file = open(options(&path, 1 << 20, cache));
        assert_eq!(file.info().write_cache, write_cache);
    }
    let text = "unsafe".parse::<CacheMode>().unwrap_err();
    says(&text, &["\"unsafe\"", "none, writeback or writethrough"]);
}
