//! A disk that is a logical unit of an iSCSI target: one session of one or more connections for all workers, a channel of its own for
//! each.
//!
//! A thread keeps the session ([`iscsi_initiator::ReconnectingUnit`]); workers give it commands and never wait. While the target is
//! away I/O waits, up to `replacement_timeout`; then it fails as offline, and the disk's `on_error` decides. Size, discards and
//! the like are the unit's. Tests: `tests/tests/remote_disks.rs`.

mod channel;
mod commands;
mod medium;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use block::{Capacity, CompareAndWrite, DiskInfo, Geometry};
use iscsi_initiator::{ReconnectSettings, ReconnectingUnit, UnitEvent, UnitInfo};
use latency::Clock;
use sha2::{Digest, Sha256};

use self::commands::Manner;
use crate::error::{check_block_size, check_size};
use crate::network_medium::NetworkMedium;
use crate::{Attach, BlockDevice, DiskState, IoChannel, Medium, OpenError};

/// What to open, and how.
#[derive(Clone, Debug)]
pub struct IscsiOptions {
    /// Which unit, as whom. Without an ISID it gets one that is always the same for this host, disk and unit.
    pub unit: ReconnectSettings,
    /// The disk's name.
    pub disk: String,
    /// Nothing may be written.
    pub read_only: bool,
}

/// A disk on a logical unit of an iSCSI target.
pub struct Iscsi {
    shared: Arc<Shared>,
}

/// What channels need of it.
struct Shared {
    unit: ReconnectingUnit,
    info: DiskInfo,
    capacity: Arc<Capacity>,
    manner: Manner,
    medium: NetworkMedium,
    watch: Arc<Watch>,
    /// The unit does not know how to write zeroes.
    zeroes_by_writing: AtomicBool,
}

impl Shared {
    fn unit(&self) -> &ReconnectingUnit {
        &self.unit
    }

    fn zeroes_by_writing(&self) -> bool {
        self.zeroes_by_writing.load(Ordering::Relaxed)
    }

    fn write_zeroes_from_now_on(&self) {
        self.zeroes_by_writing.store(true, Ordering::Relaxed);
    }
}

/// What the unit's thread says, and who hears of it.
#[derive(Default)]
struct Watch {
    /// With the time of the next try.
    down: Mutex<Option<(String, std::time::Duration)>>,
    capacity: OnceLock<(Geometry, Arc<Capacity>)>,
    changed: OnceLock<Box<dyn Fn() + Send + Sync>>,
}

impl Watch {
    fn down(&self) -> std::sync::MutexGuard<'_, Option<(String, std::time::Duration)>> {
        self.down.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn hear(&self, event: UnitEvent<'_>) {
        match event {
            UnitEvent::Down { reason, next_try } => {
                *self.down() = Some((reason.to_owned(), Clock::shared().elapsed() + next_try));
            }
            UnitEvent::Up(info) => {
                *self.down() = None;
                self.resized(info);
                self.tell();
            }
            UnitEvent::Changed(info) => {
                if self.resized(info) {
                    self.tell();
                }
            }
        }
    }

    fn resized(&self, info: &UnitInfo) -> bool {
        let Some((geometry, capacity)) = self.capacity.get() else {
            return false;
        };
        let (size, before) = (
            geometry.resized(info.bytes()).capacity_bytes(),
            capacity.bytes(),
        );
        if size == before || size == 0 {
            return false;
        }
        tracing::info!(before, size, "size of iSCSI logical unit changed");
        capacity.set(size);
        true
    }

    fn tell(&self) {
        if let Some(changed) = self.changed.get() {
            changed();
        }
    }
}

