//! Changes made at run time: the difference between the configuration in effect and the file and flags.
//!
//! It is recorded per object, so that later edits of the file apply to all other objects.

use std::collections::{BTreeMap, HashMap, HashSet};

use control::objects::{Disk, Export, Lun};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::bodies;
use super::plan::changed_access_states;
use super::refusal::Refusal;
use crate::jobs::shown;
use config::{
    AccessState, Config, DiskConfig, ExportConfig, LunConfig, access_state_json, disk_differences,
    disk_json, export_json,
};

type Address = (String, u8, u16);

/// Changes on top of a configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Overlay {
    /// Disks that the file lacks or configures differently.
    pub disks: Vec<DiskConfig>,
    /// Disks of the file with a changed location, size, limits or error policy.
    pub changed: Vec<Changed>,
    /// Disks of the file that were removed.
    pub no_disks: Vec<String>,
    /// Exports that the file lacks or configures differently.
    pub exports: Vec<ExportConfig>,
    /// Exports of the file that were removed.
    pub no_exports: Vec<String>,
    /// Changed or added logical units of exports of the file; `None` for removed ones.
    pub luns: BTreeMap<Address, Option<String>>,
    /// Access states of portal groups of targets of the file, by target and group.
    pub access_states: BTreeMap<(String, u16), AccessState>,
}

/// A disk of the file with a changed location, size, limits or error policy. Its other keys follow the file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Changed {
    /// Configuration in the file when the change was made.
    was: DiskConfig,
    /// Configuration after the change.
    now: DiskConfig,
}

impl Changed {
    fn between(was: &DiskConfig, now: &DiskConfig) -> Option<Changed> {
        // A job that moves a disk may also set the discard mode and the block size.
        let with_changes = DiskConfig {
            backend: now.backend.clone(),
            discard: now.discard,
            block_size: now.block_size,
            limits: now.limits,
            errors: now.errors,
            ..was.clone()
        };
        (with_changes == *now).then(|| Changed {
            was: was.clone(),
            now: now.clone(),
        })
    }

    /// Returns true if the disk has another location than in the file.
    fn is_moved(&self) -> bool {
        shown(&self.was.backend) != shown(&self.now.backend)
    }

    fn over(&self, disk: &mut DiskConfig) {
        // A file that names the new location also sets its keys. A changed size applies only to the location that it was set for.
        let takes_backend = match self.is_moved() {
            true => shown(&disk.backend) != shown(&self.now.backend),
            false => disk.backend == self.was.backend,
        };
        if takes_backend {
            disk.backend.clone_from(&self.now.backend);
        }
        if self.now.discard != self.was.discard && disk.discard == self.was.discard {
            disk.discard = self.now.discard;
        }
        if self.now.block_size != self.was.block_size && disk.block_size == self.was.block_size {
            disk.block_size = self.now.block_size;
        }
        if self.now.limits != self.was.limits {
            disk.limits = self.now.limits;
        }
        if self.now.errors != self.was.errors {
            disk.errors = self.now.errors;
        }
    }
}

/// Returns the line of a disk with the keys that differ from the file; `None` if none does.
fn disk_line(now: &DiskConfig, file: &DiskConfig) -> Option<String> {
    let differences = disk_differences(now, file).into_iter().filter(|one| {
        // Without a size in the file, the disk has the size of its storage.
        one.key != "size" || one.other.is_some()
    });
    let value = |value: Option<String>| value.unwrap_or_else(|| "default".to_owned());
    let keys: Vec<String> = differences
        .map(|one| {
            let (now, file) = (value(one.one), value(one.other));
            format!("{} is {now} (run time), {file} (file)", one.key)
        })
        .collect();
    match keys.is_empty() {
        true => None,
        false => Some(format!("~ disk {}: {}", now.name, keys.join("; "))),
    }
}

