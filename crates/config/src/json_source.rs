//! Objects in JSON, read by the same readers as files: the API has the same keys as a file.
//!
//! The location of a value is its JSON pointer (RFC 6901), so that a mistake names the field.

use std::sync::Arc;

use scsi::AccessState;
use serde_json::Value;

use super::diagnostics::{Diagnostics, Mistake, MistakeKind, one_of};
use super::disk::{check_size, read_disk, read_limits, read_settings};
use super::export_kinds::EXPORT_KINDS;
use super::location::{Located, Location, Source};
use super::lun::{LUN_KEYS, read_lun};
use super::model::{Config, DiskConfig, ExportConfig, LimitsConfig, LunConfig};
use super::readers::DISK_ALLOWED;
use super::value::{Field, Fields, Raw, Reader, wrong};

/// An export, or its mistakes.
pub type JsonExport = Result<ExportConfig, Diagnostics>;

fn location(pointer: &str, value: &Value) -> Location {
    // Only scalars are shown.
    let text = match value {
        Value::Array(_) | Value::Object(_) => String::new(),
        scalar => scalar.to_string(),
    };
    let source: Arc<Source> = Source::flag(pointer, &text, 0);
    Location::whole(&source)
}

fn raw(pointer: &str, value: &Value) -> Located<Raw> {
    let at = location(pointer, value);
    let raw = match value {
        Value::Null => Raw::Other("value", "null".to_owned()),
        Value::Bool(value) => Raw::Boolean(*value),
        Value::Number(number) => match number.as_u64().map(i128::from) {
            Some(integer) => Raw::Integer(integer),
            None => match number.as_i64() {
                Some(integer) => Raw::Integer(integer.into()),
                None => Raw::Other("number", number.to_string()),
            },
        },
        Value::String(text) => Raw::Text(text.clone()),
        Value::Array(items) => Raw::List(
            items
                .iter()
                .enumerate()
                .map(|(index, item)| raw(&format!("{pointer}/{index}"), item))
                .collect(),
        ),
        Value::Object(_) => Raw::Table(fields(pointer, value)),
    };
    Located::new(raw, at)
}

/// Returns a key as a part of a JSON pointer.
pub fn pointer_token(key: &str) -> String {
    key.replace('~', "~0").replace('/', "~1")
}

fn fields(pointer: &str, value: &Value) -> Fields {
    let members = value.as_object().into_iter().flatten();
    let entries = members.map(|(key, value)| {
        let pointer = format!("{pointer}/{}", pointer_token(key));
        Field {
            key: Located::new(key.clone(), location(&pointer, value)),
            value: raw(&pointer, value),
        }
    });
    Fields {
        location: location(pointer, value),
        entries: entries.collect(),
    }
}

/// Returns the fields of an object with a name from the resource's address.
fn named(name: &str, fields: Fields, diagnostics: &mut Diagnostics) -> Fields {
    let mut fields = without_status(fields);
    match fields.get("name") {
        None => {
            let value = Raw::Text(name.to_owned());
            let value = Located::new(value, location("/name", &Value::from(name)));
            fields.entries.push(Field::new("name", value));
        }
        Some(value) if value.value.text() == Some(name) => {}
        Some(value) => {
            let mistake = wrong("name", value);
            diagnostics.push(mistake.allowed(format!("`{name}`, as in the address, or no `name`")));
        }
    }
    fields
}

/// Returns the mistake that a body is not a JSON value of this type.
fn not_a(kind: &str, value: &Value) -> Mistake {
    let message = format!("the body is not a JSON {kind}");
    Mistake::new(MistakeKind::Syntax, &location("", value), message)
}

fn checked<T>(read: Option<T>, mut diagnostics: Diagnostics) -> Result<T, Diagnostics> {
    diagnostics.sort_and_prune();
    match read {
        Some(read) if diagnostics.is_empty() => Ok(read),
        _ => Err(diagnostics),
    }
}

/// Reads an object from JSON.
fn read_fields<T>(
    value: &Value,
    read: impl FnOnce(Fields, &mut Diagnostics) -> Option<T>,
) -> Result<T, Diagnostics> {
    let mut diagnostics = Diagnostics::default();
    if !value.is_object() {
        diagnostics.push(not_a("object", value));
        return Err(diagnostics);
    }
    let read = read(fields("", value), &mut diagnostics);
    checked(read, diagnostics)
}

/// Reads the fields of an object, which is called `name` in messages, and reports unknown fields.
fn read_object<T>(
    value: &Value,
    name: &'static str,
    read: impl FnOnce(&mut Reader<'_, '_>) -> Option<T>,
) -> Result<T, Diagnostics> {
    read_fields(value, |fields, diagnostics| {
        let mut reader = Reader::new(&fields, name, diagnostics);
        let read = read(&mut reader);
        reader.finish(|_| None);
        read
    })
}

/// Reads the disk `name` from JSON.
///
/// # Errors
/// All mistakes, each with the pointer of its field.
pub fn disk_json(name: &str, value: &Value) -> Result<DiskConfig, Diagnostics> {
    read_fields(value, |fields, diagnostics| {
        Some(read_disk(&named(name, fields, diagnostics), diagnostics).config)
    })
}

