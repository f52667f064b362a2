//! QEMU's tools and the block device `image` change images in turn: contents are equal, and `qemu-img check` finds no fault. Needs qemu-img
//! and qemu-io (Debian: qemu-utils). 300 images; `LUNETTE_SEEDS=100000` tries more.

mod common;

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};

use bdev::{BlockDevice, CacheMode, ImageOptions};
use block::{IoFlags, IoRequest};
use common::{Worker, open_image};

/// A starting process shares open files and locks of all threads for a moment.
static ALONE: Mutex<()> = Mutex::new(());

fn alone() -> MutexGuard<'static, ()> {
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Random numbers from a seed.
struct Random(fastrand::Rng);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0.u64(..limit)
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// Runs a QEMU tool in a folder; returns its output.
fn qemu(folder: &Path, tool: &str, arguments: &[&str]) -> String {
    let ran = Command::new(tool)
        .args(arguments)
        .current_dir(folder)
        .output();
    let ran = ran.unwrap_or_else(|error| {
        panic!("cannot run {tool}: {error}; hint: apt-get install qemu-utils")
    });
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        ran.status.success(),
        "{tool} {arguments:?}: {}{}",
        text(&ran.stdout),
        text(&ran.stderr)
    );
    text(&ran.stdout)
}

struct Disk {
    folder: tempfile::TempDir,
    path: PathBuf,
    content: Vec<u8>,
    cluster: u64,
    /// Never written: QEMU compresses only into unallocated clusters.
    is_fresh: bool,
    data_file: Option<DataFile>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum DataFile {
    OfTheImage,
    /// The file is a raw disk.
    Raw,
}

impl Disk {
    fn make(random: &mut Random) -> Disk {
        let folder = tempfile::tempdir().unwrap();
        let cluster = random.one_of(&[512, 1024, 4096, 65_536, 65_536, 2 << 20]);
        let sectors = match cluster {
            2_097_152 => 4096 + random.below(8192),
            _ => 200 + random.below(3000),
        };
        let mut content = vec![0; (sectors * 512) as usize];
        let size = (sectors * 512).to_string();
        let is_old = random.below(4) == 0;
        let mut options = format!("cluster_size={cluster}");
        options += if is_old {
            ",compat=0.10"
        } else {
            ",compat=1.1"
        };
        if !is_old {
            let bits = random.one_of(&[16, 16, 16, 8, 32, 64]);
            options += &format!(",refcount_bits={bits}");
            options += random.one_of(&["", ",lazy_refcounts=on"]);
            options += random.one_of(&["", ",compression_type=zstd"]);
            if cluster >= 65_536 {
                options += random.one_of(&["", ",extended_l2=on"]);
            }
        }
        let backing = random.one_of(&["", "", "raw", "qcow2"]);
        let mut create = vec!["create", "-q", "-f", "qcow2"];
        if !backing.is_empty() {
            let bytes = (sectors / 2 + random.below(sectors)) * 512;
            let below: Vec<u8> = (0..bytes).map(|at| (at / 512 % 251) as u8).collect();
            std::fs::write(folder.path().join("base.raw"), &below).unwrap();
            let known = below.len().min(content.len());
            content[..known].copy_from_slice(&below[..known]);
            if backing == "qcow2" {
                let compressed = random.one_of(&[&["-c"][..], &[]]);
                let arguments = [
                    &["convert", "-q", "-O", "qcow2"],
                    compressed,
                    &["base.raw", "base"],
                ];
                qemu(folder.path(), "qemu-img", &arguments.concat());
            } else {
                std::fs::rename(folder.path().join("base.raw"), folder.path().join("base"))
                    .unwrap();
            }
            create.extend(["-b", "base", "-F", backing]);
        } else {
            options += random.one_of(&["", "", ",preallocation=metadata", ",preallocation=falloc"]);
        }
        let data_file = match random.below(5) {
            0 if !is_old && backing.is_empty() => Some(DataFile::Raw),
            1 if !is_old => Some(DataFile::OfTheImage),
            _ => None,
        };
        if let Some(kind) = data_file {
            options += ",data_file=data";
            let raw = if kind == DataFile::Raw { "on" } else { "off" };
            options += &format!(",data_file_raw={raw}");
        }
        create.extend(["-o", &options, "disk", &size]);
        qemu(folder.path(), "qemu-img", &create);
        Disk {
            path: folder.path().join("disk"),
            folder,
            content,
            cluster,
            is_fresh: !options.contains("preallocation") && data_file.is_none(),
            data_file,
        }
    }

