//! Completes a configuration of files and flags, and checks it against this machine: files, CPUs. `relations` checks its objects against
//! each other.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::daemon_keys::{ConfigDraft, WorkersDraft};
use super::devices::BlockDeviceConfig;
use super::diagnostics::{Diagnostics, Mistake, MistakeKind};
use super::file_lookup::look_at_files;
use super::location::{Located, Location};
use super::model::{Config, ExportConfig, Placement, Transport};
use super::placement;
use super::relations::{self, ValueId};
use super::surroundings::Surroundings;
use super::value::{Draft, Fields, Raw};

/// Locations of the values of a configuration.
struct Texts {
    given: BTreeMap<&'static str, Location>,
    disks: Vec<Fields>,
    exports: Vec<Fields>,
}

/// Completes the configuration of `draft`. Adds all remaining mistakes to `diagnostics`.
pub fn complete(
    draft: ConfigDraft,
    surroundings: &Surroundings,
    diagnostics: &mut Diagnostics,
) -> Config {
    let mut draft = attach_luns(draft, diagnostics);
    draft.exports.sort_by_key(|export| export.config.transport);
    let mut config = draft.config;
    let disks = draft
        .disks
        .into_iter()
        .map(|disk| (disk.config, disk.fields));
    let exports = draft.exports.into_iter();
    let exports = exports.map(|export| (export.config, export.fields));
    let mut texts = Texts {
        given: draft.given,
        disks: Vec::new(),
        exports: Vec::new(),
    };
    (config.disks, texts.disks) = disks.unzip();
    (config.exports, texts.exports) = exports.unzip();
    config.workers.placement = place_workers(&draft.workers, surroundings, diagnostics);
    if !texts.given.contains_key("sandbox") {
        config.sandbox = surroundings.sandbox;
    }
    if !texts.given.contains_key("sandbox_paths") {
        config.sandbox_paths.clone_from(&surroundings.sandbox_paths);
    }
    let files = resolve_files(&config);
    let found = relations::check(&config, &files, surroundings.files_are_here, &|place| {
        let location = texts.locate(place, diagnostics)?;
        Some((location.clone(), None))
    });
    diagnostics.append(found);
    if surroundings.files_are_here {
        check_files(&config, &texts, diagnostics);
    }
    check_needs(&texts, diagnostics);
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
        let index = places.get(&controller.value).copied();
        if index.is_none() {
            let object = "vhost-scsi controller";
            let message = format!("there is no {object} `{}`", controller.value);
            let mistake = Mistake::new(MistakeKind::Relation, &controller.location, message);
            let known: Vec<&str> = places.keys().map(String::as_str).collect();
            diagnostics.push(mistake.known(object, &controller.value, &known));
            // The disk is checked, too.
            draft.exports.push(Draft {
                config: ExportConfig::default(),
                fields: Fields {
                    location: controller.location,
                    entries: Vec::new(),
                },
            });
        }
        let last = draft.exports.len() - 1;
        if let Some(export) = draft.exports.get_mut(index.unwrap_or(last)) {
            let location = lun.fields.location.clone();
            let table = Located::new(Raw::Table(lun.fields), location);
            export.fields.append("lun", table);
            export.config.luns.push(lun.config);
        }
    }
    draft
}

impl Texts {
    /// Returns the location of a value, unless it is absent or wrong by itself.
    fn locate(&self, place: ValueId, known: &Diagnostics) -> Option<&Location> {
        let location = match place {
            ValueId::Control => self.given.get("control")?,
            ValueId::Disk(index, key) => self.disks.get(index)?.at(key)?,
            ValueId::Export(index, key) => {
                // An export without a name has the name of its disk.
                let fields = self.exports.get(index)?;
                let mut keys = [key, "name", "disk"].into_iter();
                keys.find_map(|key| fields.at(key))?
            }
            ValueId::Worker(index, _, worker) => {
                placement::location(self.exports.get(index)?, worker)?
            }
            ValueId::Lun(index, at, key) => {
                let fields = self.exports.get(index)?;
                let disks = fields.items("disks").iter();
                let disks = disks.filter(|item| item.value.text().is_some());
                let tables = fields.items("lun").iter();
                let tables = tables.filter(|item| item.value.table().is_some());
                let lun = disks.chain(tables).nth(at)?;
                match lun.value.table() {
                    None => &lun.location,
                    Some(table) if !key.is_empty() => table.at(key)?,
                    Some(table) => {
                        let address = [Some(&table.location), table.at("target"), table.at("lun")];
                        let is_wrong = address.into_iter().flatten().any(|at| known.has(at));
                        table.at("lun").filter(|_| !is_wrong)?
                    }
                }
            }
        };
        (!known.has(location)).then_some(location)
    }
}

/// Longest wait for the files of disks. Two paths to a file without an answer are found by the locks of the file.
const FILES_PATIENCE: Duration = Duration::from_secs(1);

/// Follows the links in the paths of disks.
fn resolve_files(config: &Config) -> HashMap<PathBuf, PathBuf> {
    let paths = config.disks.iter().filter_map(|disk| disk.backend.path());
    let paths = paths.map(Path::to_path_buf).collect();
    let found = look_at_files(&paths, FILES_PATIENCE, |path| path.canonicalize().ok());
    let found = found.into_iter();
    found.filter_map(|(path, to)| Some((path, to?))).collect()
}

/// Reports missing files of disks that require them. Without another file the daemon starts, and waits for it.
fn check_files(config: &Config, texts: &Texts, diagnostics: &mut Diagnostics) {
    for (disk, fields) in config.disks.iter().zip(&texts.disks) {
        if let BlockDeviceConfig::File { path, .. } = &disk.backend
            && let (Some(location), None) = (fields.at("path"), fields.at("size"))
            && disk.require
            && matches!(path.try_exists(), Ok(false))
        {
            let message = format!("there is no file {}", path.display());
            let help = "set `size` to create it, or correct the path (relative to the daemon's working directory)";
            diagnostics.conflict(location, message, help);
        }
    }
}

/// Checks that keys have the keys that they need. Clients of an API over TCP are identified by tokens only.
fn check_needs(texts: &Texts, diagnostics: &mut Diagnostics) {
    let token = "create a token file, (umask 077; openssl rand -hex 32 > token), and set `token_file` to its path";
    for (name, needed, help) in [
        ("api_listen", "token_file", Some(token)),
        ("tls_certificate", "tls_key", None),
        ("tls_key", "tls_certificate", None),
        ("api_client_ca", "tls_certificate", None),
        ("nbd_client_ca", "tls_certificate", None),
    ] {
        if let (Some(at), None) = (texts.given.get(name), texts.given.get(needed)) {
            let message = format!("`{name}` needs `{needed}`, which is not set");
            let help = help.map(str::to_owned);
            let help = help.unwrap_or_else(|| format!("set `{needed}`, or remove `{name}`"));
            diagnostics.conflict(at, message, help);
        }
    }
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
    let mut seen = HashMap::new();
    for cpu in &cpus.value {
        let first = seen.entry(cpu.value).or_insert(&cpu.location);
        if !std::ptr::eq(*first, &cpu.location) {
            let message = format!("CPU {} is already used at {first}", cpu.value);
            let help = "list each CPU once: two workers on one CPU block each other";
            diagnostics.conflict(&cpu.location, message, help);
        }
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
}