/// Reads the export `name` from JSON: `kind`, and the keys of a file's table of this kind.
///
/// # Errors
/// All mistakes, each with the pointer of its field.
pub fn export_json(name: &str, value: &Value) -> JsonExport {
    read_fields(value, |fields, diagnostics| {
        export(named(name, fields, diagnostics), diagnostics)
    })
}

fn export(mut fields: Fields, diagnostics: &mut Diagnostics) -> Option<ExportConfig> {
    let kinds = EXPORT_KINDS.map(|kind| (kind.word, kind));
    let mut reader = Reader::new(&fields, "export", diagnostics);
    reader.require("kind", &one_of(&kinds.map(|(word, _)| word)));
    let kind = reader.choice("kind", &kinds)?.value;
    fields.entries.retain(|field| field.key.value != "kind");
    Some(kind.read(&fields, diagnostics).config)
}

/// Reads the logical unit at an address from JSON, `{"disk": NAME}`.
///
/// # Errors
/// All mistakes, each with the pointer of its field.
pub fn lun_json(target: u8, lun: u16, value: &Value) -> Result<LunConfig, Diagnostics> {
    let disk = read_object(value, "lun", |reader| {
        reader.require("disk", DISK_ALLOWED);
        reader.number("target", u64::from(target)..=u64::from(target));
        reader.number("lun", u64::from(lun)..=u64::from(lun));
        reader.text("disk", DISK_ALLOWED)
    })?
    .value;
    Ok(LunConfig { target, lun, disk })
}

/// Reads the access state of a portal group from its JSON, `{"state": STATE}`.
///
/// # Errors
/// All mistakes, each with the pointer of its field.
pub fn access_state_json(value: &Value) -> Result<AccessState, Diagnostics> {
    let state = read_object(value, "access state", |reader| {
        let names = AccessState::SETTABLE.map(|state| (state.name(), state));
        reader.require("state", &one_of(&names.map(|(name, _)| name)));
        reader.choice("state", &names)
    })?;
    Ok(state.value)
}

/// Reads all logical units of an export from JSON, a list of `{"target": N, "lun": N, "disk": NAME}`.
///
/// # Errors
/// All mistakes, each with the pointer of its field.
pub fn luns_json(value: &Value) -> Result<Vec<LunConfig>, Diagnostics> {
    let mut diagnostics = Diagnostics::default();
    let Some(items) = value.as_array() else {
        diagnostics.push(not_a("array", value));
        return Err(diagnostics);
    };
    let luns: Option<Vec<LunConfig>> = items
        .iter()
        .enumerate()
        .map(|(index, item)| {
            let pointer = format!("/{index}");
            if !item.is_object() {
                let mistake = wrong("lun", &raw(&pointer, item));
                diagnostics.push(mistake.allowed("an object with target, lun and disk"));
                return None;
            }
            Some(read_lun(
                LUN_KEYS,
                &fields(&pointer, item),
                &mut diagnostics,
            ))
        })
        .collect();
    checked(luns, diagnostics)
}

/// Reads the size of a disk from JSON, `{"size": BYTES}`.
///
/// # Errors
/// All mistakes, each with the pointer of its field.
pub fn size_json(value: &Value, block_size: u32) -> Result<Option<u64>, Diagnostics> {
    read_object(value, "disk", |reader| {
        let size = reader.size("size");
        let size = size.filter(|size| check_size(reader, size, block_size));
        Some(size.map(|size| size.value))
    })
}

/// Reads the limits of a disk from JSON. A missing key means no limit.
///
/// # Errors
/// All mistakes, each with the pointer of its field.
pub fn limits_json(value: &Value) -> Result<LimitsConfig, Diagnostics> {
    read_fields(value, |fields, diagnostics| {
        Some(read_limits(&fields, diagnostics))
    })
}

/// Values of the keys that `lunette disk set` changes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DiskSettings(Value);

impl DiskSettings {
    /// Applies the values. Fields without a value are unchanged.
    pub fn apply(&self, disk: &mut DiskConfig) {
        // Mistakes were reported when it was read.
        read_settings(&fields("", &self.0), disk, &mut Diagnostics::default());
    }
}

/// Reads the keys that `lunette disk set` changes from JSON.
///
/// # Errors
/// All mistakes, each with the pointer of its field.
pub fn disk_settings_json(value: &Value) -> Result<DiskSettings, Diagnostics> {
    read_fields(value, |fields, diagnostics| {
        read_settings(&fields, &mut DiskConfig::default(), diagnostics);
        Some(DiskSettings(value.clone()))
    })
}

/// Reads all disks and exports from JSON, `{"disks": [...], "exports": [...]}`, into a configuration without any. Relations between them
/// are not checked.
///
/// # Errors
/// All mistakes, each with the pointer of its field.
pub fn objects_json(value: &Value, mut config: Config) -> Result<Config, Diagnostics> {
    read_fields(value, |fields, diagnostics| {
        let mut reader = Reader::new(&fields, "configuration", diagnostics);
        reader.require("disks", "a list of disks");
        reader.require("exports", "a list of exports");
        let disks = reader.objects("disks", "a list of disks");
        let exports = reader.objects("exports", "a list of exports");
        reader.finish(|_| None);
        for fields in disks {
            let disk = read_disk(&without_status(fields.clone()), diagnostics);
            config.disks.push(disk.config);
        }
        for fields in exports {
            if let Some(export) = export(without_status(fields.clone()), diagnostics) {
                config.add_export(export);
            }
        }
        Some(config)
    })
}

