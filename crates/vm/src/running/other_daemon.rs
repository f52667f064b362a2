//! Checks before a guest moves to another daemon: the daemon serves the same disks and can use them after the switch.

use anyhow::{Context, Result, bail, ensure};
use control::objects::{Disk, Job};
use control::{Client, DiskStatus, ExportStatus, Status};
use std::path::Path;
use std::time::Duration;

/// State of a virtio-blk disk: the driver has disabled the write cache. The export has this state, and QEMU does not move it.
const WRITETHROUGH: &str = "writethrough";

/// State of a daemon.
struct Daemon<'a> {
    control: &'a Path,
    status: Status,
    disks: Vec<Disk>,
}

impl<'a> Daemon<'a> {
    fn ask(control: &'a Path, patience: Duration) -> Result<Daemon<'a>> {
        let client = Client::new(control).patient(patience);
        let place = || format!("the daemon at {}", control.display());
        Ok(Daemon {
            control,
            status: client.get("/v1/status").with_context(place)?,
            disks: client.get("/v1/disks").with_context(place)?,
        })
    }

    /// Returns a disk and its summary.
    fn disk(&self, name: &str) -> Option<SharedDisk<'_>> {
        Some(SharedDisk {
            control: self.control,
            disk: self.disks.iter().find(|disk| disk.name == name)?,
            summary: self.status.disks.iter().find(|disk| disk.name == name)?,
        })
    }
}

/// A disk of one of the two daemons.
struct SharedDisk<'a> {
    /// Control socket of its daemon.
    control: &'a Path,
    disk: &'a Disk,
    summary: &'a DiskStatus,
}

impl SharedDisk<'_> {
    fn lock(&self) -> &str {
        let default = match self.disk.backend.as_str() {
            "rbd" => "cooperative",
            _ => "always",
        };
        self.disk.keys.text("lock").unwrap_or(default)
    }

    /// Returns true if the lock lets the other daemon use the disk after this one.
    fn yields(&self) -> bool {
        let is_read_only = self.summary.read_only;
        match self.disk.backend.as_str() {
            "file" | "image" => is_read_only || self.lock() == "while-active",
            "rbd" => self.lock() != "exclusive",
            _ => true,
        }
    }

    /// Checks that no guest or initiator has set state that a migration loses.
    fn check_initiator_state(&self, is_lost: impl Fn(&str) -> bool) -> Result<()> {
        let mut state = self.disk.status.iter().flat_map(|s| &s.initiator_state);
        let Some(kind) = state.find(|kind| is_lost(kind)) else {
            return Ok(());
        };
        let (state, hint) = match kind.as_str() {
            "reservations" => (
                "persistent reservations",
                "show them with lunette reservation show, and clear them in the guest: sg_persist --out --clear --param-rk=KEY /dev/sdX; a RESERVE: sg_raw /dev/sdX 17 00 00 00 00 00",
            ),
            "mode-pages" => (
                "mode pages that differ from the defaults",
                "restore them in the guest: sdparm --defaults --page=ca --save /dev/sdX, the same with --page=co and --page=ie",
            ),
            "sanitize" => (
                "an unfinished SANITIZE or FORMAT UNIT",
                "wait for its end, or repeat it if it has failed",
            ),
            "ejected" => ("an ejected medium", "load it in the guest: eject -t"),
            WRITETHROUGH => (
                "a disabled write cache",
                "enable it in the guest: echo write back > /sys/block/vdX/cache_type",
            ),
            other => (other, "reset it in the guest"),
        };
        bail!(
            "the daemon at {} has {state} for it, which cannot move; hint: {hint}",
            self.control.display()
        );
    }

    /// Returns the hint for a lock that keeps the other daemon from the disk.
    fn lock_hint(&self) -> &'static str {
        match self.disk.backend.as_str() {
            "rbd" => "set lock=cooperative for the disk in both daemons",
            _ => "set lock=while-active for the disk in both daemons",
        }
    }

    fn is_in_memory(&self) -> bool {
        matches!(self.disk.backend.as_str(), "ram" | "null")
    }

    /// Returns true if the disk is a file or an image in a file.
    fn is_file(&self) -> bool {
        matches!(self.disk.backend.as_str(), "file" | "image")
    }

    fn path(&self) -> &str {
        self.summary.path.as_deref().unwrap_or("none")
    }

    /// Returns false if the storage of two disks of the same kind differs.
    fn may_be(&self, other: &SharedDisk<'_>) -> bool {
        let identity = |one: &SharedDisk<'_>| one.disk.status.as_ref().map(|s| s.identity.clone());
        let is_same = identity(self).is_some_and(|identity| !identity.is_empty())
            && identity(self) == identity(other);
        // A relative path depends on the daemon, the name of an RBD image on the cluster.
        let needs_root = self.is_file() || self.disk.backend == "scsi_generic";
        let is_same_cluster = self.disk.backend != "rbd"
            || ["conf", "mon_host"]
                .iter()
                .all(|key| self.disk.keys.text(key) == other.disk.keys.text(key));
        let path = self.summary.path.as_deref();
        let is_same_path = path.is_some_and(|path| !needs_root || Path::new(path).is_absolute())
            && path == other.summary.path.as_deref();
        is_same || (is_same_path && is_same_cluster)
    }
}

