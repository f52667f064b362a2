//! A disk on a SCSI logical unit: code for units of iSCSI targets and of this machine.
//!
//! Threads of the unit execute commands ([`CommandUnit`]); workers submit them and never wait. Properties such as size and discard are
//! those of the unit. A passed-through unit also executes commands of clients unchanged.

mod channel;
mod commands;

use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use block::{Capacity, CompareAndWrite, DiskInfo, Geometry, PassedReservations, Passthrough};
use iscsi_initiator::{CommandSink, UnitCommand, UnitEvent, UnitInfo};

use self::commands::UnitProfile;
use crate::error::{check_block_size, check_size};
use crate::network_medium::NetworkMedium;
use crate::remote_state::RemoteState;
use crate::{Attach, BlockDevice, Capabilities, DiskState, IoChannel, OpenError, RemoteDevice};

/// Executes commands.
pub(crate) trait CommandUnit: Send + Sync {
    /// Submits a command; `sink` receives the result.
    fn submit(&self, command: UnitCommand, sink: Arc<dyn CommandSink>, token: u64);

    /// Asks for a command to end soon. Best effort.
    fn abort(&self, sink: &Arc<dyn CommandSink>, token: u64);
}

/// A disk on a SCSI logical unit.
pub struct ScsiDisk {
    unit: Arc<ServedUnit>,
    kind: &'static str,
    medium: NetworkMedium,
    watch: Arc<Watch>,
}

/// State shared by the disk and its channels.
struct ServedUnit {
    unit: Box<dyn CommandUnit>,
    info: DiskInfo,
    capacity: Arc<Capacity>,
    profile: UnitProfile,
    /// The unit does not support WRITE SAME.
    zeroes_by_writing: AtomicBool,
}

impl ServedUnit {
    fn unit(&self) -> &dyn CommandUnit {
        &*self.unit
    }

    fn zeroes_by_writing(&self) -> bool {
        self.zeroes_by_writing.load(Ordering::Relaxed)
    }

    fn write_zeroes_from_now_on(&self) {
        self.zeroes_by_writing.store(true, Ordering::Relaxed);
    }
}

/// Components of a disk.
pub(crate) struct ScsiDiskParts {
    pub kind: &'static str,
    pub unit: Box<dyn CommandUnit>,
    pub info: UnitInfo,
    pub medium: NetworkMedium,
    pub watch: Arc<Watch>,
    /// Refuse writes.
    pub read_only: bool,
    /// Pass commands of clients through, with this handling of reservations.
    pub passthrough: Option<PassedReservations>,
    /// Bytes per logical block; by default the unit's own.
    pub block_size: Option<u32>,
}

impl ScsiDisk {
    pub(crate) fn new(
        parts: ScsiDiskParts,
        failed: impl Fn(String) -> OpenError,
    ) -> Result<ScsiDisk, OpenError> {
        let ScsiDiskParts { info, watch, .. } = parts;
        let is_served = match parts.passthrough {
            Some(_) => info.is_disk(),
            None => info.device_type == 0,
        };
        if !is_served {
            let hint = match info.is_disk() {
                true => "; hint: serve an optical unit with `passthrough`",
                false => "",
            };
            return Err(failed(format!(
                "it is not a disk, but a device of type {:02x}h (SPC-5, 6.7.2){hint}",
                info.device_type
            )));
        }
        if info.blocks == 0 {
            return Err(failed("it has no medium".to_owned()));
        }
        let of_unit = check_block_size(info.block_size)?;
        let block_size = match parts.block_size {
            Some(found) if parts.passthrough.is_some() && found != of_unit => {
                return Err(failed(format!(
                    "block_size is {found}, but passthrough needs the unit's own block size, {of_unit} bytes; hint: remove block_size"
                )));
            }
            Some(found) => check_block_size(found)?,
            None => of_unit,
        };
        let geometry = Geometry::new(block_size, info.bytes());
        check_size(geometry.capacity_bytes(), block_size)?;
        let capacity = Arc::new(Capacity::new(geometry.capacity_bytes()));
        // Set only here.
        watch.capacity.set((geometry, Arc::clone(&capacity))).ok();
        let profile = UnitProfile::of(&info);
        let zeroes = Arc::clone(&profile.unmapped_zeroes);
        // Set only here.
        watch.unmapped_zeroes.set(zeroes).ok();
        let must_write_through = Arc::clone(&profile.must_write_through);
        // Set only here.
        watch.must_write_through.set(must_write_through).ok();
        let unit = ServedUnit {
            info: disk_info(
                &info,
                geometry,
                &profile,
                parts.read_only,
                parts.passthrough,
            ),
            unit: parts.unit,
            capacity,
            profile,
            zeroes_by_writing: AtomicBool::new(false),
        };
        Ok(ScsiDisk {
            unit: Arc::new(unit),
            kind: parts.kind,
            medium: parts.medium,
            watch,
        })
    }
}

