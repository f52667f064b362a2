//! Changes at run time. Each computes the next configuration from the present one.

use std::collections::HashMap;

use super::overlay::Overlay;
use super::refusal::{Fault, Refusal};
use config::{
    AccessState, Config, DiskConfig, DiskSettings, ExportConfig, LimitsConfig, LunConfig,
};

/// One change. Variants and keys are named as in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Adds or replaces a disk.
    PutDisk(DiskConfig),
    /// Sets the size of a disk, in bytes.
    ResizeDisk(String, u64),
    /// Sets the limits of a disk.
    LimitDisk(String, LimitsConfig),
    /// Sets the keys of a disk that may change at any time.
    SetDisk(String, DiskSettings),
    /// Removes a disk.
    RemoveDisk(String),
    /// Adds or replaces an export with its logical units.
    PutExport(Box<ExportConfig>),
    /// Removes an export.
    RemoveExport(String),
    /// Adds or replaces a logical unit of an export.
    PutLun(String, LunConfig),
    /// Replaces all logical units of an export.
    PutLuns(String, Vec<LunConfig>),
    /// Removes the logical unit of an export at this target and LUN.
    RemoveLun(String, u8, u16),
    /// Sets the access state of a portal group, also if an initiator has changed it.
    SetAccessState(String, u16, AccessState),
    /// Replaces the whole configuration.
    Replace(Box<Replacement>),
}

/// A whole configuration. Changes made while it waits for clients stay on top of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Replacement {
    whole: Config,
    /// Configuration in effect when the change began.
    begun_from: Option<Config>,
}

impl Replacement {
    /// Stores the present configuration. Later changes stay on top of this replacement.
    pub fn begin(&mut self, now: &Config) {
        self.begun_from.get_or_insert_with(|| now.clone());
    }

    fn next(self, now: &Config) -> Config {
        match self.begun_from {
            None => self.whole,
            Some(before) => Overlay::between(&before, now).over(&self.whole),
        }
    }
}

impl From<Config> for Replacement {
    fn from(whole: Config) -> Replacement {
        Replacement {
            whole,
            begun_from: None,
        }
    }
}

fn not_there(noun: &str, name: &str) -> Refusal {
    let hint = match noun {
        "disk" | "export" => format!("; hint: lunette {noun} list"),
        _ => String::new(),
    };
    Refusal::NotFound(Fault::new(format!("there is no {noun} `{name}`{hint}")))
}

/// Returns the exports and logical units that present a disk, for messages.
pub fn users(config: &Config, disk: &str) -> Vec<String> {
    let mut users = Vec::new();
    for export in config.exports() {
        match export.luns() {
            None if export.disks().any(|shown| shown == disk) => {
                users.push(export.name().to_owned());
            }
            None => {}
            Some(luns) => {
                let ours = luns.iter().filter(|lun| lun.disk == disk);
                users.extend(ours.map(|l| format!("{}/{}:{}", export.name(), l.target, l.lun)));
            }
        }
    }
    users
}

/// Returns the users of each disk, as [`users`] does for one.
pub fn users_of_all(config: &Config) -> HashMap<&str, Vec<String>> {
    let mut users: HashMap<&str, Vec<String>> = HashMap::new();
    for export in config.exports() {
        let name = export.name();
        if let Some(disk) = export.disk() {
            users.entry(disk).or_default().push(name.to_owned());
        }
        luns_used(name, export.luns().unwrap_or_default(), &mut users);
    }
    users
}

fn luns_used<'a>(export: &str, luns: &'a [LunConfig], users: &mut HashMap<&'a str, Vec<String>>) {
    for LunConfig { target, lun, disk } in luns {
        let user = format!("{export}/{target}:{lun}");
        users.entry(disk).or_default().push(user);
    }
}

