//! Relations between objects: names, references, sockets, storage, workers. Files, flags and requests to the API have the same checks.

use std::collections::{HashMap, HashSet};
use std::hash::Hash;
use std::path::{Component, Path, PathBuf};

use block::ExportPlacement;

use super::devices::BlockDeviceConfig;
use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::location::{Location, Source};
use super::model::{Config, ExportConfig, Transport, WORKERS_MAX};
use super::placement::{WORKER_HELP, no_worker, range};

/// A value of an object, by the index of the object and its key.
#[derive(Clone, Copy)]
pub(super) enum ValueId {
    Control,
    Disk(usize, &'static str),
    Export(usize, &'static str),
    /// Index of a logical unit of an export, and its key; empty: the logical unit.
    Lun(usize, usize, &'static str),
    /// Index of a worker of an export, and its number.
    Worker(usize, usize, u32),
}

/// Returns the location of a value, and its object if the location does not name it. `None`: the value is absent, or wrong by itself.
pub(super) type Locate<'a> = &'a dyn Fn(ValueId) -> Option<(Location, Option<String>)>;

/// Returns all conflicts between the objects of a configuration, with the JSON pointers of their values.
pub fn conflicts(config: &Config) -> Diagnostics {
    let locate = |place| {
        let export = |index: usize| {
            let export = config.exports.get(index)?;
            Some(format!("{} {}", export.kind(), export.name))
        };
        let unit = |index: usize, at: usize| {
            let export = config.exports.get(index)?;
            let lun = export.luns.get(at)?;
            Some(format!("LUN {}:{} of {}", lun.target, lun.lun, export.name))
        };
        let (object, pointer) = match place {
            ValueId::Control => ("the control socket".to_owned(), "/control".to_owned()),
            ValueId::Disk(index, key) => {
                let disk = config.disks.get(index)?;
                (format!("disk {}", disk.name), format!("/{key}"))
            }
            ValueId::Export(index, key) => (export(index)?, format!("/{key}")),
            ValueId::Lun(index, at, "") => (unit(index, at)?, format!("/lun/{at}")),
            ValueId::Lun(index, at, key) => (unit(index, at)?, format!("/lun/{at}/{key}")),
            ValueId::Worker(index, at, _) => (export(index)?, format!("/workers/{at}")),
        };
        let source = Source::flag(&pointer, "", 0);
        Some((Location::whole(&source), Some(object)))
    };
    check(config, &HashMap::new(), true, &locate)
}

/// Returns all conflicts between the objects of a configuration. `resolved` has files of disks without links in their paths. Unless the
/// configuration `is_whole`, certificates and workers are those of another process.
pub(super) fn check(
    config: &Config,
    resolved: &HashMap<PathBuf, PathBuf>,
    is_whole: bool,
    locate: Locate<'_>,
) -> Diagnostics {
    let mistakes = Diagnostics::default();
    let mut to = Report { locate, mistakes };
    check_disks(config, resolved, &mut to);
    check_exports(config, &mut to);
    check_sockets(config, &mut to);
    check_listeners(config, &mut to);
    if is_whole {
        check_resources(config, &mut to);
    }
    to.mistakes
}

struct Report<'a> {
    locate: Locate<'a>,
    mistakes: Diagnostics,
}

impl Report<'_> {
    fn add(&mut self, at: ValueId, message: &str, complete: impl FnOnce(Mistake) -> Mistake) {
        if let Some((location, object)) = (self.locate)(at) {
            let object = object.map_or_else(String::new, |object| format!("{object}: "));
            let message = format!("{object}{message}");
            let mistake = Mistake::new(MistakeKind::Relation, &location, message);
            self.mistakes.push(complete(mistake));
        }
    }

    fn help(&mut self, at: ValueId, message: &str, help: &str) {
        self.add(at, message, |mistake| mistake.help(help));
    }

    /// Reports that another value uses an object.
    fn used(&mut self, at: ValueId, first: ValueId, object: &str, help: &str) {
        if let Some((location, by)) = (self.locate)(first) {
            let first = by.map_or_else(|| format!("at {location}"), |by| format!("by {by}"));
            self.help(at, &format!("{object} is already used {first}"), help);
        }
    }

    /// Records the use of an object, and reports the second one.
    fn once<K: Hash + Eq>(
        &mut self,
        seen: &mut HashMap<K, ValueId>,
        (key, at): (K, ValueId),
        object: impl FnOnce() -> String,
        help: &str,
    ) {
        if let Some(first) = seen.insert(key, at) {
            self.used(at, first, &object(), help);
        }
    }
}

fn check_disks(config: &Config, resolved: &HashMap<PathBuf, PathBuf>, to: &mut Report<'_>) {
    let (mut names, mut wwns) = (HashMap::new(), HashMap::new());
    let (mut images, mut exports, mut files) = (HashMap::new(), HashMap::new(), HashMap::new());
    let help = "use a file or image for one disk only, and give that disk several exports";
    for (index, disk) in config.disks.iter().enumerate() {
        let at = |key| ValueId::Disk(index, key);
        let object = || format!("the disk name `{}`", disk.name);
        let name = (&disk.name, at("name"));
        to.once(&mut names, name, object, "give each disk its own name");
        if let Some(wwn) = disk.shown.wwn {
            let object = || format!("the identifier {wwn:016x}");
            let help = "give each disk its own identifier: initiators treat disks with the same identifier as one disk";
            to.once(&mut wwns, (wwn, at("wwn")), object, help);
        }
        let location =
            |noun: &str| format!("the {noun} {}", disk.backend.location().unwrap_or_default());
        match &disk.backend {
            BlockDeviceConfig::Rbd(rbd) if rbd.image.snapshot.is_some() => {}
            BlockDeviceConfig::Rbd(rbd) => {
                let image = (&rbd.image, &rbd.cluster.conf, &rbd.cluster.mon_host);
                to.once(
                    &mut images,
                    (image, at("image")),
                    || location("image"),
                    help,
                );
            }
            BlockDeviceConfig::Nbd(nbd) => {
                let export = (&nbd.address, at("uri"));
                to.once(&mut exports, export, || location("export"), help);
            }
            backend => {
                let Some(path) = backend.path() else { continue };
                let file = resolved.get(path).cloned();
                let file = (file.unwrap_or_else(|| absolute(path)), at("path"));
                to.once(&mut files, file, || location("file"), help);
            }
        }
    }
}

fn check_exports(config: &Config, to: &mut Report<'_>) {
    let disks = config.disks.iter().map(|disk| disk.name.as_str());
    let disks: Vec<&str> = disks.filter(|name| !name.is_empty()).collect();
    let known: HashSet<&str> = disks.iter().copied().collect();
    let mut names = HashMap::new();
    for (index, export) in config.exports().enumerate() {
        let name = export.name.as_str();
        // Two spellings of an iSCSI name are one target.
        let key = iscsi_name::normalised(name).unwrap_or_else(|| name.into());
        let object = || format!("the export name `{name}`");
        let help = "give each export its own name; without `name` a vhost-blk export has the name of its disk";
        to.once(
            &mut names,
            (key, ValueId::Export(index, "name")),
            object,
            help,
        );

        let disk = export
            .disk
            .iter()
            .map(|disk| (disk, ValueId::Export(index, "disk")));
        let luns = export.luns.iter().enumerate();
        let luns = luns.map(|(at, lun)| (&lun.disk, ValueId::Lun(index, at, "disk")));
        for (disk, at) in disk
            .chain(luns)
            .filter(|(disk, _)| !known.contains(disk.as_str()))
        {
            let message = format!("there is no disk `{disk}`");
            to.add(at, &message, |mistake| mistake.known("disk", disk, &disks));
        }

        let mut addresses = HashMap::new();
        for (at, lun) in export.luns.iter().enumerate() {
            let key = ((lun.target, lun.lun), ValueId::Lun(index, at, ""));
            let object = || format!("target {}, LUN {} of this export", lun.target, lun.lun);
            to.once(
                &mut addresses,
                key,
                object,
                "give each logical unit its own address",
            );
            if let Some(only) = export.only_target().filter(|only| *only != lun.target) {
                let found = lun.target;
                let message =
                    format!("the target number of an iSCSI target is {only}, not {found}");
                to.add(ValueId::Lun(index, at, "target"), &message, |mistake| {
                    mistake
                });
            }
        }
    }
}

fn check_sockets(config: &Config, to: &mut Report<'_>) {
    let mut sockets: HashMap<PathBuf, ValueId> = HashMap::new();
    let control = config.control.as_deref();
    sockets.extend(control.map(|path| (absolute(path), ValueId::Control)));
    let help = "give each export and the control socket its own path; NBD exports share a socket only with each other";
    let mut exports: Vec<_> = config.exports().enumerate().collect();
    exports.sort_by_key(|(_, export)| export.shares_socket());
    for (index, export) in exports {
        let Some(path) = &export.socket else { continue };
        let (key, at) = (absolute(path), ValueId::Export(index, "socket"));
        let first = match export.shares_socket() {
            true => sockets.get(&key).copied(),
            false => sockets.insert(key, at),
        };
        if let Some(first) = first {
            to.used(at, first, &format!("the socket {}", path.display()), help);
        }
    }
}

/// Reports NBD exports that cannot share their listener.
fn check_listeners(config: &Config, to: &mut Report<'_>) {
    let mut first = HashMap::new();
    let exports = config.exports().enumerate();
    for (index, export) in exports.filter(|(_, export)| export.transport == Transport::Nbd) {
        let socket = export.socket.as_ref().map(|socket| (Some(socket), None));
        let address = export.nbd.listen.map(|address| (None, Some(address)));
        let listeners = socket.into_iter().chain(address);
        // The export is compared with the first one of the listener, and with the first one of its name there.
        let keys = listeners.flat_map(|key| [(key, None), (key, Some(export.export_name()))]);
        // Collected, because each key must be in the map, also after a conflict.
        let others: Vec<&ExportConfig> = keys
            .map(|key| *first.entry(key).or_insert(export))
            .collect();
        let mut others = others
            .into_iter()
            .filter(|other| !std::ptr::eq(*other, export));
        if let Some(reason) = others.find_map(|other: &ExportConfig| export.conflict(other)) {
            to.add(ValueId::Export(index, "export_name"), &reason, |mistake| {
                mistake
            });
        }
    }
}

/// Checks that there are a certificate and the workers that exports name, and not too many workers in total.
fn check_resources(config: &Config, to: &mut Report<'_>) {
    let count = config.workers.placement.count();
    let mut dedicated = Vec::new();
    for (index, export) in config.exports().enumerate() {
        if export.nbd.tls && config.tls.certificate.is_none() {
            let message = "TLS needs a certificate, and `tls_certificate` is not set";
            let help = "set tls_certificate and tls_key in the file, or start the daemon with --tls-certificate and --tls-key";
            to.help(ValueId::Export(index, "tls"), message, help);
        }
        match export.placement() {
            ExportPlacement::Shared => {}
            ExportPlacement::Dedicated => dedicated.push(ValueId::Export(index, "dedicated")),
            ExportPlacement::Workers(workers) => {
                let workers = workers.iter().enumerate();
                for (at, worker) in workers.filter(|(_, worker)| **worker as usize >= count) {
                    let at = ValueId::Worker(index, at, *worker);
                    to.add(at, &no_worker(*worker), |mistake| {
                        mistake.allowed(range(count)).help(WORKER_HELP)
                    });
                }
            }
        }
    }
    let all = count + dedicated.len();
    if let (Some(last), true) = (dedicated.last(), all > WORKERS_MAX) {
        let message = format!(
            "{all} workers, including the dedicated ones, exceed the maximum of {WORKERS_MAX}"
        );
        to.help(*last, &message, "remove `dedicated` from some exports");
    }
}

/// Returns the absolute path, without `.` and `..`. Links are not followed.
fn absolute(path: &Path) -> PathBuf {
    let from_root = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut clean = PathBuf::new();
    for component in from_root.components() {
        match component {
            Component::CurDir => {}
            Component::ParentDir => {
                clean.pop();
            }
            other => clean.push(other),
        }
    }
    clean
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reads objects without checks of their relations, as a request does.
    fn conflicts_of(objects: serde_json::Value) -> Vec<(String, String)> {
        let mut config = crate::objects_json(&objects, Config::default()).unwrap();
        config.control = Some("/run/control".into());
        let found = conflicts(&config);
        let mistakes = found.iter();
        let one = |m: &Mistake| (m.location.source.label.clone(), m.message.clone());
        mistakes.map(one).collect()
    }

    #[test]
    fn conflicts_in_a_request_name_object_and_field() {
        let conflicts = conflicts_of(serde_json::json!({
            "disks": [
                {"name": "a", "backend": "ram", "size": 512, "wwn": "3000000000000001"},
                {"name": "b", "backend": "null", "size": 512, "wwn": "3000000000000001"},
                {"name": "f", "backend": "file", "path": "/x/./f"},
                {"name": "g", "backend": "image", "path": "/x/f"},
                {"name": "r", "backend": "rbd", "image": "rbd/i"},
                {"name": "s", "backend": "rbd", "image": "rbd/i"},
                {"name": "n", "backend": "nbd", "uri": "nbd://192.0.2.1/d"},
                {"name": "o", "backend": "nbd", "uri": "nbd://192.0.2.1/d"},
            ],
            "exports": [
                {"kind": "vhost-blk", "name": "a", "disk": "c", "socket": "/run/control", "workers": [0, 9]},
                {"kind": "vhost-scsi", "name": "s", "socket": "/run/s", "lun": [
                    {"target": 0, "lun": 0, "disk": "a"}, {"target": 0, "lun": 0, "disk": "z"}]},
                {"kind": "iscsi", "name": "iqn.2026-11.org.example:t", "portals": ["127.0.0.1"]},
                {"kind": "iscsi", "name": "IQN.2026-11.org.example:t", "portals": ["127.0.0.1"]},
                {"kind": "nbd", "name": "n", "disk": "a", "socket": "/run/s"},
                {"kind": "nbd", "name": "o", "disk": "a", "listen": "127.0.0.1:1", "tls": true},
                {"kind": "nbd", "name": "p", "disk": "b", "listen": "127.0.0.1:1", "tls": true, "export_name": "o"},
            ],
        }));
        let expected = [
            (
                "/wwn",
                "disk b: the identifier 3000000000000001 is already used by disk a",
            ),
            ("/path", "disk g: the file /x/f is already used by disk f"),
            (
                "/image",
                "disk s: the image rbd/i is already used by disk r",
            ),
            (
                "/uri",
                "disk o: the export nbd://192.0.2.1/d is already used by disk n",
            ),
            ("/disk", "vhost-blk a: there is no disk `c`"),
            ("/lun/1/disk", "LUN 0:0 of s: there is no disk `z`"),
            (
                "/lun/1",
                "LUN 0:0 of s: target 0, LUN 0 of this export is already used by LUN 0:0 of s",
            ),
            (
                "/name",
                "iscsi IQN.2026-11.org.example:t: the export name `IQN.2026-11.org.example:t` is already used by \
                iscsi iqn.2026-11.org.example:t",
            ),
            (
                "/socket",
                "vhost-blk a: the socket /run/control is already used by the control socket",
            ),
            (
                "/socket",
                "nbd n: the socket /run/s is already used by vhost-scsi s",
            ),
            (
                "/export_name",
                "nbd p: listener 127.0.0.1:1 already has an export \"o\", of o",
            ),
            ("/workers/1", "vhost-blk a: `workers`: there is no worker 9"),
            (
                "/tls",
                "nbd o: TLS needs a certificate, and `tls_certificate` is not set",
            ),
            (
                "/tls",
                "nbd p: TLS needs a certificate, and `tls_certificate` is not set",
            ),
        ];
        let expected = expected.map(|(at, message)| (at.to_owned(), message.to_owned()));
        assert_eq!(conflicts, expected);
    }

    #[test]
    fn each_listener_of_an_export_is_compared_with_later_ones() {
        let conflicts = conflicts_of(serde_json::json!({
            "disks": [{"name": "d", "backend": "ram", "size": 512}],
            "exports": [
                {"kind": "nbd", "name": "a", "disk": "d", "socket": "/run/n", "export_name": "x"},
                {"kind": "nbd", "name": "b", "disk": "d", "socket": "/run/n", "listen": "127.0.0.1:1", "export_name": "x"},
                {"kind": "nbd", "name": "c", "disk": "d", "listen": "127.0.0.1:1", "export_name": "x"},
            ],
        }));
        let messages: Vec<&str> = conflicts.iter().map(|(_, text)| text.as_str()).collect();
        assert_eq!(
            messages,
            [
                "nbd b: listener /run/n already has an export \"x\", of a",
                "nbd c: listener 127.0.0.1:1 already has an export \"x\", of b",
            ]
        );
    }

    #[test]
    fn flags_for_another_process_use_its_workers_and_certificate() {
        let flags = crate::Flags {
            disk: vec!["d=ram:1M".to_owned()],
            nbd: vec!["d:/run/d.sock,tls,workers=99".to_owned()],
            ..crate::Flags::default()
        };
        let here = crate::Surroundings::of_this_process();
        let mistakes = crate::parse(None, &flags, &here).unwrap_err();
        assert_eq!(mistakes.iter().count(), 2, "{mistakes}");
        let there = crate::Surroundings::of_another_process();
        assert!(crate::parse(None, &flags, &there).is_ok());
    }

    #[test]
    fn the_same_path_is_the_same_however_it_is_written() {
        assert_eq!(absolute(Path::new("/a/./b/../c")), Path::new("/a/c"));
        assert_eq!(absolute(Path::new("/../a")), Path::new("/a"));
        assert!(absolute(Path::new("a")).is_absolute());
    }
}
