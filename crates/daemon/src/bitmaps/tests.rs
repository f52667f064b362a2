//! Bitmaps through backups, kills, restarts and damage, with a disk of one file.

use bdev::{FileOptions, Ram, RamOptions};
use block::IoRequest;

use super::*;

const SIZE: u64 = 1 << 20;
const CHUNK: u64 = DirtyBitmap::GRANULARITY;

struct Setup {
    folder: tempfile::TempDir,
    damaged: DamagedFiles,
}

impl Setup {
    fn new() -> Setup {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("d.raw"), vec![0; SIZE as usize]).unwrap();
        Setup {
            folder,
            damaged: DamagedFiles::default(),
        }
    }

    fn file(&self) -> PathBuf {
        self.folder.path().join("d.raw")
    }

    /// Starts a daemon: loads its bitmaps and opens its disk.
    fn start(&self, system_run: &str) -> (Bitmaps, Arc<Disk>) {
        let bitmaps = Bitmaps::load_in_run(Some(self.folder.path()), system_run, &self.damaged);
        let disk = self.open(&bitmaps);
        (bitmaps, disk)
    }

    fn open(&self, bitmaps: &Bitmaps) -> Arc<Disk> {
        let before = FileStamp::of(&[self.file()]);
        let options = FileOptions {
            size: None,
            ..FileOptions::new(self.file())
        };
        let device = bdev::File::open(options).unwrap();
        let options = bdev::DiskOptions {
            identity: Some("3a5b0000-0000-4000-8000-000000000001".parse().unwrap()),
            ..bdev::DiskOptions::default()
        };
        let disk = Disk::with_options("D 0", options, Arc::new(device)).unwrap();
        let disk = Arc::new(disk);
        let after = FileStamp::of(&[self.file()]);
        bitmaps.attach([(&disk, &OpenedStamps { before, after })]);
        disk
    }

    /// Closes the disk, then ends the daemon.
    fn stop(&self, bitmaps: &Bitmaps, disk: Arc<Disk>) {
        drop(disk);
        bitmaps.close(|_| vec![self.file()]);
    }

    /// Writes to the disk's file as another program does.
    fn write_outside(&self) {
        std::fs::write(self.file(), vec![1; SIZE as usize]).unwrap();
    }

    fn files(&self) -> usize {
        std::fs::read_dir(self.folder.path().join(FOLDER)).map_or(0, Iterator::count)
    }
}

fn last(shown: &str) -> Last {
    Last {
        target: serde_json::json!({ "backend": "file" }),
        shown: shown.to_owned(),
        at: 1,
        identity: None,
    }
}

#[test]
fn names_that_are_paths_or_options_are_refused() {
    for name in ["mon", "2026-11-30", "a.b", "...", "_:-"] {
        assert!(is_name(name), "{name}");
    }
    for name in ["", ".", "..", "-rf", "a/b", "a b", "ä"] {
        assert!(!is_name(name), "{name}");
    }
}

fn back_up(bitmaps: &Bitmaps, disk: &Arc<Disk>, name: &str) {
    let begun = bitmaps.begin(disk).unwrap();
    bitmaps.record_in("D 0", &begun);
    bitmaps.complete("D 0", name, &begun, last("a")).unwrap();
}

fn write(disk: &Disk, chunk: u64) {
    let mut view = bdev::RecorderView::new(disk.recorder());
    view.record(&IoRequest::write(chunk * CHUNK, 512));
}

fn dirty(bitmaps: &Bitmaps) -> Vec<(String, u64, Option<String>)> {
    let all = bitmaps.all().into_iter();
    all.map(|one| (one.name, one.dirty / CHUNK, one.reason))
        .collect()
}

fn well(name: &str, chunks: u64) -> (String, u64, Option<String>) {
    (name.to_owned(), chunks, None)
}

#[test]
fn each_backup_has_the_changes_since_its_last() {
    let setup = Setup::new();
    let (bitmaps, disk) = setup.start("run");
    back_up(&bitmaps, &disk, "daily");
    write(&disk, 1);
    back_up(&bitmaps, &disk, "weekly");
    write(&disk, 2);
    assert_eq!(dirty(&bitmaps), [well("daily", 2), well("weekly", 1)]);
    // A failed backup changes nothing.
    let begun = bitmaps.begin(&disk).unwrap();
    bitmaps.record_in("D 0", &begun);
    write(&disk, 3);
    // The bitmap is in use by the running backup.
    bitmaps.remove("D 0", "weekly").unwrap_err();
    bitmaps.give_up("D 0", &begun);
    assert_eq!(dirty(&bitmaps), [well("daily", 3), well("weekly", 2)]);
    back_up(&bitmaps, &disk, "daily");
    assert_eq!(dirty(&bitmaps), [well("daily", 0), well("weekly", 2)]);
    assert_eq!(setup.files(), 3, "a record and the bits of two");
    assert!(bitmaps.remove("D 0", "weekly").unwrap());
    assert!(!bitmaps.remove("D 0", "weekly").unwrap());
    write(&disk, 4);
    assert_eq!(dirty(&bitmaps), [well("daily", 1)]);
    bitmaps.forget("D 0");
    assert_eq!((dirty(&bitmaps).len(), setup.files()), (0, 0));
}

