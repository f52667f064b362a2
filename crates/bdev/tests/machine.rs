//! Tests on a real machine: block devices, a failing device, QEMU's tools. As root, with losetup(8), mkfs.ext4(8) and qemu-utils:
//!
//! `sudo -E env PATH="$PATH" cargo test -p bdev --test machine -- --ignored`

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bdev::{Attach, BlockDevice, CacheMode, Disk, File, FileLock, FileOptions, release_deadline};
use block::{IoErrorKind, IoFlags, IoRequest};
use common::{Worker, cut, open, options};

const MIB: u64 = 1 << 20;

fn run(program: &str, arguments: &[&str]) -> Output {
    let output = Command::new(program).args(arguments).output();
    output.unwrap_or_else(|e| panic!("{program} is needed: {e}; see the head of this file"))
}

fn succeed(program: &str, arguments: &[&str]) -> String {
    let output = run(program, arguments);
    let errors = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "{program} {arguments:?}: {errors}; see the head of this file"
    );
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// losetup claims devices while it searches for a free one: one such test at a time.
static ALONE: Mutex<()> = Mutex::new(());

/// A loop device over a sparse file.
struct Loop {
    device: PathBuf,
    backing: PathBuf,
    _folder: Option<tempfile::TempDir>,
    /// `None` for another device of the test.
    _alone: Option<MutexGuard<'static, ()>>,
}

impl Loop {
    fn new(size: u64, sector: u32) -> Loop {
        let folder = tempfile::tempdir().unwrap();
        let mut made = Loop::over(&folder.path().join("backing"), size, sector);
        made._folder = Some(folder);
        made
    }

    fn over(backing: &Path, size: u64, sector: u32) -> Loop {
        assert!(
            rustix::process::geteuid().is_root(),
            "needs root: see the head of this file"
        );
        let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
        std::fs::File::create(backing)
            .unwrap()
            .set_len(size)
            .unwrap();
        let mut made = Loop::attached(backing, sector);
        made._alone = Some(alone);
        made
    }

    /// Attaches another loop device to the same file.
    fn beside(&self) -> Loop {
        Loop::attached(&self.backing, 512)
    }

