//! What is said of an export before it is held against everything else, and the keys that several kinds of exports have.

use std::path::PathBuf;

use reactor::ExportPlacement;
use serde_json::{Value, json};

use super::export::{ExportConfig, ExportObject};
use super::key::{Item, Key, Kind, NONE, REQUIRED, RunTime};
use super::lun::LunDraft;
use super::place::At;
use super::placement::{PlacementDraft, WORKERS_ALLOWED, read_workers, workers_value};
use super::readers::{NAME_ALLOWED, SOCKET_ALLOWED, read_name, read_socket};
use super::socket_rights::SocketRights;

/// What is said of an export.
pub trait ExportDraft {
    /// Its name.
    fn name(&self) -> Option<&At<String>>;
    /// Which workers serve it.
    fn placement(&self) -> &PlacementDraft;
    /// The export, if nothing is missing.
    fn complete(&self) -> Option<ExportConfig>;

    /// Its socket, if it has one.
    fn socket(&self) -> Option<&At<PathBuf>> {
        None
    }

    /// The disk of an export of one disk.
    fn disk(&self) -> Option<&At<String>> {
        None
    }

    /// Its logical units.
    fn luns(&self) -> &[LunDraft] {
        &[]
    }

    /// Where logical units are added by flags of their own.
    fn luns_by_flags(&mut self) -> Option<&mut Vec<LunDraft>> {
        None
    }
}

/// What is said of a vhost-user export, whatever device it is.
#[derive(Default)]
pub struct VhostDraft {
    pub name: Option<At<String>>,
    pub socket: Option<At<PathBuf>>,
    pub rights: SocketRights,
    pub queues: Option<u16>,
}

/// A draft of a vhost-user export.
pub trait Vhost {
    /// What it shares with the others.
    fn vhost(&mut self) -> &mut VhostDraft;
}

/// A draft of an export with a placement: of any.
pub trait Placed {
    /// To say it.
    fn placement_mut(&mut self) -> &mut PlacementDraft;
}

/// What an export has when its clients may not see another.
pub const ENDS_SESSION: RunTime = RunTime::ReloadEndsSession;

/// The name of a vhost-user export.
pub const fn name<D: Vhost, T: ExportObject>(default: &'static str) -> Key<D, T> {
    Key {
        name: "name",
        kind: Kind::Text("a name", NAME_ALLOWED),
        default,
        run_time: RunTime::AddAnew,
        of: &[],
        help: "name of the export",
        read: |key, reader, draft| draft.vhost().name = read_name(reader, key.name),
        get: |export| Some(json!(export.name())),
    }
}

/// Its socket.
pub const fn socket<D: Vhost, T: ExportObject>() -> Key<D, T> {
    Key {
        name: "socket",
        kind: Kind::Text("path of a socket, at most 107 bytes", SOCKET_ALLOWED),
        default: REQUIRED,
        run_time: ENDS_SESSION,
        of: &[],
        help: "vhost-user socket",
        read: |key, reader, draft| draft.vhost().socket = read_socket(reader, key.name),
        get: |export| export.socket().map(|path| json!(path.to_string_lossy())),
    }
}

/// Its request queues; when nothing is said as many as a client may want.
pub const fn queues<D: Vhost, T: ExportObject>(
    most: u16,
    default: &'static str,
    help: &'static str,
) -> Key<D, T> {
    Key {
        name: "queues",
        kind: Kind::Number("", 1..=most as u64),
        default,
        run_time: ENDS_SESSION,
        of: &[],
        help,
        read: |key, reader, draft| {
            let queues = key.number(reader);
            draft.vhost().queues = queues.map(|at| at.value as u16);
        },
        get: |export| Some(json!(export.queues())),
    }
}

/// Of where an export is served.
const PLACE: RunTime = RunTime::Command("lunette export place");

/// The workers that serve an export.
pub const fn workers<D: Placed, T: ExportObject>() -> Key<D, T> {
    Key {
        name: "workers",
        kind: Kind::List("list of workers, from 0", WORKERS_ALLOWED, Item::Number),
        default: NONE,
        run_time: PLACE,
        of: &[],
        help: "the workers that serve it. In a flag `workers=1+3`",
        read: |_, reader, draft| draft.placement_mut().workers = read_workers(reader),
        get: |export| workers_value(export.placement()),
    }
}

/// A worker of its own.
pub const fn dedicated<D: Placed, T: ExportObject>(help: &'static str) -> Key<D, T> {
    Key {
        name: "dedicated",
        kind: Kind::Boolean,
        default: "`false`",
        run_time: PLACE,
        of: &[],
        help,
        read: |key, reader, draft| draft.placement_mut().dedicated = reader.boolean(key.name),
        get: |export| Some(json!(*export.placement() == ExportPlacement::Dedicated)),
    }
}

/// Texts as the value of a key; nothing where there are none.
pub fn texts<T: ToString>(texts: &[T]) -> Option<Value> {
    let texts: Vec<String> = texts.iter().map(ToString::to_string).collect();
    (!texts.is_empty()).then(|| json!(texts))
}
