//! Damaged state files: each kind, empty, truncated, with a flipped bit, unreadable or missing, has the outcome listed in
//! docs/operations.md. Takes: 15 s.
#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant, SystemTime};

use control::objects::Bitmap;
use control::{StateFile, Status};
use end_to_end::{Context, DaemonBuilder, IscsiSession, Result, Scratch, bail, ensure};
use rustix::fs::{XattrFlags, getxattr, setxattr};
use serde_json::{Value, json};
use vhost_frontend::{BlkQueue, FrontEnd, Layout, Options, QueueOptions};
use vm::workspace;

const TARGET: &str = "iqn.2026-11.org.example:t0";
const UNIT_TARGET: &str = "iqn.2026-11.org.example:unit";
const SOON: Duration = Duration::from_secs(60);

/// LUNs of the disks with a reservation, with SWP, with a sanitize operation, on a file that cannot have an attribute, and in RAM.
const RESERVED: u8 = 0;
const PROTECTED: u8 = 1;
const SANITIZED: u8 = 2;
const READ_ONLY: u8 = 3;
const RAM: u8 = 4;

/// Disks whose identity is an attribute of their file.
const DISKS_WITH_ATTRIBUTE: [&str; 4] = ["d0", "d1", "d2", "d5"];
const BITMAPS: &str = "bitmaps/d5.json";
const ATTRIBUTE: &str = "user.lunette.identity";

const READ: [u8; 10] = [0x28, 0, 0, 0, 0, 0, 0, 0, 1, 0];
const WRITE: [u8; 10] = [0x2a, 0, 0, 0, 0, 0, 0, 0, 1, 0];

/// Answer of a unit: GOOD, CHECK CONDITION with sense key, ASC and ASCQ, BUSY, or RESERVATION CONFLICT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Answer {
    Good,
    Check(u8, u8, u8),
    Busy,
    Conflict,
}
use Answer::{Busy, Check, Conflict, Good};

/// DATA PROTECT, WRITE PROTECTED.
const SWP: Answer = Check(0x07, 0x27, 0x00);
/// ILLEGAL REQUEST, LOGICAL UNIT NOT SUPPORTED.
const ABSENT: Answer = Check(0x05, 0x25, 0x00);

/// Damage to a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Damage {
    Empty,
    Half,
    EndCut,
    FirstBit,
    MiddleBit,
    LastBit,
    /// Replaced by a folder, because root can read a file of any mode.
    Unreadable,
    Gone,
}

const ALL: [Damage; 8] = [
    Damage::Empty,
    Damage::Half,
    Damage::EndCut,
    Damage::FirstBit,
    Damage::MiddleBit,
    Damage::LastBit,
    Damage::Unreadable,
    Damage::Gone,
];

impl Damage {
    fn apply(self, path: &Path) -> Result<()> {
        let mut bytes = fs::read(path)?;
        let length = bytes.len();
        match self {
            Damage::Empty => bytes.clear(),
            Damage::Half => bytes.truncate(length / 2),
            Damage::EndCut => bytes.truncate(length - 2),
            Damage::FirstBit => bytes[0] ^= 1,
            Damage::MiddleBit => bytes[length / 2] ^= 1,
            Damage::LastBit => bytes[length - 1] ^= 1,
            Damage::Unreadable | Damage::Gone => {}
        }
        match self {
            Damage::Unreadable => {
                fs::remove_file(path)?;
                fs::create_dir(path)?;
            }
            Damage::Gone => fs::remove_file(path)?,
            _ => fs::write(path, bytes)?,
        }
        Ok(())
    }
}

/// Outcomes of a damaged file and of a missing file.
enum Outcome {
    /// READ through this LUN.
    Read(u8, Answer, Answer),
    /// The disk of this LUN is unavailable. Without the file it has a new identity.
    Unavailable(u8),
    /// The disk on a unit is unavailable. Without the file it accepts any unit.
    NoUnit,
    /// The iSCSI disk is unavailable. Without the file it has a new initiator name.
    NoInitiator,
    /// The daemon does not start. Without the file it starts.
    NoStart,
    /// The bitmap requires a full copy. Without the record there is no bitmap.
    Everything { names_known: bool },
    /// The status lists the file, and the export is in write-through mode. Without the file it has the default mode.
    WriteThrough,
    /// The status lists the file. The next driver replaces it.
    Shown,
}

