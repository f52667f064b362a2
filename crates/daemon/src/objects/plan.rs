//! Computes the smallest set of changes that turns one configuration into another.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;

use bdev::ErrorPolicy;
use reactor::ExportPlacement;

use super::refusal::Fault;
use super::relations::absolute;
use config::{
    AccessStates, Config, DiskConfig, ExportConfig, LimitsConfig, LunConfig, SocketRights,
};

/// Logical units of one export.
pub type ExportLuns = (String, Vec<LunConfig>);

/// A disk with a new size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resize {
    pub disk: String,
    /// New size in bytes.
    pub size: u64,
}

/// A disk with new limits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Limit {
    pub disk: String,
    pub limits: LimitsConfig,
}

/// An export with a new placement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placing {
    pub export: String,
    pub placement: ExportPlacement,
}

/// Steps of a change. Each list is in the order of the configuration.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Disks to add.
    pub add_disks: Vec<DiskConfig>,
    /// Disks to remove.
    pub remove_disks: Vec<String>,
    /// Disks to resize.
    pub resize: Vec<Resize>,
    /// Disks with new limits.
    pub limit: Vec<Limit>,
    /// Disks with a new error policy.
    pub errors: Vec<(String, ErrorPolicy)>,
    /// Exports to add, with their logical units.
    pub add_exports: Vec<ExportConfig>,
    /// Exports to remove.
    pub remove_exports: Vec<String>,
    /// Exports to close and open again with a new configuration.
    pub replace_exports: Vec<ExportConfig>,
    /// Remaining exports with a new placement.
    pub place_exports: Vec<Placing>,
    /// Changed access states of portal groups of remaining targets.
    pub access_states: Vec<(String, AccessStates)>,
    /// Remaining exports with a new mode, owner or group of their sockets.
    pub socket_rights: Vec<(String, SocketRights)>,
    /// Logical units to add to remaining exports.
    pub add_luns: Vec<ExportLuns>,
    /// Logical units to remove from remaining exports.
    pub remove_luns: Vec<ExportLuns>,
    /// Remaining targets with new CHAP users.
    pub chap_users: Vec<String>,
    /// Discovery sessions have new CHAP users.
    pub discovery_users: bool,
    /// New connections to the API, metrics and NBD exports use another certificate or other authorities.
    pub certificates: bool,
    /// Changes that need a restart of the daemon.
    pub refused: Vec<Fault>,
}

impl Plan {
    /// Returns the plan that turns `now` into `next`.
    pub fn between(now: &Config, next: &Config) -> Plan {
        let mut plan = Plan::default();
        plan.fixed(now, next);
        plan.disks(now, next);
        plan.exports(now, next);
        plan
    }

    /// Returns true if the plan has no steps.
    pub fn is_empty(&self) -> bool {
        *self == Plan::default()
    }

    /// Returns the exports of `now` that must close before others open: replaced exports, and removed ones with a socket or target name
    /// that a new export needs.
    pub fn makes_room(&self, now: &Config) -> Vec<ExportConfig> {
        let coming = self.add_exports.iter().chain(&self.replace_exports);
        let wanted: HashSet<PathBuf> = coming
            .filter_map(|export| export.socket().map(|path| absolute(path)))
            .collect();
        let goes_first = |export: &&ExportConfig| {
            let name = export.name();
            let is_replaced = self.replace_exports.iter().any(|e| e.name() == name);
            let is_removed = self.remove_exports.iter().any(|gone| gone == name);
            let in_the_way = || {
                let socket = export.socket().map(|path| absolute(path));
                let mut coming = self.add_exports.iter().chain(&self.replace_exports);
                socket.is_some_and(|socket| wanted.contains(&socket))
                    || coming.any(|other| export.excludes(other))
            };
            is_replaced || (is_removed && in_the_way())
        };
        let going = now.exports().filter(goes_first);
        going.cloned().collect()
    }

    /// Removes the size from `next` for disks that follow their block device in `now`, unless `base` sets it: the device may grow again.
    pub fn drop_followed_sizes(
        &self,
        next: &mut Config,
        now: &Config,
        base: &Config,
        is_device: impl Fn(&str) -> bool,
    ) {
        for Resize {
            disk: name,
            size: to,
        } in &self.resize
        {
            let configured_size = base.disk(name).and_then(|disk| disk.backend.size());
            let before = now.disk(name).and_then(|disk| disk.backend.size());
            let disk = next.disks.iter_mut().find(|disk| disk.name == *name);
            if let Some(disk) = disk
                && (configured_size != Some(*to) || !disk.backend.may_have_size())
                && before.is_none()
                && disk.backend.follows_size(is_device(name)) == Some(true)
            {
                disk.backend = disk.backend.with_size(None);
            }
        }
    }

