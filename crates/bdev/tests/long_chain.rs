//! Chains of the maximum length: cost, and refusal of longer ones.

mod common;

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use bdev::{BackingName, BlockDevice, CHAIN_MAX, CacheMode, Image, ImageOptions};
use common::{Worker, become_read_only};

const SIZE: u64 = 64 << 20;
const MARK_EVERY: usize = 100;

fn options(path: &Path) -> ImageOptions {
    ImageOptions {
        cache: CacheMode::Writeback,
        ..ImageOptions::new(path)
    }
}

fn entries(folder: &str) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// Writes a cluster into some of the images.
fn mark(device: &dyn BlockDevice, nth: usize) {
    let at = (nth / MARK_EVERY) as u64 * 65536;
    Worker::new(device)
        .write(at, &[1 + (nth / MARK_EVERY) as u8; 512])
        .unwrap();
}

fn has_marks(device: &dyn BlockDevice) {
    let mut worker = Worker::new(device);
    for nth in 0..CHAIN_MAX.div_ceil(MARK_EVERY) {
        let found = worker.read(nth as u64 * 65536, 512).unwrap();
        assert_eq!(found, vec![1 + nth as u8; 512], "mark {nth}");
    }
    assert_eq!(worker.read(SIZE - 512, 512).unwrap(), vec![0; 512]);
}

/// Descriptors and threads grow with the length of the chain, not its square.
fn is_cheap() {
    let (files, threads) = (entries("/proc/self/fd"), entries("/proc/self/task"));
    println!("{files} descriptors, {threads} threads");
    assert!(
        files < 8 * CHAIN_MAX && threads < CHAIN_MAX + 32,
        "{files}, {threads}"
    );
}

#[test]
fn longest_chain_is_served_and_a_longer_one_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = |nth: usize| folder.path().join(format!("{nth}.qcow2"));
    let name = |nth: usize| BackingName {
        name: path(nth).display().to_string(),
        format: "qcow2",
    };
    let mut top: Arc<dyn BlockDevice> = Arc::new(Image::create(&options(&path(0)), SIZE).unwrap());
    mark(&*top, 0);
    for nth in 1..CHAIN_MAX {
        let over = Image::create_over(&options(&path(nth)), &name(nth - 1), Arc::clone(&top), SIZE);
        let over: Arc<dyn BlockDevice> = Arc::new(over.unwrap());
        if nth.is_multiple_of(MARK_EVERY) {
            mark(&*over, nth);
        }
        if nth.is_multiple_of(16) {
            // Partial cluster: the owner reads the rest from the backing image.
            Worker::new(&*over).write(SIZE / 2, &[7; 512]).unwrap();
        }
        become_read_only(&*top);
        top = over;
    }
    let one_more = path(CHAIN_MAX);
    let refused = Image::create_over(
        &options(&one_more),
        &name(CHAIN_MAX - 1),
        Arc::clone(&top),
        SIZE,
    );
    let error = refused.err().unwrap().to_string();
    assert!(
        error.contains("exceed 512 images") && error.contains("hint"),
        "{error}"
    );
    assert!(!one_more.exists());
    has_marks(&*top);
    is_cheap();
    drop(top);
    // Opens the chain again.
    let began = Instant::now();
    let top = Image::open(&options(&path(CHAIN_MAX - 1))).unwrap();
    let opened = began.elapsed();
    has_marks(&top);
    let mut worker = Worker::new(&top);
    worker.read(SIZE - 512, 512).unwrap();
    let began = Instant::now();
    for _ in 0..100 {
        worker.read(SIZE - 512, 512).unwrap();
    }
    let read = began.elapsed() / 100;
    println!("opened in {opened:?}; a read of nothing takes {read:?}");
    is_cheap();
}
