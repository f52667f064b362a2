//! Live migration between two QEMUs, with one daemon for both sides or with one for each.
#![forbid(unsafe_code)]

use end_to_end::ceph::Ceph;
use end_to_end::http::Events;
use end_to_end::rig::{free_portal, kernel_is_content};
use end_to_end::{Context, DaemonBuilder, Guest, GuestBuilder, Result, Rig, Scratch, Soak, ensure};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, LogMemory, Options, QueueOptions, kind, status};
use vm::{DestinationDies, Moment};

#[path = "migration/deaths.rs"]
mod deaths;
#[path = "migration/growth.rs"]
mod growth;
#[path = "migration/marks.rs"]
mod marks;
#[path = "migration/table.rs"]
mod table;

use growth::Resources;

/// Guest with a virtio-blk disk for each of `rings`, at the first sockets, and a virtio-scsi controller at the last socket. The rings of the
/// controller are split, because QEMU offers no packed ones for it.
fn machine(sockets: &[PathBuf], rings: &[&str]) -> GuestBuilder {
    let mut guest = GuestBuilder::new("migrating").memory_mib(192).migrates();
    for (socket, properties) in sockets.iter().zip(rings) {
        guest = guest.vhost_user_blk_with(socket, 1, properties);
    }
    match sockets.get(rings.len()) {
        Some(scsi) => guest.vhost_user_scsi(scsi, 1),
        None => guest,
    }
}

/// Both sides of the migrations of a guest.
struct Sides {
    sockets: [Vec<PathBuf>; 2],
    rings: &'static [&'static str],
    /// Kinds of the disks at the sockets, for [`table`].
    kinds: &'static [&'static str],
    /// The guest has a plugged memory module.
    has_module: bool,
}

impl Sides {
    fn new(
        sockets: [Vec<PathBuf>; 2],
        rings: &'static [&'static str],
        kinds: &'static [&'static str],
    ) -> Sides {
        Sides {
            sockets,
            rings,
            kinds,
            has_module: false,
        }
    }

    /// Returns the machine of a side for the start of the guest.
    fn machine(&self, side: usize) -> GuestBuilder {
        let machine = machine(&self.sockets[side], self.rings);
        match self.has_module {
            true => machine.pluggable_memory_mib(512),
            false => machine,
        }
    }

    /// Returns the machine of a side as the destination of a migration.
    fn destination(&self, side: usize) -> GuestBuilder {
        let machine = self.machine(side);
        match self.has_module {
            true => machine.plugged_memory(MODULE, MODULE_MIB),
            false => machine,
        }
    }
}

/// Memory module of a guest.
const MODULE: &str = "module";
const MODULE_MIB: u64 = 128;

const DISKS: [&str; 2] = ["vda", "sda"];
const LIMIT: Duration = Duration::from_secs(30);

/// Verifying loads on disks of a guest.
struct Loads(Vec<Soak>);

impl Loads {
    fn start(guest: &mut Guest, disks: &[&str], seed: u32) -> Result<Loads> {
        let start = |disk: &&str| {
            let options = format!("--file /dev/{disk} --seed {seed} --depth 4");
            Soak::start(guest, &options)
        };
        Ok(Loads(disks.iter().map(start).collect::<Result<_>>()?))
    }

    fn verify(self, guest: &mut Guest) -> Result<()> {
        self.0.into_iter().try_for_each(|load| load.finish(guest))
    }
}

/// Migrations per load.
const ROUND: usize = 4;

/// Returns the number of migrations of a test: the least, or more by `MIGRATIONS=100`.
fn migrations() -> usize {
    let wanted = std::env::var("MIGRATIONS").ok();
    let wanted = wanted.and_then(|text| text.parse().ok());
    wanted.unwrap_or(ROUND).next_multiple_of(ROUND)
}

