//! Several daemons use one image in turns: the locks follow the workers, and each turn finds the tables of the one before.

mod common;

use std::io::ErrorKind;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bdev::qcow2::{CreateOptions, DataFileOptions, Image, Repair};
use bdev::{
    Attach, BlockDevice, CacheMode, Disk, FileLock, FileOptions, ImageOptions, LocalFiles,
    LockWaits, Lockable, Turn, TurnDevice,
};
use block::IoRequest;
use common::{Worker, make_image, open};
use latency::Clock;
use uring::{Owner, Ring};

const CLUSTER: u64 = 4096;
const CLUSTERS: u64 = 256;
const LIMIT: Duration = Duration::from_secs(30);

fn in_turns(path: &Path) -> bdev::Image {
    let data_file = path.with_extension("data");
    bdev::Image::open(&ImageOptions {
        cache: CacheMode::Writeback,
        data_file: data_file.exists().then_some(data_file),
        lock: FileLock::WhileActive,
        ..ImageOptions::new(path)
    })
    .unwrap()
}

/// Attaches a worker and closes its channel again.
fn try_attach(image: &dyn BlockDevice) -> std::io::Result<()> {
    let mut ring = Ring::new(8).unwrap();
    let mut owners = (0..).map(Owner);
    let mut owner = || owners.next().unwrap();
    image
        .attach(&mut Attach::new(&mut ring, &mut owner))
        .map(drop)
}

/// Attaches a worker when the locks are free.
fn worker(image: &dyn BlockDevice) -> Worker {
    let start = Instant::now();
    while let Err(error) = try_attach(image) {
        assert_eq!(error.kind(), ErrorKind::ResourceBusy, "{error}");
        assert!(start.elapsed() < LIMIT, "{error}");
        std::thread::sleep(Duration::from_millis(1));
    }
    Worker::new(image)
}

/// Waits until no turn is in progress, and checks the image.
fn check(path: &Path) {
    let options = FileOptions {
        is_container: true,
        ..FileOptions::new(path)
    };
    let start = Instant::now();
    while let Err(error) = bdev::File::open(options.clone()) {
        assert!(start.elapsed() < LIMIT, "{error}");
        std::thread::sleep(Duration::from_millis(1));
    }
    let report = Image::check(open(options).container().unwrap(), Repair::Nothing).unwrap();
    let found = (report.leaks, report.corruptions);
    assert_eq!(found, (0, 0), "{:?}", report.findings);
}

fn make(folder: &Path, name: &str, with_base: bool, with_data_file: bool) -> std::path::PathBuf {
    let path = folder.join(name);
    if with_base {
        std::fs::write(folder.join("base"), [0xba; (CLUSTERS * CLUSTER) as usize]).unwrap();
    }
    if with_data_file {
        std::fs::write(path.with_extension("data"), []).unwrap();
        let data = std::fs::File::options();
        let data = { data }
            .write(true)
            .open(path.with_extension("data"))
            .unwrap();
        data.set_len(CLUSTERS * CLUSTER).unwrap();
    }
    make_image(
        &path,
        &CreateOptions {
            cluster_bits: CLUSTER.trailing_zeros(),
            backing: with_base.then(|| ("base".to_owned(), "raw".to_owned())),
            data_file: with_data_file.then(|| DataFileOptions {
                name: "disk.data".to_owned(),
                is_raw: false,
            }),
            ..CreateOptions::new(CLUSTERS * CLUSTER)
        },
    );
    path
}

#[test]
fn image_is_locked_while_a_worker_uses_it() {
    let folder = tempfile::tempdir().unwrap();
    let path = make(folder.path(), "disk.qcow2", false, false);
    let (first, second) = (in_turns(&path), in_turns(&path));
    let workers = [worker(&first), worker(&first)];
    let busy = |image: &bdev::Image| try_attach(image).unwrap_err();
    assert_eq!(busy(&second).kind(), ErrorKind::ResourceBusy);
    assert!(
        busy(&second)
            .to_string()
            .contains("another process has locked")
    );
    let [mut one, other] = workers;
    drop(other);
    one.write(0, &[1; 512]).unwrap();
    assert_eq!(busy(&second).kind(), ErrorKind::ResourceBusy);
    drop(one);
    let mut here = worker(&second);
    assert_eq!(here.read(0, 512).unwrap(), [1; 512]);
    assert_eq!(busy(&first).kind(), ErrorKind::ResourceBusy);
    // The other daemon could write to it below an overlay.
    let refused = first.become_read_only().unwrap_err().to_string();
    assert!(refused.contains("lock=while-active"), "{refused}");
    assert!(first.set_size(2 * CLUSTERS * CLUSTER).is_err());
}

