//! Every block device honours or refuses every option: one table.
//!
//! The struct patterns have no `..`: a new option does not compile until added here.

mod common;

use std::path::PathBuf;
use std::sync::Arc;

use bdev::{
    BlockDevice, CacheMode, File, FileLock, FileOptions, Null, NullOptions, OpenError, Ram,
    RamOptions,
};
use block::{IoErrorKind, IoRequest};
use common::Worker;

/// Options that all block devices have.
#[derive(Clone, Copy)]
struct Common {
    size: u64,
    block_size: u32,
    read_only: bool,
}

type Make = fn(PathBuf, Common) -> Result<Arc<dyn BlockDevice>, OpenError>;

fn null(_: PathBuf, c: Common) -> Result<Arc<dyn BlockDevice>, OpenError> {
    let Common {
        size,
        block_size,
        read_only,
    } = c;
    let options = NullOptions {
        size,
        block_size,
        read_only,
    };
    Ok(Arc::new(Null::create(options)?))
}

fn ram(_: PathBuf, c: Common) -> Result<Arc<dyn BlockDevice>, OpenError> {
    let Common {
        size,
        block_size,
        read_only,
    } = c;
    let options = RamOptions {
        size,
        block_size,
        read_only,
        huge_pages: size.is_multiple_of(3),
    };
    Ok(Arc::new(Ram::create(options)?))
}

fn file(path: PathBuf, c: Common, cache: CacheMode) -> Result<Arc<dyn BlockDevice>, OpenError> {
    let Common {
        size,
        block_size,
        read_only,
    } = c;
    if read_only {
        // A read-only disk is not created; create it first.
        std::fs::File::create(&path).unwrap().set_len(size).unwrap();
    }
    let options = FileOptions {
        path,
        size: Some(size),
        cache,
        read_only,
        block_size: Some(block_size),
        lock: FileLock::Always,
        is_container: false,
    };
    Ok(Arc::new(File::open(options)?))
}

const ENGINES: [(&str, Make); 5] = [
    ("null", null),
    ("ram", ram),
    ("file, none", |p, c| file(p, c, CacheMode::None)),
    ("file, writeback", |p, c| file(p, c, CacheMode::Writeback)),
    ("file, writethrough", |p, c| {
        file(p, c, CacheMode::Writethrough)
    }),
];

const MIB: u64 = 1 << 20;

#[test]
fn every_device_honours_size_block_size_and_read_only() {
    for (name, make) in ENGINES {
        for block_size in [512, 1024, 2048, 4096] {
            for read_only in [false, true] {
                let folder = tempfile::tempdir().unwrap();
                let path = folder.path().join("disk");
                let common = Common {
                    size: MIB,
                    block_size,
                    read_only,
                };
                let device = make(path, common).unwrap_or_else(|e| panic!("{name}: {e}"));
                let info = device.info();
                assert_eq!(info.geometry.block_size(), block_size, "{name}");
                assert_eq!(info.geometry.capacity_bytes(), MIB, "{name}");
                assert_eq!(info.read_only, read_only, "{name}");
                assert!(info.physical_block_size >= block_size, "{name}");
                behaves(name, &*device, read_only, u64::from(block_size));
            }
        }
    }
}

fn behaves(name: &str, device: &dyn BlockDevice, read_only: bool, block: u64) {
    let mut worker = Worker::new(device);
    let one = vec![1; block as usize];
    let kind = |outcome: block::IoOutcome| outcome.map_err(|e| e.kind);
    let expected = if read_only {
        Err(IoErrorKind::ReadOnly)
    } else {
        Ok(())
    };
    assert_eq!(kind(worker.write(0, &one)), expected, "{name}");
    let zeroes = IoRequest::write_zeroes(0, block);
    assert_eq!(kind(worker.do_plain(zeroes)), expected, "{name}");
    let discard = IoRequest::discard(0, block);
    assert_eq!(kind(worker.do_plain(discard)), expected, "{name}");
    assert_eq!(kind(worker.do_plain(IoRequest::flush())), Ok(()), "{name}");
    assert!(worker.read(MIB - block, block as usize).is_ok(), "{name}");
    let beyond = worker.read(MIB, block as usize).unwrap_err();
    assert_eq!(beyond.kind, IoErrorKind::OutOfRange, "{name}");
    let unit = u64::from(device.info().io_alignment);
    let half = worker.read(unit / 2, unit as usize).unwrap_err();
    assert_eq!(half.kind, IoErrorKind::OutOfRange, "{name}");
    let wrapping = worker.do_plain(IoRequest::discard(u64::MAX - 511, block));
    assert!(wrapping.is_err(), "{name}");
    assert_eq!(
        kind(worker.do_plain(IoRequest::read(0, 0))),
        Ok(()),
        "{name}"
    );
}

#[test]
fn every_device_refuses_the_same_sizes_in_words() {
    for (name, make) in ENGINES {
        for (size, block_size, value) in [
            (MIB, 0, "block size 0 "),
            (MIB, 513, "block size 513 "),
            (MIB, 8192, "block size 8192 "),
            (0, 512, "size 0 bytes"),
            (1000, 512, "size 1000 bytes"),
            (512, 4096, "size 512 bytes"),
        ] {
            let folder = tempfile::tempdir().unwrap();
            let common = Common {
                size,
                block_size,
                read_only: false,
            };
            let text = make(folder.path().join("disk"), common)
                .unwrap_err()
                .to_string();
            assert!(text.contains(value), "{name}: {text}");
            assert!(text.contains("must be"), "{name}: no hint in: {text}");
        }
    }
}
