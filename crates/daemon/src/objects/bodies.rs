//! Configured objects in the form of the control API, and how they are.

use std::path::PathBuf;

use bdev::{DiskState, RbdLock};
use control::objects::{Acl, Disk, DiskStatus, Export, Iscsi, Lun, VhostBlk, VhostScsi};
use reactor::ExportPlacement;

use super::Live;
use config::{AclEntry, BlockDeviceConfig, DiskConfig, ExportRef, LunConfig};

/// A disk as it is configured.
pub fn disk(disk: &DiskConfig) -> Disk {
    let mut body = Disk {
        name: disk.name.clone(),
        backend: disk.backend.word().to_owned(),
        size: disk.backend.size(),
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
        ..Disk::default()
    };
    describe(&disk.backend, &mut body);
    body
}

/// The keys of a disk's block device.
fn describe(backend: &BlockDeviceConfig, body: &mut Disk) {
    let text = |path: &PathBuf| path.to_string_lossy().into_owned();
    match backend {
        BlockDeviceConfig::Ram { .. } | BlockDeviceConfig::Null { .. } => {}
        BlockDeviceConfig::Delay { time, around, .. } => {
            body.time = Some(time.to_string());
            body.around = Some(around.word().to_owned());
        }
        BlockDeviceConfig::File { path, cache, .. } => {
            body.path = Some(text(path));
            body.cache = Some(cache.word().to_owned());
        }
        BlockDeviceConfig::Rbd(rbd) => {
            let cluster = &rbd.cluster;
            body.image = Some(rbd.image.to_string());
            body.conf = cluster.conf.as_ref().map(text);
            body.id.clone_from(&cluster.id);
            body.keyring = cluster.keyring.as_ref().map(text);
            body.mon_host.clone_from(&cluster.mon_host);
            let lock = Some(rbd.lock).filter(|lock| *lock != RbdLock::default());
            body.lock = lock.map(|lock| lock.word().to_owned());
            let options = Some(&cluster.options).filter(|options| !options.is_empty());
            body.option = options.cloned();
        }
    }
}

/// How a configured disk is; `used_by` is what shows it.
pub fn disk_status(live: &Live, config: &DiskConfig, used_by: Vec<String>) -> DiskStatus {
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
    let shared = disk.and_then(|disk| disk.device().shared_state());
    let geometry = info.as_ref().map(|info| info.geometry);
    let stack = match disk {
        Some(disk) => disk.stack(),
        None => vec![config.backend.word()],
    };
    let removing = live.draining.iter().find_map(|one| one.disk(&config.name));
    DiskStatus {
        reservations_unknown: shared.and_then(|shared| shared.unknown()),
        removing_seconds: removing.map(|time| time.as_secs()),
        size: match geometry {
            Some(geometry) => geometry.capacity_bytes(),
            None => config.backend.size().unwrap_or(0),
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

/// A logical unit as it is configured.
pub fn lun(lun: &LunConfig) -> Lun {
    Lun {
        target: lun.target,
        lun: lun.lun,
        disk: lun.disk.clone(),
    }
}

/// An export as it is configured.
pub fn export(export: ExportRef<'_>) -> Export {
    // In whatever order they came: as an initiator lists them.
    let luns = |luns: &[LunConfig]| {
        let mut luns: Vec<Lun> = luns.iter().map(lun).collect();
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