/// Receives events of the unit's thread and forwards changes.
#[derive(Default)]
pub(crate) struct Watch {
    state: RemoteState,
    capacity: OnceLock<(Geometry, Arc<Capacity>)>,
    unmapped_zeroes: OnceLock<Arc<AtomicBool>>,
    must_write_through: OnceLock<Arc<AtomicBool>>,
}

impl Watch {
    pub fn on_event(&self, event: UnitEvent<'_>) {
        match event {
            UnitEvent::Down { reason, next_try } => {
                self.state.set_unavailable(reason.to_owned(), next_try);
            }
            UnitEvent::Up(info) => {
                self.state.set_ready();
                self.take_properties(info);
                self.resized(info);
                self.state.notify_change();
            }
            UnitEvent::Changed(info) => {
                self.take_properties(info);
                if self.resized(info) {
                    self.state.notify_change();
                }
            }
        }
    }

    fn take_properties(&self, info: &UnitInfo) {
        if let Some(zeroes) = self.unmapped_zeroes.get() {
            zeroes.store(info.zeroes, Ordering::Relaxed);
        }
        if let Some(must_write_through) = self.must_write_through.get() {
            let may_cache = info.properties.write_cache != Some(false);
            must_write_through.store(may_cache, Ordering::Relaxed);
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
        tracing::info!(before, size, "size of logical unit changed");
        capacity.set(size);
        true
    }
}

/// Maximum plausible granularity or optimal transfer, in bytes.
const SENSIBLE_BYTES: u32 = 64 << 20;

fn disk_info(
    unit: &UnitInfo,
    geometry: Geometry,
    profile: &UnitProfile,
    read_only: bool,
    reservations: Option<PassedReservations>,
) -> DiskInfo {
    // Block counts refer to blocks of the unit.
    let block_size = unit.block_size;
    let properties = &unit.properties;
    // An implausible size is treated as not reported.
    let sensible = |blocks: u32| {
        let bytes = blocks.checked_mul(block_size);
        bytes.filter(|bytes| bytes.is_power_of_two() && *bytes <= SENSIBLE_BYTES)
    };
    let granularity = sensible(properties.unmap_granularity).unwrap_or(block_size);
    let compared = u64::from(properties.compare_and_write_max) * u64::from(block_size);
    DiskInfo {
        geometry,
        physical_block_size: (block_size << properties.physical_exponent.min(7))
            .min(65_536)
            .max(geometry.block_size()),
        io_alignment: block_size,
        optimal_io_size: sensible(properties.optimal_transfer).unwrap_or(0),
        read_only: read_only || unit.read_only,
        // A unit may have an unreported cache, and clients can enable that of a passed-through unit.
        write_cache: reservations.is_some() || properties.write_cache.unwrap_or(true),
        discard_granularity: profile.unmaps().then_some(granularity),
        discard_zeroes: profile.discards_to_zeroes(),
        write_zeroes: true,
        anchors: false,
        atomic_writes: None,
        // The unit cannot compare part of a block that others may write to.
        compare_and_write: (compared > 0 && geometry.block_size() >= block_size)
            .then_some(CompareAndWrite::Device { boundary: compared }),
        // Other initiators may use the unit; its users must coordinate.
        shared: false,
        rotational: properties.rotational,
        passthrough: reservations.map(|reservations| Passthrough {
            device_type: unit.device_type,
            reservations,
            read_only,
        }),
        identity: block::Identity::UNSET,
        serial: String::new(),
        naa: 0,
    }
}

impl BlockDevice for ScsiDisk {
    fn info(&self) -> DiskInfo {
        self.unit.info.resized(self.unit.capacity.bytes())
    }