    fn fixed(&mut self, now: &Config, next: &Config) {
        for key in now.fixed_difference(next) {
            let detail = format!("`{key}` cannot be changed while the daemon runs");
            let fault = Fault::at(format!("/{key}"), detail);
            self.refused
                .push(fault.help("restart the daemon to change it"));
        }
    }

    fn disks(&mut self, now: &Config, next: &Config) {
        let before: HashMap<&str, &DiskConfig> =
            now.disks.iter().map(|d| (d.name.as_str(), d)).collect();
        for disk in &next.disks {
            match before.get(disk.name.as_str()) {
                None => self.add_disks.push(disk.clone()),
                Some(known) if *known == disk => {}
                Some(known) => self.changed_disk(known, disk),
            }
        }
        let after: HashSet<&str> = next.disks.iter().map(|d| d.name.as_str()).collect();
        let gone = now.disks.iter().filter(|d| !after.contains(&*d.name));
        let gone: Vec<&DiskConfig> = gone.collect();
        for disk in &self.add_disks {
            // New files are opened before old ones are closed, so that a failed change changes nothing.
            let file = |disk: &DiskConfig| disk.backend.file().map(absolute);
            let same_file =
                |other: &&&DiskConfig| file(other).is_some_and(|f| Some(f) == file(disk));
            if let Some(other) = gone.iter().find(same_file) {
                let (name, before) = (&disk.name, &other.name);
                let detail =
                    format!("disk {name} needs the file of disk {before}, which is still open");
                let help =
                    format!("remove {before} in a separate change first, or restart the daemon");
                self.refused.push(Fault::at("/path", detail).help(help));
            }
        }
        self.remove_disks = gone.iter().map(|disk| disk.name.clone()).collect();
    }

    fn changed_disk(&mut self, now: &DiskConfig, next: &DiskConfig) {
        let changed = DiskConfig {
            backend: now.backend.with_size(next.backend.size()),
            limits: next.limits,
            errors: next.errors,
            // Takes effect at the next start.
            require: next.require,
            ..now.clone()
        };
        if changed != *next {
            let name = &next.name;
            let detail = format!(
                "only the size, the limits and the error policy of disk {name} can be changed"
            );
            let key = now.differs_in(next).unwrap_or("backend");
            let fault = Fault::at(format!("/{key}"), detail);
            self.refused
                .push(fault.help("remove the disk and add it again"));
            return;
        }
        if now.limits != next.limits {
            self.limit.push(Limit {
                disk: next.name.clone(),
                limits: next.limits,
            });
        }
        if now.errors != next.errors {
            self.errors.push((next.name.clone(), next.errors));
        }
        // If the size is removed from the configuration, the file keeps its size.
        if let Some(bytes) = next.backend.size()
            && Some(bytes) != now.backend.size()
        {
            self.resize.push(Resize {
                disk: next.name.clone(),
                size: bytes,
            });
        }
    }

    fn exports(&mut self, now: &Config, next: &Config) {
        let before: HashMap<&str, &ExportConfig> = now.exports().map(|e| (e.name(), e)).collect();
        for export in next.exports() {
            match before.get(export.name()) {
                None => self.add_exports.push(export.to_owned()),
                Some(known) if *known == export => {}
                Some(known) if known.can_become(export) => {
                    self.luns(known, export);
                    self.placing(known, export);
                    self.rights(known, export);
                    self.access_states(known, export);
                }
                Some(_) => self.replace_exports.push(export.to_owned()),
            }
        }
        let after: HashSet<&str> = next.exports().map(|export| export.name()).collect();
        let gone = now
            .exports()
            .filter(|export| !after.contains(export.name()));
        self.remove_exports = gone.map(|export| export.name().to_owned()).collect();
    }

    fn placing(&mut self, now: &ExportConfig, next: &ExportConfig) {
        if now.placement() != next.placement() {
            self.place_exports.push(Placing {
                export: next.name().to_owned(),
                placement: next.placement().clone(),
            });
        }
    }

    fn rights(&mut self, now: &ExportConfig, next: &ExportConfig) {
        if now.rights != next.rights {
            let rights = next.rights.clone();
            self.socket_rights.push((next.name().to_owned(), rights));
        }
    }

    fn access_states(&mut self, now: &ExportConfig, next: &ExportConfig) {
        let changed = changed_access_states(now, next);
        if !changed.is_empty() {
            self.access_states.push((next.name().to_owned(), changed));
        }
    }

