//! Objects as JSON, with the names of the configuration file. What GET gives may be PUT back.

use std::collections::BTreeMap;
use std::path::PathBuf;

use bdev::{DiskState, RbdLock};
use reactor::ExportPlacement;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::Live;
use crate::config::{AclEntry, BlockDeviceConfig, DiskConfig, ExportRef, LunConfig};

/// A disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Disk {
    /// Its name: as in the address.
    #[serde(default)]
    pub name: String,
    /// The block device that does its I/O.
    #[schema(pattern = "^(ram|null|delay|file|rbd)$")]
    pub backend: String,
    /// Bytes; in a request also a text such as "10G". Not needed for a file that is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 512, maximum = 9_223_372_036_854_775_807_u64, value_type = Option<u64>, format = "int64")]
    pub size: Option<u64>,
    /// Of the back end `file`: the raw file or block device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
    /// Of the back end `file`: `none`, `writeback` or `writethrough`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^(none|writeback|writethrough)$")]
    pub cache: Option<String>,
    /// How long each I/O of a `delay` takes: a time, MIN-MAX or exp:MEAN.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub time: Option<String>,
    /// What a `delay` keeps its data in: null, ram.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub around: Option<String>,
    /// Of the back end `rbd`: the image, POOL[/NAMESPACE]/IMAGE[@SNAPSHOT].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Of the back end `rbd`: Ceph's configuration file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conf: Option<String>,
    /// Of the back end `rbd`: the user, without `client.`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    /// Of the back end `rbd`: the file with the user's key.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keyring: Option<String>,
    /// Of the back end `rbd`: addresses of monitors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mon_host: Option<String>,
    /// Of the back end `rbd`: `exclusive` or `shared`; without it `cooperative`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lock: Option<String>,
    /// Of the back end `rbd`: further options of Ceph.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub option: Option<BTreeMap<String, String>>,
    /// Logical block size in bytes: 512 or 4096.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 512, maximum = 4096)]
    pub block_size: Option<u32>,
    /// Nothing may be written.
    #[serde(default)]
    pub read_only: bool,
    /// The daemon does not start without the disk.
    #[serde(default)]
    pub require: bool,
    /// What clients see as serial number.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(max_length = 20)]
    pub serial: Option<String>,
    /// NAA identifier that SCSI initiators see: 16 hexadecimal digits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub wwn: Option<String>,
    /// Physical block size in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub physical_block_size: Option<u32>,
    /// SCSI initiators may eject and load the medium.
    #[serde(default)]
    pub removable: bool,
    /// EXTENDED COPY through targets that do not have the disk may read and write it.
    #[serde(default)]
    pub copy_across_targets: bool,
    /// Most requests in a second. May be changed at any time, as may the other limits.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops: Option<u64>,
    /// Requests that may come at once after a pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub iops_burst: Option<u64>,
    /// Most bytes in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth: Option<u64>,
    /// Bytes that may come at once after a pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bandwidth_burst: Option<u64>,
    /// What becomes of an I/O that fails: `report` (the client gets the error), `stop` (it waits until the disk is resumed, or its
    /// device is back) or `enospc` (it waits if the device is full). May be changed at any time. Default: `report`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^(report|stop|enospc)$")]
    pub on_error: Option<String>,
    /// Seconds after which an I/O that the device has not ended is cancelled, where the device can do so, and has failed; 0, the
    /// default: it may take any time. May be changed at any time.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 86400)]
    pub io_timeout: Option<u32>,
    /// What is so; not looked at in a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<DiskStatus>,
}