/// The table of docs/operations.md. The row `daemon` needs a Ceph cluster and is tested in `scsi_exec`. Locks have no content.
const TABLE: [(&str, Outcome); 14] = [
    ("reservations", Outcome::Read(RESERVED, Busy, Good)),
    ("mode-pages", Outcome::Read(PROTECTED, Busy, Good)),
    ("sanitize", Outcome::Read(SANITIZED, Busy, Good)),
    ("ports", Outcome::Read(RESERVED, Busy, Conflict)),
    ("identity", Outcome::Unavailable(READ_ONLY)),
    ("identities", Outcome::Unavailable(RAM)),
    ("unit", Outcome::NoUnit),
    ("changes", Outcome::NoStart),
    ("resizing", Outcome::NoStart),
    ("bitmaps", Outcome::Everything { names_known: false }),
    ("bitmap-bits", Outcome::Everything { names_known: true }),
    ("initiator", Outcome::NoInitiator),
    ("cache-mode", Outcome::WriteThrough),
    ("last-disk", Outcome::Shown),
];

/// Kinds that each need a separate start, because they hide the outcome of others.
const ALONE: [&str; 4] = ["ports", "changes", "resizing", "bitmap-bits"];

struct StateRig {
    scratch: Scratch,
    /// Daemon with the unit of `d7`. Stopped before its folder is removed.
    _unit: end_to_end::Daemon,
    of_unit: Scratch,
    /// Copy of the state folder after a clean stop, with files of all kinds.
    saved: PathBuf,
    /// File name of each kind.
    files: BTreeMap<String, String>,
    /// Modification time of the disk with a bitmap. Later starts change it, and the saved record has this one.
    written: SystemTime,
}

fn builder(scratch: &Scratch) -> DaemonBuilder {
    // The start is detected by lines in the log, so an old log must not exist.
    fs::remove_file(scratch.file("lunette.log")).ok();
    let file = |name: &str| scratch.file(name).display().to_string();
    let disk = |name: &str, options: &str| format!("{name}=file:{},{options}", file(name));
    let unit = fs::read_to_string(scratch.file("unit"));
    let unit = unit.unwrap_or_else(|_| "127.0.0.1:9/iqn.2026-11.org.example:none".to_owned());
    DaemonBuilder::new(scratch)
        .disk(&disk("d0", "size=16M,cache=writeback"))
        .disk(&disk("d1", "size=16M,cache=writeback"))
        .disk(&disk("d2", "size=16M,cache=writeback"))
        .disk(&disk("d3", "cache=writeback,ro=on"))
        .disk("d4=ram:16M")
        .disk(&disk("d5", "size=16M,cache=writeback"))
        // No target listens there, but the initiator name is read.
        .disk("d6=iscsi://127.0.0.1:9/iqn.2026-11.org.example:none/0")
        .disk(&format!("d7=iscsi://{unit}/0"))
        .vhost_blk("d5")
        .arguments(["--iscsi", &format!("{TARGET}=d0,d1,d2,d3,d4")])
        .arguments([
            "--portal",
            "127.0.0.1:0",
            "--demo-mode",
            "rw",
            "--workers",
            "1",
        ])
}

/// A daemon with a session of an unregistered initiator.
struct Served {
    daemon: end_to_end::Daemon,
    session: IscsiSession,
}

/// Starts a daemon whose target has a unit for the disk `d7` of the daemons in `scratch`.
fn unit_for(scratch: &Scratch, own: &Scratch) -> Result<end_to_end::Daemon> {
    let mut daemon = DaemonBuilder::new(own)
        .disk("u=ram:1M")
        .arguments(["--iscsi", &format!("{UNIT_TARGET}=u")])
        .arguments(["--portal", "127.0.0.1:0", "--demo-mode", "rw"])
        .start()?;
    let portal = portal(&mut daemon, UNIT_TARGET)?;
    fs::write(scratch.file("unit"), format!("{portal}/{UNIT_TARGET}"))?;
    Ok(daemon)
}

