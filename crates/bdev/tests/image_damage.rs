//! Damaged images. Writes over metadata are refused and mark the image as corrupt, as in QEMU; after a repair, `qemu-img check` finds no
//! fault. Also QEMU's persistent bitmaps. Needs qemu-img and qemu-io (Debian: qemu-utils).

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bdev::qcow2::{CheckReport, Header, Image, Repair};
use bdev::{CacheMode, FileOptions, ImageOptions};
use block::IoErrorKind;
use common::{Worker, open, open_image};

const CLUSTER: u64 = 64 << 10;
/// Bytes of the disk that one L2 table maps.
const SPAN: u64 = 512 << 20;
/// Flag of an entry with refcount one.
const COPIED: u64 = 1 << 63;
const OFFSET: u64 = 0x00ff_ffff_ffff_fe00;

/// A starting process shares open files and locks of all threads for a moment.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn run(folder: &Path, tool: &str, arguments: &[&str]) -> Output {
    let ran = Command::new(tool)
        .args(arguments)
        .current_dir(folder)
        .output();
    ran.unwrap_or_else(|error| {
        panic!("cannot run {tool}: {error}; hint: apt-get install qemu-utils")
    })
}

fn qemu(folder: &Path, tool: &str, arguments: &[&str]) -> String {
    let ran = run(folder, tool, arguments);
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (stdout, stderr) = (text(&ran.stdout), text(&ran.stderr));
    assert!(
        ran.status.success(),
        "{tool} {arguments:?}: {stdout}{stderr}"
    );
    stdout
}

fn check(path: &Path, repair: Repair) -> CheckReport {
    let file = open(FileOptions {
        is_container: true,
        cache: CacheMode::Writeback,
        ..FileOptions::new(path)
    });
    Image::check(file.container().unwrap(), repair).unwrap()
}

fn is_corrupt(path: &Path) -> bool {
    let file = open(FileOptions {
        is_container: true,
        read_only: true,
        cache: CacheMode::Writeback,
        ..FileOptions::new(path)
    });
    let header = Header::read(&file.container().unwrap()).unwrap();
    header.is_corrupt()
}

/// An image of 1 GiB with two L2 tables, a snapshot and a bitmap, for changing numbers.
struct Damaged {
    folder: tempfile::TempDir,
    path: PathBuf,
    bytes: Vec<u8>,
}

impl Damaged {
    fn new() -> Damaged {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path();
        qemu(at, "qemu-img", &["create", "-q", "-f", "qcow2", "d", "1G"]);
        // The snapshot gets its own L1 table and retains the first L2 table; later writes allocate new clusters.
        qemu(at, "qemu-io", &["-c", "write -P 1 64k 64k", "d"]);
        qemu(at, "qemu-img", &["snapshot", "-c", "s", "d"]);
        let writes = ["-c", "write -P 2 0 128k", "-c", "write -P 3 512M 64k", "d"];
        qemu(at, "qemu-io", &writes);
        qemu(at, "qemu-img", &["bitmap", "--add", "d", "b"]);
        let path = at.join("d");
        let bytes = std::fs::read(&path).unwrap();
        Damaged {
            folder,
            path,
            bytes,
        }
    }

    fn number(&self, at: u64) -> u64 {
        u64::from_be_bytes(self.bytes[at as usize..][..8].try_into().unwrap())
    }

    fn l1(&self) -> u64 {
        self.number(40)
    }

    fn l2(&self, table: u64) -> u64 {
        self.number(self.l1() + table * 8) & OFFSET
    }

    /// Returns the offset of the disk's first data.
    fn data(&self) -> u64 {
        self.number(self.l2(0)) & OFFSET
    }

    fn snapshot_l1(&self) -> u64 {
        self.number(self.number(64))
    }

    fn refcount_block(&self) -> u64 {
        self.number(self.number(48))
    }

    fn bitmap_directory(&self) -> u64 {
        // The extension of type 0x23852875 has the offset in its last 8 bytes.
        let magic = 0x2385_2875_u32.to_be_bytes();
        let at = self.bytes.windows(4).position(|window| window == magic);
        self.number(at.unwrap() as u64 + 8 + 16)
    }

    fn put(&mut self, at: u64, number: u64) {
        self.bytes[at as usize..][..8].copy_from_slice(&number.to_be_bytes());
    }