    fn range(&self, random: &mut Random) -> std::ops::Range<usize> {
        let sectors = self.content.len() as u64 / 512;
        let from = random.below(sectors);
        let longest = random.one_of(&[1, 8, 64, 400]);
        let to = (from + 1 + random.below(longest)).min(sectors);
        (from * 512) as usize..(to * 512) as usize
    }

    /// QEMU changes the image, and may take or remove a snapshot.
    fn by_qemu(&mut self, random: &mut Random) {
        let mut commands: Vec<String> = Vec::new();
        for _ in 0..random.below(12) {
            let range = self.range(random);
            let (at, length) = (range.start, range.len());
            match random.below(8) {
                0..4 => {
                    let byte = random.below(256) as u8;
                    commands.push(format!("write -q -P {byte} {at} {length}"));
                    self.content[range].fill(byte);
                }
                4 => {
                    commands.push(format!("write -q -z {at} {length}"));
                    self.content[range].fill(0);
                }
                5 => {
                    commands.push(format!("write -q -z -u {at} {length}"));
                    self.content[range].fill(0);
                }
                _ => {
                    let cluster = self.cluster as usize;
                    let from = at / cluster * cluster;
                    if from + cluster <= self.content.len() && commands.is_empty() && self.is_fresh
                    {
                        let byte = random.below(256) as u8;
                        commands.push(format!("write -q -c -P {byte} {from} {cluster}"));
                        self.content[from..from + cluster].fill(byte);
                    }
                }
            }
        }
        self.is_fresh = false;
        let mut arguments = vec!["-f", "qcow2"];
        for command in &commands {
            arguments.extend(["-c", command]);
        }
        arguments.push("disk");
        if !commands.is_empty() {
            qemu(self.folder.path(), "qemu-io", &arguments);
        }
        match random.below(6) {
            _ if self.data_file.is_some() => {}
            0 | 1 => {
                let name = format!("s{}", random.below(1000));
                qemu(
                    self.folder.path(),
                    "qemu-img",
                    &["snapshot", "-q", "-c", &name, "disk"],
                );
            }
            2 => {
                let listed = qemu(self.folder.path(), "qemu-img", &["snapshot", "-l", "disk"]);
                let first = listed
                    .lines()
                    .nth(2)
                    .and_then(|line| line.split_whitespace().nth(1));
                if let Some(name) = first {
                    qemu(
                        self.folder.path(),
                        "qemu-img",
                        &["snapshot", "-q", "-d", name, "disk"],
                    );
                }
            }
            _ => {}
        }
    }

    /// The device `image` reads the whole image and changes it.
    fn by_us(&mut self, random: &mut Random, case: &str) {
        let cache = random.one_of(&[
            CacheMode::None,
            CacheMode::Writeback,
            CacheMode::Writethrough,
        ]);
        let image = open_image(&self.path, cache).unwrap_or_else(|error| panic!("{case}: {error}"));
        let mut worker = Worker::new(&image);
        let read = worker.read(0, self.content.len()).unwrap();
        assert!(
            read == self.content,
            "{case}: ours reads something else at {:?}",
            self.differs(&read)
        );
        for _ in 0..random.below(20) {
            let range = self.range(random);
            let (at, length) = (range.start as u64, range.len() as u64);
            match random.below(8) {
                0..4 => {
                    let byte = random.below(256) as u8;
                    worker.write(at, &vec![byte; range.len()]).unwrap();
                    self.content[range].fill(byte);
                }
                4 => {
                    let io = IoRequest::write_zeroes(at, length);
                    worker.do_plain(io).unwrap();
                    self.content[range].fill(0);
                }
                5 => {
                    let io = IoRequest::write_zeroes(at, length).flagged(IoFlags::UNMAP);
                    worker.do_plain(io).unwrap();
                    self.content[range].fill(0);
                }
                6 => {
                    worker.do_plain(IoRequest::discard(at, length)).unwrap();
                    self.content[range].fill(0);
                }
                _ => worker.do_plain(IoRequest::flush()).unwrap(),
            }
        }
        let read = worker.read(0, self.content.len()).unwrap();
        assert!(
            read == self.content,
            "{case}: ours reads other than it wrote at {:?}",
            self.differs(&read)
        );
    }

