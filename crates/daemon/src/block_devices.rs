//! Opens the block device of a disk from its configuration.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use bdev::iscsi_initiator::{KnownUnits, ReconnectSettings, SessionOptions, read_credentials};
use bdev::{
    BlockDevice, Delay, File, FileOptions, Image, ImageOptions, IscsiOptions, Nbd, NbdOptions,
    Null, NullOptions, OpenError, Ram, RamOptions, Rbd, RbdOptions, ScsiDisk, ScsiGenericOptions,
};
use config::{
    BlockDeviceConfig, CacheMode, DelayStorage, DiskConfig, NbdDiskConfig, Persist, RemoteConfig,
};

/// Block size of a disk without another default, in bytes.
const BLOCK_SIZE_DEFAULT: u32 = 512;

/// Time limit of a login to a target.
const LOGIN_TIMEOUT: Duration = Duration::from_secs(10);

/// Opens the device of a disk. May block.
///
/// # Errors
/// The object that cannot be opened, the reason, and a remedy.
pub(crate) fn open(disk: &DiskConfig) -> Result<Arc<dyn BlockDevice>, OpenError> {
    open_known(disk, KnownUnits::default())
}

/// Like [`open`]. An iSCSI disk accepts only the known unit, if there is one.
///
/// # Errors
/// The object that cannot be opened, the reason, and a remedy.
pub(crate) fn open_known(
    disk: &DiskConfig,
    known: KnownUnits,
) -> Result<Arc<dyn BlockDevice>, OpenError> {
    Ok(bdev::with_discard(disk.discard, open_plain(disk, known)?))
}

fn open_plain(disk: &DiskConfig, known: KnownUnits) -> Result<Arc<dyn BlockDevice>, OpenError> {
    let block_size = disk.block_size.unwrap_or(BLOCK_SIZE_DEFAULT);
    Ok(match &disk.backend {
        BlockDeviceConfig::Ram { size, persist } => {
            let options = RamOptions {
                size: *size,
                block_size,
                read_only: disk.read_only,
                ..RamOptions::default()
            };
            Arc::new(match persist {
                Persist::None => Ram::create(options)?,
                Persist::Memfd => Ram::keep(options, &disk.name)?,
            })
        }
        BlockDeviceConfig::Null { size } => Arc::new(Null::create(NullOptions {
            size: *size,
            block_size,
            read_only: disk.read_only,
        })?),
        BlockDeviceConfig::Delay {
            size,
            time,
            storage,
        } => {
            let inner = undelayed(disk, *size, *storage);
            Arc::new(Delay::new(open_plain(&inner, known)?, *time))
        }
        BlockDeviceConfig::File {
            path,
            size,
            cache,
            lock,
        } => Arc::new(File::open(FileOptions {
            size: *size,
            cache: *cache,
            read_only: disk.read_only,
            block_size: disk.block_size,
            lock: *lock,
            ..FileOptions::new(path)
        })?),
        BlockDeviceConfig::Image {
            path,
            cache,
            data_file,
            named_files,
            lock,
            ..
        } => Arc::new(Image::open(&ImageOptions {
            path: path.clone(),
            cache: *cache,
            read_only: disk.read_only,
            block_size: disk.block_size,
            data_file: data_file.clone(),
            trusts_name: false,
            named_files: named_files.unwrap_or_default(),
            lock: *lock,
        })?),
        BlockDeviceConfig::Rbd(rbd) => Arc::new(Rbd::open(&RbdOptions {
            cluster: rbd.cluster.clone(),
            image: rbd.image.clone(),
            lock: rbd.lock,
            read_only: disk.read_only,
            block_size,
        })?),
        BlockDeviceConfig::Iscsi(remote) => {
            let mut options = iscsi_options(remote, &disk.name, disk.read_only)?;
            options.block_size = disk.block_size;
            options.unit.known = known;
            Arc::new(ScsiDisk::open_iscsi(&options)?)
        }
        BlockDeviceConfig::Nbd(nbd) => Arc::new(Nbd::open(&nbd_options(nbd, disk))?),
        BlockDeviceConfig::ScsiGeneric { path, reservations } => {
            Arc::new(ScsiDisk::open_generic(&ScsiGenericOptions {
                path: path.clone(),
                read_only: disk.read_only,
                reservations: *reservations,
                block_size: disk.block_size,
            })?)
        }
    })
}