    fn attached(backing: &Path, sector: u32) -> Loop {
        let sector = sector.to_string();
        let device = succeed(
            "losetup",
            &[
                "--find",
                "--show",
                "--sector-size",
                &sector,
                backing.to_str().unwrap(),
            ],
        );
        Loop {
            device: device.into(),
            backing: backing.to_owned(),
            _folder: None,
            _alone: None,
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        run("losetup", &["--detach", self.device.to_str().unwrap()]);
    }
}

#[test]
#[ignore = "as root: see the head of this file"]
fn recent_writes_to_a_device_can_be_discarded_and_zeroed() {
    let disk = Loop::new(64 * MIB, 512);
    for cache in [
        CacheMode::None,
        CacheMode::Writeback,
        CacheMode::Writethrough,
    ] {
        let file = open(options(&disk.device, 64 * MIB, cache));
        let mut worker = Worker::new(&*file);
        let zeroes = IoRequest::write_zeroes(0, MIB);
        for round in 0..20 {
            for io in [
                IoRequest::discard(0, MIB),
                zeroes,
                zeroes.flagged(IoFlags::UNMAP),
            ] {
                assert_eq!(worker.write(round * 4096, &[7; 65536]), Ok(()));
                assert_eq!(worker.do_plain(io), Ok(()), "{cache:?}: {io:?}");
                if io.kind == block::IoKind::WriteZeroes {
                    let read = worker.read(round * 4096, 65536).unwrap();
                    assert!(read.iter().all(|&byte| byte == 0), "{cache:?}: {io:?}");
                }
            }
        }
    }
}

/// Unmounts, with retries: the kernel releases a closed ring's files after a while, then the loop device, and later the file systems below.
fn unmount(at: &str) {
    let began = Instant::now();
    while !run("umount", &[at]).status.success() && began.elapsed() < Duration::from_secs(30) {
        std::thread::sleep(Duration::from_millis(20));
    }
    assert!(!is_mounted(at), "{at} stays busy");
}

fn is_mounted(at: &str) -> bool {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    mounts
        .lines()
        .any(|line| line.split(' ').nth(1) == Some(at))
}

fn pattern(length: usize) -> Vec<u8> {
    (0..length).map(|n| (n / 512 * 7 + n) as u8).collect()
}

#[test]
#[ignore = "needs root and loop devices: see the head of this file"]
fn block_device_is_served_in_its_own_blocks() {
    for sector in [512, 4096] {
        let device = Loop::new(16 * MIB, sector);
        for cache in [
            CacheMode::None,
            CacheMode::Writeback,
            CacheMode::Writethrough,
        ] {
            let file = open(FileOptions {
                cache,
                ..FileOptions::new(&device.device)
            });
            let info = file.info();
            assert_eq!(info.geometry.block_size(), sector);
            assert_eq!(info.geometry.capacity_bytes(), 16 * MIB);
            assert!(info.discard_granularity.is_some());
            let mut worker = Worker::new(&*file);
            let data = pattern(MIB as usize);
            let buffer = cut(data.len(), 100, &[7, 5000, 70_000]);
            buffer.write_at(0, &data);
            let write = IoRequest::write(MIB, MIB).flagged(IoFlags::FUA);
            assert_eq!(worker.run(write, buffer), Ok(()));
            assert_eq!(worker.do_plain(IoRequest::flush()), Ok(()));
            assert!(worker.read(MIB, data.len()).unwrap() == data, "{cache}");
        }
        let small = FileOptions {
            block_size: Some(512),
            ..FileOptions::new(&device.device)
        };
        let info = open(small).info();
        assert_eq!(info.geometry.block_size(), 512);
        assert_eq!(
            (info.io_alignment, info.physical_block_size),
            (sector, sector)
        );
    }
}

#[test]
#[ignore = "needs root and loop devices: see the head of this file"]
fn block_device_discards_and_zeroes() {
    let device = Loop::new(16 * MIB, 512);
    let file = open(FileOptions::new(&device.device));
    let mut worker = Worker::new(&*file);
    worker.write(0, &pattern(4 * MIB as usize)).unwrap();
    worker.do_plain(IoRequest::flush()).unwrap();
    let blocks = || std::fs::metadata(&device.backing).unwrap().blocks();
    let full = blocks();
    worker.do_plain(IoRequest::discard(0, MIB)).unwrap();
    assert!(blocks() <= full - 2000, "{} of {full}", blocks());
    let zeroes = IoRequest::write_zeroes(MIB, MIB);
    worker.do_plain(zeroes).unwrap();
    worker
        .do_plain(
            IoRequest::write_zeroes(2 * MIB, MIB)
                .flagged(IoFlags::UNMAP)
                .flagged(IoFlags::FUA),
        )
        .unwrap();
    let read = worker.read(0, 4 * MIB as usize).unwrap();
    assert!(read[..3 * MIB as usize].iter().all(|&b| b == 0));
    assert!(read[3 * MIB as usize..] == pattern(4 * MIB as usize)[3 * MIB as usize..]);
}

#[test]
#[ignore = "needs root, loop devices and Linux 6.12: see the head of this file"]
fn block_device_takes_the_ring_command_for_discard() {
    let device = Loop::new(16 * MIB, 512);
    let mut ring = uring::Ring::new(4).unwrap();
    let opened = std::fs::File::options().write(true).open(&device.device);
    let fd = uring::RingFd::from(opened.unwrap());
    let mut out = Vec::new();
    for (offset, length) in [
        (0, MIB),
        (15 * MIB, MIB),
        (512, 512),
        (16 * MIB, MIB),
        (1, 512),
    ] {
        ring.discard_blocks(uring::Owner(0), offset, &fd, offset, length);
        ring.enter(uring::Wait::Until(None), &mut out).unwrap();
    }
    let results: Vec<_> = out.iter().map(|c| c.result).collect();
    let invalid = Err(libc::EINVAL);
    assert_eq!(results, [Ok(0), Ok(0), Ok(0), invalid, invalid]);
}

#[test]
#[ignore = "needs root and loop devices: see the head of this file"]
fn mounted_block_device_is_refused() {
    let device = Loop::new(16 * MIB, 512);
    let path = device.device.to_str().unwrap();
    succeed("mkfs.ext4", &["-q", path]);
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    succeed("mount", &[path, at]);
    let refused = File::open(FileOptions::new(&device.device));
    unmount(at);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("mounted") && text.contains("lsblk"), "{text}");
    open(FileOptions::new(&device.device));
}