fn portal(daemon: &mut end_to_end::Daemon, target: &str) -> Result<String> {
    let log = daemon.process().log();
    let line = log
        .lines()
        .rev()
        .find_map(|line| line.strip_prefix(&format!("ready iscsi {target} ")));
    Ok(line.context("no portal")?.trim().to_owned())
}

impl Served {
    fn start(scratch: &Scratch) -> Result<Served> {
        let mut daemon = builder(scratch).start()?;
        let session = IscsiSession::login_only(&portal(&mut daemon, TARGET)?, TARGET, 2)?;
        Ok(Served { daemon, session })
    }

    /// Sends REGISTER with APTPL and RESERVE with the type exclusive access, as another initiator.
    fn reserve(&mut self) -> Result<()> {
        let mut holder = IscsiSession::login(&portal(&mut self.daemon, TARGET)?, TARGET, 1)?;
        let mut register = [0; 24];
        (register[15], register[20]) = (7, 1);
        let mut reserve = [0; 24];
        reserve[7] = 7;
        for (action, kind, list) in [(0, 0, register), (1, 3, reserve)] {
            let cdb = [0x5f, action, kind, 0, 0, 0, 0, 0, 24, 0];
            ensure!(holder.command(&cdb, Some(&list), 0)?.status == 0);
        }
        Ok(())
    }

    fn answer(&mut self, lun: u8, cdb: &[u8], out: Option<&[u8]>) -> Result<Answer> {
        for _ in 0..8 {
            let done = self.session.command_on(lun, cdb, out, 512)?;
            return Ok(match (done.status, done.sense.as_slice()) {
                (0, _) => Good,
                (8, _) => Busy,
                (0x18, _) => Conflict,
                // A unit attention.
                (2, sense) if sense.len() >= 14 && sense[2] & 0x0f == 6 => continue,
                (2, sense) if sense.len() >= 14 => Check(sense[2] & 0x0f, sense[12], sense[13]),
                other => bail!("status {other:?}"),
            });
        }
        bail!("unit attentions without end")
    }

    fn read(&mut self, lun: u8) -> Result<Answer> {
        self.answer(lun, &READ, None)
    }

    fn state(&self) -> Result<Vec<StateFile>> {
        Ok(serde_json::from_str(
            &self.daemon.lunette(&["state", "list", "--json"])?,
        )?)
    }

    fn status(&self) -> Result<Status> {
        let output = self.daemon.ask(&["status", "--json"])?;
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// Returns the state of a disk, and the reason if it is unavailable.
    fn state_of(&self, disk: &str) -> Result<(String, String)> {
        let disks = self.status()?.disks;
        let found = disks.into_iter().find(|found| found.name == disk);
        let found = found.context("no such disk")?;
        Ok((found.state, found.reason.unwrap_or_default()))
    }

    fn bitmaps(&self) -> Result<Vec<Bitmap>> {
        let words = ["disk", "bitmap", "list", "--json"];
        Ok(serde_json::from_str(&self.daemon.lunette(&words)?)?)
    }

    /// Returns true if `writeback` in the configuration space is set (virtio 1.3, 5.2.4).
    fn is_write_back(&self, scratch: &Scratch) -> Result<bool> {
        let front_end = FrontEnd::connect(&scratch.socket("d5.sock"), &Options::default())?;
        Ok(front_end.config(32, 1)? == [1])
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to)?;
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        match entry.file_type()?.is_dir() {
            true => copy(&entry.path(), &to)?,
            false => drop(fs::copy(entry.path(), to)?),
        }
    }
    Ok(())
}

impl StateRig {
    fn state(&self) -> PathBuf {
        self.scratch.socket("state")
    }

