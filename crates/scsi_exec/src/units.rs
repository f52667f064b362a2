//! Maps logical units to disks. One registry per process: a disk is one logical unit on all transports, so that reservations hold across
//! them.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};

use bdev::{Disk, StateMembership};
use reactor::Pool;

use scsi::{Directory, DiskId, LogicalUnit, Medium, Nexus, NexusId, Plan, Store, UnitConfig};

use crate::ports::{Ports, WithPorts};
use crate::{Runners, Task, TaskOrder, continue_in_background, shared_units};

type Entry = (Arc<Disk>, Arc<LogicalUnit>);

/// Medium of a disk. The reference is weak, because a logical unit may outlive its disk.
#[derive(Debug)]
struct DiskMedium(Weak<Disk>);

impl Medium for DiskMedium {
    fn set_closed(&self, closed: bool) {
        let Some(disk) = self.0.upgrade() else { return };
        if closed {
            disk.close();
        } else {
            disk.reopen();
        }
    }

    fn is_size_known(&self) -> bool {
        self.0.upgrade().is_none_or(|disk| disk.is_size_known())
    }
}

#[derive(Default)]
struct Entries {
    /// Indexed by [`DiskId`]. Numbers are not reused: a stale number finds nothing.
    all: Vec<Option<Entry>>,
    /// Index of a disk, by its address.
    places: HashMap<usize, usize>,
}

fn address(disk: &Arc<Disk>) -> usize {
    Arc::as_ptr(disk).addr()
}

/// All disks that are logical units.
pub struct Units {
    me: Weak<Units>,
    directory: Arc<Directory>,
    entries: RwLock<Entries>,
    ports: Arc<Ports>,
    runners: Arc<Runners>,
    orders: Mutex<HashMap<NexusId, Weak<TaskOrder>>>,
    /// Memberships in the shared state of disks that other daemons serve too, by index.
    memberships: Mutex<HashMap<usize, StateMembership>>,
    /// Workers for tasks without a transport.
    pool: OnceLock<Weak<Pool>>,
}

impl Units {
    /// Creates an empty registry. `store` holds the state that must survive a restart: reservations with APTPL, saved mode pages.
    pub fn new(store: Box<dyn Store>) -> Arc<Units> {
        let (store, ports) = WithPorts::wrap(store);
        Arc::new_cyclic(|me| Units {
            me: me.clone(),
            directory: Directory::new(Box::new(store)),
            entries: RwLock::default(),
            ports,
            runners: Arc::default(),
            orders: Mutex::default(),
            memberships: Mutex::default(),
            pool: OnceLock::new(),
        })
    }

    /// Sets the workers that resume interrupted operations. Without them such an operation has failed.
    pub fn run_on(&self, pool: &Arc<Pool>) {
        // Only the first call counts.
        drop(self.pool.set(Arc::downgrade(pool)));
    }