    fn capacity(&self) -> &Arc<Capacity> {
        &self.unit.capacity
    }

    fn set_size(&self, _bytes: u64) -> io::Result<()> {
        Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "a logical unit is resized at its target, and the disk then adopts the new size",
        ))
    }

    fn kind(&self) -> &'static str {
        self.kind
    }

    fn capabilities(&self) -> Capabilities<'_> {
        Capabilities {
            medium: Some(&self.medium),
            remote: Some(self),
            ..Capabilities::NONE
        }
    }

    fn attach(&self, attach: &mut Attach<'_>) -> io::Result<Box<dyn IoChannel>> {
        Ok(Box::new(channel::ScsiChannel::new(
            Arc::clone(&self.unit),
            attach,
        )?))
    }
}

impl RemoteDevice for ScsiDisk {
    fn state(&self) -> DiskState {
        self.watch.state.get()
    }

    fn on_change(&self, changed: Box<dyn Fn() + Send + Sync>) {
        self.watch.state.on_change(changed);
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    #[test]
    fn implausible_limits_are_ignored() {
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
            let info = disk_info(&unit, geometry, &UnitProfile::of(&unit), false, None);
            assert_eq!(info.physical_block_size, 65_536);
            (info.discard_granularity, info.optimal_io_size)
        };
        assert_eq!(info(8, 2048), (Some(4096), 1 << 20));
        for wrong in [0, 3, 1 << 20, u32::MAX] {
            assert_eq!(info(wrong, wrong), (Some(512), 0), "{wrong}");
        }
    }
    struct Silent;

    impl CommandUnit for Silent {
        fn submit(&self, _: UnitCommand, _: Arc<dyn CommandSink>, _: u64) {}
        fn abort(&self, _: &Arc<dyn CommandSink>, _: u64) {}
    }

    /// Creates a disk of 1 MiB on a unit that never responds.
    pub(crate) fn silent_disk(
        block_size: Option<u32>,
        passthrough: Option<PassedReservations>,
    ) -> Result<ScsiDisk, OpenError> {
        let mut info = UnitInfo {
            block_size: 4096,
            blocks: 256,
            ..UnitInfo::default()
        };
        info.properties.compare_and_write_max = 1;
        let parts = ScsiDiskParts {
            kind: "iscsi",
            unit: Box::new(Silent),
            info,
            medium: NetworkMedium::new("key".to_owned()),
            watch: Arc::default(),
            read_only: false,
            passthrough,
            block_size,
        };
        let failed = |reason| OpenError::Unit {
            unit: "u".to_owned(),
            reason,
        };
        ScsiDisk::new(parts, failed)
    }

    #[test]
    fn logical_blocks_differ_from_the_unit_unless_it_is_passed_through() {
        for (block_size, shown, compares) in [(None, 4096, true), (Some(512), 512, false)] {
            let info = silent_disk(block_size, None)
                .unwrap_or_else(|error| panic!("{error}"))
                .info();
            assert_eq!(info.geometry, Geometry::new(shown, 1 << 20));
            assert_eq!((info.io_alignment, info.physical_block_size), (4096, 4096));
            assert_eq!(info.compare_and_write.is_some(), compares);
        }
        let emulated = Some(PassedReservations::Emulate);
        assert!(silent_disk(Some(4096), emulated).is_ok());
        let refused = silent_disk(Some(512), emulated)
            .err()
            .map(|error| error.to_string());
        assert!(refused.is_some_and(|text| text.contains("hint: remove block_size")));
    }
}
