//! Checks objects against each other and against this machine: names, references, sockets, files, CPUs.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::daemon_keys::{ConfigDraft, WorkersDraft};
use super::devices::BlockDeviceConfig;
use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::file_lookup::look_at_files;
use super::location::{Located, Location};
use super::lun::located_luns;
use super::model::{Config, DiskConfig, ExportConfig, LunConfig, Placement, Transport};
use super::placement;
use super::surroundings::Surroundings;
use super::value::{Draft, Raw};

/// Above this number, lists of names and guesses are omitted: they would be useless or slow.
const NAMES_LISTED_MAX: usize = 16;
const NAMES_GUESSED_MAX: usize = 1024;

/// Completes the configuration of `draft`. Adds all remaining mistakes to `diagnostics`.
pub fn complete(
    draft: ConfigDraft,
    surroundings: &Surroundings,
    diagnostics: &mut Diagnostics,
) -> Config {
    let draft = attach_luns(draft, diagnostics);
    check_names(&draft, diagnostics);
    check_disk_references(&draft, diagnostics);
    for export in &draft.exports {
        check_luns(export, diagnostics);
    }
    check_sockets(&draft, diagnostics);
    check_nbd(&draft, diagnostics);
    check_files(&draft, surroundings, diagnostics);
    check_tokens(&draft, diagnostics);
    check_tls(&draft, diagnostics);
    let placement = place_workers(&draft.workers, surroundings, diagnostics);
    for export in &draft.exports {
        placement::check(&export.fields, placement.count(), diagnostics);
    }

    let mut config = draft.config;
    config.workers.placement = placement;
    if !draft.given.contains_key("sandbox") {
        config.sandbox = surroundings.sandbox;
    }
    if !draft.given.contains_key("sandbox_paths") {
        config.sandbox_paths.clone_from(&surroundings.sandbox_paths);
    }
    config.disks = draft.disks.into_iter().map(|disk| disk.config).collect();
    for export in draft.exports {
        config.add_export(export.config);
    }
    config
}

/// Moves logical units from flags to their controllers.
fn attach_luns(mut draft: ConfigDraft, diagnostics: &mut Diagnostics) -> ConfigDraft {
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    for (index, export) in draft.exports.iter().enumerate() {
        if export.config.transport == Transport::VhostScsi {
            places.entry(export.config.name.clone()).or_insert(index);
        }
    }
    for (controller, lun) in std::mem::take(&mut draft.luns) {
        let index = places.get(&controller.value);
        match index.and_then(|index| draft.exports.get_mut(*index)) {
            Some(export) => {
                let location = lun.fields.location.clone();
                let table = Located::new(Raw::Table(lun.fields), location);
                export.fields.append("lun", table);
                export.config.luns.push(lun.config);
            }
            None => {
                let known: Vec<&str> = places.keys().map(String::as_str).collect();
                diagnostics.push(unknown("vhost-scsi controller", &controller, &known));
                draft.astray.push(lun);
            }
        }
    }
    draft
}

fn unknown(object: &str, found: &Located<String>, known: &[&str]) -> Mistake {
    let message = format!("there is no {object} `{}`", found.value);
    let mistake = Mistake::new(MistakeKind::Relation, &found.location, message);
    let guessed = known.iter().take(NAMES_GUESSED_MAX).copied();
    let mistake = mistake.did_you_mean(&found.value, guessed);
    mistake.allowed(match known.len() {
        0 => format!("none, because no {object} is configured"),
        1..=NAMES_LISTED_MAX => super::diagnostics::one_of(known),
        count => format!("one of the {count} configured names"),
    })
}

/// Reports every key that occurs a second time, with the location of the first and a remedy.
struct Once<K> {
    seen: HashMap<K, Location>,
    help: &'static str,
}

impl<K: std::hash::Hash + Eq> Once<K> {
    fn new(help: &'static str) -> Once<K> {
        let seen = HashMap::new();
        Once { seen, help }
    }

    fn see(&mut self, key: K, at: &Location, object: &str, to: &mut Diagnostics) {
        if let Some(first) = self.seen.get(&key) {
            to.conflict(
                at,
                format!("{object} is already used at {first}"),
                self.help,
            );
        } else {
            self.seen.insert(key, at.clone());
        }
    }
}

