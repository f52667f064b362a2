//! Configured objects and their state as API objects.

use bdev::{BlockDevice, Disk as ServedDisk, DiskState};
use control::objects::{Disk, DiskStatus, Export, Lun};

use super::Live;
use config::{DiskConfig, ExportConfig, LunConfig};

/// Returns the configuration of a disk.
pub fn disk(disk: &DiskConfig) -> Disk {
    Disk::new(&disk.name, disk.backend.word(), disk.body_values())
}

/// Returns the state of a configured disk, without the state that initiators have set. `used_by` names its exports and logical units.
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
    let device = disk.map(|disk| disk.device());
    let geometry = info.as_ref().map(|info| info.geometry);
    let stack = match disk {
        Some(disk) => disk.stack(),
        None => vec![config.backend.word()],
    };
    let removing = live.draining.iter().find_map(|one| one.disk(&config.name));
    let info_read_only = info.as_ref().is_some_and(|info| info.read_only);
    DiskStatus {
        reservations_unknown: disk.and_then(|disk| reservations_unknown(disk)),
        initiator_state: Vec::new(),
        damage: device.as_deref().and_then(damage),
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
        read_only: config.read_only || info_read_only,
        used_by,
        state: state.word().to_owned(),
        reason,
        next_try_seconds: next_try.map(|time| time.as_secs()),
        waiting: waiting.as_ref().map_or(0, |waiting| waiting.count as u64),
        waiting_reason: waiting.map(|waiting| waiting.error.to_string()),
        stack: stack.into_iter().map(str::to_owned).collect(),
    }
}

/// Returns the damage of the first damaged image of a chain.
fn damage(device: &dyn BlockDevice) -> Option<String> {
    let image = device.capabilities().image?;
    image.damage().or_else(|| damage(&*image.backing()?))
}

/// Returns why the persistent reservations of a disk are unknown.
pub fn reservations_unknown(disk: &ServedDisk) -> Option<String> {
    disk.state().reservations_unknown().or_else(|| {
        let device = disk.device();
        let shared = device.capabilities().shared_state;
        shared.and_then(|shared| shared.unknown())
    })
}

/// Returns the configuration of a logical unit.
pub fn lun(lun: &LunConfig) -> Lun {
    Lun {
        target: lun.target,
        lun: lun.lun,
        disk: lun.disk.clone(),
    }
}

/// Returns the configuration of an export.
pub fn export(export: &ExportConfig) -> Export {
    Export::new(export.kind(), export.name(), export.body_values())
}
