//! A virtio-scsi controller for front ends, and its targets and units for the daemon.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bdev::{Disk, release_deadline};
use latency::UnitAddress;
use reactor::{SourceId, WorkerHandle};
use scsi::{AttachError, LogicalUnit, LunAddress, Nexus, Target, TargetPort, TransportId};
use scsi_exec::{Call, Hold, Registration, TaskOperation, Tasks, Units, WorkMemory};
use virtio_device::{ConfigError, Protocol, Queue, QueueMaker, QueueSetup, VirtioDevice};

use crate::control::{self, ControlQueue};
use crate::events::{Event, EventQueue, Unheard, Wanted};
use crate::queue::RequestQueue;
use crate::request::Address;

/// VIRTIO_SCSI_F_HOTPLUG: the event queue reports added and removed units.
const F_HOTPLUG: u64 = 1 << 1;
/// VIRTIO_SCSI_F_CHANGE: the event queue reports changed units.
const F_CHANGE: u64 = 1 << 2;

const CONTROL: u16 = 0;
const EVENTS: u16 = 1;
const FIRST_REQUEST: u16 = 2;

/// Memory limit of a controller's commands in bytes.
const MEMORY: usize = 128 << 20;

/// Configuration of a controller.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScsiOptions {
    /// Export name, for logs and statistics.
    pub name: String,
    /// Number of request queues, 1 to 254, without the control and event queues.
    pub queues: u16,
}

/// Error of [`ScsiDevice::add_lun`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LunError {
    /// Requested target.
    pub target: u8,
    /// Cause.
    pub source: AttachError,
}

impl std::fmt::Display for LunError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "target {}: {}", self.target, self.source)
    }
}

impl std::error::Error for LunError {}

struct Entry {
    target: Arc<Target>,
    port: Arc<TargetPort>,
    nexus: Arc<Nexus>,
}

pub(crate) type QueueHandle = (WorkerHandle, SourceId);

/// A queue on its worker. Request queues are registered for task management.
struct PlacedQueue {
    handle: QueueHandle,
    _hears: Option<Registration>,
}

/// A target and the front end's nexus to it.
pub(crate) type SeenTarget = (Arc<Target>, Arc<Nexus>);

/// State shared by the controller and its queues.
pub(crate) struct ControllerState {
    name: String,
    /// Part of the names of the initiator and the target ports.
    nexus: String,
    pub units: Arc<Units>,
    /// Incremented when a target or a nexus changes.
    pub generation: AtomicU64,
    targets: Mutex<Vec<Option<Entry>>>,
    queues: Mutex<Vec<Option<PlacedQueue>>>,
    pub memory: Arc<WorkMemory>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl ControllerState {
    /// Returns all targets with the front end's nexuses, and their generation.
    pub fn targets(&self) -> (u64, Vec<Option<SeenTarget>>) {
        let targets = lock(&self.targets);
        let seen =
            |entry: &Option<Entry>| entry.as_ref().map(|e| (e.target.clone(), e.nexus.clone()));
        (
            self.generation.load(Ordering::Acquire),
            targets.iter().map(seen).collect(),
        )
    }

    /// Returns a target with the front end's nexus.
    pub fn target(&self, number: u8) -> Option<SeenTarget> {
        let targets = lock(&self.targets);
        let entry = targets.get(usize::from(number))?.as_ref()?;
        Some((entry.target.clone(), entry.nexus.clone()))
    }

    /// Returns true if the unit exists, or `None` if the target does not.
    pub fn has_unit(&self, address: &Address) -> Option<bool> {
        let targets = lock(&self.targets);
        let entry = targets.get(usize::from(address.target))?.as_ref()?;
        let is_well_known = address.lun.address() == LunAddress::ReportLuns;
        Some(is_well_known || entry.target.view().unit(address.lun).is_some())
    }

    pub fn request_queues(&self) -> Vec<QueueHandle> {
        lock(&self.queues)
            .iter()
            .skip(usize::from(FIRST_REQUEST))
            .flatten()
            .map(|queue| queue.handle.clone())
            .collect()
    }

    fn nexus(&self, target: &Arc<Target>, port: &Arc<TargetPort>) -> Arc<Nexus> {
        // The name is the same after every restart, because registrations belong to it.
        let initiator = TransportId::iscsi_device(&initiator_name(&self.nexus));
        target.attach_nexus(initiator, port.clone())
    }

    fn changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }
}

/// Returns the initiator name of a controller's guest. iSCSI names are case-insensitive, nexus names are not: a bit mask of the capital
/// letters distinguishes `Vm` and `vm`.
fn initiator_name(nexus: &str) -> String {
    let capitals = nexus.bytes().enumerate();
    let capitals = capitals.filter(|(_, byte)| byte.is_ascii_uppercase());
    let places = capitals.fold(0u64, |places, (at, _)| places | 1 << (at % 64));
    let name = format!("iqn.2026-11.org.lunette:{nexus}");
    match places {
        0 => name,
        places => format!("{name}:{places:x}"),
    }
}