    fn differs(&self, read: &[u8]) -> Option<usize> {
        self.content
            .iter()
            .zip(read)
            .position(|(expected, found)| expected != found)
    }

    fn check(&self, case: &str) {
        let checked = Command::new("qemu-img")
            .args(["check", "-f", "qcow2", "disk"])
            .current_dir(self.folder.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&checked.stdout).into_owned();
        let wrong = String::from_utf8_lossy(&checked.stderr).into_owned();
        assert!(checked.status.success(), "{case}: {text}{wrong}");
        let raw = self.folder.path().join("out.raw");
        qemu(
            self.folder.path(),
            "qemu-img",
            &["convert", "-f", "qcow2", "-O", "raw", "disk", "out.raw"],
        );
        let read = std::fs::read(raw).unwrap();
        assert!(
            read == self.content,
            "{case}: QEMU reads something else at {:?}",
            self.differs(&read)
        );
        if self.data_file == Some(DataFile::Raw) {
            let mut data = std::fs::read(self.folder.path().join("data")).unwrap();
            // QEMU extends the file if the last cluster is partial.
            data.resize(self.content.len(), 0);
            assert!(
                data == self.content,
                "{case}: the raw data file has something else at {:?}",
                self.differs(&data)
            );
        }
        let file = common::open(bdev::FileOptions {
            is_container: true,
            ..bdev::FileOptions::new(&self.path)
        });
        let container = file.container().unwrap();
        let report = bdev::qcow2::Image::check(container, bdev::qcow2::Repair::Nothing).unwrap();
        assert_eq!(
            (report.leaks, report.corruptions),
            (0, 0),
            "{case}: {:?}",
            report.findings
        );
    }
}

/// Environment variables: the number of images, and the index of this process among `PROCESSES`.
const SEEDS: &str = "LUNETTE_SEEDS";
const PART: &str = "LUNETTE_SEEDS_PART";
const PROCESSES: usize = 4;

/// Runs in several processes, because tests of one process that start programs wait for each other.
#[test]
fn images_changed_alternately_with_qemu_retain_all_writes() {
    let seeds = std::env::var(SEEDS).ok();
    let seeds = seeds.map_or(300, |seeds| seeds.parse().expect(SEEDS));
    if let Ok(part) = std::env::var(PART) {
        let part = part.parse().expect(PART);
        return (part..seeds).step_by(PROCESSES).for_each(change_in_turn);
    }
    let _alone = alone();
    let parts = (0..PROCESSES).map(|part| {
        let name = "images_changed_alternately_with_qemu_retain_all_writes";
        let program = std::env::current_exe().expect("this program");
        let mut command = Command::new(program);
        command.args(["--exact", name, "--nocapture"]);
        command.env(PART, part.to_string());
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        command.spawn().expect("another process of this program")
    });
    for part in parts.collect::<Vec<_>>() {
        let ended = part.wait_with_output().expect("its end");
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (stdout, stderr) = (text(&ended.stdout), text(&ended.stderr));
        assert!(ended.status.success(), "{stdout}{stderr}");
    }
}

fn change_in_turn(seed: u64) {
    let random = &mut Random(fastrand::Rng::with_seed(seed));
    let mut disk = Disk::make(random);
    for round in 0..3 {
        let case = format!("seed {seed}, round {round}");
        disk.by_qemu(random);
        disk.by_us(random, &case);
        disk.check(&case);
    }
}

#[test]
fn image_in_use_is_refused() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    qemu(
        folder.path(),
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "disk", "1M"],
    );
    let path = folder.path().join("disk");
    let ours = open_image(&path, CacheMode::None).unwrap();
    let error = open_image(&path, CacheMode::None)
        .err()
        .unwrap()
        .to_string();
    assert!(error.contains("is in use"), "{error}");
    let refused = Command::new("qemu-img")
        .arg("info")
        .arg(&path)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(!refused.status.success() && text.contains("lock"), "{text}");
    drop(ours);
    qemu(folder.path(), "qemu-img", &["info", "disk"]);
    let reading = |read_only| {
        bdev::Image::open(&ImageOptions {
            path: path.clone(),
            cache: CacheMode::None,
            read_only,
            block_size: None,
            data_file: None,
            trusts_name: true,
            named_files: bdev::NamedFiles::Any,
            lock: bdev::FileLock::Always,
        })
    };
    let (_one, _other) = (reading(true).unwrap(), reading(true).unwrap());
    assert!(reading(false).is_err());
}

