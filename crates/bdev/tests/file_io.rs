//! I/O on files: space, ends, errors, unaligned buffers.

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use bdev::{BlockDevice, CacheMode, FileOptions};
use block::{IoErrorKind, IoFlags, IoRequest};
use common::{Worker, bytes, cut, filled, open, options};
use guest_memory::IoBuffer;

const MODES: [CacheMode; 3] = [
    CacheMode::None,
    CacheMode::Writeback,
    CacheMode::Writethrough,
];
const MIB: usize = 1 << 20;

struct Setup {
    _folder: tempfile::TempDir,
    path: PathBuf,
    worker: Worker,
}

fn setup(size: u64, cache: CacheMode) -> Setup {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let file = open(options(&path, size, cache));
    Setup {
        _folder: folder,
        path,
        worker: Worker::new(&*file),
    }
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|n| (n / 512 * 7 + n) as u8).collect()
}

fn blocks(path: &Path) -> u64 {
    std::fs::metadata(path).unwrap().blocks()
}

#[test]
fn discarded_and_unmapped_ranges_are_deallocated() {
    for cache in MODES {
        let mut s = setup(4 * MIB as u64, cache);
        s.worker.write(0, &pattern(4 * MIB)).unwrap();
        s.worker.do_plain(IoRequest::flush()).unwrap();
        let full = blocks(&s.path);
        let discard = IoRequest::discard(0, MIB as u64);
        s.worker.do_plain(discard).unwrap();
        assert!(blocks(&s.path) <= full - 2000, "{cache}");
        let zeroes = IoRequest::write_zeroes(MIB as u64, MIB as u64);
        s.worker.do_plain(zeroes).unwrap();
        assert!(blocks(&s.path) >= full - 2100, "{cache}: kept its space");
        s.worker.do_plain(zeroes.flagged(IoFlags::UNMAP)).unwrap();
        assert!(blocks(&s.path) <= full - 4000, "{cache}");
        let read = s.worker.read(0, 4 * MIB).unwrap();
        assert!(read[..2 * MIB].iter().all(|&b| b == 0));
        assert!(read[2 * MIB..] == pattern(4 * MIB)[2 * MIB..]);
        assert_eq!(std::fs::metadata(&s.path).unwrap().len(), 4 * MIB as u64);
    }
}

#[test]
fn truncated_file_is_a_read_error_and_not_zeroes() {
    for cache in MODES {
        let mut s = setup(MIB as u64, cache);
        s.worker.write(0, &pattern(MIB)).unwrap();
        let file = std::fs::File::options().write(true).open(&s.path).unwrap();
        file.set_len(4096 + 100).unwrap();
        let kind = |r: Result<Vec<u8>, block::IoError>| r.map_err(|e| e.kind);
        assert_eq!(kind(s.worker.read(0, 4096)), Ok(pattern(4096)));
        for (offset, length) in [(0, MIB), (4096, 512), (8192, 4096)] {
            let read = kind(s.worker.read(offset, length));
            assert_eq!(read, Err(IoErrorKind::ReadMedium), "{cache} {offset}");
        }
    }
}

#[test]
fn more_segments_than_the_kernel_takes_are_moved() {
    for cache in MODES {
        let mut s = setup(4 * MIB as u64, cache);
        let (length, cuts) = (1500 * 1024, (1..1500).map(|n| n * 1024).collect::<Vec<_>>());
        let data = pattern(length);
        let buffer = cut(length, 0, &cuts);
        assert!(buffer.segments().len() > 1024);
        buffer.write_at(0, &data);
        let io = IoRequest::write(512, length as u64);
        assert_eq!(s.worker.run(io, buffer), Ok(()));
        let io = IoRequest::read(512, length as u64);
        let tag = s.worker.submit(io, cut(length, 0, &cuts));
        let (outcome, buffer) = s.worker.wait(tag);
        assert_eq!(outcome, Ok(()));
        assert!(bytes(&buffer) == data, "{cache}");
    }
}

