//! Memory of RAM disks in the service manager's keeping (systemd's descriptor store): handed over when a disk is made, passed on to the
//! daemon that comes next, taken back when the disk is removed.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bdev::DescriptorStore;

use crate::notify::Notifier;

/// What the names of such descriptors begin with; the disk's name follows.
const PREFIX: &str = "ram.";

/// The disk whose memory a descriptor of this name is.
pub fn kept_disk(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)
}

/// From now on, and before disks are opened, the service manager keeps the memory of those that are to stay. `passed`: disks, with what
/// it has kept for them; `notifier`: the way to it, if there is one.
pub fn keep_disks(notifier: Option<Arc<Notifier>>, passed: Vec<(String, OwnedFd)>) -> KeptMemory {
    let memory = Arc::new(Mutex::new(passed.into_iter().collect()));
    let kept = KeptMemory(Arc::clone(&memory));
    bdev::set_descriptor_store(Box::new(KeptDisks { notifier, memory }));
    kept
}

/// The memory of RAM disks that are to stay.
pub struct KeptMemory(Arc<Mutex<HashMap<String, OwnedFd>>>);

impl KeptMemory {
    /// All of it, with the names under which it is kept.
    pub fn named(&self) -> Vec<(String, OwnedFd)> {
        let memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let named = memory.iter();
        let named =
            named.map(|(disk, memory)| Some((format!("{PREFIX}{disk}"), memory.try_clone().ok()?)));
        named.flatten().collect()
    }
}

/// What the service manager keeps.
struct KeptDisks {
    notifier: Option<Arc<Notifier>>,
    memory: Arc<Mutex<HashMap<String, OwnedFd>>>,
}

impl KeptDisks {
    fn memory(&self) -> MutexGuard<'_, HashMap<String, OwnedFd>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DescriptorStore for KeptDisks {
    fn take(&self, disk: &str) -> Option<OwnedFd> {
        self.memory().get(disk)?.try_clone().ok()
    }

    fn keep(&self, disk: &str, memory: BorrowedFd<'_>) -> bool {
        let mut kept = self.memory();
        let Some(notifier) = &self.notifier else {
            // The next daemon takes it over, if this one lives until then.
            if let Ok(own) = memory.try_clone_to_owned() {
                kept.entry(disk.to_owned()).or_insert(own);
            }
            return false;
        };
        if kept.contains_key(disk) {
            return true;
        }
        let stored = memory.try_clone_to_owned().and_then(|own| {
            notifier
                .store(&format!("{PREFIX}{disk}"), own.as_fd())
                .map(|()| own)
        });
        match stored {
            Ok(own) => {
                kept.insert(disk.to_owned(), own);
                true
            }
            Err(error) => {
                tracing::warn!(
                    disk,
                    "the service manager does not keep its memory: {error}"
                );
                false
            }
        }
    }

    fn forget(&self, disk: &str) {
        if self.memory().remove(disk).is_some()
            && let Some(notifier) = &self.notifier
        {
            notifier.remove_stored([&*format!("{PREFIX}{disk}")]);
        }
    }
}