/// Creates an image marked as encrypted, with any content.
fn make_encrypted(folder: &Path) {
    let create = ["create", "-q", "-f", "qcow2", "encrypted", "1M"];
    qemu(folder, "qemu-img", &create);
    let mut image = std::fs::read(folder.join("encrypted")).unwrap();
    // crypt_method: LUKS
    image[35] = 2;
    std::fs::write(folder.join("encrypted"), image).unwrap();
}

/// QEMU allocates subclusters over a backing image. All are streamed, and subclusters written here coexist with the others.
#[test]
fn clusters_that_are_allocated_in_part_are_served_streamed_and_grown() {
    const SIZE: usize = (3 << 20) + 512;
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let mut content: Vec<u8> = (0..SIZE).map(|at| (at / 512 % 251) as u8).collect();
    // The backing image ends with a hole.
    content[2 << 20..].fill(0);
    std::fs::write(at.join("base"), &content[..2 << 20]).unwrap();
    let base = std::fs::File::options().write(true).open(at.join("base"));
    base.unwrap().set_len(SIZE as u64).unwrap();
    let options = "extended_l2=on,cluster_size=64k";
    let create = [
        "create", "-q", "-f", "qcow2", "-o", options, "-b", "base", "-F", "raw", "disk",
    ];
    qemu(at, "qemu-img", &create);
    for (byte, from, length) in [
        (1, 2048, 2048),
        (2, 65_536 + 4096, 512),
        (3, 1 << 20, 1 << 16),
        (4, (2 << 20) + 8192, 4096),
    ] {
        let write = format!("write -q -P {byte} {from} {length}");
        qemu(at, "qemu-io", &["-f", "qcow2", "-c", &write, "disk"]);
        content[from..from + length].fill(byte);
    }
    qemu(
        at,
        "qemu-io",
        &["-f", "qcow2", "-c", "write -q -z 131072 2048", "disk"],
    );
    content[131_072..131_072 + 2048].fill(0);
    let image = open_image(&at.join("disk"), CacheMode::Writeback).unwrap();
    let read = |image: &bdev::Image| {
        let mut found = vec![0; SIZE];
        let mut worker = Worker::new(image);
        for from in (0..SIZE).step_by(1 << 20) {
            let length = (SIZE - from).min(1 << 20);
            let part = worker.read(from as u64, length).unwrap();
            found[from..from + length].copy_from_slice(&part);
        }
        found
    };
    assert!(read(&image) == content, "as QEMU left it");
    // Clusters with an allocated part, a zero part and a backing part.
    for from in [
        2048,
        65_536 + 512,
        131_072 + 512,
        131_072 + 4096,
        200_000 / 512 * 512,
    ] {
        Worker::new(&image).write(from as u64, &[7; 1024]).unwrap();
        content[from..from + 1024].fill(7);
    }
    assert!(read(&image) == content, "after writes");
    use bdev::ImageDevice;
    let mut next = 0;
    while next < SIZE as u64 {
        next = image.copy_up(next, 1 << 20).unwrap().end;
    }
    image.detach_backing().unwrap();
    assert!(read(&image) == content, "after a stream");
    drop(image);
    std::fs::remove_file(at.join("base")).unwrap();
    qemu(at, "qemu-img", &["check", "-q", "disk"]);
    qemu(at, "qemu-img", &["convert", "-O", "raw", "disk", "raw"]);
    assert!(
        std::fs::read(at.join("raw")).unwrap() == content,
        "as QEMU reads it"
    );
}

/// Without its backing image, or with another one, an image's snapshots would change.
#[test]
fn image_with_snapshots_retains_its_backing_image() {
    use bdev::ImageDevice;
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    std::fs::write(at.join("base"), vec![5; 1 << 20]).unwrap();
    let over = ["-b", "base", "-F", "raw", "disk"];
    let create = [&["create", "-q", "-f", "qcow2"][..], &over].concat();
    qemu(at, "qemu-img", &create);
    qemu(at, "qemu-img", &["snapshot", "-c", "kept", "disk"]);
    let image = open_image(&at.join("disk"), CacheMode::Writeback).unwrap();
    let refusals = [
        image.copy_up(0, 1 << 20).unwrap_err().to_string(),
        image.detach_backing().unwrap_err().to_string(),
        image.reopen_to_commit().err().unwrap().to_string(),
    ];
    for refusal in refusals {
        let is_clear = refusal.contains("internal snapshots") && refusal.contains("--delete");
        assert!(is_clear, "{refusal}");
    }
    Worker::new(&image).write(0, &[7; 4096]).unwrap();
    drop(image);
    qemu(at, "qemu-img", &["snapshot", "-a", "kept", "disk"]);
    let image = open_image(&at.join("disk"), CacheMode::Writeback).unwrap();
    assert_eq!(Worker::new(&image).read(0, 4096).unwrap(), [5; 4096]);
}