    /// Returns the logical unit of a disk, created at the first call. Creation resumes a sanitize or format operation that a restart
    /// interrupted.
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
            medium: Some(Arc::new(DiskMedium(Arc::downgrade(disk)))),
        };
        let unit = LogicalUnit::new(&self.directory, config);
        disk.state().set_reservations_unknown(unit.unknown_state());
        unit.allow_copies_from_anywhere(disk.may_be_copied_across_targets());
        let membership =
            shared_units::join(&self.me, disk, &unit, self.directory.store(), &self.runners);
        if let Some(membership) = membership {
            self.memberships().insert(index, membership);
        }
        entries.all.push(Some((disk.clone(), unit.clone())));
        entries.places.insert(address(disk), index);
        drop(entries);
        self.resume_operation(disk, &unit);
        unit
    }

    /// Resets damaged saved state. State that was unknown because of it is loaded again, and known state is saved again.
    ///
    /// # Errors
    /// The damaged state is still there, or the known state cannot be saved.
    pub fn reset_saved(&self, key: &str) -> std::io::Result<()> {
        self.directory.store().discard_damaged(key)?;
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let units: Vec<Entry> = entries.all.iter().flatten().cloned().collect();
        drop(entries);
        for (disk, unit) in units {
            unit.save_again(key)?;
            if unit.unknown_state().is_some() {
                unit.reload_unknown_state();
                disk.state().set_reservations_unknown(unit.unknown_state());
                self.resume_operation(&disk, &unit);
            }
        }
        Ok(())
    }

    /// Continues a sanitize or format operation that a restart interrupted.
    fn resume_operation(&self, disk: &Disk, unit: &Arc<LogicalUnit>) {
        if let Some(run) = unit.resume_operation() {
            let pool = self.pool.get().and_then(Weak::upgrade);
            tracing::info!(
                disk = disk.name(),
                "resuming the interrupted sanitize or format operation"
            );
            if let (Some(pool), Some(me)) = (pool, self.me.upgrade()) {
                let mut task = Task::default();
                task.start(Plan::Run(run));
                continue_in_background(&pool.select_worker(), &me, task);
            }
        }
    }

    fn memberships(&self) -> MutexGuard<'_, HashMap<usize, StateMembership>> {
        let memberships = self.memberships.lock();
        memberships.unwrap_or_else(PoisonError::into_inner)
    }

    /// Leaves all shared states when the daemon ends, so that other daemons with the same disks need not wait for this one. May block for
    /// some seconds.
    pub fn leave_shared_states(&self) {
        let memberships = std::mem::take(&mut *self.memberships());
        drop(memberships);
    }

    /// Returns true if a restart would lose identifiers of target ports.
    pub(crate) fn has_unsaved_ports(&self) -> bool {
        self.ports.is_unsaved()
    }

    /// Returns the store of the state that must survive a restart.
    pub fn store(&self) -> &dyn Store {
        self.directory.store()
    }

    /// Returns the relative target port identifier of the port of this name, unique in the process (SPC-5, 7.8.6.7). The name keeps it
    /// after a restart if registrations are saved.
    pub fn port_id(&self, name: &str) -> u16 {
        self.ports.number(name)
    }

    /// Returns all runners of tasks on these units.
    pub fn runners(&self) -> &Arc<Runners> {
        &self.runners
    }

    /// Returns the task order of a nexus, shared by all its queues or connections.
    pub fn order(&self, nexus: &Nexus) -> Arc<TaskOrder> {
        let mut orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(order) = orders.get(&nexus.id()).and_then(Weak::upgrade) {
            return order;
        }
        orders.retain(|_, order| order.strong_count() > 0);
        let order = TaskOrder::new(nexus, &self.runners);
        orders.insert(nexus.id(), Arc::downgrade(&order));
        order
    }

    /// Returns the disk of a plan's I/O.
    pub fn disk(&self, id: DiskId) -> Option<Arc<Disk>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let entry = entries.all.get(id.0 as usize)?.as_ref();
        entry.map(|(disk, _)| disk.clone())
    }

    /// Returns the logical unit of a disk, if it was created already.
    pub fn known(&self, disk: &Arc<Disk>) -> Option<Arc<LogicalUnit>> {
        let entries = self.entries.read().unwrap_or_else(PoisonError::into_inner);
        let at = *entries.places.get(&address(disk))?;
        let entry = entries.all.get(at)?.as_ref();
        entry.map(|(_, unit)| unit.clone())
    }

    /// Returns the kinds of state that initiators have set; without a logical unit, those that the next one will load. May block.
    pub fn initiator_state(&self, disk: &Arc<Disk>) -> Vec<&'static str> {
        match self.known(disk) {
            Some(unit) => unit.initiator_state().collect(),
            None => scsi::saved_initiator_state(self.store(), (*disk.info()).clone()),
        }
    }

    /// Removes a disk that no transport exports any more.
    pub fn remove(&self, disk: &Arc<Disk>) {
        let mut entries = self.entries.write().unwrap_or_else(PoisonError::into_inner);
        let Some(at) = entries.places.remove(&address(disk)) else {
            return;
        };
        if let Some(entry) = entries.all.get_mut(at) {
            *entry = None;
        }
        drop(entries);
        let membership = self.memberships().remove(&at);
        drop(membership);
    }
}