/// Two daemons write, discard and read in turns. Each finds the data of the other, and no cluster is lost or used twice.
#[test]
fn turns_continue_with_the_tables_of_the_turn_before() {
    for (with_base, with_data_file) in [(false, false), (true, false), (false, true)] {
        let folder = tempfile::tempdir().unwrap();
        let path = make(folder.path(), "disk.qcow2", with_base, with_data_file);
        let images = [in_turns(&path), in_turns(&path)];
        let mut content = vec![if with_base { 0xba } else { 0 }; CLUSTERS as usize];
        let mut random = 7_u64;
        let mut next = |limit: u64| {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1);
            (random >> 33) % limit
        };
        for turn in 0..24_u8 {
            let mut worker = worker(&images[usize::from(turn) % 2]);
            for _ in 0..24 {
                let cluster = next(CLUSTERS);
                let at = cluster * CLUSTER;
                match next(4) {
                    0 => {
                        worker
                            .do_plain(IoRequest::write_zeroes(at, CLUSTER))
                            .unwrap();
                        content[cluster as usize] = 0;
                    }
                    _ => {
                        worker.write(at, &[turn + 1; CLUSTER as usize]).unwrap();
                        content[cluster as usize] = turn + 1;
                    }
                }
            }
            for (cluster, byte) in content.iter().enumerate() {
                let read = worker
                    .read(cluster as u64 * CLUSTER, CLUSTER as usize)
                    .unwrap();
                assert!(
                    read.iter().all(|found| found == byte),
                    "cluster {cluster}, turn {turn}"
                );
            }
            drop(worker);
            if !with_data_file {
                check(&path);
            }
        }
    }
}

#[test]
fn turn_follows_a_new_size_and_refuses_another_image() {
    let folder = tempfile::tempdir().unwrap();
    let path = make(folder.path(), "disk.qcow2", false, false);
    let (first, second) = (in_turns(&path), in_turns(&path));
    worker(&first).write(0, &[1; 512]).unwrap();
    check(&path);
    let grown = 2 * CLUSTERS * CLUSTER;
    second.set_size(grown).unwrap();
    check(&path);
    let mut here = worker(&first);
    assert_eq!(here.read(0, 512).unwrap(), [1; 512]);
    assert_eq!(first.found_size().unwrap(), grown);
    here.write(grown - 512, &[2; 512]).unwrap();
    drop(here);
    check(&path);
    // Another cluster size, in the same file.
    let other = folder.path().join("other.qcow2");
    make_image(&other, &CreateOptions::new(grown));
    std::fs::write(&path, std::fs::read(&other).unwrap()).unwrap();
    assert!(worker(&first).read(0, 512).is_err());
    assert!(worker(&first).write(0, &[1; 512]).is_err());
    assert_eq!(
        std::fs::read(&path).unwrap(),
        std::fs::read(&other).unwrap()
    );
}