/// Data beyond the end in the last cluster must not appear after growth.
#[test]
fn a_disk_with_parts_of_clusters_grows_by_zeroes() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    let options = "extended_l2=on,cluster_size=64k";
    qemu(
        at,
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "-o", options, "disk", "64k"],
    );
    qemu(
        at,
        "qemu-io",
        &["-f", "qcow2", "-c", "write -q -P 5 40960 4096", "disk"],
    );
    qemu(at, "qemu-img", &["resize", "-q", "--shrink", "disk", "16k"]);
    let image = open_image(&at.join("disk"), CacheMode::Writeback).unwrap();
    use bdev::BlockDevice;
    image.set_size(64 << 10).unwrap();
    image.capacity().set(64 << 10);
    let found = Worker::new(&image).read(0, 64 << 10).unwrap();
    assert_eq!(found.iter().position(|byte| *byte != 0), None);
    drop(image);
    qemu(at, "qemu-img", &["check", "-q", "disk"]);
}

#[test]
fn unsupported_features_are_refused_by_name() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path();
    make_encrypted(at);
    std::fs::write(at.join("raw"), vec![0; 1 << 20]).unwrap();
    qemu(
        at,
        "qemu-img",
        &[
            "create",
            "-q",
            "-f",
            "qcow2",
            "-u",
            "-b",
            "ssh://h/x",
            "-F",
            "raw",
            "far",
            "1M",
        ],
    );
    for (name, below) in [("loop", "other"), ("other", "loop")] {
        qemu(
            at,
            "qemu-img",
            &[
                "create", "-q", "-f", "qcow2", "-u", "-b", below, "-F", "qcow2", name, "1M",
            ],
        );
    }
    for (name, reason) in [
        ("encrypted", "LUKS"),
        ("raw", "file:PATH"),
        ("far", "not a file"),
        ("loop", "form a cycle"),
        ("absent", "lunette image create"),
    ] {
        let error = open_image(&at.join(name), CacheMode::None)
            .err()
            .map(|error| error.to_string());
        let error = error.unwrap_or_else(|| panic!("{name} was opened"));
        assert!(error.contains(reason), "{name}: {error}");
    }
}