impl Overlay {
    /// Returns the overlay that turns `base` into `now`.
    pub fn between(base: &Config, now: &Config) -> Overlay {
        let mut overlay = Overlay::default();
        let before: HashMap<&str, &DiskConfig> =
            base.disks.iter().map(|d| (d.name.as_str(), d)).collect();
        for disk in &now.disks {
            let was = before.get(&*disk.name);
            if was == Some(&disk) {
                continue;
            }
            match was.and_then(|was| Changed::between(was, disk)) {
                Some(changed) => overlay.changed.push(changed),
                None => overlay.disks.push(disk.clone()),
            }
        }
        let there: HashSet<&str> = now.disks.iter().map(|d| d.name.as_str()).collect();
        let gone = base.disks.iter().filter(|d| !there.contains(&*d.name));
        overlay.no_disks = gone.map(|disk| disk.name.clone()).collect();

        let before: HashMap<&str, &ExportConfig> = base.exports().map(|e| (e.name(), e)).collect();
        for export in now.exports() {
            match before.get(export.name()) {
                Some(known)
                    if known.is_same_endpoint(export)
                        && known.placement() == export.placement() =>
                {
                    overlay.luns(known, export);
                    for (group, state) in changed_access_states(known, export) {
                        let address = (export.name().to_owned(), group);
                        overlay.access_states.insert(address, state);
                    }
                }
                _ => overlay.exports.push(export.to_owned()),
            }
        }
        let there: HashSet<&str> = now.exports().map(|export| export.name()).collect();
        let gone = base
            .exports()
            .filter(|export| !there.contains(export.name()));
        overlay.no_exports = gone.map(|export| export.name().to_owned()).collect();
        overlay
    }

    fn luns(&mut self, base: &ExportConfig, now: &ExportConfig) {
        let by_address = |export: &ExportConfig| -> HashMap<(u8, u16), String> {
            let luns = export.luns().unwrap_or_default().iter();
            luns.map(|l| ((l.target, l.lun), l.disk.clone())).collect()
        };
        let (before, after) = (by_address(base), by_address(now));
        for (at, disk) in &after {
            if before.get(at) != Some(disk) {
                let address = (now.name().to_owned(), at.0, at.1);
                self.luns.insert(address, Some(disk.clone()));
            }
        }
        for at in before.keys().filter(|at| !after.contains_key(at)) {
            self.luns.insert((now.name().to_owned(), at.0, at.1), None);
        }
    }

    /// Returns true if the overlay has no changes.
    pub fn is_empty(&self) -> bool {
        *self == Overlay::default()
    }

    /// Returns `base` with these changes.
    pub fn over(&self, base: &Config) -> Config {
        let mut next = base.clone();
        let gone: HashSet<&str> = self.no_disks.iter().map(String::as_str).collect();
        let mut ours: HashMap<&str, &DiskConfig> =
            self.disks.iter().map(|d| (d.name.as_str(), d)).collect();
        next.disks.retain(|disk| !gone.contains(&*disk.name));
        for disk in &mut next.disks {
            if let Some(changed) = ours.remove(&*disk.name) {
                *disk = changed.clone();
            }
        }
        for changed in &self.changed {
            let disk = next.disks.iter_mut().find(|d| d.name == changed.now.name);
            match disk {
                Some(disk) => changed.over(disk),
                // The data is not where the file had it, so the disk stays.
                None if changed.is_moved() => next.disks.push(changed.now.clone()),
                None => {}
            }
        }
        let added = self.disks.iter().filter(|d| ours.contains_key(&*d.name));
        next.disks.extend(added.cloned());
        for name in &self.no_exports {
            next.remove_export(name);
        }
        for export in &self.exports {
            next.put_export(export.clone());
        }
        self.lun_changes(&mut next);
        self.access_state_changes(&mut next);
        next
    }

    /// Sets the access states of portal groups that the file still has.
    fn access_state_changes(&self, next: &mut Config) {
        for ((export, group), state) in &self.access_states {
            let export = next.export_mut(export);
            let Some(export) = export.filter(|export| export.has_portal_group(*group)) else {
                continue;
            };
            if let Some(states) = export.access_states_mut() {
                states.insert(*group, *state);
                states.retain(|_, state| *state != AccessState::default());
            }
        }
    }