fn check_names(draft: &ConfigDraft, diagnostics: &mut Diagnostics) {
    let mut disks = Once::new("give each disk its own name");
    let mut wwns = Once::new(
        "give each disk its own identifier: initiators treat disks with the same identifier as one disk",
    );
    for Draft { config, fields } in &draft.disks {
        if let Some(at) = fields.at("name") {
            let object = format!("the disk name `{}`", config.name);
            disks.see(&config.name, at, &object, diagnostics);
        }
        if let (Some(wwn), Some(at)) = (config.shown.wwn, fields.at("wwn")) {
            let object = format!("the identifier {wwn:016x}");
            wwns.see(wwn, at, &object, diagnostics);
        }
    }
    let mut exports = Once::new(
        "give each export its own name; without `name` a vhost-blk export has the name of its disk",
    );
    for export in &draft.exports {
        let name = &export.config.name;
        if let (Some(at), false) = (name_of(export), name.is_empty()) {
            let object = format!("the export name `{name}`");
            // Two spellings of an iSCSI name are one target.
            let key = iscsi_name::normalised(name).unwrap_or_else(|| name.as_str().into());
            exports.see(key, at, &object, diagnostics);
        }
    }
}

/// Returns the location of the name of an export, which may be that of its disk.
fn name_of(export: &Draft<ExportConfig>) -> Option<&Location> {
    export.fields.at("name").or(export.fields.at("disk"))
}

fn disk_names(draft: &ConfigDraft) -> Vec<&str> {
    let names = draft.disks.iter().map(|disk| disk.config.name.as_str());
    names.filter(|name| !name.is_empty()).collect()
}

fn check_disk_references(draft: &ConfigDraft, diagnostics: &mut Diagnostics) {
    let names = disk_names(draft);
    let known: HashSet<&str> = names.iter().copied().collect();
    let mut references = Vec::new();
    for export in &draft.exports {
        references.push((export.config.disk.as_deref(), export.fields.at("disk")));
        let luns = located_luns(export, diagnostics).into_iter();
        references.extend(luns.map(|lun| (Some(lun.config.disk.as_str()), lun.disk)));
    }
    let astray = draft.astray.iter();
    references.extend(astray.map(|lun| (Some(lun.config.disk.as_str()), lun.fields.at("disk"))));
    for reference in references {
        if let (Some(disk), Some(at)) = reference
            && !disk.is_empty()
            && !known.contains(disk)
        {
            let disk = Located::new(disk.to_owned(), at.clone());
            diagnostics.push(unknown("disk", &disk, &names));
        }
    }
}

fn check_luns(export: &Draft<ExportConfig>, diagnostics: &mut Diagnostics) {
    let mut luns = Once::new("give each logical unit its own address");
    for lun in located_luns(export, diagnostics) {
        if let Some(at) = lun.number {
            let LunConfig { target, lun, .. } = lun.config;
            let object = format!("target {target}, LUN {lun} of this export");
            luns.see((target, lun), at, &object, diagnostics);
        }
    }
}

fn check_sockets(draft: &ConfigDraft, diagnostics: &mut Diagnostics) {
    let mut sockets = Once::new("give each export and the control socket its own path");
    let control = draft.control.as_ref().zip(draft.given.get("control"));
    let exports = draft.exports.iter().filter_map(|export| {
        let socket = (export.config.socket.as_ref()?, export.fields.at("socket")?);
        Some((export.config.shares_socket(), socket))
    });
    let (shared, own): (Vec<_>, Vec<_>) = exports.partition(|(shares, _)| *shares);
    let own = own.into_iter().map(|(_, socket)| socket);
    for (path, at) in control.into_iter().chain(own) {
        let object = format!("the socket {}", path.display());
        sockets.see(absolute(path), at, &object, diagnostics);
    }
    for (_, (path, at)) in shared {
        if let Some(first) = sockets.seen.get(&absolute(path)) {
            let message = format!("the socket {} is already used at {first}", path.display());
            let help = "NBD exports share a socket only with each other";
            diagnostics.conflict(at, message, help);
        }
    }
}

/// Reports NBD exports that cannot share their listener.
fn check_nbd(draft: &ConfigDraft, diagnostics: &mut Diagnostics) {
    let mut before: Vec<&ExportConfig> = Vec::new();
    for export in &draft.exports {
        let config = &export.config;
        let (Transport::Nbd, Some(at)) = (config.transport, name_of(export)) else {
            continue;
        };
        if let Some(reason) = before.iter().find_map(|other| config.conflict(other)) {
            let message = format!("nbd export `{}`: {reason}", config.name);
            diagnostics.push(Mistake::new(MistakeKind::Relation, at, message));
        }
        before.push(config);
    }
}

/// Longest wait for the files of disks. Two paths to a file without an answer are found by the locks of the file.
const FILES_PATIENCE: Duration = Duration::from_secs(1);

