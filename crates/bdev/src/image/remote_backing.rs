//! Network disks by their QEMU names: iSCSI units, RBD images and NBD exports. As backing images they are raw and read-only.
//!
//! ```text
//!   iscsi://HOST[:PORT]/TARGET/LUN
//!   nbd://HOST[:PORT]/EXPORT, nbd+unix:///EXPORT?socket=PATH
//!   rbd:POOL[/NAMESPACE]/IMAGE[@SNAPSHOT][:conf=FILE][:id=USER][:keyring=FILE][:mon_host=ADDRESSES][:OPTION=VALUE]...
//! ```

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use iscsi_initiator::{KnownUnits, ReconnectSettings, SessionOptions, UnitAddress};
use librbd::{ClusterConfig, ImageName};
use nbd::address::ExportAddress;

use super::BackingName;
use crate::rbd::{Rbd, RbdLock, RbdOptions};
use crate::scsi::ScsiDisk;
use crate::{BlockDevice, IscsiOptions, Nbd, NbdOptions, OpenError};

/// Queue depth, and the time that I/O waits for a lost session: the defaults of disks.
const QUEUE_DEPTH: usize = 128;
const REPLACEMENT_TIMEOUT: Duration = Duration::from_secs(120);
const LOGIN_TIMEOUT: Duration = Duration::from_secs(10);

/// A network disk.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Remote {
    Iscsi(UnitAddress),
    Rbd(ImageName, ClusterConfig),
    Nbd(ExportAddress),
}

impl Remote {
    /// Parses a name; `None` for other forms.
    ///
    /// # Errors
    /// The name is malformed.
    pub fn parse(name: &str) -> Option<Result<Remote, String>> {
        if UnitAddress::looks_like_one(name) {
            return Some(unit(name).map(Remote::Iscsi));
        }
        if ExportAddress::looks_like_one(name) {
            return Some(name.parse().map(Remote::Nbd));
        }
        let image = name.strip_prefix("rbd:")?;
        Some(image_of(image).map(|(image, cluster)| Remote::Rbd(image, cluster)))
    }

    /// Opens the disk. May block.
    pub fn open(self, read_only: bool) -> Result<Arc<dyn BlockDevice>, OpenError> {
        match self {
            Remote::Iscsi(address) => Ok(Arc::new(ScsiDisk::open_iscsi(&IscsiOptions {
                unit: ReconnectSettings {
                    address,
                    paths: Vec::new(),
                    trusts_paths: false,
                    known: KnownUnits::default(),
                    session: SessionOptions {
                        timeout: LOGIN_TIMEOUT,
                        ..SessionOptions::default()
                    },
                    queue_depth: QUEUE_DEPTH,
                    replacement_timeout: REPLACEMENT_TIMEOUT,
                },
                // Several images may use one unit, each with its own session. Reading needs no fencing.
                disk: None,
                read_only,
                passthrough: None,
                block_size: None,
            })?)),
            Remote::Nbd(address) => {
                let nbd = Nbd::open(&NbdOptions {
                    read_only,
                    ..NbdOptions::new(address)
                })?;
                nbd.check_is_whole()?;
                Ok(Arc::new(nbd))
            }
            Remote::Rbd(image, cluster) => Ok(Arc::new(Rbd::open(&RbdOptions {
                cluster,
                image,
                lock: RbdLock::default(),
                read_only,
                block_size: 512,
            })?)),
        }
    }
}

/// Opens a network disk by its QEMU name. May block.
///
/// # Errors
/// The name is malformed, or the disk cannot be opened.
pub fn open_remote(name: &str, read_only: bool) -> Result<Arc<dyn BlockDevice>, String> {
    let remote =
        Remote::parse(name).unwrap_or_else(|| Err(format!("{name} is a file, not a remote name")));
    remote?.open(read_only).map_err(|error| error.to_string())
}

/// Returns true for the name of a network disk.
pub fn is_remote(name: &str) -> bool {
    Remote::parse(name).is_some()
}

impl BackingName {
    /// Names an RBD image, with the options of its cluster.
    pub fn of_rbd(image: &ImageName, cluster: &ClusterConfig) -> BackingName {
        let path = |path: &PathBuf| path.display().to_string();
        let named = [
            ("conf", cluster.conf.as_ref().map(path)),
            ("id", cluster.id.clone()),
            ("keyring", cluster.keyring.as_ref().map(path)),
            ("mon_host", cluster.mon_host.clone()),
        ];
        let options = cluster.options.iter();
        let options = options.map(|(key, value)| (key.as_str(), Some(value.clone())));
        let mut name = format!("rbd:{}", word(&image.to_string()));
        for (key, value) in named.into_iter().chain(options) {
            if let Some(value) = value {
                name.push_str(&format!(":{key}={}", word(&value)));
            }
        }
        BackingName {
            name,
            format: "raw",
        }
    }