/// Migrates a guest back and forth under verifying loads on these disks. The daemons do not grow. Calls `last` with the guest in its first
/// place, before the last verification.
fn migrates(
    guest: &mut Guest,
    sides: &Sides,
    disks: &[&str],
    rigs: &mut [&mut Rig],
    last: impl FnOnce(&mut Guest) -> Result<()>,
) -> Result<()> {
    let count = migrations();
    let (mut before, mut downtimes, mut last) = (Vec::new(), Vec::new(), Some(last));
    for round in 0..count / ROUND {
        let loads = Loads::start(guest, disks, round as u32 + 2)?;
        for number in 0..ROUND {
            let to = sides.destination((number + 1) % 2);
            // Each variant once in a round.
            let migration = match number {
                1 => guest.migrate_with(&to, &["multifd"]),
                2 => guest.migrate_with(&to, &["auto-converge"]),
                3 => guest.migrate_as_libvirt(&to),
                _ => guest.migrate(&to),
            }?;
            println!("{disks:?}, variant {number}: {migration:?}");
            downtimes.push(migration.downtime);
            // Each side was the source and the destination once.
            if before.is_empty() && number % 2 == 1 {
                connected_once(sides, rigs)?;
                before = rigs.iter_mut().map(|rig| Resources::of(rig)).collect();
            }
        }
        if downtimes.len() == count {
            let pairs = rigs.iter_mut().zip(before.drain(..)).map(|(rig, before)| {
                let before: Resources = before?;
                Ok((before, before.ensure_no_growth(rig)?))
            });
            table::print_growth(&pairs.collect::<Result<Vec<_>>>()?);
            last.take().map_or(Ok(()), |last| last(guest))?;
        }
        if let Err(error) = loads.verify(guest) {
            for rig in rigs.iter_mut() {
                let status = rig.daemon.ask(&["status"])?.stdout;
                println!("{}", String::from_utf8_lossy(&status));
                println!("{}", rig.daemon.process().log_tail());
            }
            return Err(error);
        }
    }
    kernel_is_content(guest)?;
    downtimes.sort_unstable();
    let quantile = |percent: usize| downtimes[(count * percent).div_ceil(100) - 1];
    let (p50, p99) = (quantile(50), quantile(99));
    println!("{disks:?}: {count} migrations, downtime p50 {p50:?}, p99 {p99:?}");
    table::print_stops(sides, rigs, count)
}

/// Waits until the daemons have no other sessions than those of the guest.
fn connected_once(sides: &Sides, rigs: &[&mut Rig]) -> Result<()> {
    let connected = |rig: &Rig| -> Result<usize> {
        let exports = exports_of_guests(rig)?;
        let connected = exports.iter().filter(|export| export["connected"] == true);
        Ok(connected.count())
    };
    let is_once = || {
        let count = rigs
            .iter()
            .map(|rig| connected(rig).ok())
            .sum::<Option<_>>();
        (count == Some(sides.sockets[0].len())).then_some(())
    };
    vm::wait_until(LIMIT, is_once).context("sessions of earlier front ends remain")
}

/// Option of a second export.
fn export(scratch: &Scratch, object: &str, name: &str) -> String {
    let socket = scratch.socket(&format!("{name}.sock"));
    format!("{object}:{},name={name}", socket.display())
}

#[test]
fn guest_migrates_between_exports_of_one_daemon() -> Result<()> {
    let mut rig = Rig::prepared(|scratch, daemon| {
        for file in ["d.raw", "s.raw"] {
            std::fs::write(scratch.file(file), vec![0; 32 << 20])?;
        }
        let mut daemon = daemon.disk("d=file:d.raw").disk("s=file:s.raw");
        for side in 0..2 {
            let (blk, scsi) = (format!("b{side}"), format!("c{side}"));
            let socket = scratch.socket(&format!("{scsi}.sock"));
            let controller = format!("{scsi}:{},nexus=guest", socket.display());
            daemon = daemon
                .arguments(["--vhost-blk", &export(scratch, "d", &blk)])
                .arguments(["--vhost-scsi", &controller])
                .lun(&format!("{scsi}/0:0=s"));
        }
        Ok(daemon.arguments(["--workers", "2"]))
    })?;
    let sides = [["b0", "c0"], ["b1", "c1"]];
    let sides = sides.map(|names| names.map(|name| rig.socket(name)).to_vec());
    let sides = Sides {
        has_module: true,
        ..Sides::new(
            sides,
            &["packed=off"],
            &["file, blk, split", "file, scsi, split"],
        )
    };
    let mut guest = sides.machine(0).boot()?;
    guest.wait_for_disks(&DISKS)?;
    plug_module(&mut guest)?;
    let reserve = "sg_persist -n -o -G -S 0x7 /dev/sda && sg_persist -n -o -R -K 0x7 -T 3 /dev/sda";
    guest.ok(reserve)?;
    let file = rig.scratch.file("guest.state");
    migrates(&mut guest, &sides, &DISKS, &mut [&mut rig], |guest| {
        guest.save_to(&file)?;
        guest.restore_from(&sides.destination(1), &file)
    })?;
    let reservation = guest.ok("sg_persist -n -k /dev/sda && sg_persist -n -r /dev/sda")?;
    ensure!(
        reservation.contains("0x7") && reservation.contains("Exclusive Access"),
        "{reservation}"
    );
    use_module(&mut guest)?;
    // The guest ends after its last move.
    marks::write(&mut guest, &[("vda", 'b'), ("sda", 'c')])?;
    guest.kill()?;
    serves_nothing(&rig)?;
    for side in 0..2 {
        marks::ensure_blk(&rig, &format!("b{side}"), 'b')?;
        marks::ensure_scsi(&rig, &format!("c{side}"), 0, 'c')?;
    }
    let log = rig.daemon.process().log();
    ensure!(!log.contains("session ended"), "{log}");
    rig.daemon.process().check_running()
}

