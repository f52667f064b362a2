//! The kinds of block devices for disks, with all differences between them in one list.
//!
//! A kind consists of a variant of [`BlockDeviceConfig`], a line of `kinds!`, and its keys in [`super::disk`]. Methods below have an
//! arm for kinds that differ from a device with a path.

use std::path::{Path, PathBuf};
use std::time::Duration;

use block::{
    CacheMode, ClusterConfig, DelayTime, FileLock, ImageName, NamedFiles, PassedReservations,
    RbdLock,
};
use iscsi::address::UnitAddress;
use iscsi::chap::Algorithm as ChapAlgorithm;
use iscsi::negotiation::{DigestOffer, Offer};
use nbd::address::{ExportAddress, ServerAddress, TlsFolder};

const QUEUE_DEPTH: u16 = 128;
/// Seconds that I/O waits for a lost connection, as for open-iscsi.
const REPLACEMENT_TIMEOUT: u32 = 120;

/// Block device of a disk, with its options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BlockDeviceConfig {
    /// Memory of the daemon, allocated when touched.
    Ram {
        /// Size in bytes.
        size: u64,
        /// Persistence after the end of the daemon.
        persist: Persist,
    },
    /// Completes at once and stores nothing; for measurements.
    Null {
        /// Size in bytes.
        size: u64,
    },
    /// A `null` or `ram` disk with delayed I/O, to measure the layers around it.
    Delay {
        /// Size in bytes.
        size: u64,
        /// Duration of each I/O.
        time: DelayTime,
        /// Storage of the data.
        storage: DelayStorage,
    },
    /// A raw file or a block device.
    File {
        /// Path of the file, relative to the daemon's working directory at start.
        path: PathBuf,
        /// Size in bytes. A missing file is created with this size, sparse.
        size: Option<u64>,
        /// Cache mode.
        cache: CacheMode,
        /// Duration of the locks against other writers.
        lock: FileLock,
    },
    /// A qcow2 image in a file or on a block device.
    Image {
        /// Path of the file, relative to the daemon's working directory at start.
        path: PathBuf,
        /// Size in bytes set at run time; stored in the image.
        size: Option<u64>,
        /// Data file of the image, if it is not in the image's folder under the name in its header.
        data_file: Option<PathBuf>,
        /// Files that the image and its backing images may name; any by default.
        named_files: Option<NamedFiles>,
        /// Cache mode.
        cache: CacheMode,
        /// Duration of the locks of the image and its data file.
        lock: FileLock,
    },
    /// A Ceph RBD image.
    Rbd(Box<RbdConfig>),
    /// A logical unit of an iSCSI target.
    Iscsi(Box<RemoteConfig>),
    /// An export of an NBD server.
    Nbd(Box<NbdDiskConfig>),
    /// A local SCSI device, passed through.
    ScsiGeneric {
        /// `/dev/sgN`, or a block device.
        path: PathBuf,
        /// Handling of commands for reservations.
        reservations: PassedReservations,
    },
}

/// Storage of a delayed disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DelayStorage {
    /// No storage.
    Null,
    /// Memory.
    Ram,
}

/// Persistence of a RAM disk after the end of the daemon.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Persist {
    /// The data are lost.
    #[default]
    None,
    /// The memory is a memfd held by the service manager.
    Memfd,
}

/// An RBD image and its cluster.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
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

/// A logical unit and its session.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RemoteConfig {
    /// Address of the unit; may be absent in a draft.
    pub unit: Option<UnitAddress>,
    /// Alternative paths, as written.
    pub paths: Vec<String>,
    /// All paths lead to one unit, even if its identity cannot be checked.
    pub trust_paths: bool,
    /// File with the user's CHAP secret.
    pub chap_file: Option<PathBuf>,
    /// CHAP algorithms in order of preference; `None`: all, strongest first.
    pub chap_algorithms: Option<Vec<ChapAlgorithm>>,
    /// Initiator name; the host's name by default.
    pub initiator_name: Option<String>,
    /// Number of connections of the session.
    pub connections: u16,
    /// Maximum number of commands in flight.
    pub queue_depth: u16,
    /// Time in seconds that I/O waits for an unreachable target; 0: no limit.
    pub replacement_timeout: u32,
    /// Proposed parameters of the session.
    pub offer: Offer,
    /// The unit is passed through, with this handling of reservations.
    pub passthrough: Option<PassedReservations>,
}

