//! Checks objects against each other and against this machine: names, references, sockets, files, CPUs.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;

use super::daemon_keys::{ConfigDraft, WorkersDraft};
use super::devices::BlockDeviceConfig;
use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::file_lookup::look_at_files;
use super::location::{Located, Location};
use super::lun::LunDraft;
use super::model::{Config, ExportConfig, NbdConfig, Placement};
use super::surroundings::Surroundings;

/// Above this number, lists of names and guesses are omitted: they would be useless or slow.
const NAMES_LISTED_MAX: usize = 16;
const NAMES_GUESSED_MAX: usize = 1024;

/// Completes the configuration of `draft`. Adds all remaining mistakes to `diagnostics`.
pub fn complete(
    draft: ConfigDraft,
    surroundings: &Surroundings,
    diagnostics: &mut Diagnostics,
) -> Option<Config> {
    let draft = attach_luns(draft, diagnostics);
    check_names(&draft, diagnostics);
    check_disk_references(&draft, diagnostics);
    for export in &draft.exports {
        check_luns(&export.luns, diagnostics);
    }
    check_sockets(&draft, diagnostics);
    check_nbd(&draft, diagnostics);
    check_files(&draft, surroundings, diagnostics);
    check_tokens(&draft, diagnostics);
    check_tls(&draft, diagnostics);
    let placement = placement(&draft.workers, surroundings, diagnostics);
    check_placements(&draft, placement.count(), diagnostics);

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
        config.add_export(export.complete()?);
    }
    Some(config)
}

