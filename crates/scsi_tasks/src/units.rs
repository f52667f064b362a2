//! Which disk a logical unit stands on. One registry per process: a disk is one logical unit, whichever doors show
//! it, so that reservations hold across all of them.

use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, PoisonError, RwLock};

use crate::Runners;
use backend::Disk;

use scsi::{Directory, DiskId, Holes, LogicalUnit, Store, UnitConfig};

type Entry = (Arc<Disk>, Arc<LogicalUnit>);

#[derive(Debug)]
struct DiskHoles(Arc<Disk>);

impl Holes for DiskHoles {
    fn next_data(&self, offset: u64) -> u64 {
        self.0.engine().next_data(offset)
    }
}

/// All disks that are logical units.
pub struct Units {
    directory: Arc<Directory>,
    /// By [`DiskId`].
    entries: RwLock<Vec<Option<Entry>>>,
    next_port: AtomicU16,
    runners: Arc<Runners>,
}

impl Units {
    /// An empty registry. `store` keeps what has to survive a restart: reservations with APTPL, saved mode pages.
    pub fn new(store: Box<dyn Store>) -> Arc<Units> {
        Arc::new(Units {
            directory: Directory::new(store),
            entries: RwLock::new(Vec::new()),
            next_port: AtomicU16::new(1),
            runners: Arc::default(),
        })
    }

    /// The logical unit of a disk, made at the first call.
    pub fn unit(&self, disk: &Arc<Disk>) -> Arc<LogicalUnit> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, unit)) = entries
            .iter()
            .flatten()
            .find(|(known, _)| Arc::ptr_eq(known, disk))
        {
            return unit.clone();
        }
        let free = entries.iter().position(Option::is_none);
        let index = free.unwrap_or_else(|| {
            entries.push(None);
            entries.len() - 1
        });
        let config = UnitConfig {
            disk: DiskId(index as u32),
            info: (**disk.info()).clone(),
            removable: disk.is_removable(),
            holes: Some(Arc::new(DiskHoles(disk.clone()))),
        };
        let unit = LogicalUnit::new(&self.directory, config);
        entries[index] = Some((disk.clone(), unit.clone()));
        unit
    }

    /// A relative target port identifier that no other door of the process has (SPC-5, 7.8.6.7).
    pub fn next_port_id(&self) -> u16 {
        self.next_port.fetch_add(1, Ordering::Relaxed)
    }

    /// Everybody who runs tasks on these units.
    pub fn runners(&self) -> &Arc<Runners> {
        &self.runners
    }

    /// The disk behind a plan's I/O.
    pub fn disk(&self, id: DiskId) -> Option<Arc<Disk>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        entries
            .get(id.0 as usize)?
            .as_ref()
            .map(|(disk, _)| disk.clone())
    }

    /// Forgets a disk that no door shows any more.
    pub fn remove(&self, disk: &Arc<Disk>) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        for entry in entries.iter_mut() {
            if entry
                .as_ref()
                .is_some_and(|(known, _)| Arc::ptr_eq(known, disk))
            {
                *entry = None;
            }
        }
    }
}