/// An export of an NBD server, and its connections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdDiskConfig {
    /// Server and name of the export.
    pub address: ExportAddress,
    /// Durability of writes.
    pub cache: CacheMode,
    /// Each worker has its own connection, if the server permits several.
    pub multi_conn: bool,
    /// Maximum number of requests in flight of a connection.
    pub queue_depth: u16,
    /// Time in seconds that I/O waits for an unreachable server; 0: no limit.
    pub replacement_timeout: u32,
    /// Time in seconds without a reply after which a connection is regarded as lost; 0: no limit.
    pub response_timeout: u32,
}

impl Default for NbdDiskConfig {
    fn default() -> Self {
        NbdDiskConfig {
            address: ExportAddress {
                server: ServerAddress::Unix(PathBuf::new()),
                export: String::new(),
                tls: None,
            },
            cache: CacheMode::Writeback,
            multi_conn: true,
            queue_depth: QUEUE_DEPTH,
            replacement_timeout: REPLACEMENT_TIMEOUT,
            response_timeout: 60,
        }
    }
}

impl NbdDiskConfig {
    /// Returns the folder with the certificates of an address with TLS.
    pub fn certificates(&self) -> Option<&Path> {
        self.address.tls.as_ref()?.path.as_deref()
    }

    /// Returns the path of the server's Unix socket.
    pub fn socket(&self) -> Option<&Path> {
        match &self.address.server {
            ServerAddress::Unix(path) => Some(path),
            ServerAddress::Tcp { .. } => None,
        }
    }
}

impl Default for RemoteConfig {
    fn default() -> Self {
        RemoteConfig {
            unit: None,
            paths: Vec::new(),
            trust_paths: false,
            chap_file: None,
            chap_algorithms: None,
            initiator_name: None,
            connections: 1,
            queue_depth: QUEUE_DEPTH,
            replacement_timeout: REPLACEMENT_TIMEOUT,
            offer: Offer {
                header_digest: DigestOffer::None,
                data_digest: DigestOffer::None,
                ..Offer::of_initiators()
            },
            passthrough: None,
        }
    }
}

/// Declares the kinds of block devices: word, key of the argument in `--disk NAME=WORD:ARGUMENT`, syntax of this flag, and options
/// before they are read.
macro_rules! kinds {
    ($count:literal: $($kind:ident $word:literal $argument:literal $form:literal $config:expr;)+) => {
        /// A kind of block device, without options.
        #[derive(Clone, Copy, PartialEq)]
        pub enum DeviceKind {
            $($kind,)+
        }

        /// All kinds with their words.
        pub const DEVICE_KINDS: [(&str, DeviceKind); $count] = [$(($word, DeviceKind::$kind)),+];

        impl DeviceKind {
            /// Returns the word in files and flags.
            pub const fn word(self) -> &'static str {
                match self {
                    $(DeviceKind::$kind => $word,)+
                }
            }

            /// Returns the key of the argument in a flag, and the syntax of the flag.
            pub fn flag(self) -> (&'static str, &'static str) {
                match self {
                    $(DeviceKind::$kind => ($argument, $form),)+
                }
            }

            /// Returns a block device with default options. Required ones are empty.
            pub fn config(self) -> BlockDeviceConfig {
                match self {
                    $(DeviceKind::$kind => $config,)+
                }
            }
        }

        impl BlockDeviceConfig {
            /// Returns the kind.
            pub fn kind(&self) -> DeviceKind {
                match self {
                    $(BlockDeviceConfig::$kind { .. } => DeviceKind::$kind,)+
                }
            }
        }
    };
}