    fn lun_changes(&self, next: &mut Config) {
        let mut by_export: BTreeMap<&str, HashMap<(u8, u16), &Option<String>>> = BTreeMap::new();
        for ((export, target, lun), disk) in &self.luns {
            let changes = by_export.entry(export).or_default();
            changes.insert((*target, *lun), disk);
        }
        for (export, mut changes) in by_export {
            // The file no longer has the export.
            let Some(luns) = next.luns_mut(export) else {
                continue;
            };
            luns.retain_mut(|lun| match changes.remove(&(lun.target, lun.lun)) {
                None => true,
                Some(None) => false,
                Some(Some(disk)) => {
                    lun.disk.clone_from(disk);
                    true
                }
            });
            let mut added: Vec<LunConfig> = changes
                .into_iter()
                .filter_map(|((target, lun), disk)| {
                    let disk = disk.clone()?;
                    Some(LunConfig { target, lun, disk })
                })
                .collect();
            added.sort_by_key(|lun| (lun.target, lun.lun));
            luns.extend(added);
        }
    }

    /// Returns the contents of the state file.
    pub fn to_text(&self) -> String {
        let file = File {
            schema: match self.access_states.is_empty() {
                true => 2,
                false => SCHEMA,
            },
            disks: self.disks.iter().map(bodies::disk).collect(),
            changed_disks: self.changed.iter().map(DiskChange::of).collect(),
            removed_disks: self.no_disks.clone(),
            exports: self.exports.iter().map(bodies::export).collect(),
            removed_exports: self.no_exports.clone(),
            luns: self
                .luns
                .iter()
                .map(|((export, target, lun), disk)| LunChange {
                    export: export.clone(),
                    target: *target,
                    lun: *lun,
                    disk: disk.clone(),
                })
                .collect(),
            access_states: self
                .access_states
                .iter()
                .map(|((export, group), state)| AccessStateChange {
                    export: export.clone(),
                    group: *group,
                    state: state.name().to_owned(),
                })
                .collect(),
        };
        // Serialization of strings and numbers cannot fail.
        serde_json::to_string_pretty(&file).unwrap_or_default()
    }

    /// Parses the contents of the state file.
    ///
    /// # Errors
    /// If the text is malformed or of a later version.
    pub fn from_text(text: &str) -> Result<Overlay, String> {
        #[derive(Deserialize)]
        struct Version {
            schema: u32,
        }
        let malformed = |error: serde_json::Error| format!("malformed: {error}");
        let version: Version = serde_json::from_str(text).map_err(malformed)?;
        if !(1..=SCHEMA).contains(&version.schema) {
            return Err(format!(
                "it has schema {}, but this version supports at most {SCHEMA}",
                version.schema
            ));
        }
        let file: File = serde_json::from_str(text).map_err(malformed)?;
        let wrong = |mistakes| Refusal::from(mistakes).to_string();
        let mut overlay = Overlay {
            no_disks: file.removed_disks,
            no_exports: file.removed_exports,
            ..Overlay::default()
        };
        let read = |disk: Disk| {
            let mut value = serde_json::to_value(&disk).map_err(malformed)?;
            // Version 0.9.0 wrote the size of an image that was resized to the size of the file.
            if matches!(disk.backend.as_str(), "image" | "rbd")
                && let Some(keys) = value.as_object_mut()
            {
                keys.remove("size");
            }
            disk_json(&disk.name, &value).map_err(wrong)
        };
        for disk in file.disks {
            overlay.disks.push(read(disk)?);
        }
        for DiskChange { was, now } in file.changed_disks {
            let (was, now) = (read(was)?, read(now)?);
            overlay.changed.push(Changed { was, now });
        }
        for export in file.exports {
            let value = serde_json::to_value(&export).map_err(malformed)?;
            overlay
                .exports
                .push(export_json(&export.name, &value).map_err(wrong)?);
        }
        for change in file.luns {
            let address = (change.export, change.target, change.lun);
            overlay.luns.insert(address, change.disk);
        }
        for AccessStateChange {
            export,
            group,
            state,
        } in file.access_states
        {
            let state = access_state_json(&json!({ "state": state })).map_err(wrong)?;
            overlay.access_states.insert((export, group), state);
        }
        Ok(overlay)
    }

    /// Returns the disks and exports in the overlay, named as in errors of a start.
    pub fn names(&self) -> Vec<String> {
        let changed = self.changed.iter().map(|changed| &changed.now);
        let disks = self.disks.iter().chain(changed);
        let disks = disks.map(|disk| format!("disk {}", disk.name));
        let exports = self
            .exports
            .iter()
            .map(|export| format!("{} {}", export.kind(), export.name()));
        disks.chain(exports).collect()
    }

