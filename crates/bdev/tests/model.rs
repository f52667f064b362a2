//! Compares every block device with a byte vector: batches of all I/O kinds, aligned or unaligned memory, one or many segments.

mod common;
#[path = "common/nbd_peer.rs"]
mod nbd_peer;

use std::path::Path;
use std::sync::Arc;

use bdev::qcow2::{self, CreateOptions, Repair};
use bdev::{
    BlockDevice, CacheMode, FaultPlan, Faulty, FileOptions, Nbd, NbdOptions, NullOptions, Ram,
    RamOptions,
};
use block::{IoFlags, IoKind, IoRequest};
use common::{Worker, bytes, cut, make_image, open, open_image, options};
use nbd::wire::transmission;
use nbd_peer::{ALL_FLAGS, Fault, Peer, PeerOptions};
use proptest::prelude::*;

const BLOCKS: u64 = 600;

#[derive(Clone, Debug)]
struct ModelStep {
    kind: u8,
    flags: u8,
    first: u64,
    blocks: u64,
    skip: usize,
    cuts: Vec<usize>,
    seed: u8,
}

fn steps() -> impl Strategy<Value = Vec<Vec<ModelStep>>> {
    let skip = prop_oneof![Just(0_usize), Just(512), 0..5000_usize];
    let cut = prop_oneof![any::<usize>(), (0..64_usize).prop_map(|n| n * 512)];
    let step = (
        0..6_u8,
        0..4_u8,
        0..BLOCKS,
        1..80_u64,
        skip,
        prop::collection::vec(cut, 0..7),
        1..=255_u8,
    );
    let step = step.prop_map(|(kind, flags, first, blocks, skip, cuts, seed)| ModelStep {
        kind,
        flags,
        first,
        blocks: blocks.min(BLOCKS - first),
        skip,
        cuts,
        seed,
    });
    prop::collection::vec(prop::collection::vec(step, 1..6), 1..8)
}

fn request(step: &ModelStep, block: u64) -> IoRequest {
    let (offset, length) = (step.first * block, step.blocks * block);
    let flags = [
        IoFlags::NONE,
        IoFlags::FUA,
        IoFlags::UNMAP,
        IoFlags::FUA.with(IoFlags::UNMAP),
    ][usize::from(step.flags)];
    match step.kind {
        0 | 1 => IoRequest::read(offset, length),
        2 | 3 => IoRequest::write(offset, length).flagged(flags),
        4 if step.seed.is_multiple_of(2) => IoRequest::discard(offset, length),
        4 => IoRequest::flush(),
        _ => IoRequest::write_zeroes(offset, length).flagged(flags),
    }
}

/// Runs batches of concurrent I/Os, without those that would race.
fn agrees(device: &dyn BlockDevice, batches: &[Vec<ModelStep>]) {
    let block = u64::from(device.info().geometry.block_size());
    let mut model = vec![0_u8; (BLOCKS * block) as usize];
    let mut worker = Worker::new(device);
    for batch in batches {
        let mut taken: Vec<(u64, u64)> = Vec::new();
        let mut running = Vec::new();
        let before = model.clone();
        for step in batch {
            let io = request(step, block);
            let (start, end) = (io.offset, io.offset + io.length);
            if taken.iter().any(|&(s, e)| start < e && s < end) {
                continue;
            }
            taken.push((start, end));
            let range = start as usize..end as usize;
            let buffer = match io.kind {
                IoKind::Read | IoKind::Write => cut(io.length as usize, step.skip, &step.cuts),
                _ => guest_memory::IoBuffer::default(),
            };
            match io.kind {
                IoKind::Read => buffer.fill(0, buffer.len(), 0xee),
                IoKind::Write => {
                    for (n, byte) in model[range.clone()].iter_mut().enumerate() {
                        *byte = step.seed.wrapping_add((n / 512) as u8).wrapping_mul(31);
                    }
                    buffer.write_at(0, &model[range]);
                }
                IoKind::Discard | IoKind::WriteZeroes => model[range].fill(0),
                IoKind::Flush
                | IoKind::CompareAndWrite
                | IoKind::BlockStatus
                | IoKind::ReplaceState
                | IoKind::ScsiCommand => {}
            }
            running.push((io, worker.submit(io, buffer)));
        }
        for (io, tag) in running {
            let (outcome, buffer) = worker.wait(tag);
            assert_eq!(outcome, Ok(()), "{io:?}");
            if io.kind == IoKind::Read {
                let expected = &before[io.offset as usize..(io.offset + io.length) as usize];
                assert!(bytes(&buffer) == expected, "{io:?} read something else");
            }
        }
        assert_eq!(worker.backend.in_flight(), 0);
    }
    let all = worker.read(0, model.len()).unwrap();
    assert!(all == model, "the disk differs in the end");
}

fn ram(block_size: u32) -> Arc<Ram> {
    let size = BLOCKS * u64::from(block_size);
    let options = RamOptions {
        size,
        block_size,
        ..RamOptions::default()
    };
    Arc::new(Ram::create(options).unwrap())
}

/// `/dev/shm` is a tmpfs: it punches holes, but neither zeroes ranges nor, before Linux 6.6, reads directly.
fn file(folder: &str, cache: CacheMode, block_size: u32) -> (tempfile::TempDir, Arc<bdev::File>) {
    let folder = match folder {
        "" => tempfile::tempdir(),
        at => tempfile::tempdir_in(Path::new(at)),
    };
    let folder = folder.unwrap();
    let size = BLOCKS * u64::from(block_size);
    let mut options = options(&folder.path().join("disk"), size, cache);
    options.block_size = Some(block_size);
    (folder, open(options))
}