fn check_files<'d>(
    draft: &'d ConfigDraft,
    surroundings: &Surroundings,
    diagnostics: &mut Diagnostics,
) {
    let located = |disk: &'d Draft<DiskConfig>| {
        let Draft { config, fields } = disk;
        let path = config.backend.path()?;
        Some((config, fields, path, fields.at("path")?))
    };
    let disks = draft.disks.iter().filter_map(located);
    let paths = disks.clone().map(|(_, _, path, _)| path.to_path_buf());
    let paths = paths.collect();
    let resolved = look_at_files(&paths, FILES_PATIENCE, |path| path.canonicalize().ok());
    let mut files = Once::new("use a file for one disk only, and give that disk several exports");
    for (disk, fields, path, location) in disks {
        let found = resolved.get(path).cloned().flatten();
        let key = found.unwrap_or_else(|| absolute(path));
        let object = format!("the file {}", path.display());
        files.see(key, location, &object, diagnostics);

        // Without a file that is not required the daemon starts, and waits for it.
        if matches!(disk.backend, BlockDeviceConfig::File { .. })
            && disk.require
            && fields.at("size").is_none()
            && surroundings.files_are_here
            && matches!(path.try_exists(), Ok(false))
        {
            let message = format!("there is no file {}", path.display());
            let help = "set `size` to create it, or correct the path (relative to the daemon's working directory)";
            diagnostics.conflict(location, message, help);
        }
    }
}

/// Checks that an API over TCP has a token file: clients are identified by tokens only.
fn check_tokens(draft: &ConfigDraft, diagnostics: &mut Diagnostics) {
    if let (Some(address), Some(at)) = (draft.access.api_listen, draft.given.get("api_listen"))
        && draft.access.token_file.is_none()
    {
        let message = format!(
            "`api_listen`: the API on {address} needs a token, but `token_file` is not set"
        );
        let help = "create a token file, (umask 077; openssl rand -hex 32 > token), and set `token_file` to its path";
        diagnostics.conflict(at, message, help);
    }
}

/// Checks that the files of TLS are complete.
fn check_tls(draft: &ConfigDraft, diagnostics: &mut Diagnostics) {
    for (name, needed) in [
        ("tls_certificate", "tls_key"),
        ("tls_key", "tls_certificate"),
        ("api_client_ca", "tls_certificate"),
        ("nbd_client_ca", "tls_certificate"),
    ] {
        if let (Some(at), None) = (draft.given.get(name), draft.given.get(needed)) {
            let message = format!("`{name}` needs `{needed}`, which is not set");
            let help = format!("set `{needed}`, or remove `{name}`");
            diagnostics.conflict(at, message, help);
        }
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

fn place_workers(
    draft: &WorkersDraft,
    surroundings: &Surroundings,
    diagnostics: &mut Diagnostics,
) -> Placement {
    let Some(cpus) = &draft.cpus else {
        let count = draft.count.as_ref().map(|count| count.value);
        return Placement::Count(count.unwrap_or_else(|| surroundings.workers_default()));
    };
    let mut once = Once::new("list each CPU once: two workers on one CPU block each other");
    for cpu in &cpus.value {
        let object = format!("CPU {}", cpu.value);
        once.see(cpu.value, &cpu.location, &object, diagnostics);
        if !surroundings.cpus.contains(&cpu.value) {
            let message = format!("this process is not allowed to run on CPU {}", cpu.value);
            let mistake = Mistake::new(MistakeKind::Relation, &cpu.location, message);
            diagnostics.push(mistake.allowed(format!("CPUs {}", ranges(&surroundings.cpus))));
        }
    }
    let listed = cpus.value.len();
    if let Some(count) = draft.count.as_ref().filter(|at| at.value != listed) {
        let message = format!(
            "`workers`: found {}, but `cpus` has {listed} CPUs",
            count.value
        );
        let help = "each CPU of the list has one worker: remove `workers`";
        diagnostics.conflict(&count.location, message, help);
    }
    Placement::Cpus(cpus.value.iter().map(|cpu| cpu.value).collect())
}

/// Formats CPUs as ranges: `0-3,8`.
fn ranges(cpus: &[usize]) -> String {
    let mut runs: Vec<(usize, usize)> = Vec::new();
    for &cpu in cpus {
        match runs.last_mut() {
            Some((_, last)) if *last + 1 == cpu => *last = cpu,
            _ => runs.push((cpu, cpu)),
        }
    }
    let texts: Vec<String> = runs
        .iter()
        .map(|(first, last)| match first == last {
            true => first.to_string(),
            false => format!("{first}-{last}"),
        })
        .collect();
    texts.join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpus_are_listed_as_ranges() {
        assert_eq!(ranges(&[0, 1, 2, 3, 8, 10, 11]), "0-3,8,10-11");
        assert_eq!(ranges(&[]), "");
    }

    #[test]
    fn the_same_path_is_the_same_however_it_is_written() {
        assert_eq!(absolute(Path::new("/a/./b/../c")), Path::new("/a/c"));
        assert_eq!(absolute(Path::new("/../a")), Path::new("/a"));
        assert!(absolute(Path::new("a")).is_absolute());
    }
}
