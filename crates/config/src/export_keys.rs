//! Kinds of exports, and keys of several kinds.

use block::ExportPlacement;
use serde_json::{Value, json};

use super::diagnostics::{Diagnostics, MistakeKind};
use super::key::{Item, Key, Kind, NONE, REQUIRED, RunTime, read_all, schema_of};
use super::model::{ExportConfig, Transport};
use super::placement::{WORKERS_ALLOWED, read_workers, workers_value};
use super::readers::{DISK, NAME, SOCKET};
use super::setting::key;
use super::value::{Draft, Fields, Reader};

/// A key of an export.
pub type ExportKey = Key<ExportConfig>;

/// Key for the name of an export other than an iSCSI target.
pub const fn name(default: &'static str) -> ExportKey {
    key! { "name": NAME; default; RunTime::ADD_AGAIN; "name of the export"; both name }
}

/// Key for the only disk.
pub const ONE_DISK: ExportKey =
    key! { "disk": DISK; REQUIRED; RunTime::ENDS_SESSION; "the disk"; both disk };

/// Key for the vhost-user socket.
pub const VHOST_SOCKET: ExportKey =
    key! { "socket": SOCKET; REQUIRED; RunTime::ENDS_SESSION; "vhost-user socket"; both socket };

/// For the placement of an export.
const PLACE: RunTime = RunTime("`lunette export place`, reload");

/// Key for the workers that serve an export.
pub const WORKERS: ExportKey = key! {
    "workers": Kind::List("list of workers, from 0", WORKERS_ALLOWED, Item::Number); NONE; PLACE;
    "workers that serve it. In a flag: `workers=1+3`";
    read |key, reader, export| {
        if let Some(workers) = read_workers(key, reader) {
            export.placement = ExportPlacement::Workers(workers);
        }
    };
    get |export| workers_value(&export.placement)
};

/// Key for a dedicated worker.
pub const DEDICATED: ExportKey = key! {
    "dedicated": Kind::Boolean; "`false`"; PLACE; "start a worker for this export alone";
    read |key, reader, export| {
        if reader.boolean(key.name).is_some_and(|at| at.value) {
            export.placement = ExportPlacement::Dedicated;
        }
    };
    get |export| Some(json!(export.placement == ExportPlacement::Dedicated))
};

/// Returns texts as the value of a key; `None` if there are none.
pub fn texts(texts: impl IntoIterator<Item = impl ToString>) -> Option<Value> {
    let texts: Vec<String> = texts.into_iter().map(|text| text.to_string()).collect();
    (!texts.is_empty()).then(|| json!(texts))
}

/// A kind of export.
pub struct ExportKind {
    /// Transport.
    pub transport: Transport,
    /// Word in the API.
    pub word: &'static str,
    /// Syntax of its flag.
    pub form: &'static str,
    /// Name of its tables in a file.
    pub table: &'static str,
    /// Description of the allowed value.
    pub example: &'static str,
    /// Name of its schema.
    pub schema: &'static str,
    /// Description.
    pub summary: &'static str,
    /// All keys, by the tables of the documentation, with their headings.
    pub keys: &'static [(&'static str, &'static [ExportKey])],
    /// Default of `queues`.
    pub(crate) queues: u16,
    /// Checks relations between the keys of an export.
    pub(crate) relate: fn(&mut Reader<'_, '_>, &ExportConfig),
    /// Returns a hint for keys of other objects.
    pub(crate) elsewhere: fn(&str) -> Option<String>,
}

impl ExportKind {
    /// Returns all keys.
    pub(crate) fn all_keys(&self) -> impl Iterator<Item = &'static ExportKey> + use<> {
        self.keys.iter().flat_map(|(_, keys)| *keys)
    }

    /// Returns its keys as a JSON schema.
    pub fn properties(&self) -> Value {
        schema_of(self.all_keys())
    }

    /// Reads an export.
    pub(crate) fn read(
        &self,
        fields: &Fields,
        diagnostics: &mut Diagnostics,
    ) -> Draft<ExportConfig> {
        let mut reader = Reader::new(fields, self.table, diagnostics);
        let mut export = ExportConfig {
            transport: self.transport,
            queues: self.queues,
            ..ExportConfig::default()
        };
        for (_, keys) in self.keys {
            read_all(keys, &mut reader, &mut export);
        }
        if let (Some(disk), None) = (&export.disk, fields.at("name")) {
            export.name.clone_from(disk);
        }
        relate_placement(&mut reader, &export.placement);
        (self.relate)(&mut reader, &export);
        reader.finish(self.elsewhere);
        Draft {
            config: export,
            fields: fields.clone(),
        }
    }
}

/// Reports that `workers` and `dedicated` are given.
fn relate_placement(reader: &mut Reader<'_, '_>, placement: &ExportPlacement) {
    if *placement == ExportPlacement::Dedicated
        && let (Some(at), Some(_)) = (reader.location("dedicated"), reader.location("workers"))
    {
        let message = "`workers` and `dedicated` exclude each other";
        let help = "use `workers` to select shared workers, or `dedicated` to start one for this export alone";
        reader
            .diagnostics
            .remedy(MistakeKind::Key, at, message, help);
    }
}