/// Two daemons with the device: the exclusive open follows the use.
#[test]
#[ignore = "needs root and loop devices: see the head of this file"]
fn block_device_in_use_by_turns_is_held_while_a_worker_uses_it() {
    let device = Loop::new(16 * MIB, 512);
    let path = device.device.to_str().unwrap();
    let open = || {
        let options = FileOptions {
            lock: FileLock::WhileActive,
            ..FileOptions::new(&device.device)
        };
        File::open(options).unwrap()
    };
    let is_busy = |file: &File| {
        let mut ring = uring::Ring::new(8).unwrap();
        let mut owners = (3..).map(uring::Owner);
        let mut next_owner = || owners.next().unwrap();
        let attached = file.attach(&mut Attach::new(&mut ring, &mut next_owner));
        let error = attached.err().expect("the device is in use");
        assert_eq!(error.kind(), std::io::ErrorKind::ResourceBusy, "{error}");
        assert!(error.to_string().starts_with(path), "{error}");
    };
    // A thread of the device releases the locks after the last use.
    let released = |file: &File| {
        let turns = file.capabilities().turns.unwrap();
        turns.wait_for_release(release_deadline());
    };
    let files = [open(), open()];
    for round in 0..4_usize {
        let (mine, other) = (&files[round % 2], &files[(round + 1) % 2]);
        let mut worker = Worker::new(mine);
        is_busy(other);
        let before = vec![round as u8; 4096];
        assert_eq!(worker.read(0, 4096), Ok(before));
        let after = [round as u8 + 1; 4096];
        assert_eq!(worker.write(0, &after), Ok(()));
        drop(worker);
        released(mine);
    }
}

/// Two loop devices over one file are a logical unit of two hosts: each has its own page cache and its own locks.
#[test]
#[ignore = "needs root and loop devices: see the head of this file"]
fn cached_data_is_that_of_the_last_turn_on_any_host() {
    let first = Loop::new(16 * MIB, 512);
    let second = first.beside();
    for (at, cache) in [(0, CacheMode::Writeback), (MIB, CacheMode::Writethrough)] {
        let files = [&first, &second].map(|host| {
            File::open(FileOptions {
                cache,
                lock: FileLock::WhileActive,
                ..FileOptions::new(&host.device)
            })
            .unwrap()
        });
        for round in 0..4 {
            let file = &files[usize::from(round) % 2];
            let mut worker = Worker::new(file);
            assert_eq!(worker.read(at, 4096), Ok(vec![round; 4096]), "{cache}");
            assert_eq!(worker.write(at, &[round + 1; 4096]), Ok(()));
            drop(worker);
            let turns = file.capabilities().turns.unwrap();
            turns.wait_for_release(release_deadline());
        }
    }
}

#[test]
#[ignore = "needs root and loop devices: see the head of this file"]
fn failed_flush_is_sticky_on_every_worker_until_a_reopen() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    succeed("mount", &["-t", "tmpfs", "-o", "size=1m", "none", at]);
    // A device larger than the memory behind it: write-back fails and loses data.
    let device = Loop::over(&folder.path().join("backing"), 64 * MIB, 512);
    let opened = || {
        open(FileOptions {
            cache: CacheMode::Writeback,
            ..FileOptions::new(&device.device)
        })
    };
    let file = opened();
    let (mut one, mut two) = (Worker::new(&*file), Worker::new(&*file));
    let write = one.write(0, &pattern(8 * MIB as usize));
    let failed = one.do_plain(IoRequest::flush());
    let again = one.do_plain(IoRequest::flush());
    let other = two.do_plain(IoRequest::flush());
    let durable = two.run(
        IoRequest::write(0, 512).flagged(IoFlags::FUA),
        guest_memory::IoBuffer::owned(512),
    );
    let plain = two.write(0, &[1; 512]);
    let lost = file.durability_lost();
    drop((one, two, file));
    let reopened = Worker::new(&*opened()).do_plain(IoRequest::flush());
    drop(device);
    unmount(at);
    assert_eq!((write, plain), (Ok(()), Ok(())));
    assert_eq!(failed.unwrap_err().kind, IoErrorKind::WriteMedium);
    assert_eq!((again, other, durable), (failed, failed, failed));
    assert_eq!(lost, failed.err().map(|e| e.errno));
    assert_eq!(reopened, Ok(()));
}

#[test]
#[ignore = "needs qemu-utils: see the head of this file"]
fn qemu_and_this_device_exclude_each_other() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk");
    let shown = path.to_str().unwrap();
    let file = open(options(&path, MIB, CacheMode::None));
    let write = ["-f", "raw", "-c", "write 0 512", shown];
    let output = run("qemu-io", &write);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        !output.status.success() && errors.contains("lock"),
        "{errors}"
    );
    drop(file);
    succeed("qemu-io", &write);
    let reader = open(FileOptions {
        read_only: true,
        ..FileOptions::new(&path)
    });
    assert!(!run("qemu-io", &write).status.success());
    succeed("qemu-io", &["-r", "-f", "raw", "-c", "read 0 512", shown]);
    drop(reader);
    // QEMU holds the file open while its command waits.
    let mut qemu = Command::new("qemu-io")
        .args(["-f", "raw", shown])
        .stdin(std::process::Stdio::piped())
        .stdout(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    let mut input = qemu.stdin.take().unwrap();
    std::io::Write::write_all(&mut input, b"write 0 512\n").unwrap();
    let mut answer = [0; 16];
    let output = qemu.stdout.as_mut().unwrap();
    std::io::Read::read_exact(output, &mut answer).unwrap();
    let refused = File::open(FileOptions::new(&path));
    drop(input);
    qemu.wait().unwrap();
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("in use") && text.contains("QEMU"), "{text}");
    open(FileOptions::new(&path));
}