/// Returns the disk of a `delay` disk without the delay.
fn undelayed(disk: &DiskConfig, size: u64, storage: DelayStorage) -> DiskConfig {
    let backend = match storage {
        DelayStorage::Null => BlockDeviceConfig::Null { size },
        DelayStorage::Ram => BlockDeviceConfig::Ram {
            size,
            persist: Persist::None,
        },
    };
    DiskConfig {
        backend,
        ..disk.clone()
    }
}

/// Returns the options to open an export of an NBD server.
fn nbd_options(nbd: &NbdDiskConfig, disk: &DiskConfig) -> NbdOptions {
    NbdOptions {
        address: nbd.address.clone(),
        multi_conn: nbd.multi_conn,
        queue_depth: usize::from(nbd.queue_depth),
        replacement_timeout: Duration::from_secs(nbd.replacement_timeout.into()),
        response_timeout: Duration::from_secs(nbd.response_timeout.into()),
        read_only: disk.read_only,
        writethrough: nbd.cache == CacheMode::Writethrough,
        block_size: disk.block_size,
    }
}

/// Returns the options to open a logical unit of an iSCSI target.
///
/// # Errors
/// A user without a secret, or secrets without a user.
fn iscsi_options(
    remote: &RemoteConfig,
    disk: &str,
    read_only: bool,
) -> Result<IscsiOptions, OpenError> {
    let Some(address) = remote.unit.clone() else {
        return Err(OpenError::Unit {
            unit: "iscsi".to_owned(),
            reason: "the disk has no `unit`".to_owned(),
        });
    };
    let failed = |reason: String| OpenError::Unit {
        unit: address.to_string(),
        reason,
    };
    let mut session = SessionOptions {
        connections: remote.connections,
        timeout: LOGIN_TIMEOUT,
        ..SessionOptions::default()
    };
    session.initiator_name.clone_from(&remote.initiator_name);
    session.credentials = match (&address.user, &remote.chap_file) {
        (Some(user), Some(file)) => Some(read_credentials(file, user).map_err(failed)?),
        (Some(user), None) => {
            return Err(failed(format!(
                "the address names the CHAP user {user}, but `chap_file` is not set; hint: set `chap_file` to a file with its secret"
            )));
        }
        (None, Some(_)) => {
            return Err(failed(
                "`chap_file` needs a user in the address: iscsi://USER@HOST/...".to_owned(),
            ));
        }
        (None, None) => None,
    };
    if let (Some(credentials), Some(algorithms)) =
        (&mut session.credentials, &remote.chap_algorithms)
    {
        credentials.algorithms.clone_from(algorithms);
    }
    session.offer = remote.offer.clone();
    let parameters = &mut session.offer.session;
    // RFC 7143, 13.14: it must not exceed MaxBurstLength.
    parameters.first_burst_length = parameters
        .first_burst_length
        .min(parameters.max_burst_length);
    let paths = remote.paths.iter().map(|path| address.path(path));
    let paths = paths.collect::<Result<Vec<_>, String>>();
    Ok(IscsiOptions {
        unit: ReconnectSettings {
            paths: paths.map_err(failed)?,
            trusts_paths: remote.trust_paths,
            known: KnownUnits::default(),
            address,
            session,
            queue_depth: usize::from(remote.queue_depth),
            replacement_timeout: Duration::from_secs(remote.replacement_timeout.into()),
        },
        disk: Some(disk.to_owned()),
        read_only,
        passthrough: remote.passthrough,
        block_size: None,
    })
}

