//! Space of the storage behind disks: bytes that their files occupy, and free bytes of the file system.
//!
//! A reader of the status starts the calls if the known values are older than [`AGE_MAX`]; an idle daemon makes none. The calls use the open
//! descriptors, on helper threads, because storage may not answer. Each location has at most one call at a time. While it does not answer,
//! its values are unknown.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use bdev::{Disk, LocalFiles, Space};

use crate::helper_threads::HelperThreads;
use crate::objects::Live;

/// Age of values after which they are read again.
const AGE_MAX: Duration = Duration::from_secs(5);
/// Maximum wait of a reader for new values.
const READER_PATIENCE: Duration = Duration::from_millis(100);
/// Duration of a call after which the location's values are unknown.
const CALL_PATIENCE: Duration = Duration::from_secs(1);

#[derive(Default)]
pub(crate) struct StorageSpace {
    locations: Arc<Locations>,
    threads: HelperThreads,
}

#[derive(Default)]
struct Locations {
    known: Mutex<BTreeMap<String, Location>>,
    answered: Condvar,
}

struct Location {
    asked: Instant,
    is_asked: bool,
    /// Space by name of the disk. `None`: the disk is on a block device, or the call failed.
    spaces: HashMap<String, Option<Space>>,
}

impl Locations {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Location>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl StorageSpace {
    /// Returns the space of each disk with known values. Waits at most [`READER_PATIENCE`].
    pub fn of_disks(&self, live: &Live) -> HashMap<String, Space> {
        let disks = by_location(live);
        let mut known = self.locations.lock();
        known.retain(|name, location| location.is_asked || disks.contains_key(name));
        let mut asked = Vec::new();
        for (name, disks) in disks {
            if known
                .get(&name)
                .is_some_and(|location| location.is_current(&disks))
            {
                continue;
            }
            let location = known.entry(name.clone()).or_insert_with(|| Location {
                asked: Instant::now(),
                is_asked: false,
                spaces: HashMap::new(),
            });
            location.asked = Instant::now();
            location.is_asked = self.ask(&name, disks);
            asked.push(name);
        }
        let waits = |known: &mut BTreeMap<String, Location>| {
            let mut asked = asked.iter().filter_map(|name| known.get(name));
            asked.any(|location| location.is_asked)
        };
        let answered = &self.locations.answered;
        let waited = answered.wait_timeout_while(known, READER_PATIENCE, waits);
        let (known, _) = waited.unwrap_or_else(PoisonError::into_inner);
        let answering = known.values().filter(|location| location.answers());
        let spaces = answering.flat_map(|location| &location.spaces);
        spaces
            .filter_map(|(name, space)| Some((name.clone(), (*space)?)))
            .collect()
    }

    /// Starts a thread that reads the space of a location's disks. Returns false if the kernel refuses it.
    fn ask(&self, name: &str, disks: BTreeMap<String, Weak<Disk>>) -> bool {
        let (locations, of) = (Arc::clone(&self.locations), name.to_owned());
        let read = move || {
            let spaces = disks.into_iter().map(|(name, disk)| {
                let space = disk.upgrade().and_then(|disk| space_of(&disk));
                (name, space)
            });
            let spaces = spaces.collect();
            if let Some(location) = locations.lock().get_mut(&of) {
                location.spaces = spaces;
                location.is_asked = false;
            }
            locations.answered.notify_all();
        };
        self.threads.run(name, read).is_ok()
    }
}

impl Location {
    /// Returns true if a call is running, or if the values are new enough and include these disks.
    fn is_current(&self, disks: &BTreeMap<String, Weak<Disk>>) -> bool {
        let has_all = disks.keys().all(|name| self.spaces.contains_key(name));
        self.is_asked || (has_all && self.asked.elapsed() < AGE_MAX)
    }

    fn answers(&self) -> bool {
        !self.is_asked || self.asked.elapsed() < CALL_PATIENCE
    }
}

/// Returns the disks in files of this host by the location of their storage.
fn by_location(live: &Live) -> BTreeMap<String, BTreeMap<String, Weak<Disk>>> {
    let mut all = BTreeMap::<_, BTreeMap<_, _>>::new();
    for config in &live.config.disks {
        if let Some(location) = config.backend.blocking_storage()
            && let Some(disk) = live.disks.get(&config.name)
            && disk.device().capabilities().files.is_some()
        {
            let disks = all.entry(location).or_default();
            disks.insert(config.name.clone(), Arc::downgrade(disk));
        }
    }
    all
}

/// May block.
fn space_of(disk: &Disk) -> Option<Space> {
    let device = disk.device();
    let space = device.capabilities().files.map(LocalFiles::space)?;
    space.unwrap_or_else(|error| {
        tracing::debug!(
            disk = disk.name(),
            "cannot read the space of the storage: {error}"
        );
        None
    })
}