/// The first I/O of a turn may lie in space that another daemon has added.
#[test]
fn first_io_of_a_turn_reaches_the_new_end() {
    let folder = tempfile::tempdir().unwrap();
    let grown = 2 * CLUSTERS * CLUSTER;
    let image = make(folder.path(), "disk.qcow2", false, false);
    let raw = folder.path().join("disk.raw");
    std::fs::write(&raw, vec![0; (CLUSTERS * CLUSTER) as usize]).unwrap();
    let open_raw = || {
        let options = FileOptions {
            cache: CacheMode::Writeback,
            lock: FileLock::WhileActive,
            ..FileOptions::new(&raw)
        };
        bdev::File::open(options).unwrap()
    };
    let images: [Box<dyn BlockDevice>; 2] = [Box::new(in_turns(&image)), Box::new(open_raw())];
    let others: [Box<dyn BlockDevice>; 2] = [Box::new(in_turns(&image)), Box::new(open_raw())];
    for (device, other) in images.iter().zip(&others) {
        let turns = Arc::new(Mutex::new(Vec::new()));
        let (seen, capacity) = (turns.clone(), device.capacity().clone());
        let of_turns = device.capabilities().turns.unwrap();
        of_turns.on_turn(Box::new(move |turn| {
            seen.lock().unwrap().push((turn, capacity.bytes()));
        }));
        other.set_size(grown).unwrap();
        let other = other.capabilities().turns.unwrap();
        other.wait_for_release(Clock::shared().elapsed() + LIMIT);
        let mut here = worker(&**device);
        here.write(grown - 512, &[2; 512]).unwrap();
        assert_eq!(here.read(grown - 512, 512).unwrap(), [2; 512]);
        assert!(here.read(grown, 512).is_err());
        assert_eq!(device.capacity().bytes(), grown);
        drop(here);
        let begin = Instant::now();
        let last = || turns.lock().unwrap().last().copied();
        while last() != Some((Turn::Ending, grown)) {
            assert!(begin.elapsed() < LIMIT, "{:?}", last());
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(turns.lock().unwrap()[0], (Turn::Begun, grown));
    }
}

/// A worker attaches again when a thread of the device has taken the locks of the image and of its data file.
#[test]
fn worker_that_does_not_wait_attaches_when_all_locks_are_taken() {
    let folder = tempfile::tempdir().unwrap();
    let path = make(folder.path(), "disk.qcow2", false, true);
    let image = in_turns(&path);
    let (woken, wakes) = std::sync::mpsc::channel();
    let mut waits = LockWaits::new(Arc::new(move || woken.send(()).unwrap()));
    let mut ring = Ring::new(8).unwrap();
    let mut owners = (0..).map(Owner);
    let mut owner = || owners.next().unwrap();
    let channel = loop {
        let attach = Attach::new(&mut ring, &mut owner);
        match image.attach(&mut attach.without_waiting(&mut waits)) {
            Ok(channel) => break channel,
            Err(error) => assert_eq!(error.kind(), ErrorKind::WouldBlock, "{error}"),
        }
        assert!(waits.is_pending());
        wakes.recv_timeout(LIMIT).unwrap();
    };
    waits.clear();
    let other = in_turns(&path);
    let refused = try_attach(&other).unwrap_err();
    assert_eq!(refused.kind(), ErrorKind::ResourceBusy);
    drop(channel);
    image.wait_for_release(Clock::shared().elapsed() + LIMIT);
    try_attach(&other).unwrap();
}

/// A front end blocks until its queue has stopped. The owner may hang in the storage while it has the locks.
#[test]
fn queue_stops_while_the_image_cannot_be_closed() {
    let folder = tempfile::tempdir().unwrap();
    let image = in_turns(&make(folder.path(), "disk.qcow2", false, false));
    let (answer, answers) = std::sync::mpsc::channel::<()>();
    let answers = Mutex::new(answers);
    image.on_turn(Box::new(move |turn| {
        if turn == Turn::Ending {
            answers.lock().unwrap().recv().ok();
        }
    }));
    drop(worker(&image));
    image.wait_for_release(Clock::shared().elapsed() + Duration::from_millis(50));
    let error = image.release_error().unwrap();
    assert!(error.contains("not written and closed"), "{error}");
    // Other queues do not wait again.
    image.wait_for_release(Clock::shared().elapsed() + Duration::from_secs(3600));
    drop(answer);
    let start = Instant::now();
    while image.release_error().is_some() {
        assert!(start.elapsed() < LIMIT);
        std::thread::sleep(Duration::from_millis(1));
    }
    image.wait_for_release(Clock::shared().elapsed() + LIMIT);
    assert_eq!(image.release_error(), None);
}

/// A resize that assumes an old size would shrink the disk.
#[test]
fn resize_fails_if_another_daemon_has_changed_the_size() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("disk.raw");
    let size = CLUSTERS * CLUSTER;
    std::fs::write(&path, vec![0; size as usize]).unwrap();
    let open = || {
        let options = FileOptions {
            cache: CacheMode::Writeback,
            lock: FileLock::WhileActive,
            ..FileOptions::new(&path)
        };
        bdev::File::open(options).unwrap()
    };
    let (first, second) = (open(), open());
    second.set_size(4 * size).unwrap();
    second.wait_for_release(Clock::shared().elapsed() + LIMIT);
    let refused = first.set_size(2 * size).unwrap_err().to_string();
    assert!(refused.contains("changed the size"), "{refused}");
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 4 * size);
    first.wait_for_release(Clock::shared().elapsed() + LIMIT);
    first.set_size(8 * size).unwrap();
    assert_eq!(std::fs::metadata(&path).unwrap().len(), 8 * size);
}

/// Changes of another daemon are in no bitmap. Each turn therefore marks everything.
#[test]
fn bitmaps_include_the_changes_of_other_daemons() {
    let folder = tempfile::tempdir().unwrap();
    let path = make(folder.path(), "disk.qcow2", false, false);
    let disk = Disk::new("d", None, Arc::new(in_turns(&path))).unwrap();
    let size = CLUSTERS * CLUSTER;
    let file = tempfile::tempfile().unwrap();
    file.set_len(bdev::DirtyBitmap::file_bytes(size)).unwrap();
    let bitmap = Arc::new(bdev::DirtyBitmap::map(&file, size).unwrap());
    let device = disk.device();
    let mut worker = Worker::new(&*device);
    // The turn has begun when the first I/O is done.
    worker.read(0, 512).unwrap();
    disk.recorder().record_in(vec![bitmap.clone()]);
    assert_eq!(bitmap.dirty_bytes(size), 0);
    drop(worker);
    check(&path);
    assert_eq!(bitmap.dirty_bytes(size), size);
}