/// A virtio-scsi controller.
pub struct ScsiDevice {
    queues: u16,
    shared: Arc<ControllerState>,
    unheard: Arc<Unheard>,
}

impl ScsiDevice {
    /// Creates a controller without units, with a nexus of its own.
    pub fn new(units: Arc<Units>, options: ScsiOptions) -> ScsiDevice {
        let nexus = options.name.clone();
        ScsiDevice::with_nexus(units, options, nexus)
    }

    /// Creates a controller without units. Its registrations and reservations are those of all controllers with this nexus.
    pub fn with_nexus(units: Arc<Units>, options: ScsiOptions, nexus: String) -> ScsiDevice {
        let shared = ControllerState {
            name: options.name,
            nexus,
            units,
            generation: AtomicU64::new(1),
            targets: Mutex::new(Vec::new()),
            queues: Mutex::new(Vec::new()),
            memory: WorkMemory::new(MEMORY),
        };
        ScsiDevice {
            queues: options.queues.clamp(1, 254) + FIRST_REQUEST,
            shared: Arc::new(shared),
            unheard: Arc::default(),
        }
    }

    /// Adds a disk at a target and LUN, and notifies the driver.
    ///
    /// # Errors
    /// Fails if the LUN is taken or above 16,383.
    pub fn add_lun(&self, target: u8, lun: u16, disk: &Arc<Disk>) -> Result<(), LunError> {
        self.add_luns(&[(target, lun, disk.clone())])
    }

    /// Adds disks at targets and LUNs, all or none of each target, and notifies the driver.
    ///
    /// # Errors
    /// Fails if a LUN is taken or above 16,383.
    pub fn add_luns(&self, luns: &[(u8, u16, Arc<Disk>)]) -> Result<(), LunError> {
        let mut by_target: BTreeMap<u8, Vec<(u16, Arc<LogicalUnit>)>> = BTreeMap::new();
        for (target, lun, disk) in luns {
            let unit = self.shared.units.unit(disk);
            by_target.entry(*target).or_default().push((*lun, unit));
        }
        for (target, units) in by_target {
            let attached = self.target(target).attach_units(units);
            self.shared.changed();
            attached.map_err(|source| LunError { target, source })?;
        }
        for (target, lun, _) in luns {
            self.post(Event::Added, *target, *lun);
        }
        Ok(())
    }

    /// Returns the disks of all logical units.
    fn disks(&self) -> Vec<Arc<Disk>> {
        let (_, targets) = self.shared.targets();
        let mut disks = Vec::new();
        for (target, _) in targets.into_iter().flatten() {
            let view = target.view();
            let units = view.map().iter();
            disks.extend(units.filter_map(|(_, unit)| self.shared.units.disk(unit.disk())));
        }
        disks
    }

    /// Returns the target of this number. Creates it if it does not exist.
    fn target(&self, number: u8) -> Arc<Target> {
        let mut targets = lock(&self.shared.targets);
        let index = usize::from(number);
        if targets.len() <= index {
            targets.resize_with(index + 1, || None);
        }
        let entry = targets[index].get_or_insert_with(|| {
            let name = format!("vhost-scsi {} target {number}", self.shared.nexus);
            let relative_id = self.shared.units.port_id(&name);
            let port = Arc::new(TargetPort {
                relative_id,
                group: relative_id,
                name: None,
                device_name: None,
                state_setters: scsi::StateSetters::default(),
            });
            let made = Target::new(vec![port.clone()]);
            let nexus = self.shared.nexus(&made, &port);
            Entry {
                target: made,
                port,
                nexus,
            }
        });
        entry.target.clone()
    }

    /// Removes a disk. Returns false if the LUN has none. Notifies the driver; later commands get "logical unit not supported".
    pub fn remove_lun(&self, target: u8, lun: u16) -> bool {
        let removed = self.detach_lun(target, lun);
        if removed {
            self.post(Event::Removed, target, lun);
        }
        removed
    }

    /// Does the first half of [`ScsiDevice::remove_lun`]: refuses commands, without notifying the driver.
    pub fn detach_lun(&self, target: u8, lun: u16) -> bool {
        let targets = lock(&self.shared.targets);
        let entry = targets.get(usize::from(target)).and_then(Option::as_ref);
        let removed = entry.and_then(|entry| entry.target.detach_unit(lun));
        self.shared.changed();
        removed.is_some()
    }