/// How a disk is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct DiskStatus {
    /// Bytes that it has.
    pub size: u64,
    /// Logical block size in bytes.
    pub block_size: u32,
    /// A UUID, which stays with the disk whatever its name; serial number and `wwn` derive from it unless they are configured.
    /// Empty while the disk is unavailable, as may be these two.
    pub identity: String,
    /// What clients see as serial number.
    pub serial: String,
    /// What SCSI initiators see as NAA identifier, in 16 hexadecimal digits.
    pub wwn: String,
    /// What shows it: exports, and logical units as `EXPORT/TARGET:LUN`.
    pub used_by: Vec<String>,
    /// `ready`, `opening` or `unavailable`.
    #[schema(pattern = "^(ready|opening|unavailable)$")]
    pub state: String,
    /// Of an unavailable disk: why.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Of an unavailable disk: seconds until it is tried again.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_try_seconds: Option<u64>,
    /// I/Os that have failed and wait until the disk is resumed: see `on_error`.
    #[serde(default)]
    pub waiting: u64,
    /// Of a disk with such I/Os: how the last of them failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub waiting_reason: Option<String>,
    /// The kinds of its layers, from the top down to the device.
    pub stack: Vec<String>,
}

impl DiskStatus {
    /// How a configured disk is; `used_by` is what shows it.
    pub fn of(live: &Live, config: &DiskConfig, used_by: Vec<String>) -> DiskStatus {
        let disk = live.disks.get(&config.name);
        let info = disk.map(|disk| disk.info());
        let state = match disk {
            Some(disk) => match disk.device().state() {
                DiskState::Ready => disk.state().get(),
                away => away,
            },
            None => live
                .waiting
                .state(&config.name)
                .unwrap_or(DiskState::Opening),
        };
        let (reason, next_try) = match &state {
            DiskState::Unavailable { reason, next_try } => (Some(reason.clone()), Some(*next_try)),
            DiskState::Ready | DiskState::Opening => (None, None),
        };
        let waiting = disk.and_then(|disk| disk.state().waiting());
        let geometry = info.as_ref().map(|info| info.geometry);
        let stack = match disk {
            Some(disk) => disk.stack(),
            None => vec![config.backend.word()],
        };
        DiskStatus {
            size: match geometry {
                Some(geometry) => geometry.capacity_bytes(),
                None => super::plan::size(&config.backend).unwrap_or(0),
            },
            block_size: match geometry {
                Some(geometry) => geometry.block_size(),
                None => config.block_size.unwrap_or(512),
            },
            identity: match &info {
                Some(info) => info.identity.to_string(),
                None => String::new(),
            },
            wwn: match info.as_ref().map(|info| info.naa).or(config.shown.wwn) {
                Some(naa) => format!("{naa:016x}"),
                None => String::new(),
            },
            serial: match info {
                Some(info) => info.serial.clone(),
                None => config.serial.clone().unwrap_or_default(),
            },
            used_by,
            state: state.word().to_owned(),
            reason,
            next_try_seconds: next_try.map(|time| time.as_secs()),
            waiting: waiting.as_ref().map_or(0, |waiting| waiting.count as u64),
            waiting_reason: waiting.map(|waiting| waiting.error.to_string()),
            stack: stack.into_iter().map(str::to_owned).collect(),
        }
    }
}

impl Disk {
    /// A disk as it is configured.
    pub fn of(disk: &DiskConfig) -> Disk {
        let (path, cache) = match &disk.backend {
            BlockDeviceConfig::File { path, cache, .. } => (
                Some(path.to_string_lossy().into_owned()),
                Some(cache.word().to_owned()),
            ),
            BlockDeviceConfig::Ram { .. }
            | BlockDeviceConfig::Null { .. }
            | BlockDeviceConfig::Delay { .. }
            | BlockDeviceConfig::Rbd(_) => (None, None),
        };
        let rbd = match &disk.backend {
            BlockDeviceConfig::Rbd(rbd) => Some(&**rbd),
            _ => None,
        };
        let cluster = rbd.map(|rbd| &rbd.cluster);
        let path_text = |path: &PathBuf| path.to_string_lossy().into_owned();
        let options = cluster.map(|cluster| cluster.options.clone());
        let (time, around) = match &disk.backend {
            BlockDeviceConfig::Delay { time, around, .. } => {
                (Some(time.to_string()), Some(around.word().to_owned()))
            }
            _ => (None, None),
        };
        Disk {
            name: disk.name.clone(),
            backend: disk.backend.word().to_owned(),
            size: super::plan::size(&disk.backend),
            path,
            cache,
            time,
            around,
            image: rbd.map(|rbd| rbd.image.to_string()),
            conf: cluster.and_then(|cluster| cluster.conf.as_ref().map(path_text)),
            id: cluster.and_then(|cluster| cluster.id.clone()),
            keyring: cluster.and_then(|cluster| cluster.keyring.as_ref().map(path_text)),
            mon_host: cluster.and_then(|cluster| cluster.mon_host.clone()),
            lock: rbd
                .map(|rbd| rbd.lock)
                .filter(|lock| *lock != RbdLock::default())
                .map(|lock| lock.word().to_owned()),
            option: options.filter(|options| !options.is_empty()),
            block_size: disk.block_size,
            read_only: disk.read_only,
            require: disk.require,
            serial: disk.serial.clone(),
            wwn: disk.shown.wwn.map(|wwn| format!("{wwn:016x}")),
            physical_block_size: disk.shown.physical_block_size,
            removable: disk.shown.removable,
            copy_across_targets: disk.shown.copy_across_targets,
            iops: disk.limits.iops,
            iops_burst: disk.limits.iops_burst,
            bandwidth: disk.limits.bandwidth,
            bandwidth_burst: disk.limits.bandwidth_burst,
            on_error: Some(disk.errors.on_error.word().to_owned()),
            io_timeout: Some(disk.errors.io_timeout).filter(|seconds| *seconds > 0),
            status: None,
        }
    }
}