/// Checks that the daemon at `to` can take over the exports `moved` of the daemon at `from`. `patience`: time limit of a request.
///
/// # Errors
/// The guest would not find its disks, or would wait for their locks.
pub(super) fn check(from: &Path, to: &Path, moved: &[&str], patience: Duration) -> Result<()> {
    let jobs: Vec<Job> = Client::new(from).patient(patience).get("/v1/jobs")?;
    let (from, to) = (Daemon::ask(from, patience)?, Daemon::ask(to, patience)?);
    let is_moved = |export: &&ExportStatus| moved.contains(&export.name.as_str());
    let place = to.control.display();
    let exports = from.status.exports.iter().filter(is_moved);
    for (export, lun) in exports.flat_map(|one| one.luns.iter().map(move |lun| (one, lun))) {
        let name = &lun.disk;
        let here = from.disk(name).with_context(|| format!("no disk {name}"))?;
        let there = to.disk(name).with_context(|| {
            format!(
                "the daemon at {place} has no disk {name}; hint: lunette disk add --socket {place}"
            )
        })?;
        check_disk(&here, &there, export.kind == "vhost-scsi")
            .with_context(|| format!("disk {name} of the daemon at {place}"))?;
        if let Some(job) = jobs
            .iter()
            .find(|job| job.disk == *name && !job.state.has_ended())
        {
            let cancel = match &job.backup {
                Some(backup) => format!("lunette backup cancel {backup}"),
                None => format!("lunette job cancel {name}"),
            };
            bail!(
                "disk {name} has a {0} job, which cannot move; hint: wait for its end, or {cancel}",
                job.kind
            );
        }
        let others = from
            .status
            .exports
            .iter()
            .filter(|export| !is_moved(export));
        let mut users = others.filter(|export| export.luns.iter().any(|lun| lun.disk == *name));
        if let Some(user) = users.find(|export| export.connected && here.lock() == "while-active") {
            bail!(
                "disk {name} has another client at export {0}, and the daemon keeps the lock for it; hint: end the client, or lunette export remove {0}",
                user.name
            );
        }
    }
    Ok(())
}

/// Checks that the exports `moved` have no state that is lost in a migration to other exports of the daemon.
///
/// # Errors
/// A guest has disabled the write cache of a virtio-blk disk. It would send no flushes after the migration.
pub(super) fn check_within(control: &Path, moved: &[&str], patience: Duration) -> Result<()> {
    let daemon = Daemon::ask(control, patience)?;
    let is_moved = |export: &&ExportStatus| {
        export.kind == "vhost-blk" && moved.contains(&export.name.as_str())
    };
    let exports = daemon.status.exports.iter().filter(is_moved);
    for name in exports.flat_map(|export| &export.luns).map(|lun| &lun.disk) {
        let disk = daemon.disk(name);
        let disk = disk.with_context(|| format!("no disk {name}"))?;
        disk.check_initiator_state(|kind| kind == WRITETHROUGH)
            .with_context(|| format!("disk {name}"))?;
    }
    Ok(())
}

/// Compares the storage of two disks: the identity or path if they have the same back end, otherwise the size. With the same back end, the
/// second daemon may show an old size.
fn check_storage(here: &SharedDisk<'_>, there: &SharedDisk<'_>) -> Result<()> {
    let hint = format!(
        "add the disk again in the daemon at {} with backend {} and path {}",
        there.control.display(),
        here.disk.backend,
        here.path()
    );
    if here.disk.backend == there.disk.backend {
        ensure!(
            here.may_be(there),
            "the storage is another one: {} instead of {}; hint: {hint}",
            there.path(),
            here.path()
        );
        return Ok(());
    }
    ensure!(
        !(here.is_file() && there.is_file()),
        "the back end is {} instead of {}; hint: {hint}",
        there.disk.backend,
        here.disk.backend
    );
    let (ours, theirs) = (here.summary.size, there.summary.size);
    ensure!(
        ours == theirs,
        "the disk has {theirs} bytes instead of {ours}; hint: set the same size in both daemons"
    );
    Ok(())
}

