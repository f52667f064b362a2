//! All logical units of the daemon, and where their state survives a restart.
//!
//! One per daemon. A copy between two disks finds the other one here, whichever target it hangs on.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, Weak};

use crate::logical_unit::LogicalUnit;
use crate::sync::lock;

/// Saved state that exists and cannot be used: damaged, cut short or unreadable. It may have fenced or protected a disk, so its absence
/// must not be assumed. Names the place and the reason.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable(pub String);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Where state that has to survive a restart is kept: saved mode pages, registrations with APTPL, what drivers chose.
pub trait Store: Send + Sync {
    /// Loads the bytes saved last under this key; `None` if there are none.
    ///
    /// # Errors
    /// There are some, and they are not those that were saved.
    fn load(&self, key: &str) -> Result<Option<Vec<u8>>, Unusable>;
    /// Replaces what is under this key. Durable when it returns; may block, for it is called rarely.
    fn save(&self, key: &str, bytes: &[u8]) -> io::Result<()>;
    /// Removes what is under this key, which nobody loads any more. What cannot be removed stays.
    fn remove(&self, key: &str) {
        let _ = key;
    }
    /// Resets damaged state under this key: it counts as never saved from now on. The store may retain it elsewhere.
    ///
    /// # Errors
    /// The state is still there.
    fn set_aside(&self, key: &str) -> io::Result<()> {
        self.remove(key);
        Ok(())
    }
}

/// A store that lasts as long as the process: for tests, and where no state directory is configured.
#[derive(Debug, Default)]
pub struct MemoryStore(Mutex<HashMap<String, Vec<u8>>>);

impl Store for MemoryStore {
    fn load(&self, key: &str) -> Result<Option<Vec<u8>>, Unusable> {
        Ok(lock(&self.0).get(key).cloned())
    }

    fn save(&self, key: &str, bytes: &[u8]) -> io::Result<()> {
        lock(&self.0).insert(key.to_owned(), bytes.to_vec());
        Ok(())
    }

    fn remove(&self, key: &str) {
        lock(&self.0).remove(key);
    }
}

/// All logical units of the daemon.
pub struct Directory {
    units: Mutex<Vec<Weak<LogicalUnit>>>,
    store: Box<dyn Store>,
}

impl Directory {
    /// An empty directory over a store.
    pub fn new(store: Box<dyn Store>) -> Arc<Directory> {
        Arc::new(Directory {
            units: Mutex::new(Vec::new()),
            store,
        })
    }

    /// Where state is kept.
    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub(crate) fn add(&self, unit: &Arc<LogicalUnit>) {
        let mut units = lock(&self.units);
        if units.len() == units.capacity() {
            // Before it grows, so that many units cost no more than a look each.
            units.retain(|unit| unit.strong_count() > 0);
            let room = units.len().max(16);
            units.reserve(room);
        }
        units.push(Arc::downgrade(unit));
    }

    /// The logical unit with this NAA identifier.
    pub fn find_naa(&self, naa: u64) -> Option<Arc<LogicalUnit>> {
        lock(&self.units)
            .iter()
            .filter_map(Weak::upgrade)
            .find(|unit| unit.naa() == naa)
    }
}

impl fmt::Debug for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Directory")
            .field("units", &lock(&self.units).len())
            .finish_non_exhaustive()
    }
}
