//! Which disk a logical unit stands on. One registry per process: a disk is one logical unit, whichever doors show
//! it, so that reservations hold across all of them.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU16, Ordering};
use std::sync::{Arc, PoisonError, RwLock, Weak};

use crate::Runners;
use backend::Disk;

use scsi::{Directory, DiskId, Holes, LogicalUnit, Store, UnitConfig};

type Entry = (Arc<Disk>, Arc<LogicalUnit>);

/// Does not keep the disk: a unit is remembered longer than its disk is there.
#[derive(Debug)]
struct DiskHoles(Weak<Disk>);

impl Holes for DiskHoles {
    fn next_data(&self, offset: u64) -> u64 {
        match self.0.upgrade() {
            Some(disk) => disk.engine().next_data(offset),
            None => offset,
        }
    }
}

#[derive(Default)]
struct Entries {
    /// By [`DiskId`]. A number is never given twice: whoever remembers one of a disk that is gone finds nothing.
    all: Vec<Option<Entry>>,
    /// Where a disk is, by its address.
    places: HashMap<usize, usize>,
}

fn address(disk: &Arc<Disk>) -> usize {
    Arc::as_ptr(disk).addr()
}

/// All disks that are logical units.
pub struct Units {
    directory: Arc<Directory>,
    entries: RwLock<Entries>,
    next_port: AtomicU16,
    runners: Arc<Runners>,
}

impl Units {
    /// An empty registry. `store` keeps what has to survive a restart: reservations with APTPL, saved mode pages.
    pub fn new(store: Box<dyn Store>) -> Arc<Units> {
        Arc::new(Units {
            directory: Directory::new(store),
            entries: RwLock::default(),
            next_port: AtomicU16::new(1),
            runners: Arc::default(),
        })
    }

    /// The logical unit of a disk, made at the first call.
    pub fn unit(&self, disk: &Arc<Disk>) -> Arc<LogicalUnit> {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let known = entries.places.get(&address(disk)).copied();
        if let Some(Some((_, unit))) = known.and_then(|at| entries.all.get(at)) {
            return unit.clone();
        }
        let index = entries.all.len();
        let config = UnitConfig {
            disk: DiskId(index as u32),
            info: (*disk.info()).clone(),
            removable: disk.is_removable(),
            holes: Some(Arc::new(DiskHoles(Arc::downgrade(disk)))),
        };
        let unit = LogicalUnit::new(&self.directory, config);
        entries.all.push(Some((disk.clone(), unit.clone())));
        entries.places.insert(address(disk), index);
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
        let entry = entries.all.get(id.0 as usize)?.as_ref();
        entry.map(|(disk, _)| disk.clone())
    }

    /// The logical unit of a disk that is one already.
    pub fn known(&self, disk: &Arc<Disk>) -> Option<Arc<LogicalUnit>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let at = *entries.places.get(&address(disk))?;
        let entry = entries.all.get(at)?.as_ref();
        entry.map(|(_, unit)| unit.clone())
    }

    /// Forgets a disk that no door shows any more.
    pub fn remove(&self, disk: &Arc<Disk>) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = entries.places.remove(&address(disk))
            && let Some(entry) = entries.all.get_mut(at)
        {
            *entry = None;
        }
    }
}