/// Plugs a memory module in. The guest does not use it before its last migration: QEMU before 9.0 without KVM would lose writes to it, because
/// its size is a multiple of 256 KiB (docs/migration.md, "Known faults").
fn plug_module(guest: &mut Guest) -> Result<()> {
    guest.plug_memory(MODULE, MODULE_MIB)?;
    guest.ok(
        "n=0; until grep -l offline /sys/devices/system/memory/*/state >/tmp/offline; do n=$((n+1)); [ $n -lt 100 ] || exit 1; sleep 0.1; done",
    )?;
    Ok(())
}

/// Copies data to the disks and back through buffers in the memory module: the kernel allocates movable memory to programs first.
fn use_module(guest: &mut Guest) -> Result<()> {
    guest.ok(
        "for state in $(cat /tmp/offline); do echo online_movable > $state || exit 1; done; grep -A9 Movable /proc/zoneinfo | grep -q 'managed *[1-9]' || exit 1; \
         head -c 4194304 /dev/urandom >/tmp/data; for disk in vda sda; do dd if=/tmp/data of=/dev/$disk bs=1M oflag=direct && \
         dd if=/dev/$disk bs=1M count=4 iflag=direct | cmp - /tmp/data || exit 1; done",
    )?;
    Ok(())
}

/// Waits until a daemon serves no virtqueue.
fn serves_nothing(rig: &Rig) -> Result<()> {
    vm::wait_until(LIMIT, || (queues_served(rig).ok()? == 0).then_some(()))
        .context("queues are served without a guest")
}

/// Options of a disk that two daemons serve in turns.
fn shared_disk(file: &Path, name: &str, number: u8) -> String {
    let kind = match file.extension() {
        Some(extension) if extension == "qcow2" => "image",
        _ => "file",
    };
    format!(
        "{name}={kind}:{},lock=while-active,serial=SHARED-{number},wwn=500000000000000{number}",
        file.display()
    )
}

fn create_image(path: &Path, words: &[&str]) -> Result<()> {
    let program = vm::lunette_program(vm::Profile::Dev)?;
    let made = Command::new(program)
        .args(["image", "create"])
        .arg(path)
        .args(words)
        .output()?;
    let stderr = String::from_utf8_lossy(&made.stderr);
    ensure!(made.status.success(), "{stderr}");
    Ok(())
}

/// Starts two daemons with the same files, raw and qcow2: `d` and `e` for virtio-blk, `r` and `s` for virtio-scsi.
fn two_daemons() -> Result<(tempfile::TempDir, Rig, Rig)> {
    let folder = tempfile::tempdir()?;
    let file = |name: &str| folder.path().join(name);
    for raw in ["d.raw", "r.raw"] {
        std::fs::write(file(raw), vec![0; 32 << 20])?;
    }
    for image in ["e.qcow2", "s.qcow2"] {
        create_image(&file(image), &["32M"])?;
    }
    let describe = |daemon: DaemonBuilder| {
        daemon
            .disk(&shared_disk(&file("d.raw"), "d", 1))
            .disk(&shared_disk(&file("e.qcow2"), "e", 2))
            .disk(&shared_disk(&file("r.raw"), "r", 3))
            .disk(&shared_disk(&file("s.qcow2"), "s", 4))
            .vhost_blk("d")
            .vhost_blk("e")
            .vhost_scsi("c")
            .lun("c/0:0=r")
            .lun("c/0:1=s")
    };
    let first = Rig::new(describe)?;
    let second = first.beside(describe)?;
    Ok((folder, first, second))
}