    /// Returns the lines of changes that replace a value of `base`, or remove an object of it. Added objects are left out.
    pub fn shadowing_lines(&self, base: &Config) -> Vec<String> {
        let has_lun = |(export, target, lun): &Address| {
            let luns = base.export(export).and_then(|export| export.luns());
            let mut luns = luns.unwrap_or_default().iter();
            luns.any(|one| (one.target, one.lun) == (*target, *lun))
        };
        let mut shadowing = self.clone();
        shadowing
            .disks
            .retain(|disk| base.disk(&disk.name).is_some());
        shadowing
            .changed
            .retain(|changed| base.disk(&changed.now.name).is_some());
        let is_known = |export: &ExportConfig| base.export(export.name()).is_some();
        shadowing.exports.retain(is_known);
        shadowing.luns.retain(|address, _| has_lun(address));
        shadowing.lines(base)
    }

    /// Returns one line per change of `base`, for display.
    pub fn lines(&self, base: &Config) -> Vec<String> {
        let mut lines = Vec::new();
        lines.extend(self.no_disks.iter().map(|name| format!("- disk {name}")));
        lines.extend(
            self.no_exports
                .iter()
                .map(|name| format!("- export {name}")),
        );
        let effective = self.over(base);
        let changed = self.changed.iter().map(|changed| &changed.now);
        lines.extend(self.disks.iter().chain(changed).filter_map(|disk| {
            let now = effective.disk(&disk.name)?;
            match base.disk(&disk.name) {
                Some(file) => disk_line(now, file),
                None => Some(format!("+ disk {}", disk.name)),
            }
        }));
        lines.extend(self.exports.iter().map(|export| {
            let is_known = base.exports().any(|was| was.name() == export.name());
            let sign = if is_known { '~' } else { '+' };
            format!("{sign} export {} ({})", export.name(), export.kind())
        }));
        let luns = self
            .luns
            .iter()
            .map(|((export, target, lun), disk)| match disk {
                Some(disk) => format!("+ lun {export}/{target}:{lun} = {disk}"),
                None => format!("- lun {export}/{target}:{lun}"),
            });
        lines.extend(luns);
        let states = self.access_states.iter();
        lines.extend(states.map(|((export, group), state)| {
            let state = state.name();
            format!("~ export {export} (portal group {group} = {state})")
        }));
        lines
    }
}

/// Incremented with each change that older versions cannot read. They read schema 2, used without access states.
const SCHEMA: u32 = 3;

#[derive(Serialize, Deserialize)]
struct File {
    schema: u32,
    disks: Vec<Disk>,
    /// Absent in schema 1, which has these in `disks`.
    #[serde(default)]
    changed_disks: Vec<DiskChange>,
    removed_disks: Vec<String>,
    exports: Vec<Export>,
    removed_exports: Vec<String>,
    luns: Vec<LunChange>,
    /// Absent in schemas 1 and 2.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    access_states: Vec<AccessStateChange>,
}

#[derive(Serialize, Deserialize)]
struct AccessStateChange {
    export: String,
    group: u16,
    state: String,
}

#[derive(Serialize, Deserialize)]
struct DiskChange {
    was: Disk,
    now: Disk,
}

impl DiskChange {
    fn of(changed: &Changed) -> DiskChange {
        DiskChange {
            was: bodies::disk(&changed.was),
            now: bodies::disk(&changed.now),
        }
    }
}

#[derive(Serialize, Deserialize)]
struct LunChange {
    export: String,
    target: u8,
    lun: u16,
    /// Absent if the logical unit was removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    disk: Option<String>,
}