/// Removes `status`: a client may return the result of GET, and its status is ignored.
fn without_status(mut fields: Fields) -> Fields {
    fields.entries.retain(|field| field.key.value != "status");
    fields
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::{BlockDeviceConfig, Transport};

    fn locations_and_messages(mistakes: &Diagnostics) -> Vec<(String, String)> {
        let locations_and_messages =
            |m: &Mistake| (m.location.source.label.clone(), m.message.clone());
        mistakes.iter().map(locations_and_messages).collect()
    }

    #[test]
    fn json_disk_equals_the_file_form() {
        let disk = disk_json(
            "d0",
            &json!({"backend": "ram", "size": "1M", "serial": "S"}),
        );
        let disk = disk.unwrap();
        assert_eq!(
            disk.backend,
            BlockDeviceConfig::Ram {
                size: 1 << 20,
                persist: crate::devices::Persist::None
            }
        );
        assert_eq!(
            (disk.name.as_str(), disk.serial.as_deref()),
            ("d0", Some("S"))
        );
        let again = disk_json(
            "d0",
            &json!({"name": "d0", "backend": "ram", "size": 1_048_576,
            "serial": "S", "status": {"used_by": []}}),
        );
        assert_eq!(again.unwrap(), disk);
    }

    #[test]
    fn omitted_error_policy_keys_are_unchanged() {
        let mut disk = disk_json("d0", &json!({"backend": "ram", "size": "1M"})).unwrap();
        let mut set = |body: Value| {
            disk_settings_json(&body).unwrap().apply(&mut disk);
            (disk.errors.on_error, disk.errors.io_timeout)
        };
        let stop = block::OnError::Stop;
        assert_eq!(
            set(json!({"on_error": "stop", "io_timeout": 30})),
            (stop, 30)
        );
        assert_eq!(set(json!({})), (stop, 30));
        assert_eq!(set(json!({"io_timeout": 0})), (stop, 0));
        let other = disk_settings_json(&json!({"serial": "S", "io_timeout": 86401}));
        let mut pointers: Vec<String> = locations_and_messages(&other.unwrap_err())
            .into_iter()
            .map(|t| t.0)
            .collect();
        pointers.sort();
        assert_eq!(pointers, ["/io_timeout", "/serial"]);
    }

    #[test]
    fn mistakes_name_their_fields() {
        let body = json!({"name": "d1", "backend": "rma", "size": -1, "colour": "red"});
        let mistakes = disk_json("d0", &body).unwrap_err();
        let mut pointers: Vec<String> = locations_and_messages(&mistakes)
            .into_iter()
            .map(|t| t.0)
            .collect();
        pointers.sort();
        assert_eq!(pointers, ["/backend", "/colour", "/name", "/size"]);
        let luns = json!([{"target": 0, "lun": 0, "disk": "d0"}, {"target": 256, "lun": 1}]);
        let mistakes = luns_json(&luns).unwrap_err();
        let pointers: Vec<String> = locations_and_messages(&mistakes)
            .into_iter()
            .map(|t| t.0)
            .collect();
        assert_eq!(pointers, ["/1", "/1/target"]);
        assert!(
            locations_and_messages(&disk_json("d0", &json!([])).unwrap_err())[0]
                .1
                .contains("not a JSON object")
        );
    }

    #[test]
    fn an_export_has_one_of_the_kinds() {
        let blk = json!({"kind": "vhost-blk", "disk": "d0", "socket": "/run/d0.sock"});
        let read = |name, value| export_json(name, value).unwrap();
        assert_eq!(read("e", &blk).transport, Transport::VhostBlk);
        let scsi = json!({"kind": "vhost-scsi", "socket": "/run/c0.sock",
            "lun": [{"target": 4, "lun": 0, "disk": "d0"}]});
        let scsi = read("c0", &scsi);
        assert_eq!(
            (scsi.transport, scsi.luns[0].target),
            (Transport::VhostScsi, 4)
        );
        let iscsi =
            json!({"kind": "iscsi", "portals": ["127.0.0.1"], "lun": [{"lun": 4, "disk": "d0"}]});
        let iscsi = read("iqn.2026-11.org.example:t0", &iscsi);
        assert_eq!((iscsi.luns[0].lun, iscsi.luns[0].target), (4, 0));
        let nbd = json!({"kind": "nbd", "disk": "d0", "listen": "127.0.0.1:10809"});
        assert_eq!(read("e", &nbd).transport, Transport::Nbd);
        let none = export_json("e", &json!({"kind": "tape"})).unwrap_err();
        assert_eq!(locations_and_messages(&none)[0].0, "/kind");
        assert!(export_json("e", &json!({})).is_err());
    }
}