#[test]
fn guest_migrates_between_two_daemons() -> Result<()> {
    const DISKS: [&str; 4] = ["vda", "vdb", "sda", "sdb"];
    let (_folder, mut first, mut second) = two_daemons()?;
    let sides = [&first, &second].map(|rig| ["d", "e", "c"].map(|name| rig.socket(name)).to_vec());
    let sides = Sides::new(
        sides,
        &["packed=on", "packed=off"],
        &[
            "file, blk, packed",
            "qcow2, blk, split",
            "file and qcow2, scsi, split",
        ],
    );
    let mut guest = sides.machine(0).boot()?;
    guest.wait_for_disks(&DISKS)?;
    let loads = Loads::start(&mut guest, &DISKS, 1)?;
    let destination = sides.destination(1);
    fails_to_migrate(&mut guest, &destination, &first, &mut second)?;
    loads.verify(&mut guest)?;
    let rigs = &mut [&mut first, &mut second];
    migrates(&mut guest, &sides, &DISKS, rigs, |_| Ok(()))?;
    let units = [guest.scsi_disk(0, 0, 0)?, guest.scsi_disk(0, 0, 1)?];
    let letters = [
        ("vda", 'd'),
        ("vdb", 'e'),
        (units[0].as_str(), 'r'),
        (&units[1], 's'),
    ];
    marks::write(&mut guest, &letters)?;
    // The source dies. The destination starts again.
    guest.die_in_migration(&destination, Moment::Switch)?;
    serves_nothing(&first)?;
    serves_nothing(&second)?;
    for (export, letter) in [("d", 'd'), ("e", 'e')] {
        marks::ensure_blk(&second, export, letter)?;
    }
    for (lun, letter) in [(0, 'r'), (1, 's')] {
        marks::ensure_scsi(&second, "c", lun, letter)?;
    }
    ensure!(queues_served(&first)? == 0);
    drop(second);
    Ok(())
}

/// Both daemons have the images open. The lock of one follows its queues; librbd moves that of the other to the daemon that writes.
#[test]
fn guest_migrates_between_two_daemons_with_rbd_images() -> Result<()> {
    let ceph = Ceph::start()?;
    let disk = |number: u8, lock: &str| -> Result<String> {
        let image = format!("rbd/m{number}");
        ceph.rbd(&["create", &image, "--size", "32M"])?;
        let same = format!("serial=RBD-{number},wwn=500000000000001{number}");
        Ok(format!(
            "d{number}={},lock={lock},{same}",
            ceph.disk(&image)
        ))
    };
    let disks = [disk(1, "while-active")?, disk(2, "cooperative")?];
    let describe = |daemon: DaemonBuilder| {
        let daemon = disks.iter().fold(daemon, |daemon, disk| daemon.disk(disk));
        daemon.vhost_blk("d1").vhost_scsi("c").lun("c/0:0=d2")
    };
    let mut first = Rig::new(describe)?;
    let mut second = first.beside(describe)?;
    let sides = [&first, &second].map(|rig| ["d1", "c"].map(|name| rig.socket(name)).to_vec());
    let sides = Sides::new(
        sides,
        &["packed=on"],
        &[
            "RBD with lock=while-active, blk, packed",
            "RBD with lock=cooperative, scsi, split",
        ],
    );
    let mut guest = sides.machine(0).boot()?;
    guest.wait_for_disks(&DISKS)?;
    let rigs = &mut [&mut first, &mut second];
    migrates(&mut guest, &sides, &DISKS, rigs, |_| Ok(()))?;
    guest.kill()?;
    drop(second);
    Ok(())
}