#[test]
fn bits_survive_a_killed_daemon_but_no_system_crash() {
    let setup = Setup::new();
    let (bitmaps, disk) = setup.start("run");
    back_up(&bitmaps, &disk, "daily");
    write(&disk, 1);
    // Killed before the backup was complete: both files of bits have recorded.
    let begun = bitmaps.begin(&disk).unwrap();
    bitmaps.record_in("D 0", &begun);
    write(&disk, 2);
    drop((bitmaps, disk));
    let (bitmaps, disk) = setup.start("run");
    assert_eq!(dirty(&bitmaps), [well("daily", 2)]);
    write(&disk, 3);
    drop((bitmaps, disk));
    let (bitmaps, disk) = setup.start("other run");
    let found = dirty(&bitmaps).remove(0);
    assert_eq!(
        (found.1, bitmaps.bits("D 0", "daily").is_none()),
        (16, true)
    );
    assert!(found.2.unwrap().contains("system"));
    bitmaps.forget("D 0");
    assert_eq!(setup.files(), 0);
    back_up(&bitmaps, &disk, "daily");
    assert_eq!(dirty(&bitmaps), [well("daily", 0)]);
}

#[test]
fn closed_disk_retains_its_bitmap_unless_changed() {
    let setup = Setup::new();
    let (bitmaps, disk) = setup.start("run");
    back_up(&bitmaps, &disk, "daily");
    write(&disk, 1);
    drop(disk);
    let file = setup.file();
    bitmaps.close(|_| vec![file.clone()]);
    let (bitmaps, disk) = setup.start("other run");
    assert_eq!(dirty(&bitmaps), [well("daily", 1)]);
    drop(disk);
    // From here on a crash is detected again.
    drop(bitmaps);
    let (bitmaps, disk) = setup.start("third run");
    assert!(dirty(&bitmaps)[0].2.is_some());
    back_up(&bitmaps, &disk, "daily");
    drop(disk);
    bitmaps.close(|_| vec![file.clone()]);
    std::fs::write(&file, vec![1; SIZE as usize]).unwrap();
    let (bitmaps, _disk) = setup.start("third run");
    assert!(
        dirty(&bitmaps)[0]
            .2
            .as_ref()
            .unwrap()
            .contains("not served")
    );
}

#[test]
fn disk_that_opens_late_is_compared_when_it_opens() {
    let setup = Setup::new();
    let (bitmaps, disk) = setup.start("run");
    back_up(&bitmaps, &disk, "daily");
    setup.stop(&bitmaps, disk);
    let load = || Bitmaps::load_in_run(Some(setup.folder.path()), "run", &setup.damaged);
    let bitmaps = load();
    let disk = setup.open(&bitmaps);
    assert_eq!(dirty(&bitmaps), [well("daily", 0)], "unchanged");
    setup.stop(&bitmaps, disk);
    let bitmaps = load();
    // Another program had the file open at the start.
    setup.write_outside();
    let disk = setup.open(&bitmaps);
    let reason = dirty(&bitmaps)[0].2.clone().unwrap();
    assert!(reason.contains("not served"), "{reason}");
    back_up(&bitmaps, &disk, "daily");
    drop((bitmaps, disk));
    // The bitmaps of a killed daemon have no state of the file.
    let bitmaps = load();
    let _disk = setup.open(&bitmaps);
    assert_eq!(dirty(&bitmaps), [well("daily", 0)]);
}

#[test]
fn unserved_disk_is_compared_when_it_opens_again() {
    let setup = Setup::new();
    let (bitmaps, disk) = setup.start("run");
    back_up(&bitmaps, &disk, "daily");
    write(&disk, 1);
    drop((bitmaps, disk));
    // The disk's exports failed. The daemon stops without another attempt, or is killed.
    for is_killed in [false, true] {
        let (bitmaps, disk) = setup.start("run");
        bitmaps.close_unserved(|disk| disk == "D 0");
        assert_eq!(dirty(&bitmaps), [well("daily", 1)]);
        bitmaps.close_unserved(|_| false);
        assert_eq!(dirty(&bitmaps), []);
        match is_killed {
            false => setup.stop(&bitmaps, disk),
            true => drop((bitmaps, disk)),
        }
    }
    // The next attempt opens it again.
    let (bitmaps, disk) = setup.start("other run");
    bitmaps.close_unserved(|_| false);
    drop(disk);
    let disk = setup.open(&bitmaps);
    write(&disk, 3);
    assert_eq!(dirty(&bitmaps), [well("daily", 2)]);
    bitmaps.close_unserved(|_| false);
    drop(disk);
    setup.write_outside();
    bitmaps.close(|_| vec![setup.file()]);
    let (bitmaps, disk) = setup.start("other run");
    let reason = dirty(&bitmaps)[0].2.clone().unwrap();
    assert!(reason.contains("not served"), "{reason}");
    back_up(&bitmaps, &disk, "daily");
    assert_eq!(dirty(&bitmaps), [well("daily", 0)]);
}

