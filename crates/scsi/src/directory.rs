//! All logical units of the daemon, and the store for state that survives a restart.
//!
//! One per daemon. A copy between two disks looks up the other unit here, in all targets.

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, Weak};

use crate::logical_unit::LogicalUnit;
use crate::sync::lock;

/// Reason why existing saved state cannot be used: damaged, truncated or unreadable, with its location. It may have fenced or protected a
/// disk, so it must not be treated as absent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Unusable(pub String);

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Store for state that must survive a restart: saved mode pages, registrations with APTPL, settings made by drivers.
pub trait Store: Send + Sync {
    /// Loads the bytes last saved under this key; `None` if there are none.
    ///
    /// # Errors
    /// There are bytes, but they are not the saved ones.
    fn load(&self, key: &str) -> Result<Option<Vec<u8>>, Unusable>;
    /// Replaces the bytes under this key. Durable when it returns; may block, because it is rarely called.
    fn save(&self, key: &str, bytes: &[u8]) -> io::Result<()>;
    /// Removes the bytes under this key, which are not needed any more. Errors are ignored.
    fn remove(&self, key: &str) {
        let _ = key;
    }
    /// Resets damaged state under this key: it counts as never saved from now on. The store may retain it elsewhere.
    ///
    /// # Errors
    /// The state is still there.
    fn discard_damaged(&self, key: &str) -> io::Result<()> {
        self.remove(key);
        Ok(())
    }
}

/// A store in memory: for tests, and if no state directory is configured.
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
    /// Creates an empty directory on a store.
    pub fn new(store: Box<dyn Store>) -> Arc<Directory> {
        Arc::new(Directory {
            units: Mutex::new(Vec::new()),
            store,
        })
    }

    /// Returns the store.
    pub fn store(&self) -> &dyn Store {
        &*self.store
    }

    pub(crate) fn add(&self, unit: &Arc<LogicalUnit>) {
        let mut units = lock(&self.units);
        if units.len() == units.capacity() {
            // Cleans up before the list grows, so that the cost per unit is constant on average.
            units.retain(|unit| unit.strong_count() > 0);
            let room = units.len().max(16);
            units.reserve(room);
        }
        units.push(Arc::downgrade(unit));
    }

    /// Returns the logical unit with this NAA identifier.
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