    fn save(&self) {
        std::fs::write(&self.path, &self.bytes).unwrap();
    }

    fn qemu_finds_nothing(&self, case: &str) {
        let ran = run(self.folder.path(), "qemu-img", &["check", "d"]);
        let text = String::from_utf8_lossy(&ran.stdout).into_owned();
        assert_eq!(ran.status.code(), Some(0), "{case}: {text}");
    }
}

#[test]
fn write_over_metadata_is_refused_and_marks_the_image() {
    let _alone = alone();
    let sound = Damaged::new();
    for (case, target) in [
        ("header", 0),
        ("L1 table", sound.l1()),
        ("L2 table", sound.l2(1)),
        ("its own L2 table", sound.l2(0)),
        ("refcount table", sound.number(48)),
        ("refcount block", sound.refcount_block()),
        ("snapshot table", sound.number(64)),
        ("L1 table of a snapshot", sound.snapshot_l1()),
        (
            "L2 table of a snapshot",
            sound.number(sound.snapshot_l1()) & OFFSET,
        ),
    ] {
        let mut damaged = Damaged::new();
        let entry = damaged.l2(0) + 2 * 8;
        damaged.put(entry, COPIED | target);
        if target == 0 {
            // A plain entry of 0 is unallocated: use a compressed one.
            damaged.put(entry, 1 << 62);
        }
        damaged.save();
        let image = open_image(&damaged.path, CacheMode::Writeback).unwrap();
        let mut worker = Worker::new(&image);
        // An intact part is written until the fault is detected.
        assert_eq!(worker.write(0, &[9; 4096]), Ok(()), "{case}");
        let refused = worker.write(2 * CLUSTER, &[9; 4096]).unwrap_err();
        assert_eq!(
            (refused.kind, refused.errno),
            (IoErrorKind::WriteMedium, 5),
            "{case}"
        );
        for (offset, byte) in [(0, 9), (CLUSTER, 2), (SPAN, 3)] {
            assert!(worker.write(offset, &[8; 4096]).is_err(), "{case}");
            assert_eq!(worker.read(offset, 4096), Ok(vec![byte; 4096]), "{case}");
        }
        assert!(worker.write(SPAN - CLUSTER, &[8; 4096]).is_err(), "{case}");
        drop((worker, image));
        assert!(is_corrupt(&damaged.path), "{case}");
        let now = std::fs::read(&damaged.path).unwrap();
        if target > 0 {
            let cluster = target as usize..(target + CLUSTER) as usize;
            let same = damaged.bytes[cluster.clone()] == now[cluster];
            let is_refcounts = case == "refcount block";
            assert!(same || is_refcounts, "{case}: it was overwritten");
        }
        // The image can be opened again, for reading.
        let image = open_image(&damaged.path, CacheMode::Writeback).unwrap();
        let mut worker = Worker::new(&image);
        assert_eq!(worker.read(SPAN, 4096), Ok(vec![3; 4096]), "{case}");
        assert!(worker.write(SPAN, &[8; 4096]).is_err(), "{case}");
        drop((worker, image));
        let tables = bdev::open_tables(&ImageOptions {
            cache: CacheMode::Writeback,
            ..ImageOptions::new(&damaged.path)
        });
        let error = tables.err().unwrap().to_string();
        assert!(
            error.contains("corrupt") && error.contains("--repair all"),
            "{error}"
        );
        let report = check(&damaged.path, Repair::All);
        assert!(
            report.is_clean() && report.corruptions > 0,
            "{case}: {report:?}"
        );
        damaged.qemu_finds_nothing(case);
        let image = open_image(&damaged.path, CacheMode::Writeback).unwrap();
        let mut worker = Worker::new(&image);
        assert_eq!(worker.write(2 * CLUSTER, &[7; 4096]), Ok(()), "{case}");
        assert_eq!(worker.read(SPAN, 4096), Ok(vec![3; 4096]), "{case}");
    }
}