/// Cancels migrations, and kills their destinations. After each, the guest runs in the source, and only the daemon of the source serves it.
fn fails_to_migrate(
    guest: &mut Guest,
    to: &GuestBuilder,
    source: &Rig,
    destination: &mut Rig,
) -> Result<()> {
    let serves_alone = |guest: &mut Guest, destination: &Rig| -> Result<()> {
        let serves = || {
            (queues_served(source).ok()? > 0 && queues_served(destination).ok()? == 0).then_some(())
        };
        vm::wait_until(LIMIT, serves).context("not only the source serves queues")?;
        guest.ok("dd if=/dev/vda of=/dev/null bs=4k count=1 iflag=direct && dd if=/dev/sda of=/dev/null bs=4k count=1 iflag=direct")?;
        Ok(())
    };
    for moment in [Moment::Copy, Moment::Switch] {
        guest.cancel_migration(to, moment, || {
            std::thread::sleep(Duration::from_millis(150));
            Ok(())
        })?;
        serves_alone(guest, destination)?;
    }
    for dies in [
        DestinationDies::BeforeConnect,
        DestinationDies::DuringCopy,
        DestinationDies::AtSwitch,
        DestinationDies::AtDeviceState,
    ] {
        guest.fail_migration(to, dies)?;
        serves_alone(guest, destination)?;
    }
    for moment in [Moment::Copy, Moment::Switch] {
        guest.cancel_migration(to, moment, || destination.daemon.kill())?;
        destination.daemon.start_again()?;
        serves_alone(guest, destination)?;
    }
    Ok(())
}

/// Returns the state of a daemon's vhost-user exports.
fn exports_of_guests(rig: &Rig) -> Result<Vec<Value>> {
    let mut status: Value = serde_json::from_str(&rig.daemon.lunette(&["status", "--json"])?)?;
    let exports = status["exports"].as_array_mut().context("exports")?;
    exports.retain(|export| {
        let kind = export["kind"].as_str();
        kind.is_some_and(|kind| kind.starts_with("vhost"))
    });
    Ok(std::mem::take(exports))
}

/// Returns the number of virtqueues that a daemon serves.
fn queues_served(rig: &Rig) -> Result<usize> {
    let exports = exports_of_guests(rig)?;
    let served = exports
        .iter()
        .filter_map(|export| export["served"].as_array());
    Ok(served.map(Vec::len).sum())
}

/// Hosts without shared storage: first the disks `d` and `n` move to the daemon of the destination, over iSCSI and NBD. Then both sides use
/// them there. `n` was in the memory of the source's daemon. The disk `e` is on shared storage, and both daemons have a session with the unit
/// of the disk `u`. The source's daemon is killed and started again while memory is copied, that of the destination after the switch.
#[test]
fn guest_and_its_disks_move_to_another_daemon() -> Result<()> {
    const TARGET: &str = "iqn.2026-11.org.example:d";
    const UNIT: &str = "iqn.2026-11.org.example:u";
    const EXPORTS: [&str; 4] = ["d", "n", "e", "u"];
    const DISKS: [&str; 4] = ["vda", "vdb", "vdc", "vdd"];
    let (portal, nbd) = (free_portal()?.to_string(), free_portal()?.to_string());
    let storage = free_portal()?.to_string();
    let unit = format!("u=iscsi://{storage}/{UNIT}/0,serial=SHARED-4,wwn=5000000000000004");
    let shared = tempfile::NamedTempFile::with_suffix(".raw")?;
    shared.as_file().set_len(32 << 20)?;
    let shared = shared_disk(shared.path(), "e", 3);
    let exports = |daemon: DaemonBuilder, n: &str| {
        let moved = |number: u8, disk: &str| {
            format!("{disk},serial=MOVED-{number},wwn=500000000000000{number}")
        };
        let daemon = daemon.disk(&moved(1, "d=file:d.raw,size=32M"));
        let daemon = daemon.disk(&moved(2, n)).disk(&shared).disk(&unit);
        EXPORTS
            .iter()
            .fold(daemon, |daemon, name| daemon.vhost_blk(name))
    };
    let storage = Rig::new(|daemon| {
        let target = format!("{UNIT}=s");
        let iscsi = [
            "--iscsi",
            &target,
            "--portal",
            &storage,
            "--demo-mode",
            "rw",
        ];
        daemon.disk("s=ram:16M").arguments(iscsi)
    })?;
    let mut source = storage.beside(|daemon| exports(daemon, "n=ram:32M"))?;
    let mut destination = storage.beside(|daemon| {
        let target = format!("{TARGET}=d");
        let iscsi = ["--iscsi", &target, "--portal", &portal, "--demo-mode", "rw"];
        let export = format!("n:{nbd},name=nbd-n,export_name=n");
        let daemon = exports(daemon, "n=file:n.raw,size=32M,cache=writethrough");
        daemon.arguments(iscsi).arguments(["--nbd", &export])
    })?;
    let machine = |rig: &Rig| {
        let sockets = EXPORTS.map(|name| rig.socket(name));
        machine(
            &sockets,
            &["packed=off", "packed=on", "packed=off", "packed=on"],
        )
    };
    let (from, to) = (machine(&source), machine(&destination));
    let mut guest = from.boot()?;
    guest.wait_for_disks(&DISKS)?;
    let loads = Loads::start(&mut guest, &DISKS, 1)?;
    for (disk, copy) in [
        ("d", format!("iscsi://{portal}/{TARGET}/0")),
        ("n", format!("nbd://{nbd}/n,cache=writethrough")),
    ] {
        let mirror = ["disk", "mirror", disk, &copy, "--switch", "--wait"];
        source.daemon.lunette(&mirror)?;
    }
    let serves = |rig: &Rig| {
        let all = || (queues_served(rig).ok()? == DISKS.len()).then_some(());
        let status = || rig.daemon.lunette(&["status"]).unwrap_or_default();
        vm::wait_until(LIMIT, all).with_context(|| format!("disks are not served: {}", status()))
    };
    guest.migrate_while(&to, || {
        source.daemon.kill()?;
        source.daemon.start_again()?;
        serves(&source)
    })?;
    serves(&destination)?;
    destination.daemon.kill()?;
    destination.daemon.start_again()?;
    serves(&destination)?;
    ensure!(queues_served(&source)? == 0);
    loads.verify(&mut guest)?;
    kernel_is_content(&mut guest)?;
    guest.kill()?;
    drop((source, destination));
    Ok(())
}

