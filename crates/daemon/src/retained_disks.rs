//! Memory of RAM disks in the service manager's descriptor store, from the creation of a disk to its removal.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bdev::DescriptorStore;

use crate::notify::Notifier;

/// Prefix of the descriptor names, followed by the disk's name.
const PREFIX: &str = "ram.";

/// Returns the disk that a descriptor name belongs to.
pub fn retained_disk(name: &str) -> Option<&str> {
    name.strip_prefix(PREFIX)
}

/// Registers a store for the memory of RAM disks, before disks are opened. `passed` has the memory from the previous daemon; `notifier` is
/// the connection to the service manager, if any.
pub fn retain_disks(
    notifier: Option<Arc<Notifier>>,
    passed: Vec<(String, OwnedFd)>,
) -> RetainedMemory {
    let memory = Arc::new(Mutex::new(passed.into_iter().collect()));
    let retained = RetainedMemory(Arc::clone(&memory));
    bdev::set_descriptor_store(Box::new(RetainedDisks { notifier, memory }));
    retained
}

/// Memory of the RAM disks that outlive this daemon.
pub struct RetainedMemory(Arc<Mutex<HashMap<String, OwnedFd>>>);

impl RetainedMemory {
    /// Returns duplicates of all descriptors with their names.
    pub fn named(&self) -> Vec<(String, OwnedFd)> {
        let memory = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let named = memory.iter();
        let named =
            named.map(|(disk, memory)| Some((format!("{PREFIX}{disk}"), memory.try_clone().ok()?)));
        named.flatten().collect()
    }
}

struct RetainedDisks {
    notifier: Option<Arc<Notifier>>,
    memory: Arc<Mutex<HashMap<String, OwnedFd>>>,
}

impl RetainedDisks {
    fn memory(&self) -> MutexGuard<'_, HashMap<String, OwnedFd>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl DescriptorStore for RetainedDisks {
    fn take(&self, disk: &str) -> Option<OwnedFd> {
        self.memory().get(disk)?.try_clone().ok()
    }

    fn keep(&self, disk: &str, memory: BorrowedFd<'_>) -> bool {
        let mut retained = self.memory();
        let Some(notifier) = &self.notifier else {
            // Held in this process until the next daemon takes it over.
            if let Ok(own) = memory.try_clone_to_owned() {
                retained.entry(disk.to_owned()).or_insert(own);
            }
            return false;
        };
        if retained.contains_key(disk) {
            return true;
        }
        let stored = memory.try_clone_to_owned().and_then(|own| {
            notifier
                .store(&format!("{PREFIX}{disk}"), own.as_fd())
                .map(|()| own)
        });
        match stored {
            Ok(own) => {
                retained.insert(disk.to_owned(), own);
                true
            }
            Err(error) => {
                tracing::warn!(
                    disk,
                    "cannot store the memory of the RAM disk with the service manager: {error}"
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