/// Moves logical units from flags to their controllers.
fn attach_luns(mut draft: ConfigDraft, diagnostics: &mut Diagnostics) -> ConfigDraft {
    let mut places: BTreeMap<String, usize> = BTreeMap::new();
    for (index, export) in draft.exports.iter_mut().enumerate() {
        if export.luns_by_flags().is_some()
            && let Some(name) = &export.name
        {
            places.entry(name.value.clone()).or_insert(index);
        }
    }
    for (controller, lun) in std::mem::take(&mut draft.luns) {
        let location = places.get(&controller.value);
        let export = location.and_then(|index| draft.exports.get_mut(*index));
        match export.and_then(|export| export.luns_by_flags()) {
            Some(luns) => luns.push(lun),
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

/// Reports every key that occurs a second time, with the location of the first.
struct Once<K> {
    seen: HashMap<K, Location>,
}

impl<K: std::hash::Hash + Eq> Once<K> {
    fn new() -> Once<K> {
        Once {
            seen: HashMap::new(),
        }
    }

    fn see(
        &mut self,
        key: K,
        location: &Location,
        object: String,
        help: &str,
        to: &mut Diagnostics,
    ) {
        match self.seen.get(&key) {
            Some(first) => {
                let message = format!("{object} is already used at {first}");
                to.conflict(location, message, help);
            }
            None => {
                self.seen.insert(key, location.clone());
            }
        }
    }
}

fn check_names(draft: &ConfigDraft, diagnostics: &mut Diagnostics) {
    let mut disks = Once::new();
    for disk in &draft.disks {
        if let Some(at) = disk.fields.at("name") {
            let object = format!("the disk name `{}`", disk.config.name);
            let help = "give each disk its own name";
            disks.see(&disk.config.name, at, object, help, diagnostics);
        }
    }
    let mut wwns = Once::new();
    for disk in &draft.disks {
        if let (Some(wwn), Some(at)) = (disk.config.shown.wwn, disk.fields.at("wwn")) {
            let object = format!("the identifier {wwn:016x}");
            let help = "give each disk its own identifier: initiators treat disks with the same identifier as one disk";
            wwns.see(wwn, at, object, help, diagnostics);
        }
    }
    let mut exports = Once::new();
    for name in draft
        .exports
        .iter()
        .filter_map(|export| export.name.as_ref())
    {
        let object = format!("the export name `{}`", name.value);
        let help = "give each export its own name; without `name` a vhost-blk export has the name of its disk";
        // Two spellings of an iSCSI name are one target.
        let key = iscsi_name::normalised(&name.value);
        let key = key.unwrap_or_else(|| name.value.as_str().into());
        exports.see(key, &name.location, object, help, diagnostics);
    }
}

fn disk_names(draft: &ConfigDraft) -> Vec<&str> {
    let names = draft.disks.iter().map(|disk| disk.config.name.as_str());
    names.filter(|name| !name.is_empty()).collect()
}

fn check_reference(
    disk: &Located<String>,
    names: &[&str],
    known: &HashSet<&str>,
    diagnostics: &mut Diagnostics,
) {
    if !known.contains(disk.value.as_str()) {
        diagnostics.push(unknown("disk", disk, names));
    }
}

fn check_disk_references(draft: &ConfigDraft, diagnostics: &mut Diagnostics) {
    let names = disk_names(draft);
    let known: HashSet<&str> = names.iter().copied().collect();
    let exports = draft.exports.iter();
    let alone = exports.clone().filter_map(|export| export.disk.as_ref());
    let luns = exports.flat_map(|export| &export.luns);
    let luns = luns.chain(&draft.astray);
    for disk in alone.chain(luns.filter_map(|lun| lun.disk.as_ref())) {
        check_reference(disk, &names, &known, diagnostics);
    }
}

fn check_luns(drafts: &[LunDraft], diagnostics: &mut Diagnostics) {
    let mut luns = Once::new();
    for draft in drafts {
        if let (Some(target), Some(lun)) = (&draft.target, &draft.lun) {
            let address = (target.value, lun.value);
            let object = format!("target {}, LUN {} of this export", address.0, address.1);
            let help = "give each logical unit its own address";
            luns.see(address, &lun.location, object, help, diagnostics);
        }
    }
}

fn check_placements(draft: &ConfigDraft, workers: usize, diagnostics: &mut Diagnostics) {
    for export in &draft.exports {
        export.placement.check(workers, diagnostics);
    }
}

fn check_sockets(draft: &ConfigDraft, diagnostics: &mut Diagnostics) {
    let mut sockets = Once::new();
    let control = draft
        .control
        .clone()
        .zip(draft.given.get("control").cloned());
    let control = control.map(|(path, at)| Located::new(path, at));
    let (shared, own): (Vec<_>, Vec<_>) = draft
        .exports
        .iter()
        .partition(|export| export.shares_socket());
    for socket in control
        .iter()
        .chain(own.into_iter().filter_map(|export| export.socket.as_ref()))
    {
        let object = format!("the socket {}", socket.value.display());
        let help = "give each export and the control socket its own path";
        let key = absolute(&socket.value);
        sockets.see(key, &socket.location, object, help, diagnostics);
    }
    for socket in shared
        .into_iter()
        .filter_map(|export| export.socket.as_ref())
    {
        let key = absolute(&socket.value);
        if sockets.seen.contains_key(&key) {
            let object = format!("the socket {}", socket.value.display());
            let help = "NBD exports share a socket only with each other";
            sockets.see(key, &socket.location, object, help, diagnostics);
        }
    }
}

/// Reports NBD exports that cannot share their listener.
fn check_nbd(draft: &ConfigDraft, diagnostics: &mut Diagnostics) {
    let exports = draft.exports.iter();
    let complete = exports.filter_map(|export| match export.complete() {
        Some(ExportConfig::Nbd(config)) => Some((export.name.as_ref()?, config)),
        _ => None,
    });
    let mut before: Vec<NbdConfig> = Vec::new();
    for (name, config) in complete {
        if let Some(reason) = before.iter().find_map(|other| config.conflict(other)) {
            let message = format!("nbd export `{}`: {reason}", name.value);
            diagnostics.push(Mistake::new(MistakeKind::Relation, &name.location, message));
        }
        before.push(config);
    }
}

/// Longest wait for the files of disks. Two paths to a file without an answer are found by the locks of the file.
const FILES_PATIENCE: Duration = Duration::from_secs(1);

fn check_files(draft: &ConfigDraft, surroundings: &Surroundings, diagnostics: &mut Diagnostics) {
    let disks = draft.disks.iter().filter_map(|disk| {
        let (_, path) = disk
            .config
            .backend
            .paths()
            .into_iter()
            .find(|(key, _)| *key == "path")?;
        Some((disk, path, disk.fields.at("path")?))
    });
    let paths = disks
        .clone()
        .map(|(_, path, _)| path.to_path_buf())
        .collect();
    let resolved = look_at_files(&paths, FILES_PATIENCE, |path| path.canonicalize().ok());
    let mut files = Once::new();
    for (disk, path, location) in disks {
        let found = resolved.get(path).cloned().flatten();
        let key = found.unwrap_or_else(|| absolute(path));
        let object = format!("the file {}", path.display());
        let help = "use a file for one disk only, and give that disk several exports";
        files.see(key, location, object, help, diagnostics);

        // Without a file that is not required the daemon starts, and waits for it.
        let is_created = disk.fields.at("size").is_some();
        if matches!(disk.config.backend, BlockDeviceConfig::File { .. })
            && disk.config.require
            && !is_created
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

fn placement(
    draft: &WorkersDraft,
    surroundings: &Surroundings,
    diagnostics: &mut Diagnostics,
) -> Placement {
    let Some(cpus) = &draft.cpus else {
        let count = draft.count.as_ref().map(|count| count.value);
        return Placement::Count(count.unwrap_or_else(|| surroundings.workers_default()));
    };
    let mut once = Once::new();
    for cpu in &cpus.value {
        let help = "list each CPU once: two workers on one CPU block each other";
        let object = format!("CPU {}", cpu.value);
        once.see(cpu.value, &cpu.location, object, help, diagnostics);
        if !surroundings.cpus.contains(&cpu.value) {
            let message = format!("this process is not allowed to run on CPU {}", cpu.value);
            let mistake = Mistake::new(MistakeKind::Relation, &cpu.location, message);
            diagnostics.push(mistake.allowed(format!("CPUs {}", ranges(&surroundings.cpus))));
        }
    }
    if let Some(count) = &draft.count
        && count.value != cpus.value.len()
    {
        let message = format!(
            "`workers`: found {}, but `cpus` has {} CPUs",
            count.value,
            cpus.value.len()
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
