//! A controller, as a front end configures it, and its targets, as the daemon fills them.

use std::any::Any;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bdev::Disk;
use latency::UnitAddress;
use reactor::{SourceId, WorkerHandle};
use scsi::{AttachError, LogicalUnit, LunAddress, Nexus, Target, TargetPort, TransportId};
use scsi_exec::{Call, Hold, Registration, Tasks, Units, Want, WorkMemory};
use virtio_device::{ConfigError, Protocol, Queue, QueueMaker, QueueSetup, VirtioDevice};

use crate::control::{self, ControlQueue};
use crate::events::{Event, EventQueue, Unheard, Wanted};
use crate::queue::RequestQueue;
use crate::request::Address;

/// VIRTIO_SCSI_F_HOTPLUG: units that come and go are told on the event queue.
const F_HOTPLUG: u64 = 1 << 1;
/// VIRTIO_SCSI_F_CHANGE: units that change are told on the event queue.
const F_CHANGE: u64 = 1 << 2;

const CONTROL: u16 = 0;
const EVENTS: u16 = 1;
const FIRST_REQUEST: u16 = 2;

/// Bytes that a controller's commands hold together.
const MEMORY: usize = 128 << 20;

/// How a controller is exported.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScsiOptions {
    /// The export's name, for logs and statistics, and a part of its nexuses' names.
    pub name: String,
    /// Request queues offered: 1 to 254; the control and event queues come on top.
    pub queues: u16,
}

/// A unit cannot be put where it was asked to be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LunError {
    /// The target asked for.
    pub target: u8,
    /// Why not.
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

pub(crate) type Place = (WorkerHandle, SourceId);

/// A queue on its worker; request queues hear of aborts.
struct Placed {
    place: Place,
    _hears: Option<Registration>,
}

/// A target and the front end's nexus to it.
pub(crate) type SeenTarget = (Arc<Target>, Arc<Nexus>);

/// What the controller and its queues share.
pub(crate) struct Shared {
    name: String,
    pub units: Arc<Units>,
    /// Changes whenever a target or a nexus comes or goes.
    pub generation: AtomicU64,
    targets: Mutex<Vec<Option<Entry>>>,
    queues: Mutex<Vec<Option<Placed>>>,
    pub memory: Arc<WorkMemory>,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    /// Every target with the front end's nexus to it, and the generation that they belong to.
    pub fn targets(&self) -> (u64, Vec<Option<SeenTarget>>) {
        let targets = lock(&self.targets);
        let seen =
            |entry: &Option<Entry>| entry.as_ref().map(|e| (e.target.clone(), e.nexus.clone()));
        (
            self.generation.load(Ordering::Acquire),
            targets.iter().map(seen).collect(),
        )
    }

    /// A target, with the front end's nexus to it.
    pub fn target(&self, number: u8) -> Option<SeenTarget> {
        let targets = lock(&self.targets);
        let entry = targets.get(usize::from(number))?.as_ref()?;
        Some((entry.target.clone(), entry.nexus.clone()))
    }

    /// Is there such a unit? `None`: not even the target.
    pub fn has_unit(&self, address: &Address) -> Option<bool> {
        let targets = lock(&self.targets);
        let entry = targets.get(usize::from(address.target))?.as_ref()?;
        let is_well_known = address.lun.address() == LunAddress::ReportLuns;
        Some(is_well_known || entry.target.view().unit(address.lun).is_some())
    }

    pub fn request_queues(&self) -> Vec<Place> {
        lock(&self.queues)
            .iter()
            .skip(usize::from(FIRST_REQUEST))
            .flatten()
            .map(|queue| queue.place.clone())
            .collect()
    }

    fn nexus(&self, target: &Arc<Target>, port: &Arc<TargetPort>) -> Arc<Nexus> {
        // The same name after every restart: registrations belong to it.
        let initiator = TransportId::iscsi_device(&initiator_name(&self.name));
        target.attach_nexus(initiator, port.clone())
    }

    fn changed(&self) {
        self.generation.fetch_add(1, Ordering::AcqRel);
    }
}