/// The daemon with running queues has the lock of a file or an image. Requests of the other one wait.
#[test]
fn lock_follows_the_queues_of_two_daemons() -> Result<()> {
    let (_folder, first, second) = two_daemons()?;
    const CONFLICT: &str = "another process has locked the file";
    lock_follows_the_queues("d", CONFLICT, &first, &second)?;
    lock_follows_the_queues("e", CONFLICT, &first, &second)?;
    drop(second);
    Ok(())
}

fn lock_follows_the_queues(export: &str, conflict: &str, first: &Rig, second: &Rig) -> Result<()> {
    let connect = |rig: &Rig| FrontEnd::connect(&rig.socket(export), &Options::default());
    let mut ends = [connect(first)?, connect(second)?];
    let start = |end: &mut FrontEnd| {
        BlkQueue::start(end, 0, &QueueOptions::default(), 4, 4096, Layout::Separate)
    };
    let mut queue = start(&mut ends[0])?;
    for round in 1..4u8 {
        ensure!(queue.write(0, &[round; 4096])? == status::OK);
        let (here, there) = (usize::from(round + 1) % 2, usize::from(round) % 2);
        let mut next = start(&mut ends[there])?;
        let slot = next.take().context("a free slot")?;
        ensure!(next.submit(slot, kind::IN, 0, 0, 4096));
        next.publish();
        let waits = next.wait_for(Duration::from_millis(300));
        ensure!(
            matches!(waits, Err(vhost_frontend::Error::Timeout(_))),
            "{waits:?}"
        );
        let other = if there == 1 { second } else { first };
        let shown = other.daemon.ask(&["status"])?.stdout;
        let shown = String::from_utf8(shown)?;
        ensure!(shown.contains(conflict), "{shown}");
        ends[here].stop_queue(0)?;
        let done = next.wait_for(LIMIT)?;
        let mut read = [0; 4096];
        next.data(slot).read(0, &mut read);
        ensure!(done.status == status::OK && read == [round; 4096]);
        next.release(slot);
        queue = next;
    }
    Ok(())
}

/// The size that one daemon has set is valid for the first request in the other daemon, and reaches the guest as a change of the capacity.
#[test]
fn size_set_by_one_daemon_is_valid_in_the_other_one() -> Result<()> {
    let (_folder, first, second) = two_daemons()?;
    size_is_valid_in_the_other_daemon("d", &first, &second)?;
    size_is_valid_in_the_other_daemon("e", &first, &second)?;
    drop(second);
    Ok(())
}

