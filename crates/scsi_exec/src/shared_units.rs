//! Logical units on disks whose state other daemons share: what the device says of it reaches the unit, and aborts that follow from it
//! reach everybody who runs tasks here.
//!
//! Control plane: called on threads of the device. Tests: `tests/tests/rbd_reservations.rs`.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use bdev::{Disk, StateMembership, StateObserver};
use block::Identity;
use latency::Clock;
use scsi::{LogicalUnit, Store};

use crate::runners::{Call, Want};
use crate::{Runners, Units};

const _: () = assert!(bdev::STATE_MAX == scsi::SHARED_STATE_MAX);

/// The store's key for the number by which other daemons know this one.
const DAEMON: &str = "daemon";

/// The number of this daemon: made once, and kept with what else survives a restart.
fn daemon(store: &dyn Store) -> u128 {
    let kept = store.load(DAEMON).unwrap_or_else(|error| {
        tracing::error!(%error, "number of this daemon lost, initiators must register again");
        None
    });
    let kept = kept.and_then(|bytes| Some(u128::from_be_bytes(bytes.try_into().ok()?)));
    kept.filter(|number| *number != 0).unwrap_or_else(|| {
        let number = Identity::random().bits();
        // The store says what it cannot keep: then initiators have to register anew after a restart.
        store.save(DAEMON, &number.to_be_bytes()).ok();
        number
    })
}

/// Takes part in the state that a disk's device shares, if it does, for as long as what is returned is kept.
pub(crate) fn join(
    units: &Weak<Units>,
    disk: &Disk,
    unit: &Arc<LogicalUnit>,
    store: &dyn Store,
    runners: &Arc<Runners>,
) -> Option<StateMembership> {
    let device = disk.device();
    let state = device.shared_state()?;
    let daemon = daemon(store);
    // Asked for each command of such a unit, which is one of a cluster's image.
    unit.share_reservations(daemon, || Clock::shared().elapsed());
    let observer = Observer {
        units: units.clone(),
        unit: Arc::downgrade(unit),
        daemon,
        runners: Arc::clone(runners),
        aborting: Arc::default(),
    };
    Some(state.join(Arc::new(observer)))
}

struct Observer {
    units: Weak<Units>,
    unit: Weak<LogicalUnit>,
    daemon: u128,
    runners: Arc<Runners>,
    /// Calls for aborts that have not ended.
    aborting: Arc<AtomicUsize>,
}

impl StateObserver for Observer {
    fn changed(&self, version: u64, state: &[u8]) -> Result<(), String> {
        let Some(unit) = self.unit.upgrade() else {
            return Ok(());
        };
        if let Some(units) = self.units.upgrade()
            && units.has_unsaved_ports()
        {
            // Registrations name their ports by numbers, which have to be the same after a restart.
            units.store().save(DAEMON, &self.daemon.to_be_bytes()).ok();
        }
        if let Some(scope) = unit.adopt_reservations(version, state)? {
            self.aborting.fetch_add(1, Ordering::AcqRel);
            let aborting = Arc::clone(&self.aborting);
            let call = Call::of_scope(scope, Want::Abort);
            self.runners.call(&call, move || {
                aborting.fetch_sub(1, Ordering::AcqRel);
            });
        }
        Ok(())
    }

    fn is_settled(&self) -> bool {
        self.aborting.load(Ordering::Acquire) == 0
    }

    fn set_current(&self, current: bool) {
        if let Some(unit) = self.unit.upgrade() {
            unit.set_reservations_current(current);
        }
    }

    fn set_valid_until(&self, until: Duration) {
        if let Some(unit) = self.unit.upgrade() {
            unit.set_reservations_valid_until(until);
        }
    }

    fn after_power_on(&self, _version: u64, state: &[u8]) -> Option<Vec<u8>> {
        self.unit.upgrade()?.reservations_after_power_on(state)
    }
}

#[cfg(test)]
mod tests {
    use scsi::MemoryStore;

    use super::*;

    #[test]
    fn number_of_a_daemon_is_made_once_for_its_store() {
        let (store, other) = (MemoryStore::default(), MemoryStore::default());
        let number = daemon(&store);
        assert!(number != 0 && number == daemon(&store) && number != daemon(&other));
        store.save(DAEMON, b"short").unwrap();
        assert_ne!(daemon(&store), number);
    }
}
