//! Entries of a target's access list.

use iscsi::access::{AclEntry, Network};
use serde_json::{Value, json};

use super::diagnostics::Diagnostics;
use super::key::{Key, Kind, RunTime, read_all};
use super::readers::{ISCSI_NAME_ALLOWED, parsed};
use super::setting::key;
use super::value::{Fields, Reader};

/// Values given for an entry.
#[derive(Default)]
pub struct AclDraft {
    initiator: Option<String>,
    network: Option<Network>,
    read_only: bool,
    is_wrong: bool,
}

/// A key of an access list entry.
pub type AclKey = Key<AclDraft, AclEntry>;

/// All keys of an entry.
pub static ACL_KEYS: &[AclKey] = &[
    key! { "initiator": Kind::Text("an iSCSI name", ISCSI_NAME_ALLOWED); "any"; RunTime::Reload;
        "name of the initiator"; both initiator
    },
    key! { "network": Kind::Text("an address or a network", "an address or a network, such as 192.0.2.0/24"); "any"; RunTime::Reload;
        "its address or network, such as `192.0.2.0/24`";
        read |key, reader, draft| {
            if let Some(text) = key.text(reader) {
                draft.network = parsed::<Network>(reader, key.name, &text);
                draft.is_wrong |= draft.network.is_none();
            }
        };
        get |entry| entry.network.map(|network| json!(network.to_string()))
    },
    key! { "read_only": Kind::Boolean; "`false`"; RunTime::Reload; "read-only access"; both read_only },
];

/// Reads an entry.
pub fn read_acl(fields: &Fields, diagnostics: &mut Diagnostics) -> Option<AclEntry> {
    let mut reader = Reader::new(fields, "acl", diagnostics);
    let mut draft = AclDraft::default();
    read_all(ACL_KEYS, &mut reader, &mut draft);
    reader.finish(|_| None);
    (!draft.is_wrong).then_some(AclEntry {
        initiator: draft.initiator,
        network: draft.network,
        read_only: draft.read_only,
    })
}

/// Returns entries as the value of a key.
pub fn acl_value(entries: &[AclEntry]) -> Value {
    let values = |entry: &AclEntry| -> Value {
        let key_values = ACL_KEYS.iter();
        let key_values =
            key_values.filter_map(|key| Some((key.name.to_owned(), (key.get)(entry)?)));
        Value::Object(key_values.collect())
    };
    entries.iter().map(values).collect()
}
