//! Values given for an export before it is checked against other objects, and keys of several kinds of exports.

use std::ops::{Deref, DerefMut};
use std::path::PathBuf;

use block::ExportPlacement;
use serde_json::{Value, json};

use super::diagnostics::Diagnostics;
use super::export::ExportObject;
use super::key::{Item, Key, Kind, NONE, REQUIRED, RunTime};
use super::location::Located;
use super::lun::LunDraft;
use super::model::ExportConfig;
use super::placement::{PlacementDraft, WORKERS_ALLOWED, read_workers, workers_value};
use super::readers::{NAME, SOCKET};
use super::setting::{Setting, key};
use super::value::Fields;

/// Values given for an export. Those that are checked against other objects have locations; all others are in the configuration.
#[derive(Default)]
pub struct ExportDraft<T = ExportConfig> {
    pub name: Option<Located<String>>,
    pub disk: Option<Located<String>>,
    pub socket: Option<Located<PathBuf>>,
    pub luns: Vec<LunDraft>,
    /// Disks that are logical units numbered from 0.
    pub disks: Vec<Located<String>>,
    pub placement: PlacementDraft,
    /// A portal is wrong: portal groups are not checked.
    pub has_wrong_portal: bool,
    /// The other values.
    pub config: T,
}

impl<T> Deref for ExportDraft<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.config
    }
}

impl<T> DerefMut for ExportDraft<T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.config
    }
}

impl<T> ExportDraft<T> {
    /// Returns the draft as one of an export of any kind.
    pub fn of_any_kind(self, config: fn(T) -> ExportConfig) -> ExportDraft {
        ExportDraft {
            name: self.name,
            disk: self.disk,
            socket: self.socket,
            luns: self.luns,
            disks: self.disks,
            placement: self.placement,
            has_wrong_portal: self.has_wrong_portal,
            config: config(self.config),
        }
    }
}

impl ExportDraft {
    /// Returns the export, if no key is missing.
    pub fn complete(&self) -> Option<ExportConfig> {
        let mut export = self.config.clone();
        let disk = self.disk.as_ref().map(|at| at.value.clone());
        let socket = self.socket.as_ref().map(|at| at.value.clone());
        export.fill(self.name.as_ref()?.value.clone(), disk, socket)?;
        if let Some(luns) = export.luns_mut() {
            *luns = self
                .luns
                .iter()
                .map(LunDraft::complete)
                .collect::<Option<_>>()?;
        }
        *export.placement_mut() = self.placement.placement();
        Some(export)
    }

    /// Returns the list of logical units if they have their own flags.
    pub fn luns_by_flags(&mut self) -> Option<&mut Vec<LunDraft>> {
        let has_flags = self.config.luns().is_some() && self.config.only_target().is_none();
        has_flags.then_some(&mut self.luns)
    }
}

/// For keys with a change that clients can only see in a new session.
pub const ENDS_SESSION: RunTime = RunTime::ReloadEndsSession;

/// Key for the name of a vhost-user export.
pub const fn name<T: ExportObject>(default: &'static str) -> Key<ExportDraft<T>, T> {
    key! { "name": NAME; default; RunTime::AddAnew; "name of the export"; set name; get |export| Some(json!(export.name()))
    }
}

/// Key for the socket.
pub const fn socket<T: ExportObject>() -> Key<ExportDraft<T>, T> {
    key! { "socket": SOCKET; REQUIRED; ENDS_SESSION; "vhost-user socket"; set socket; get |export| export.socket()?.value()
    }
}

/// For the placement of an export.
const PLACE: RunTime = RunTime::Command("lunette export place");

/// Key for the workers that serve an export.
pub const fn workers<T: ExportObject>() -> Key<ExportDraft<T>, T> {
    key! { "workers": Kind::List("list of workers, from 0", WORKERS_ALLOWED, Item::Number); NONE; PLACE;
        "workers that serve it. In a flag: `workers=1+3`";
        read |_, reader, draft| draft.placement.workers = read_workers(reader); get |export| workers_value(export.placement())
    }
}

/// Key for a dedicated worker.
pub const fn dedicated<T: ExportObject>(help: &'static str) -> Key<ExportDraft<T>, T> {
    key! { "dedicated": Kind::Boolean; "`false`"; PLACE; help;
        read |key, reader, draft| key.set(reader, &mut draft.placement.dedicated);
        get |export| Some(json!(*export.placement() == ExportPlacement::Dedicated))
    }
}

/// Returns texts as the value of a key; `None` if there are none.
pub fn texts(texts: impl IntoIterator<Item = impl ToString>) -> Option<Value> {
    let texts: Vec<String> = texts.into_iter().map(|text| text.to_string()).collect();
    (!texts.is_empty()).then(|| json!(texts))
}

/// A kind of export.
pub struct ExportKind {
    /// Word in the API.
    pub word: &'static str,
    /// Name of its tables in a file.
    pub table: &'static str,
    /// Description of the allowed value.
    pub example: &'static str,
    /// Name of its schema.
    pub schema: &'static str,
    /// Description.
    pub summary: &'static str,
    /// Returns its keys as a JSON schema.
    pub properties: fn() -> Value,
    /// Reads an export.
    pub(crate) read: fn(&Fields, &mut Diagnostics) -> ExportDraft,
}