/// A logical unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Lun {
    /// Target, 0 to 255; 0 for iSCSI.
    pub target: u8,
    /// Logical unit number, 0 to 16383.
    #[schema(maximum = 16383)]
    pub lun: u16,
    /// The disk's name.
    pub disk: String,
}

impl Lun {
    /// A logical unit as it is configured.
    pub fn of(lun: &LunConfig) -> Lun {
        Lun {
            target: lun.target,
            lun: lun.lun,
            disk: lun.disk.clone(),
        }
    }
}

/// Which disk a logical unit is to be.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LunDisk {
    /// The disk's name.
    pub disk: String,
}

/// Bytes that a disk is to have.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Size {
    /// Bytes; also a text such as "10G". Without it: as many as its file or block device has by now.
    #[schema(
        minimum = 512,
        maximum = 9_223_372_036_854_775_807_u64,
        format = "int64"
    )]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
}

/// What all clients of a disk together may do. What is not said is not limited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Limits {
    /// Most requests in a second.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    pub iops: Option<u64>,
    /// Requests that may come at once after a pause.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 1_000_000_000)]
    pub iops_burst: Option<u64>,
    /// Most bytes in a second; in a request also a text such as "10M".
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub bandwidth: Option<u64>,
    /// Bytes that may come at once after a pause; in a request also a text.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1)]
    pub bandwidth_burst: Option<u64>,
}

/// What becomes of I/Os of a disk that fail or take too long. What is not said stays as it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ErrorPolicy {
    /// `report`, `stop` or `enospc`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^(report|stop|enospc)$")]
    pub on_error: Option<String>,
    /// Seconds; 0: an I/O may take any time.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(maximum = 86400)]
    pub io_timeout: Option<u32>,
}

/// An export: `kind` says which.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub enum Export {
    /// One disk as virtio-blk.
    VhostBlk(VhostBlk),
    /// A virtio-scsi controller.
    VhostScsi(VhostScsi),
    /// An iSCSI target.
    Iscsi(Iscsi),
}

/// One disk as virtio-blk on one vhost-user socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VhostBlk {
    /// Its name: as in the address.
    #[serde(default)]
    pub name: String,
    /// The disk's name.
    pub disk: String,
    /// Path of the vhost-user socket.
    pub socket: String,
    /// Most request queues that a client may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 256)]
    pub queues: Option<u16>,
    /// The workers that serve its queues, by their numbers. May be changed at any time; queues that run stay where they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<Vec<u32>>,
    /// A worker of its own serves its queues.
    #[serde(default)]
    pub dedicated: bool,
    /// What is so; not looked at in a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<ExportState>,
}