fn size_is_valid_in_the_other_daemon(export: &str, first: &Rig, second: &Rig) -> Result<()> {
    let connect = |rig: &Rig| FrontEnd::connect(&rig.socket(export), &Options::default());
    let mut ends = [connect(first)?, connect(second)?];
    let start = |end: &mut FrontEnd| {
        BlkQueue::start(end, 0, &QueueOptions::default(), 4, 4096, Layout::Separate)
    };
    let mut queue = start(&mut ends[0])?;
    ensure!(queue.write(0, &[1; 4096])? == status::OK);
    let resized = first.daemon.ask(&["disk", "resize", export, "64M"])?;
    ensure!(resized.status.success(), "{resized:?}");
    ensure!(queue.write(48 << 20, &[2; 4096])? == status::OK);
    ends[0].stop_queue(0)?;
    let mut queue = start(&mut ends[1])?;
    let mut read = [0; 4096];
    ensure!(queue.read(48 << 20, &mut read)? == status::OK && read == [2; 4096]);
    ensure!(queue.write(48 << 20, &[3; 4096])? == status::OK);
    let begin = Instant::now();
    // Offset 0 of the configuration space is the capacity in sectors.
    while ends[1].config(0, 8)? != (64_u64 << 11).to_le_bytes() {
        ensure!(begin.elapsed() < LIMIT, "the old capacity is shown");
        std::thread::sleep(Duration::from_millis(20));
    }
    let resized = second.daemon.ask(&["disk", "resize", export, "65M"])?;
    ensure!(resized.status.success(), "{resized:?}");
    ends[1].stop_queue(0)?;
    // The first daemon learns the size with its next use, the backup.
    let copy = first.scratch.file(&format!("{export}-copy.raw"));
    let target = format!("file:{}", copy.display());
    let words = ["disk", "backup", export, &target, "--at", "end", "--wait"];
    let begin = Instant::now();
    loop {
        let backup = first.daemon.ask(&words)?;
        if backup.status.success() {
            break;
        }
        // Ceph reports the new size before the use, other storage does not. The size is adopted soon after the refusal.
        let stderr = String::from_utf8_lossy(&backup.stderr);
        let is_resized = stderr.contains("another daemon has resized the disk");
        ensure!(is_resized && begin.elapsed() < LIMIT, "{stderr}");
    }
    ensure!(std::fs::metadata(copy)?.len() == 65 << 20);
    Ok(())
}

/// Same for librbd's exclusive lock. A reopened image gets its lock back before its I/O continues.
#[test]
fn lock_of_an_rbd_image_follows_the_queues_of_two_daemons() -> Result<()> {
    const CONFLICT: &str = "image rbd/t: another client has the exclusive lock";
    let ceph = Ceph::start()?;
    for image in ["rbd/t", "rbd/u"] {
        ceph.rbd(&["create", image, "--size", "32M"])?;
    }
    let disk = |name: &str, rest: &str| {
        let image = ceph.disk(&format!("rbd/{name}"));
        format!("{name}={image},lock=while-active,serial={name}{rest}")
    };
    let describe = |daemon: DaemonBuilder| {
        daemon
            .disk(&disk("t", ",wwn=5000000000000021"))
            .disk(&disk("u", ",wwn=5000000000000022,lock_timeout=1"))
            .vhost_blk("t")
            .vhost_blk("u")
    };
    let first = Rig::new(describe)?;
    let second = first.beside(describe)?;
    lock_follows_the_queues("t", CONFLICT, &first, &second)?;
    size_is_valid_in_the_other_daemon("t", &first, &second)?;
    lock_times_out_and_survives_a_reopen(&ceph, &first, &second)?;
    drop(second);
    Ok(())
}

fn lock_times_out_and_survives_a_reopen(ceph: &Ceph, first: &Rig, second: &Rig) -> Result<()> {
    let connect = |rig: &Rig| FrontEnd::connect(&rig.socket("u"), &Options::default());
    let mut ends = [connect(first)?, connect(second)?];
    let start = |end: &mut FrontEnd| {
        BlkQueue::start(end, 0, &QueueOptions::default(), 4, 4096, Layout::Separate)
    };
    let mut mine = start(&mut ends[0])?;
    ensure!(mine.write(0, &[1; 4096])? == status::OK);
    let mut events = Events::listen(&second.daemon.control())?;
    let mut other = start(&mut ends[1])?;
    ensure!(other.write(0, &[2; 4096])? == status::IOERR);
    let resized = second.daemon.ask(&["disk", "resize", "u", "48M"])?;
    ensure!(!resized.status.success(), "without the lock: {resized:?}");
    for event in ["disk.lock_waiting", "disk.lock_timeout"] {
        while events.hear()?.0 != event {}
    }

    ends[0].stop_queue(0)?;
    while events.hear()?.0 != "disk.lock_resumed" {}
    ensure!(other.write(0, &[3; 4096])? == status::OK);
    ends[1].stop_queue(0)?;

    let mut mine = start(&mut ends[0])?;
    ensure!(mine.write(0, &[4; 4096])? == status::OK);
    let address = blocklist(ceph, "rbd/u", first)?;
    ceph.ceph(&["osd", "blocklist", "rm", &address])?;
    ensure!(mine.write(0, &[5; 4096])? == status::OK, "after a reopen");
    let mut other = start(&mut ends[1])?;
    ensure!(other.write(0, &[6; 4096])? == status::IOERR);
    ends[0].stop_queue(0)?;
    while events.hear()?.0 != "disk.lock_resumed" {}
    let mut read = [0; 4096];
    ensure!(other.read(0, &mut read)? == status::OK && read == [5; 4096]);
    ensure!(other.write(0, &[7; 4096])? == status::OK);
    Ok(())
}