    fn luns(&mut self, now: &ExportConfig, next: &ExportConfig) {
        let by_address = |export: &ExportConfig| -> BTreeMap<(u8, u16), String> {
            let luns = export.luns().unwrap_or_default().iter();
            luns.map(|l| ((l.target, l.lun), l.disk.clone())).collect()
        };
        let (before, after) = (by_address(now), by_address(next));
        let beyond = |some: &BTreeMap<(u8, u16), String>, others: &BTreeMap<(u8, u16), String>| {
            let only = some
                .iter()
                .filter(|(at, disk)| others.get(at) != Some(disk));
            let luns = only.map(|(at, disk)| LunConfig {
                target: at.0,
                lun: at.1,
                disk: disk.clone(),
            });
            luns.collect::<Vec<LunConfig>>()
        };
        let name = next.name().to_owned();
        let (added, removed) = (beyond(&after, &before), beyond(&before, &after));
        if !added.is_empty() {
            self.add_luns.push((name.clone(), added));
        }
        if !removed.is_empty() {
            self.remove_luns.push((name, removed));
        }
    }
}

/// Returns the access states of `next` that differ from those of `now`.
pub(super) fn changed_access_states(now: &ExportConfig, next: &ExportConfig) -> AccessStates {
    let none = AccessStates::new();
    let of = |export: &ExportConfig| export.access_states().unwrap_or(&none).clone();
    let (before, after) = (of(now), of(next));
    let state = |states: &AccessStates, group: &u16| states.get(group).copied().unwrap_or_default();
    let groups = before.keys().chain(after.keys());
    let groups = groups.filter(|group| state(&before, group) != state(&after, group));
    groups.map(|group| (*group, state(&after, group))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use config::{Flags, Surroundings, parse};

    fn config(text: &str) -> Config {
        let file = Some(("lunette.toml", text));
        let surroundings = Surroundings::of_this_process();
        parse(file, &Flags::default(), &surroundings).unwrap_or_else(|error| panic!("{error}"))
    }

    #[test]
    fn followed_device_size_is_not_saved() {
        let disk = |size: &str| {
            config(&format!(
                "workers = 1\n[[disk]]\nname = \"d\"\nbackend = \"file\"\npath = \"/dev/null\"\n{size}"
            ))
        };
        let (base, grown) = (disk(""), disk("size = \"2M\""));
        let sizes = [(true, &base, None), (false, &base, Some(2 << 20))];
        let growing = (true, &grown, Some(2 << 20));
        for (is_device, base, wanted) in sizes.into_iter().chain([growing]) {
            let mut next = grown.clone();
            let plan = Plan::between(&disk(""), &next);
            assert_eq!(plan.resize.len(), 1);
            plan.drop_followed_sizes(&mut next, &disk(""), base, |_| is_device);
            assert_eq!(next.disks[0].backend.size(), wanted);
        }
        // A disk on a part of a larger device keeps its configured size.
        let part = disk("size = \"1M\"");
        let mut next = grown.clone();
        Plan::between(&part, &next).drop_followed_sizes(&mut next, &part, &base, |_| true);
        assert_eq!(next.disks[0].backend.size(), Some(2 << 20));
    }

    /// A snapshot makes a disk with a configured size an image. Its configuration would be refused with a size.
    #[test]
    fn resized_image_has_no_configured_size() {
        let disk = |keys: &str| config(&format!("[[disk]]\nname = \"d\"\n{keys}"));
        let base = disk("backend = \"file\"\npath = \"/vm/d.raw\"\nsize = \"64M\"");
        let now = disk("backend = \"image\"\npath = \"/vm/d.qcow2\"");
        for size in [64 << 20, 128 << 20] {
            let mut next = now.clone();
            next.disks[0].backend = now.disks[0].backend.with_size(Some(size));
            let plan = Plan::between(&now, &next);
            assert_eq!(plan.resize.len(), 1);
            plan.drop_followed_sizes(&mut next, &now, &base, |_| false);
            assert_eq!(next.disks[0].backend.size(), None);
        }
    }

    #[test]
    fn pending_restart_changes_are_named_as_in_the_file() {
        let now = config("workers = 1\ncontrol_group = \"a\"\ntoken_file = \"/t\"\n");
        let next = "workers = 1\npoll_us = 7\ncontrol_group = \"a\"\ncontrol_readers = \"b\"\n\
                    token_file = \"/t\"\nreaders_token_file = \"/r\"\n";
        let plan = Plan::between(&now, &config(next));
        let pointers: Vec<&str> = plan.refused.iter().map(|f| f.pointer.as_str()).collect();
        assert_eq!(
            pointers,
            ["/control_readers", "/readers_token_file", "/poll_us"]
        );
    }
}