#[test]
#[ignore = "needs root and loop devices"]
fn block_device_that_grew_and_shrank_is_followed() {
    let device = Loop::new(16 * MIB, 512);
    let file = open(FileOptions::new(&device.device));
    let disk = Disk::new("d", None, file).unwrap();
    let size = |disk: &Disk| disk.info().geometry.capacity_bytes();
    let mut worker = Worker::new(&*disk.device());
    assert_eq!((size(&disk), disk.has_other_size()), (16 * MIB, false));
    for bytes in [24 * MIB, 8 * MIB] {
        let backing = std::fs::File::options().write(true).open(&device.backing);
        backing.unwrap().set_len(bytes).unwrap();
        succeed("losetup", &["-c", device.device.to_str().unwrap()]);
        assert!(disk.has_other_size());
        assert_eq!(disk.follow_size().unwrap(), Some(bytes));
        assert_eq!((size(&disk), disk.has_other_size()), (bytes, false));
        let last = vec![5; 4096];
        assert_eq!(worker.write(bytes - 4096, &last), Ok(()));
        assert_eq!(worker.read(bytes - 4096, 4096), Ok(last));
        assert!(worker.read(bytes, 4096).is_err());
    }
}

#[test]
#[ignore = "needs root and loop devices: see the head of this file"]
fn container_zeroes_recent_writes_and_parts_of_blocks_of_a_device() {
    use bdev::qcow2::Storage;
    let disk = Loop::new(4 * MIB, 4096);
    let file = open(FileOptions {
        is_container: true,
        cache: CacheMode::Writeback,
        ..FileOptions::new(&disk.device)
    });
    let container = file.container().unwrap();
    for (at, length) in [(0, 65536), (4608, 1024)] {
        // Dirty pages.
        container.write_at(0, &[7; 65536]).unwrap();
        container.zero(at as u64, length as u64).unwrap();
        let mut expected = vec![7; 65536];
        expected[at..at + length].fill(0);
        let mut bytes = vec![1; 65536];
        container.read_at(0, &mut bytes).unwrap();
        assert!(bytes == expected, "{length} bytes at {at}");
    }
}

/// The new part has old data, but its clusters read as zeroes.
#[test]
#[ignore = "needs root and loop devices"]
fn image_in_a_full_block_device_uses_room_that_is_added() {
    let device = Loop::new(4 * MIB, 512);
    let container = open(FileOptions {
        is_container: true,
        ..FileOptions::new(&device.device)
    });
    let options = bdev::qcow2::CreateOptions::new(64 * MIB);
    bdev::qcow2::create(&container.container().unwrap(), &options).unwrap();
    drop(container);
    let image = common::open_image(&device.device, CacheMode::None).unwrap();
    let mut worker = Worker::new(&image);
    let fill = |worker: &mut Worker| {
        let writes = (0..64).map(|at| worker.write(at * MIB + 4096, &[7; 4096]));
        writes.filter(|outcome| outcome.is_ok()).count()
    };
    let full = worker_error(&mut worker);
    assert_eq!(full.kind, block::IoErrorKind::NoSpace);
    let written = fill(&mut worker);
    assert!(written < 64, "{written}");
    let backing = std::fs::File::options().append(true).open(&device.backing);
    std::io::Write::write_all(&mut backing.unwrap(), &vec![0xee; 12 << 20]).unwrap();
    succeed("losetup", &["-c", device.device.to_str().unwrap()]);
    assert_eq!(fill(&mut worker), 64);
    for at in 0..64 {
        let mut expected = vec![0; 65536];
        expected[4096..8192].fill(7);
        assert_eq!(worker.read(at * MIB, 65536), Ok(expected), "{at}");
    }
}

/// Writes until the device is full.
fn worker_error(worker: &mut Worker) -> block::IoError {
    let mut writes = (0..64).map(|at| worker.write(at * MIB + 4096, &[7; 4096]));
    writes.find_map(Result::err).unwrap()
}