#[test]
fn large_unaligned_memory_is_bounced_in_pieces() {
    let mut s = setup(8 * MIB as u64, CacheMode::None);
    let length = 5 * MIB + 512;
    let data = pattern(length);
    let buffer = cut(length, 13, &[100, 5000]);
    buffer.write_at(0, &data);
    let io = IoRequest::write(1024, length as u64).flagged(IoFlags::FUA);
    assert_eq!(s.worker.run(io, buffer), Ok(()));
    let io = IoRequest::read(1024, length as u64);
    let tag = s.worker.submit(io, cut(length, 77, &[4096 * 3 + 1]));
    let (outcome, buffer) = s.worker.wait(tag);
    assert_eq!(outcome, Ok(()));
    assert!(bytes(&buffer) == data);
}

#[test]
fn only_the_window_is_written_and_read_back() {
    let mut s = setup(MIB as u64, CacheMode::Writeback);
    let mut buffer = filled(&pattern(2048));
    buffer.set_window(512, 1024);
    let tag = s.worker.submit(IoRequest::write(0, 1024), buffer);
    let (outcome, buffer) = s.worker.wait(tag);
    assert_eq!(
        (outcome, buffer.len(), buffer.total_len()),
        (Ok(()), 1024, 2048)
    );
    assert_eq!(s.worker.read(0, 1024).unwrap(), pattern(2048)[512..1536]);
}

#[test]
fn write_of_one_handle_is_read_by_another() {
    for cache in MODES {
        let folder = tempfile::tempdir().unwrap();
        let file = open(options(&folder.path().join("disk"), 1 << 20, cache));
        let (mut one, mut two) = (Worker::new(&*file), Worker::new(&*file));
        one.write(4096, &pattern(8192)).unwrap();
        assert_eq!(two.read(4096, 8192).unwrap(), pattern(8192));
    }
}

#[test]
fn read_only_file_is_served_without_write_permission() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    std::fs::write(&path, pattern(4096)).unwrap();
    let file = open(FileOptions {
        read_only: true,
        ..FileOptions::new(&path)
    });
    assert_eq!(file.info().discard_granularity, None);
    let mut worker = Worker::new(&*file);
    assert_eq!(worker.read(0, 4096).unwrap(), pattern(4096));
    assert_eq!(
        worker.write(0, &[0; 512]).unwrap_err().kind,
        IoErrorKind::ReadOnly
    );
    assert_eq!(worker.do_plain(IoRequest::flush()), Ok(()));
}

#[test]
fn dropped_worker_returns_its_buffers() {
    let mut s = setup(MIB as u64, CacheMode::None);
    for n in 0..50 {
        s.worker
            .submit(IoRequest::read(n * 512, 512), IoBuffer::owned(512));
    }
    assert_eq!(s.worker.backend.in_flight(), 50);
    drop(s);
}

/// A front end may truncate the file of its memory while the kernel is about to use it.
#[test]
fn lost_memory_fails_only_its_io() {
    guest_memory::sigbus::install().unwrap();
    for cache in MODES {
        let mut s = setup(MIB as u64, cache);
        let (mapping, file) = guest_memory::Mapping::memfd("guest", MIB).unwrap();
        file.set_len(4096).unwrap();
        for io in [IoRequest::read(0, 4096), IoRequest::write(0, 4096)] {
            let gone = s.worker.run(io, IoBuffer::of_mapping(&mapping, 8192, 4096));
            assert_eq!(gone.unwrap_err().kind, IoErrorKind::ClientMemory, "{cache}");
            let there = s.worker.run(io, IoBuffer::of_mapping(&mapping, 0, 4096));
            assert_eq!(there, Ok(()), "{cache}");
        }
        // Bounced memory is accessed by this process: SIGBUS is caught and poisons the mapping.
        let odd = IoBuffer::of_mapping(&mapping, 8200, 4096);
        let read = s.worker.run(IoRequest::read(0, 4096), odd);
        match cache {
            CacheMode::None => assert!(read.is_ok() && mapping.is_poisoned()),
            _ => assert_eq!(read.unwrap_err().kind, IoErrorKind::ClientMemory),
        }
    }
}

