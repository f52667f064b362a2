//! Several workers on one image: they allocate in the same tables, discard clusters that others read, and resize under load.

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use bdev::qcow2::{CreateOptions, Image, Repair};
use bdev::{
    BackingName, BlockDevice, CacheMode, Delay, FileOptions, ImageOptions, Ram, RamOptions, Tag,
};
use block::{IoErrorKind, IoFlags, IoRequest};
use common::{Worker, filled, make_image, open, open_image};
use guest_memory::IoBuffer;

const BLOCK: usize = 4096;

fn make(folder: &Path, size: u64, cluster_bits: u32, with_base: bool) -> PathBuf {
    if with_base {
        let content: Vec<u8> = (0..size).map(|at| (at / 512 % 253) as u8).collect();
        std::fs::write(folder.join("base"), content).unwrap();
    }
    let path = folder.join("disk.qcow2");
    make_image(
        &path,
        &CreateOptions {
            cluster_bits,
            backing: with_base.then(|| ("base".to_owned(), "raw".to_owned())),
            ..CreateOptions::new(size)
        },
    );
    path
}

fn check(path: &Path) {
    let file = open(FileOptions {
        is_container: true,
        ..FileOptions::new(path)
    });
    let report = Image::check(file.container().unwrap(), Repair::Nothing).unwrap();
    assert_eq!(
        (report.leaks, report.corruptions),
        (0, 0),
        "{:?}",
        report.findings
    );
}

/// Workers have separate blocks in each cluster. They write, discard and read them concurrently, and find their data.
#[test]
fn workers_that_share_clusters_read_their_own_data() {
    const WORKERS: usize = 3;
    const BLOCKS: usize = 1024;
    for (bits, with_base, cache) in [
        (16, false, CacheMode::None),
        (14, true, CacheMode::None),
        (12, false, CacheMode::Writeback),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let path = make(folder.path(), (BLOCKS * BLOCK) as u64, bits, with_base);
        let image = open_image(&path, cache).unwrap();
        std::thread::scope(|scope| {
            for number in 0..WORKERS {
                let image = &image;
                scope.spawn(move || work(image, number, WORKERS, BLOCKS));
            }
        });
        drop(image);
        check(&path);
    }
}

fn work(image: &bdev::Image, number: usize, workers: usize, blocks: usize) {
    let mut worker = Worker::new(image);
    let mine: Vec<usize> = (0..blocks)
        .filter(|block| block % workers == number)
        .collect();
    let mut content: Vec<Option<u8>> = vec![None; blocks];
    let mut random = fastrand::Rng::with_seed(number as u64);
    for _ in 0..150 {
        let mut running = Vec::new();
        let mut taken = Vec::new();
        for _ in 0..8 {
            let block = mine[random.usize(..mine.len())];
            if taken.contains(&block) {
                continue;
            }
            taken.push(block);
            let at = (block * BLOCK) as u64;
            match random.u8(..5) {
                0..3 => {
                    let byte = random.u8(..);
                    let io = IoRequest::write(at, BLOCK as u64);
                    running.push(worker.submit(io, filled(&[byte; BLOCK])));
                    content[block] = Some(byte);
                }
                _ => {
                    let io = IoRequest::write_zeroes(at, BLOCK as u64).flagged(IoFlags::UNMAP);
                    running.push(worker.submit(io, IoBuffer::default()));
                    content[block] = Some(0);
                }
            }
        }
        for tag in running {
            assert_eq!(worker.wait(tag).0, Ok(()));
        }
        for block in taken {
            let read = worker.read((block * BLOCK) as u64, BLOCK).unwrap();
            let expected = content[block].unwrap_or(0);
            assert!(read.iter().all(|byte| *byte == expected), "block {block}");
        }
    }
}

/// A discarded cluster is not reused before another worker's write to it has ended.
#[test]
fn freed_clusters_are_not_reused_during_reads() {
    const CLUSTERS: u64 = 1024;
    let folder = tempfile::tempdir().unwrap();
    let path = make(folder.path(), CLUSTERS * BLOCK as u64, 12, false);
    let image = open_image(&path, CacheMode::None).unwrap();
    let (mut slow, mut other) = (Worker::new(&image), Worker::new(&image));
    let at = |cluster: u64| cluster * BLOCK as u64;
    for cluster in 0..16 {
        other.write(at(cluster), &[1; BLOCK]).unwrap();
    }
    // In the ring, but not in the kernel yet.
    let late = IoRequest::write(at(3), BLOCK as u64);
    let late = slow.submit(late, filled(&[0xbb; BLOCK]));
    other.do_plain(IoRequest::discard(0, at(16))).unwrap();
    for cluster in 16..CLUSTERS {
        other.write(at(cluster), &[cluster as u8; BLOCK]).unwrap();
        if cluster % 128 == 0 {
            // Time to free released clusters, if they were free.
            std::thread::sleep(Duration::from_millis(60));
        }
    }
    assert_eq!(slow.wait(late).0, Ok(()));
    for cluster in 16..CLUSTERS {
        let read = other.read(at(cluster), BLOCK).unwrap();
        assert_eq!(read, [cluster as u8; BLOCK], "cluster {cluster}");
    }
    // The cluster is free and is used again: the file need not grow.
    std::thread::sleep(Duration::from_millis(200));
    drop((slow, other));
    drop(image);
    check(&path);
}

