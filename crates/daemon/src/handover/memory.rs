//! Memory of RAM disks in the service manager's descriptor store, from the creation of a disk to its removal.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bdev::DescriptorStore;

use super::{Handover, Item};
use crate::notify::Notifier;

/// Memory of the RAM disks that outlive this daemon.
#[derive(Clone)]
pub struct DiskMemory(Arc<Mutex<HashMap<String, OwnedFd>>>);

impl DiskMemory {
    /// Takes over the memory of RAM disks and registers the store for it, before disks are opened. `notifier` is the connection to the
    /// service manager, if any.
    pub fn take_over(handover: &mut Handover, notifier: Option<Arc<Notifier>>) -> DiskMemory {
        let memory = handover.take_memory().into_iter().collect();
        let memory = DiskMemory(Arc::new(Mutex::new(memory)));
        bdev::set_descriptor_store(Box::new(Store {
            notifier,
            memory: memory.clone(),
        }));
        memory
    }

    /// Adds duplicates of all descriptors to a handover.
    pub(crate) fn hand_over(&self, handover: &mut Handover) {
        for (disk, memory) in &*self.lock() {
            if let Ok(memory) = memory.try_clone() {
                handover.push(item(disk), memory);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, OwnedFd>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn item(disk: &str) -> Item {
    Item::Memory {
        disk: disk.to_owned(),
    }
}

struct Store {
    notifier: Option<Arc<Notifier>>,
    memory: DiskMemory,
}

impl DescriptorStore for Store {
    fn take(&self, disk: &str) -> Option<OwnedFd> {
        self.memory.lock().get(disk)?.try_clone().ok()
    }

    fn keep(&self, disk: &str, memory: BorrowedFd<'_>) -> bool {
        let mut all = self.memory.lock();
        let Some(notifier) = &self.notifier else {
            // Stays in this process until the next daemon takes it over.
            if let Ok(own) = memory.try_clone_to_owned() {
                all.entry(disk.to_owned()).or_insert(own);
            }
            return false;
        };
        if all.contains_key(disk) {
            return true;
        }
        let stored = memory.try_clone_to_owned().and_then(|own| {
            notifier
                .store(&item(disk).name(), own.as_fd())
                .map(|()| own)
        });
        match stored {
            Ok(own) => {
                all.insert(disk.to_owned(), own);
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
        if self.memory.lock().remove(disk).is_some()
            && let Some(notifier) = &self.notifier
        {
            notifier.remove_stored([&*item(disk).name()]);
        }
    }
}