/// Valid bitmaps are metadata, for programs that preserve them.
#[test]
fn repair_preserves_bitmaps() {
    let _alone = alone();
    let mut damaged = Damaged::new();
    let entry = damaged.l2(0) + 2 * 8;
    damaged.put(entry, COPIED | damaged.bitmap_directory());
    damaged.save();
    let tables = bdev::open_tables(&ImageOptions {
        cache: CacheMode::Writeback,
        ..ImageOptions::new(&damaged.path)
    });
    let mut tables = tables.unwrap();
    assert_eq!(tables.prepare_write(&[2 * CLUSTER], None).len(), 1);
    assert!(tables.corruption().is_some());
    drop(tables);
    assert!(check(&damaged.path, Repair::All).is_clean());
    damaged.qemu_finds_nothing("bitmap directory");
    let info = qemu(
        damaged.folder.path(),
        "qemu-img",
        &["info", "--output=json", "d"],
    );
    assert!(info.contains("\"bitmaps\""), "{info}");
}

/// A count that is too low offers a cluster of a table or of data to the allocator.
#[test]
fn cluster_in_use_is_not_allocated_again() {
    let _alone = alone();
    for case in ["L2 table", "data"] {
        let mut damaged = Damaged::new();
        let cluster = match case {
            "L2 table" => damaged.l2(1),
            _ => damaged.data(),
        };
        let count = damaged.refcount_block() + cluster / CLUSTER * 2;
        damaged.bytes[count as usize..count as usize + 2].fill(0);
        damaged.save();
        let image = open_image(&damaged.path, CacheMode::Writeback).unwrap();
        let mut worker = Worker::new(&image);
        assert_eq!(worker.read(0, 4096), Ok(vec![2; 4096]));
        assert!(worker.write(8 * CLUSTER, &[9; 4096]).is_err(), "{case}");
        assert_eq!(worker.read(0, 4096), Ok(vec![2; 4096]), "{case}");
        assert_eq!(worker.read(SPAN, 4096), Ok(vec![3; 4096]), "{case}");
        drop((worker, image));
        assert!(is_corrupt(&damaged.path), "{case}");
        assert!(check(&damaged.path, Repair::All).is_clean(), "{case}");
        damaged.qemu_finds_nothing(case);
    }
}

/// Overlapping structures are detected before the first write.
#[test]
fn overlapping_structures_are_not_written() {
    let _alone = alone();
    let mut damaged = Damaged::new();
    let table = damaged.number(48);
    // The second refcount block overlaps the L1 table.
    damaged.put(table + 8, damaged.l1());
    damaged.save();
    let image = open_image(&damaged.path, CacheMode::Writeback).unwrap();
    let mut worker = Worker::new(&image);
    assert!(worker.write(8 * CLUSTER, &[9; 4096]).is_err());
    assert_eq!(worker.read(SPAN, 4096), Ok(vec![3; 4096]));
    drop((worker, image));
    assert!(is_corrupt(&damaged.path));
    assert!(check(&damaged.path, Repair::All).is_clean());
    damaged.qemu_finds_nothing("a block at the L1 table");
}

type Damage = fn(&mut Damaged);

/// Damage that a repair removes.
const DAMAGES: [(&str, Damage); 17] = [
    ("data beyond the end", |d| {
        d.put(d.l2(0) + 24, COPIED | 1 << 40)
    }),
    ("unaligned data", |d| d.put(d.l2(0) + 24, COPIED | 0x5_0200)),
    ("two entries of one cluster", |d| {
        d.put(d.l2(0) + 24, COPIED | d.data())
    }),
    ("reserved bits", |d| {
        d.put(d.l2(0), d.number(d.l2(0)) | 1 << 57 | 1 << 3)
    }),
    ("a compressed cluster with a flag", |d| {
        d.put(d.l2(0) + 24, COPIED | 1 << 62 | d.data());
    }),
    ("a compressed cluster beyond the end", |d| {
        d.put(d.l2(0) + 24, 1 << 62 | 1 << 40);
    }),
    ("zeroes at an L2 table", |d| {
        d.put(d.l2(0) + 24, COPIED | d.l2(1) | 1)
    }),
    ("an L2 table beyond the end", |d| {
        d.put(d.l1() + 8, COPIED | 1 << 40)
    }),
    ("an unaligned L2 table", |d| {
        d.put(d.l1() + 8, COPIED | d.l2(1) | 0x200)
    }),
    ("an L2 table at the header", |d| {
        d.put(d.l1() + 8, COPIED | d.number(48))
    }),
    ("one L2 table twice", |d| {
        d.put(d.l1() + 8, COPIED | d.l2(0))
    }),
    ("reserved bits of an L1 entry", |d| {
        d.put(d.l1() + 8, d.number(d.l1() + 8) | 3)
    }),
    ("a snapshot's L2 table beyond the end", |d| {
        d.put(d.snapshot_l1(), 1 << 40)
    }),
    ("a refcount block beyond the end", |d| {
        d.put(d.number(48), 1 << 40)
    }),
    ("an unaligned refcount block", |d| {
        d.put(d.number(48), d.refcount_block() + 512)
    }),
    ("a refcount block at an L2 table", |d| {
        d.put(d.number(48), d.l2(1))
    }),
    ("no refcount block", |d| d.put(d.number(48), 0)),
];