#[test]
fn a_data_file_elsewhere_is_written_only_if_it_is_named() {
    let _alone = alone();
    let (folder, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (path, data) = (folder.path().join("disk"), elsewhere.path().join("data"));
    let options = format!("data_file={}", data.display());
    let create = ["create", "-q", "-f", "qcow2", "-o", &options, "disk", "1M"];
    qemu(folder.path(), "qemu-img", &create);
    let write = ["-f", "qcow2", "-c", "write -q -P 7 64k 4k", "disk"];
    qemu(folder.path(), "qemu-io", &write);
    let open = |read_only, data_file: Option<&Path>| {
        bdev::Image::open(&ImageOptions {
            read_only,
            data_file: data_file.map(Path::to_owned),
            trusts_name: true,
            named_files: bdev::NamedFiles::Any,
            ..ImageOptions::new(&path)
        })
    };
    let error = open(false, None).err().unwrap().to_string();
    assert!(
        error.contains("not in the folder") && error.contains("data_file = "),
        "{error}"
    );
    // A link in the folder is no name for it.
    std::os::unix::fs::symlink(&data, folder.path().join("link")).unwrap();
    let create = ["create", "-q", "-u", "-f", "qcow2", "-o"];
    let options = ["data_file=link", "linked", "1M"];
    let refused = Command::new("qemu-img")
        .args(create.iter().chain(&options))
        .current_dir(folder.path())
        .output();
    assert!(refused.unwrap().status.success());
    let linked = bdev::Image::open(&ImageOptions {
        trusts_name: true,
        named_files: bdev::NamedFiles::Any,
        ..ImageOptions::new(&folder.path().join("linked"))
    });
    assert!(
        linked
            .err()
            .unwrap()
            .to_string()
            .contains("not in the folder")
    );
    qemu(folder.path(), "qemu-io", &write);
    for (read_only, named) in [(true, None), (false, Some(data.as_path()))] {
        let image = open(read_only, named).unwrap();
        assert_eq!(Worker::new(&image).read(65536, 4096).unwrap(), [7; 4096]);
    }
    let image = open(false, Some(&data)).unwrap();
    Worker::new(&image).write(65536, &[8; 4096]).unwrap();
    drop(image);
    let read = ["-f", "qcow2", "-c", "read -q -P 8 64k 4k", "disk"];
    qemu(folder.path(), "qemu-io", &read);
    // An image without a data file refuses the option.
    qemu(
        folder.path(),
        "qemu-img",
        &["create", "-q", "-f", "qcow2", "plain", "1M"],
    );
    let plain = bdev::Image::open(&ImageOptions {
        data_file: Some(data),
        ..ImageOptions::new(&folder.path().join("plain"))
    });
    assert!(
        plain
            .err()
            .unwrap()
            .to_string()
            .contains("no external data file")
    );
}

/// For an untrusted image, a data file is written only if the options name it, even in the folder of the image.
#[test]
fn untrusted_image_needs_its_data_file_named_to_write() {
    let _alone = alone();
    let folder = tempfile::tempdir().unwrap();
    let create = ["create", "-q", "-f", "qcow2", "-o", "data_file=beside"];
    qemu(
        folder.path(),
        "qemu-img",
        &[&create[..], &["local", "1M"]].concat(),
    );
    let local = |trusts_name, read_only, data_file| {
        bdev::Image::open(&ImageOptions {
            trusts_name,
            read_only,
            data_file,
            ..ImageOptions::new(&folder.path().join("local"))
        })
    };
    let beside = folder.path().join("beside");
    let error = local(false, false, None).err().unwrap().to_string();
    let hint = format!("data_file = {}", beside.display());
    assert!(error.contains(&hint), "{error}");
    for (trusts, read_only, named) in [
        (true, false, None),
        (false, true, None),
        (false, false, Some(beside)),
    ] {
        local(trusts, read_only, named).unwrap();
    }
}

#[test]
fn a_disk_with_a_data_file_grows_and_shrinks() {
    let _alone = alone();
    for (cluster, raw) in [(512, "on"), (512, "off"), (65_536, "on"), (65_536, "off")] {
        let folder = tempfile::tempdir().unwrap();
        let options = format!("cluster_size={cluster},data_file=data,data_file_raw={raw}");
        let create = [
            "create", "-q", "-f", "qcow2", "-o", &options, "disk", "81920",
        ];
        qemu(folder.path(), "qemu-img", &create);
        let image = open_image(&folder.path().join("disk"), CacheMode::None).unwrap();
        let case = format!("clusters of {cluster} bytes, raw {raw}");
        Worker::new(&image).write(0, &[1; 81_920]).unwrap();
        for (bytes, known) in [(186 * 512, 81_920), (8192, 8192), (300 * 512, 8192)] {
            image.set_size(bytes).unwrap();
            image.capacity().set(bytes);
            let read = Worker::new(&image).read(0, bytes as usize);
            let read = read.unwrap_or_else(|error| panic!("{case}, {bytes} bytes: {error:?}"));
            assert!(
                read[..known].iter().all(|byte| *byte == 1),
                "{case}: {bytes}"
            );
            assert!(
                read[known..].iter().all(|byte| *byte == 0),
                "{case}: {bytes}"
            );
        }
        Worker::new(&image).write(299 * 512, &[2; 512]).unwrap();
        drop(image);
        qemu(folder.path(), "qemu-img", &["check", "-q", "disk"]);
        let read = ["-f", "qcow2", "-c", "read -q -P 2 153088 512", "disk"];
        qemu(folder.path(), "qemu-io", &read);
        if raw == "on" {
            let data = std::fs::read(folder.path().join("data")).unwrap();
            assert!(data[..8192].iter().all(|byte| *byte == 1), "{case}");
            assert!(
                data[8192..299 * 512].iter().all(|byte| *byte == 0),
                "{case}"
            );
            assert_eq!(data[299 * 512..300 * 512], [2; 512], "{case}");
        }
    }
}