/// A virtio-scsi controller on one vhost-user socket.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct VhostScsi {
    /// Its name: as in the address.
    #[serde(default)]
    pub name: String,
    /// Path of the vhost-user socket.
    pub socket: String,
    /// Most request queues that a client may use.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(minimum = 1, maximum = 254)]
    pub queues: Option<u16>,
    /// The workers that serve its queues, by their numbers. May be changed at any time; queues that run stay where they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<Vec<u32>>,
    /// A worker of its own serves its queues.
    #[serde(default)]
    pub dedicated: bool,
    /// Its logical units.
    #[serde(default)]
    pub lun: Vec<Lun>,
    /// What is so; not looked at in a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<ExportState>,
}

/// An iSCSI target.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Iscsi {
    /// Its iSCSI name: as in the address.
    #[serde(default)]
    pub name: String,
    /// What people call it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub alias: Option<String>,
    /// Its logical units.
    #[serde(default)]
    pub lun: Vec<Lun>,
    /// Where it is found: `ADDRESS:PORT,GROUP`.
    pub portals: Vec<String>,
    /// Where initiators are told to find it, instead of the portals of the same group: `ADDRESS:PORT,GROUP`, or a name in the
    /// place of the address.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub announce: Vec<String>,
    /// What initiators may do that nothing else admits: `none`, `ro` or `rw`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schema(pattern = "^(none|ro|rw)$")]
    pub demo_mode: Option<String>,
    /// The file with the CHAP users.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub chap_users: Option<String>,
    /// Initiators that may log in.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub acl: Vec<Acl>,
    /// The workers that serve its connections, by their numbers. May be changed at any time; connections that are there stay
    /// where they are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub workers: Option<Vec<u32>>,
    /// A worker of its own serves its connections.
    #[serde(default)]
    pub dedicated: bool,
    /// What is so; not looked at in a request.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub status: Option<ExportState>,
}

/// Initiators that may log in.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Acl {
    /// Its name; absent: any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initiator: Option<String>,
    /// Where it comes from; absent: anywhere.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub network: Option<String>,
    /// It may not write.
    #[serde(default)]
    pub read_only: bool,
}

/// How an export is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct ExportState {
    /// Is a client connected?
    pub connected: bool,
    /// How many sessions it has.
    pub sessions: usize,
    /// Of a target: its portals as they are bound.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub portals: Vec<String>,
    /// What clients use of it now, and which worker serves it.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub served: Vec<Served>,
}

/// A queue or a connection of an export, and the worker that serves it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Served {
    /// Of vhost-user: the queue's index.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queue: Option<u32>,
    /// Of iSCSI: the session's id.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub session: Option<String>,
    /// Of iSCSI: the connection's identifier in its session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub connection: Option<u16>,
    /// The worker's number.
    pub worker: u32,
}

/// The workers that a placement names, and whether it wants one of its own.
fn placement(placement: &ExportPlacement) -> (Option<Vec<u32>>, bool) {
    match placement {
        ExportPlacement::Shared => (None, false),
        ExportPlacement::Workers(workers) => (Some(workers.clone()), false),
        ExportPlacement::Dedicated => (None, true),
    }
}

fn acl(entry: &AclEntry) -> Acl {
    Acl {
        initiator: entry.initiator.clone(),
        network: entry.network.map(|network| network.to_string()),
        read_only: entry.read_only,
    }
}

impl Export {
    /// An export as it is configured.
    pub fn of(export: ExportRef<'_>) -> Export {
        // In whatever order they came: as an initiator lists them.
        let luns = |luns: &[LunConfig]| {
            let mut luns: Vec<Lun> = luns.iter().map(Lun::of).collect();
            luns.sort_by_key(|lun| (lun.target, lun.lun));
            luns
        };
        let (workers, dedicated) = placement(export.placement());
        match export {
            ExportRef::VhostBlk(export) => Export::VhostBlk(VhostBlk {
                name: export.name.clone(),
                disk: export.disk.clone(),
                socket: export.socket.to_string_lossy().into_owned(),
                queues: Some(export.queues),
                workers,
                dedicated,
                status: None,
            }),
            ExportRef::VhostScsi(export) => Export::VhostScsi(VhostScsi {
                name: export.name.clone(),
                socket: export.socket.to_string_lossy().into_owned(),
                queues: Some(export.queues),
                workers,
                dedicated,
                lun: luns(&export.luns),
                status: None,
            }),
            ExportRef::Iscsi(export) => Export::Iscsi(Iscsi {
                name: export.name.clone(),
                alias: export.alias.clone(),
                lun: luns(&export.luns),
                portals: export.portals.iter().map(ToString::to_string).collect(),
                announce: export.announce.iter().map(ToString::to_string).collect(),
                demo_mode: Some(export.demo_mode.to_string()),
                chap_users: export
                    .chap_users
                    .as_ref()
                    .map(|path| path.to_string_lossy().into_owned()),
                acl: export.acl.iter().map(acl).collect(),
                workers,
                dedicated,
                status: None,
            }),
        }
    }

