//! Values given for an export before it is checked against other objects, and keys of several kinds of exports.

use std::path::PathBuf;

use block::ExportPlacement;
use serde_json::{Value, json};

use super::diagnostics::Diagnostics;
use super::export::{ExportConfig, ExportObject};
use super::key::{Item, Key, Kind, NONE, REQUIRED, RunTime};
use super::location::Located;
use super::lun::LunDraft;
use super::model::SocketRights;
use super::placement::{PlacementDraft, WORKERS_ALLOWED, read_workers, workers_value};
use super::readers::{NAME_ALLOWED, SOCKET_ALLOWED, read_name, read_socket};
use super::setting::{Setting, key};
use super::value::Fields;

/// Draft of an export.
pub trait ExportDraft {
    /// Returns the name.
    fn name(&self) -> Option<&Located<String>>;
    /// Returns the workers that serve it.
    fn placement(&self) -> &PlacementDraft;
    /// Returns the export, if no key is missing.
    fn complete(&self) -> Option<ExportConfig>;

    /// Returns the socket, if it has one.
    fn socket(&self) -> Option<&Located<PathBuf>> {
        None
    }

    /// Returns the socket, if other exports of the kind may have the same.
    fn shared_socket(&self) -> Option<&Located<PathBuf>> {
        None
    }

    /// Returns the disk of an export of one disk.
    fn disk(&self) -> Option<&Located<String>> {
        None
    }

    /// Returns the logical units.
    fn luns(&self) -> &[LunDraft] {
        &[]
    }

    /// Returns the list of logical units if they have their own flags.
    fn luns_by_flags(&mut self) -> Option<&mut Vec<LunDraft>> {
        None
    }
}

/// Values given for a vhost-user export of any device type.
#[derive(Default)]
pub struct VhostDraft {
    pub name: Option<Located<String>>,
    pub socket: Option<Located<PathBuf>>,
    pub rights: SocketRights,
    pub queues: Option<u16>,
}

/// A draft of a vhost-user export.
pub trait Vhost {
    /// Returns the values common to vhost-user exports.
    fn vhost(&mut self) -> &mut VhostDraft;
}

/// A draft of an export with a placement: of any kind.
pub trait Placed {
    /// Returns the placement for modification.
    fn placement_mut(&mut self) -> &mut PlacementDraft;
}

/// For keys with a change that clients can only see in a new session.
pub const ENDS_SESSION: RunTime = RunTime::ReloadEndsSession;

/// Key for the name of a vhost-user export.
pub const fn name<D: Vhost, T: ExportObject>(default: &'static str) -> Key<D, T> {
    key! { "name": Kind::Text("a name", NAME_ALLOWED); default; RunTime::AddAnew; "name of the export";
        read |key, reader, draft| draft.vhost().name = read_name(reader, key.name); get |export| Some(json!(export.name()))
    }
}

/// Key for the socket.
pub const fn socket<D: Vhost, T: ExportObject>() -> Key<D, T> {
    key! { "socket": Kind::Text("path of a socket, at most 107 bytes", SOCKET_ALLOWED); REQUIRED; ENDS_SESSION; "vhost-user socket";
        read |key, reader, draft| draft.vhost().socket = read_socket(reader, key.name); get |export| export.socket()?.value()
    }
}

/// Key for the number of request queues; the default is the maximum.
pub const fn queues<D: Vhost, T: ExportObject>(
    most: u16,
    default: &'static str,
    help: &'static str,
) -> Key<D, T> {
    key! { "queues": Kind::Number("", 1..=most as u64); default; ENDS_SESSION; help;
        read |key, reader, draft| key.set(reader, &mut draft.vhost().queues); get |export| export.queues().value()
    }
}

/// For the placement of an export.
const PLACE: RunTime = RunTime::Command("lunette export place");

/// Key for the workers that serve an export.
pub const fn workers<D: Placed, T: ExportObject>() -> Key<D, T> {
    key! { "workers": Kind::List("list of workers, from 0", WORKERS_ALLOWED, Item::Number); NONE; PLACE;
        "workers that serve it. In a flag: `workers=1+3`";
        read |_, reader, draft| draft.placement_mut().workers = read_workers(reader); get |export| workers_value(export.placement())
    }
}

/// Key for a dedicated worker.
pub const fn dedicated<D: Placed, T: ExportObject>(help: &'static str) -> Key<D, T> {
    key! { "dedicated": Kind::Boolean; "`false`"; PLACE; help;
        read |key, reader, draft| key.set(reader, &mut draft.placement_mut().dedicated);
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
    pub(crate) read: fn(&Fields, &mut Diagnostics) -> Box<dyn ExportDraft>,
}