impl Change {
    /// Returns the configuration after the change. `force` also removes conflicting objects.
    ///
    /// # Errors
    /// If the object does not exist or a conflict remains.
    pub fn next(self, now: &Config, force: bool) -> Result<Config, Refusal> {
        let mut next = now.clone();
        match self {
            Change::PutDisk(disk) => next.put_disk(disk),
            Change::ResizeDisk(name, size) => {
                let disk = next.disks.iter_mut().find(|disk| disk.name == name);
                let disk = disk.ok_or_else(|| not_there("disk", &name))?;
                disk.backend = disk.backend.with_size(Some(size));
            }
            Change::LimitDisk(name, limits) => {
                let disk = next.disks.iter_mut().find(|disk| disk.name == name);
                disk.ok_or_else(|| not_there("disk", &name))?.limits = limits;
            }
            Change::SetDisk(name, settings) => {
                let disk = next.disks.iter_mut().find(|disk| disk.name == name);
                settings.apply(disk.ok_or_else(|| not_there("disk", &name))?);
            }
            Change::RemoveDisk(name) => remove_disk(&mut next, &name, force)?,
            Change::PutExport(export) => next.put_export(*export),
            Change::RemoveExport(name) => {
                if !next.remove_export(&name) {
                    return Err(not_there("export", &name));
                }
            }
            Change::PutLun(export, lun) => {
                let luns = luns_of(&mut next, &export)?;
                let at =
                    |known: &&mut LunConfig| (known.target, known.lun) == (lun.target, lun.lun);
                match luns.iter_mut().find(at) {
                    None => luns.push(lun),
                    Some(known) if known.disk == lun.disk || force => *known = lun,
                    Some(known) => {
                        let LunConfig { target, lun, disk } = known;
                        let detail =
                            format!("target {target}, LUN {lun} of {export} is the disk {disk}");
                        let fault = Fault::at("/disk", detail);
                        let help = "remove it first, or replace it with --force";
                        return Err(Refusal::Conflict(vec![fault.help(help)]));
                    }
                }
            }
            Change::PutLuns(export, luns) => *luns_of(&mut next, &export)? = luns,
            Change::RemoveLun(export, target, lun) => {
                let luns = luns_of(&mut next, &export)?;
                let before = luns.len();
                luns.retain(|known| (known.target, known.lun) != (target, lun));
                if luns.len() == before {
                    return Err(not_there("LUN", &format!("{export}/{target}:{lun}")));
                }
            }
            Change::SetAccessState(export, group, state) => {
                set_access_state(&mut next, &export, group, state)?;
            }
            Change::Replace(replacement) => next = replacement.next(now),
        }
        Ok(next)
    }
}

fn set_access_state(
    next: &mut Config,
    name: &str,
    group: u16,
    state: AccessState,
) -> Result<(), Refusal> {
    let export = next.export_mut(name);
    let export = export.ok_or_else(|| not_there("export", name))?;
    let kind = export.kind();
    let has_group = export.has_portal_group(group);
    let Some(states) = export.access_states_mut() else {
        let detail = format!("{name} is a {kind} export: it has no portal groups");
        return Err(Refusal::Conflict(vec![Fault::new(detail)]));
    };
    if !has_group {
        return Err(not_there("portal group", &format!("{name} {group}")));
    }
    match state == AccessState::default() {
        true => states.remove(&group),
        false => states.insert(group, state),
    };
    Ok(())
}

fn luns_of<'a>(config: &'a mut Config, export: &str) -> Result<&'a mut Vec<LunConfig>, Refusal> {
    let known = config.export(export);
    let known = known.ok_or_else(|| not_there("export", export))?;
    if known.luns().is_none() {
        let kind = known.kind();
        let detail = format!("{export} is a {kind} export: it has one disk and no LUNs");
        return Err(Refusal::Conflict(vec![Fault::new(detail)]));
    }
    config
        .luns_mut(export)
        .ok_or_else(|| not_there("export", export))
}

fn remove_disk(next: &mut Config, name: &str, force: bool) -> Result<(), Refusal> {
    if next.disk(name).is_none() {
        return Err(not_there("disk", name));
    }
    let users = users(next, name);
    if !users.is_empty() && !force {
        let detail = format!("disk {name} is in use: {}", users.join(", "));
        let fault = Fault::new(detail).help("remove these first, or remove the disk with --force");
        return Err(Refusal::Conflict(vec![fault]));
    }
    next.disks.retain(|disk| disk.name != name);
    next.retain_exports(|export| export.disk() != Some(name));
    for luns in next.all_luns_mut() {
        luns.retain(|lun| lun.disk != name);
    }
    Ok(())
}
