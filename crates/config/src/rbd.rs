//! Disks on Ceph RBD images: image, cluster and user.

use std::collections::BTreeMap;

use block::{ClusterConfig, ImageName, RbdLock};
use serde_json::{Value, json};

use super::devices::BlockDeviceConfig;
use super::diagnostics::{Mistake, MistakeKind};
use super::disk::{DiskKey, path_value};
use super::key::{Key, Kind, NONE, REQUIRED, RunTime, words};
use super::model::DiskConfig;
use super::value::{Raw, Reader, wrong};

/// An RBD image and its cluster.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdConfig {
    /// `POOL[/NAMESPACE]/IMAGE[@SNAP]`.
    pub image: ImageName,
    /// Cluster, user and options.
    pub cluster: ClusterConfig,
    /// Other writers of the image.
    pub lock: RbdLock,
    /// Requested size in bytes, for a change; otherwise the image has its own size.
    pub size: Option<u64>,
}

/// Returns the RBD configuration of a disk on an image.
pub fn config(disk: &DiskConfig) -> Option<&RbdConfig> {
    match &disk.backend {
        BlockDeviceConfig::Rbd(rbd) => Some(rbd),
        _ => None,
    }
}

/// Ceph options with secrets that read-only clients must not see.
const SECRETS: [&str; 2] = ["key", "keyfile"];

fn read_image(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<ImageName> {
    let text = reader.text(key, ImageName::FORM)?;
    match ImageName::parse(&text.value) {
        Some(image) => Some(image),
        None => {
            let message = format!("`{key}`: found {:?}", text.value);
            let mistake = Mistake::new(MistakeKind::Value, &text.location, message);
            reader.diagnostics().push(mistake.allowed(ImageName::FORM));
            None
        }
    }
}

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
                reader.diagnostics().push(mistake);
                continue;
            }
        };
        let location = &field.key.location;
        let mistake = if SECRETS.contains(&key.as_str()) {
            let message =
                format!("`option.{key}` would be visible to all readers of the configuration");
            Mistake::new(MistakeKind::Key, location, message)
                .help("write the key to a file, and set `keyring` to its path")
        } else if key.is_empty() || key.contains('\0') || value.contains('\0') {
            Mistake::new(
                MistakeKind::Key,
                location,
                "`option`: not an option of Ceph",
            )
        } else if options.insert(key.clone(), value).is_some() {
            Mistake::new(
                MistakeKind::Key,
                location,
                format!("`option.{key}` is given twice"),
            )
        } else {
            continue;
        };
        reader.diagnostics().push(mistake);
    }
    options
}

pub const IMAGE: DiskKey = Key {
    name: "image",
    kind: Kind::Text("`POOL[/NAMESPACE]/IMAGE[@SNAPSHOT]`", ImageName::FORM),
    default: REQUIRED,
    run_time: RunTime::AddAnew,
    of: &["rbd"],
    help: "the image; a snapshot is read-only",
    read: |key, reader, disk| disk.image = read_image(reader, key.name),
    get: |disk| Some(json!(config(disk)?.image.to_string())),
};

pub const CONF: DiskKey = Key {
    name: "conf",
    kind: Kind::Text(
        "path of a file",
        "the path of Ceph's configuration, such as /etc/ceph/ceph.conf",
    ),
    default: "Ceph's",
    run_time: RunTime::AddAnew,
    of: &["rbd"],
    help: "configuration of the cluster",
    read: |key, reader, disk| disk.cluster.conf = key.text(reader).map(|at| at.value.into()),
    get: |disk| config(disk)?.cluster.conf.as_deref().map(path_value),
};

pub const ID: DiskKey = Key {
    name: "id",
    kind: Kind::Text(
        "a user without `client.`",
        "a user of the cluster without `client.`, such as admin",
    ),
    default: "Ceph's (`admin`)",
    run_time: RunTime::AddAnew,
    of: &["rbd"],
    help: "the user",
    read: |key, reader, disk| disk.cluster.id = key.text(reader).map(|at| at.value),
    get: |disk| config(disk)?.cluster.id.clone().map(Value::from),
};

pub const KEYRING: DiskKey = Key {
    name: "keyring",
    kind: Kind::Text("path of a file", "the path of the file with the user's key"),
    default: "Ceph's",
    run_time: RunTime::AddAnew,
    of: &["rbd"],
    help: "file with the user's key",
    read: |key, reader, disk| disk.cluster.keyring = key.text(reader).map(|at| at.value.into()),
    get: |disk| config(disk)?.cluster.keyring.as_deref().map(path_value),
};

pub const MON_HOST: DiskKey = Key {
    name: "mon_host",
    kind: Kind::Text(
        "addresses of monitors",
        "addresses of monitors, such as \"10.0.0.1,10.0.0.2\"",
    ),
    default: "Ceph's",
    run_time: RunTime::AddAnew,
    of: &["rbd"],
    help: "monitors",
    read: |key, reader, disk| disk.cluster.mon_host = key.text(reader).map(|at| at.value),
    get: |disk| config(disk)?.cluster.mon_host.clone().map(Value::from),
};

pub const LOCK: DiskKey = Key {
    name: "lock",
    kind: Kind::Word(&const { words(&RbdLock::WORDS) }),
    default: "`cooperative`",
    run_time: RunTime::AddAnew,
    of: &["rbd"],
    help: "[access of other clients](rbd.md#who-else-may-write)",
    read: |key, reader, disk| {
        let lock = reader.choice(key.name, &RbdLock::WORDS);
        disk.lock = lock.map_or(RbdLock::default(), |at| at.value);
    },
    get: |disk| {
        let lock = config(disk)?.lock;
        (lock != RbdLock::default()).then(|| json!(lock.word()))
    },
};

pub const OPTION: DiskKey = Key {
    name: "option",
    kind: Kind::Table("a table of Ceph's options, such as { rbd_cache = \"true\" }"),
    default: NONE,
    run_time: RunTime::AddAnew,
    of: &["rbd"],
    help: "further options of Ceph. In a flag: `option.KEY=VALUE`",
    read: |key, reader, disk| {
        disk.cluster.options = read_options(reader, key.name, &key.kind.allowed());
    },
    get: |disk| {
        let options = &config(disk)?.cluster.options;
        (!options.is_empty()).then(|| json!(options))
    },
};
