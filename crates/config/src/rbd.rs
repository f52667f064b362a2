//! Disks that are Ceph RBD images: which image, which cluster, and as whom.

use std::collections::BTreeMap;

use bdev::{ClusterConfig, ImageName, RbdLock};

use super::diagnostics::{Mistake, MistakeKind};
use super::value::{Raw, Reader, wrong};

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

/// The name of an image.
pub fn read_image(reader: &mut Reader<'_, '_>, key: &'static str) -> Option<ImageName> {
    let text = reader.text(key, ImageName::FORM)?;
    match ImageName::parse(&text.value) {
        Some(image) => Some(image),
        None => {
            let message = format!("`{key}`: found {:?}", text.value);
            let mistake = Mistake::new(MistakeKind::Value, &text.place, message);
            reader.diagnostics().push(mistake.allowed(ImageName::FORM));
            None
        }
    }
}

/// Options of Ceph.
pub fn read_options(
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