    /// Starts a daemon that writes files of all kinds.
    fn new() -> Result<StateRig> {
        let (scratch, of_unit) = (Scratch::new()?, Scratch::new()?);
        fs::write(scratch.file("d3"), [0; 1 << 20])?;
        let unit = unit_for(&scratch, &of_unit)?;
        let mut served = Served::start(&scratch)?;
        // MODE SELECT(6) with SP: the control mode page with SWP.
        let select = [0x15, 0x11, 0, 0, 16, 0];
        let page = [
            0, 0, 0, 0, 0x0a, 0x0a, 0x20, 0x10, 0x08, 0, 0, 0, 0, 0, 0, 0,
        ];
        ensure!(served.answer(PROTECTED, &select, Some(&page))? == Good);
        // SANITIZE, block erase.
        let sanitize = [0x48, 0x02, 0, 0, 0, 0, 0, 0, 0, 0];
        ensure!(served.answer(SANITIZED, &sanitize, None)? == Good);
        served.reserve()?;
        // A driver disables the write cache with VIRTIO_BLK_F_CONFIG_WCE.
        let mut front_end = FrontEnd::connect(&scratch.socket("d5.sock"), &Options::default())?;
        let options = QueueOptions::default();
        drop(BlkQueue::start(
            &mut front_end,
            0,
            &options,
            16,
            1 << 20,
            Layout::Separate,
        )?);
        front_end.write_config(32, &[0])?;
        drop(front_end);
        let target = format!("file:{}", scratch.file("backup").display());
        let words = [
            "disk",
            "backup",
            "d5",
            &target,
            "--incremental",
            "daily",
            "--wait",
        ];
        served.daemon.lunette(&words)?;
        served
            .daemon
            .lunette(&["disk", "limit", "d1", "iops=100000"])?;
        let names: Vec<StateFile> = served.state()?;
        served.daemon.stop(SOON)?;

        let written = fs::metadata(scratch.file("d5"))?.modified()?;
        let saved = scratch.file("saved");
        let state = scratch.socket("state");
        copy(&state, &saved)?;
        // A kill interrupts a resize.
        let fault = ["env", "LUNETTE_FAULT=after-begin-resize"];
        let mut daemon = builder(&scratch).under(&fault).start()?;
        let resized = daemon.ask(&["disk", "resize", "d1", "32M"])?;
        let error_text = String::from_utf8_lossy(&resized.stderr);
        ensure!(error_text.contains("connection closed"), "{error_text}");
        daemon.process().wait(SOON)?;
        let resizing = "resizing.json".to_owned();
        fs::copy(state.join(&resizing), saved.join(&resizing))?;

        let mut files: BTreeMap<String, String> = BTreeMap::new();
        for file in names {
            ensure!(!file.kind.is_empty(), "{} is of no kind", file.file);
            ensure!(file.condition == "good", "{file:?}");
            files.insert(file.kind, file.file);
        }
        files.insert("resizing".to_owned(), resizing);
        let rig = StateRig {
            scratch,
            _unit: unit,
            of_unit,
            saved,
            files,
            written,
        };
        for (kind, _) in &TABLE {
            ensure!(rig.files.contains_key(*kind), "no file of kind {kind}");
        }
        if let Ok(release) = std::env::var("LUNETTE_RECORD") {
            rig.record(&workspace().join("tests/compat").join(release).join("state"))?;
        }
        Ok(rig)
    }

    /// Records the state as a sample of a release: the folder, the attributes of the disks' files, and the identity of the unit.
    fn record(&self, sample: &Path) -> Result<()> {
        copy(&self.saved, &sample.join("folder"))?;
        fs::create_dir_all(sample.join("attributes"))?;
        for disk in DISKS_WITH_ATTRIBUTE {
            let mut value = [0; 512];
            let length = getxattr(self.scratch.file(disk), ATTRIBUTE, &mut value)?;
            fs::write(sample.join("attributes").join(disk), &value[..length])?;
        }
        let unit = self.of_unit.socket("state").join("identities.json");
        fs::copy(unit, sample.join("unit-identities.json"))?;
        Ok(())
    }

    /// Restores the state folder, damages the files of some kinds, and returns their paths.
    fn damage(&self, kinds: &[&str], damage: Damage) -> Result<Vec<PathBuf>> {
        fs::File::options()
            .write(true)
            .open(self.scratch.file("d5"))?
            .set_modified(self.written)?;
        fs::remove_dir_all(self.state())?;
        copy(&self.saved, &self.state())?;
        if !kinds.contains(&"resizing") {
            fs::remove_file(self.state().join("resizing.json"))?;
        }
        let paths = kinds
            .iter()
            .map(|kind| self.state().join(&self.files[*kind]));
        let paths: Vec<PathBuf> = paths.collect();
        for path in &paths {
            damage.apply(path)?;
        }
        Ok(paths)
    }