kinds! { 9:
    Ram "ram" "size" "ram:SIZE" BlockDeviceConfig::Ram { size: 0, persist: Persist::None };
    Null "null" "size" "null:SIZE" BlockDeviceConfig::Null { size: 0 };
    Delay "delay" "time" "delay:TIME,size=SIZE"
        BlockDeviceConfig::Delay { size: 0, time: DelayTime::Fixed(Duration::ZERO), storage: DelayStorage::Null };
    File "file" "path" "file:PATH"
        BlockDeviceConfig::File { path: PathBuf::new(), size: None, cache: CacheMode::None, lock: FileLock::Always };
    Image "image" "path" "image:PATH" BlockDeviceConfig::Image {
        path: PathBuf::new(), size: None, data_file: None, named_files: None, cache: CacheMode::None, lock: FileLock::Always,
    };
    Rbd "rbd" "image" "rbd:POOL/IMAGE" BlockDeviceConfig::Rbd(Box::default());
    Iscsi "iscsi" "unit" "iscsi://HOST/TARGET/LUN" BlockDeviceConfig::Iscsi(Box::default());
    Nbd "nbd" "uri" "nbd://HOST/EXPORT" BlockDeviceConfig::Nbd(Box::default());
    ScsiGeneric "scsi_generic" "path" "scsi_generic:/dev/sgN"
        BlockDeviceConfig::ScsiGeneric { path: PathBuf::new(), reservations: PassedReservations::default() };
}

impl DeviceKind {
    /// Returns the kind with this word.
    pub fn named(word: &str) -> Option<DeviceKind> {
        let kind = DEVICE_KINDS.iter().find(|(known, _)| *known == word)?;
        Some(kind.1)
    }
}

impl Default for BlockDeviceConfig {
    fn default() -> Self {
        BlockDeviceConfig::Null { size: 0 }
    }
}

/// Returns the place of a value in a block device of one of these kinds. `[KIND] { FIELD }` is a field of the variant, and `[KIND] (PATH)` a
/// field of the struct in it.
macro_rules! place {
    (@mut $config:ident ($($path:ident).+)) => { &mut $config.$($path).+ };
    (@ref $config:ident ($($path:ident).+)) => { &$config.$($path).+ };
    ($backend:expr; [$($kind:ident)+] { $field:ident }) => {
        match $backend {
            $($crate::devices::BlockDeviceConfig::$kind { $field, .. })|+ => Some($field),
            _ => None,
        }
    };
    (&mut $backend:expr; [$($kind:ident)+] $path:tt) => {
        match &mut $backend {
            $($crate::devices::BlockDeviceConfig::$kind(config) => Some($crate::devices::place!(@mut config $path)),)+
            _ => None,
        }
    };
    (& $backend:expr; [$($kind:ident)+] $path:tt) => {
        match &$backend {
            $($crate::devices::BlockDeviceConfig::$kind(config) => Some($crate::devices::place!(@ref config $path)),)+
            _ => None,
        }
    };
}
pub(crate) use place;