/// Checks that the disk `there` can replace `here` under a guest. `is_scsi`: the guest sends SCSI commands to it.
fn check_disk(here: &SharedDisk<'_>, there: &SharedDisk<'_>, is_scsi: bool) -> Result<()> {
    ensure!(
        !here.is_in_memory() && !there.is_in_memory(),
        "the disk is in the memory of one daemon; hint: use a file or an image that both daemons reach"
    );
    let yields = here.yields() && there.yields();
    let summary = there.summary;
    if summary.state != "ready" {
        let hint = match yields {
            true => format!("lunette status --socket {}", there.control.display()),
            false => here.lock_hint().to_owned(),
        };
        bail!(
            "the disk is {}: {}; hint: {hint}",
            summary.state,
            summary.reason.as_deref().unwrap_or("no reason given")
        );
    }
    check_storage(here, there)?;
    ensure!(
        here.disk.backend != there.disk.backend || yields,
        "lock={} and lock={} do not follow the guest; hint: {}",
        here.lock(),
        there.lock(),
        here.lock_hint()
    );
    let is_lost = |kind: &str| match kind {
        WRITETHROUGH => !is_scsi,
        // Guests with a virtio-blk disk see only that its content is undefined.
        "sanitize" => true,
        _ => is_scsi,
    };
    here.check_initiator_state(is_lost)?;
    // A guest that was killed may have left its choice. This guest has an enabled cache, and sends flushes.
    there.check_initiator_state(|kind| kind != WRITETHROUGH && is_lost(kind))?;
    let shown = |one: &SharedDisk<'_>| {
        let wwn = one.disk.status.as_ref().map_or("", |status| &status.wwn);
        format!(
            "serial={} wwn={wwn} block_size={} read_only={}",
            one.summary.serial, one.summary.block_size, one.summary.read_only
        )
    };
    let (ours, theirs) = (shown(here), shown(there));
    ensure!(
        ours == theirs,
        "the guest would see another disk: {theirs} instead of {ours}; hint: set these keys in both daemons"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    /// Returns a disk as both API calls of a daemon describe it, with changes.
    fn disk(changes: &[(&str, Value)]) -> (Disk, DiskStatus) {
        let mut disk = json!({
            "name": "d", "backend": "file", "lock": "while-active", "path": "/vm/d.raw",
            "size": 1 << 20, "block_size": 512, "identity": "I", "serial": "S", "wwn": "5",
            "read_only": false, "used_by": [], "stack": [], "state": "ready"
        });
        for (key, value) in changes {
            disk[key] = value.clone();
        }
        let keys = ["backend", "lock", "conf", "mon_host"];
        let keys = keys.map(|key| (key.to_owned(), disk[key].clone()));
        let mut body = Disk::new("d", disk["backend"].as_str().unwrap(), keys.to_vec());
        body.status = Some(serde_json::from_value(disk.clone()).unwrap());
        (body, serde_json::from_value(disk).unwrap())
    }

    /// Returns the refusal of a disk of the second daemon, or an empty text.
    fn refusal(here: &[(&str, Value)], there: &[(&str, Value)]) -> String {
        refusal_of(here, there, true)
    }

    fn refusal_of(here: &[(&str, Value)], there: &[(&str, Value)], is_scsi: bool) -> String {
        let (here, there) = (disk(here), disk(there));
        let shared = |(disk, summary), control| SharedDisk {
            control: Path::new(control),
            disk,
            summary,
        };
        let checked = check_disk(
            &shared((&here.0, &here.1), "A"),
            &shared((&there.0, &there.1), "B"),
            is_scsi,
        );
        checked
            .err()
            .map(|error| error.to_string())
            .unwrap_or_default()
    }

    #[test]
    fn only_the_same_disk_of_another_daemon_is_accepted() {
        let other_path = [("identity", json!("")), ("path", json!("/vm/other.raw"))];
        let relative = [("identity", json!("")), ("path", json!("d.raw"))];
        for (here, there, reason) in [
            (&[][..], &[][..], ""),
            // An attribute of the file has the identity, also behind another path.
            (&[], &other_path[1..], ""),
            (&other_path[..1], &other_path[..1], ""),
            (
                &[],
                &other_path,
                "the storage is another one: /vm/other.raw instead of /vm/d.raw",
            ),
            (&relative, &relative, "the storage is another one"),
            (&[], &[("serial", json!("T"))], "serial=T wwn=5"),
            (&[], &[("block_size", json!(4096))], "block_size=4096"),
            (
                &[("backend", json!("ram"))],
                &[],
                "in the memory of one daemon",
            ),
            (
                &[],
                &[("backend", json!("null"))],
                "in the memory of one daemon",
            ),
            (
                &[],
                &[("state", json!("unavailable"))],
                "hint: lunette status --socket B",
            ),
            (
                &[],
                &[("state", json!("unavailable")), ("lock", json!("always"))],
                "hint: set lock=while-active",
            ),
            // One daemon reaches the other one's file over iSCSI.
            (&[("backend", json!("iscsi"))], &other_path, ""),
            (
                &[("backend", json!("iscsi"))],
                &[("size", json!(1 << 19))],
                "the disk has 524288 bytes instead of 1048576",
            ),
            // A daemon that does not use a disk shows the size of its last use.
            (&[], &[("size", json!(1 << 19))], ""),
            // The guest would write raw data over the image.
            (
                &[("backend", json!("image"))],
                &[],
                "hint: add the disk again in the daemon at B with backend image and path /vm/d.raw",
            ),
        ] {
            let refused = refusal(here, there);
            assert_eq!(refused.is_empty(), reason.is_empty(), "{refused}");
            assert!(refused.contains(reason), "{refused}");
        }
    }

    #[test]
    fn locks_must_follow_the_guest() {
        let lock = |backend: &str, lock: &str| [("backend", json!(backend)), ("lock", json!(lock))];
        let always = lock("image", "always");
        assert!(refusal(&always, &always).contains("lock=always"));
        assert!(refusal(&lock("file", "while-active"), &lock("file", "always")).contains("hint"));
        let read_only = [&always[..], &[("read_only", json!(true))]].concat();
        assert_eq!(refusal(&read_only, &read_only), "");
        for (word, is_refused) in [
            ("cooperative", false),
            ("shared", false),
            ("exclusive", true),
        ] {
            let rbd = lock("rbd", word);
            assert_eq!(!refusal(&rbd, &rbd).is_empty(), is_refused, "{word}");
        }
    }

    #[test]
    fn state_that_initiators_have_set_does_not_move() {
        let state = |kind: &str| [("initiator_state", json!([kind]))];
        for (kind, reason) in [
            ("reservations", "has persistent reservations"),
            ("mode-pages", "has mode pages that differ"),
            ("sanitize", "has an unfinished SANITIZE"),
            ("ejected", "has an ejected medium"),
            ("new", "has new for it"),
        ] {
            let here = refusal(&state(kind), &[]);
            assert!(
                here.contains(&format!("the daemon at A {reason}")),
                "{here}"
            );
            let there = refusal(&[], &state(kind));
            assert!(there.contains("the daemon at B"), "{there}");
            let block = refusal_of(&state(kind), &[], false);
            assert_eq!(block.is_empty(), kind != "sanitize", "{block}");
        }
        let uncached = state("writethrough");
        let block = refusal_of(&uncached, &[], false);
        assert!(block.contains("A has a disabled write cache"), "{block}");
        assert_eq!(refusal(&uncached, &[]), "");
    }

    #[test]
    fn rbd_images_of_different_clusters_are_different_disks() {
        let image = |identity: &str, conf: &str, monitors: &str| {
            [
                ("backend", json!("rbd")),
                ("lock", json!("cooperative")),
                ("path", json!("rbd/d")),
                ("identity", json!(identity)),
                ("conf", json!(conf)),
                ("mon_host", json!(monitors)),
            ]
        };
        let here = image("", "/a.conf", "10.0.0.1");
        assert_eq!(refusal(&here, &here), "");
        for there in [
            image("", "/b.conf", "10.0.0.1"),
            image("", "/a.conf", "10.0.0.2"),
        ] {
            assert!(refusal(&here, &there).contains("the storage is another one"));
        }
        let known = image("I", "/a.conf", "10.0.0.1");
        assert_eq!(refusal(&known, &image("I", "/b.conf", "10.0.0.1")), "");
    }
}
