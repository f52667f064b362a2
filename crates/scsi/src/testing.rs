//! Fixtures for unit tests: a port, disks, a unit.

use std::sync::Arc;

use block::{DiskInfo, Geometry};

use crate::{Directory, DiskId, LogicalUnit, MemoryStore, TargetPort, UnitConfig};

pub(crate) fn port() -> Arc<TargetPort> {
    Arc::new(TargetPort {
        relative_id: 1,
        group: 1,
        name: None,
        device_name: None,
        state_setters: crate::StateSetters::default(),
    })
}

pub(crate) fn info(block_size: u32, bytes: u64) -> DiskInfo {
    DiskInfo {
        geometry: Geometry::new(block_size, bytes),
        physical_block_size: 4096,
        io_alignment: block_size,
        optimal_io_size: 0,
        read_only: false,
        write_cache: true,
        discard_granularity: Some(4096),
        discard_zeroes: true,
        write_zeroes: true,
        anchors: true,
        atomic_writes: None,
        compare_and_write: Some(block::CompareAndWrite::Emulated),
        shared: false,
        rotational: false,
        passthrough: None,
        identity: block::Identity::from_random_bits(1),
        serial: "serial-0".to_owned(),
        naa: 0x3000_0000_0000_0001,
    }
}

pub(crate) fn ram(block_size: u32, bytes: u64) -> Arc<LogicalUnit> {
    let directory = Directory::new(Box::<MemoryStore>::default());
    let info = info(block_size, bytes);
    LogicalUnit::new(
        &directory,
        UnitConfig {
            disk: DiskId(1),
            info,
            removable: false,
            medium: None,
        },
    )
}
