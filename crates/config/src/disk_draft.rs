//! Values given for a disk, before they are checked against each other.

use std::path::PathBuf;

use block::{
    CacheMode, ClusterConfig, DelayTime, DiscardMode, ErrorPolicy, FileLock, ImageName, NamedFiles,
    PassedReservations, RbdLock,
};

use nbd::address::ExportAddress;

use super::devices::{DelayStorage, DeviceKind, ExportCache, NbdDiskConfig, Persist, RemoteConfig};
use super::key::Key;
use super::location::Located;
use super::model::{DiskConfig, ShownConfig};

/// Values given for a disk.
#[derive(Default)]
pub struct DiskDraft {
    pub(super) name: Option<Located<String>>,
    pub(super) path: Option<Located<PathBuf>>,
    pub(super) data_file: Option<PathBuf>,
    pub(super) named_files: Option<NamedFiles>,
    pub(super) wwn: Option<Located<u64>>,
    /// The disk, if no key is missing.
    pub(super) complete: Option<DiskConfig>,
    pub(super) device: Option<DeviceKind>,
    pub(super) size: Option<Located<u64>>,
    pub(super) cache: Option<CacheMode>,
    pub(super) file_lock: FileLock,
    pub(super) time: Option<DelayTime>,
    pub(super) storage: Option<DelayStorage>,
    pub(super) persist: Persist,
    pub(super) image: Option<ImageName>,
    pub(super) cluster: ClusterConfig,
    pub(super) lock: RbdLock,
    pub(super) remote: RemoteConfig,
    pub(super) nbd: NbdDraft,
    pub(super) passthrough: PassthroughDraft,
    pub(super) discard: Option<Located<DiscardMode>>,
    pub(super) block_size: Option<u32>,
    pub(super) read_only: bool,
    pub(super) require: bool,
    pub(super) serial: Option<String>,
    pub(super) shown: ShownConfig,
    pub(super) iops: Option<Located<u64>>,
    pub(super) iops_burst: Option<Located<u64>>,
    pub(super) bandwidth: Option<Located<u64>>,
    pub(super) bandwidth_burst: Option<Located<u64>>,
    pub(super) errors: ErrorPolicy,
}

/// A key of a disk.
pub type DiskKey = Key<DiskDraft, DiskConfig>;

/// Values given for an export of an NBD server. The keys that iSCSI disks have too are in [`DiskDraft::remote`].
pub(crate) struct NbdDraft {
    pub address: Option<ExportAddress>,
    pub cache: ExportCache,
    pub multi_conn: bool,
    pub response_timeout: u32,
}

impl Default for NbdDraft {
    fn default() -> Self {
        NbdDraft {
            address: None,
            cache: ExportCache::default(),
            multi_conn: true,
            response_timeout: NbdDiskConfig::RESPONSE_TIMEOUT,
        }
    }
}

/// Values given for a pass-through.
#[derive(Default)]
pub(crate) struct PassthroughDraft {
    pub is_on: bool,
    pub reservations: Option<Located<PassedReservations>>,
}

impl PassthroughDraft {
    pub fn reservations(&self) -> PassedReservations {
        self.reservations
            .as_ref()
            .map_or(PassedReservations::default(), |at| at.value)
    }

    /// Returns the setting for a unit of an iSCSI target.
    pub fn of_unit(&self) -> Option<PassedReservations> {
        self.is_on.then(|| self.reservations())
    }
}