/// Blocklists the client that holds the lock of an image until its daemon shows it. Returns the address.
fn blocklist(ceph: &Ceph, image: &str, holder: &Rig) -> Result<String> {
    let locks: Value =
        serde_json::from_str(&ceph.rbd(&["lock", "ls", image, "--format", "json"])?)?;
    let address = locks[0]["address"].as_str().context("no lock")?.to_owned();
    ceph.ceph(&["osd", "blocklist", "add", &address])?;
    let shown = vm::wait_until(Duration::from_secs(60), || {
        let shown = holder.daemon.lunette(&["disk", "show", "u"]).ok()?;
        shown.contains("blocklisted").then_some(())
    });
    shown.context("the disk is not unavailable")?;
    Ok(address)
}

/// The other daemon would continue with the old file.
#[test]
fn no_job_moves_a_disk_of_two_daemons_to_another_file() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = |name: &str| folder.path().join(name);
    create_image(&file("base.qcow2"), &["8M"])?;
    create_image(&file("s.qcow2"), &["--backing", "base.qcow2"])?;
    std::fs::write(file("d.raw"), vec![0; 8 << 20])?;
    let rig = Rig::new(|daemon| {
        daemon
            .disk(&shared_disk(&file("d.raw"), "d", 1))
            .disk(&shared_disk(&file("s.qcow2"), "s", 2))
            .disk("r=ram:8M")
    })?;
    let new = file("new").display().to_string();
    let target = format!("file:{new}");
    let turns = format!("{target},lock=while-active");
    for words in [
        &["disk", "mirror", "d", &target][..],
        &["disk", "mirror", "s", &target],
        &["disk", "snapshot", "d", "--to", &new],
        &["disk", "snapshot", "s", "--to", &new],
        &["disk", "commit", "s"],
        &["disk", "mirror", "r", &turns],
        // The other daemon's writes would change a point in time.
        &["disk", "backup", "d", &target],
    ] {
        let refused = rig.daemon.ask(words)?;
        let stderr = String::from_utf8(refused.stderr)?;
        ensure!(!refused.status.success(), "{words:?}");
        ensure!(stderr.contains("lock=while-active"), "{words:?}: {stderr}");
        ensure!(!file("new").exists(), "{words:?}");
    }
    let at_end = ["disk", "backup", "d", &target, "--at", "end", "--wait"];
    rig.daemon.lunette(&at_end)?;
    rig.daemon.lunette(&["disk", "stream", "s", "--wait"])?;
    Ok(())
}

/// A log that misses pages is the fault of the front end, not of the driver.
#[test]
fn log_line_for_a_small_dirty_log_names_the_front_end() -> Result<()> {
    let mut rig = Rig::new(|daemon| daemon.disk("d=ram:1M").vhost_blk("d"))?;
    let mut front_end = FrontEnd::connect(&rig.socket("d"), &Options::default())?;
    let options = QueueOptions::default();
    let mut queue = BlkQueue::start(&mut front_end, 0, &options, 4, 4096, Layout::Separate)?;
    front_end.set_log(&LogMemory::of_bytes(8)?)?;
    front_end.log_data(true)?;
    queue.write(0, &[1; 4096]).ok();
    front_end.channel().wait_closed(LIMIT)?;
    let log = rig.daemon.process().log();
    let expected = "front end violated the protocol, queue stopped: the dirty log is too small";
    ensure!(log.contains(expected), "{log}");
    ensure!(!log.contains("driver violated"), "{log}");
    Ok(())
}