/// Creates an image of zeroes, over a backing image of other content and length if wanted.
fn image(
    cluster_bits: u32,
    cache: CacheMode,
    backing_blocks: Option<u64>,
) -> (tempfile::TempDir, bdev::Image) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.qcow2");
    if let Some(blocks) = backing_blocks {
        let content = vec![0x77; (blocks * 512) as usize];
        std::fs::write(folder.path().join("base"), content).unwrap();
    }
    make_image(
        &path,
        &CreateOptions {
            cluster_bits,
            backing: backing_blocks.map(|_| ("base".to_owned(), "raw".to_owned())),
            ..CreateOptions::new(BLOCKS * 512)
        },
    );
    let image = open_image(&path, cache).unwrap();
    let whole = IoRequest::write_zeroes(0, BLOCKS * 512);
    Worker::new(&image).do_plain(whole).unwrap();
    (folder, image)
}

/// Closes an image and checks it.
fn close((folder, image): (tempfile::TempDir, bdev::Image)) {
    drop(image);
    let file = open(FileOptions {
        is_container: true,
        ..FileOptions::new(folder.path().join("disk.qcow2"))
    });
    let report = qcow2::Image::check(file.container().unwrap(), Repair::Nothing).unwrap();
    assert_eq!(
        (report.leaks, report.corruptions),
        (0, 0),
        "{:?}",
        report.findings
    );
}

fn shuffled(device: Arc<dyn BlockDevice>, seed: u64) -> Faulty {
    let plan = FaultPlan {
        shuffle: Some(seed),
        ..FaultPlan::default()
    };
    Faulty::new(device, plan)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn ram_agrees(batches in steps()) {
        agrees(&*ram(512), &batches);
        agrees(&*ram(4096), &batches);
    }

    #[test]
    fn shuffled_ram_agrees(batches in steps(), seed in 1_u64..1000) {
        agrees(&shuffled(ram(512), seed), &batches);
    }

    #[test]
    fn uncached_file_agrees(batches in steps(), seed in 1_u64..1000) {
        let (_folder, file) = file("", CacheMode::None, 512);
        agrees(&*file, &batches);
        let whole = IoRequest::write_zeroes(0, BLOCKS * 512);
        Worker::new(&*file).do_plain(whole).unwrap();
        agrees(&shuffled(file, seed), &batches);
    }

    #[test]
    fn uncached_file_of_4096_byte_blocks_agrees(batches in steps()) {
        agrees(&*file("", CacheMode::None, 4096).1, &batches);
    }

    #[test]
    fn writeback_file_agrees(batches in steps()) {
        agrees(&*file("", CacheMode::Writeback, 512).1, &batches);
    }

    #[test]
    fn writethrough_file_agrees(batches in steps()) {
        agrees(&*file("", CacheMode::Writethrough, 512).1, &batches);
    }

    #[test]
    fn image_agrees(batches in steps(), seed in 1_u64..1000) {
        let image = image(16, CacheMode::None, None);
        agrees(&image.1, &batches);
        close(image);
        let image = self::image(12, CacheMode::None, None);
        let (folder, device) = image;
        let device = Arc::new(device);
        agrees(&shuffled(device.clone(), seed), &batches);
        close((folder, Arc::into_inner(device).unwrap()));
    }

    #[test]
    fn image_with_clusters_of_a_block_agrees(batches in steps()) {
        let image = image(9, CacheMode::None, None);
        agrees(&image.1, &batches);
        close(image);
    }

    #[test]
    fn image_on_another_agrees(batches in steps(), blocks in 1..BLOCKS + 50) {
        for (bits, cache) in [(16, CacheMode::None), (12, CacheMode::Writethrough), (10, CacheMode::Writeback)] {
            let image = image(bits, cache, Some(blocks));
            agrees(&image.1, &batches);
            close(image);
        }
    }

    /// A lost connection repeats the writes of a batch from their start. Each connection lasts for at least one batch of five I/Os, each with
    /// two parts and a flush.
    #[test]
    fn nbd_export_agrees(batches in steps(), has_multi_conn in any::<bool>(), limit in 16..60_u32) {
        for (minimum, fault) in [(1, Fault::None), (4096, Fault::None), (512, Fault::EndAfter(limit))] {
            let peer = Peer::start(PeerOptions {
                size: (BLOCKS * u64::from(minimum.max(512))) as usize,
                minimum,
                payload_max: 20_480,
                fault,
                flags: match has_multi_conn {
                    true => ALL_FLAGS,
                    // A flush fails after a loss.
                    false if fault != Fault::None => ALL_FLAGS & !transmission::SEND_FLUSH,
                    false => ALL_FLAGS & !transmission::CAN_MULTI_CONN,
                },
                ..PeerOptions::default()
            });
            let options = NbdOptions::new(peer.uri().parse().unwrap());
            agrees(&Nbd::open(&options).unwrap(), &batches);
        }
    }

    #[test]
    fn file_on_tmpfs_agrees(batches in steps()) {
        agrees(&*file("/dev/shm", CacheMode::Writeback, 512).1, &batches);
    }
}

#[test]
fn null_answers_everything_in_range() {
    let null = bdev::Null::create(NullOptions::default()).unwrap();
    let mut worker = Worker::new(&null);
    assert_eq!(worker.write(0, &[1; 512]), Ok(()));
    assert_eq!(worker.do_plain(IoRequest::flush()), Ok(()));
    assert_eq!(worker.do_plain(IoRequest::discard(0, 1 << 20)), Ok(()));
    assert!(worker.read(1 << 30, 512).is_err());
}
