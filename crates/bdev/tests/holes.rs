//! Block status: no hole has data, and anchored blocks have space permanently.

mod common;

use bdev::{BlockDevice, CacheMode, File, FileOptions, LocalFiles, Ram, RamOptions};
use block::{Allocation, Extent, IoFlags, IoRequest, STATUS_BYTES, decode_extents};
use common::Worker;
use guest_memory::IoBuffer;

const MIB: u64 = 1 << 20;
const SIZE: u64 = 64 * MIB;

/// Returns the block status of a range.
fn status(device: &dyn BlockDevice, offset: u64, length: u64) -> Vec<Extent> {
    let mut worker = Worker::new(device);
    let buffer = IoBuffer::owned(STATUS_BYTES);
    let tag = worker.submit(IoRequest::block_status(offset, length), buffer);
    let (outcome, buffer) = worker.wait(tag);
    outcome.unwrap();
    let mut bytes = [0; STATUS_BYTES];
    buffer.read_at(0, &mut bytes);
    decode_extents(&bytes).collect()
}

/// Returns the block status of the whole device.
fn extents(device: &dyn BlockDevice) -> Vec<(u64, Extent)> {
    let mut all: Vec<(u64, Extent)> = Vec::new();
    let mut offset = 0;
    while offset < SIZE {
        let listed = status(device, offset, SIZE - offset);
        assert!(!listed.is_empty(), "nothing from {offset}");
        for extent in listed {
            assert!(extent.end > offset, "{extent:?} from {offset}");
            all.push((offset, extent));
            offset = extent.end;
        }
    }
    all
}

/// Returns the allocation at one offset.
fn at(device: &dyn BlockDevice, offset: u64) -> Allocation {
    status(device, offset, 4096)[0].allocation
}

fn check(name: &str, device: &dyn BlockDevice) {
    let mut worker = Worker::new(device);
    let written = [0, 3 * MIB + 4096, 40 * MIB, SIZE - 4096];
    for at in written {
        worker.write(at, &[7; 4096]).unwrap();
    }
    for (from, extent) in extents(device) {
        let has_data = written.iter().any(|at| (from..extent.end).contains(at));
        let is_data = extent.allocation == Allocation::Data;
        assert!(is_data || !has_data, "{name}: {extent:?} from {from}");
    }
}

/// Zeroes without unmap allocate space; zeroes with unmap and discards release it.
fn check_anchors(name: &str, device: &dyn BlockDevice) {
    assert!(device.info().anchors, "{name}");
    let mut worker = Worker::new(device);
    let zeroes = IoRequest::write_zeroes(8 * MIB, 4 * MIB);
    let place = 8 * MIB..12 * MIB;
    let pages = || place.clone().step_by(4096);
    for given_back in [
        zeroes.flagged(IoFlags::UNMAP),
        IoRequest::discard(8 * MIB, 4 * MIB),
    ] {
        for before in [0, 7] {
            if before != 0 {
                worker.write(8 * MIB, &vec![before; 4 << 20]).unwrap();
            }
            worker.do_plain(zeroes).unwrap();
            for page in pages() {
                assert_ne!(at(device, page), Allocation::Hole, "{name}: {page}");
            }
            // Reported as data, or not at all, while data is cached.
            worker.write(9 * MIB, &[7; 4096]).unwrap();
            assert_eq!(at(device, 9 * MIB), Allocation::Data, "{name}");
            worker.do_plain(given_back).unwrap();
            for page in pages() {
                assert_eq!(at(device, page), Allocation::Hole, "{name}: {page}");
            }
        }
    }
}

fn files() -> impl Iterator<Item = (String, tempfile::TempDir, File)> {
    [CacheMode::None, CacheMode::Writeback]
        .into_iter()
        .map(|cache| {
            let folder = tempfile::tempdir().unwrap();
            let options = FileOptions {
                size: Some(SIZE),
                cache,
                ..FileOptions::new(folder.path().join("f.raw"))
            };
            let file = File::open(options).unwrap();
            (format!("file, {cache}"), folder, file)
        })
}

fn ram() -> Ram {
    let options = RamOptions {
        size: SIZE,
        ..RamOptions::default()
    };
    Ram::create(options).unwrap()
}

#[test]
fn no_data_lies_in_a_hole() {
    for (name, _folder, file) in files() {
        check(&name, &file);
    }
    check("ram", &ram());
}

#[test]
fn anchored_space_stays_allocated_until_unmapped() {
    for (name, _folder, file) in files() {
        if file.info().anchors {
            check_anchors(&name, &file);
        }
    }
    let ram = ram();
    if ram.info().anchors {
        check_anchors("ram", &ram);
    }
}

#[test]
fn space_counts_written_bytes_and_free_bytes_of_the_file_system() {
    for (name, folder, file) in files() {
        let space = || file.space().unwrap().unwrap();
        let free = rustix::fs::statvfs(folder.path()).unwrap();
        let total = free.f_blocks * free.f_frsize;
        assert_eq!(space().allocated, 0, "{name}");
        assert!(space().free > 0 && space().free <= total, "{name}");
        let data = vec![1; 1 << 16];
        std::fs::write(folder.path().join("f.raw"), data).unwrap();
        let written = std::fs::File::open(folder.path().join("f.raw")).unwrap();
        written.sync_all().unwrap();
        let allocated = space().allocated;
        assert!(
            (1 << 16..1 << 17).contains(&allocated),
            "{name}: {allocated}"
        );
    }
}

#[test]
fn read_only_disk_anchors_nothing() {
    let options = RamOptions {
        read_only: true,
        ..RamOptions::default()
    };
    assert!(!Ram::create(options).unwrap().info().anchors);
}

#[test]
fn a_sparse_file_is_a_hole_from_end_to_end() {
    for (_, _folder, file) in files() {
        assert_eq!(extents(&file), [(0, Extent::hole(SIZE))]);
        assert_eq!(status(&file, 4096, 8192), [Extent::hole(12288)]);
    }
}

#[test]
fn bytes_beyond_a_truncated_end_are_no_hole() {
    for (name, folder, file) in files() {
        let path = folder.path().join("f.raw");
        let truncated = std::fs::File::options().write(true).open(path).unwrap();
        truncated.set_len(SIZE / 2).unwrap();
        let half = SIZE / 2;
        assert_eq!(status(&file, 0, half), [Extent::hole(half)], "{name}");
        assert_eq!(status(&file, half, half), [Extent::data(SIZE)], "{name}");
    }
}
