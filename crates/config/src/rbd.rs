//! Disks that are Ceph RBD images: which image, which cluster, and as whom.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bdev::{ClusterConfig, ImageName, RbdLock};

use super::diagnostics::{Mistake, MistakeKind};
use super::place::At;
use super::value::{Raw, Reader, wrong};

/// The keys that only such a disk has.
pub const RBD_KEYS: [&str; 7] = [
    "image", "conf", "id", "keyring", "mon_host", "option", "lock",
];

/// An image and the way to it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RbdConfig {
    /// `POOL[/NAMESPACE]/IMAGE[@SNAP]`.
    pub image: ImageName,
    /// Which cluster, as whom, with which options.
    pub cluster: ClusterConfig,
    /// Who else may write it.
    pub lock: RbdLock,
    /// Bytes that a change wants; else the image has the size that it has.
    pub size: Option<u64>,
}

/// Options of Ceph that would show a secret to whoever may look on.
const SECRETS: [&str; 2] = ["key", "keyfile"];

/// What was said about an image.
#[derive(Default)]
pub struct RbdDraft {
    image: Option<At<ImageName>>,
    cluster: ClusterConfig,
    lock: RbdLock,
}

impl RbdDraft {
    /// The image, if it was said.
    pub fn complete(&self) -> Option<RbdConfig> {
        Some(RbdConfig {
            image: self.image.as_ref()?.value.clone(),
            cluster: self.cluster.clone(),
            lock: self.lock,
            size: None,
        })
    }
}

/// Reads the keys of an image.
pub fn read_rbd(reader: &mut Reader<'_, '_>, required: bool) -> RbdDraft {
    if required {
        reader.require("image", ImageName::FORM);
    }
    RbdDraft {
        image: read_image(reader),
        cluster: read_cluster(reader),
        lock: reader
            .choice("lock", &RbdLock::WORDS)
            .map_or(RbdLock::default(), |lock| lock.value),
    }
}

/// Reads which cluster, and as whom.
pub fn read_cluster(reader: &mut Reader<'_, '_>) -> ClusterConfig {
    let path = |at: At<String>| PathBuf::from(at.value);
    let conf = reader.text(
        "conf",
        "the path of Ceph's configuration, such as /etc/ceph/ceph.conf",
    );
    let id = reader.text(
        "id",
        "a user of the cluster without `client.`, such as admin",
    );
    let keyring = reader.text("keyring", "the path of the file with the user's key");
    let mon_host = reader.text(
        "mon_host",
        "addresses of monitors, such as \"10.0.0.1,10.0.0.2\"",
    );
    ClusterConfig {
        conf: conf.map(path),
        id: id.map(|at| at.value),
        keyring: keyring.map(path),
        mon_host: mon_host.map(|at| at.value),
        options: read_options(reader),
    }
}

fn read_image(reader: &mut Reader<'_, '_>) -> Option<At<ImageName>> {
    let text = reader.text("image", ImageName::FORM)?;
    match ImageName::parse(&text.value) {
        Some(image) => Some(At::new(image, text.place)),
        None => {
            let message = format!("`image`: found {:?}", text.value);
            let mistake = Mistake::new(MistakeKind::Value, &text.place, message);
            reader.diagnostics().push(mistake.allowed(ImageName::FORM));
            None
        }
    }
}

fn read_options(reader: &mut Reader<'_, '_>) -> BTreeMap<String, String> {
    const EXAMPLE: &str = "a table of Ceph's options, such as { rbd_cache = \"true\" }";
    let mut options = BTreeMap::new();
    let Some(fields) = reader.table("option", EXAMPLE) else {
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
        let place = &field.key.place;
        let mistake = if SECRETS.contains(&key.as_str()) {
            let message = format!(
                "`option.{key}` would be visible to everybody who may read the configuration"
            );
            Mistake::new(MistakeKind::Key, place, message)
                .help("write the key to a file, and name that with `keyring`")
        } else if key.is_empty() || key.contains('\0') || value.contains('\0') {
            Mistake::new(MistakeKind::Key, place, "`option`: not an option of Ceph")
        } else if options.insert(key.clone(), value).is_some() {
            Mistake::new(
                MistakeKind::Key,
                place,
                format!("`option.{key}` is given twice"),
            )
        } else {
            continue;
        };
        reader.diagnostics().push(mistake);
    }
    options
}