#[test]
fn repaired_images_satisfy_qemu() {
    let _alone = alone();
    for (case, damage) in DAMAGES {
        let mut damaged = Damaged::new();
        damage(&mut damaged);
        damaged.save();
        let found = check(&damaged.path, Repair::Nothing);
        assert!(
            found.corruptions > 0 && !found.is_clean(),
            "{case}: {found:?}"
        );
        assert!(
            !check(&damaged.path, Repair::Counts).is_clean() || !case.contains("beyond"),
            "{case}"
        );
        damaged.save();
        let report = check(&damaged.path, Repair::All);
        assert!(report.is_clean(), "{case}: {report:?}");
        damaged.qemu_finds_nothing(case);
        let again = check(&damaged.path, Repair::Nothing);
        assert_eq!(
            (again.corruptions, again.leaks),
            (0, 0),
            "{case}: {again:?}"
        );
        let image = open_image(&damaged.path, CacheMode::Writeback).unwrap();
        let mut worker = Worker::new(&image);
        assert_eq!(worker.read(0, 4096), Ok(vec![2; 4096]), "{case}");
        for offset in [3 * CLUSTER, SPAN + CLUSTER] {
            // The data is not compressed: the cluster cannot be read or copied.
            if case == "a compressed cluster with a flag" && offset == 3 * CLUSTER {
                continue;
            }
            assert_eq!(worker.write(offset, &[7; 4096]), Ok(()), "{case}");
            assert_eq!(worker.read(offset, 4096), Ok(vec![7; 4096]), "{case}");
        }
        assert_eq!(worker.read(0, 4096), Ok(vec![2; 4096]), "{case}");
        drop((worker, image));
        // The last of two entries that shared a cluster lacks the flag, as in QEMU.
        let report = check(&damaged.path, Repair::Counts);
        assert!(report.is_clean(), "{case}: {report:?}");
        damaged.qemu_finds_nothing(case);
    }
}

#[test]
fn leaks_beside_bitmaps_are_found_and_bitmaps_are_not_leaks() {
    let _alone = alone();
    let mut damaged = Damaged::new();
    assert_eq!(check(&damaged.path, Repair::Nothing).leaks, 0);
    // A counted cluster behind the last one.
    let end = damaged.bytes.len() as u64 / CLUSTER;
    let count = damaged.refcount_block() + (end + 5) * 2;
    damaged.bytes[count as usize + 1] = 1;
    damaged.save();
    assert_eq!(check(&damaged.path, Repair::Leaks).leaks_fixed, 1);
    damaged.qemu_finds_nothing("a leak");
    // Invalid bitmaps are leaks, as in QEMU.
    drop(open_image(&damaged.path, CacheMode::Writeback).unwrap());
    assert!(check(&damaged.path, Repair::Leaks).leaks_fixed > 0);
    damaged.qemu_finds_nothing("bitmaps that are invalid");
}

#[test]
fn damaged_bitmaps_are_declared_invalid_by_a_repair() {
    let _alone = alone();
    let mut damaged = Damaged::new();
    // Offset of the first bitmap table.
    damaged.put(damaged.bitmap_directory(), 0x200);
    damaged.save();
    let found = check(&damaged.path, Repair::Nothing);
    assert!(
        !found.is_clean() && found.findings[0].contains("bitmap"),
        "{found:?}"
    );
    assert!(check(&damaged.path, Repair::All).is_clean());
    damaged.qemu_finds_nothing("damaged bitmaps");
}