/// The name of the guest behind a controller. iSCSI names have no case, controllers' names have: a number that says which letters
/// are capitals keeps `Vm` and `vm` two initiators.
fn initiator_name(controller: &str) -> String {
    let capitals = controller.bytes().enumerate();
    let capitals = capitals.filter(|(_, byte)| byte.is_ascii_uppercase());
    let places = capitals.fold(0u64, |places, (at, _)| places | 1 << (at % 64));
    let name = format!("iqn.2026-11.org.lunette:{controller}");
    match places {
        0 => name,
        places => format!("{name}:{places:x}"),
    }
}

/// A virtio-scsi controller.
pub struct ScsiDevice {
    queues: u16,
    shared: Arc<Shared>,
    unheard: Arc<Unheard>,
}

impl ScsiDevice {
    /// A controller without units.
    pub fn new(units: Arc<Units>, options: ScsiOptions) -> ScsiDevice {
        let shared = Shared {
            name: options.name,
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

    /// Puts a disk at a target and LUN, and tells a driver that is there.
    ///
    /// # Errors
    /// When the LUN is taken or above 16,383.
    pub fn add_lun(&self, target: u8, lun: u16, disk: &Arc<Disk>) -> Result<(), LunError> {
        self.add_luns(&[(target, lun, disk.clone())])
    }

    /// Puts disks at targets and LUNs, each target's all or none, and tells a driver that is there.
    ///
    /// # Errors
    /// When a LUN is taken or above 16,383.
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

    /// The target of this number, made when it is not there yet.
    fn target(&self, number: u8) -> Arc<Target> {
        let mut targets = lock(&self.shared.targets);
        let index = usize::from(number);
        if targets.len() <= index {
            targets.resize_with(index + 1, || None);
        }
        let entry = targets[index].get_or_insert_with(|| {
            let name = format!("vhost-scsi {} target {number}", self.shared.name);
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

    /// Takes a disk away; false when there was none. The driver is told; commands get "logical unit not supported".
    pub fn remove_lun(&self, target: u8, lun: u16) -> bool {
        let removed = self.detach_lun(target, lun);
        if removed {
            self.post(Event::Removed, target, lun);
        }
        removed
    }

    /// The first half of [`ScsiDevice::remove_lun`]: commands are refused from now on, and the driver is not told yet.
    pub fn detach_lun(&self, target: u8, lun: u16) -> bool {
        let targets = lock(&self.shared.targets);
        let entry = targets.get(usize::from(target)).and_then(Option::as_ref);
        let removed = entry.and_then(|entry| entry.target.detach_unit(lun));
        self.shared.changed();
        removed.is_some()
    }

    /// `hold` is kept until no task of these units is in flight any more; with `abort` the tasks are aborted.
    pub fn end_tasks(&self, luns: &[(u8, u16)], abort: bool, hold: &Hold) {
        let units = luns.iter();
        let units = units.map(|&(target, lun)| UnitAddress { target, lun });
        let want = if abort { Want::Remove } else { Want::End };
        let call = Call::new(Tasks::Units(units.collect()), want);
        for queue in self.shared.request_queues() {
            control::ask(&queue, &call, hold.clone());
        }
    }

    /// Tells the driver, if one is there and has an event queue.
    pub fn post(&self, event: Event, target: u8, lun: u16) {
        let place = lock(&self.shared.queues)
            .get(usize::from(EVENTS))
            .and_then(Option::as_ref)
            .map(|queue| queue.place.clone());
        let Some((worker, source)) = place else {
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

    /// Empty: a vhost-user front end answers virtio-scsi's configuration space itself.
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
        // Another front end, or a driver that starts anew, is another nexus of the same name.
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
        if let Some(place) = lock(&self.shared.queues).get_mut(usize::from(index)) {
            *place = None;
        }
    }

    fn queue_placed(&self, index: u16, worker: &WorkerHandle, source: SourceId) {
        let mut queues = lock(&self.shared.queues);
        let index = usize::from(index);
        if queues.len() <= index {
            queues.resize_with(index + 1, || None);
        }
        let place = (worker.clone(), source);
        let carries_data = index >= usize::from(FIRST_REQUEST);
        let _hears = carries_data.then(|| {
            let runners = self.shared.units.runners();
            runners.register(control::runner(place.clone()))
        });
        queues[index] = Some(Placed { place, _hears });
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