    /// Its name.
    pub fn name(&self) -> &str {
        match self {
            Export::VhostBlk(export) => &export.name,
            Export::VhostScsi(export) => &export.name,
            Export::Iscsi(export) => &export.name,
        }
    }

    /// The word for its kind.
    pub fn kind(&self) -> &'static str {
        match self {
            Export::VhostBlk(_) => "vhost-blk",
            Export::VhostScsi(_) => "vhost-scsi",
            Export::Iscsi(_) => "iscsi",
        }
    }

    /// The workers that it is placed on, and whether it has one of its own.
    pub fn placement(&self) -> (Option<&[u32]>, bool) {
        let (workers, dedicated) = match self {
            Export::VhostBlk(export) => (&export.workers, export.dedicated),
            Export::VhostScsi(export) => (&export.workers, export.dedicated),
            Export::Iscsi(export) => (&export.workers, export.dedicated),
        };
        (workers.as_deref(), dedicated)
    }

    /// How it is, where that was asked for.
    pub fn status(&self) -> Option<&ExportState> {
        match self {
            Export::VhostBlk(export) => export.status.as_ref(),
            Export::VhostScsi(export) => export.status.as_ref(),
            Export::Iscsi(export) => export.status.as_ref(),
        }
    }

    /// Adds how it is.
    #[must_use]
    pub fn with(mut self, state: ExportState) -> Export {
        match &mut self {
            Export::VhostBlk(export) => export.status = Some(state),
            Export::VhostScsi(export) => export.status = Some(state),
            Export::Iscsi(export) => export.status = Some(state),
        }
        self
    }
}

/// A session: a client of an export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Session {
    /// Names it as long as it lasts.
    pub id: String,
    /// The export's name.
    pub export: String,
    /// `vhost-user` or `iscsi`.
    pub kind: String,
    /// Of iSCSI: the initiator's name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initiator: Option<String>,
    /// Of iSCSI: the portal group that it came in by.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub portal_group: Option<u16>,
    /// How many connections it has.
    pub connections: usize,
    /// Of iSCSI: commands answered. A virtual machine's are those of its export's queues, in `/v1/statistics`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// Of iSCSI: bytes of data that they moved.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// Of iSCSI: commands answered with an error.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub errors: Option<u64>,
}

/// What initiators hold of a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Reservation {
    /// The disk's name.
    pub disk: String,
    /// What is reserved, in the words of SPC: `write exclusive`, ...; absent: there are registrations only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kind: Option<String>,
    /// Registrations and reservation outlive a restart.
    pub persists: bool,
    /// PRGENERATION.
    pub generation: u32,
    /// Who has registered.
    pub registrations: Vec<Registration>,
}

/// A registration.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Registration {
    /// The initiator port.
    pub initiator: String,
    /// Relative identifier of the target port.
    pub port: u16,
    /// The reservation key, in hexadecimal.
    pub key: String,
    /// Does it hold the reservation?
    pub holder: bool,
}

/// A worker.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct Worker {
    /// Its number, from 0.
    pub index: usize,
    /// The CPU that it is pinned to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cpu: Option<usize>,
    /// The export that it is dedicated to.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub export: Option<String>,
    /// Iterations in which there was work.
    pub busy_iterations: u64,
    /// Iterations in which polling found nothing.
    pub empty_iterations: u64,
    /// Times it slept.
    pub sleeps: u64,
    /// Messages it ran.
    pub messages: u64,
}
