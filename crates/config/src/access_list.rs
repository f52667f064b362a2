//! Entries of a target's access list.

use iscsi::access::AclEntry;
use serde_json::Value;

use super::diagnostics::Diagnostics;
use super::key::{Key, Kind, RunTime, json_of, key_values, read_all};
use super::readers::ISCSI_NAME_ALLOWED;
use super::setting::key;
use super::value::{Fields, Reader};

/// A key of an access list entry.
pub type AclKey = Key<AclEntry>;

/// All keys of an entry.
pub static ACL_KEYS: &[AclKey] = &[
    key! { "initiator": Kind::Text("an iSCSI name", ISCSI_NAME_ALLOWED); "any"; RunTime::RELOAD;
        "name of the initiator"; both initiator
    },
    key! { "network": Kind::Text("an address or a network", "an address or a network, such as 192.0.2.0/24"); "any"; RunTime::RELOAD;
        "its address or network, such as `192.0.2.0/24`";
        both network
    },
    key! { "read_only": Kind::Boolean; "`false`"; RunTime::RELOAD; "read-only access"; both read_only },
];

/// Reads an entry.
pub fn read_acl(fields: &Fields, diagnostics: &mut Diagnostics) -> AclEntry {
    let mut reader = Reader::new(fields, "acl", diagnostics);
    let mut entry = AclEntry::default();
    read_all(ACL_KEYS, &mut reader, &mut entry);
    reader.finish(|_| None);
    entry
}

/// Returns entries as the value of a key.
pub fn acl_value(entries: &[AclEntry]) -> Value {
    let values = |entry| json_of(key_values(ACL_KEYS, entry));
    entries.iter().map(values).collect()
}