    fn check(
        &self,
        served: &mut Served,
        kind: &str,
        outcome: &Outcome,
        damage: Damage,
    ) -> Result<()> {
        let is_gone = damage == Damage::Gone;
        let file = &self.files[kind];
        let status = served.status()?;
        let is_shown = status.damaged_state.iter().any(|one| one.file == *file);
        match outcome {
            Outcome::Read(lun, damaged, gone) => {
                ensure!(is_shown != is_gone, "{:?}", status.damaged_state);
                let expected = if is_gone { gone } else { damaged };
                let found = served.read(*lun)?;
                ensure!(found == *expected, "READ gives {found:?}");
                if kind == "reservations" && !is_gone {
                    let listed = served.daemon.ask(&["reservation", "list"])?;
                    let text = String::from_utf8_lossy(&listed.stdout).into_owned();
                    ensure!(listed.status.code() == Some(1), "{listed:?}");
                    ensure!(text.contains("unknown: "), "{text}");
                }
            }
            Outcome::Unavailable(lun) => {
                ensure!(is_shown != is_gone, "{:?}", status.damaged_state);
                let expected = if is_gone { Good } else { ABSENT };
                let found = served.read(*lun)?;
                ensure!(found == expected, "READ gives {found:?}");
                let (state, reason) = served.state_of(&format!("d{lun}"))?;
                ensure!(
                    is_gone || state == "unavailable" && reason.contains(file),
                    "{reason}"
                );
            }
            Outcome::NoUnit => {
                ensure!(is_shown != is_gone, "{:?}", status.damaged_state);
                let (state, reason) = served.state_of("d7")?;
                let expected = if is_gone { "ready" } else { "unavailable" };
                ensure!(state == expected, "{state}: {reason}");
                ensure!(reason.contains(file) != is_gone, "{reason}");
            }
            Outcome::NoInitiator => {
                let (_, reason) = served.state_of("d6")?;
                ensure!(reason.contains(file) != is_gone, "{reason}");
            }
            Outcome::NoStart => bail!("the daemon started"),
            Outcome::Everything { names_known } => {
                let bitmaps = served.bitmaps()?;
                if is_gone && !names_known {
                    ensure!(bitmaps.is_empty(), "{bitmaps:?}");
                    return Ok(());
                }
                let [bitmap] = &bitmaps[..] else {
                    bail!("{bitmaps:?}")
                };
                ensure!(bitmap.disk == "d5" && bitmap.reason.is_some(), "{bitmap:?}");
                ensure!((bitmap.name == "daily") == *names_known, "{bitmap:?}");
                ensure!(is_shown != *names_known, "{:?}", status.damaged_state);
            }
            Outcome::WriteThrough => {
                ensure!(is_shown != is_gone, "{:?}", status.damaged_state);
                ensure!(served.is_write_back(&self.scratch)? == is_gone);
            }
            Outcome::Shown => ensure!(is_shown != is_gone, "{:?}", status.damaged_state),
        }
        Ok(())
    }

    /// Resets all damaged files and checks that their objects are served with default state.
    fn reset(&self, served: &mut Served) -> Result<()> {
        let damaged = served.state()?;
        for one in damaged.iter().filter(|one| one.condition == "damaged") {
            let refused = served.daemon.ask(&["state", "reset", &one.file])?;
            ensure!(!refused.status.success(), "no confirmation was needed");
            served
                .daemon
                .lunette(&["state", "reset", &one.file, "--yes"])?;
            // The disk records its unit again, and such a record may be reset at any time.
            if one.kind != "unit" {
                let again = served.daemon.ask(&["state", "reset", &one.file, "--yes"])?;
                ensure!(!again.status.success(), "{} was reset twice", one.file);
            }
            let name = format!("{}.damaged-", one.file);
            let aside = served
                .state()?
                .into_iter()
                .find(|one| one.file.starts_with(&name));
            ensure!(aside.is_some_and(|one| one.condition == "reset"), "{name}");
        }
        ensure!(served.status()?.damaged_state.is_empty());
        Ok(())
    }
}