impl BlockDeviceConfig {
    /// Returns the word in files and flags.
    pub fn word(&self) -> &'static str {
        self.kind().word()
    }

    /// Returns true if the backing object stores its size, including changes by others.
    pub fn keeps_size(&self) -> bool {
        matches!(self.kind(), DeviceKind::Image | DeviceKind::Rbd)
    }

    /// Returns true if the data are in the memory of the daemon, or nowhere.
    fn is_in_memory(&self) -> bool {
        use DeviceKind::{Delay, Null, Ram};
        matches!(self.kind(), Ram | Null | Delay)
    }

    /// Returns true if it has data that are lost when the process ends.
    pub fn is_lost_at_exit(&self) -> bool {
        use BlockDeviceConfig::{Delay, Ram};
        match self {
            Ram { persist, .. } => *persist == Persist::None,
            Delay { storage, .. } => *storage == DelayStorage::Ram,
            _ => false,
        }
    }

    /// Returns true if opening it usually takes seconds: a reload does not wait for it, and the disk becomes available later. An image that
    /// was not closed cleanly is repaired first.
    pub fn takes_long(&self) -> bool {
        !self.is_in_memory() && self.kind() != DeviceKind::File
    }

    /// Returns the folder, portal or cluster that calls for the disk may wait for; `None` if no call blocks. Disks of one place stop
    /// answering together.
    pub fn blocking_storage(&self) -> Option<String> {
        Some(match self {
            BlockDeviceConfig::Rbd(rbd) => {
                let cluster = &rbd.cluster;
                format!("rbd:{:?}{:?}", cluster.conf, cluster.mon_host)
            }
            BlockDeviceConfig::Iscsi(remote) => {
                let portal = remote.unit.as_ref().map(|unit| unit.portal.to_string());
                format!("iscsi:{}", portal.unwrap_or_default())
            }
            BlockDeviceConfig::Nbd(nbd) => format!("nbd:{:?}", nbd.address.server),
            _ => {
                let path = self.path()?;
                path.parent().unwrap_or(path).display().to_string()
            }
        })
    }

    /// Returns the storage for people: a path, an RBD image or the address of a remote unit; `None` for disks in memory.
    pub fn location(&self) -> Option<String> {
        Some(match self {
            BlockDeviceConfig::Rbd(rbd) => rbd.image.to_string(),
            BlockDeviceConfig::Iscsi(remote) => remote.unit.as_ref()?.to_string(),
            BlockDeviceConfig::Nbd(nbd) => nbd.address.to_string(),
            _ => self.path()?.display().to_string(),
        })
    }

    /// Returns the file with the CHAP secrets of an iSCSI disk.
    pub fn chap_file(&self) -> Option<&Path> {
        match self {
            BlockDeviceConfig::Iscsi(remote) => remote.chap_file.as_deref(),
            _ => None,
        }
    }

    /// Returns the path of its file or device.
    pub fn path(&self) -> Option<&Path> {
        let path = place!(self; [File Image ScsiGeneric] { path });
        path.map(PathBuf::as_path)
    }

    /// Returns the backing file, if it is a file of this machine.
    pub fn file(&self) -> Option<&Path> {
        let path = place!(self; [File Image] { path });
        path.map(PathBuf::as_path)
    }

    /// Returns a copy with another path of its file.
    #[must_use]
    pub fn at_path(mut self, new: &Path) -> BlockDeviceConfig {
        if let BlockDeviceConfig::File { path, .. } | BlockDeviceConfig::Image { path, .. } =
            &mut self
        {
            new.clone_into(path);
        }
        self
    }

    /// Returns all local paths in its keys, with the names of the keys.
    pub fn paths(&self) -> Vec<(&'static str, &Path)> {
        let paths = match self {
            BlockDeviceConfig::Image { data_file, .. } => vec![("data_file", data_file.as_deref())],
            BlockDeviceConfig::Rbd(rbd) => vec![
                ("conf", rbd.cluster.conf.as_deref()),
                ("keyring", rbd.cluster.keyring.as_deref()),
            ],
            BlockDeviceConfig::Iscsi(unit) => vec![("chap_file", unit.chap_file.as_deref())],
            BlockDeviceConfig::Nbd(nbd) => vec![("uri", nbd.socket()), ("uri", nbd.certificates())],
            _ => Vec::new(),
        };
        let paths = std::iter::once(("path", self.path())).chain(paths);
        paths.filter_map(|(key, path)| Some((key, path?))).collect()
    }

    /// Makes its paths absolute before they are saved: the working directory may differ at the next start.
    pub fn at_absolute_paths(mut self) -> BlockDeviceConfig {
        let absolute =
            |path: &mut PathBuf| *path = std::path::absolute(&*path).unwrap_or(path.clone());
        match &mut self {
            BlockDeviceConfig::File { path, .. } => absolute(path),
            BlockDeviceConfig::Image {
                path, data_file, ..
            } => {
                absolute(path);
                data_file.iter_mut().for_each(absolute);
            }
            BlockDeviceConfig::Nbd(nbd) => {
                if let ServerAddress::Unix(path) = &mut nbd.address.server {
                    absolute(path);
                }
                if let Some(TlsFolder { path: Some(path) }) = &mut nbd.address.tls {
                    absolute(path);
                }
            }
            _ => {}
        }
        self
    }

    /// Restricts an image that a request names to files in its own folder, unless the request states otherwise. A disk that exists keeps
    /// its policy. An image that the daemon makes for the request (`is_made`) and that does not exist yet is not restricted: the daemon
    /// chooses the files that it names.
    pub fn requested(
        mut self,
        existing: Option<&BlockDeviceConfig>,
        is_made: bool,
    ) -> BlockDeviceConfig {
        if let BlockDeviceConfig::Image {
            path,
            named_files: policy @ None,
            ..
        } = &mut self
        {
            *policy = match existing.and_then(BlockDeviceConfig::named_files) {
                Some(known) => *known,
                _ if is_made && matches!(path.try_exists(), Ok(false)) => None,
                _ => Some(NamedFiles::Folder),
            };
        }
        self
    }

    /// Returns the policy for the files that an image names.
    fn named_files(&self) -> Option<&Option<NamedFiles>> {
        place!(self; [Image] { named_files })
    }

    /// Returns an image with the policy for named files of `other`, unless it has its own policy.
    #[must_use]
    pub fn with_named_files_of(mut self, other: &BlockDeviceConfig) -> BlockDeviceConfig {
        let policy = other.named_files().copied().flatten();
        if let BlockDeviceConfig::Image { named_files, .. } = &mut self {
            *named_files = named_files.or(policy);
        }
        self
    }

    /// Sets a policy for an image without one. Returns false if an image has a policy that permits more than `most`.
    pub fn limit_named_files(&mut self, most: NamedFiles) -> bool {
        let BlockDeviceConfig::Image { named_files, .. } = self else {
            return true;
        };
        let wanted = *named_files.get_or_insert(most);
        wanted == NamedFiles::None || wanted == most
    }

    /// Returns true if other daemons use the file or image of the disk in turns with this one.
    pub fn takes_turns(&self) -> bool {
        match self {
            BlockDeviceConfig::Rbd(rbd) => rbd.lock == RbdLock::WhileActive,
            _ => place!(self; [File Image] { lock }) == Some(&FileLock::WhileActive),
        }
    }

    /// Returns true if the disk adopts a size that other programs change. `is_device`: the file is a block device of this machine,
    /// which also changes by itself. `None`: only the configuration sets the size.
    pub fn follows_size(&self, is_device: bool) -> Option<bool> {
        (!self.is_in_memory()).then_some(is_device || self.kind() != DeviceKind::File)
    }

    /// Returns true if the key `size` is allowed for the disk.
    pub fn may_have_size(&self) -> bool {
        self.is_in_memory() || self.kind() == DeviceKind::File
    }

    /// Returns the configured size in bytes.
    pub fn size(&self) -> Option<u64> {
        match self {
            BlockDeviceConfig::Rbd(rbd) => rbd.size,
            BlockDeviceConfig::File { size, .. } | BlockDeviceConfig::Image { size, .. } => *size,
            _ => place!(self; [Ram Null Delay] { size }).copied(),
        }
    }

    /// Returns a copy with another size.
    pub fn with_size(&self, new: Option<u64>) -> BlockDeviceConfig {
        let mut changed = self.clone();
        match &mut changed {
            BlockDeviceConfig::Ram { size, .. }
            | BlockDeviceConfig::Null { size }
            | BlockDeviceConfig::Delay { size, .. } => *size = new.unwrap_or(*size),
            BlockDeviceConfig::File { size, .. } | BlockDeviceConfig::Image { size, .. } => {
                *size = new;
            }
            BlockDeviceConfig::Rbd(rbd) => rbd.size = new,
            BlockDeviceConfig::Iscsi(_)
            | BlockDeviceConfig::Nbd(_)
            | BlockDeviceConfig::ScsiGeneric { .. } => {}
        }
        changed
    }
}