#[test]
fn disk_opened_again_is_recorded_in_its_bitmaps() {
    let setup = Setup::new();
    let (bitmaps, disk) = setup.start("run");
    back_up(&bitmaps, &disk, "daily");
    drop((bitmaps, disk));
    let (bitmaps, unserved) = setup.start("run");
    drop(unserved);
    let disk = setup.open(&bitmaps);
    write(&disk, 3);
    assert_eq!(dirty(&bitmaps), [well("daily", 1)]);
    drop(disk);
    setup.write_outside();
    let _disk = setup.open(&bitmaps);
    assert!(dirty(&bitmaps)[0].2.is_some());
    assert!(bitmaps.bits("D 0", "daily").is_none());
}

#[test]
fn handed_over_bitmaps_are_not_closed() {
    let setup = Setup::new();
    let (bitmaps, disk) = setup.start("run");
    back_up(&bitmaps, &disk, "daily");
    bitmaps.hand_over();
    write(&disk, 1);
    bitmaps.close(|_| Vec::new());
    drop((bitmaps, disk));
    let (bitmaps, _disk) = setup.start("run");
    assert_eq!(dirty(&bitmaps), [well("daily", 1)]);
}

#[test]
fn damaged_bits_and_records_are_distrusted() {
    let setup = Setup::new();
    let (bitmaps, disk) = setup.start("run");
    back_up(&bitmaps, &disk, "daily");
    drop((bitmaps, disk));
    let folder = setup.folder.path().join(FOLDER);
    let bits = folder.join("_44_200.1.bits");
    File::options()
        .write(true)
        .open(&bits)
        .unwrap()
        .set_len(0)
        .unwrap();
    let (bitmaps, disk) = setup.start("run");
    assert!(dirty(&bitmaps)[0].2.is_some());
    drop((bitmaps, disk));
    let record = folder.join("_44_200.json");
    std::fs::write(&record, "{").unwrap();
    let (bitmaps, disk) = setup.start("run");
    let found = bitmaps.all().remove(0);
    assert_eq!((&*found.disk, &*found.name), ("D 0", ""));
    assert!(
        found
            .reason
            .unwrap()
            .contains("next backup copies everything")
    );
    assert_eq!(setup.damaged.all().len(), 1);
    assert_eq!(std::fs::read(&record).unwrap(), b"{", "it stays");
    // A complete backup replaces the record and keeps the damaged one under another name.
    back_up(&bitmaps, &disk, "daily");
    assert_eq!(dirty(&bitmaps), [well("daily", 0)]);
    assert_eq!((setup.damaged.all(), setup.files()), (Vec::new(), 3));
}

#[test]
fn changed_bits_of_a_closed_disk_are_distrusted() {
    let setup = Setup::new();
    let file = setup.file();
    let (bitmaps, disk) = setup.start("run");
    back_up(&bitmaps, &disk, "daily");
    write(&disk, 1);
    drop(disk);
    bitmaps.close(|_| vec![file.clone()]);
    drop(bitmaps);
    let bits = setup.folder.path().join(FOLDER).join("_44_200.1.bits");
    let saved = std::fs::read(&bits).unwrap();
    let mut flipped = saved.clone();
    flipped[0] ^= 2;
    std::fs::write(&bits, flipped).unwrap();
    let (bitmaps, disk) = setup.start("run");
    let reason = dirty(&bitmaps)[0].2.clone().unwrap();
    assert!(
        reason.contains("do not match the saved checksum"),
        "{reason}"
    );
    assert!(bitmaps.bits("D 0", "daily").is_none());
    drop((bitmaps, disk));
}

#[test]
fn volatile_disk_starts_a_new_bitmap() {
    let folder = tempfile::tempdir().unwrap();
    let start = || {
        let bitmaps = Bitmaps::load_in_run(Some(folder.path()), "run", &DamagedFiles::default());
        let options = RamOptions {
            size: SIZE,
            ..RamOptions::default()
        };
        let device = Ram::create(options).unwrap();
        let disk = Arc::new(Disk::new("D 0", None, Arc::new(device)).unwrap());
        bitmaps.attach([(&disk, &OpenedStamps::default())]);
        (bitmaps, disk)
    };
    let (bitmaps, disk) = start();
    back_up(&bitmaps, &disk, "daily");
    drop((bitmaps, disk));
    let (bitmaps, _disk) = start();
    assert!(dirty(&bitmaps)[0].2.is_some());
}

#[test]
fn names_are_short_and_plain() {
    for name in ["daily", "2026-11-28", "a.b_c:d"] {
        assert!(is_name(name), "{name}");
    }
    for name in ["", "a/b", "..\n", "ä", &"x".repeat(65)] {
        assert!(!is_name(name), "{name}");
    }
}