    /// Keeps `hold` until no task of these units is in flight; `abort` also aborts the tasks.
    pub fn end_tasks(&self, luns: &[(u8, u16)], abort: bool, hold: &Hold) {
        let units = luns.iter();
        let units = units.map(|&(target, lun)| UnitAddress { target, lun });
        let operation = if abort {
            TaskOperation::Remove
        } else {
            TaskOperation::End
        };
        let call = Call::new(Tasks::Units(units.collect()), operation);
        for queue in self.shared.request_queues() {
            control::send_call(&queue, &call, hold.clone());
        }
    }

    /// Notifies the driver, if it has an event queue.
    pub fn post(&self, event: Event, target: u8, lun: u16) {
        let handle = lock(&self.shared.queues)
            .get(usize::from(EVENTS))
            .and_then(Option::as_ref)
            .map(|queue| queue.handle.clone());
        let Some((worker, source)) = handle else {
            self.unheard.note();
            return;
        };
        let unheard = self.unheard.clone();
        worker.send(move |w| {
            if let Some((queue, _io)) = w.source(source)
                && let Some(queue) = (queue as &mut dyn Any).downcast_mut::<Queue<EventQueue>>()
            {
                queue.protocol().post(event, target, lun);
            } else {
                unheard.note();
            }
            w.wake(source);
        });
    }
}

fn maker<P: Protocol>(
    setup: QueueSetup,
    protocol: impl FnOnce() -> P + Send + 'static,
) -> QueueMaker {
    Box::new(move |io, id| {
        let queue = Queue::new(setup, id, io.clock(), protocol());
        Ok(queue.map_err(|error| error.to_string())?.built())
    })
}

impl VirtioDevice for ScsiDevice {
    fn name(&self) -> &str {
        &self.shared.name
    }

    fn features(&self) -> u64 {
        F_HOTPLUG | F_CHANGE
    }

    fn queue_count(&self) -> u16 {
        self.queues
    }

    /// Empty: a vhost-user front end implements the configuration space of virtio-scsi itself.
    fn config(&self) -> Vec<u8> {
        Vec::new()
    }

    fn write_config(&self, offset: u32, data: &[u8]) -> Result<(), ConfigError> {
        Err(ConfigError {
            offset,
            length: data.len(),
        })
    }

    fn packed(&self) -> bool {
        true
    }

    fn reset(&self) {
        // Another front end or a restarted driver is a new nexus of the same name.
        for entry in lock(&self.shared.targets).iter_mut().flatten() {
            entry.target.detach_nexus(&entry.nexus);
            entry.nexus = self.shared.nexus(&entry.target, &entry.port);
        }
        self.shared.changed();
    }

    fn forget_driver(&self) {
        self.unheard.forget();
    }

    fn carries_data(&self, index: u16) -> bool {
        index >= FIRST_REQUEST
    }

    fn queue(&self, setup: QueueSetup, worker: &WorkerHandle) -> QueueMaker {
        let (shared, worker) = (self.shared.clone(), worker.clone());
        match setup.index {
            CONTROL => maker(setup, move || ControlQueue::new(shared, worker)),
            EVENTS => {
                let unheard = self.unheard.clone();
                let wanted = Wanted {
                    hotplug: setup.features & F_HOTPLUG != 0,
                    change: setup.features & F_CHANGE != 0,
                };
                maker(setup, move || EventQueue::new(unheard, wanted))
            }
            _ => maker(setup, move || RequestQueue::new(shared, worker)),
        }
    }

    fn queue_stopped(&self, index: u16) {
        if let Some(handle) = lock(&self.shared.queues).get_mut(usize::from(index)) {
            *handle = None;
        }
    }

    fn wait_for_release(&self) {
        // One deadline for all disks: their lock service may be the same.
        let until = release_deadline();
        for disk in self.disks() {
            disk.wait_for_release(until);
        }
    }

    fn queue_placed(&self, index: u16, worker: &WorkerHandle, source: SourceId) {
        let mut queues = lock(&self.shared.queues);
        let index = usize::from(index);
        if queues.len() <= index {
            queues.resize_with(index + 1, || None);
        }
        let handle = (worker.clone(), source);
        let carries_data = index >= usize::from(FIRST_REQUEST);
        let _hears = carries_data.then(|| {
            let runners = self.shared.units.runners();
            runners.register(control::runner(handle.clone()))
        });
        queues[index] = Some(PlacedQueue { handle, _hears });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn controllers_whose_names_differ_in_case_are_two_initiators() {
        assert_eq!(initiator_name("c0"), "iqn.2026-11.org.lunette:c0");
        let device = |name| TransportId::iscsi_device(&initiator_name(name));
        assert_ne!(device("vm1"), device("Vm1"));
        assert_ne!(device("vM1"), device("Vm1"));
        assert_eq!(device("Vm1"), device("Vm1"));
    }
}