    /// Names an export of an NBD server.
    pub fn of_export(address: &ExportAddress) -> BackingName {
        BackingName {
            name: address.to_string(),
            format: "raw",
        }
    }

    /// Names a logical unit that is accessed without CHAP.
    pub fn of_unit(unit: &UnitAddress) -> BackingName {
        BackingName {
            name: unit.to_string(),
            format: "raw",
        }
    }
}

/// Escapes one word of a name; see [`words`].
fn word(text: &str) -> String {
    text.replace('\\', "\\\\").replace(':', "\\:")
}

fn unit(name: &str) -> Result<UnitAddress, String> {
    let address: UnitAddress = name.parse()?;
    match &address.user {
        None => Ok(address),
        // The secret would have to be in the image, visible to all its readers.
        Some(user) => Err(format!(
            "{name} names the CHAP user {user}, but an image cannot hold the secret; hint: allow this host's initiator to read without CHAP, or serve the unit as a disk"
        )),
    }
}

/// Splits a name at colons; a backslash escapes the next character.
fn words(text: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        match letter {
            ':' => words.push(String::new()),
            letter => {
                let letter = match letter {
                    '\\' => letters.next().unwrap_or('\\'),
                    letter => letter,
                };
                if let Some(word) = words.last_mut() {
                    word.push(letter);
                }
            }
        }
    }
    words
}

fn image_of(text: &str) -> Result<(ImageName, ClusterConfig), String> {
    let mut words = words(text).into_iter();
    let image = words.next().unwrap_or_default();
    let Some(image) = ImageName::parse(&image) else {
        return Err(format!("rbd:{image} is not {}", ImageName::FORM));
    };
    let mut cluster = ClusterConfig::default();
    for word in words {
        let Some((key, value)) = word.split_once('=') else {
            return Err(format!("rbd:{text}: {word:?} is not KEY=VALUE"));
        };
        let value = value.to_owned();
        match key {
            "conf" => cluster.conf = Some(value.into()),
            "id" => cluster.id = Some(value),
            "keyring" => cluster.keyring = Some(value.into()),
            "mon_host" => cluster.mon_host = Some(value),
            key => drop(cluster.options.insert(key.to_owned(), value)),
        }
    }
    Ok((image, cluster))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_qemu_are_parsed() {
        let unit = Remote::parse("iscsi://192.0.2.1:3261/iqn.2026-11.org.example:t/2");
        assert_eq!(
            unit,
            Some(Ok(Remote::Iscsi(
                "iscsi://192.0.2.1:3261/iqn.2026-11.org.example:t/2"
                    .parse()
                    .unwrap()
            )))
        );
        let name =
            "rbd:rbd/base@s1:conf=/etc/ceph/a.conf:id=vm:mon_host=192.0.2.1\\:6789:rbd_cache=false";
        let Some(Ok(Remote::Rbd(image, cluster))) = Remote::parse(name) else {
            panic!("{name}");
        };
        assert_eq!(image.to_string(), "rbd/base@s1");
        assert_eq!(cluster.conf, Some("/etc/ceph/a.conf".into()));
        assert_eq!(cluster.id.as_deref(), Some("vm"));
        assert_eq!(cluster.mon_host.as_deref(), Some("192.0.2.1:6789"));
        assert_eq!(cluster.options["rbd_cache"], "false");
    }

    #[test]
    fn formatted_names_are_parsed() {
        for name in [
            "rbd:rbd/base@s1:conf=/etc/ceph/a.conf:id=vm:mon_host=192.0.2.1\\:6789:rbd_cache=false",
            "rbd:pool/space/image:keyring=/odd\\:place",
        ] {
            let Some(Ok(Remote::Rbd(image, cluster))) = Remote::parse(name) else {
                panic!("{name}");
            };
            assert_eq!(BackingName::of_rbd(&image, &cluster).name, name);
        }
        let name = "iscsi://[2001:db8::1]:3261/iqn.2026-11.org.example:t/2";
        let Some(Ok(Remote::Iscsi(unit))) = Remote::parse(name) else {
            panic!("{name}");
        };
        assert_eq!(BackingName::of_unit(&unit).name, name);
    }

    #[test]
    fn other_names_are_ignored_or_refused_with_a_reason() {
        for file in ["base.raw", "/srv/base.raw", "nbd.raw", "json:{}"] {
            assert_eq!(Remote::parse(file), None, "{file}");
        }
        for wrong in [
            "iscsi://192.0.2.1/iqn.2026-11.org.example:t",
            "iscsi://ann@192.0.2.1/iqn.2026-11.org.example:t/0",
            "rbd:base",
            "nbds+unix:///a?socket=/s",
            "nbd+unix:///a",
            "rbd:rbd/base:conf",
        ] {
            assert!(matches!(Remote::parse(wrong), Some(Err(_))), "{wrong}");
        }
    }
}