/// Returns logical units as API objects.
pub fn lun_bodies(luns: &[LunConfig]) -> Vec<Lun> {
    luns.iter().map(bodies::lun).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::{Flags, Surroundings, parse};

    fn config(disks: &[&str], blk: &[&str], scsi: &[&str], luns: &[&str]) -> Config {
        let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
        let flags = Flags {
            disk: owned(disks),
            vhost_blk: owned(blk),
            vhost_scsi: owned(scsi),
            lun: owned(luns),
            ..Flags::default()
        };
        let config = parse(None, &flags, &Surroundings::of_this_process());
        config.unwrap_or_else(|mistakes| panic!("{mistakes}"))
    }

    #[test]
    fn changes_apply_over_the_same_and_an_edited_file() {
        let base = config(
            &["a=ram:1M", "b=ram:1M", "c=ram:1M"],
            &["a:/run/a.sock"],
            &["c0:/run/c0.sock"],
            &["c0/0:0=b"],
        );
        let now = config(
            &["b=ram:2M", "c=ram:1M", "d=file:/x/d,size=1M,ro"],
            &["d:/run/d.sock"],
            &["c0:/run/c0.sock"],
            &["c0/4:7=c"],
        );
        let overlay = Overlay::between(&base, &now);
        assert_eq!(overlay.over(&base), now);
        let again = Overlay::from_text(&overlay.to_text()).unwrap();
        assert_eq!(again, overlay);
        let edited = config(
            &["a=ram:1M", "b=ram:1M", "c=ram:1M", "e=null:1M"],
            &["a:/run/a.sock"],
            &["c0:/run/c0.sock"],
            &["c0/0:0=b", "c0/9:9=e"],
        );
        let merged = overlay.over(&edited);
        assert!(merged.disk("e").is_some() && merged.disk("a").is_none());
        let luns: Vec<_> = merged
            .export("c0")
            .unwrap()
            .luns
            .iter()
            .map(|l| l.lun)
            .collect();
        assert_eq!(luns, [9, 7]);
        assert!(Overlay::between(&now, &now).is_empty());
    }

    /// A changed size or limit must not carry the location of the disk's data.
    #[test]
    fn changed_limits_stay_on_a_disk_that_the_file_moved() {
        let disk = |words: &str| config(&[words], &[], &[], &[]);
        let base = disk("a=file:/x/a,size=1M,iops=10");
        for (now, lines) in [
            (
                "a=file:/x/a,size=2M,iops=20",
                &["~ disk a: size is 2M (run time), 1M (file); iops is 20 (run time), 10 (file)"][..],
            ),
            (
                "a=file:/x/a,size=1M,iops=20",
                &["~ disk a: iops is 20 (run time), 10 (file)"],
            ),
        ] {
            let now = disk(now);
            let overlay = Overlay::between(&base, &now);
            assert_eq!(overlay.lines(&base), lines);
            assert_eq!(overlay.over(&base), now);
            let overlay = Overlay::from_text(&overlay.to_text()).unwrap();
            let edited = disk("a=file:/x/b,size=4M,ro");
            let wanted = disk("a=file:/x/b,size=4M,ro,iops=20");
            assert_eq!(overlay.over(&edited), wanted);
            // The file no longer has the disk, so its size is dropped.
            let gone = disk("b=ram:1M");
            assert_eq!(overlay.over(&gone), gone);
        }
        let grown = Overlay::between(&base, &disk("a=file:/x/a,size=2M,iops=10"));
        let limited = disk("a=file:/x/a,size=1M,iops=30");
        let wanted = disk("a=file:/x/a,size=2M,iops=30");
        assert_eq!(grown.over(&limited), wanted);
        let another = disk("a=file:/x/c,size=1M,iops=10");
        let moved = Overlay::between(&base, &another);
        let line = "~ disk a: path is /x/c (run time), /x/a (file)";
        assert_eq!(moved.lines(&base), [line]);
        let without = disk("b=ram:1M");
        assert_eq!(moved.lines(&without), ["+ disk a"]);
    }

    /// A mirror changes the location. The other keys of the file apply.
    #[test]
    fn a_moved_disk_follows_the_other_keys_of_the_file() {
        let disk = |words: &str| config(&[words], &[], &[], &[]);
        let base = disk("a=file:/x/a");
        let moved = Overlay::between(&base, &disk("a=file:/x/b,size=1M"));
        for overlay in [moved.clone(), Overlay::from_text(&moved.to_text()).unwrap()] {
            // The file names the new location, and more.
            let corrected = disk("a=file:/x/b,ro,iops=100,cache=writeback");
            assert_eq!(overlay.over(&corrected), corrected);
            assert!(overlay.shadowing_lines(&corrected).is_empty());
            // The file names the old location, and more.
            let edited = disk("a=file:/x/a,ro,iops=100,cache=writeback");
            let wanted = disk("a=file:/x/b,size=1M,ro,iops=100");
            assert_eq!(overlay.over(&edited), wanted);
            assert_eq!(
                overlay.shadowing_lines(&edited),
                [
                    "~ disk a: path is /x/b (run time), /x/a (file); cache is none (run time), writeback (file)"
                ]
            );
            let without = disk("b=ram:1M");
            assert!(overlay.over(&without).disk("a").is_some());
            assert!(overlay.shadowing_lines(&without).is_empty());
        }
    }

    #[test]
    fn access_states_stay_on_a_target_that_the_file_changed() {
        let target = |options: &str, portals: &[&str]| {
            let owned = |words: &[&str]| words.iter().map(|word| (*word).to_owned()).collect();
            let flags = Flags {
                disk: owned(&["a=ram:1M"]),
                iscsi: vec![format!("iqn.2026-11.org.example:t0=a{options}")],
                portal: owned(portals),
                ..Flags::default()
            };
            let config = parse(None, &flags, &Surroundings::of_this_process());
            config.unwrap_or_else(|mistakes| panic!("{mistakes}"))
        };
        let portals = ["127.0.0.1:1,1", "127.0.0.1:2,2"];
        let base = target(",access_states=1=standby", &portals);
        let now = target(",access_states=2=unavailable", &portals);
        let overlay = Overlay::between(&base, &now);
        assert_eq!(overlay.over(&base), now);
        assert_eq!(
            overlay.lines(&base),
            [
                "~ export iqn.2026-11.org.example:t0 (portal group 1 = active/optimized)",
                "~ export iqn.2026-11.org.example:t0 (portal group 2 = unavailable)",
            ]
        );
        let text = overlay.to_text();
        assert!(text.contains("\"schema\": 3"), "{text}");
        let overlay = Overlay::from_text(&text).unwrap();
        let edited = target(",alias=x,access_states=2=standby", &portals);
        let wanted = target(",alias=x,access_states=2=unavailable", &portals);
        assert_eq!(overlay.over(&edited), wanted);
        // The file no longer has the portal group, so its state is dropped.
        let without = target("", &portals[..1]);
        assert_eq!(overlay.over(&without), without);
        let other = Overlay::between(&base, &target("", &portals)).to_text();
        assert!(other.contains("\"schema\": 3"), "{other}");
        assert!(Overlay::default().to_text().contains("\"schema\": 2"));
    }

    #[test]
    fn state_of_an_earlier_version_is_read() {
        let text = r#"{"schema": 1, "disks": [{"name": "a", "backend": "ram", "size": 2097152}],
            "removed_disks": [], "exports": [], "removed_exports": [], "luns": []}"#;
        let overlay = Overlay::from_text(text).unwrap();
        let base = config(&["a=ram:1M"], &[], &[], &[]);
        assert_eq!(overlay.over(&base), config(&["a=ram:2M"], &[], &[], &[]));
    }

    #[test]
    fn size_of_an_image_in_the_state_of_0_9_is_ignored() {
        let text = r#"{"schema": 2, "disks": [], "changed_disks": [{
            "was": {"name": "f", "backend": "file", "path": "/vm/f.raw", "size": 67108864},
            "now": {"name": "f", "backend": "image", "path": "/vm/s1.qcow2", "size": 67108864}}],
            "removed_disks": [], "exports": [], "removed_exports": [], "luns": []}"#;
        let overlay = Overlay::from_text(text).unwrap();
        let base = config(&["f=file:/vm/f.raw,size=64M"], &[], &[], &[]);
        let moved = config(&["f=image:/vm/s1.qcow2"], &[], &[], &[]);
        assert_eq!(overlay.over(&base), moved);
    }

    #[test]
    fn state_of_a_later_version_is_refused() {
        let error = Overlay::from_text("{\"schema\": 4, \"planets\": []}").unwrap_err();
        assert!(error.contains("schema 4"), "{error}");
        assert!(Overlay::from_text("").is_err());
    }
}