impl Iscsi {
    /// Logs in and asks what the unit is.
    ///
    /// # Errors
    /// What cannot be reached or used, why, and what to do about it. May take as long as the session's time-out.
    pub fn open(options: &IscsiOptions) -> Result<Iscsi, OpenError> {
        let watch = Arc::new(Watch::default());
        let address = options.unit.address.clone();
        let failed = |what: String| OpenError::Unit {
            unit: address.to_string(),
            what,
        };
        let observer = {
            let watch = Arc::clone(&watch);
            Box::new(move |event: UnitEvent<'_>| watch.hear(event))
        };
        let mut settings = options.unit.clone();
        let host = host_name();
        let isid = || isid(&[&host, &options.disk, &address.to_string()]);
        settings.session.isid.get_or_insert_with(isid);
        let opened = ReconnectingUnit::open(settings, observer);
        let (unit, info) = opened.map_err(|error| failed(error.to_string()))?;
        if info.device_type != 0 {
            let what = format!(
                "it is no disk, but a device of type {:02x}h (SPC-5, 6.7.2)",
                info.device_type
            );
            return Err(failed(what));
        }
        let block_size = check_block_size(info.block_size)?;
        let geometry = Geometry::new(block_size, info.bytes());
        check_size(geometry.capacity_bytes(), block_size)?;
        let capacity = Arc::new(Capacity::new(geometry.capacity_bytes()));
        // Nobody else sets it.
        watch.capacity.set((geometry, Arc::clone(&capacity))).ok();
        let manner = Manner::of(&info);
        Ok(Iscsi {
            shared: Arc::new(Shared {
                medium: medium::of(&address, &info),
                info: disk_info(&info, geometry, &manner, options.read_only),
                unit,
                capacity,
                manner,
                watch,
                zeroes_by_writing: AtomicBool::new(false),
            }),
        })
    }
}

/// Larger granularities and best transfers than any device has.
const SENSIBLE_BYTES: u32 = 64 << 20;

/// What tells this host from others that may have the same initiator name.
fn host_name() -> String {
    let id = std::fs::read_to_string("/etc/machine-id");
    id.unwrap_or_else(|_| {
        let name = rustix::system::uname();
        name.nodename().to_string_lossy().into_owned()
    })
}

/// A daemon that comes after one that was killed has to use its ISID: then the target ends the tasks of that session before there is
/// another (RFC 7143, 6.3.5), and no write of the dead daemon comes after one that this one repeats. In the random format (10.4.1).
fn isid(of: &[&str]) -> [u8; 6] {
    let digest = Sha256::digest(of.join("\n"));
    let mut isid = [0x80; 6];
    isid[1..].copy_from_slice(&digest[..5]);
    isid
}

fn disk_info(unit: &UnitInfo, geometry: Geometry, manner: &Manner, read_only: bool) -> DiskInfo {
    let block_size = geometry.block_size();
    let properties = &unit.properties;
    // What makes no sense as a size is as if it was not said.
    let sensible = |blocks: u32| {
        let bytes = blocks.checked_mul(block_size);
        bytes.filter(|bytes| bytes.is_power_of_two() && *bytes <= SENSIBLE_BYTES)
    };
    let granularity = sensible(properties.unmap_granularity).unwrap_or(block_size);
    let compared = u64::from(properties.compare_and_write_max) * u64::from(block_size);
    DiskInfo {
        geometry,
        physical_block_size: (block_size << properties.physical_exponent.min(7)).min(65_536),
        optimal_io_size: sensible(properties.optimal_transfer).unwrap_or(0),
        read_only: read_only || unit.read_only,
        // One that does not say may have one.
        write_cache: properties.write_cache.unwrap_or(true),
        discard_granularity: manner.unmaps().then_some(granularity),
        discard_zeroes: manner.discards_to_zeroes(),
        write_zeroes: true,
        anchors: false,
        atomic_writes: None,
        compare_and_write: (compared > 0).then_some(CompareAndWrite::Device { boundary: compared }),
        // Other initiators may use the unit; who does so arranges it with them.
        shared: false,
        rotational: properties.rotational,
        identity: block::Identity::UNSET,
        serial: String::new(),
        naa: 0,
    }
}

impl BlockDevice for Iscsi {
    fn info(&self) -> DiskInfo {
        let info = &self.shared.info;
        DiskInfo {
            geometry: info.geometry.resized(self.shared.capacity.bytes()),
            ..info.clone()
        }
    }

    fn capacity(&self) -> &Arc<Capacity> {
        &self.shared.capacity
    }

    fn set_size(&self, _bytes: u64) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "a logical unit is resized at its target; the disk follows",
        ))
    }

    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        // One owner of objects sets it, once.
        self.shared.watch.changed.set(changed).ok();
    }

    fn medium(&self) -> Option<&dyn Medium> {
        Some(&self.shared.medium)
    }

    fn state(&self) -> DiskState {
        match &*self.shared.watch.down() {
            None => DiskState::Ready,
            Some((reason, next_try)) => DiskState::Unavailable {
                reason: reason.clone(),
                next_try: next_try.saturating_sub(Clock::shared().elapsed()),
            },
        }
    }

    fn kind(&self) -> &'static str {
        "iscsi"
    }

    fn attach(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        Ok(Box::new(channel::IscsiChannel::new(
            Arc::clone(&self.shared),
            attach,
        )?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_that_make_no_sense_are_as_if_they_were_not_said() {
        let info = |granularity, optimal| {
            let mut unit = UnitInfo {
                block_size: 512,
                blocks: 1 << 20,
                thin: true,
                ..UnitInfo::default()
            };
            unit.properties.unmap = true;
            unit.properties.unmap_granularity = granularity;
            unit.properties.optimal_transfer = optimal;
            unit.properties.physical_exponent = 15;
            let geometry = Geometry::new(512, unit.bytes());
            let info = disk_info(&unit, geometry, &Manner::of(&unit), false);
            assert_eq!(info.physical_block_size, 65_536);
            (info.discard_granularity, info.optimal_io_size)
        };
        assert_eq!(info(8, 2048), (Some(4096), 1 << 20));
        for wrong in [0, 3, 1 << 20, u32::MAX] {
            assert_eq!(info(wrong, wrong), (Some(512), 0), "{wrong}");
        }
    }

    #[test]
    fn isid_is_of_the_random_format_and_the_same_for_the_same_disk() {
        let one = isid(&["host", "d0", "iscsi://h/t/0"]);
        assert_eq!(one, isid(&["host", "d0", "iscsi://h/t/0"]));
        assert_eq!(one[0] >> 6, 2);
        assert_ne!(one, isid(&["host", "d1", "iscsi://h/t/0"]));
        assert_ne!(one, isid(&["other", "d0", "iscsi://h/t/0"]));
    }
}