/// Runs the test of this name in its own mount namespace; returns true there.
fn in_own_mounts(test: &str) -> bool {
    const MARK: &str = "LUNETTE_TEST_OWN_MOUNTS";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let root = rustix::process::geteuid().is_root();
    let output = Command::new("unshare")
        .args(if root { ["-m", "--"] } else { ["-rm", "--"] })
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(MARK, "1")
        .output()
        .expect("unshare(1) is needed: apt-get install util-linux");
    assert!(
        output.status.success(),
        "if namespaces are forbidden here, run this test as root, or: sysctl \
         kernel.apparmor_restrict_unprivileged_userns=0 user.max_user_namespaces=10000\n{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    false
}

fn mount_small_tmpfs(at: &Path) {
    let mounted = Command::new("mount")
        .args(["-t", "tmpfs", "-o", "size=1m", "none"])
        .arg(at)
        .status()
        .unwrap();
    assert!(mounted.success());
}

#[test]
fn full_file_system_fails_only_growing_writes() {
    if !in_own_mounts("full_file_system_fails_only_growing_writes") {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    mount_small_tmpfs(folder.path());
    let path = folder.path().join("disk");
    let file = open(options(&path, 4 * MIB as u64, CacheMode::Writeback));
    let mut worker = Worker::new(&*file);
    let data = pattern(256 << 10);
    let outcomes: Vec<_> = (0..6)
        .map(|n| worker.write(n * data.len() as u64, &data))
        .collect();
    assert_eq!(outcomes[0], Ok(()));
    let full = outcomes[5].unwrap_err();
    assert_eq!(
        (full.kind, full.errno),
        (IoErrorKind::NoSpace, libc::ENOSPC)
    );
    assert_eq!(worker.read(0, data.len()).unwrap(), data);
    assert_eq!(worker.do_plain(IoRequest::flush()), Ok(()));
    worker
        .do_plain(IoRequest::discard(0, data.len() as u64))
        .unwrap();
    assert_eq!(worker.write(2 * MIB as u64, &data[..4096]), Ok(()));
    assert_eq!(file.durability_lost(), None);
}

#[test]
fn buffer_used_again_is_registered_and_moves_the_same_data() {
    for cache in MODES {
        let mut s = setup(MIB as u64, cache);
        let mut buffer = IoBuffer::owned(64 << 10);
        let mut content = vec![0; MIB];
        for round in 0..64usize {
            let offset = round * 37 % 16 * (64 << 10);
            let data: Vec<u8> = pattern(64 << 10).iter().map(|b| b ^ round as u8).collect();
            buffer.write_at(0, &data);
            content[offset..offset + data.len()].copy_from_slice(&data);
            let tag = s
                .worker
                .submit(IoRequest::write(offset as u64, 64 << 10), buffer);
            let (outcome, back) = s.worker.wait(tag);
            outcome.unwrap();
            let other = round * 11 % 16 * (64 << 10);
            let tag = s
                .worker
                .submit(IoRequest::read(other as u64, 64 << 10), back);
            let (outcome, back) = s.worker.wait(tag);
            outcome.unwrap();
            assert!(
                bytes(&back) == content[other..other + (64 << 10)],
                "{cache} {round}"
            );
            buffer = back;
        }
        let registered = usize::from(cache == CacheMode::None);
        assert_eq!(s.worker.ring.adopted(), registered, "{cache}");
        drop(buffer);
        assert_eq!(s.worker.ring.adopted(), 0);
        assert!(s.worker.read(0, MIB).unwrap() == content);
    }
}