/// Returns all local files with the data of a disk, except backing images.
pub(crate) fn files_of(backend: &BlockDeviceConfig) -> Vec<PathBuf> {
    let data_file = match backend {
        BlockDeviceConfig::Image {
            path, data_file, ..
        } => data_file.clone().or_else(|| bdev::data_file_of(path)),
        _ => None,
    };
    backend
        .file()
        .map(Path::to_owned)
        .into_iter()
        .chain(data_file)
        .collect()
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use bdev::iscsi_initiator::{ChapAlgorithm, DigestOffer};

    use super::*;

    #[test]
    fn session_offers_follow_the_keys() {
        let unit = "iscsi://192.0.2.1/iqn.2026-11.org.example:t0/3";
        let mut config = RemoteConfig {
            unit: unit.parse().ok(),
            connections: 4,
            ..RemoteConfig::default()
        };
        config.offer.header_digest = DigestOffer::Crc32c;
        config.offer.session.max_burst_length = 65_536;
        config.offer.session.initial_r2t = true;
        let options = iscsi_options(&config, "r", true).unwrap();
        assert_eq!(
            options.unit.address.to_string(),
            "iscsi://192.0.2.1:3260/iqn.2026-11.org.example:t0/3"
        );
        let session = &options.unit.session;
        assert_eq!(session.connections, 4);
        assert_eq!(session.offer.header_digest, DigestOffer::Crc32c);
        let parameters = &session.offer.session;
        assert_eq!(
            (parameters.max_burst_length, parameters.first_burst_length),
            (65_536, 65_536)
        );
        assert!(parameters.initial_r2t && parameters.immediate_data && options.read_only);
    }

    #[test]
    fn algorithms_of_a_disk_are_those_of_its_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("chap");
        std::fs::write(&path, "ann annsecret1234\n").unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o600);
        std::fs::set_permissions(&path, mode).unwrap();
        let numbers = |chap_algorithms| {
            let config = RemoteConfig {
                unit: "iscsi://ann@h/iqn.2026-11.org.example:t0/0".parse().ok(),
                chap_file: Some(path.clone()),
                chap_algorithms,
                ..RemoteConfig::default()
            };
            let session = iscsi_options(&config, "r", false).unwrap().unit.session;
            let algorithms = session.credentials.unwrap().algorithms.into_iter();
            algorithms.map(|one| one.number()).collect::<Vec<u8>>()
        };
        assert_eq!(numbers(None), [8, 7, 6, 5]);
        assert_eq!(numbers(ChapAlgorithm::parse_list("sha1 sha256")), [6, 7]);
    }

    #[test]
    fn paths_are_portals_or_whole_addresses_of_the_same_user() {
        let config = |path: &str| RemoteConfig {
            unit: "iscsi://192.0.2.1/iqn.2026-11.org.example:t0/3"
                .parse()
                .ok(),
            paths: path.split_whitespace().map(str::to_owned).collect(),
            ..RemoteConfig::default()
        };
        let options = config("[2001:db8::1]:3261 iscsi://192.0.2.2/iqn.2026-11.org.example:t1/0");
        let paths = iscsi_options(&options, "r", false).unwrap().unit.paths;
        let written: Vec<String> = paths.iter().map(ToString::to_string).collect();
        assert_eq!(
            written,
            [
                "iscsi://[2001:db8::1]:3261/iqn.2026-11.org.example:t0/3",
                "iscsi://192.0.2.2:3260/iqn.2026-11.org.example:t1/0"
            ]
        );
        let other = config("iscsi://bob@192.0.2.2/iqn.2026-11.org.example:t1/0");
        let error = iscsi_options(&other, "r", false).unwrap_err().to_string();
        assert!(
            error.contains("names another CHAP user than the unit"),
            "{error}"
        );
    }

    #[test]
    fn a_user_needs_a_secret_and_a_secret_a_user() {
        let config = |unit: &str, file: Option<&str>| RemoteConfig {
            unit: unit.parse().ok(),
            chap_file: file.map(PathBuf::from),
            ..RemoteConfig::default()
        };
        let error =
            |config: RemoteConfig| iscsi_options(&config, "r", false).unwrap_err().to_string();
        let named = error(config("iscsi://ann@h/iqn.2026-11.org.example:t0/0", None));
        assert!(
            named.contains("hint: set `chap_file` to a file with its secret"),
            "{named}"
        );
        let unnamed = error(config("iscsi://h/iqn.2026-11.org.example:t0/0", Some("/x")));
        assert!(unnamed.contains("needs a user in the address"), "{unnamed}");
    }
}
