//! An export: its configuration, its disk, and its properties as advertised.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use bdev::{Disk, FrozenBitmap};
use nbd::wire::{ALLOCATION_DEPTH, BASE_ALLOCATION, DIRTY_BITMAP, PAYLOAD_MAX, transmission};
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
    /// Changed ranges, as a further metadata context.
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

/// A metadata context. Its ID is its index in [`Context::ALL`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Context {
    /// `base:allocation`.
    Allocation,
    /// `qemu:allocation-depth`.
    Depth,
    /// `qemu:dirty-bitmap:NAME`, of exports with a bitmap.
    Dirty,
}

impl Context {
    const ALL: [Context; 3] = [Context::Allocation, Context::Depth, Context::Dirty];

    /// Returns the context with this ID, which was selected in the handshake.
    pub fn of(id: u32) -> Context {
        Context::ALL[id as usize]
    }
}

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
        // Has no effect: the disk has no cache that could be filled.
        flags |= transmission::SEND_CACHE;
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
        let contexts = Context::ALL
            .into_iter()
            .filter_map(|context| match context {
                Context::Allocation => Some(BASE_ALLOCATION.to_owned()),
                Context::Depth => Some(ALLOCATION_DEPTH.to_owned()),
                Context::Dirty => {
                    let dirty = self.options.dirty.as_ref()?;
                    Some(format!("{DIRTY_BITMAP}{}", dirty.name))
                }
            });
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
            contexts: contexts.collect(),
        }
    }
}