#[test]
fn image_resizes_under_load_and_added_space_is_zeroes() {
    let folder = tempfile::tempdir().unwrap();
    let small = 3 << 20;
    let path = make(folder.path(), small, 12, true);
    // The backing image is longer than the disk, which must not show more of it after growth.
    let base = std::fs::OpenOptions::new()
        .append(true)
        .open(folder.path().join("base"))
        .unwrap();
    std::io::Write::write_all(&mut &base, &vec![0x99; 5 << 20]).unwrap();
    let image = open_image(&path, CacheMode::None).unwrap();
    let disk = Arc::new(image);
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let (disk, is_over) = (&disk, &is_over);
        scope.spawn(move || {
            let mut worker = Worker::new(&**disk);
            let mut round = 0_u64;
            while !is_over.load(Ordering::Acquire) {
                round += 1;
                let at = round * 37 % 512 * 4096;
                worker.write(at, &[round as u8; BLOCK]).unwrap();
                assert_eq!(worker.read(at, BLOCK).unwrap(), [round as u8; BLOCK]);
            }
        });
        let mut worker = Worker::new(&**disk);
        for round in 0..6_u64 {
            let large = small + (round + 1) * 517 * 512;
            disk.set_size(large).unwrap();
            disk.capacity().set(large);
            let read = worker.read(small, (large - small) as usize).unwrap();
            assert!(read.iter().all(|byte| *byte == 0), "round {round}");
            worker.write(large - 512, &[7; 512]).unwrap();
            worker.write(small, &[8; 512]).unwrap();
            disk.capacity().set(small);
            disk.set_size(small).unwrap();
            let beyond = worker.read(small, 512).unwrap_err();
            assert_eq!(beyond.kind, IoErrorKind::OutOfRange);
        }
        is_over.store(true, Ordering::Release);
    });
    let too_large = disk.set_size(1 << 60).unwrap_err().to_string();
    assert!(too_large.contains("cluster_size=2M"), "{too_large}");
    drop(disk);
    check(&path);
}

/// The last block of a file is padded with zeroes, as in QEMU.
#[test]
fn a_raw_backing_image_may_end_within_a_block() {
    for (cache, length) in [CacheMode::None, CacheMode::Writeback]
        .into_iter()
        .flat_map(|cache| [1000, 1025, 70_000].map(|length| (cache, length)))
    {
        let folder = tempfile::tempdir().unwrap();
        let path = make(folder.path(), 1 << 20, 16, true);
        let base = folder.path().join("base");
        let content: Vec<u8> = (0..length).map(|at| (at % 251 + 1) as u8).collect();
        std::fs::write(&base, &content).unwrap();
        let image = open_image(&path, cache).unwrap();
        let mut worker = Worker::new(&image);
        let mut expected = content.clone();
        expected.resize(128 << 10, 0);
        assert_eq!(worker.read(0, expected.len()).unwrap(), expected);
        let last = length / 512 * 512;
        let block = worker.read(last as u64, 512).unwrap();
        assert_eq!(block, expected[last..last + 512]);
        // A write to a part of the last backing cluster copies the rest.
        let end = expected.len() - 512;
        worker.write(end as u64, &[9; 512]).unwrap();
        worker.write(0, &[8; 512]).unwrap();
        expected[..512].fill(8);
        expected[end..].fill(9);
        assert_eq!(worker.read(0, expected.len()).unwrap(), expected);
        assert_eq!(std::fs::read(&base).unwrap(), content);
    }
}