impl StateRig {
    fn whole_state_has_its_effect(&self) -> Result<()> {
        self.damage(&[], Damage::Empty)?;
        let mut served = Served::start(&self.scratch)?;
        ensure!(served.read(RESERVED)? == Conflict && served.read(PROTECTED)? == Good);
        ensure!(served.answer(PROTECTED, &WRITE, Some(&[0; 512]))? == SWP);
        for lun in [SANITIZED, READ_ONLY, RAM] {
            ensure!(served.read(lun)? == Good, "LUN {lun}");
        }
        ensure!(!served.is_write_back(&self.scratch)?);
        ensure!(served.state_of("d7")?.0 == "ready");
        let bitmaps = served.bitmaps()?;
        let is_whole = bitmaps.len() == 1 && bitmaps[0].reason.is_none();
        ensure!(is_whole, "{bitmaps:?}");
        served.daemon.stop(SOON)?;
        Ok(())
    }

    /// Damages files of several kinds that belong to different objects.
    fn kinds_together(&self, damage: Damage) -> Result<()> {
        let rows = || TABLE.iter().filter(|(kind, _)| !ALONE.contains(kind));
        let kinds: Vec<&str> = rows().map(|(kind, _)| *kind).collect();
        let paths = self.damage(&kinds, damage)?;
        let contents: Vec<_> = paths.iter().map(|path| fs::read(path).ok()).collect();
        let mut served = Served::start(&self.scratch)?;
        for (kind, outcome) in rows() {
            self.check(&mut served, kind, outcome, damage)
                .with_context(|| kind.to_owned())?;
        }
        if damage != Damage::Gone {
            for (path, content) in paths.iter().zip(contents) {
                let stays = fs::read(path).ok() == content;
                ensure!(stays, "{} was replaced", path.display());
            }
            self.reset(&mut served).context("reset")?;
            ensure!(served.answer(PROTECTED, &WRITE, Some(&[0; 512]))? == Good);
            for lun in [RESERVED, PROTECTED, SANITIZED, READ_ONLY, RAM] {
                // An unavailable disk is reopened in the background.
                let begun = Instant::now();
                while served.read(lun)? != Good {
                    ensure!(begun.elapsed() < SOON, "LUN {lun} after the reset");
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
            let begun = Instant::now();
            while served.state_of("d7")?.0 != "ready" {
                ensure!(begun.elapsed() < SOON, "d7 after the reset");
                std::thread::sleep(Duration::from_millis(50));
            }
        }
        served.daemon.stop(SOON)?;
        Ok(())
    }

    fn kind_alone(&self, kind: &str, outcome: &Outcome, damage: Damage) -> Result<()> {
        self.damage(&[kind], damage)?;
        if matches!(outcome, Outcome::NoStart) && damage != Damage::Gone {
            let (status, log) = builder(&self.scratch).start_refused()?;
            let names_file = log.contains(&self.files[kind]) && log.contains("hint: ");
            ensure!(!status.success() && names_file, "{log}");
            return Ok(());
        }
        let mut served = Served::start(&self.scratch)?;
        if !matches!(outcome, Outcome::NoStart) {
            self.check(&mut served, kind, outcome, damage)?;
        }
        if kind == "ports" && damage != Damage::Gone {
            self.reset(&mut served)?;
            let found = served.read(RESERVED)?;
            ensure!(found == Conflict, "the reservation is gone: {found:?}");
        }
        served.daemon.stop(SOON)?;
        Ok(())
    }
}

#[test]
fn damaged_state_of_each_kind_has_its_outcome() -> Result<()> {
    let rig = StateRig::new()?;
    rig.whole_state_has_its_effect()?;
    for damage in ALL {
        let shown = || format!("{damage:?}");
        rig.kinds_together(damage).with_context(shown)?;
        for (kind, outcome) in TABLE.iter().filter(|(kind, _)| ALONE.contains(kind)) {
            let alone = rig.kind_alone(kind, outcome, damage);
            alone.with_context(|| format!("{kind}, {damage:?}"))?;
        }
    }
    Ok(())
}

#[test]
fn reset_moves_only_the_named_file_and_saves_known_state_again() -> Result<()> {
    let scratch = Scratch::new()?;
    fs::write(scratch.file("d3"), [0; 1 << 20])?;
    let state = scratch.socket("state");
    let mut served = Served::start(&scratch)?;
    served.reserve()?;
    let limit = ["disk", "limit", "d1", "iops=100000"];
    served.daemon.lunette(&limit)?;
    let listed = |served: &Served, name: &str| -> Result<Option<StateFile>> {
        let mut files = served.state()?.into_iter();
        Ok(files.find(|one| one.file == name))
    };
    let identity = |served: &Served| served.daemon.lunette(&["disk", "identity", "d4"]);
    let before = identity(&served)?;
    let files = served.state()?.into_iter();
    let saved = files
        .map(|one| one.file)
        .find(|name| name.starts_with("reservations-") && fs::metadata(state.join(name)).is_ok());
    let saved = saved.context("no reservations")?;

    // Copies under other names are not state files, and resetting them leaves the state unchanged.
    for (name, copied) in [
        ("identities.json", "identities-copy.json"),
        ("changes.json", "changes-copy.json"),
        ("ports.saved", "ports-copy.saved"),
        // An escape code for a letter that needs none.
        (&*saved, &*saved.replacen('r', "_72", 1)),
    ] {
        let content = fs::read(state.join(name))?;
        fs::write(state.join(copied), &content)?;
        let found = listed(&served, copied)?.context("not listed")?;
        ensure!(found.kind.is_empty(), "{found:?}");
        let refused = served.daemon.ask(&["state", "reset", copied, "--yes"])?;
        let answer = String::from_utf8_lossy(&refused.stderr);
        ensure!(
            !refused.status.success() && answer.contains("not a state file of this daemon"),
            "{answer}"
        );
        ensure!(fs::read(state.join(name))? == content, "{name} was moved");
    }

    // A file in the old format is ignored if a checksummed file exists.
    let old = saved.replace(".saved", ".state");
    fs::write(state.join(&old), b"old")?;
    let content = fs::read(state.join(&saved))?;
    served.daemon.lunette(&["state", "reset", &old, "--yes"])?;
    ensure!(fs::read(state.join(&saved))? == content && !state.join(&old).exists());

    // The daemon has read these files before they are damaged.
    for name in [&*saved, "ports.saved", "identities.json"] {
        let content = fs::read(state.join(name))?;
        fs::write(state.join(name), [&content[..], b"x"].concat())?;
        let answer = served.daemon.lunette(&["state", "reset", name, "--yes"])?;
        ensure!(answer.contains("saved again"), "{name}: {answer}");
        ensure!(fs::read(state.join(name))? == content, "{name} differs");
    }

    // A FIFO would block its reader.
    let fifo = "sanitize-x.saved";
    let made = Command::new("mkfifo").arg(state.join(fifo)).status()?;
    ensure!(made.success());
    let found = listed(&served, fifo)?.context("not listed")?;
    ensure!(
        found.reason.as_deref() == Some("is not a regular file"),
        "{found:?}"
    );
    served.daemon.lunette(&["state", "reset", fifo, "--yes"])?;
    ensure!(listed(&served, fifo)?.is_none());

    served.daemon.stop(SOON)?;
    let mut served = Served::start(&scratch)?;
    ensure!(
        served.read(RESERVED)? == Conflict,
        "the reservation is lost"
    );
    ensure!(
        identity(&served)? == before,
        "the RAM disk has another identity"
    );
    served.daemon.stop(SOON)?;
    Ok(())
}

/// Puts the recorded state of a release into the folders of a daemon and of the daemon with its unit.
fn restore(sample: &Path, scratch: &Scratch, of_unit: &Scratch) -> Result<()> {
    let state = scratch.socket("state");
    copy(&sample.join("folder"), &state)?;
    fs::create_dir_all(of_unit.socket("state"))?;
    fs::copy(
        sample.join("unit-identities.json"),
        of_unit.socket("state").join("identities.json"),
    )?;
    fs::write(scratch.file("d3"), [0; 1 << 20])?;
    for disk in DISKS_WITH_ATTRIBUTE {
        let path = scratch.file(disk);
        // The daemon was killed while d1 was enlarged.
        let size = if disk == "d1" { 32 } else { 16 };
        fs::File::create(&path)?.set_len(size << 20)?;
        let value = fs::read(sample.join("attributes").join(disk))?;
        setxattr(&path, ATTRIBUTE, &value, XattrFlags::empty())?;
    }
    // Both records name files, which are in other folders here. A text without its first line is not checked.
    let text_of = |name: &str| -> Result<String> {
        let text = fs::read_to_string(state.join(name))?;
        let (_, text) = text.split_once('\n').context("no first line")?;
        Ok(text.to_owned())
    };
    let mut record: Value = serde_json::from_str(&text_of(BITMAPS)?)?;
    let file = fs::metadata(scratch.file("d5"))?;
    let left = record["left"].as_object_mut().context("no file")?;
    ensure!(left["path"].is_string() && left["inode"].is_u64());
    let recorded = PathBuf::from(left["path"].as_str().unwrap_or_default());
    let recorded = recorded
        .parent()
        .context("no folder")?
        .display()
        .to_string();
    left["path"] = json!(scratch.file("d5"));
    left["inode"] = json!(file.ino());
    left["changed"] = json!([file.mtime(), file.mtime_nsec()]);
    fs::write(state.join(BITMAPS), record.to_string())?;
    let changes = text_of("changes.json")?;
    let changes = changes.replace(&recorded, &scratch.files().display().to_string());
    Ok(fs::write(state.join("changes.json"), changes)?)
}

#[test]
fn state_of_each_release_has_its_effect() -> Result<()> {
    for entry in fs::read_dir(workspace().join("tests/compat"))? {
        let sample = entry?.path().join("state");
        if !sample.is_dir() {
            continue;
        }
        let (scratch, of_unit) = (Scratch::new()?, Scratch::new()?);
        restore(&sample, &scratch, &of_unit)?;
        let mut unit = unit_for(&scratch, &of_unit)?;
        let mut served = Served::start(&scratch)?;
        for file in served.state()? {
            ensure!(!file.kind.is_empty(), "{file:?}");
            let is_unchecked = file.file == "changes.json";
            let expected = if is_unchecked { "unchecked" } else { "good" };
            ensure!(file.condition == expected, "{file:?}");
        }
        ensure!(served.read(RESERVED)? == Conflict, "reservations");
        ensure!(served.answer(PROTECTED, &WRITE, Some(&[0; 512]))? == SWP);
        ensure!(!served.is_write_back(&scratch)?, "cache mode");
        let identities = fs::read_to_string(sample.join("folder/identities.json"))?;
        let shown = |disk: &str| -> Result<Value> {
            let text = served.daemon.lunette(&["disk", "show", disk, "--json"])?;
            Ok(serde_json::from_str::<Value>(&text)?[0].take())
        };
        let disk = shown("d4")?;
        let identity = disk["status"]["identity"]
            .as_str()
            .with_context(|| disk.to_string())?;
        ensure!(identities.contains(identity), "identities: {identity}");
        let disk = shown("d1")?;
        ensure!(disk["iops"] == 100_000, "changes: {disk}");
        let length = fs::metadata(scratch.file("d1"))?.len();
        ensure!(length == 16 << 20, "the resize was not undone: {length}");
        let bitmaps = served.bitmaps()?;
        ensure!(
            bitmaps.len() == 1 && bitmaps[0].name == "daily",
            "{bitmaps:?}"
        );
        ensure!(bitmaps[0].reason.is_none(), "{bitmaps:?}");
        ensure!(served.state_of("d7")?.0 == "ready", "unit");
        served.daemon.stop(SOON)?;

        // Another unit at the same address.
        unit.stop(SOON)?;
        fs::remove_file(of_unit.socket("state").join("identities.json"))?;
        let _unit = unit_for(&scratch, &of_unit)?;
        let mut served = Served::start(&scratch)?;
        let (state, reason) = served.state_of("d7")?;
        ensure!(state == "unavailable", "{state}: {reason}");
        served.daemon.stop(SOON)?;
    }
    Ok(())
}
