//! Keys of disks on Ceph RBD images: image, cluster and user.

use std::collections::BTreeMap;

use block::{ImageName, RbdLock};
use serde_json::json;

use super::device_keys::{DiskKey, device_key};
use super::diagnostics::{Mistake, MistakeKind};
use super::key::{Kind, NONE, REQUIRED};
use super::setting::Choice;
use super::value::{Raw, Reader, wrong};

/// Ceph options with secrets that read-only clients must not see.
const SECRETS: [&str; 2] = ["key", "keyfile"];

fn read_options(
    reader: &mut Reader<'_, '_>,
    key: &'static str,
    allowed: &str,
) -> BTreeMap<String, String> {
    let mut options = BTreeMap::new();
    let Some(fields) = reader.table(key, allowed) else {
        return options;
    };
    for field in &fields.entries {
        let key = field.key.value.clone();
        let value = match &field.value.value {
            Raw::Word(text) | Raw::Text(text) => text.clone(),
            Raw::Integer(number) => number.to_string(),
            Raw::Boolean(value) => value.to_string(),
            _ => {
                let mistake = wrong(&key, &field.value);
                let mistake = mistake.allowed("a text, a whole number, `true` or `false`");
                reader.diagnostics.push(mistake);
                continue;
            }
        };
        let mistake = |reason| Mistake::new(MistakeKind::Key, &field.key.location, reason);
        let mistake = if SECRETS.contains(&key.as_str()) {
            let reason = "would be visible to all readers of the configuration";
            mistake(format!("`option.{key}` {reason}"))
                .help("write the key to a file, and set `keyring` to its path")
        } else if key.is_empty() || key.contains('\0') || value.contains('\0') {
            mistake("`option`: not an option of Ceph".to_owned())
        } else if options.insert(key.clone(), value).is_some() {
            mistake(format!("`option.{key}` is given twice"))
        } else {
            continue;
        };
        reader.diagnostics.push(mistake);
    }
    options
}

/// Keys of disks on RBD images.
pub static RBD_KEYS: &[DiskKey] = &[
    device_key! {
        "image": Kind::Text("`POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]`", ImageName::FORM); REQUIRED;
        "the image; a snapshot is read-only"; [Rbd] (image)
    },
    device_key! {
        "conf": Kind::Text("path of a file", "the path of Ceph's configuration, such as /etc/ceph/ceph.conf"); "Ceph's";
        "configuration of the cluster"; [Rbd] (cluster.conf)
    },
    device_key! {
        "id": Kind::Text("a user without `client.`", "a user of the cluster without `client.`, such as admin"); "Ceph's (`admin`)";
        "the user"; [Rbd] (cluster.id)
    },
    device_key! {
        "keyring": Kind::Text("path of a file", "the path of the file with the user's key"); "Ceph's"; "file with the user's key"; [Rbd] (cluster.keyring)
    },
    device_key! {
        "mon_host": Kind::Text("addresses of monitors", "addresses of monitors, such as \"10.0.0.1,10.0.0.2\""); "Ceph's";
        "monitors"; [Rbd] (cluster.mon_host)
    },
    device_key! {
        "lock": RbdLock::KIND; "`cooperative`"; "[access of other clients](rbd.md#who-else-may-write)"; [Rbd] (lock)
    },
    device_key! {
        "option": Kind::Table("a table of Ceph's options, such as { rbd_cache = \"true\" }"); NONE;
        "further options of Ceph. In a flag: `option.KEY=VALUE`";
        [Rbd] (cluster.options) by (
            |key: &DiskKey, reader| Some(read_options(reader, key.name, &key.kind.allowed())),
            |options: &BTreeMap<_, _>| (!options.is_empty()).then(|| json!(options))
        )
    },
];
