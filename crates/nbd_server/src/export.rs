//! An export: its configuration, its disk, and its properties as advertised.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bdev::{Disk, FrozenBitmap};
use nbd::wire::{BASE_ALLOCATION, DIRTY_BITMAP, PAYLOAD_MAX, transmission};
use nbd::{BlockSizes, ExportInfo};
use request_engine::SharedMemory;

use crate::connection::Connection;
use crate::listeners::Address;

/// Preferred block size of disks that have no larger one: a page.
const PREFERRED_MIN: u32 = 4096;
/// Maximum of the minimum block size in the protocol.
const MINIMUM_MAX: u32 = 1 << 16;

/// Configuration of an export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportOptions {
    /// Name of the export in the daemon.
    pub name: String,
    /// Name for clients, unique among the exports of a listener.
    pub export_name: String,
    /// Description for clients.
    pub description: String,
    /// Clients may not change the disk.
    pub read_only: bool,
    /// Clients must use TLS. Equal for all exports of an address.
    pub tls: bool,
    /// Addresses of its listeners.
    pub addresses: Vec<Address>,
    /// Changed ranges, as a second metadata context.
    pub dirty: Option<DirtyContext>,
}

/// Metadata context `qemu:dirty-bitmap:NAME`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyContext {
    /// Name of the bitmap.
    pub name: String,
    /// Changed ranges.
    pub bits: Arc<FrozenBitmap>,
}

/// ID of `base:allocation`: its index in the contexts of an export. The context for a dirty bitmap follows.
pub(crate) const ALLOCATION_ID: u32 = 0;

/// An open export.
pub(crate) struct Export {
    pub options: ExportOptions,
    pub disk: Arc<Disk>,
    /// Memory for the data of its connections.
    pub memory: Arc<SharedMemory<Connection>>,
    removed: AtomicBool,
}

impl Export {
    pub fn new(
        options: ExportOptions,
        disk: Arc<Disk>,
        memory: Arc<SharedMemory<Connection>>,
    ) -> Export {
        Export {
            options,
            disk,
            memory,
            removed: AtomicBool::new(false),
        }
    }

    /// Marks the export as removed: no connection begins any more.
    pub fn remove(&self) {
        self.removed.store(true, Ordering::SeqCst);
    }

    pub fn is_removed(&self) -> bool {
        self.removed.load(Ordering::SeqCst)
    }

    /// Returns the properties for clients.
    pub fn info(&self) -> ExportInfo {
        let info = self.disk.info();
        let read_only = self.options.read_only || info.read_only;
        let mut flags = transmission::SEND_FLUSH | transmission::SEND_FUA;
        // All connections share the disk: a flush covers the writes of each.
        flags |= transmission::CAN_MULTI_CONN;
        if info.rotational {
            flags |= transmission::ROTATIONAL;
        }
        if read_only {
            flags |= transmission::READ_ONLY;
        } else {
            if info.discard_granularity.is_some() {
                flags |= transmission::SEND_TRIM;
            }
            if info.write_zeroes {
                flags |= transmission::SEND_WRITE_ZEROES;
            }
            // Only freeing space is faster than writing on every device.
            if info.write_zeroes && info.discard_zeroes {
                flags |= transmission::SEND_FAST_ZERO;
            }
        }
        let minimum = info.geometry.block_size().min(MINIMUM_MAX);
        let preferred = [info.physical_block_size, info.io_alignment, PREFERRED_MIN];
        let preferred = preferred.into_iter().filter(|size| size.is_power_of_two());
        let preferred = preferred.fold(minimum, u32::max).min(PAYLOAD_MAX);
        let dirty = self.options.dirty.as_ref();
        let dirty = dirty.map(|dirty| format!("{DIRTY_BITMAP}{}", dirty.name));
        ExportInfo {
            name: self.options.export_name.clone(),
            description: self.options.description.clone(),
            size: info.geometry.capacity_bytes(),
            flags,
            block_sizes: BlockSizes {
                minimum,
                preferred,
                maximum_payload: PAYLOAD_MAX,
            },
            contexts: [BASE_ALLOCATION.to_owned()]
                .into_iter()
                .chain(dirty)
                .collect(),
        }
    }
}