/// A damaged table fails only the I/O that needs it.
#[test]
fn a_damaged_table_fails_its_part_of_the_disk_alone() {
    let folder = tempfile::tempdir().unwrap();
    let size = 4 << 20;
    let path = make(folder.path(), size, 12, false);
    let image = open_image(&path, CacheMode::None).unwrap();
    let mut worker = Worker::new(&image);
    worker.write(0, &[1; BLOCK]).unwrap();
    worker.write(3 << 20, &[2; BLOCK]).unwrap();
    drop(worker);
    drop(image);
    let mut bytes = std::fs::read(&path).unwrap();
    let l1 = u64::from_be_bytes(bytes[40..48].try_into().unwrap()) as usize;
    // One L2 table maps 2 MiB. The first entry of the first table points at the header; the second table is not at a cluster.
    let l2 = u64::from_be_bytes(bytes[l1..l1 + 8].try_into().unwrap()) & !(1 << 63);
    bytes[l2 as usize..l2 as usize + 8].copy_from_slice(&(1_u64 << 63).to_be_bytes());
    bytes[l2 as usize + 8..l2 as usize + 16].copy_from_slice(&(1_u64 << 63 | 512).to_be_bytes());
    bytes[l1 + 8..l1 + 16].copy_from_slice(&0x0100_0000_0000_1000_u64.to_be_bytes());
    std::fs::write(&path, bytes).unwrap();
    let image = open_image(&path, CacheMode::None).unwrap();
    let mut worker = Worker::new(&image);
    assert_eq!(
        worker.read(BLOCK as u64, BLOCK).unwrap_err().kind,
        IoErrorKind::ReadMedium
    );
    assert_eq!(
        worker.write(BLOCK as u64, &[3; BLOCK]).unwrap_err().kind,
        IoErrorKind::WriteMedium
    );
    assert_eq!(
        worker.read(3 << 20, BLOCK).unwrap_err().kind,
        IoErrorKind::ReadMedium
    );
    worker.write(8 * BLOCK as u64, &[4; BLOCK]).unwrap();
    assert_eq!(worker.read(8 * BLOCK as u64, BLOCK).unwrap(), [4; BLOCK]);
}

/// A worker may hold a disk last, and drops it before its channel.
#[test]
fn image_closes_when_its_last_channel_does() {
    let folder = tempfile::tempdir().unwrap();
    let path = make(folder.path(), 1 << 20, 12, false);
    let (done, is_done) = std::sync::mpsc::channel();
    let place = path.clone();
    std::thread::spawn(move || {
        let image = open_image(&place, CacheMode::None).unwrap();
        let mut worker = Worker::new(&image);
        worker.write(0, &[7; BLOCK]).unwrap();
        drop(image);
        worker.write(BLOCK as u64, &[8; BLOCK]).unwrap();
        assert_eq!(worker.read(0, BLOCK).unwrap(), [7; BLOCK]);
        drop(worker);
        done.send(()).unwrap();
    });
    is_done
        .recv_timeout(Duration::from_secs(30))
        .expect("a thread waits for itself");
    // The owner thread of the image closes it.
    for _ in 0..1000 {
        if let Ok(image) = open_image(&path, CacheMode::None) {
            drop(image);
            return check(&path);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("the image stays open");
}

/// The image's owner executes a discard later than its abort. The discard then ends, although it has a part of another cluster.
#[test]
fn aborted_discard_does_not_zero_a_later_write() {
    const CLUSTER: u64 = 64 << 10;
    const SIZE: u64 = 1 << 20;
    let folder = tempfile::tempdir().unwrap();
    let options = ImageOptions {
        cache: CacheMode::Writeback,
        ..ImageOptions::new(&folder.path().join("disk.qcow2"))
    };
    let ram = Ram::create(RamOptions {
        size: SIZE,
        ..RamOptions::default()
    });
    // The owner reads it for each allocation.
    let base = Delay::new(Arc::new(ram.unwrap()), Duration::from_millis(100));
    let name = BackingName {
        name: "base".to_owned(),
        format: "raw",
    };
    let image = bdev::Image::create_over(&options, &name, Arc::new(base), SIZE).unwrap();
    let mut worker = Worker::new(&image);
    worker.write(0, &[1; BLOCK]).unwrap();
    let allocation = IoRequest::write(4 * CLUSTER, BLOCK as u64);
    let allocation = worker.submit(allocation, filled(&[2; BLOCK]));
    let discard = IoRequest::discard(0, CLUSTER + BLOCK as u64);
    let discard = worker.submit(discard, IoBuffer::default());
    worker.backend.abort(&mut worker.ring, Tag(discard));
    let ended = worker.wait(discard).0.map_err(|error| error.kind);
    assert_eq!(ended, Err(IoErrorKind::Cancelled));
    worker.write(0, &[3; BLOCK]).unwrap();
    assert_eq!(worker.wait(allocation).0, Ok(()));
    // The owner executes discards in their order.
    let other = IoRequest::discard(2 * CLUSTER, CLUSTER);
    worker.do_plain(other).unwrap();
    assert_eq!(worker.read(0, BLOCK).unwrap(), [3; BLOCK]);
}
